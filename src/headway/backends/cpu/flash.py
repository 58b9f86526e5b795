"""PyTorch's own CPU flash kernels, run over the live key ranges of a block mask.

They support no score functions and no dropout, but fuse the softmax into the products, which blocks
of torch ops cannot. With the merged out and lse, their backwards over disjoint keys sum to the
exact gradients. Their weaknesses are worked around, or such calls are refused (`suits`):

- a row whose logits are all NaN comes out as 0;
- a row that sees nothing, or -inf alone, has lse 0, not -inf;
- a mask is added: a NaN or inf of a key reaches rows that do not keep it;
- causal, -inf is set before the scale: times 0 that is NaN, times a negative number inf;
- half precision is accumulated as such in the backward, and P is rounded to it in both directions;
  so inputs are converted to float32, which loses nothing;
- the backward is parallel over heads only, and computes delta itself.
"""

import math
from functools import cache
from itertools import groupby

import torch
from torch import Tensor

from ...mods.evaluation.pointwise import Positions, mask_at
from ...types import Forward, Grads, Spec, acc_dtype, constant_under_compile, in_dtype
from ..base import Call, Hook, causal_text, delta_of, graphs, split
from .tile_plan import Segment, index_tensors, pieces

MOST = 16  # queries that are few: for more, blocks of queries pay
_LEAST_SCALE = 1e-30  # of their causal masks; smaller scales are nearly 0 in float32
# The Python binding: `torch.ops` would cost a tenth of a small kernel more.
_forward = torch._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def suits(spec: Spec, call: Call) -> bool:
    """Whether these kernels can run the call, at least as well as blocks of torch ops."""
    return _supports(spec, call) and _finite(call.q)


def _finite(x: Tensor) -> bool:
    """Whether the sum, and so every number, is finite. False also if the sum overflows."""
    return math.isfinite(x.sum(dtype=torch.float32))


def _some_zero(lse: Tensor) -> bool:
    """Whether some lse is 0, which the kernels also return for a row of NaN or of -inf alone."""
    return lse.count_nonzero().item() < lse.numel()


def _supports(spec: Spec, call: Call) -> bool:
    return spec.score is None and spec.dropout == 0 and _fit(call.q, call.k, call.v)


