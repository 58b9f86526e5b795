"""Run PyTorch's CPU flash kernels over the live key ranges of a block mask.

They support no score functions and no dropout, but fuse the softmax into the products, which blocks
of torch ops cannot. With the merged out and lse, their backwards over disjoint keys sum to the
exact gradients. This module works around their weaknesses, or refuses such calls (`suits`):

- a row whose logits are all NaN gets out 0;
- a row that sees nothing, or -inf alone, has lse 0, not -inf;
- a mask is added: a NaN or inf of a key reaches rows that do not keep it;
- causal, -inf is set before the scale: times 0 that is NaN, times a negative number inf;
- half precision is accumulated as such in the backward, and P is rounded to it in both directions;
  so inputs are widened to float32, which loses nothing;
- the backward's P is exp(S - lse): it has no more digits than a large lse leaves;
- the backward is parallel over heads only, and computes delta itself.
"""

import math
from itertools import groupby

import torch
from torch import Tensor

from ...memory_order import in_order_of
from ...mods.evaluation.pointwise import Positions, mask_at
from ...types import Forward, Grads, Spec, acc_dtype, in_dtype
from ..base import Call, Hook, causal_text, delta_of, graphs, large_lse, split
from .tile_plan import KeySegment, index_tensors, work_items

MAX_DECODE_QUERIES = 16  # for more queries, blocks of queries are faster
_MIN_CAUSAL_SCALE = 1e-30  # smaller scales are nearly 0 in float32
# The Python binding saves a tenth of a small kernel's time over `torch.ops`.
_forward = torch._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def suits(spec: Spec, call: Call) -> bool:
    """Return whether these kernels can run the call, at least as well as blocks of torch ops."""
    return _kernels_support(spec, call) and _finite(call.q)


def _finite(values: Tensor) -> bool:
    """Return whether the sum, and so every number, is finite. A sum that overflows counts as not
    finite."""
    values = values.detach() if values.requires_grad else values
    return math.isfinite(values.sum(dtype=torch.float32))


def _some_zero(lse: Tensor) -> bool:
    """Return whether some lse is 0, which the kernels also return for a row of NaN or of -inf
    alone."""
    return lse.count_nonzero().item() < lse.numel()


def _kernels_support(spec: Spec, call: Call) -> bool:
    """Return whether the kernels have all that the spec asks for."""
    return spec.score is None and spec.dropout == 0 and _fits_kernels(call.q, call.k, call.v)


