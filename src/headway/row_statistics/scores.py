"""Scores that carry the mean of a function of the pair, or its gradient."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..mods.base import Score, ScoreFn, show, value

# (score, b, h, q_idx, kv_idx) -> a number, where score is T.
Number = Callable[..., Any]


def _shown(f: Any) -> str:
    """Show the caller's function: while it is traced, another stands for the partial."""
    return show(f.args[0] if isinstance(f, partial) else f)


@value
class Added(Score):
    """T + c f(..., T), where c is `(b, hq, q_len)`."""

    c: Tensor
    score: ScoreFn | None
    f: Number

    def __call__(self, score, b, h, q_idx, kv_idx):
        t = _inner(self.score, score, b, h, q_idx, kv_idx)
        return _where_kept(t, t + self.c[b, h, q_idx] * _number(self.f, b, h, q_idx, kv_idx, t))

    def __repr__(self) -> str:
        return f"mean({_shown(self.f)})"


@value
class Carrier(Score):
    """T, whose derivative is that of (f - mean) T + f, where mean is `(b, hq, q_len)`."""

    mean: Tensor
    score: ScoreFn | None
    f: Number

    def __call__(self, score, b, h, q_idx, kv_idx):
        t = _inner(self.score, score, b, h, q_idx, kv_idx)
        number = _number(self.f, b, h, q_idx, kv_idx, t)
        slope = (number - self.mean[b, h, q_idx]).detach()
        number = number - number.detach() if isinstance(number, Tensor) else 0.0
        # Differences come first: slope · T of a large T would be infinite.
        return _where_kept(t, t.detach() + slope * (t - t.detach()) + number)

    def __repr__(self) -> str:
        return f"mean({_shown(self.f)})"


def _inner(score_fn, score, b, h, q_idx, kv_idx):
    """Return T of the pair."""
    return score if score_fn is None else score_fn(score, b, h, q_idx, kv_idx)


def _number(f: Number, b, h, q_idx, kv_idx, t):
    """Return f of a pair, a boolean as 0 or 1."""
    number = f(t.clone(), b, h, q_idx, kv_idx)  # it may write in place
    if isinstance(number, Tensor) and number.dtype == torch.bool:
        return torch.where(number, 1.0, 0.0)
    return number


def _where_kept(t, new):
    return torch.where(t == -math.inf, -math.inf, new)
