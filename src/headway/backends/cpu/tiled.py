"""Compute FlashAttention on the CPU in blocks of torch ops, forward and backward.

(Dao et al. 2022, arXiv 2205.14135, algorithms 1 and 4; Dao 2023, arXiv 2307.08691.) A block of S is
in a buffer that stays in the cache, and every op writes in place. Half precision inputs are widened
to float32, which loses nothing and which most CPUs multiply faster.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...dropout import keep, kept_factor
from ...mods.evaluation.derivative import by_output, differentiable_gathers, joint
from ...mods.evaluation.pointwise import Gathers, Positions, bind, mask_at, score_at
from ...mods.graph import Graph
from ...types import Forward, Grads, Spec, acc_dtype
from ..base import Call, delta_of, graphs, large_lse, observes, scatter, split
from .tile_plan import KeySegment, WorkItem, index_tensors, work_items


class Buffers:
    """A pool of reusable memory: the n-th request of a round gets the n-th block."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[torch.dtype, int], Tensor] = {}
        self.taken = 0

    def start(self, shape: tuple[int, ...]) -> None:
        """Begin a round, in which every block has this shape."""
        self.shape, self.taken = shape, 0

    def __call__(self, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised block."""
        key, size = (dtype, self.taken), math.prod(self.shape)
        if key not in self.blocks or self.blocks[key].numel() < size:
            self.blocks[key] = torch.empty(size, dtype=dtype, device="cpu")
        self.taken += 1
        return self.blocks[key][:size].view(self.shape)


class PairBlock:
    """A block of pairs (n, g, i, j): its logits S, scores T, and which pairs are kept."""

    def __init__(self, spec: Spec, call: Call) -> None:
        self.spec, self.call = spec, call
        self.score, self.mask = graphs(spec)
        self.score_captured, self.mask_captured = split(spec, call.captured)
        self.acc = acc_dtype(call.q.dtype)
        self.buffers = Buffers()
        self.axis_positions = call.coords.positions(call.q.shape[2], call.k.shape[2], call.q.device)
        self.bound_mask = {} if self.mask is None else bind(self.mask, self.mask_captured)
        self.bound_score = {} if self.score is None else bind(self.score, self.score_captured)
        per_head = self.mask is not None and (self.mask.uses("b") or self.mask.uses("h"))
        self.shared_masks = not per_head and max(map(len, self.axis_positions)) == 1
        self._cached_masks: dict[tuple[int, int], Tensor] = {}

    def enter(self, item: WorkItem, segment: KeySegment) -> None:
        """Move to the pairs of a work item and a segment."""
        self.item, self.segment = item, segment
        self.keys = slice(segment.start, segment.stop)
        self.shape = (
            item.kv_heads.stop - item.kv_heads.start,
            item.group_heads.stop - item.group_heads.start,
            item.queries.stop - item.queries.start,
            segment.stop - segment.start,
        )
        self.buffers.start(self.shape)
        self._pair_positions: Positions | None = None

    @property
    def pair_positions(self) -> Positions:
        """Return the positions of this block's pairs, computed at their first use."""
        if self._pair_positions is None:
            self._pair_positions = Positions(
                **index_tensors(self.call, self.item, *self.axis_positions, self.keys)
            )
        return self._pair_positions

    def new(self) -> Tensor:
        """Return an uninitialised block of the accumulation dtype."""
        return self.buffers(self.acc)

    def keep_mask(self) -> Tensor | None:
        """Return which pairs the mask keeps; None for all."""
        if self.mask is None or self.segment.full:
            return None
        if not self.shared_masks:
            return mask_at(self.mask, self.bound_mask, self.pair_positions)
        key = (self.item.queries.start, self.keys.start)
        if key not in self._cached_masks:  # the next heads use it again
            if len(self._cached_masks) > 64:
                self._cached_masks.clear()
            self._cached_masks[key] = mask_at(self.mask, self.bound_mask, self.pair_positions)
        return self._cached_masks[key]

    def scores(
        self, graph: Graph, s: Tensor, keep_mask: Tensor | None, *, overwrite: bool,
        s_tangent: Tensor | None = None,
    ) -> tuple[list, Gathers]:  # fmt: skip
        """Return the outputs of the score's graph, or of its joint graph, on logits S."""
        return score_at(
            graph, self.bound_score, self.pair_positions, s, keep_mask, self.buffers, overwrite,
            s_tangent,
        )  # fmt: skip

    def dropout_factors(self) -> Tensor:
        """Return what dropout multiplies the pairs with."""
        p = self.spec.dropout
        assert self.call.seed is not None
        keep_mask = keep(p, self.call.seed, **self.pair_positions.values)
        return keep_mask.to(self.acc).mul_(kept_factor(p))

    def full_sized(self, t: Tensor | float, distinct_from: list | None = None) -> Tensor:
        """Return a score as a block that may be overwritten and is none of `distinct_from`."""
        if (
            isinstance(t, Tensor)
            and t.shape == self.shape
            and all(t is not other for other in distinct_from or ())
        ):
            return t
        return self.new().copy_(torch.as_tensor(t, dtype=self.acc, device="cpu"))


class ScoreGradients:
    """The score's derivatives on a block of pairs, and the gradients of the tensors that it
    captures."""

    def __init__(self, pairs: PairBlock, needs: tuple[bool, ...], dmean: Tensor | None) -> None:
        self.pairs, self.dmean = pairs, dmean  # of the number that the score observes
        self.grads: list[Tensor | None] = [
            torch.zeros(t.shape, dtype=pairs.acc, device="cpu") if need else None
            for t, need in zip(pairs.score_captured.tensors, needs, strict=True)
        ]
        if pairs.score is None:
            return
        trained_gathers = differentiable_gathers(
            pairs.score, [n for n, need in enumerate(needs) if need]
        )
        self.graph = joint(pairs.score.text, trained_gathers)
        # The n-th gather of the joint graph is the n-th of the score's.
        gather_nodes = [n for n, _ in pairs.score.gathers]
        self.trained_gathers = [self.graph.gathers[gather_nodes.index(n)] for n in trained_gathers]

    def scores(self, s: Tensor, keep_mask: Tensor | None) -> Tensor:
        """Return T in a block that may be overwritten; the derivatives are stored for
        `gradient`."""
        outputs, self.gathers = self.pairs.scores(self.graph, s, keep_mask, overwrite=True)
        (t, self.of_t), *observed = by_output(self.pairs.score, outputs)  # type: ignore[arg-type]
        self.number, self.of_number = observed[0] if observed else (None, ())
        return self.pairs.full_sized(t, outputs[1:])

    def gradient(self, dt: Tensor, p: Tensor) -> Tensor:
        """Return dS = dT∘dT/dS in the place of dT; add dT∘dT/dg to the gradient of every gathered
        tensor. P dmean f, with the number f that the score observes, joins dT, and P dmean f' joins
        the gradients."""
        # Where P is 0 the gradient is 0, and a derivative may be anything, infinity included.
        zero_p = p == 0 if self.graph.unbounded else None

        def times(factor: Tensor, derivative: Tensor | float, out: Tensor | None = None) -> Tensor:
            if not isinstance(derivative, Tensor) and derivative == 1:
                return factor
            product = torch.mul(factor, derivative, out=out)
            return product if zero_p is None else product.masked_fill_(zero_p, 0)

        of_number: Sequence[Tensor | float] = (0,) * len(self.of_t)
        dnumber = dt
        if self.dmean is not None and self.number is not None:
            item = self.pairs.item
            dmean = self.dmean[item.kv_heads, item.group_heads, item.queries]
            dnumber, of_number = p.mul_(dmean), self.of_number
            dt.add_(times(dnumber, self.number))

        def total(n: int, out: Tensor | None = None) -> Tensor:
            if not isinstance(of_number[n], Tensor) and of_number[n] == 0:
                return times(dt, self.of_t[n], out)
            added = times(dnumber, of_number[n])
            return torch.add(times(dt, self.of_t[n], out), added, out=out)

        for n, (gather, node) in enumerate(self.trained_gathers, 1):
            grad = self.grads[int(node.args[0][1:])]  # type: ignore[index]
            assert grad is not None
            scatter(grad, self.gathers.indices.get(gather, ()), total(n))
        return total(0, out=dt)


def flat(block: Tensor) -> Tensor:
    """View (n, g, i, j) as the batch of matrices (n, g * i, j)."""
    return block.view(block.shape[0], block.shape[1] * block.shape[2], block.shape[3])


def exp_in_place(t: Tensor) -> Tensor:
    """Compute exp in place, without denormal results: those slow a product down tenfold, and are
    lost beside a row's largest term, 1. NaN stays NaN."""
    return torch.threshold_(t, _MIN_EXPONENTS[t.dtype], -math.inf).exp_()


def exp_and_exponent(t: Tensor) -> tuple[Tensor, Tensor]:
    """Return `exp_in_place` of t in new memory, and t, finite where the result is 0: their product
    is then 0."""
    t = torch.threshold_(t, _MIN_EXPONENTS[t.dtype], LOG_0)
    return t.exp(), t


LOG_0 = -1e4  # finite, and its exponential is 0
_MIN_EXPONENTS = {
    dtype: math.log(torch.finfo(dtype).tiny) + 8 for dtype in (torch.float32, torch.float64)
}


def by_kv_head(x: Tensor, hk: int, dtype: torch.dtype) -> Tensor:
    """Return (b, hk * g, length, ...) as (b * hk, g, length, ...), contiguous, in `dtype`."""
    b, h = x.shape[:2]
    return x.to(dtype).contiguous().view(b * hk, h // hk, *x.shape[2:])


def _score_block(
    pairs: PairBlock, q_block: Tensor, k: Tensor, *, separate: bool = False
) -> tuple[Tensor, Tensor, list]:
    """Return T of a block of pairs, -inf where masked, in a block that may be overwritten; S, in
    the same block unless `separate`; and the number that the score observes, if any, in a list."""
    s, score, observed = pairs.new(), pairs.score, []
    torch.baddbmm(flat(s), q_block, k.mT, beta=0, alpha=pairs.spec.scale, out=flat(s))
    t, keep_mask = s, pairs.keep_mask()
    if score is not None:
        (t, *observed), _ = pairs.scores(score, s, keep_mask, overwrite=not separate)
        t = pairs.full_sized(t, observed)
    if keep_mask is not None:
        t.masked_fill_(~keep_mask, -math.inf)
    return t, s, observed


def online_softmax_step(
    t: Tensor, m: Tensor, total: Tensor, moment: Tensor | None = None, observed: Sequence = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """Take one step of an online softmax; m is the largest T before it.

    **Returns:** exp(T − m), which may be in the place of T; the new m; and the factor that rescales
    sums of earlier terms. Such sums are rescaled, and the new terms are added: `total` of
    p = exp(T − m), `moment` of p (T − m), or p f where f is `observed`, which takes the place of T.
    """
    m_before, m = m, torch.maximum(m, t.amax(-1, keepdim=True))
    # A row that has seen nothing yet has m = -inf, for which exp(-inf - 0) = 0 is right.
    base = m.masked_fill(m == -math.inf, 0)
    t.sub_(base)
    shift = m_before.sub(base)
    if moment is None:
        p, rescale = exp_in_place(t), shift.exp_()
    elif observed:
        p, rescale = exp_and_exponent(t)[0], shift.exp_()
        moment.mul_(rescale).add_(observed_sum(p, observed[0], out=t))
    else:
        (p, exponent), (rescale, shift) = exp_and_exponent(t), exp_and_exponent(shift)
        moment.addcmul_(total, shift).mul_(rescale).add_(exponent.mul_(p).sum(-1, keepdim=True))
    total.mul_(rescale).add_(p.sum(-1, keepdim=True))
    return p, m, rescale


def observed_sum(p: Tensor, number: Any, out: Tensor) -> Tensor:
    """Return the sum of p times a number by row, with p times it in `out`: 0 where p is."""
    products = torch.mul(p, number, out=out)
    total = products.sum(-1, keepdim=True)
    if bool(total.isfinite().all()):
        return total
    return products.masked_fill_(p == 0, 0).sum(-1, keepdim=True)


def entropy_of(total: Tensor, moment: Tensor, observes: bool) -> Tensor:
    """Return the entropy of rows from the sums of an online softmax: of p = exp(T − m), at least 1
    where a row sees something, and of p (T − m), at most 0. Where the score observes a number, the
    moment is of that, and its mean is returned."""
    total = total.masked_fill(total == 0, 1)
    return moment / total if observes else total.log() - moment / total


def _split_large_lse(
    spec: Spec, call: Call, pairs: PairBlock, q: Tensor, k: Tensor, lse: Tensor, sink: Tensor | None
) -> Tensor | None:
    """Split lse in two parts where one number cannot represent it: beside a largest T of -1e9 the
    logarithm of the sum is lost. In such rows m, the largest T, replaces lse, and P = exp(T − m)
    share.

    **Returns:** the shares; None if there are no such rows, or if lse may be a merged one, whose
    parts cannot be computed from the keys of this call.
    """
    large = large_lse(lse)
    if spec.partial or not bool(large.any()):
        return None
    share = torch.ones_like(lse)
    for item in work_items(spec, call):
        heads, group_heads = item.kv_heads, item.group_heads
        index = heads, group_heads, item.queries
        if not bool(large[index].any()):
            continue
        m = (
            torch.full_like(lse[index], -math.inf)
            if sink is None
            else sink[heads, group_heads].expand_as(lse[index])
        )
        total = torch.zeros_like(lse[index]) if sink is None else torch.ones_like(lse[index])
        q_block = q[index].flatten(1, 2)
        for segment in item.segments:
            pairs.enter(item, segment)
            _, m, _ = online_softmax_step(
                _score_block(pairs, q_block, k[heads, pairs.keys])[0], m, total
            )
        lse[index] = torch.where(large[index], m, lse[index])
        share[index] = torch.where(large[index], 1 / total, 1)
    return share


def _weights(exponent: Tensor, share: Tensor | None, logarithm: bool) -> tuple[Tensor, Tensor]:
    """Return P from T − lse, which is overwritten; and log P if `logarithm`, finite where P is 0.
    `share`: from `_split_large_lse`."""
    p, log_p = exp_and_exponent(exponent) if logarithm else (exp_in_place(exponent), exponent)
    if share is not None:
        p.mul_(share)
        if logarithm:
            log_p.add_(share.log())
    return p, log_p


def sinks_by_row(sink: Tensor | None, b: int, hk: int, g: int, acc: torch.dtype) -> Tensor | None:
    """Return the sinks as (b * hk, g, 1, 1)."""
    if sink is None:
        return None
    return sink.to(acc).view(1, hk, g, 1, 1).expand(b, hk, g, 1, 1).reshape(b * hk, g, 1, 1)


def forward(spec: Spec, call: Call) -> Forward:
    """Compute an online softmax over the segments of every work item."""
    (b, hq, q_len, _), hk, dv = call.q.shape, call.k.shape[1], call.v.shape[3]
    pairs = PairBlock(spec, call)
    acc, g = pairs.acc, hq // hk
    q, k, v = (by_kv_head(x, hk, acc) for x in (call.q, call.k, call.v))
    k, v = k[:, 0], v[:, 0]
    sink = sinks_by_row(call.sink, b, hk, g, acc)
    observing = spec.entropy and observes(spec)
    empty = partial(torch.empty, device="cpu")
    out = empty(b * hk, g, q_len, dv, dtype=spec.out_dtype(call.q.dtype))
    lse, row_max, entropy = (empty(b * hk, g, q_len, dtype=acc) for _ in range(3))
    max_logit = torch.full((b * hk, g), -math.inf, dtype=acc, device="cpu")
    for item in work_items(spec, call):
        heads, group_heads, queries = item.kv_heads, item.group_heads, item.queries
        block_shape = (
            heads.stop - heads.start,
            group_heads.stop - group_heads.start,
            queries.stop - queries.start,
        )
        q_block = q[heads, group_heads, queries].flatten(1, 2)
        o = torch.zeros(*block_shape, dv, dtype=acc, device="cpu")
        m = torch.full((*block_shape, 1), -math.inf, dtype=acc, device="cpu")
        total = torch.zeros(*block_shape, 1, dtype=acc, device="cpu")
        moment = torch.zeros_like(total) if spec.entropy else None
        for segment in item.segments:
            pairs.enter(item, segment)
            t, s, observed = _score_block(
                pairs, q_block, k[heads, pairs.keys], separate=spec.max_logit
            )
            if pairs.score is not None and spec.max_logit:
                logits = s.masked_fill(t == -math.inf, -math.inf)
                torch.maximum(
                    max_logit[heads, group_heads],
                    logits.amax((2, 3)),
                    out=max_logit[heads, group_heads],
                )
            p, m, rescale = online_softmax_step(t, m, total, moment, observed)
            o.mul_(rescale)
            if spec.dropout > 0:
                p = p.mul_(pairs.dropout_factors())
            flat(o).baddbmm_(flat(p), v[heads, pairs.keys])
        row_max[heads, group_heads, queries] = m[..., 0]
        if sink is not None:
            t = sink[heads, group_heads].expand_as(m).clone()
            _, m, rescale = online_softmax_step(t, m, total, moment, (0,) if observing else ())
            o.mul_(rescale)
        if moment is not None:
            entropy[heads, group_heads, queries] = entropy_of(total, moment, observing)[..., 0]
        lse[heads, group_heads, queries] = (m + total.log())[..., 0]
        out[heads, group_heads, queries] = o.div_(total.masked_fill(total == 0, 1))
    if pairs.score is None and spec.max_logit and q_len:
        max_logit = row_max.amax(-1)  # S is T
    return Forward(
        out.view(b, hq, q_len, dv),
        lse.view(b, hq, q_len),
        max_logit.view(b, hq) if spec.max_logit else lse.new_empty(0),
        row_max.view(b, hq, q_len) if spec.row_max else lse.new_empty(0),
        entropy.view(b, hq, q_len) if spec.entropy else lse.new_empty(0),
    )


def backward(
    spec: Spec, call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    needs: tuple[bool, ...], dentropy: Tensor | None = None,
) -> Grads:  # fmt: skip
    """Compute P = exp(T − lse), dP = dout vᵀ, dS = P∘(dP − delta − dentropy log P)∘score'(S): five
    products per block."""
    (b, hq, q_len, d), hk, dv_ = call.q.shape, call.k.shape[1], call.v.shape[3]
    pairs = PairBlock(spec, call)
    acc, g, kv_len = pairs.acc, hq // hk, call.k.shape[2]
    q, k, v, do = (by_kv_head(x, hk, acc) for x in (call.q, call.k, call.v, dout))
    k, v = k[:, 0], v[:, 0]
    # A row that sees nothing has lse = -inf and must get P = 0.
    lse = by_kv_head(lse.masked_fill(lse == -math.inf, math.inf), hk, acc)[..., None]
    delta = by_kv_head(delta_of(out, dout, dlse, acc), hk, acc)[..., None]
    sink = sinks_by_row(call.sink, b, hk, g, acc)
    share = _split_large_lse(spec, call, pairs, q, k, lse, sink)
    dentropy = None if dentropy is None else by_kv_head(dentropy, hk, acc)[..., None]
    dq = torch.zeros(b * hk, g, q_len, d, dtype=acc, device="cpu")
    dk, dv = (torch.zeros(b * hk, kv_len, n, dtype=acc, device="cpu") for n in (d, dv_))
    score_grads = ScoreGradients(pairs, needs, dentropy)
    if observes(spec):
        dentropy = None  # `score_grads` has it
    for item in work_items(spec, call):
        heads, at = item.kv_heads, (item.kv_heads, item.group_heads, item.queries)
        q_block, do_block = (x[at].flatten(1, 2) for x in (q, do))
        dq_block = torch.zeros_like(q_block)
        for segment in item.segments:
            pairs.enter(item, segment)
            s, dp, keys = pairs.new(), pairs.new(), pairs.keys
            torch.baddbmm(
                flat(s), q_block, k[heads, keys].mT, beta=0, alpha=spec.scale, out=flat(s)
            )
            t, keep_mask = s, pairs.keep_mask()
            if pairs.score is not None:
                t = score_grads.scores(s, keep_mask)
            if keep_mask is not None:
                t.masked_fill_(~keep_mask, -math.inf)
            row_share = None if share is None else share[at]
            p, log_p = _weights(t.sub_(lse[at]), row_share, dentropy is not None)
            torch.bmm(do_block, v[heads, keys].mT, out=flat(dp))
            dropped = p
            if spec.dropout > 0:
                dropout_factors = pairs.dropout_factors()
                dp.mul_(dropout_factors)
                dropped = dropout_factors.mul_(p)
            dv[heads, keys].baddbmm_(flat(dropped).mT, do_block)
            dp.sub_(delta[at])
            if dentropy is not None:
                dp.addcmul_(log_p, dentropy[at], value=-1)
            ds = dp.mul_(p)
            if pairs.score is not None:
                ds = score_grads.gradient(ds, p)
            dq_block.baddbmm_(flat(ds), k[heads, keys], alpha=spec.scale)
            dk[heads, keys].baddbmm_(flat(ds).mT, q_block, alpha=spec.scale)
        dq[at] = dq_block.view(*dq[at].shape)
    dsink = None
    if sink is not None:
        dsink = _sink_gradient(sink - lse, share, delta, dentropy).view(b, hq, q_len).sum((0, 2))
    q_dtype, kv_dtype = spec.grad_dtypes(call.q.dtype)
    return Grads(
        dq.view(b, hq, q_len, d).to(q_dtype),
        dk.view(b, hk, kv_len, d).to(kv_dtype),
        dv.view(b, hk, kv_len, dv_).to(kv_dtype),
        dsink,
        score_grads.grads,
    )


def _sink_gradient(
    exponent: Tensor, share: Tensor | None, delta: Tensor, dentropy: Tensor | None
) -> Tensor:
    """Return the gradient of the sink by row, from its T − lse, which is overwritten."""
    p, log_p = _weights(exponent, share, dentropy is not None)
    return -p.mul_(delta if dentropy is None else delta + dentropy * log_p)
