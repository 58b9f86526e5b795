"""Compute the definition, in float64 and without tiles; tests compare other backends with it."""

import math

import torch
from torch import Tensor

from ..dropout import keep
from ..mods.evaluation.derivative import differentiable_gathers, joint
from ..mods.evaluation.pointwise import Positions, mask_at, score_at
from ..types import KV, Coords, Forward, Grads, Spec, acc_dtype
from .base import (
    LARGE_LSE,
    Call,
    CapabilityKey,
    delta_of,
    graph_text,
    graphs,
    no_limits,
    no_operator,
    nothing_prepared,
    scatter,
    split,
)  # fmt: skip
from .cache_rows import rows_of

name = "reference"
limits, native, code, prepare = no_limits, no_operator, graph_text, nothing_prepared


def reasons_against(spec: Spec, kind: CapabilityKey) -> list[str]:
    """It runs every call, slowly and with all pairs in memory."""
    return []


def accumulates(dtype: torch.dtype) -> torch.dtype:
    """Always float64."""
    return torch.float64


def forward(spec: Spec, call: Call) -> Forward:
    """softmax(score(scale q kᵀ) where kept) v, and its statistics."""
    v = _to_heads(call.v, call.q.shape[1])
    s, t, kept, keep_ = scores(spec, call)
    row_max = t.amax(-1) if t.shape[-1] else t.new_full(t.shape[:-1], -math.inf)
    lse = torch.logsumexp(t, -1) if t.shape[-1] else row_max
    if call.sink is not None:
        lse = torch.logaddexp(lse, call.sink.double()[:, None])
    p = softmax(t, call.sink)[0] * keep_
    dtype = call.q.dtype
    acc = acc_dtype(dtype)
    logits = s.masked_fill(~kept, -math.inf)
    largest = logits.amax((2, 3)) if min(s.shape[2:]) else s.new_full(s.shape[:2], -math.inf)
    return Forward(
        (p @ v).to(spec.out_dtype(dtype)),
        lse.to(acc),
        largest.to(acc) if spec.max_logit else s.new_empty(0, dtype=acc),
        row_max.to(acc) if spec.row_max else s.new_empty(0, dtype=acc),
    )


def infer(spec: Spec, call: Call) -> Forward:
    """`forward` of every row by itself, over its own keys, gathered from their pages."""
    kv = call.kv
    assert kv is not None
    hq, dv, acc = call.q.shape[1], call.v.shape[3], acc_dtype(call.q.dtype)
    rows = kv.lengths.shape[0]
    new = lambda shape, value, dtype: call.q.new_full(shape, value, dtype=dtype)
    shape = call.q.shape[:3]
    lse = new(shape, -math.inf, acc)
    if call.sink is not None:
        lse.copy_(call.sink.to(acc)[:, None])
    result = Forward(
        new((*shape, dv), 0, spec.out_dtype(call.q.dtype)),
        lse,
        new((rows, hq) if spec.max_logit else (0,), -math.inf, acc),
        new(shape if spec.row_max else (0,), -math.inf, acc),
    )
    for row, q_row, queries, length in rows_of(call):
        q_len = queries.stop - queries.start
        row_call = call.replace(
            q=call.q[q_row : q_row + 1, :, queries],
            k=_row_keys(call.k, kv.k_scale, kv, row, length),
            v=_row_keys(call.v, kv.v_scale, kv, row, length),
            tiles=None,
            coords=call.coords._replace(
                b=call.coords.b + row,
                q_pos=torch.arange(length - q_len, length, device=call.q.device),
            ),
            kv=None,
        )
        row_result = forward(spec, row_call)
        result.out[q_row, :, queries] = row_result.out[0]
        result.lse[q_row, :, queries] = row_result.lse[0]
        if spec.max_logit:
            result.max_logit[row] = row_result.max_logit[0]
        if spec.row_max:
            result.row_max[q_row, :, queries] = row_result.row_max[0]
    return result


