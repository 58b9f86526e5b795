"""Sequences in one row of tokens: packed by offsets, or padded rows of which a part is used."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..caches import TensorCache, stamp_of_numbers
from ..mods import Mask
from ..mods.base import value
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
        """Return where every sequence begins, and how many tokens it has."""
        if self.cu is not None:
            # A copy: the caller may write to the offsets before the backward.
            starts = self.cu[:-1].to(torch.int64, copy=True)
            counts = self.cu.diff().long()
        else:
            starts = torch.arange(self.sequences, device=device) * self.row
            counts = torch.full_like(starts, self.row)
        return starts, counts if self.used is None else torch.minimum(counts, self.used.long())

    def rows_of_tokens(self, device: torch.device) -> Tensor:
        """Return the sequence of every token; those after the last one count as its."""
        token = torch.arange(self.tokens, device=device)
        if self.cu is None:
            return token // max(self.row, 1)
        ends = self.cu[1:].long().contiguous()
        return torch.searchsorted(ends, token, right=True).clamp(max=self.sequences - 1)


class PackedSequences(NamedTuple):
    """The mask of packed sequences, and the tensors that scores read."""

    mask: Mask
    row: Tensor  # (tokens of q,) the sequence of every query
    diagonal: Tensor  # (tokens of q,) the key on the diagonal of every query
    first_q: Tensor  # (sequences,)
    first_k: Tensor  # (sequences,)


_known: TensorCache[PackedSequences] = TensorCache(64, stamp_of_numbers)


def pack(q: Side, k: Side, device: torch.device, limits: Limits, chunk: int) -> PackedSequences:
    """Return which keys each query sees, and what scores read, from a cache."""
    q.check(device)
    k.check(device)
    if q.sequences != k.sequences:
        raise CallError(
            f"q has {q.sequences} sequences and k {k.sequences}: the offsets, the numbers of used "
            "tokens or the rows of the tensors differ"
        )
    tensors = [x for side in (q, k) for x in (side.cu, side.used) if x is not None]
    if torch.compiler.is_compiling() or not all(map(_holds_numbers, tensors)):
        return _new_packed(q, k, device, limits, chunk)

    def checked() -> PackedSequences:
        q.check_lengths()
        k.check_lengths()
        with torch.inference_mode(False):  # fit to be saved for a backward, and to be cached
            return _new_packed(q, k, device, limits, chunk)

    if not tensors:
        return checked()
    sizes = [(x.tokens, x.rows, x.longest, x.cu is None, x.used is None) for x in (q, k)]
    return _known.of(tensors, (*sizes, limits, chunk), checked)


def _holds_numbers(x: Tensor) -> bool:
    return not x.is_meta and type(x).__name__ != "FakeTensor"


def _new_packed(
    q: Side, k: Side, device: torch.device, limits: Limits, chunk: int
) -> PackedSequences:
    (first_q, q_count), (first_k, k_count) = (x.starts_and_counts(device) for x in (q, k))
    row = q.rows_of_tokens(device)
    place = torch.arange(q.tokens, device=device) - first_q[row]
    offset, start = (k_count - q_count)[row], first_k[row]
    diagonal = start + place + offset  # the last query of a sequence meets its last key
    first, last = start, start + k_count[row] - 1
    left, right = limits
    if left is not None:
        first = torch.maximum(first, diagonal - left)
    if right is not None:
        last = torch.minimum(last, diagonal + right)
    if chunk:
        first_of_chunk = diagonal - (place + offset).remainder(chunk)
        first = torch.maximum(first, first_of_chunk)
        last = torch.minimum(last, first_of_chunk + chunk - 1)
    last = torch.where(place < q_count[row], last, -1)  # queries of no sequence see nothing
    return PackedSequences(span(first, last), row, diagonal, first_q, first_k)
