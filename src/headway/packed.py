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
from .errors import ArgumentError
from .keywords import unknown_keywords
from .mods.base import MaskFn, ScoreFn
from .mods.library.packed import KeptLogit, PackedMask, PackedScore
from .row_statistics import asking_for, with_statistics
from .run import run, run_out
from .surroundings import host_can_read, transforms
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
    for name, x in zip("qkv", (q, k, v), strict=True):
        if not (isinstance(x, Tensor) and x.is_nested and _is_jagged(x)):
            raise ArgumentError(
                f"{name} is {shown(x) if isinstance(x, Tensor) else type(x).__name__}, but not all "
                "of q, k and v: pass all three with layout=torch.jagged, or none"
            )
        if x.dim() != 4 or x._ragged_idx != 2:  # type: ignore[attr-defined]
            raise ArgumentError(
                f"{name} must be (batch, heads, ragged length, width), got {tuple(x.shape)}; move "
                "heads with .transpose(1, 2)"
            )
    if request.keys is not None:
        raise ArgumentError("layout= takes no nested tensors; pack them and pass a document mask")
    if k.offsets() is not v.offsets() or k.lengths() is not v.lengths():
        _check_same_offsets(k, v)
    if q.shape[0] != k.shape[0]:
        raise ArgumentError(
            f"batch sizes differ: q has {q.shape[0]} sequences, k and v have {k.shape[0]}"
        )
    starts, lengths = q.offsets(), q.lengths()
    if k.offsets() is starts and k.lengths() is lengths:
        kv_starts, kv_lengths = None, None
    else:
        kv_starts, kv_lengths = k.offsets(), k.lengths()
    q, k, v = (x.values()[None] for x in (q, k, v))
    packing = _packing(q.shape[2], k.shape[2], starts, lengths, kv_starts, kv_lengths)
    return packing, request._replace(q=q, k=k, v=v)


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


class Packing(NamedTuple):
    """The sequences of packed tokens: fields of `PackedMask`, and how many there are."""

    ids: Tensor
    kv_ids: Tensor
    pos: Tensor
    kv_pos: Tensor | None
    sequences: int

    def request(self, request: Request) -> Request:
        """Return the request for the packed tokens with its score and mask told the sequences."""
        score, mask = request.score, request.mask
        if isinstance(mask, BlockMask):
            raise ArgumentError(
                "mask is a block mask, whose tiles are those of one packing; pass the mask itself"
            )
        for kind, mod in (("score", score), ("mask", mask)):
            if mod is not None:
                check_function(kind, mod, None)
                check_sizes(mod, self.sequences, request.q.shape[1], None, None)
        return request._replace(
            score=None if score is None else PackedScore(*self[:4], score),
            mask=PackedMask(*self[:4], mask),
        )


def _packing_of(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: Any, max_k: Any) -> Packing:
    """Return the packing of a call from its cumulative lengths, checked without a copy."""
    axes_of_keys = "(kv_tokens, hk, width)"
    for name, x, axes in (
        ("q", q, "(tokens, hq, d)"),
        ("k", k, axes_of_keys),
        ("v", v, axes_of_keys),
    ):
        if not isinstance(x, Tensor) or x.dim() != 3 or x.is_nested:
            got = shown(x) if isinstance(x, Tensor) else type(x).__name__
            raise ArgumentError(f"{name} must be {axes}, got {got}")
    check_offsets("cu_q", cu_q, q)
    max_q = count_of("max_q", max_q)
    if cu_k is None:
        if q.shape[0] != k.shape[0]:
            raise ArgumentError(
                f"q has {q.shape[0]} tokens, k {k.shape[0]}: pass the offsets of the keys, cu_k"
            )
    else:
        check_offsets("cu_k", cu_k, q)
        if cu_q.shape != cu_k.shape:
            raise ArgumentError(
                f"cu_q {tuple(cu_q.shape)} and cu_k {tuple(cu_k.shape)} count different numbers of "
                "sequences"
            )
    if max_k is None and cu_k is not None:
        raise ArgumentError("cu_k needs max_k: the most keys of a sequence")
    max_k = max_q if max_k is None else count_of("max_k", max_k)
    return _packing(q.shape[0], k.shape[0], cu_q, None, cu_k, None, (max_q, max_k))


