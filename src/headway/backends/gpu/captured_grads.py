"""Gradients of captured tensors and of sinks: the host's side."""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ...mods.evaluation.derivative import differentiable_gathers
from ...mods.graph import parse
from .codegen.spec import CodegenSpec
from .precision import LOG_0


@lru_cache(maxsize=1024)
def wanted(score: str | None, needs: tuple[bool, ...]) -> tuple[int, ...]:
    """Return the gathers of the score that need a gradient.

    - `needs`: for every tensor of the score, True if it needs one.
    """
    if score is None or not any(needs):
        return ()
    return differentiable_gathers(parse(score), [n for n, need in enumerate(needs) if need])


def zeros(tensors: Sequence[Tensor], needs: tuple[bool, ...], device: torch.device) -> list:
    """Return a gradient of zeros for every tensor of the score that needs one, else None."""
    return [
        torch.zeros(tensor.shape, dtype=torch.float32, device=device) if need else None
        for tensor, need in zip(tensors, needs, strict=False)
    ]


def by_gather(text: CodegenSpec, grads: Sequence[Tensor | None]) -> tuple:
    """Return the gradient of its tensor for every gather that needs one."""
    if not text.wanted:
        return ()
    graph = parse(text.score)  # type: ignore[arg-type]
    return tuple(grads[int(graph.nodes[n].args[0][1:])] for n in text.wanted)  # type: ignore[index]


def of_sink(sink: Tensor, lse: Tensor, delta: Tensor, dentropy: Tensor | None = None) -> Tensor:
    """Return dsink = −Σ_i P (delta + dentropy log P) with P = exp(sink − lse)."""
    finite_lse = lse.masked_fill(lse == -math.inf, math.inf)  # exp(sink - inf) = 0
    log_p = sink.float()[:, None] - finite_lse
    slope = delta if dentropy is None else delta + dentropy * log_p.clamp_min(LOG_0)
    return -(log_p.exp() * slope).sum((0, 2))
