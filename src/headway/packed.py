"""Attention over sequences of different lengths, without padding: packed rows and nested tensors.

All sequences are one row of the batch, one after the other. `PackedMask` and `PackedScore` tell
score and mask the sequence of each token and its position there. Where sequences begin is read on
the device alone.
"""

from itertools import pairwise
from typing import Any, NamedTuple, Never

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .arguments import check_function, check_sizes, count_of, shown
from .blocks import BlockMask
from .caches import TensorCache, stamp_of_numbers
from .distributed.context import tell_refusal
from .errors import ArgumentError
from .keywords import unknown_keywords
from .mods.base import MaskFn, ScoreFn
from .mods.library.packed import KeptLogit, PackedMask, PackedScore
from .row_statistics import asking_for, with_statistics
from .run import run, run_out
from .surroundings import dispatch_modes, host_can_read, transforms
from .types import AttentionOutput, Request


def varlen_attention(
    q: Tensor,  # (tokens, hq, d)
    k: Tensor,  # (kv_tokens, hk, d)
    v: Tensor,  # (kv_tokens, hk, dv)
    score: ScoreFn | None = None,
    mask: MaskFn | None = None,
    *,
    cu_q: Tensor,  # (sequences + 1,)
    cu_k: Tensor | None = None,  # (sequences + 1,)
    max_q: int,
    max_k: int | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,  # (hq,)
    dropout: float = 0.0,
    seed: int | Tensor | None = None,  # ()
    deterministic: bool = False,
    backend: str = "auto",
    **unknown: Never,
) -> Tensor:
    """`attention` over packed sequences of different lengths: nothing is padded.

    Sequence n has the queries `q[cu_q[n]:cu_q[n + 1]]` and the keys `k[cu_k[n]:cu_k[n + 1]]`. It
    attends to itself alone. Score and mask see it as a batch row of its own: b is n, and q_idx and
    kv_idx count from its first query and key, so `causal()` is aligned at the top left of each.

    **Arguments:** as `attention`, and

    - `q`, `k`, `v`: `(tokens, hq, d)`, `(kv_tokens, hk, d)` and `(kv_tokens, hk, dv)`.
    - `mask`: no block mask, whose tiles would be those of one packing.
    - `cu_q`, `cu_k`: int32 or int64 `(sequences + 1,)` on q's device, rising from 0. They are read
      on the device; on the CPU they are checked. Sequences may have no tokens. Tokens from the last
      offset on belong to no sequence: they attend to nothing, and nothing attends to them. Without
      `cu_k` keys are packed as queries are. You may write to both between replays of a CUDA graph.
    - `max_q`, `max_k`: no sequence has more queries, or keys (needed with `cu_k`); checked on the
      CPU.
    - `dropout`: drops pairs by their places among all packed tokens.

    **Returns:** `(tokens, hq, dv)`, the dtype of q.
    """
    if unknown:
        raise unknown_keywords(varlen_attention, unknown)
    packing = _packing_of(q, k, v, cu_q, cu_k, max_q, max_k)
    request = packing.request(
        Request(_row(q), _row(k), _row(v), score, mask, scale, sink, dropout, seed, deterministic,
                backend)
    )  # fmt: skip
    return run_out(request)[0].transpose(0, 1)


