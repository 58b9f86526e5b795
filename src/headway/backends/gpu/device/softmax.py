"""Online softmax in Triton, in units of log 2 (`precision`).

(Milakov and Gimelshein 2018, arXiv 1805.02867; with the product of P and V, Dao et al. 2022, arXiv
2205.14135, algorithm 1.)
"""

from typing import Any, NamedTuple

import triton.language as tl

import triton

from .. import precision
from . import tiles

LOG2E, LN2 = tl.constexpr(precision.LOG2E), tl.constexpr(precision.LN2)


class Softmax(NamedTuple):
    """The softmax of the keys so far, per row of a tile."""

    acc: Any  # Σ exp2(T − m) v, in pieces
    m: Any  # the largest T so far, in units of log 2
    l: Any  # Σ exp2(T − m)
    largest: Any  # the largest S so far, if TRACK_MAX; else unused


@triton.jit
def empty_softmax(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the `Softmax` of no keys."""
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    return Softmax(tiles.zeros(ROWS, WIDTH), m, l, m)


@triton.jit
def update_softmax(state, t, unit, s, TRACK_MAX: tl.constexpr):
    """Return P = exp2(T - m) of one more block of keys, the factor by which to rescale `acc`, and
    the new state with the old `acc`.

    - `t`: T in some unit, -inf where a pair is not kept.
    - `unit`: that unit over log 2.
    - `s`: S, whose largest value is tracked if `TRACK_MAX`.
    """
    acc, m, l, largest = state
    if TRACK_MAX:  # of S, where T says that the pair is kept
        kept_s = tl.where(t == float("-inf"), float("-inf"), s)
        largest = tl.maximum(largest, tl.max(kept_s, 1))
    old_m = m
    m = tl.maximum(m, tl.max(t, 1) * unit)
    # A query that has seen no key yet has m = -inf, and exp2(-inf - 0) = 0 is what it needs.
    base = tl.where(m == float("-inf"), 0.0, m)
    p = tl.exp2(t * unit - base[:, None])
    rescale = tl.exp2(old_m - base)
    l = l * rescale + tl.sum(p, 1)
    return p, rescale, Softmax(acc, m, l, largest)


@triton.jit
def with_sink(state, sink):
    """Return the softmax with one more key, whose logit is `sink` and whose value is 0."""
    acc, m, l, largest = state
    s = sink.to(tl.float32) * LOG2E
    old_m = m
    m = tl.maximum(m, s)
    base = tl.where(m == float("-inf"), 0.0, m)
    rescale = tl.exp2(old_m - base)
    l = l * rescale + tl.exp2(s - base)
    return Softmax(tiles.times(acc, rescale[:, None]), m, l, largest)


@triton.jit
def log_sum_exp(m, l):
    """Return lse, in natural logarithms."""
    return (m + tl.log2(l)) * LN2


@triton.jit
def reciprocal(l):
    """Return the factor that normalises `acc`: 0 for a query that sees no key."""
    return 1.0 / tl.where(l == 0.0, 1.0, l)


@triton.jit
def or_nan(x, l):
    """Return x, or NaN where the sum of a row is NaN: a maximum would hide it.

    Where a score is +inf, the sum is NaN too, and the maximum is right.
    """
    return tl.where((l != l) & (x != float("inf")), float("nan"), x)
