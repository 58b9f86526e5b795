"""Compute the forward and its tangent on the CPU in one pass over the keys, in blocks of torch ops.

Beside the online softmax (m, l, o) a row carries r, the mean of T' under P so far, and a second
accumulator, a = Σ p (T' − r) v + p v'. Where a block moves r by e, a moves by −e o. At the end r is
lse' and a / l is out': what all T' of a row have in common is never added up and subtracted again.
Σ p (T − m) (T' − r) is carried likewise: over l it is −entropy'. (Σ p (T' − r) is 0, so m is free.)
Where the score observes f, Σ p (f (T' − r) + f') is, and over l it is the tangent of f's mean.
"""

import math
from functools import partial

import torch
from torch import Tensor

from ...mods.evaluation.derivative import with_tangent
from ...mods.evaluation.pointwise import bind
from ...types import Captured, Dual, Spec, Tangents
from ..base import Call, observes
from .tile_plan import work_items
from .tiled import PairBlock, by_kv_head, entropy_of, flat, online_softmax_step, sinks_by_row


class _RowSums:
    """The sums of some rows over the keys so far: the softmax's, and those of the tangent."""

    def __init__(
        self, shape: tuple[int, ...], width: int, dtype: torch.dtype, entropy: bool
    ) -> None:  # fmt: skip
        zeros = lambda n: torch.zeros(*shape, n, dtype=dtype, device="cpu")
        self.o, self.a = zeros(width), zeros(width)
        self.m = torch.full((*shape, 1), -math.inf, dtype=dtype, device="cpu")
        self.total, self.mean = zeros(1), zeros(1)  # l and r
        self.moment = zeros(1) if entropy else None  # Σ p (T − m), or Σ p f
        self.moment_tangent = zeros(1)  # Σ p (T − m) (T' − r), or Σ p (f (T' − r) + f')

    def add(self, t: Tensor, t_tangent: Tensor, observed: list) -> tuple[Tensor, Tensor]:
        """Take one step of the softmax: rescale the sums, move the mean of T'. `observed`: f and
        f' of the number that the score observes, if any.

        **Returns:** p = exp(T − m), and p (T' − r) in the place of T'.
        """
        p, self.m, rescale = online_softmax_step(t, self.m, self.total, self.moment, observed)
        t_tangent.sub_(self.mean)
        if self.moment is not None:  # t is now p (T − m), or p f
            of_block = t.mul_(t_tangent)
            if observed:  # where p is 0, f may be infinite or NaN
                of_block.addcmul_(p, torch.as_tensor(observed[1], dtype=p.dtype, device="cpu"))
                of_block.masked_fill_(p == 0, 0)
            self.moment_tangent.mul_(rescale).add_(of_block.sum(-1, keepdim=True))
        p_tangent = t_tangent.mul_(p)
        step = p_tangent.sum(-1, keepdim=True)
        step /= self.total.masked_fill(self.total == 0, 1)
        if self.moment is not None:
            self.moment_tangent.addcmul_(step, self.moment, value=-1)
        p_tangent.addcmul_(p, step, value=-1)
        self.mean += step
        self.o.mul_(rescale)
        self.a.mul_(rescale).addcmul_(self.o, step, value=-1)
        return p, p_tangent


class _Scores:
    """T and T' of blocks of pairs. S' is [q', q] times [k, k'], less what does not move."""

    def __init__(self, call: Call, along: Tangents, pairs: PairBlock) -> None:
        hk, acc = call.k.shape[1], pairs.acc
        self.pairs, self.graph = pairs, None
        self.q, self.k = by_kv_head(call.q, hk, acc), by_kv_head(call.k, hk, acc)[:, 0]
        factors = []
        if along.q is not None:
            factors.append((by_kv_head(along.q, hk, acc), self.k))
        if along.k is not None:
            factors.append((self.q, by_kv_head(along.k, hk, acc)[:, 0]))
        self.factors = [torch.cat(same, -1) for same in zip(*factors, strict=True)]
        if pairs.score is not None:
            self.graph = with_tangent(pairs.score.text, along.moving)
            tensors, ints, floats = pairs.score_captured
            tables = [x for x in along.captured if x is not None]
            pairs.bound_score = bind(self.graph, Captured(tensors + tables, ints, floats))

    def of_block(self) -> tuple[Tensor, Tensor, Tensor, list]:
        """Return T, T' and S, the first two in blocks that may be overwritten; and f and f' of the
        number that the score observes, if any. T is -inf where a pair is not kept, and the others
        may be anything there."""
        pairs, keep_s = self.pairs, self.pairs.spec.max_logit
        s = self._product(self.q, self.k)
        t, t_tangent = s, self._product(*self.factors) if self.factors else pairs.new().zero_()
        keep_mask, observed = pairs.keep_mask(), []
        if self.graph is not None:
            (t, t_tangent, *observed), _ = pairs.scores(
                self.graph, s, keep_mask, overwrite=not keep_s, s_tangent=t_tangent
            )
            t = pairs.full_sized(t, [s, *observed] if keep_s else observed)
            t_tangent = pairs.full_sized(t_tangent, [s, t, *observed])
        if keep_mask is not None:
            t.masked_fill_(~keep_mask, -math.inf)
        if keep_mask is not None or self.graph is not None:
            # A pair that is not kept counts nothing, and its T' may be infinite or NaN.
            t_tangent.masked_fill_(t == -math.inf, 0)
        return t, t_tangent, s, observed

    def _product(self, q: Tensor, k: Tensor) -> Tensor:
        item, s = self.pairs.item, self.pairs.new()
        q_block = q[item.kv_heads, item.group_heads, item.queries].flatten(1, 2)
        k_block, scale = k[item.kv_heads, self.pairs.keys], self.pairs.spec.scale
        torch.baddbmm(flat(s), q_block, k_block.mT, beta=0, alpha=scale, out=flat(s))
        return s