def varlen_attention_with_stats(
    q: Tensor,  # (tokens, hq, d)
    k: Tensor,  # (kv_tokens, hk, d)
    v: Tensor,  # (kv_tokens, hk, dv)
    score: ScoreFn | None = None,
    mask: MaskFn | None = None,
    *,
    cu_q: Tensor,  # (sequences + 1,)
    cu_k: Tensor | None = None,  # (sequences + 1,)
    max_q: int,
    max_k: int | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,  # (hq,)
    dropout: float = 0.0,
    seed: int | Tensor | None = None,  # ()
    deterministic: bool = False,
    backend: str = "auto",
    entropy: bool = False,
    sink_mass: bool = False,
    **unknown: Never,
) -> AttentionOutput:
    """`varlen_attention`, with lse `(hq, tokens)`, differentiable, and max_logit `(hq,)`, the
    largest over all sequences.

    The same arguments and errors as `varlen_attention`, and `entropy` and `sink_mass` of
    `attention_with_stats`, `(hq, tokens)`.
    """
    if unknown:
        raise unknown_keywords(varlen_attention_with_stats, unknown)
    packing = _packing_of(q, k, v, cu_q, cu_k, max_q, max_k)
    request = packing.request(
        Request(_row(q), _row(k), _row(v), score, mask, scale, sink, dropout, seed, deterministic,
                backend, True)
    )  # fmt: skip
    wanted = {"entropy": entropy, "sink_mass": sink_mass}
    request = asking_for(request, wanted)
    results = run(request)
    out, lse, max_logit = (x[0] for x in results[:3])
    result = AttentionOutput(out.transpose(0, 1), lse, max_logit)
    return with_statistics(request, result, results, wanted, lambda x: x[0])


def _row(x: Any) -> Any:
    """Return packed tokens as one row, `(1, heads, tokens, width)`."""
    return x.transpose(0, 1)[None]


# -- nested tensors -------------------------------------------------------------------------------


def any_jagged(*tensors: Any) -> bool:
    """Return whether one of the tensors is nested, of layout `torch.jagged`."""
    return any(isinstance(x, Tensor) and x.is_nested and _is_jagged(x) for x in tensors)


def _is_jagged(x: Tensor) -> bool:
    return x.layout == torch.jagged


def nested_attention(request: Request) -> Tensor:
    """Return `attention` of jagged q, k and v, `(sequences, heads, ragged length, width)`."""
    return _nested(run_out(packed_request(request))[0], request.q)


def packed_request(request: Request) -> Request:
    """Return the request for the packed row that jagged q, k and v are."""
    packing, packed = _of_nested(request)
    return packing.request(packed)


def nested_attention_with_stats(request: Request, wanted: dict[str, Any]) -> AttentionOutput:
    """Return `attention_with_stats` of jagged q, k and v: out and lse are jagged as q is, max_logit
    is `(sequences, hq)`."""
    packing, packed = _of_nested(request)
    row = asking_for(packing.request(packed), wanted)
    results = run(row._replace(row_max=True))
    row_max = results.row_max
    if request.score is not None:  # row_max is of what the score returns
        logits = packed._replace(
            q=packed.q.detach(), k=packed.k.detach(), v=packed.v.detach(), sink=None, dropout=0.0,
            score=KeptLogit(request.score), row_max=True, auxiliary=True,
        )  # fmt: skip
        with torch.no_grad():
            row_max = run(packing.request(logits)).row_max
    sequence = packing.ids.clamp_min(0).long()
    max_logit = row_max.new_full((packing.sequences, row_max.shape[1]), -torch.inf)
    index = sequence[:, None].expand(-1, row_max.shape[1])
    max_logit = max_logit.scatter_reduce(0, index, row_max[0].T, "amax")
    nested = lambda x: _nested(x[0], request.q)
    result = AttentionOutput(nested(results.out), nested(results.lse), max_logit)
    return with_statistics(row, result, results, wanted, nested)


def _nested(values: Tensor, like: Any) -> Tensor:
    """Return values `(heads, tokens, ...)` as a nested tensor that is jagged as `like` is."""
    return torch.nested.nested_tensor_from_jagged(
        values, like.offsets(), like.lengths(), jagged_dim=2
    )


