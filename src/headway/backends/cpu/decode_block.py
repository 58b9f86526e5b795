"""Attention of few queries over one block of keys: by PyTorch's flash kernel, else by torch ops."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...mods.evaluation.pointwise import Positions, score_at
from ...types import Spec, acc_dtype
from ..base import Call, graphs, split
from .decode_keys import KeyReader
from .flash import _finite, _forward, _some_zero
from .tiled import Buffers, exp_in_place

_FRESH_NUMBERS = 1 << 15  # fresh memory of as few costs less than looking for used memory


class PartialSoftmax(NamedTuple):
    """Attention over a block of keys, (rows, key heads, heads of a group, queries, ...)."""

    row_max: Tensor  # what exponentials are relative to: the largest score of every query, or lse
    total: Tensor | None  # the sum of exponentials, by which out is to be divided; None: it was
    out: Tensor
    max_logit: Tensor | None  # of every head, where the spec asks for it


class KeyBlock(NamedTuple):
    """Some keys of a batch of rows, and the heads that see them."""

    kv_heads: slice
    group_heads: slice  # query heads of each key head
    keys: slice
    full: bool  # every pair is kept


class BlockAttention:
    """Attention over a block of keys at a time."""

    def __init__(self, spec: Spec, call: Call, keys: KeyReader) -> None:
        self.spec, self.call, self.keys = spec, call, keys
        self.score, _ = graphs(spec)
        self.score_captured, _ = split(spec, call.captured)
        self.acc, self.buffers = acc_dtype(call.q.dtype), Buffers()
        self.kernel_takes = call.q.shape[3] == call.v.shape[3] > 0 and (
            keys.copied or call.k.stride(3) == call.v.stride(3) == 1
        )
        # Nothing but a mask, or numbers that a score adds, lies between the kernel's products.
        takes = self.kernel_takes and not (spec.max_logit or spec.row_max)
        self.by_kernel_alone = takes and self.score is None
        self.adds = takes and self.score is not None and self.score.adds
        self.by_kernel = self.by_kernel_alone or self.adds
        keys.apart = self.by_kernel

    def __call__(
        self, q: Tensor, rows: slice, block: KeyBlock, positions: Callable[[], Positions] | None,
        keep_mask: Tensor | None, addend: Tensor | None, single: bool,
    ) -> PartialSoftmax:  # fmt: skip
        """Return attention of q `(rows, key heads, heads of a group, queries, d)` over a block,
        `single` if it holds all keys. `positions` are there for a score; a keep mask of None keeps
        all pairs. `addend`: what a score adds to S, if that is all (`by_kernel`)."""
        heads, keys = block.kv_heads, block.keys
        k = self.keys.k(rows, heads, keys)
        if self.by_kernel:
            bias = _bias(keep_mask, addend, q.shape, self.acc)
            update = self._by_kernel(q, k, self.keys.v(rows, heads, keys), bias, self.spec.scale)
            if update is not None:
                return update
        t, max_logit = self._scores(q, k, positions, keep_mask)
        relative_to, total, p = self._softmax(t, single)
        v = self.keys.v(rows, heads, keys).flatten(0, 1)
        out = torch.bmm(p.view(len(v), -1, p.shape[-1]), v).view(*q.shape[:4], v.shape[2])
        return PartialSoftmax(relative_to, total, out, max_logit)

    def _softmax(self, t: Tensor, single: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return what exponentials of T are relative to, their sum (None: they are divided by it),
        and the exponentials."""
        m, p = t.amax(-1, keepdim=True), self.buffers(self.acc)
        # One op divides as well, but lse has no room for the sum of a sink beside a large score.
        if single and not self.spec.row_max and self.call.sink is None:
            torch.softmax(t, -1, out=p)
            lse = m - p.amax(-1, keepdim=True).log_()
            if math.isfinite(lse.sum()):  # every row sees a key, and numbers
                return lse, None, torch.threshold_(p, torch.finfo(self.acc).tiny, 0.0)
        base = m.masked_fill(m == -math.inf, 0)
        p = exp_in_place(torch.sub(t, base, out=p))
        return m, p.sum(-1, keepdim=True), p

    def _by_kernel(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
    ) -> PartialSoftmax | None:
        """Return the results by PyTorch's flash kernel; None where they may be wrong."""
        group_q = q.flatten(2, 3)
        out, lse = _forward(group_q, k, v, 0.0, False, attn_mask=bias, scale=scale)
        if bias is not None and not math.isfinite(out.sum().item() + lse.sum().item()):
            return None  # a mask that is added lets NaN and inf through
        if _some_zero(lse):
            if bias is not None:  # of a row that sees nothing
                lse = lse.masked_fill((bias == -math.inf).all(-1), -math.inf)
            if _some_zero(lse) and not (_finite(q) and _finite(k)):
                return None
        return PartialSoftmax(lse.view(*q.shape[:4], 1), None, out.view(q.shape), None)

    def _scores(
        self,
        q: Tensor,
        k: Tensor,
        positions: Callable[[], Positions] | None,
        keep_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return T of a block, -inf where a pair is not kept, and the largest S of every head where
        the spec asks for it."""
        spec, shape = self.spec, (*q.shape[:4], k.shape[2])
        self.buffers.start(shape)
        s = self.buffers(self.acc)
        flat_s = s.view(-1, q.shape[2] * q.shape[3], k.shape[2])
        flat_q, flat_k = q.flatten(2, 3).flatten(0, 1), k.flatten(0, 1)
        torch.baddbmm(flat_s, flat_q, flat_k.mT, beta=0, alpha=spec.scale, out=flat_s)
        t = s
        if self.score is not None:
            assert positions is not None
            (t,), _ = score_at(
                self.score, self.score_captured, positions(), s, keep_mask,
                self.buffers if s.numel() > _FRESH_NUMBERS else None, overwrite=not spec.max_logit,
            )  # fmt: skip
            if not isinstance(t, Tensor) or t.shape != s.shape:
                t = torch.as_tensor(t, dtype=self.acc, device="cpu").expand(shape)
        if keep_mask is not None:
            t = t.masked_fill(~keep_mask, -math.inf)
        if not spec.max_logit:
            return t, None
        logits = t if self.score is None else s.masked_fill(t == -math.inf, -math.inf)
        return t, logits.amax((3, 4))


def _bias(
    keep_mask: Tensor | None, addend: Tensor | None, q_shape: torch.Size, dtype: torch.dtype
) -> Tensor | None:
    """Return the addend where a pair is kept (None adds nothing, or keeps all) and -inf elsewhere,
    (rows, key heads, queries of a group, keys) or broadcasting to it; None for 0."""
    if keep_mask is None:
        bias = addend
    elif addend is None:
        bias = keep_mask.to(dtype).log_()
    else:
        bias = torch.where(keep_mask, addend, -math.inf)
    if bias is None:
        return None
    bias = bias.view((1,) * (5 - bias.dim()) + bias.shape)
    if bias.shape[2:4] != (1, 1):
        bias = bias.expand(-1, -1, *q_shape[2:4], -1)
    return bias.flatten(2, 3)
