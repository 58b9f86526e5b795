"""FlashAttention in blocks of torch ops: the CPU's forward and backward.

(Dao et al. 2022, arXiv 2205.14135, algorithms 1 and 4; Dao 2023, arXiv 2307.08691.) A block of S is
in a buffer that stays in the cache, and every op writes in place. Half precision inputs are
converted to float32, which most CPUs multiply faster and which loses nothing.
"""

import math
from functools import partial

import torch
from torch import Tensor

from ...dropout import keep
from ...mods.evaluation.derivative import differentiable_gathers, joint
from ...mods.evaluation.pointwise import Gathers, Positions, bind, mask_at, score_at
from ...mods.graph import Graph
from ...types import Forward, Grads, Spec, acc_dtype
from ..base import LARGE_LSE, Call, delta_of, graphs, scatter, split
from .tile_plan import Piece, Segment, index_tensors, pieces


class Buffers:
    """Reusable memory: the n-th request of a round gets the n-th block."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[torch.dtype, int], Tensor] = {}
        self.taken = 0

    def start(self, shape: tuple[int, ...]) -> None:
        """Begin a round, in which every block has this shape."""
        self.shape, self.taken = shape, 0

    def __call__(self, dtype: torch.dtype) -> Tensor:
        """An uninitialised block."""
        key, size = (dtype, self.taken), math.prod(self.shape)
        if key not in self.blocks or self.blocks[key].numel() < size:
            self.blocks[key] = torch.empty(size, dtype=dtype, device="cpu")
        self.taken += 1
        return self.blocks[key][:size].view(self.shape)


class Tile:
    """One block of pairs (n, g, i, j): its logits S, scores T, and which pairs are kept."""

    def __init__(self, spec: Spec, call: Call) -> None:
        self.spec, self.call = spec, call
        self.score, self.mask = graphs(spec)
        self.of_score, self.of_mask = split(spec, call.captured)
        self.acc = acc_dtype(call.q.dtype)
        self.buffers = Buffers()
        self.positions = call.coords.positions(call.q.shape[2], call.k.shape[2], call.q.device)
        self.bound_mask = {} if self.mask is None else bind(self.mask, self.of_mask)
        self.bound_score = {} if self.score is None else bind(self.score, self.of_score)
        per_head = self.mask is not None and (self.mask.uses("b") or self.mask.uses("h"))
        self.shared_masks = not per_head and max(map(len, self.positions)) == 1
        self._masks: dict[tuple[int, int], Tensor] = {}

    def enter(self, piece: Piece, segment: Segment) -> None:
        """Move to a block of pairs."""
        self.piece, self.segment = piece, segment
        self.keys = slice(segment.start, segment.stop)
        self.shape = (
            piece.n.stop - piece.n.start,
            piece.g.stop - piece.g.start,
            piece.i.stop - piece.i.start,
            segment.stop - segment.start,
        )
        self.buffers.start(self.shape)
        self._at: Positions | None = None

    @property
    def at(self) -> Positions:
        """The index tensors of this block, made at their first use."""
        if self._at is None:
            self._at = Positions(**index_tensors(self.call, self.piece, *self.positions, self.keys))
        return self._at

    def new(self) -> Tensor:
        """An uninitialised block of the accumulation dtype."""
        return self.buffers(self.acc)

    def kept(self) -> Tensor | None:
        """Which pairs the mask keeps; None for all."""
        if self.mask is None or self.segment.full:
            return None
        if not self.shared_masks:
            return mask_at(self.mask, self.bound_mask, self.at)
        key = (self.piece.i.start, self.keys.start)
        if key not in self._masks:  # the next heads use it again
            if len(self._masks) > 64:
                self._masks.clear()
            self._masks[key] = mask_at(self.mask, self.bound_mask, self.at)
        return self._masks[key]

    def scores(
        self, graph: Graph, s: Tensor, kept: Tensor | None, *, overwrite: bool
    ) -> tuple[list, Gathers]:
        """The outputs of the score's graph, or of its joint graph, on logits S."""
        return score_at(graph, self.bound_score, self.at, s, kept, self.buffers, overwrite)

    def dropped(self) -> Tensor:
        """keep / (1 - p)."""
        p = self.spec.dropout
        assert self.call.seed is not None
        kept = keep(p, self.call.seed, **self.at.values)
        return kept.to(self.acc).mul_(1 / (1 - p) if p < 1 else 0.0)

    def full_sized(self, t: Tensor | float, apart_from: list | None = None) -> Tensor:
        """A score as a block that may be overwritten."""
        if (
            isinstance(t, Tensor)
            and t.shape == self.shape
            and all(t is not x for x in apart_from or ())
        ):
            return t
        return self.new().copy_(torch.as_tensor(t, dtype=self.acc, device="cpu"))


