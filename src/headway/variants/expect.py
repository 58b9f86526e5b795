"""Expectations under the weights of attention, without a square of weights."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, Never

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..api import attention_with_stats
from ..arguments import check_tensors, shown
from ..blocks import BlockMask
from ..errors import ArgumentError
from ..keywords import unknown_keywords
from ..mods import Score
from ..mods.base import MaskFn, Mod, ScoreFn, show, value
from ..run import run_backward
from ..types import Request

# (b, h, q_idx, kv_idx, score) -> a number; score is what the score function returns.
PairFn = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def expect(
    q: Tensor,  # (b, hq, q_len, d)
    k: Tensor,  # (b, hk, kv_len, d)
    f: PairFn,
    score: ScoreFn | None = None,
    mask: MaskFn | BlockMask | None = None,
    *,
    scale: float | None = None,
    sink: Tensor | None = None,  # (hq,)
    backend: str = "auto",
    **unknown: Never,
) -> Tensor:
    """Return sum over kept keys of P(b, h, i, j) f(b, h, i, j, T), for every query: the mean of any
    function of the pair under the softmax.

    `f` is a function `(b, h, q_idx, kv_idx, score) -> number`, as a score is: plain PyTorch on
    numbers that broadcast. `score` is T, what the score function returns (the scaled logit without
    one). f has to be finite at kept pairs.

        distance = headway.expect(q, k, lambda b, h, i, j, s: i - j, mask=headway.causal())
        first_four = headway.expect(q, k, lambda b, h, i, j, s: j < 4)  # the mass on four keys

    Differentiable in q, k, `sink`, and in what `score` and `f` capture and that requires grad. No
    weights are stored: a call costs a forward and a backward of attention, and its gradient as much
    again.

    **Arguments:** `q`, `k`, `score`, `mask`, `scale`, `sink`, `backend` as in `attention`. A sink
    takes its share of the weights, and adds nothing.

    **Returns:** `(b, hq, q_len)`, float32 (float64 for float64); 0 where a query sees no key.

    **Raises:** as `attention`.
    """
    if unknown:
        raise unknown_keywords(expect, unknown)
    check_tensors(q, k, k)
    _check_function(f)
    f = functools.partial(_score_first, f)
    no_values = k.new_zeros(()).expand(*k.shape[:3], 1)
    options: dict[str, Any] = {"scale": scale, "backend": backend}
    with torch.no_grad():
        detached = q.detach(), k.detach(), no_values
        fixed_sink = None if sink is None else sink.detach()
        out, lse, _ = attention_with_stats(*detached, score, mask, sink=fixed_sink, **options)
        # The derivative of lse by c, where c · f is added to the score, is the expectation of f.
        c = torch.zeros_like(lse)
        added = Request(
            *detached, _Added(c, score, f), mask, **options, trains=True, learned=(c,)
        )  # fmt: skip
        zero, one = torch.zeros_like(out), torch.ones_like(lse)
        mean = run_backward(added, out, lse, zero, one).captured[0]
    if not torch.is_grad_enabled():
        return mean
    # An lse whose gradient is that of the expectation: dT = P (f - mean), and P by f's derivative.
    carrier = attention_with_stats(
        q, k, no_values, _Carrier(mean, score, f), mask, sink=fixed_sink, **options
    ).lse
    carrier = torch.where(carrier.isinf(), 0.0, carrier)
    result = mean + (carrier - carrier.detach())
    if sink is None:
        return result
    share = torch.where(lse == -math.inf, 0.0, (sink[:, None] - lse).exp())
    return result - mean * (share - share.detach())


def _shown(f: Any) -> str:
    """Show the caller's function: while it is traced, another stands for the partial."""
    return show(f.args[0] if isinstance(f, functools.partial) else f)


def _score_first(f: Any, score: Any, *positions: Any) -> Any:
    """Call f by the order of a score's arguments, in which all functions are traced."""
    return f(*positions, score)


def _check_function(f: Any) -> None:
    try:
        fits = callable(f) and not isinstance(f, type | Mod)
        if fits and not is_compiling():
            inspect.signature(f).bind(*range(5))
    except TypeError:
        fits = False
    except ValueError:  # no signature to be had: tracing calls it
        return
    if not fits:
        raise ArgumentError(
            f"f={shown(f)} must be a function (b, h, q_idx, kv_idx, score) -> number, score last"
        )


@value
class _Added(Score):
    """T + c f(..., T), where c is `(b, hq, q_len)`."""

    c: Tensor
    score: ScoreFn | None
    f: functools.partial  # of `_score_first`

    def check_sizes(self, b, h, q_len, kv_len):
        _check_inner(self.score, b, h, q_len, kv_len)

    def __call__(self, score, b, h, q_idx, kv_idx):
        t = score if self.score is None else self.score(score, b, h, q_idx, kv_idx)
        return _where_kept(t, t + self.c[b, h, q_idx] * _number(self.f, b, h, q_idx, kv_idx, t))

    def __repr__(self) -> str:
        return f"expect({_shown(self.f)})"


@value
class _Carrier(Score):
    """T, whose derivative is that of (f - mean) T + f, where mean is `(b, hq, q_len)`."""

    mean: Tensor
    score: ScoreFn | None
    f: functools.partial  # of `_score_first`

    def check_sizes(self, b, h, q_len, kv_len):
        _check_inner(self.score, b, h, q_len, kv_len)

    def __call__(self, score, b, h, q_idx, kv_idx):
        t = score if self.score is None else self.score(score, b, h, q_idx, kv_idx)
        number = _number(self.f, b, h, q_idx, kv_idx, t)
        x = (number - self.mean[b, h, q_idx]).detach() * t + number
        return _where_kept(t, t.detach() + (x - x.detach()))

    def __repr__(self) -> str:
        return f"expect({_shown(self.f)})"


def _check_inner(score, b, h, q_len, kv_len):
    if isinstance(score, Score):
        score.check_sizes(b, h, q_len, kv_len)


def _number(f: functools.partial, b, h, q_idx, kv_idx, t):
    """Return f of a pair, a boolean as 0 or 1."""
    number = f(t.clone(), b, h, q_idx, kv_idx)  # it may write in place
    if isinstance(number, Tensor) and number.dtype == torch.bool:
        return torch.where(number, 1.0, 0.0)
    return number


def _where_kept(t, new):
    return torch.where(t == -math.inf, -math.inf, new)
