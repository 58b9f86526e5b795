"""The forward kernel: online softmax over the live tiles of a block of queries.

(Dao et al. 2022, arXiv 2205.14135, algorithm 1; Dao 2023, arXiv 2307.08691, section 3.1.)

One program computes `BLOCK_M` queries of one head. Per query i it keeps the largest score so far m,
the sum l = Σ exp(T − m), and acc = Σ exp(T − m) v, all in float32. m is in units of log 2: the
hardware has exp2, and the factor log2(e) costs nothing where it joins the scale.
"""

from typing import Any, NamedTuple

import triton.language as tl

import triton

from ..gpu.device.softmax import (
    LN2,
    LOG2E,
    Softmax,
    log_sum_exp,
    nothing,
    or_nan,
    reciprocal,
    weigh,
    with_sink,
)
from . import tile
from .walk import advance, begin, rows_of


class How(NamedTuple):
    """What the kernel is compiled for, besides its mask and its blocks."""

    score: Any  # the generated function; None: T is S
    index: Any  # the type of positions
    precision: Any  # of products of float32
    positive: Any  # scale > 0
    track_max: Any  # whether the largest S is kept beside the largest T
    even: Any  # whether keys come in whole blocks of BLOCK_N
    d: Any  # `tile.Width`
    dv: Any


class Keys(NamedTuple):
    """Pointers to the first row of k and v of one head, and strides."""

    k: Any
    v: Any
    k_strides: Any
    v_stride: Any


