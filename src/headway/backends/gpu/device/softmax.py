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
_LOG_0 = tl.constexpr(precision.LOG_0)


class Softmax(NamedTuple):
    """The softmax of the keys so far, per row of a tile."""

    acc: Any  # Σ exp2(T − m) v, in pieces
    m: Any  # the largest T so far, in units of log 2
    l: Any  # Σ exp2(T − m)
    largest: Any  # the largest S so far, if TRACK_MAX; else unused
    # (Σ exp2(T − m) (T − m),) for the entropy, (Σ exp2(T − m) f,) for the mean of f; else ()
    moment: Any


@triton.jit
def empty_softmax(ROWS: tl.constexpr, WIDTH: tl.constexpr, ENTROPY: tl.constexpr):
    """Return the `Softmax` of no keys."""
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    moment = ()
    if ENTROPY:
        moment = (tl.zeros([ROWS], tl.float32),)
    return Softmax(tiles.zeros(ROWS, WIDTH), m, l, m, moment)


@triton.jit
def update_softmax(state, t, unit, s, TRACK_MAX: tl.constexpr, observed):
    """Return P = exp2(T - m) of one more block of keys, the factor by which to rescale `acc`, and
    the new state with the old `acc`.

    - `t`: T in some unit, -inf where a pair is not kept.
    - `unit`: that unit over log 2.
    - `s`: S, whose largest value is tracked if `TRACK_MAX`.
    - `observed`: (f,), if the mean of f is asked for, finite where a pair is not kept.
    """
    acc, m, l, largest, moment = state
    if TRACK_MAX:  # of S, where T says that the pair is kept
        kept_s = tl.where(t == float("-inf"), float("-inf"), s)
        largest = tl.maximum(largest, tl.max(kept_s, 1))
    old_m = m
    m = tl.maximum(m, tl.max(t, 1) * unit)
    # A query that has seen no key yet has m = -inf, and exp2(-inf - 0) = 0 is what it needs.
    base = tl.where(m == float("-inf"), 0.0, m)
    exponent = t * unit - base[:, None]
    p = tl.exp2(exponent)
    rescale = tl.exp2(old_m - base)
    if len(observed) > 0:
        moment = (moment[0] * rescale + tl.sum(p * observed[0], 1),)
    elif len(moment) > 0:
        earlier = moved_moment(moment[0], l, old_m - base, rescale)
        moment = (earlier + tl.sum(p * at_least_log_0(exponent), 1),)
    l = l * rescale + tl.sum(p, 1)
    return p, rescale, Softmax(acc, m, l, largest, moment)


@triton.jit
def at_least_log_0(exponent):
    """Return the exponent of a P, finite where P is 0: their product is then 0."""
    return tl.maximum(exponent, _LOG_0)


@triton.jit
def moved_moment(moment, l, shift, rescale):
    """Return `Softmax.moment` of the same keys where m is less by `shift`, with `rescale` = exp2(
    shift)."""
    return (moment + l * at_least_log_0(shift)) * rescale


@triton.jit
def with_sink(state, sink, OBSERVES: tl.constexpr):
    """Return the softmax with one more key, whose logit is `sink` and whose value is 0, and so is
    what a score OBSERVES."""
    acc, m, l, largest, moment = state
    s = sink.to(tl.float32) * LOG2E
    old_m = m
    m = tl.maximum(m, s)
    base = tl.where(m == float("-inf"), 0.0, m)
    rescale = tl.exp2(old_m - base)
    p = tl.exp2(s - base)
    if OBSERVES:
        moment = (moment[0] * rescale,)
    elif len(moment) > 0:
        earlier = moved_moment(moment[0], l, old_m - base, rescale)
        moment = (earlier + p * at_least_log_0(s - base),)
    l = l * rescale + p
    return Softmax(tiles.times(acc, rescale[:, None]), m, l, largest, moment)


@triton.jit
def log_sum_exp(m, l):
    """Return lse, in natural logarithms."""
    return (m + tl.log2(l)) * LN2


@triton.jit
def entropy_of(l, moment, OBSERVES: tl.constexpr):
    """Return the entropy, in natural units: the sum of two numbers of at least 0, but for rounding;
    0 for a query that sees no key. Return the mean of what a score OBSERVES in its place."""
    if OBSERVES:
        return moment * reciprocal(l)
    else:
        entropy = (tl.log2(tl.where(l == 0.0, 1.0, l)) - moment * reciprocal(l)) * LN2
        return tl.where(entropy < 0.0, 0.0, entropy)


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
