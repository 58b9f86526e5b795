"""Compute the definition, in float64 and without tiles; tests compare other backends with it."""

import math

import torch
from torch import Tensor

from ..dropout import keep, kept_factor
from ..mods.evaluation.derivative import by_output, differentiable_gathers, joint, with_tangent
from ..mods.evaluation.pointwise import Positions, mask_at, score_at
from ..types import KV, Coords, Dual, Forward, Grads, Spec, Tangents, acc_dtype
from .base import (
    Call,
    CapabilityKey,
    delta_of,
    graph_text,
    graphs,
    large_lse,
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
    """Accept every call; it is slow and holds all pairs in memory."""
    return []


def accumulates(dtype: torch.dtype) -> torch.dtype:
    """Return float64, always."""
    return torch.float64


def forward(spec: Spec, call: Call) -> Forward:
    """Return softmax(score(scale q kᵀ) where kept) v, and its statistics."""
    v = _to_heads(call.v, call.q.shape[1])
    s, t, keep_mask, dropout_factor, number = scores(spec, call)
    row_max = t.amax(-1) if t.shape[-1] else t.new_full(t.shape[:-1], -math.inf)
    lse = torch.logsumexp(t, -1) if t.shape[-1] else row_max
    if call.sink is not None:
        lse = torch.logaddexp(lse, call.sink.double()[:, None])
    p, sink_p = softmax(t, call.sink)
    if number is None:
        entropy = torch.special.entr(p).sum(-1) + torch.special.entr(sink_p)
    else:
        entropy = (p * number).sum(-1)
    dtype = call.q.dtype
    acc = acc_dtype(dtype)
    logits = s.masked_fill(~keep_mask, -math.inf)
    max_logit = logits.amax((2, 3)) if min(s.shape[2:]) else s.new_full(s.shape[:2], -math.inf)
    return Forward(
        (p * dropout_factor @ v).to(spec.out_dtype(dtype)),
        lse.to(acc),
        max_logit.to(acc) if spec.max_logit else s.new_empty(0, dtype=acc),
        row_max.to(acc) if spec.row_max else s.new_empty(0, dtype=acc),
        entropy.to(acc) if spec.entropy else s.new_empty(0, dtype=acc),
    )


def infer(spec: Spec, call: Call) -> Forward:
    """Return `forward` of every row by itself, over its own keys, gathered from their pages."""
    kv = call.kv
    assert kv is not None
    hq, dv, acc = call.q.shape[1], call.v.shape[3], acc_dtype(call.q.dtype)
    rows = kv.lengths.shape[0]
    filled = lambda shape, value, dtype: call.q.new_full(shape, value, dtype=dtype)
    shape = call.q.shape[:3]
    lse = filled(shape, -math.inf, acc)
    if call.sink is not None:
        lse.copy_(call.sink.to(acc)[:, None])
    result = Forward(
        filled((*shape, dv), 0, spec.out_dtype(call.q.dtype)),
        lse,
        filled((rows, hq) if spec.max_logit else (0,), -math.inf, acc),
        filled(shape if spec.row_max else (0,), -math.inf, acc),
        filled((0,), 0, acc),
    )
    for row, q_row, queries, length in rows_of(spec, call):
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


def _row_keys(cache: Tensor, scale: Tensor | None, kv: KV, row: int, length: int) -> Tensor:
    """Return the keys or values of a row, `(1, hk, length, width)`, in float64."""
    if kv.page_table is None:
        row_keys = cache[row, :, :length].double()
    else:
        page_len = cache.shape[2]
        page_ids = kv.page_table[row, : -(-length // page_len)].long()
        missing = (page_ids < 0) | (page_ids >= len(cache))  # of keys that nobody sees
        pages = cache[page_ids.masked_fill(missing, 0)].double()
        pages = pages.masked_fill(missing[:, None, None, None], 0)
        row_keys = pages.transpose(0, 1).flatten(1, 2)[:, :length]
    return (row_keys if scale is None else row_keys * scale[row].double()[:, None, None])[None]


def backward(
    spec: Spec,
    call: Call,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    needs: tuple[bool, ...],
    dentropy: Tensor | None = None,
) -> Grads:
    """Compute dv = Pᵀ dout, dS = P∘(dP − delta)∘score'(S), dq = scale dS k, dk = scale dSᵀ q."""
    hq, hk = call.q.shape[1], call.k.shape[1]
    acc = acc_dtype(call.q.dtype)
    q_dtype, kv_dtype = spec.grad_dtypes(call.q.dtype)
    delta = delta_of(out, dout, dlse, torch.float64)
    q, dout, lse = (x.double() for x in (call.q, dout, lse))
    k, v = (_to_heads(x, hq) for x in (call.k, call.v))
    s, t, keep_mask, dropout_factor, number = scores(spec, call)
    p, sink_p = _softmax_by_lse(t, call.sink, lse)
    if not spec.partial:  # a merged lse includes keys that are not here
        large = large_lse(lse)
        exact_shares = softmax(t, call.sink)
        p = torch.where(large[..., None], exact_shares[0], p)
        sink_p = torch.where(large, exact_shares[1], sink_p)
    dt = p * ((dout @ v.mT) * dropout_factor - delta[..., None])
    dsink_rows = -sink_p * delta
    dnumber = None
    if dentropy is not None and number is not None:
        dnumber = p * dentropy.double()[..., None]
        dt = dt + dnumber * number
    elif dentropy is not None:
        dt = dt + dentropy.double()[..., None] * torch.special.entr(p)
        dsink_rows = dsink_rows + dentropy.double() * torch.special.entr(sink_p)
    ds: Tensor = dt
    captured_grads: list[Tensor | None] = [None] * spec.score_tensors
    if spec.score is not None:
        ds, grads = _score_gradients(spec, call, s, keep_mask, dt, dnumber, needs)
        captured_grads = [None if g is None else g.to(acc) for g in grads]
    sum_groups = lambda x: x.unflatten(1, (hk, hq // hk)).sum(2)
    dsink = None
    if call.sink is not None:
        dsink = dsink_rows.sum((0, 2)).to(acc)
    return Grads(
        (spec.scale * ds @ k).to(q_dtype),
        sum_groups(spec.scale * ds.mT @ q).to(kv_dtype),
        sum_groups((p * dropout_factor).mT @ dout).to(kv_dtype),
        dsink,
        captured_grads,
    )


def tangent(spec: Spec, call: Call, along: Tangents) -> Dual:
    """Return `forward`, and out' = ((P (T' − lse'))∘K) v + (P∘K) v' with lse' = the mean of T'."""
    hq, dtype = call.q.shape[1], call.q.dtype
    acc = acc_dtype(dtype)
    s, t, keep_mask, dropout_factor, number = scores(spec, call)
    p, sink_p = softmax(t, call.sink)
    s_tangent = torch.zeros_like(s)
    if along.q is not None:
        s_tangent += spec.scale * along.q.double() @ _to_heads(call.k, hq).mT
    if along.k is not None:
        s_tangent += spec.scale * call.q.double() @ _to_heads(along.k, hq).mT
    t_tangent: Tensor = s_tangent
    number_tangent: list = []
    if spec.score is not None:
        captured, _ = split(spec, call.captured)
        tables = [x for x in along.captured if x is not None]
        captured = captured._replace(tensors=captured.tensors + tables)
        (_, t_tangent, *number_tangent), _ = score_at(
            with_tangent(spec.score, along.moving), captured,
            _positions(call.q, call.k, call.coords), s, keep_mask, score_tangent=s_tangent,
        )  # fmt: skip
    # Where P is 0 the tangent counts nothing, and may be anything, infinity included.
    t_tangent = torch.as_tensor(t_tangent, dtype=s.dtype, device=s.device)
    t_tangent = torch.where(p == 0, 0.0, t_tangent)
    sink_tangent = torch.zeros_like(sink_p)
    if along.sink is not None:
        sink_tangent = torch.where(sink_p == 0, 0.0, along.sink.double()[:, None])
    lse_tangent = (p * t_tangent).sum(-1) + sink_p * sink_tangent
    moves = t_tangent - lse_tangent[..., None]
    weights = p * moves * dropout_factor
    out_tangent = torch.where(p == 0, 0.0, weights) @ _to_heads(call.v, hq)
    if number is None:
        entropy_tangent = torch.where(p == 0, 0.0, torch.special.entr(p) * moves).sum(-1)
        entropy_tangent += torch.special.entr(sink_p) * (sink_tangent - lse_tangent)
    else:
        moves_mean = p * (number * moves + number_tangent[1])
        entropy_tangent = torch.where(p == 0, 0.0, moves_mean).sum(-1)
    if along.v is not None:
        out_tangent = out_tangent + (p * dropout_factor) @ _to_heads(along.v, hq)
    return Dual(
        *forward(spec, call), out_tangent.to(spec.result_dtype(dtype)), lse_tangent.to(acc),
        entropy_tangent.to(acc) if spec.entropy else lse_tangent.new_empty(0, dtype=acc),
    )  # fmt: skip


def scores(spec: Spec, call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return S, T (-inf where masked), the kept pairs, the dropout factor, and the number that the
    score observes (0 where masked), if any, of all pairs."""
    score, mask = graphs(spec)
    score_captured, mask_captured = split(spec, call.captured)
    positions = _positions(call.q, call.k, call.coords)
    s = spec.scale * call.q.double() @ _to_heads(call.k, call.q.shape[1]).mT
    keep_mask = torch.ones_like(s, dtype=torch.bool)
    if mask is not None:
        keep_mask = keep_mask & mask_at(mask, mask_captured, positions)
    t, number = s, None
    if score is not None:
        (t, *numbers), _ = score_at(score, score_captured, positions, s, keep_mask)
        number = numbers[0] if numbers else None
        t = torch.as_tensor(t, dtype=s.dtype, device=s.device).expand_as(s)
    t = t.masked_fill(~keep_mask, -math.inf)
    keep_mask = keep_mask & (t != -math.inf)
    if number is not None:
        number = torch.as_tensor(number, dtype=s.dtype, device=s.device)
        number = torch.where(keep_mask, number, 0.0)
    factor = torch.ones_like(s)
    if spec.dropout > 0:
        assert call.seed is not None
        kept = keep(spec.dropout, call.seed, **positions.values)
        factor = kept.to(s.dtype) * kept_factor(spec.dropout)
    return s, t, keep_mask, factor, number


def _score_gradients(
    spec: Spec, call: Call, s: Tensor, keep_mask: Tensor, dt: Tensor, dnumber: Tensor | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
    """Return dS and the gradients of captured tensors, from dT and the gradient of the number that
    the score observes."""
    score, _ = graphs(spec)
    assert score is not None
    score_captured, _ = split(spec, call.captured)
    trained_gathers = differentiable_gathers(score, [n for n, need in enumerate(needs) if need])
    derivative = joint(spec.score, trained_gathers)  # type: ignore[arg-type]
    positions = _positions(call.q, call.k, call.coords)
    outputs, gathers = score_at(derivative, score_captured, positions, s, keep_mask)
    (_, of_t), *of_number = by_output(score, outputs)
    parts = [[dt * d for d in of_t]]
    if dnumber is not None:
        parts.append([dnumber * d for d in of_number[0][1]])
    # Where a pair is not kept dT is 0, and the derivative may be anything, infinity included.
    ds, *dgathers = [torch.where(keep_mask, sum(same), 0.0) for same in zip(*parts, strict=True)]
    grads: list[Tensor | None] = [
        torch.zeros(t.shape, dtype=dt.dtype, device=dt.device) if need else None
        for t, need in zip(score_captured.tensors, needs, strict=True)
    ]
    joint_gathers = [n for n, _ in derivative.gathers]
    score_gathers = [n for n, _ in score.gathers]
    for n, values in zip(trained_gathers, dgathers, strict=True):
        node = score.nodes[n]
        grad = grads[int(node.args[0][1:])]  # type: ignore[index]
        indices = gathers.indices.get(joint_gathers[score_gathers.index(n)], ())
        scatter(grad, indices, values)  # type: ignore[arg-type]
    return ds, grads


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
    """Repeat k or v so that query head h reads key head h // (hq // hk)."""
    return x.double().repeat_interleave(hq // x.shape[1], dim=1)


def softmax(t: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return P, and the sink's share of every row, without lse: near a lse of -1e30 the logarithm
    of the sum is lost."""
    sink_logits = _sink_by_row(t, sink)
    m = torch.maximum(sink_logits, t.amax(-1)) if t.shape[-1] else sink_logits
    m = m.masked_fill(m == -math.inf, 0)
    p, sink_p = (t - m[..., None]).exp(), (sink_logits - m).exp()
    total = p.sum(-1) + sink_p
    total = total.masked_fill(total == 0, 1)  # a row that sees nothing
    return p / total[..., None], sink_p / total


def _softmax_by_lse(t: Tensor, sink: Tensor | None, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return P and the sink's share from the lse of all keys; 0 in a row that sees nothing, whose
    lse is −inf."""
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    return (t - lse[..., None]).exp(), (_sink_by_row(t, sink) - lse).exp()


def _sink_by_row(t: Tensor, sink: Tensor | None) -> Tensor:
    if sink is None:
        return t.new_full(t.shape[:-1], -math.inf)
    return sink.double()[:, None].expand(t.shape[:-1])
