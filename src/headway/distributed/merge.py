"""Merge attention over disjoint keys: the algebra of ring, cascade and split attention."""

import math

import torch
from torch import Tensor

from ..arguments import check_dense
from ..errors import ArgumentError
from ..types import AttentionOutput


def merge(*partials: AttentionOutput | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the attention over all keys from partial results over disjoint sets of keys:

        lse = log Σ exp(lse_n),   out = Σ exp(lse_n − lse) out_n

    Each partial is a result of `attention_with_stats`, or a pair `(out, lse)` of shapes
    `(b, h, q_len, dv)` and `(b, h, q_len)`. You can train through the merge: it is differentiable
    in every `out` and `lse`. It is computed in the dtype of `lse`, and returns `out` in the dtype
    of the first `out`. A query that no partial gives a key gets out = 0 and lse = -inf.

    **Returns:** `(out, lse)`.

    **Raises:** `ArgumentError` without partials, and if their shapes do not fit.

    (Rabe and Staats 2021, arXiv 2112.05682; Liu et al. 2023, Ring Attention, arXiv 2310.01889)
    """
    if not partials:
        raise ArgumentError("merge() needs at least one (out, lse)")
    pairs = [x[:2] if isinstance(x, AttentionOutput) else x for x in partials]
    for n, partial in enumerate(pairs):
        if not isinstance(partial, tuple | list) or len(partial) != 2:
            raise ArgumentError(
                f"partial {n} is of type {type(partial).__name__}; each must be a result of "
                "attention_with_stats or a pair (out, lse)"
            )
        out, lse = partial
        check_dense(out=out, lse=lse)
        if out.shape[:-1] != lse.shape or out.shape != pairs[0][0].shape:
            raise ArgumentError(
                f"partial {n}: out {tuple(out.shape)} and lse {tuple(lse.shape)} do not fit the "
                f"first, {tuple(pairs[0][0].shape)}; out is (b, h, q_len, dv), lse (b, h, q_len)"
            )
    lses = torch.stack([lse for _, lse in pairs])
    nowhere = lses.amax(0) == -math.inf
    # A row that saw nothing anywhere: keep its -inf out of the algebra, and of its gradient.
    lses = torch.where(nowhere, 0.0, lses)
    lse = torch.logsumexp(lses, 0)
    weights = (lses - lse).exp()
    out = sum(w[..., None] * o.to(w.dtype) for w, (o, _) in zip(weights, pairs, strict=True))
    out = torch.where(nowhere[..., None], 0.0, out)  # type: ignore[arg-type]
    return out.to(pairs[0][0].dtype), torch.where(nowhere, -math.inf, lse)