# No length has a kernel of its own; nor does Triton 3.6 compile one for Blackwell if it knows that
# there is a single key.
@triton.jit(do_not_specialize=["q_len", "kv_len", "score_numbers", "mask_numbers"])
def forward(
    q, k, v, out, lse, row_max, top, sink,  # pointers; the last three may be None
    q_strides, k_strides, v_strides,  # batch / 8, head / 8, row; and of a transposed k, column
    heads, group, q_len, kv_len, d: tl.constexpr, dv: tl.constexpr,
    scale, coords, dropout, walk,
    score_tensors, mask_tensors, score_numbers, mask_numbers,  # captured values
    SCORE: tl.constexpr, MASK: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr,
    POSITIVE: tl.constexpr,  # scale > 0
    EVEN: tl.constexpr,  # keys come in whole blocks of BLOCK_N
    EVEN_ROWS: tl.constexpr,  # of queries there are a multiple of `tile.EVEN_ROWS`
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_EDGE: tl.constexpr,
    SCATTERED: tl.constexpr, SUB: tl.constexpr,
    D: tl.constexpr, D_REST: tl.constexpr, DV: tl.constexpr, DV_REST: tl.constexpr,
):  # fmt: skip
    """out and lse of BLOCK_M queries of one head; `row_max` and `top` if they are there."""
    TRACK_MAX: tl.constexpr = top is not None and SCORE is not None
    HOW: tl.constexpr = How(
        SCORE, INDEX, PRECISION, POSITIVE, TRACK_MAX, EVEN, tile.Width(d, D, D_REST),
        tile.Width(dv, DV, DV_REST),
    )  # fmt: skip
    q_len = tile.rows_in_all(q_len, EVEN_ROWS)
    tile_row, slot, first, end, h, b = tile.map_work_tile(walk, heads, SUB, BLOCK_M)
    partial, full = begin(walk, tile_row, kv_len, BLOCK_EDGE, BLOCK_N, SCATTERED)
    b64, h64 = tl.cast(b, tl.int64), tl.cast(h, tl.int64)
    i = tl.arange(0, BLOCK_M)
    live = first + i < tl.minimum(end, q_len)
    q_at = tile.head(q, q_strides, b64, h64) + tl.cast(first, tl.int64) * q_strides[2]
    q_tile = tile.load(q_at, i, q_strides[2], live, HOW.d)
    k_at = tile.head(k, k_strides, b64, h64 // group)
    v_at = tile.head(v, v_strides, b64, h64 // group)
    keys = Keys(k_at, v_at, k_strides, v_strides[2])
    q_idx = tile.positions(coords.q_pos, coords.q_stride, coords.q, b, first + i, live, INDEX)
    rows = tile.Rows(
        tl.cast(coords.b, INDEX) + b, tl.cast(coords.h, INDEX) + h, q_idx[:, None], b, first
    )
    of_score, of_mask = (score_tensors, score_numbers), (mask_tensors, mask_numbers)
    mods = tile.Mods(scale, coords, dropout, of_score, of_mask, None)

    state = nothing(BLOCK_M, HOW.dv)
    # How many kinds of tiles, of partial and full ones, have one loop over all blocks (`walk`).
    BLOCK_LOOPS: tl.constexpr = 0 if walk.full is None else (2 if SCATTERED else 1)
    for FULL in tl.static_range(BLOCK_LOOPS):
        runs = walk.full if FULL else walk.partial
        blocks, here = full if FULL else partial
        for _ in tl.range(0, blocks):
            state = attend(
                state, q_tile, keys, here.row, here.stop, rows, mods, None if FULL else MASK,
                BLOCK_N if FULL else BLOCK_EDGE, HOW,
            )  # fmt: skip
            here = advance(runs, here, walk.step, kv_len, BLOCK_N if FULL else BLOCK_EDGE)
    if BLOCK_LOOPS < 2:
        for run in tl.range(full.first, full.last):
            start, stop = rows_of(walk, full, run, kv_len)
            for n in tl.range(start, stop, BLOCK_N):
                state = attend(
                    state, q_tile, keys, n, stop, rows, mods, MASK if walk.full is None else None,
                    BLOCK_N, HOW,
                )  # fmt: skip

    row = (b64 * heads + h) * q_len + first
    if row_max is not None:
        tl.store(row_max + row + i, or_nan(state.m * LN2, state.l), mask=live)
    if top is not None:
        largest = state.largest if SCORE is not None else state.m * LN2  # without one, S is T
        largest = tl.where(live, or_nan(largest, state.l), float("-inf"))
        bad = tl.max((largest != largest).to(tl.int32), 0)
        largest = tl.where(bad > 0, float("nan"), tl.max(largest, 0))
        tl.store(top + (b64 * heads + h) * ((walk.tile_rows >> 2) * SUB) + slot, largest)
    if sink is not None:
        state = with_sink(state, tl.load(sink + h))
    tl.store(lse + row + i, log_sum_exp(state.m, state.l), mask=live)
    by = reciprocal(state.l)
    if dropout is not None:
        by = by * dropout.factor
    tile.store(out + row * dv, i, live, tile.times(state.acc, by[:, None]), HOW.dv)


@triton.jit
def attend(
    state, q_tile, keys, n, stop, rows, mods,
    MASK: tl.constexpr, BLOCK_N: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """The softmax after one more block of keys, from n to n + BLOCK_N; those from `stop` on do not
    count. MASK None: every pair is kept."""
    captured = tile.with_tile_origin(mods.score, mods.coords, rows.first, n)
    j = tl.arange(0, BLOCK_N)
    live = None if HOW.even else n + j < stop
    n64 = tl.cast(n, tl.int64)
    k_at = keys.k + n64 * keys.k_strides[2]
    k_tile = tile.load(k_at, j, keys.k_strides[2], live, HOW.d, keys.k_strides[3])
    s = tile.outer(q_tile, k_tile, HOW.precision)
    coords = mods.coords
    kv_idx = tile.positions(
        coords.kv_pos, coords.kv_stride, coords.kv, rows.batch, n + j, live, HOW.index
    )
    pairs = tile.Pairs(rows.b, rows.h, rows.idx, kv_idx[None, :])
    t, unit, s = scores(s, mods, pairs, captured, HOW.score, MASK, HOW.positive)
    if not HOW.even:
        t = tl.where(live[None, :], t, float("-inf"))
    p, rescale, state = weigh(state, t, unit, s, HOW.track_max)
    if mods.dropout is not None:
        p = tl.where(tile.dropout_keep(mods.dropout, pairs), p, 0.0)
    v_tile = tile.load(keys.v + n64 * keys.v_stride, j, keys.v_stride, live, HOW.dv)
    acc = tile.add_product(tile.times(state.acc, rescale[:, None]), p, v_tile, HOW.precision)
    return Softmax(acc, state.m, state.l, state.largest)


@triton.jit
def scores(
    s, mods, pairs, captured, SCORE: tl.constexpr, MASK: tl.constexpr, POSITIVE: tl.constexpr
):
    """T in some unit (-inf where not kept), that unit over log 2, and S, of the product `s` = q kᵀ.

    Without a score, T is S, and a scale above 0 does not change which is largest: it stays in the
    unit, where it costs nothing. (A scale of 0 would make NaN of 0 times -inf.)
    """
    if SCORE is None and POSITIVE:
        t = s
        unit = mods.scale * LOG2E
    else:
        s = s * mods.scale
        t = s
        unit = LOG2E
        if SCORE is not None:
            t = SCORE(s, pairs.b, pairs.h, pairs.q_idx, pairs.kv_idx, captured)
    if MASK is not None:
        kept = MASK(pairs.b, pairs.h, pairs.q_idx, pairs.kv_idx, mods.mask)
        t = tl.where(kept, t, float("-inf"))
    return t, unit, s