def _fit(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return q.shape[3] == v.shape[3] and q.numel() > 0 < k.numel()


@cache
def in_half(dtype: torch.dtype) -> bool:
    """Whether few queries, with no gradient, are computed in this dtype of 16 bits: where the CPU
    multiplies such numbers in vectors. (Elsewhere, and by matrix units, whose products of few rows
    are slow, it costs less to widen them.) Products add up in float32; P is rounded, as on GPUs."""
    can = getattr(torch.cpu, "get_capabilities", dict)()
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    return bool(can.get(f"avx512_{name}")) and not (can.get("amx_tile") or can.get("amx_bf16"))


def native(spec: Spec, call: Call, hook: Hook) -> Tensor | None:
    """The output, where one call of the kernel computes it. None where more is needed, or where the
    backward has a faster way."""
    causal_square = spec.mask is not None and is_causal(spec, call)
    if not (causal_square or spec.mask is None) or call.sink is not None or spec.partial:
        return None
    if spec.score is not None or spec.dropout != 0:
        return None
    return plain(call.q, call.k, call.v, causal_square, spec.scale, hook)


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    hook: Hook,
    bias: Tensor | None = None,
) -> Tensor | None:
    """`native` of softmax(scale q kᵀ) v, over j <= i if `causal`; `scale` None is 1/sqrt(d).

    `hook` None: for compilers. Most calls come here, so it reads few attributes: each takes time in
    Python, and is guarded by Dynamo. `bias`: `(b, 1, 1, kv_len)` of q's dtype, 0 and -inf, for one
    query a row and not for compilers.
    """
    if not _fit(q, k, v):
        return None
    if causal and (q.shape[2] != k.shape[2] or (scale is not None and scale < _LEAST_SCALE)):
        return None
    if torch.is_grad_enabled():
        if _leaves_idle(q):
            return None
        packed = not (q.requires_grad or k.requires_grad or v.requires_grad)
    else:
        packed = True
    given, half = q, False
    if packed and not causal and q.shape[2] <= MOST:
        half = hook is not None and q.dtype.itemsize == 2
        if half and not in_half(q.dtype):
            return None  # keys are widened a block at a time there
        if q.shape[1] != k.shape[1]:  # the queries of a group are the rows of one product
            q = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    if not half or not q.stride()[3] == k.stride()[3] == v.stride()[3] == 1:
        q, k, v = _inputs(q, k, v, folded=False)
    out, lse = _forward(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    if bias is not None and not math.isfinite(out.sum(dtype=lse.dtype)):
        return None  # a mask that is added lets NaN and inf through
    if hook is not None and out.requires_grad:
        out.grad_fn.register_hook(hook)  # type: ignore[union-attr]
    # For a row of NaN logits the kernel returns 0, with lse 0, as for one that sees nothing. (For a
    # row of -inf alone it does so, too, and that is right.)
    if hook is None:
        # A compiler cannot branch on values. Every row sees the first key: if that logit is NaN,
        # the row is NaN.
        first = (q.detach() * k.detach()[:, :, :1]).sum(-1, dtype=lse.dtype)
        out = out + first.masked_fill(~first.isnan() | (lse != 0), 0).to(out.dtype)[..., None]
    elif _some_zero(lse) and not (_finite(q) and _finite(k)):
        return None
    return out if q is given else in_dtype(out, given.dtype).reshape(given.shape)


def _leaves_idle(q: Tensor) -> bool:
    """Whether the backward, which is parallel over heads only, would leave most threads idle."""
    b, hq, _, _ = q.shape
    return 2 * b * hq < _threads()


def _threads() -> int:
    return torch.get_num_threads()


constant_under_compile(_threads)


def forward(spec: Spec, call: Call) -> Forward | None:
    """Each key range by itself, merged by log-sum-exp; None if a key is NaN or infinite, which may
    then reach rows that it must not reach, or be hidden where it must show."""
    b, hq, q_len, d = call.q.shape
    acc = acc_dtype(call.q.dtype)
    causal_square = is_causal(spec, call)
    at_once = causal_square or spec.mask is None
    q, k, v = _inputs(call.q, call.k, call.v, folded=not at_once)
    if at_once:
        out, lse = _forward(q, k, v, 0.0, causal_square, scale=spec.scale)
        doubtful = _some_zero(lse)
    else:
        doubtful = False
        out = torch.zeros(q.shape, dtype=acc, device=q.device)
        lse = torch.full(q.shape[:3], -math.inf, dtype=acc, device=q.device)
        for piece, keys, bias, seen in _key_ranges(spec, call, q.dtype):
            at = piece.n, piece.g, piece.i
            o, l = _forward(
                q[at], k[piece.n, piece.g, keys], v[piece.n, piece.g, keys], 0.0, False,
                attn_mask=bias, scale=spec.scale,
            )  # fmt: skip
            if seen is not None:
                l = l.masked_fill(~seen, -math.inf)
            doubtful = doubtful or _some_zero(l)
            _merge_into(out[at], lse[at], o, l)
        doubtful = doubtful or bool(lse.isnan().any())
    if doubtful and not _finite(call.k):
        return None
    if call.sink is not None:
        before = lse = lse.reshape(b, hq, q_len)
        out = out.reshape(b, hq, q_len, d)
        lse = torch.logaddexp(lse, call.sink.to(acc)[:, None])
        nothing = before.masked_fill(lse == -math.inf, 0) - lse.masked_fill(lse == -math.inf, 0)
        out = out * nothing.exp_()[..., None]
    out = in_dtype(out, acc if spec.partial else call.q.dtype)
    if out.shape != call.q.shape:
        out, lse = out.reshape(b, hq, q_len, d), lse.reshape(b, hq, q_len)
    return Forward(out, lse, lse.new_empty(0), lse.new_empty(0))


def backward(
    spec: Spec, call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
) -> Grads | None:  # fmt: skip
    """The sum of the backwards over key ranges; None where the kernels would compute another delta,
    or leave most threads idle."""
    (b, hq, q_len, d), hk, kv_len = call.q.shape, *call.k.shape[1:3]
    acc = acc_dtype(call.q.dtype)
    if _leaves_idle(call.q):
        return None
    delta, like_out = None, out
    if dlse is not None or call.sink is not None:  # else the kernels' own delta is right
        delta = delta_of(out, dout, dlse, acc)
        like_out = _out_with_delta(delta, out, dout, dlse, acc)
        if like_out is None:
            return None
    causal_square = is_causal(spec, call)
    at_once = causal_square or spec.mask is None
    q, k, v = _inputs(call.q, call.k, call.v, folded=not at_once)
    dout, like_out = _rows(dout, q.dtype), _rows(like_out, q.dtype)
    # exp(-inf - inf) is 0, which is right for a row that sees nothing.
    lse = lse.nan_to_num(math.nan, math.inf, math.inf)
    if q.shape != dout.shape:
        dout, like_out = dout.reshape(q.shape), like_out.reshape(q.shape)
        lse = lse.reshape(q.shape[:3])
    if at_once:
        grads = _backward(dout, q, k, v, like_out, lse, 0.0, causal_square, scale=spec.scale)
        dq, dk, dv = grads
    else:
        dq, dk, dv = (torch.zeros(x.shape, dtype=acc, device=x.device) for x in (q, k, v))
        for piece, keys, bias, _ in _key_ranges(spec, call, q.dtype):
            at, kv = (piece.n, piece.g, piece.i), (piece.n, piece.g, keys)
            grads = _backward(
                dout[at], q[at], k[kv], v[kv], like_out[at], lse[at], 0.0, False,
                attn_mask=bias, scale=spec.scale,
            )  # fmt: skip
            for total, where, grad in zip((dq, dk, dv), (at, kv, kv), grads, strict=True):
                total[where] += grad
    dsink = None
    if call.sink is not None and delta is not None:
        weight = (call.sink.to(acc)[:, None] - lse.reshape(b, hq, q_len)).exp_()
        dsink = -(weight * delta).sum((0, 2))
    of_q, of_kv = spec.grad_dtypes(call.q.dtype)
    if hq != hk:
        dk, dv = dk.sum(1), dv.sum(1)
    dq, dk, dv = in_dtype(dq, of_q), in_dtype(dk, of_kv), in_dtype(dv, of_kv)
    if dq.shape != call.q.shape:
        dq = dq.reshape(b, hq, q_len, d)
    if dk.shape != call.k.shape:
        dk, dv = (x.reshape(b, hk, kv_len, d) for x in (dk, dv))
    return Grads(dq, dk, dv, dsink, [])


def _out_with_delta(
    delta: Tensor, out: Tensor, dout: Tensor, dlse: Tensor | None, acc: torch.dtype
) -> Tensor | None:
    """A stand-in for out. The kernels use out only to compute delta = rowsum(dout∘out), but the
    right delta may have a gradient of lse subtracted. dout * delta / |dout|² has that product with
    dout. None if it is not finite."""
    if dlse is None or not dlse.any():  # a compiled program gives zeros
        return out if math.isfinite(delta.sum()) else None
    size = dout.to(acc).square().sum(-1)
    if not math.isfinite(size.sum()) or bool(((size < 1e-30) & (delta != 0)).any()):
        return None
    return dout * (delta / size.clamp(min=1e-30))[..., None]


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`, with contiguous rows, which the kernels assume."""
    x = in_dtype(x, dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def _inputs(q: Tensor, k: Tensor, v: Tensor, *, folded: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q as (b * hk, g, q_len, d); k and v as views that every query head of the group shares.
    Unchanged if not `folded` and no key head is shared."""
    dtype = acc_dtype(q.dtype)
    if q.dtype != dtype or not q.stride()[3] == k.stride()[3] == v.stride()[3] == 1:
        q, k, v = _rows(q, dtype), _rows(k, dtype), _rows(v, dtype)
    (b, hq, q_len, d), (_, hk, kv_len, _) = q.shape, k.shape
    if hq == hk and not folded:
        return q, k, v
    shape = b * hk, hq // hk, kv_len, d
    q = q.reshape(b * hk, hq // hk, q_len, d)
    k, v = (x.reshape(b * hk, 1, kv_len, d).expand(shape) for x in (k, v))
    return q, k, v


def _key_ranges(spec: Spec, call: Call, dtype: torch.dtype):
    """Work items with a key range, the additive mask over it (None if every pair is kept), and
    which rows see any key of it."""
    _, mask = graphs(spec)
    _, captured = split(spec, call.captured)
    positions = call.coords.positions(call.q.shape[2], call.k.shape[2], call.q.device)
    memory: dict[tuple, tuple[Tensor, Tensor]] = {}
    for piece in pieces(spec, call, whole_rows=True):
        for start, stop, full in _join(piece.segments):
            keys = slice(start, stop)
            if full or mask is None:
                yield piece, keys, None, None
                continue
            key = (piece.i.start, start, stop)
            if (
                key not in memory
                or mask.uses("b")
                or mask.uses("h")
                or max(map(len, positions)) > 1
            ):
                kept = mask_at(
                    mask, captured, Positions(**index_tensors(call, piece, *positions, keys))
                )
                kept = kept.expand(*kept.shape[:-2], piece.i.stop - piece.i.start, stop - start)
                bias = torch.zeros(kept.shape, dtype=dtype, device=kept.device)
                bias.masked_fill_(~kept, -math.inf)
                memory = {key: (bias, kept.any(-1))}  # the next heads of the same rows share it
            yield piece, keys, *memory[key]


def _join(segments: tuple[Segment, ...]) -> list[Segment]:
    """Neighbouring key ranges as one, where that costs less than another call and a merge."""
    joined: list[Segment] = []
    for _, group in groupby(enumerate(segments), lambda x: _block(segments, x[0])):
        run = [s for _, s in group]
        span = run[-1].stop - run[0].start
        partial = sum(s.stop - s.start for s in run if not s.full)
        if 3 * partial >= span > partial:
            joined.append(Segment(run[0].start, run[-1].stop, full=False))
            continue
        for full, same in groupby(run, lambda s: s.full):
            stretch = list(same)
            joined.append(Segment(stretch[0].start, stretch[-1].stop, full))
    return joined


def _block(segments: tuple[Segment, ...], n: int) -> int:
    """The first of the segments that reach segment n without a gap."""
    while n and segments[n - 1].stop == segments[n].start:
        n -= 1
    return n


def _merge_into(out: Tensor, lse: Tensor, o: Tensor, l: Tensor) -> None:
    """out, lse += o, l (see `distributed.merge` for the algebra), in place."""
    total = torch.logaddexp(lse, l)
    base = total.masked_fill(total == -math.inf, 0)
    out.mul_((lse - base).exp_()[..., None]).addcmul_(o, (l - base).exp_()[..., None])
    lse.copy_(total)


def is_causal(spec: Spec, call: Call) -> bool:
    """Whether the mask is the one that the kernels support themselves: causal, with as many queries
    as keys."""
    coords = call.coords
    return (
        spec.mask is not None
        and call.q.shape[2] == call.k.shape[2]
        and spec.scale >= _LEAST_SCALE
        and spec.mask == causal_text()
        and call.captured.ints[spec.score_ints :] == [0]
        and coords.q == coords.kv
        and coords.q_pos is None is coords.kv_pos
    )
