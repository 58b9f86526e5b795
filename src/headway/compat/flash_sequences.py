"""Sequences in one row of tokens: packed by offsets, or padded rows of which a part is used."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..caches import TensorCache, stamp_of_numbers
from ..mods import Mask
from ..mods.base import value
from ..packed import places_of_tokens
from .errors import CallError
from .flash_parts import Limits, shown


@value
class span(Mask):
    """`first[i] <= j <= last[i]`: every query sees one stretch of keys."""

    first: Tensor
    last: Tensor

    def __call__(self, b, h, q_idx, kv_idx):
        return (kv_idx >= self.first[q_idx]) & (kv_idx <= self.last[q_idx])


class SideNames(NamedTuple):
    """The names of the caller's arguments, before `_q` and `_k`."""

    offsets: str = "cu_seqlens"
    used: str = "seqused"
    longest: str = "max_seqlen"


class Side(NamedTuple):
    """The sequences of the queries, or of the keys, in a row of tokens.

    Packed by offsets `cu`, or in `rows` of `row` tokens; `used` says how many of each are there.
    """

    name: str  # "q" or "k"
    tokens: int
    cu: Tensor | None
    used: Tensor | None
    rows: int = 0  # where they are padded: how many rows there are,
    row: int = 0  # and how long each is
    longest: int | None = None  # no sequence is longer, as the caller says
    names: SideNames = SideNames()

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        return self.rows if self.cu is None else self.cu.shape[0] - 1

    def check(self, device: torch.device) -> None:
        """Check kinds, shapes and devices."""
        for name, x, size in (
            (self.names.offsets, self.cu, None),
            (self.names.used, self.used, self.sequences),
        ):
            if x is None:
                continue
            axes = "(sequences + 1,)" if size is None else f"(sequences,) = ({size},)"
            fits = isinstance(x, Tensor) and x.dim() == 1
            if not fits or (x.shape[0] < 2 if size is None else x.shape[0] != size):
                raise CallError(f"{name}_{self.name} must be an int tensor {axes}, got {shown(x)}")
            if x.dtype not in (torch.int32, torch.int64):
                raise CallError(f"{name}_{self.name} must be int32, got {x.dtype}")
            if x.device != device:
                raise CallError(f"{name}_{self.name} is on {x.device}, {self.name} on {device}")

    def check_lengths(self) -> None:
        """Check the numbers, where the host can read them."""
        room = None
        if self.cu is not None and self.cu.is_cpu:
            room = self.cu.diff()
            ends = int(self.cu[0]), int(self.cu[-1])
            if ends[0] or ends[1] > self.tokens or bool((room < 0).any()):
                seen = self.cu.tolist() if len(self.cu) < 12 else ends
                raise CallError(
                    f"{self.names.offsets}_{self.name} must rise from 0 to at most {self.tokens}, "
                    f"the length of {self.name}, got {seen}"
                )
        counts = room
        if self.used is not None and self.used.is_cpu:
            most = self.row if room is None else room
            wrong = (self.used < 0) | (self.used > most)
            if (self.cu is None or room is not None) and bool(wrong.any()):
                n = int(wrong.nonzero()[0, 0])
                has = self.row if room is None else int(room[n])
                raise CallError(
                    f"{self.names.used}_{self.name}[{n}] = {int(self.used[n])}, but that "
                    f"sequence has room for {has}"
                )
            counts = self.used
        if counts is not None and self.longest is not None and int(counts.max()) > self.longest:
            raise CallError(
                f"{self.names.longest}_{self.name}={self.longest}, but the longest sequence has "
                f"{int(counts.max())}"
            )

    def starts_and_counts(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return where every sequence begins, and where the last one ends, int64
        `(sequences + 1,)`, and how many tokens of each are there."""
        if self.cu is not None:
            starts = self.cu.long()
        else:
            starts = torch.arange(self.sequences + 1, device=device) * self.row
        counts = starts.diff()
        return starts, counts if self.used is None else torch.minimum(counts, self.used.long())

    def lies_as(self, other: "Side") -> bool:
        """Return whether the tokens of both have the same places in the same sequences."""
        same = self.cu is other.cu and self.used is other.used
        return same and (self.tokens, self.row) == (other.tokens, other.row)

    def rows_of_tokens(self, device: torch.device) -> Tensor:
        """Return the sequence of every token; those after the last one count as its."""
        token = torch.arange(self.tokens, device=device)
        if self.cu is None:
            return token // max(self.row, 1)
        ends = self.cu[1:].long().contiguous()
        return torch.searchsorted(ends, token, right=True).clamp(max=self.sequences - 1)


class PackedSequences(NamedTuple):
    """The mask of packed sequences, and the tensors that scores and masks of theirs read."""

    mask: Mask
    ids: Tensor  # (tokens of q,) the sequence of every query, -1 for none
    places: tuple[Tensor, Tensor, Tensor, Tensor | None] | None  # first fields of `PackedMask`
    diagonal: Tensor  # (tokens of q,) the key on the diagonal of every query


_known: TensorCache[PackedSequences] = TensorCache(64, stamp_of_numbers)


def pack(
    q: Side, k: Side, device: torch.device, limits: Limits, chunk: int, placed: bool = False
) -> PackedSequences:
    """Return which keys each query sees, and what scores read, from a cache.

    - `placed`: whether a score or mask reads places in the sequences.
    """
    q.check(device)
    k.check(device)
    if q.sequences != k.sequences:
        raise CallError(
            f"q has {q.sequences} sequences and k {k.sequences}: the offsets, the numbers of used "
            "tokens or the rows of the tensors differ"
        )
    tensors = [x for side in (q, k) for x in (side.cu, side.used) if x is not None]
    if torch.compiler.is_compiling() or not all(map(_holds_numbers, tensors)):
        return _new_packed(q, k, device, limits, chunk, placed)

    def checked() -> PackedSequences:
        q.check_lengths()
        k.check_lengths()
        with torch.inference_mode(False):  # fit to be saved for a backward, and to be cached
            return _new_packed(q, k, device, limits, chunk, placed)

    if not tensors:
        return checked()
    sizes = [(x.tokens, x.rows, x.longest, x.cu is None, x.used is None) for x in (q, k)]
    return _known.of(tensors, (*sizes, limits, chunk, placed), checked)


def _holds_numbers(x: Tensor) -> bool:
    return not x.is_meta and type(x).__name__ != "FakeTensor"


def _new_packed(
    q: Side, k: Side, device: torch.device, limits: Limits, chunk: int, placed: bool
) -> PackedSequences:
    (q_starts, q_counts), (k_starts, k_counts) = (x.starts_and_counts(device) for x in (q, k))
    ids, pos = places_of_tokens(q.tokens, q_starts, q_counts, outside=-1)
    places = None
    if placed and q.lies_as(k):
        places = ids, torch.where(ids < 0, -2, ids), pos, None
    elif placed:
        kv_ids, kv_pos = places_of_tokens(k.tokens, k_starts, k_counts, outside=-2)
        places = ids, kv_ids, pos, kv_pos
    row = ids.clamp_min(0)
    start, place = k_starts[row], pos + (k_counts - q_counts)[row]
    diagonal = start + place  # the last query of a sequence meets its last key
    first, last = start, start + k_counts[row] - 1
    left, right = limits
    if left is not None:
        first = torch.maximum(first, diagonal - left)
    if right is not None:
        last = torch.minimum(last, diagonal + right)
    if chunk:
        first_of_chunk = diagonal - place.remainder(chunk)
        first = torch.maximum(first, first_of_chunk)
        last = torch.minimum(last, first_of_chunk + chunk - 1)
    last = torch.where(ids < 0, -1, last)  # queries of no sequence see nothing
    return PackedSequences(span(first, last), ids, places, diagonal)