def _row_keys(x: Tensor, scale: Tensor | None, kv: KV, row: int, length: int) -> Tensor:
    """The keys or values of a row, `(1, hk, length, width)`, in float64."""
    if kv.page_table is None:
        own = x[row, :, :length].double()
    else:
        page = x.shape[2]
        at = kv.page_table[row, : -(-length // page)].long()
        own = x[at].transpose(0, 1).flatten(1, 2)[:, :length].double()
    return (own if scale is None else own * scale[row].double()[:, None, None])[None]


def backward(
    spec: Spec,
    call: Call,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    needs: tuple[bool, ...],
) -> Grads:
    """dv = Pᵀ dout, dS = P∘(dP − delta)∘score'(S), dq = scale dS k, dk = scale dSᵀ q."""
    hq, hk = call.q.shape[1], call.k.shape[1]
    acc = acc_dtype(call.q.dtype)
    of_q, of_kv = spec.grad_dtypes(call.q.dtype)
    delta = delta_of(out, dout, dlse, torch.float64)
    q, dout, lse = (x.double() for x in (call.q, dout, lse))
    k, v = (_to_heads(x, hq) for x in (call.k, call.v))
    s, t, kept, keep_ = scores(spec, call)
    p, of_sink = _by_lse(t, call.sink, lse)
    if not spec.partial:  # a merged lse includes keys that are not here
        large = (lse.abs() > LARGE_LSE) & (lse.abs() != math.inf)
        exact = softmax(t, call.sink)
        p = torch.where(large[..., None], exact[0], p)
        of_sink = torch.where(large, exact[1], of_sink)
    dt = p * ((dout @ v.mT) * keep_ - delta[..., None])
    ds: Tensor = dt
    captured: list[Tensor | None] = [None] * spec.score_tensors
    if spec.score is not None:
        ds, grads = _through_score(spec, call, s, kept, dt, needs)
        captured = [None if g is None else g.to(acc) for g in grads]
    group = lambda x: x.unflatten(1, (hk, hq // hk)).sum(2)
    dsink = None
    if call.sink is not None:
        dsink = -(of_sink * delta).sum((0, 2)).to(acc)
    return Grads(
        (spec.scale * ds @ k).to(of_q),
        group(spec.scale * ds.mT @ q).to(of_kv),
        group((p * keep_).mT @ dout).to(of_kv),
        dsink,
        captured,
    )


def scores(spec: Spec, call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """S, T (-inf where not kept), kept, and the dropout factor, of all pairs."""
    score, mask = graphs(spec)
    of_score, of_mask = split(spec, call.captured)
    at = _positions(call.q, call.k, call.coords)
    s = spec.scale * call.q.double() @ _to_heads(call.k, call.q.shape[1]).mT
    kept = torch.ones_like(s, dtype=torch.bool)
    if mask is not None:
        kept = kept & mask_at(mask, of_mask, at)
    t = s
    if score is not None:
        (t,), _ = score_at(score, of_score, at, s, kept)
        t = torch.as_tensor(t, dtype=s.dtype, device=s.device).expand_as(s)
    t = t.masked_fill(~kept, -math.inf)
    kept = kept & (t != -math.inf)
    factor = torch.ones_like(s)
    if spec.dropout > 0:
        assert call.seed is not None
        factor = keep(spec.dropout, call.seed, **at.values).to(s.dtype)
        factor /= max(1 - spec.dropout, 1e-300)
    return s, t, kept, factor


def _through_score(
    spec: Spec, call: Call, s: Tensor, kept: Tensor, dt: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor, list[Tensor | None]]:
    """dS and the gradients of captured tensors, from dT."""
    score, _ = graphs(spec)
    assert score is not None
    of_score, _ = split(spec, call.captured)
    wanted = differentiable_gathers(score, [n for n, need in enumerate(needs) if need])
    derivative = joint(spec.score, wanted)  # type: ignore[arg-type]
    at = _positions(call.q, call.k, call.coords)
    (_, by_s, *by_gather), gathers = score_at(derivative, of_score, at, s, kept)
    # Where a pair is not kept dT is 0, and the derivative may be anything, infinity included.
    times = lambda by: torch.where(kept, dt * by, 0.0)
    grads: list[Tensor | None] = [
        torch.zeros(t.shape, dtype=dt.dtype, device=dt.device) if need else None
        for t, need in zip(of_score.tensors, needs, strict=True)
    ]
    in_order = [n for n, _ in derivative.gathers]
    original = [n for n, _ in score.gathers]
    for n, by in zip(wanted, by_gather, strict=True):
        node = score.nodes[n]
        grad = grads[int(node.args[0][1:])]  # type: ignore[index]
        indices = gathers.indices.get(in_order[original.index(n)], ())
        scatter(grad, indices, times(by))  # type: ignore[arg-type]
    return times(by_s), grads


def _positions(q: Tensor, k: Tensor, coords: Coords) -> Positions:
    b, hq, q_len, _ = q.shape
    device = q.device
    q_idx, kv_idx = coords.positions(q_len, k.shape[2], device)
    return Positions(
        torch.arange(coords.b, coords.b + b, device=device)[:, None, None, None],
        torch.arange(coords.h, coords.h + hq, device=device)[:, None, None],
        q_idx[:, None, :, None],
        kv_idx[:, None, None, :],
    )


def _to_heads(x: Tensor, hq: int) -> Tensor:
    """Query head h reads key head h // (hq // hk)."""
    return x.double().repeat_interleave(hq // x.shape[1], dim=1)


def softmax(t: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """P, and the sink's share of every row, without lse: near a lse of -1e30 the logarithm of the
    sum is lost."""
    s = _row_results(t, sink)
    m = torch.maximum(s, t.amax(-1)) if t.shape[-1] else s
    m = m.masked_fill(m == -math.inf, 0)
    p, of_sink = (t - m[..., None]).exp(), (s - m).exp()
    total = p.sum(-1) + of_sink
    total = total.masked_fill(total == 0, 1)  # a row that sees nothing
    return p / total[..., None], of_sink / total


def _by_lse(t: Tensor, sink: Tensor | None, lse: Tensor) -> tuple[Tensor, Tensor]:
    """P and the sink's share from the lse of all keys; 0 in a row that sees nothing, whose lse is
    −inf."""
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    return (t - lse[..., None]).exp(), (_row_results(t, sink) - lse).exp()


def _row_results(t: Tensor, sink: Tensor | None) -> Tensor:
    if sink is None:
        return t.new_full(t.shape[:-1], -math.inf)
    return sink.double()[:, None].expand(t.shape[:-1])