def _of_nested(request: Request) -> tuple["Packing", Request]:
    """Return the packing of jagged q, k and v, and the request for their tokens."""
    q, k, v = request.q, request.k, request.v
    if request.keys is not None:
        error = ArgumentError("layout= takes no nested tensors; pack them and pass a document mask")
        raise tell_refusal(request.keys, error)
    for name, x in zip("qkv", (q, k, v), strict=True):
        if not (isinstance(x, Tensor) and x.is_nested and _is_jagged(x)):
            raise ArgumentError(
                f"{name} is {_kind(x)}, but not all "
                "of q, k and v: pass all three with layout=torch.jagged, or none"
            )
        if x.dim() != 4 or x._ragged_idx != 2:  # type: ignore[attr-defined]
            raise ArgumentError(
                f"{name} must be (batch, heads, ragged length, width), got {tuple(x.shape)}; move "
                "heads with .transpose(1, 2)"
            )
    if k.offsets() is not v.offsets() or k.lengths() is not v.lengths():
        _check_same_offsets(k, v)
    if q.shape[0] != k.shape[0]:
        raise ArgumentError(
            f"batch sizes differ: q has {q.shape[0]} sequences, k and v have {k.shape[0]}"
        )
    sides = [
        Side(name, x.values().shape[1], x.device, x.offsets(), x.lengths(), names=_OF_NESTED)
        for name, x in (("q", q), ("k", k))
    ]
    q, k, v = (x.values()[None] for x in (q, k, v))
    return pack(*sides), request._replace(q=q, k=k, v=v)


def _check_same_offsets(k: Any, v: Any) -> None:
    """Refuse k and v that are not known to be ragged alike. The host reads offsets of the CPU."""
    pairs = (k.offsets(), v.offsets()), (k.lengths(), v.lengths())
    if any((a is None) != (b is None) for a, b in pairs) or k.shape[0] != v.shape[0]:
        same = False
    else:
        same = all(
            a is b or (a.is_cpu and host_can_read(a) and host_can_read(b) and torch.equal(a, b))
            for a, b in pairs
        )
    if not same:
        raise ArgumentError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} must have the same sequences: make v with "
            "torch.nested.nested_tensor_from_jagged(values, k.offsets())"
        )


# -- packings -------------------------------------------------------------------------------------


class ArgumentNames(NamedTuple):
    """A caller's names of the arguments of a side, whose own name fills the braces."""

    starts: str = "cu_{}"
    lengths: str = "seqused_{}"
    longest: str = "max_{}"


_OF_NESTED = ArgumentNames("offsets of {}", "lengths of {}")


