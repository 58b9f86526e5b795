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
    empty_softmax,
    entropy_of,
    log_sum_exp,
    or_nan,
    reciprocal,
    update_softmax,
    with_sink,
)
from . import tile
from .main_loop import begin_program, visit


class TritonFwdConfig(NamedTuple):
    """Compile-time constants of the kernel, besides its mask and its blocks."""

    score: Any  # the generated function; None: T is S
    index: Any  # the type of positions
    precision: Any  # of products of float32
    positive: Any  # scale > 0
    track_max: Any  # whether the largest S is kept besides the largest T
    number: Any  # the generated function of a number, whose mean is in entropy's place, or None
    number_finite: Any  # whether it is finite, whatever S is
    even: Any  # whether the number of keys is a multiple of BLOCK_N
    d: Any  # `tile.Width`
    dv: Any


# No length has a kernel of its own; nor does Triton 3.6 compile one for Blackwell if it knows that
# there is a single key.
@triton.jit(do_not_specialize=["q_len", "kv_len", "score_numbers", "mask_numbers"])
def forward(
    q, k, v, out, lse, row_max, entropy, max_logits, sink,  # pointers; the last four may be None
    q_strides, k_strides, v_strides,  # batch / 8, head / 8, row; and of a transposed k, column
    heads, group, q_len, kv_len, d: tl.constexpr, dv: tl.constexpr,
    scale, coords, dropout, schedule,
    score_tensors, mask_tensors, score_numbers, mask_numbers,  # captured values
    SCORE: tl.constexpr, MASK: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr,
    POSITIVE: tl.constexpr,  # scale > 0
    EVEN: tl.constexpr,  # the number of keys is a multiple of BLOCK_N
    EVEN_ROWS: tl.constexpr,  # the number of queries is a multiple of `tile.EVEN_ROWS`
    NUMBER: tl.constexpr,  # of a number of the pair, whose mean is in entropy's place
    NUMBER_FINITE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_EDGE: tl.constexpr,
    SCATTERED: tl.constexpr, SUB: tl.constexpr,
    D: tl.constexpr, D_REST: tl.constexpr, DV: tl.constexpr, DV_REST: tl.constexpr,
):  # fmt: skip
    """Compute out and lse of BLOCK_M queries of one head, and `row_max`, `entropy` and `max_logits`
    if they are not None."""
    TRACK_MAX: tl.constexpr = max_logits is not None and SCORE is not None
    CONFIG: tl.constexpr = TritonFwdConfig(
        SCORE, INDEX, PRECISION, POSITIVE, TRACK_MAX, NUMBER, NUMBER_FINITE, EVEN,
        tile.Width(d, D, D_REST), tile.Width(dv, DV, DV_REST),
    )  # fmt: skip
    q_len = tile.known_even(q_len, EVEN_ROWS)
    program = begin_program(
        schedule, heads, q_len, kv_len, SUB, BLOCK_M, BLOCK_EDGE, BLOCK_N, SCATTERED
    )
    first, b, h, b64, h64 = program.first, program.b, program.h, program.b64, program.h64
    i, live = program.index, program.live
    q_rows = tile.row(q, q_strides, b64, h64, first)
    q_tile = tile.load(q_rows, i, q_strides[2], live, CONFIG.d)
    k_head = tile.head(k, k_strides, b64, h64 // group)
    v_head = tile.head(v, v_strides, b64, h64 // group)
    keys = tile.KeyPointers(k_head, v_head, k_strides, v_strides, None)
    q_idx = tile.positions(coords.q_pos, coords.q_stride, coords.q, b, first + i, live, INDEX)
    rows = tile.row_coords(coords, b, h, q_idx, first, INDEX)
    mods = tile.ModArguments(
        scale, coords, dropout, (score_tensors, score_numbers), (mask_tensors, mask_numbers), None
    )

    state = empty_softmax(BLOCK_M, CONFIG.dv, entropy is not None)
    state = visit(
        state, q_tile, keys, rows, mods, schedule, program, kv_len, attend, MASK, BLOCK_N,
        BLOCK_EDGE, SCATTERED, CONFIG,
    )  # fmt: skip

    head = b64 * heads + h
    row = head * q_len + first
    slot = head * ((schedule.tile_rows >> 2) * SUB) + program.slot
    store_maxima(state, row_max, row, max_logits, slot, program, CONFIG)
    if sink is not None:
        state = with_sink(state, tl.load(sink + h), NUMBER is not None)
    tl.store(lse + row + i, log_sum_exp(state.m, state.l), mask=live)
    if entropy is not None:
        of_row = entropy_of(state.l, state.moment[0], NUMBER is not None)
        tl.store(entropy + row + i, of_row, mask=live)
    factor = reciprocal(state.l)
    if dropout is not None:
        factor = factor * dropout.factor
    tile.store(out + row * dv, i, live, tile.times(state.acc, factor[:, None]), CONFIG.dv)


@triton.jit
def store_maxima(state, row_max, row, max_logits, slot, program, CONFIG: tl.constexpr):
    """Store the largest T of every row to `row_max`, and the largest S of the program to
    `max_logits`, where they are not None."""
    live = program.live
    if row_max is not None:
        tl.store(row_max + row + program.index, or_nan(state.m * LN2, state.l), mask=live)
    if max_logits is not None:
        largest = state.largest if CONFIG.score is not None else state.m * LN2  # else S is T
        largest = tl.where(live, or_nan(largest, state.l), float("-inf"))
        has_nan = tl.max((largest != largest).to(tl.int32), 0)
        largest = tl.where(has_nan > 0, float("nan"), tl.max(largest, 0))
        tl.store(max_logits + slot, largest)


@triton.jit
def attend(
    state, q_tile, keys, n, stop, rows, mods,
    MASK: tl.constexpr, BLOCK_N: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Return the softmax after one more block of keys, from n to n + BLOCK_N.

    Keys from `stop` on do not count. MASK None: every pair is kept.
    """
    captured = tile.with_tile_origin(mods.score, mods.coords, rows.first, n)
    j = tl.arange(0, BLOCK_N)
    live = None if CONFIG.even else n + j < stop
    n64 = tl.cast(n, tl.int64)
    k_rows = keys.k + n64 * keys.k_strides[2]
    k_tile = tile.load(k_rows, j, keys.k_strides[2], live, CONFIG.d, keys.k_strides[3])
    s = tile.outer(q_tile, k_tile, CONFIG.precision)
    coords = mods.coords
    kv_idx = tile.positions(
        coords.kv_pos, coords.kv_stride, coords.kv, rows.batch, n + j, live, CONFIG.index
    )
    pairs = tile.Pairs(rows.b, rows.h, rows.idx, kv_idx[None, :])
    observed = ()
    if CONFIG.number is not None:
        scaled = s * mods.scale
        number = CONFIG.number(scaled, pairs.b, pairs.h, pairs.q_idx, pairs.kv_idx, captured)
        observed = (number,)
    t, unit, s = scores(s, mods, pairs, captured, CONFIG.score, MASK, CONFIG.positive)
    if not CONFIG.even:
        t = tl.where(live[None, :], t, float("-inf"))
    ALL_KEPT: tl.constexpr = CONFIG.score is None and MASK is None and CONFIG.even
    if CONFIG.number is not None and not (CONFIG.number_finite or ALL_KEPT):
        observed = (tl.where(t == float("-inf"), 0.0, number),)
    p, rescale, state = update_softmax(state, t, unit, s, CONFIG.track_max, observed)
    if mods.dropout is not None:
        p = tl.where(tile.dropout_keep(mods.dropout, pairs), p, 0.0)
    v_rows = keys.v + n64 * keys.v_strides[2]
    v_tile = tile.load(v_rows, j, keys.v_strides[2], live, CONFIG.dv)
    acc = tile.add_product(tile.times(state.acc, rescale[:, None]), p, v_tile, CONFIG.precision)
    return Softmax(acc, state.m, state.l, state.largest, state.moment)


@triton.jit
def scores(
    s, mods, pairs, captured, SCORE: tl.constexpr, MASK: tl.constexpr, POSITIVE: tl.constexpr
):
    """Return T in some unit (-inf where not kept), that unit over log 2, and S, of `s` = q kᵀ.

    Without a score, T is S, and a scale above 0 does not change which T is the largest: the scale
    stays in the unit, where it costs nothing. (A scale of 0 would make NaN of 0 times -inf.)
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
        keep = MASK(pairs.b, pairs.h, pairs.q_idx, pairs.kv_idx, mods.mask)
        t = tl.where(keep, t, float("-inf"))
    return t, unit, s