class Learned:
    """The score's derivatives on a tile, and the gradients of the tensors that it captures."""

    def __init__(self, tile: Tile, needs: tuple[bool, ...]) -> None:
        self.tile = tile
        self.grads: list[Tensor | None] = [
            torch.zeros(t.shape, dtype=tile.acc, device="cpu") if need else None
            for t, need in zip(tile.of_score.tensors, needs, strict=True)
        ]
        if tile.score is None:
            return
        wanted = differentiable_gathers(tile.score, [n for n, need in enumerate(needs) if need])
        self.graph = joint(tile.score.text, wanted)
        # The n-th gather of the joint graph is the n-th of the score's.
        of_score = [n for n, _ in tile.score.gathers]
        self.wanted = [self.graph.gathers[of_score.index(n)] for n in wanted]

    def scores(self, s: Tensor, kept: Tensor | None) -> Tensor:
        """T, in a block that may be overwritten; the derivatives are kept for `gradient`."""
        outputs, self.gathers = self.tile.scores(self.graph, s, kept, overwrite=True)
        t, self.by_s, *self.by_gather = outputs
        return self.tile.full_sized(t, [self.by_s, *self.by_gather])

    def gradient(self, dt: Tensor, p: Tensor) -> Tensor:
        """dS = dT∘dT/dS, in place; adds dT∘dT/dg to the gradient of every gathered tensor."""
        # Where P is 0 the gradient is 0, and a derivative may be anything, infinity included.
        nothing = p == 0 if self.graph.unbounded else None

        def times(by: Tensor | float, out: Tensor | None = None) -> Tensor:
            if not isinstance(by, Tensor) and by == 1:
                return dt
            product = torch.mul(dt, by, out=out)
            return product if nothing is None else product.masked_fill_(nothing, 0)

        for (n, node), by in zip(self.wanted, self.by_gather, strict=True):
            grad = self.grads[int(node.args[0][1:])]  # type: ignore[index]
            assert grad is not None
            scatter(grad, self.gathers.indices.get(n, ()), times(by))
        return times(self.by_s, out=dt)


def flat(block: Tensor) -> Tensor:
    """(n, g, i, j) as the batch of matrices (n, g * i, j)."""
    return block.view(block.shape[0], block.shape[1] * block.shape[2], block.shape[3])


def _exp(t: Tensor) -> Tensor:
    """exp in place, without denormal results: those slow a product down tenfold, and are lost
    beside a row's largest term, 1. NaN stays NaN."""
    return torch.threshold_(t, _LEAST[t.dtype], -math.inf).exp_()


_LEAST = {dtype: math.log(torch.finfo(dtype).tiny) + 8 for dtype in (torch.float32, torch.float64)}