def tangent(spec: Spec, call: Call, along: Tangents) -> Dual:
    """Compute the forward and its tangent: six products per block where q, k and v move."""
    (b, hq, q_len, _), hk, dv = call.q.shape, call.k.shape[1], call.v.shape[3]
    pairs = PairBlock(spec, call)
    acc, g, observing = pairs.acc, hq // hk, observes(spec)
    scores = _Scores(call, along, pairs)
    v = by_kv_head(call.v, hk, acc)[:, 0]
    v_tangent = None if along.v is None else by_kv_head(along.v, hk, acc)[:, 0]
    sink, sink_tangent = (sinks_by_row(x, b, hk, g, acc) for x in (call.sink, along.sink))
    empty = partial(torch.empty, device="cpu")
    rows = b * hk, g, q_len
    out = empty(*rows, dv, dtype=spec.out_dtype(call.q.dtype))
    out_tangent = empty(*rows, dv, dtype=spec.result_dtype(call.q.dtype))
    lse, lse_tangent, row_max, entropy, entropy_tangent = (
        empty(*rows, dtype=acc) for _ in range(5)
    )
    max_logit = torch.full((b * hk, g), -math.inf, dtype=acc, device="cpu")
    for item in work_items(spec, call):
        at, heads = (item.kv_heads, item.group_heads, item.queries), item.kv_heads
        sums = _RowSums(tuple(lse[at].shape), dv, acc, spec.entropy)
        for segment in item.segments:
            pairs.enter(item, segment)
            t, t_tangent, s, observed = scores.of_block()
            if spec.max_logit:
                largest = s.masked_fill(t == -math.inf, -math.inf).amax((2, 3))
                max_logit[at[:2]] = torch.maximum(max_logit[at[:2]], largest)
            p, p_tangent = sums.add(t, t_tangent, observed)
            if spec.dropout > 0:
                factors = pairs.dropout_factors()
                p.mul_(factors)
                p_tangent.mul_(factors)
            flat(sums.o).baddbmm_(flat(p), v[heads, pairs.keys])
            flat(sums.a).baddbmm_(flat(p_tangent), v[heads, pairs.keys])
            if v_tangent is not None:
                flat(sums.a).baddbmm_(flat(p), v_tangent[heads, pairs.keys])
        row_max[at] = sums.m[..., 0]
        if sink is not None:  # one more key, whose value is 0
            t, t_tangent = sink[at[:2]].expand_as(sums.m).clone(), torch.zeros_like(sums.m)
            if sink_tangent is not None:
                t_tangent += sink_tangent[at[:2]]
            sums.add(t, t_tangent, [0, 0] if observing else [])
        total = sums.total.masked_fill(sums.total == 0, 1)
        if sums.moment is not None:
            entropy[at] = entropy_of(sums.total, sums.moment, observing)[..., 0]
            moment_tangent = sums.moment_tangent if observing else -sums.moment_tangent
            entropy_tangent[at] = (moment_tangent / total)[..., 0]
        lse[at], lse_tangent[at] = (sums.m + sums.total.log())[..., 0], sums.mean[..., 0]
        out[at], out_tangent[at] = sums.o.div_(total), sums.a.div_(total)
    of_rows = lambda x: x.view(b, hq, q_len, *x.shape[3:])
    return Dual(
        of_rows(out), of_rows(lse),
        max_logit.view(b, hq) if spec.max_logit else lse.new_empty(0),
        of_rows(row_max) if spec.row_max else lse.new_empty(0),
        of_rows(entropy) if spec.entropy else lse.new_empty(0),
        of_rows(out_tangent), of_rows(lse_tangent),
        of_rows(entropy_tangent) if spec.entropy else lse.new_empty(0),
    )  # fmt: skip
