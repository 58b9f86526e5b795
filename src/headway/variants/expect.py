"""Expectations under the weights of attention, without a square of weights."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Never

from torch import Tensor
from torch.compiler import is_compiling

from ..arguments import check_tensors, shown
from ..blocks import BlockMask
from ..errors import ArgumentError
from ..keywords import unknown_keywords
from ..mods.base import MaskFn, Mod, ScoreFn
from ..row_statistics import mean
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
    weights are stored: a call is a forward without values, half the products of `attention`, and
    its gradient a backward without them. On a GPU the Triton backend computes it.

    **Arguments:** `q`, `k`, `score`, `mask`, `scale`, `sink`, `backend` as in `attention`. A sink
    takes its share of the weights, and adds nothing.

    **Returns:** `(b, hq, q_len)`, float32 (float64 for float64); 0 where a query sees no key.

    **Raises:** as `attention`.
    """
    if unknown:
        raise unknown_keywords(expect, unknown)
    check_tensors(q, k, k)
    _check_function(f)
    return mean(
        Request(q, k, k, score, mask, scale, sink, backend=backend),
        functools.partial(_score_first, f),
    )


def _score_first(f: Any, score: Any, *positions: Any) -> Any:
    """Call f by the order of a score's arguments, in which all functions are traced."""
    return f(*positions, score)


def _check_function(f: Any) -> None:
    try:
        fits = callable(f) and not isinstance(f, type | Mod)
        # A lookup takes a tenth of the time of binding.
        fits_already = (
            is_compiling() or getattr(getattr(f, "__code__", None), "co_argcount", 0) == 5
        )
        if fits and not fits_already:
            inspect.signature(f).bind(*range(5))
    except TypeError:
        fits = False
    except ValueError:  # no signature to be had: tracing calls it
        return
    if not fits:
        raise ArgumentError(
            f"f={shown(f)} must be a function (b, h, q_idx, kv_idx, score) -> number, score last"
        )
