"""Partial results: what a CTA has computed of a unit that it shares with others.

For disjoint sets J and K of keys, with o_J the sum of exp2(T - m_J) v over J, and so on,

    m = max(m_J, m_K),  o = o_J exp2(m_J - m) + o_K exp2(m_K - m),  and l likewise.

A CTA shares at most two units: one that an earlier CTA began, and one that it begins and a later
one ends. So it has memory for two partial results. Of the CTAs of a unit, the last one to come puts
them together, in the order of the keys: the same bits in every run. Nobody waits for anybody.
"""

import triton.language as tl

import triton

from ..device import tiles
from ..device.softmax import Softmax

AT_ONCE = tl.constexpr(32)  # partial results whose maxima are read at once


@triton.jit
def numbers(HOW: tl.constexpr):
    """float32 numbers of a partial result: acc by rows, then m, l and largest, and as many more, so
    that the next one begins at a multiple of 64 bytes."""
    return HOW.m * (HOW.dv.piece + HOW.dv.rest + 4)


@triton.jit
def put(partials, slot, state, i, live, HOW: tl.constexpr):
    """Write a partial result down, the rows that are live."""
    at = partials + tl.cast(slot, tl.int64) * numbers(HOW)
    W: tl.constexpr = HOW.dv.piece + HOW.dv.rest
    WIDTH: tl.constexpr = tiles.Width(W, HOW.dv.piece, HOW.dv.rest)
    tiles.store(at, i, live, state.acc, WIDTH)
    of_row = at + HOW.m * W + i
    tl.store(of_row, state.m, mask=live)
    tl.store(of_row + HOW.m, state.l, mask=live)
    if HOW.track_max:
        tl.store(of_row + 2 * HOW.m, state.largest, mask=live)


@triton.jit
def merged(partials, first, count, i, live, HOW: tl.constexpr):
    """The `Softmax` of `count` partial results, of the CTAs from `first` on."""
    W: tl.constexpr = HOW.dv.piece + HOW.dv.rest
    WIDTH: tl.constexpr = tiles.Width(W, HOW.dv.piece, HOW.dv.rest)
    M: tl.constexpr = HOW.m
    m = tl.full([M], float("-inf"), tl.float32)
    largest = m
    for c in tl.range(0, count, AT_ONCE):
        at, there = _vectors(partials, first, c + tl.arange(0, AT_ONCE), count, i, live, HOW)
        m = tl.maximum(m, tl.max(tl.load(at, mask=there, other=float("-inf")), 0))
        if HOW.track_max:
            found = tl.load(at + 2 * HOW.m, mask=there, other=float("-inf"))
            largest = tl.maximum(largest, tl.max(found, 0))
    base = tl.where(m == float("-inf"), 0.0, m)
    l = tl.zeros([M], tl.float32)
    for c in tl.range(0, count, AT_ONCE):
        at, there = _vectors(partials, first, c + tl.arange(0, AT_ONCE), count, i, live, HOW)
        weights = tl.exp2(tl.load(at, mask=there, other=float("-inf")) - base[None, :])
        l += tl.sum(weights * tl.load(at + HOW.m, mask=there, other=0.0), 0)
    acc = tiles.zeros(M, WIDTH)
    AT_A_TIME: tl.constexpr = HOW.merge
    for c in tl.range(0, count, AT_A_TIME):
        weights, parts = (), ()
        for n in tl.static_range(AT_A_TIME):
            at = partials + _slot(first, c + n) * numbers(HOW)
            there = live & (c + n < count)
            of_row = at + HOW.m * W + i
            weights = weights + (tl.load(of_row, mask=there, other=float("-inf")),)  # noqa: RUF005
            parts = parts + (tiles.load(at, i, W, there, WIDTH),)  # noqa: RUF005
        for n in tl.static_range(AT_A_TIME):
            acc = plus(acc, tiles.times(parts[n], tl.exp2(weights[n] - base)[:, None]))
    return Softmax(acc, m, l, largest)


@triton.jit
def plus(a, b):
    """The sum, piece by piece."""
    if len(a) == 1:
        return (a[0] + b[0],)
    else:
        return (a[0] + b[0], a[1] + b[1])


@triton.jit
def _slot(first, c):
    """Where the c-th CTA of a unit has written: what it begins comes second."""
    c = tl.cast(c, tl.int32)
    return tl.cast(2 * (first + c) + (c == 0).to(tl.int32), tl.int64)


@triton.jit
def _vectors(partials, first, c, count, i, live, HOW: tl.constexpr):
    """Pointers to m of several partial results, a row each, and which there are."""
    at = _slot(first, c) * numbers(HOW) + HOW.m * (HOW.dv.piece + HOW.dv.rest)
    return partials + at[:, None] + i[None, :], (c < count)[:, None] & live[None, :]