class Side(NamedTuple):
    """The sequences of the queries, or of the keys, in a row of tokens.

    They begin at `starts`, or every one fills one of `rows`. `lengths` says how many tokens of each
    there are; without it, all up to where the next one begins.
    """

    name: str  # "q" or "k"
    tokens: int
    device: torch.device
    starts: Any  # (sequences + 1,)
    lengths: Any = None  # (sequences,)
    longest: int | None = None  # no sequence is longer, as the caller says
    rows: int | None = None  # in place of starts
    names: ArgumentNames = ArgumentNames()

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        return self.starts.shape[0] - 1 if self.rows is None else self.rows

    @property
    def row(self) -> int:
        """The tokens of each of `rows`."""
        return self.tokens // max(self.rows or 0, 1)

    def checked(self) -> "Side":
        """Return this side, if the kinds, shapes and devices of its tensors are right."""
        if self.rows is None:
            self._check(self.names.starts, self.starts, None)
        if self.lengths is not None:
            self._check(self.names.lengths, self.lengths, self.sequences)
        return self

    def _check(self, template: str, x: Any, size: int | None) -> None:
        name = template.format(self.name)
        fits = isinstance(x, Tensor) and x.dim() == 1 and x.dtype in (torch.int32, torch.int64)
        if not fits or (x.shape[0] < 1 if size is None else x.shape[0] != size):
            axes = f"(sequences,) = ({size},)"
            axes = "(sequences + 1,) that rises from 0" if size is None else axes
            raise ArgumentError(f"{name} must be an int32 or int64 tensor {axes}, got {_kind(x)}")
        if x.device != self.device:
            raise ArgumentError(
                f"{name} is on {x.device}, {self.name} on {self.device}; keep it there: a copy "
                "waits for the device"
            )

    def check_numbers(self) -> None:
        """Check the numbers where the host can read them without waiting: on the CPU."""
        numbers = [x for x in (self.starts, self.lengths) if x is not None]
        if self.device.type != "cpu" or not all(map(host_can_read, numbers)):
            return
        counts, room = [], [self.row] * self.sequences
        if self.rows is None:
            offsets = self.starts.tolist()
            counts = room = [end - start for start, end in pairwise(offsets)]
            first_fits = offsets[0] == 0 or (offsets[0] > 0 and self.lengths is not None)
            if not first_fits or offsets[-1] > self.tokens or min(room, default=0) < 0:
                raise ArgumentError(
                    f"{self.names.starts.format(self.name)} must rise from 0 to at most "
                    f"{self.tokens}, the number of tokens of {self.name}, got "
                    f"{offsets if len(offsets) < 12 else (*offsets[:4], '...', *offsets[-4:])}"
                )
        if self.lengths is not None:
            counts = self.lengths.tolist()
            for n, (count, most) in enumerate(zip(counts, room, strict=True)):
                if not 0 <= count <= most:
                    raise ArgumentError(
                        f"{self.names.lengths.format(self.name)}[{n}] = {count}, but that sequence "
                        f"has room for {most}"
                    )
        if self.longest is not None and max(counts, default=0) > self.longest:
            raise ArgumentError(
                f"{self.names.longest.format(self.name)}={self.longest}, but the longest sequence "
                f"of {self.name} has {max(counts)} tokens"
            )

    def lies_as(self, side: "Side") -> bool:
        """Return whether the tokens of both have the same places in the same sequences."""
        same = self.starts is side.starts and self.lengths is side.lengths
        return same and (self.tokens, self.rows) == (side.tokens, side.rows)

    def starts_and_counts(self) -> tuple[Tensor, Tensor]:
        """Return where every sequence begins, and where the last one ends, int64
        `(sequences + 1,)`, and how many tokens of each are there."""
        if self.rows is None:
            starts = self.starts.long()
        else:
            starts = torch.arange(self.rows + 1, device=self.device) * self.row
        counts = starts.diff()
        return starts, counts if self.lengths is None else counts.minimum(self.lengths.long())

    def places_of_tokens(self, outside: int) -> tuple[Tensor, Tensor]:
        """Return the sequence of every token, `outside` for none, and its position there, int32."""
        if self.rows is not None and self.lengths is None:
            row, position = (
                torch.arange(n, dtype=torch.int32, device=self.device)
                for n in (self.rows, self.row)
            )
            return row.repeat_interleave(self.row), position.repeat(self.rows)
        starts, counts = self.starts_and_counts()
        ends = torch.cat([starts[:-1] + counts, starts[-1:]])  # none is in one after the last
        token = torch.arange(self.tokens, device=self.device)
        ids = torch.searchsorted(starts, token, right=True) - 1
        sequence = ids.clamp_min(0)
        inside = (ids >= 0) & (token < ends[sequence])
        return torch.where(inside, ids, outside).int(), (token - starts[sequence]).int()


class Packing(NamedTuple):
    """The sequences of packed tokens: fields of `PackedMask`, and how many there are.

    - `aligned_pos`: `pos` if the last query of every sequence meets its last key.
    """

    ids: Tensor
    kv_ids: Tensor
    pos: Tensor
    kv_pos: Tensor | None
    sequences: int
    aligned_pos: Tensor

    def aligned(self) -> "Packing":
        """Return the packing in which q_idx is where the query stands among the keys."""
        return self._replace(pos=self.aligned_pos)

    def mask(self, mask: MaskFn | None) -> PackedMask:
        """Return a mask of the packed row from that of every sequence."""
        return PackedMask(*self[:4], mask)

    def score(self, score: ScoreFn | None) -> PackedScore | None:
        """Return a score of the packed row from that of every sequence."""
        return None if score is None else PackedScore(*self[:4], score)

    def request(self, request: Request) -> Request:
        """Return the request for the packed tokens, whose score and mask read the sequences."""
        score, mask = request.score, request.mask
        if isinstance(mask, BlockMask):
            raise ArgumentError(
                "mask is a block mask, whose tiles are those of one packing; pass the mask itself"
            )
        for kind, mod in (("score", score), ("mask", mask)):
            if mod is not None:
                check_function(kind, mod, None)
                check_sizes(mod, self.sequences, request.q.shape[1], None, None)
        return request._replace(score=self.score(score), mask=self.mask(mask))