def check_offsets(name: str, offsets: Any, q: Tensor) -> None:
    """Check that cumulative lengths are integers `(sequences + 1,)` on q's device."""
    if (
        not isinstance(offsets, Tensor)
        or offsets.dim() != 1
        or offsets.shape[0] < 1
        or offsets.dtype not in (torch.int32, torch.int64)
    ):
        got = shown(offsets) if isinstance(offsets, Tensor) else type(offsets).__name__
        raise ArgumentError(
            f"{name} must be an int32 or int64 tensor (sequences + 1,) that rises from 0, got {got}"
        )
    if offsets.device != q.device:
        raise ArgumentError(
            f"{name} is on {offsets.device}, q on {q.device}; keep it there: a copy waits for the "
            "device"
        )


_packings: TensorCache[Packing] = TensorCache(64, stamp_of_numbers)


def _packing(
    q_tokens: int, kv_tokens: int, starts: Tensor, lengths: Tensor | None,
    kv_starts: Tensor | None, kv_lengths: Tensor | None, longest: tuple[int, int] | None = None,
) -> Packing:  # fmt: skip
    """Return the packing of sequences that begin at `starts`, from a cache.

    - `starts`: `(sequences + 1,)`; without `lengths` every sequence ends where the next begins.
    - `kv_starts`: None if keys are packed as queries are.
    - `longest`: the most queries and keys of a sequence.
    """

    def new_packing() -> Packing:
        ids, pos = places_of_tokens(q_tokens, starts, lengths, outside=-1)
        if kv_starts is None:
            kv_ids, kv_pos = torch.where(ids < 0, -2, ids), None
        else:
            kv_ids, kv_pos = places_of_tokens(kv_tokens, kv_starts, kv_lengths, outside=-2)
        return Packing(ids, kv_ids, pos, kv_pos, starts.shape[0] - 1)

    tensors = [x for x in (starts, lengths, kv_starts, kv_lengths) if x is not None]
    if is_compiling() or transforms() or not all(map(host_can_read, tensors)) or modes() > 0:
        return new_packing()

    def checked_packing() -> Packing:
        _check_lengths("q", starts, lengths, q_tokens, longest and longest[0])
        of_keys = (starts, lengths) if kv_starts is None else (kv_starts, kv_lengths)
        _check_lengths("k", *of_keys, kv_tokens, longest and longest[1])
        with torch.inference_mode(False):  # fit to be saved for a backward, and to be cached
            return new_packing()

    key = q_tokens, kv_tokens, longest, lengths is None, kv_starts is None, kv_lengths is None
    return _packings.of(tensors, key, checked_packing)


modes = torch._C._len_torch_dispatch_stack


def places_of_tokens(
    tokens: int, starts: Tensor, lengths: Tensor | None, outside: int
) -> tuple[Tensor, Tensor]:
    """Return the sequence of every token, `outside` for none, and its position there, int32."""
    starts = starts.long()
    ends = starts[1:] if lengths is None else starts[:-1] + lengths.long()
    ends = torch.cat([ends, starts[-1:]])  # no token is in a sequence after the last
    token = torch.arange(tokens, device=starts.device)
    ids = torch.searchsorted(starts, token, right=True) - 1
    sequence = ids.clamp_min(0)
    inside = (ids >= 0) & (token < ends[sequence])
    pos = (token - starts[sequence]).int()
    return torch.where(inside, ids, outside).int(), pos


def _check_lengths(
    name: str, starts: Tensor, lengths: Tensor | None, tokens: int, longest: int | None
) -> None:
    """Check offsets on the CPU; those on other devices are not read. `longest`: None if nested."""
    if not starts.is_cpu:
        return
    offsets = starts.tolist()
    ends = offsets[1:]
    if lengths is not None:
        ends = [n + length for n, length in zip(offsets, lengths.tolist(), strict=False)]
    counts = [end - start for start, end in zip(offsets, ends, strict=False)]
    rises = all(a <= b for a, b in pairwise(offsets))
    first_fits = offsets[0] >= 0 if longest is None else offsets[0] == 0
    if not (rises and first_fits and offsets[-1] <= tokens and min(counts, default=0) >= 0):
        raise ArgumentError(
            f"{'offsets of ' if longest is None else 'cu_'}{name} must rise from 0 to at most "
            f"{tokens}, the number of its tokens, got "
            f"{offsets if len(offsets) < 12 else (*offsets[:4], '...', *offsets[-4:])}"
        )
    if longest is not None and max(counts, default=0) > longest:
        raise ArgumentError(
            f"max_{name}={longest}, but the longest sequence of {name} has {max(counts)} tokens"
        )
