"""A score that observes a number of every pair."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..mods.base import Score, ScoreFn, show, value
from ..mods.tracing.trace import Observed

# (score, b, h, q_idx, kv_idx) -> a number, where score is T.
Number = Callable[..., Any]


@value
class Observing(Score):
    """T, and the number f(..., T) of the pair."""

    score: ScoreFn | None
    f: Number

    def __call__(self, score, b, h, q_idx, kv_idx):
        t = score if self.score is None else self.score(score, b, h, q_idx, kv_idx)
        number = self.f(t.clone(), b, h, q_idx, kv_idx)  # it may write in place
        if isinstance(number, Tensor) and number.dtype == torch.bool:
            number = torch.where(number, 1.0, 0.0)
        return Observed((t, int(number) if isinstance(number, bool) else number))

    def __repr__(self) -> str:
        # While it is traced, another stands for the partial.
        return f"mean({show(self.f.args[0] if isinstance(self.f, partial) else self.f)})"