def _packing_of(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: Any, max_k: Any) -> Packing:
    """Return the packing of a call from its cumulative lengths, checked without a copy."""
    axes_of_keys = "(kv_tokens, hk, width)"
    for name, x, axes in (
        ("q", q, "(tokens, hq, d)"),
        ("k", k, axes_of_keys),
        ("v", v, axes_of_keys),
    ):
        if not isinstance(x, Tensor) or x.dim() != 3 or x.is_nested:
            raise ArgumentError(f"{name} must be {axes}, got {_kind(x)}")
    longest = count_of("max_q", max_q)
    q_side = Side("q", q.shape[0], q.device, cu_q, longest=longest).checked()
    if cu_k is None and q.shape[0] != k.shape[0]:
        raise ArgumentError(
            f"q has {q.shape[0]} tokens, k {k.shape[0]}: pass the offsets of the keys, cu_k"
        )
    if max_k is None and cu_k is not None:
        raise ArgumentError("cu_k needs max_k: the most keys of a sequence")
    longest = longest if max_k is None else count_of("max_k", max_k)
    starts = cu_q if cu_k is None else cu_k
    return pack(q_side, Side("k", k.shape[0], q.device, starts, longest=longest).checked())


_packings: TensorCache[Packing] = TensorCache(64, stamp_of_numbers)


def pack(q: Side, k: Side) -> Packing:
    """Return the packing of sequences, from a cache."""
    if q.sequences != k.sequences:
        raise ArgumentError(
            f"q has {q.sequences} sequences and k {k.sequences}: their offsets, lengths or rows "
            "count different numbers of sequences"
        )
    tensors = [x for side in (q, k) for x in (side.starts, side.lengths) if x is not None]
    if (
        is_compiling()
        or transforms()
        or not all(map(host_can_read, tensors))
        or dispatch_modes() > 0
    ):
        return _new_packing(q, k)

    def checked_packing() -> Packing:
        q.check_numbers()
        k.check_numbers()
        with torch.inference_mode(False):  # fit to be saved for a backward, and to be cached
            return _new_packing(q, k)

    if not tensors:
        return checked_packing()
    key = tuple((x.tokens, x.rows, x.longest, x.lengths is None) for x in (q, k))
    return _packings.of(tensors, key, checked_packing)


def _new_packing(q: Side, k: Side) -> Packing:
    ids, pos = q.places_of_tokens(outside=-1)
    if k.lies_as(q):
        return Packing(ids, torch.where(ids < 0, -2, ids), pos, None, q.sequences, pos)
    kv_ids, kv_pos = k.places_of_tokens(outside=-2)
    first_key, count = k.starts_and_counts()  # at -1: where the last sequence ends
    more_keys = torch.cat([count - q.starts_and_counts()[1], count.new_zeros(1)])[ids].int()
    aligned_pos = pos + more_keys
    aligned_pos = torch.stack([aligned_pos, aligned_pos + first_key[ids].int()])
    return Packing(ids, kv_ids, pos, kv_pos, q.sequences, aligned_pos)


def sequence_of_tokens(starts: Tensor, tokens: int) -> Tensor:
    """Return the sequence of every token; those after the last sequence count as its."""
    token = torch.arange(tokens, device=starts.device, dtype=starts.dtype)
    last = starts.shape[0] - 2
    return (torch.searchsorted(starts, token, right=True) - 1).clamp(0, last)


def _kind(x: Any) -> str:
    return shown(x) if isinstance(x, Tensor) else type(x).__name__