def by_kv_head(x: Tensor, hk: int, dtype: torch.dtype) -> Tensor:
    """(b, hk * g, length, ...) as (b * hk, g, length, ...), contiguous, in `dtype`."""
    b, h = x.shape[:2]
    return x.to(dtype).contiguous().view(b * hk, h // hk, *x.shape[2:])


def _scored(
    tile: Tile, q_block: Tensor, k: Tensor, *, separate: bool = False
) -> tuple[Tensor, Tensor]:
    """T of a block of pairs, -inf where not kept, in a block that may be overwritten; and S, in
    the same block unless `separate`."""
    s, score = tile.new(), tile.score
    torch.baddbmm(flat(s), q_block, k.mT, beta=0, alpha=tile.spec.scale, out=flat(s))
    t, kept = s, tile.kept()
    if score is not None:
        (t,), _ = tile.scores(score, s, kept, overwrite=not separate)
        t = tile.full_sized(t)
    if kept is not None:
        t.masked_fill_(~kept, -math.inf)
    return t, s


def _online(t: Tensor, m: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One step of an online softmax, m being the largest T so far.

    **Returns:** exp(T − m) in the place of T; the new m; and the factor that rescales sums of
    earlier terms. `total` is such a sum: it is rescaled, and the new terms are added.
    """
    before, m = m, torch.maximum(m, t.amax(-1, keepdim=True))
    # A row that has seen nothing yet has m = -inf, for which exp(-inf - 0) = 0 is right.
    base = m.masked_fill(m == -math.inf, 0)
    p = _exp(t.sub_(base))
    rescale = (before - base).exp_()
    total.mul_(rescale).add_(p.sum(-1, keepdim=True))
    return p, m, rescale


def _split_lse(
    spec: Spec, call: Call, tile: Tile, q: Tensor, k: Tensor, lse: Tensor, sink: Tensor | None
) -> Tensor | None:
    """lse in two parts, for rows where one number cannot represent it: beside a largest T of -1e9
    the logarithm of the sum is lost. m, the largest T, replaces lse, and P = exp(T − m) share.

    **Returns:** the shares; None if there are no such rows, or if lse may be a merged one, whose
    parts cannot be computed from the keys of this call.
    """
    rows = (lse.abs() > LARGE_LSE) & lse.isfinite()
    if spec.partial or not bool(rows.any()):
        return None
    share = torch.ones_like(lse)
    for piece in pieces(spec, call):
        n, gs = piece.n, piece.g
        at = n, gs, piece.i
        if not bool(rows[at].any()):
            continue
        m = torch.full_like(lse[at], -math.inf) if sink is None else sink[n, gs].expand_as(lse[at])
        total = torch.zeros_like(lse[at]) if sink is None else torch.ones_like(lse[at])
        q_block = q[at].flatten(1, 2)
        for segment in piece.segments:
            tile.enter(piece, segment)
            _, m, _ = _online(_scored(tile, q_block, k[n, tile.keys])[0], m, total)
        lse[at] = torch.where(rows[at], m, lse[at])
        share[at] = torch.where(rows[at], 1 / total, 1)
    return share


def _by_rows(sink: Tensor | None, b: int, hk: int, g: int, acc: torch.dtype) -> Tensor | None:
    """The sinks as (b * hk, g, 1, 1)."""
    if sink is None:
        return None
    return sink.to(acc).view(1, hk, g, 1, 1).expand(b, hk, g, 1, 1).reshape(b * hk, g, 1, 1)


def forward(spec: Spec, call: Call) -> Forward:
    """Online softmax over the segments of every piece."""
    (b, hq, q_len, _), hk, dv = call.q.shape, call.k.shape[1], call.v.shape[3]
    tile = Tile(spec, call)
    acc, g = tile.acc, hq // hk
    q, k, v = (by_kv_head(x, hk, acc) for x in (call.q, call.k, call.v))
    k, v = k[:, 0], v[:, 0]
    sink = _by_rows(call.sink, b, hk, g, acc)
    new = partial(torch.empty, device="cpu")
    out = new(b * hk, g, q_len, dv, dtype=spec.out_dtype(call.q.dtype))
    lse, row_max = (new(b * hk, g, q_len, dtype=acc) for _ in range(2))
    max_logit = torch.full((b * hk, g), -math.inf, dtype=acc, device="cpu")
    for piece in pieces(spec, call):
        n, gs, i = piece.n, piece.g, piece.i
        size = (n.stop - n.start, gs.stop - gs.start, i.stop - i.start)
        q_block = q[n, gs, i].flatten(1, 2)
        o = torch.zeros(*size, dv, dtype=acc, device="cpu")
        m = torch.full((*size, 1), -math.inf, dtype=acc, device="cpu")
        total = torch.zeros(*size, 1, dtype=acc, device="cpu")
        for segment in piece.segments:
            tile.enter(piece, segment)
            t, s = _scored(tile, q_block, k[n, tile.keys], separate=spec.max_logit)
            if tile.score is not None and spec.max_logit:
                logits = s.masked_fill(t == -math.inf, -math.inf)
                torch.maximum(max_logit[n, gs], logits.amax((2, 3)), out=max_logit[n, gs])
            p, m, rescale = _online(t, m, total)
            o.mul_(rescale)
            if spec.dropout > 0:
                p = p.mul_(tile.dropped())
            flat(o).baddbmm_(flat(p), v[n, tile.keys])
        row_max[n, gs, i] = m[..., 0]
        if sink is not None:
            before, m = m, torch.maximum(m, sink[n, gs])
            base = m.masked_fill(m == -math.inf, 0)
            rescale = (before - base).exp_()
            total.mul_(rescale).add_((sink[n, gs] - base).exp_())
            o.mul_(rescale)
        lse[n, gs, i] = (m + total.log())[..., 0]
        out[n, gs, i] = o.div_(total.masked_fill(total == 0, 1))
    if tile.score is None and spec.max_logit and q_len:
        max_logit = row_max.amax(-1)  # S is T
    return Forward(
        out.view(b, hq, q_len, dv),
        lse.view(b, hq, q_len),
        max_logit.view(b, hq) if spec.max_logit else lse.new_empty(0),
        row_max.view(b, hq, q_len) if spec.row_max else lse.new_empty(0),
    )


def backward(
    spec: Spec, call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    needs: tuple[bool, ...],
) -> Grads:  # fmt: skip
    """P = exp(T − lse), dP = dout vᵀ, dS = P∘(dP − delta)∘score'(S); five products per block."""
    (b, hq, q_len, d), hk, dv_ = call.q.shape, call.k.shape[1], call.v.shape[3]
    tile = Tile(spec, call)
    acc, g, kv_len = tile.acc, hq // hk, call.k.shape[2]
    q, k, v, do = (by_kv_head(x, hk, acc) for x in (call.q, call.k, call.v, dout))
    k, v = k[:, 0], v[:, 0]
    # A row that sees nothing has lse = -inf and must get P = 0.
    lse = by_kv_head(lse.masked_fill(lse == -math.inf, math.inf), hk, acc)[..., None]
    delta = by_kv_head(delta_of(out, dout, dlse, acc), hk, acc)[..., None]
    sink = _by_rows(call.sink, b, hk, g, acc)
    share = _split_lse(spec, call, tile, q, k, lse, sink)
    dq = torch.zeros(b * hk, g, q_len, d, dtype=acc, device="cpu")
    dk = torch.zeros(b * hk, kv_len, d, dtype=acc, device="cpu")
    dv = torch.zeros(b * hk, kv_len, dv_, dtype=acc, device="cpu")
    learned = Learned(tile, needs)
    for piece in pieces(spec, call):
        n, gs, i = piece.n, piece.g, piece.i
        q_block, do_block = (x[n, gs, i].flatten(1, 2) for x in (q, do))
        dq_block = torch.zeros_like(q_block)
        for segment in piece.segments:
            tile.enter(piece, segment)
            keys = tile.keys
            s, dp = tile.new(), tile.new()
            torch.baddbmm(flat(s), q_block, k[n, keys].mT, beta=0, alpha=spec.scale, out=flat(s))
            t, kept = s, tile.kept()
            if tile.score is not None:
                t = learned.scores(s, kept)
            if kept is not None:
                t.masked_fill_(~kept, -math.inf)
            p = _exp(t.sub_(lse[n, gs, i]))
            if share is not None:
                p.mul_(share[n, gs, i])
            torch.bmm(do_block, v[n, keys].mT, out=flat(dp))
            if spec.dropout > 0:
                dropped = tile.dropped()
                dp.mul_(dropped)
                dv[n, keys].baddbmm_(flat(dropped.mul_(p)).mT, do_block)
            else:
                dv[n, keys].baddbmm_(flat(p).mT, do_block)
            ds = dp.sub_(delta[n, gs, i]).mul_(p)
            if tile.score is not None:
                ds = learned.gradient(ds, p)
            dq_block.baddbmm_(flat(ds), k[n, keys], alpha=spec.scale)
            dk[n, keys].baddbmm_(flat(ds).mT, q_block, alpha=spec.scale)
        dq[n, gs, i] = dq_block.view(*dq[n, gs, i].shape)
    dsink = None
    if sink is not None:
        weight = (sink - lse).exp_().mul_(delta if share is None else share * delta)
        dsink = -weight.view(b, hq, q_len).sum((0, 2))
    of_q, of_kv = spec.grad_dtypes(call.q.dtype)
    return Grads(
        dq.view(b, hq, q_len, d).to(of_q),
        dk.view(b, hk, kv_len, d).to(of_kv),
        dv.view(b, hk, kv_len, dv_).to(of_kv),
        dsink,
        learned.grads,
    )