def _fits_kernels(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the kernels accept the shapes."""
    return q.shape[3] == v.shape[3] and q.numel() > 0 < k.numel()


def native(spec: Spec, call: Call, hook: Hook) -> Tensor | None:
    """Return the output if one call of the kernel computes it; None where more is needed, or where
    the backward has a faster way."""
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
    """Compute softmax(scale q kᵀ) v as `native` does, over j <= i if `causal`; `scale` None is
    1/sqrt(d).

    Compilers pass `hook` None. Most calls come here, so this reads few attributes: each takes time
    in Python, and is guarded by Dynamo. `bias`: `(b, 1, 1, kv_len)` of q's dtype, 0 and -inf, for
    one query a row and not for compilers.
    """
    if not _fits_kernels(q, k, v):
        return None
    if causal and (q.shape[2] != k.shape[2] or (scale is not None and scale < _MIN_CAUSAL_SCALE)):
        return None
    trained = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if trained and (hook is None or _leaves_threads_idle(q)):
        return None  # a compiler cannot branch on lse: our operator checks it for the backward
    caller_q = q
    if not trained and not causal and q.shape[2] <= MAX_DECODE_QUERIES:
        if hook is not None and q.dtype.itemsize == 2:
            return None  # `decode` widens keys a block at a time
        if q.shape[1] != k.shape[1]:  # the queries of a group are the rows of one product
            q = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    q, k, v = _kernel_inputs(q, k, v, fold_heads=False)
    out, lse = _forward(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    if bias is not None and not math.isfinite(out.sum(dtype=lse.dtype)):
        return None  # a mask that is added lets NaN and inf through
    if trained:
        if bool(large_lse(lse).any()):
            return None
        out.grad_fn.register_hook(hook)  # type: ignore[union-attr]
    # For a row of NaN logits the kernel returns 0, with lse 0, as for one that sees nothing. (For a
    # row of -inf alone it does so, too, and that is right.)
    if hook is None:
        # A compiler cannot branch on values. Every row sees the first key: if that logit is NaN,
        # the row is NaN.
        first_logit = (q.detach() * k.detach()[:, :, :1]).sum(-1, dtype=lse.dtype)
        out = (
            out
            + first_logit.masked_fill(~first_logit.isnan() | (lse != 0), 0).to(out.dtype)[..., None]
        )
    elif _some_zero(lse) and not (_finite(q) and _finite(k)):
        return None
    if q is not caller_q:
        out = in_dtype(out, caller_q.dtype).reshape(caller_q.shape)
    if hook is not None and out.stride() == caller_q.stride():
        return out
    return in_order_of(caller_q, out)


def _leaves_threads_idle(q: Tensor) -> bool:
    """Return whether the backward, which is parallel over heads only, would leave most threads
    idle."""
    b, hq, _, _ = q.shape
    return 2 * b * hq < torch.get_num_threads()


def forward(spec: Spec, call: Call) -> Forward | None:
    """Attend to each key range separately, and merge by log-sum-exp. Return None if a key is NaN or
    infinite: it may then reach rows that it must not reach, or be hidden where it must show."""
    b, hq, q_len, d = call.q.shape
    acc = acc_dtype(call.q.dtype)
    causal_square = is_causal(spec, call)
    one_launch = causal_square or spec.mask is None
    q, k, v = _kernel_inputs(call.q, call.k, call.v, fold_heads=not one_launch)
    if one_launch:
        out, lse = _forward(q, k, v, 0.0, causal_square, scale=spec.scale)
        may_hide_nan = _some_zero(lse)
    else:
        may_hide_nan = False
        out = torch.zeros(q.shape, dtype=acc, device=q.device)
        lse = torch.full(q.shape[:3], -math.inf, dtype=acc, device=q.device)
        for item, keys, bias, sees_any in _segments_with_bias(spec, call, q.dtype):
            index = item.kv_heads, item.group_heads, item.queries
            kv_index = item.kv_heads, item.group_heads, keys
            segment_out, segment_lse = _forward(
                q[index], k[kv_index], v[kv_index], 0.0, False, attn_mask=bias, scale=spec.scale
            )
            if sees_any is not None:
                segment_lse = segment_lse.masked_fill(~sees_any, -math.inf)
            may_hide_nan = may_hide_nan or _some_zero(segment_lse)
            _merge_into(out[index], lse[index], segment_out, segment_lse)
        may_hide_nan = may_hide_nan or bool(lse.isnan().any())
    if may_hide_nan and not _finite(call.k):
        return None
    if out.shape != call.q.shape:
        out, lse = out.reshape(b, hq, q_len, d), lse.reshape(b, hq, q_len)
    if call.sink is not None:
        out, lse = add_sink(out, lse, call.sink)
    out = in_dtype(out, spec.out_dtype(call.q.dtype))
    empty = lse.new_empty(0)
    return Forward(out, lse, empty, empty, empty)


def add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse with the sink's logit in the softmax of every row."""
    total = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
    base = total.masked_fill(total == -math.inf, 0)
    return out * (lse - base).exp_()[..., None], total


def backward(
    spec: Spec, call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
) -> Grads | None:  # fmt: skip
    """Return the sum of the backwards over key ranges; None where the kernels would compute another
    delta or a rough P, or leave most threads idle."""
    (b, hq, q_len, d), hk, kv_len = call.q.shape, *call.k.shape[1:3]
    acc = acc_dtype(call.q.dtype)
    if _leaves_threads_idle(call.q) or bool(large_lse(lse).any()):
        return None
    delta, delta_out = None, out
    if dlse is not None or call.sink is not None:  # else the kernels' own delta is right
        delta = delta_of(out, dout, dlse, acc)
        delta_out = _out_with_delta(delta, out, dout, dlse, acc)
        if delta_out is None:
            return None
    causal_square = is_causal(spec, call)
    one_launch = causal_square or spec.mask is None
    q, k, v = _kernel_inputs(call.q, call.k, call.v, fold_heads=not one_launch)
    dout, delta_out = _contiguous_rows(dout, q.dtype), _contiguous_rows(delta_out, q.dtype)
    # exp(-inf - inf) is 0, which is right for a row that sees nothing.
    lse = lse.nan_to_num(math.nan, math.inf, math.inf)
    if q.shape != dout.shape:
        dout, delta_out = dout.reshape(q.shape), delta_out.reshape(q.shape)
        lse = lse.reshape(q.shape[:3])
    if one_launch:
        grads = _backward(dout, q, k, v, delta_out, lse, 0.0, causal_square, scale=spec.scale)
        dq, dk, dv = grads
    else:
        dq, dk, dv = (torch.zeros(x.shape, dtype=acc, device=x.device) for x in (q, k, v))
        for item, keys, bias, _ in _segments_with_bias(spec, call, q.dtype):
            q_index = item.kv_heads, item.group_heads, item.queries
            kv_index = item.kv_heads, item.group_heads, keys
            grads = _backward(
                dout[q_index], q[q_index], k[kv_index], v[kv_index], delta_out[q_index],
                lse[q_index], 0.0, False, attn_mask=bias, scale=spec.scale,
            )  # fmt: skip
            for total, index, grad in zip(
                (dq, dk, dv), (q_index, kv_index, kv_index), grads, strict=True
            ):
                total[index] += grad
    dsink = None
    if call.sink is not None and delta is not None:
        weight = (call.sink.to(acc)[:, None] - lse.reshape(b, hq, q_len)).exp_()
        dsink = -(weight * delta).sum((0, 2))
    q_dtype, kv_dtype = spec.grad_dtypes(call.q.dtype)
    if hq != hk:
        dk, dv = dk.sum(1), dv.sum(1)
    dq, dk, dv = in_dtype(dq, q_dtype), in_dtype(dk, kv_dtype), in_dtype(dv, kv_dtype)
    if dq.shape != call.q.shape:
        dq = dq.reshape(b, hq, q_len, d)
    if dk.shape != call.k.shape:
        dk, dv = (x.reshape(b, hk, kv_len, d) for x in (dk, dv))
    return Grads(dq, dk, dv, dsink, [])


def _out_with_delta(
    delta: Tensor, out: Tensor, dout: Tensor, dlse: Tensor | None, acc: torch.dtype
) -> Tensor | None:
    """Return a stand-in for out, or None if it is not finite. The kernels use out only to compute
    delta = rowsum(dout∘out), but the right delta may have a gradient of lse subtracted. dout *
    delta / |dout|² has that product with dout."""
    if dlse is None or not dlse.any():  # a compiled program gives zeros
        return out if math.isfinite(delta.sum()) else None
    dout_square = dout.to(acc).square().sum(-1)
    if not math.isfinite(dout_square.sum()) or bool(((dout_square < 1e-30) & (delta != 0)).any()):
        return None
    return dout * (delta / dout_square.clamp(min=1e-30))[..., None]


def _contiguous_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in `dtype` with contiguous rows, which the kernels assume."""
    x = in_dtype(x, dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def _kernel_inputs(
    q: Tensor, k: Tensor, v: Tensor, *, fold_heads: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q as (b * hk, g, q_len, d), and k and v as views that every query head of the group
    shares. Return them unchanged if not `fold_heads` and no key head is shared."""
    dtype = acc_dtype(q.dtype)
    if q.dtype != dtype or not q.stride()[3] == k.stride()[3] == v.stride()[3] == 1:
        q, k, v = _contiguous_rows(q, dtype), _contiguous_rows(k, dtype), _contiguous_rows(v, dtype)
    (b, hq, q_len, d), (_, hk, kv_len, _) = q.shape, k.shape
    if hq == hk and not fold_heads:
        return q, k, v
    shape = b * hk, hq // hk, kv_len, d
    q = q.reshape(b * hk, hq // hk, q_len, d)
    k, v = (x.reshape(b * hk, 1, kv_len, d).expand(shape) for x in (k, v))
    return q, k, v


def _segments_with_bias(spec: Spec, call: Call, dtype: torch.dtype):
    """Yield work items with a key range, the additive mask over it (None if every pair is kept),
    and which rows see any key of it."""
    _, mask = graphs(spec)
    _, captured = split(spec, call.captured)
    positions = call.coords.positions(call.q.shape[2], call.k.shape[2], call.q.device)
    biases: dict[tuple, tuple[Tensor, Tensor]] = {}
    for item in work_items(spec, call, whole_rows=True):
        for start, stop, full in _join_segments(item.segments):
            keys = slice(start, stop)
            if full or mask is None:
                yield item, keys, None, None
                continue
            key = (item.queries.start, start, stop)
            if (
                key not in biases
                or mask.uses("b")
                or mask.uses("h")
                or max(map(len, positions)) > 1
            ):
                keep_mask = mask_at(
                    mask, captured, Positions(**index_tensors(call, item, *positions, keys))
                )
                keep_mask = keep_mask.expand(
                    *keep_mask.shape[:-2], item.queries.stop - item.queries.start, stop - start
                )
                bias = torch.zeros(keep_mask.shape, dtype=dtype, device=keep_mask.device)
                bias.masked_fill_(~keep_mask, -math.inf)
                biases = {
                    key: (bias, keep_mask.any(-1))
                }  # the next heads of the same rows share it
            yield item, keys, *biases[key]


def _join_segments(segments: tuple[KeySegment, ...]) -> list[KeySegment]:
    """Join neighbouring key ranges, where that costs less than another call and a merge."""
    joined: list[KeySegment] = []
    for _, group in groupby(enumerate(segments), lambda x: _first_touching(segments, x[0])):
        touching = [s for _, s in group]
        span = touching[-1].stop - touching[0].start
        partial = sum(s.stop - s.start for s in touching if not s.full)
        if 3 * partial >= span > partial:
            joined.append(KeySegment(touching[0].start, touching[-1].stop, full=False))
            continue
        for full, same in groupby(touching, lambda s: s.full):
            same_kind = list(same)
            joined.append(KeySegment(same_kind[0].start, same_kind[-1].stop, full))
    return joined


def _first_touching(segments: tuple[KeySegment, ...], n: int) -> int:
    """Return the first of the segments that reach segment n without a gap."""
    while n and segments[n - 1].stop == segments[n].start:
        n -= 1
    return n


def _merge_into(out: Tensor, lse: Tensor, o: Tensor, l: Tensor) -> None:
    """Merge o and l into out and lse in place (the algebra: `distributed.merge`)."""
    total = torch.logaddexp(lse, l)
    base = total.masked_fill(total == -math.inf, 0)
    out.mul_((lse - base).exp_()[..., None]).addcmul_(o, (l - base).exp_()[..., None])
    lse.copy_(total)


def is_causal(spec: Spec, call: Call) -> bool:
    """Return whether the mask is the one that the kernels support themselves: causal, with as many
    queries as keys."""
    coords = call.coords
    return (
        spec.mask is not None
        and call.q.shape[2] == call.k.shape[2]
        and spec.scale >= _MIN_CAUSAL_SCALE
        and spec.mask == causal_text()
        and call.captured.ints[spec.score_ints :] == [0]
        and coords.q == coords.kv
        and coords.q_pos is None is coords.kv_pos
    )
