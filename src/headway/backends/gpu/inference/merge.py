"""Partial results: what CTAs that share a unit have computed of it, and how they are merged.

For disjoint sets J and K of keys, with o_J the sum of exp2(T - m_J) v over J, and so on,

    m = max(m_J, m_K),  o = o_J exp2(m_J - m) + o_K exp2(m_K - m),  and l likewise.

A CTA shares at most two units: one that an earlier CTA began, and one that it begins and a later
one ends. So it has memory for two partial results. The last CTA of a unit to arrive merges them, in
the order of the keys, so every run gives the same bits. No CTA waits for another.
"""

import triton.language as tl

import triton

from ..device import tiles
from ..device.softmax import Softmax

MAXIMA_AT_ONCE = tl.constexpr(32)  # partial results whose maxima are read together


@triton.jit
def partial_size(CONFIG: tl.constexpr):
    """Return the float32 numbers of a partial result: acc by rows, then m, l, largest and padding,
    so that the next one begins at a multiple of 64 bytes."""
    return CONFIG.tile_rows * (CONFIG.dv.piece + CONFIG.dv.rest + 4)


@triton.jit
def write_partial(partials, slot, state, i, live, CONFIG: tl.constexpr):
    """Write the live rows of a partial result."""
    partial = partials + tl.cast(slot, tl.int64) * partial_size(CONFIG)
    COLUMNS: tl.constexpr = CONFIG.dv.piece + CONFIG.dv.rest
    WIDTH: tl.constexpr = tiles.Width(COLUMNS, CONFIG.dv.piece, CONFIG.dv.rest)
    tiles.store(partial, i, live, state.acc, WIDTH)
    row_statistics = partial + CONFIG.tile_rows * COLUMNS + i
    tl.store(row_statistics, state.m, mask=live)
    tl.store(row_statistics + CONFIG.tile_rows, state.l, mask=live)
    if CONFIG.track_max:
        tl.store(row_statistics + 2 * CONFIG.tile_rows, state.largest, mask=live)


@triton.jit
def merge_partials(partials, first_cta, count, i, live, CONFIG: tl.constexpr):
    """Return the `Softmax` of `count` partial results, those of the CTAs from `first_cta` on."""
    COLUMNS: tl.constexpr = CONFIG.dv.piece + CONFIG.dv.rest
    WIDTH: tl.constexpr = tiles.Width(COLUMNS, CONFIG.dv.piece, CONFIG.dv.rest)
    ROWS: tl.constexpr = CONFIG.tile_rows
    m = tl.full([ROWS], float("-inf"), tl.float32)
    largest = m
    for n in tl.range(0, count, MAXIMA_AT_ONCE):
        ctas = n + tl.arange(0, MAXIMA_AT_ONCE)
        maxima_at, valid = _maxima_of(partials, first_cta, ctas, count, i, live, CONFIG)
        m = tl.maximum(m, tl.max(tl.load(maxima_at, mask=valid, other=float("-inf")), 0))
        if CONFIG.track_max:
            scores = tl.load(maxima_at + 2 * ROWS, mask=valid, other=float("-inf"))
            largest = tl.maximum(largest, tl.max(scores, 0))
    base = tl.where(m == float("-inf"), 0.0, m)
    l = tl.zeros([ROWS], tl.float32)
    for n in tl.range(0, count, MAXIMA_AT_ONCE):
        ctas = n + tl.arange(0, MAXIMA_AT_ONCE)
        maxima_at, valid = _maxima_of(partials, first_cta, ctas, count, i, live, CONFIG)
        weights = tl.exp2(tl.load(maxima_at, mask=valid, other=float("-inf")) - base[None, :])
        l += tl.sum(weights * tl.load(maxima_at + ROWS, mask=valid, other=0.0), 0)
    acc = tiles.zeros(ROWS, WIDTH)
    PARTIALS_AT_ONCE: tl.constexpr = CONFIG.merged_at_once
    for n in tl.range(0, count, PARTIALS_AT_ONCE):
        maxima, accumulators = (), ()
        for more in tl.static_range(PARTIALS_AT_ONCE):
            partial = partials + _slot(first_cta, n + more) * partial_size(CONFIG)
            valid = live & (n + more < count)
            m_at = partial + ROWS * COLUMNS + i
            maxima = maxima + (tl.load(m_at, mask=valid, other=float("-inf")),)  # noqa: RUF005
            acc_rows = tiles.load(partial, i, COLUMNS, valid, WIDTH)
            accumulators = accumulators + (acc_rows,)  # noqa: RUF005
        for more in tl.static_range(PARTIALS_AT_ONCE):
            weight = tl.exp2(maxima[more] - base)[:, None]
            acc = add_pieces(acc, tiles.times(accumulators[more], weight))
    return Softmax(acc, m, l, largest, ())


@triton.jit
def add_pieces(a, b):
    """Return the sum of two tiles, piece by piece."""
    if len(a) == 1:
        return (a[0] + b[0],)
    else:
        return (a[0] + b[0], a[1] + b[1])


@triton.jit
def _slot(first_cta, n):
    """Return the slot of the n-th CTA of a unit. The unit that a CTA begins has its second one."""
    n = tl.cast(n, tl.int32)
    return tl.cast(2 * (first_cta + n) + (n == 0).to(tl.int32), tl.int64)


@triton.jit
def _maxima_of(partials, first_cta, ctas, count, i, live, CONFIG: tl.constexpr):
    """Return pointers to m of several partial results, a row each, and which of them exist."""
    maxima = CONFIG.tile_rows * (CONFIG.dv.piece + CONFIG.dv.rest)
    m_at = _slot(first_cta, ctas) * partial_size(CONFIG) + maxima
    return partials + m_at[:, None] + i[None, :], (ctas < count)[:, None] & live[None, :]
