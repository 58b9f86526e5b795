"""The forward kernel with tangents: out, lse, and how they move, in one pass over the keys.

Beside the online softmax (m, l and acc, `kernel_forward`) a row carries the mean r of T' under the
P so far, and a second accumulator Σ exp(T − m) ((T' − r) v + v'). Where a block moves r by e, that
accumulator moves by −e acc. At the end it is l out', and r is lse'.

Kernels that accumulate P T' v and subtract r out at the end (NVlabs/rcm, for example) round what
all T' of a row have in common to 16 bits, and it is most of T' where all keys move alike.
"""

from typing import Any, NamedTuple

import triton.language as tl

import triton

from ..gpu.device.softmax import (
    LN2,
    LOG2E,
    Softmax,
    at_least_log_0,
    empty_softmax,
    entropy_of,
    log_sum_exp,
    reciprocal,
    update_softmax,
    with_sink,
)
from . import tile
from .kernel_forward import scores, store_maxima
from .main_loop import begin_program, visit


class TritonTangentConfig(NamedTuple):
    """Compile-time constants of the kernel, besides its mask and its blocks."""

    score: Any  # the generated function of T and T'; None: they are S and S'
    index: Any  # the type of positions
    precision: Any  # of products of float32
    positive: Any  # scale > 0
    track_max: Any  # whether the largest S is kept besides the largest T
    number: Any  # the generated function of a number and its tangent, or None
    even: Any  # whether the number of keys is a multiple of BLOCK_N
    t_moves: Any  # whether q, k or a tensor that the score captures moves
    d: Any  # `tile.Width`
    dv: Any


class MovingQueries(NamedTuple):
    """The tiles that stay in registers. (In a plain tuple Triton 3.6 asks None for its type.)"""

    q: Any  # the queries, in pieces
    tangent: Any  # their tangents; None: they do not move


class TangentSums(NamedTuple):
    """The sums over the keys so far, per row of a tile."""

    softmax: Any  # `Softmax`
    acc: Any  # Σ exp2(T − m) ((T' − mean) v + v'), in pieces
    mean: Any  # of T'; natural units
    # (Σ exp2(T − m) (T − m) (T' − mean),) for the entropy's tangent; for that of the mean of f,
    # (Σ exp2(T − m) (f (T' − mean) + f'),); else ()
    moment: Any


@triton.jit(do_not_specialize=["q_len", "kv_len", "score_numbers", "mask_numbers"])
def tangent(
    q, k, v, q_tangent, k_tangent, v_tangent,  # pointers; None: it does not move
    out, lse, out_tangent, lse_tangent,
    row_max, entropy, entropy_tangent, max_logits, sink, sink_tangent,  # these may be None, too
    q_strides, k_strides, v_strides, q_tangent_strides, k_tangent_strides, v_tangent_strides,
    heads, group, q_len, kv_len, d: tl.constexpr, dv: tl.constexpr,
    scale, coords, dropout, schedule,
    score_tensors, mask_tensors, score_numbers, mask_numbers,  # captured values
    SCORE: tl.constexpr, MASK: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr,
    POSITIVE: tl.constexpr, EVEN: tl.constexpr, EVEN_ROWS: tl.constexpr,  # as in `forward`
    NUMBER: tl.constexpr,  # of a number whose mean is in entropy's place, and of its tangent
    CAPTURED_MOVE: tl.constexpr,  # a tensor that the score captures moves
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_EDGE: tl.constexpr,
    SCATTERED: tl.constexpr, SUB: tl.constexpr,
    D: tl.constexpr, D_REST: tl.constexpr, DV: tl.constexpr, DV_REST: tl.constexpr,
):  # fmt: skip
    """Compute what `forward` does, and the tangents of out, lse and entropy."""
    TRACK_MAX: tl.constexpr = max_logits is not None and SCORE is not None
    T_MOVES: tl.constexpr = q_tangent is not None or k_tangent is not None or CAPTURED_MOVE
    CONFIG: tl.constexpr = TritonTangentConfig(
        SCORE, INDEX, PRECISION, POSITIVE, TRACK_MAX, NUMBER, EVEN, T_MOVES,
        tile.Width(d, D, D_REST), tile.Width(dv, DV, DV_REST),
    )  # fmt: skip
    q_len = tile.known_even(q_len, EVEN_ROWS)
    program = begin_program(
        schedule, heads, q_len, kv_len, SUB, BLOCK_M, BLOCK_EDGE, BLOCK_N, SCATTERED
    )
    first, b, h, b64, h64 = program.first, program.b, program.h, program.b64, program.h64
    i, live = program.index, program.live
    q_tile = tile.load(tile.row(q, q_strides, b64, h64, first), i, q_strides[2], live, CONFIG.d)
    q_tangent_tile = None
    if q_tangent is not None:
        q_tangent_rows = tile.row(q_tangent, q_tangent_strides, b64, h64, first)
        q_tangent_tile = tile.load(q_tangent_rows, i, q_tangent_strides[2], live, CONFIG.d)
    k_head = tile.head(k, k_strides, b64, h64 // group)
    v_head = tile.head(v, v_strides, b64, h64 // group)
    k_tangent_head, v_tangent_head = None, None
    if k_tangent is not None:
        k_tangent_head = tile.head(k_tangent, k_tangent_strides, b64, h64 // group)
    if v_tangent is not None:
        v_tangent_head = tile.head(v_tangent, v_tangent_strides, b64, h64 // group)
    keys = tile.KeyPointers(k_head, v_head, k_strides, v_strides, None)
    key_tangents = tile.KeyPointers(
        k_tangent_head, v_tangent_head, k_tangent_strides, v_tangent_strides, None
    )
    q_idx = tile.positions(coords.q_pos, coords.q_stride, coords.q, b, first + i, live, INDEX)
    rows = tile.row_coords(coords, b, h, q_idx, first, INDEX)
    mods = tile.ModArguments(
        scale, coords, dropout, (score_tensors, score_numbers), (mask_tensors, mask_numbers), None
    )

    softmax = empty_softmax(BLOCK_M, CONFIG.dv, entropy is not None)
    sums = TangentSums(
        softmax, tile.zeros(BLOCK_M, CONFIG.dv), tl.zeros([BLOCK_M], tl.float32), softmax.moment
    )
    sums = visit(
        sums, MovingQueries(q_tile, q_tangent_tile), (keys, key_tangents), rows, mods, schedule,
        program, kv_len, attend, MASK, BLOCK_N, BLOCK_EDGE, SCATTERED, CONFIG,
    )  # fmt: skip

    head = b64 * heads + h
    row = head * q_len + first
    slot = head * ((schedule.tile_rows >> 2) * SUB) + program.slot
    store_maxima(sums.softmax, row_max, row, max_logits, slot, program, CONFIG)
    if sink is not None:
        sums = with_moving_sink(sums, sink, sink_tangent, h, NUMBER is not None)
    softmax = sums.softmax
    tl.store(lse + row + i, log_sum_exp(softmax.m, softmax.l), mask=live)
    tl.store(lse_tangent + row + i, sums.mean, mask=live)
    factor = reciprocal(softmax.l)
    if entropy is not None:
        of_row = entropy_of(softmax.l, softmax.moment[0], NUMBER is not None)
        tl.store(entropy + row + i, of_row, mask=live)
        unit = -LN2 if NUMBER is None else 1.0
        tl.store(entropy_tangent + row + i, sums.moment[0] * factor * unit, mask=live)
    if dropout is not None:
        factor = factor * dropout.factor
    tile.store(out + row * dv, i, live, tile.times(softmax.acc, factor[:, None]), CONFIG.dv)
    tile.store(out_tangent + row * dv, i, live, tile.times(sums.acc, factor[:, None]), CONFIG.dv)


@triton.jit
def attend(
    sums, queries, streamed, n, stop, rows, mods,
    MASK: tl.constexpr, BLOCK_N: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Return the sums after one more block of keys, from n to n + BLOCK_N.

    Keys from `stop` on do not count. MASK None: every pair is kept.
    """
    q_tile, q_tangent = queries
    keys, key_tangents = streamed
    captured = tile.with_tile_origin(mods.score, mods.coords, rows.first, n)
    j = tl.arange(0, BLOCK_N)
    live = None if CONFIG.even else n + j < stop
    n64 = tl.cast(n, tl.int64)
    k_tile = tile.load(
        keys.k + n64 * keys.k_strides[2], j, keys.k_strides[2], live, CONFIG.d, keys.k_strides[3]
    )
    s = tile.outer(q_tile, k_tile, CONFIG.precision)
    s_tangent = None
    if q_tangent is not None:
        s_tangent = tile.outer(q_tangent, k_tile, CONFIG.precision)
    if key_tangents.k is not None:
        strides = key_tangents.k_strides
        k_tangent = tile.load(
            key_tangents.k + n64 * strides[2], j, strides[2], live, CONFIG.d, strides[3]
        )
        s_tangent = tile.outer(q_tile, k_tangent, CONFIG.precision, s_tangent)
    coords = mods.coords
    kv_idx = tile.positions(
        coords.kv_pos, coords.kv_stride, coords.kv, rows.batch, n + j, live, CONFIG.index
    )
    pairs = tile.Pairs(rows.b, rows.h, rows.idx, kv_idx[None, :])
    t, t_tangent, unit, s, observed = scores_with_tangent(
        s, s_tangent, mods, pairs, captured, MASK, CONFIG
    )
    if not CONFIG.even:
        t = tl.where(live[None, :], t, float("-inf"))
    if CONFIG.t_moves and (CONFIG.score is not None or MASK is not None):
        # A pair that is not kept counts nothing, and its T' may be infinite or NaN.
        t_tangent = tl.where(t == float("-inf"), 0.0, t_tangent)
    if CONFIG.number is not None:
        kept = t != float("-inf")
        observed = (tl.where(kept, observed[0], 0.0), tl.where(kept, observed[1], 0.0))
    p, rescale, softmax = update_softmax(sums.softmax, t, unit, s, CONFIG.track_max, observed[:1])
    if CONFIG.t_moves:
        p_tangent = p * (t_tangent - sums.mean[:, None])
        step = tl.sum(p_tangent, 1) * reciprocal(softmax.l)
        of_block = None
        if CONFIG.number is not None:
            of_block = tl.sum(p_tangent * observed[0] + p * observed[1], 1)
        elif len(sums.moment) > 0:
            base = tl.where(softmax.m == float("-inf"), 0.0, softmax.m)
            of_block = tl.sum(p_tangent * at_least_log_0(t * unit - base[:, None]), 1)
        p_tangent = p_tangent - p * step[:, None]
        sums = moved(softmax, sums, rescale, step, of_block)
    else:
        sums = moved(softmax, sums, rescale, None, None)
    acc, acc_tangent = sums.softmax.acc, sums.acc
    if mods.dropout is not None:
        keep = tile.dropout_keep(mods.dropout, pairs)
        p = tl.where(keep, p, 0.0)
        if CONFIG.t_moves:
            p_tangent = tl.where(keep, p_tangent, 0.0)
    v_tile = tile.load(keys.v + n64 * keys.v_strides[2], j, keys.v_strides[2], live, CONFIG.dv)
    if CONFIG.t_moves:
        acc_tangent = tile.add_product(acc_tangent, p_tangent, v_tile, CONFIG.precision)
    if key_tangents.v is not None:
        strides = key_tangents.v_strides
        v_tangent = tile.load(key_tangents.v + n64 * strides[2], j, strides[2], live, CONFIG.dv)
        acc_tangent = tile.add_product(acc_tangent, p, v_tangent, CONFIG.precision)
    # Last: ptxas needs 37 registers more where it is first (128 wide on sm_90), and spills 8 bytes.
    acc = tile.add_product(acc, p, v_tile, CONFIG.precision)
    softmax = Softmax(acc, softmax.m, softmax.l, softmax.largest, softmax.moment)
    return TangentSums(softmax, acc_tangent, sums.mean, sums.moment)


@triton.jit
def scores_with_tangent(
    s, s_tangent, mods, pairs, captured, MASK: tl.constexpr, CONFIG: tl.constexpr
):
    """Return T in some unit (-inf where not kept), T', that unit over log 2, and S, of products
    `s` = q kᵀ and `s_tangent` (None: neither q nor k moves); and the number that the score observes
    with its tangent, or ()."""
    if s_tangent is None:  # noqa: SIM108  (one branch is compiled)
        t_tangent = tl.zeros_like(s)
    else:
        t_tangent = s_tangent * mods.scale
    observed = ()
    if CONFIG.number is not None:
        observed = CONFIG.number(
            s * mods.scale, t_tangent, pairs.b, pairs.h, pairs.q_idx, pairs.kv_idx, captured
        )
    if CONFIG.score is None:
        t, unit, s = scores(s, mods, pairs, captured, None, MASK, CONFIG.positive)
    else:
        s = s * mods.scale
        unit = LOG2E
        t, t_tangent = CONFIG.score(
            s, t_tangent, pairs.b, pairs.h, pairs.q_idx, pairs.kv_idx, captured
        )
        if MASK is not None:
            keep = MASK(pairs.b, pairs.h, pairs.q_idx, pairs.kv_idx, mods.mask)
            t = tl.where(keep, t, float("-inf"))
    return t, t_tangent, unit, s, observed


@triton.jit
def moved(softmax, sums, rescale, step, of_block):
    """Return the sums with the new `softmax`, both accumulators rescaled, and the mean moved by
    `step` (None: by nothing).

    - `of_block`: Σ exp2(T − m) (T − m) (T' − mean) of the new keys, with the old mean; None without
      the entropy's tangent.
    """
    acc = tile.times(softmax.acc, rescale[:, None])
    acc_tangent = tile.times(sums.acc, rescale[:, None])
    mean, moment = sums.mean, sums.moment
    if step is not None:
        mean += step
        acc_tangent = minus_times(acc_tangent, acc, step[:, None])
        if of_block is not None:  # (the sum of p (T' − mean) is 0, so no shift of m counts)
            moment = (moment[0] * rescale + of_block - step * softmax.moment[0],)
    softmax = Softmax(acc, softmax.m, softmax.l, softmax.largest, softmax.moment)
    return TangentSums(softmax, acc_tangent, mean, moment)


@triton.jit
def minus_times(x, y, factor):
    """Return x - factor y, piece by piece."""
    if len(x) == 0:
        return ()
    elif len(x) == 1:
        return (x[0] - y[0] * factor,)
    else:
        return (x[0] - y[0] * factor, x[1] - y[1] * factor)


@triton.jit
def with_moving_sink(sums, sink, sink_tangent, h, OBSERVES: tl.constexpr):
    """Return the sums with one more key, whose logit is the head's sink and whose value is 0."""
    logit = tl.load(sink + h)
    softmax = with_sink(sums.softmax, logit, OBSERVES)
    base = tl.where(softmax.m == float("-inf"), 0.0, softmax.m)
    rescale = tl.exp2(sums.softmax.m - base)
    p = tl.exp2(logit.to(tl.float32) * LOG2E - base)
    t_tangent = 0.0
    if sink_tangent is not None:
        t_tangent = tl.load(sink_tangent + h).to(tl.float32)
    p_tangent = p * (t_tangent - sums.mean)
    step = p_tangent * reciprocal(softmax.l)
    of_sink = None
    if OBSERVES:
        of_sink = tl.zeros_like(p)
    elif len(sums.moment) > 0:
        of_sink = p_tangent * at_least_log_0(logit.to(tl.float32) * LOG2E - base)
    acc = sums.softmax.acc
    unscaled = Softmax(acc, softmax.m, softmax.l, softmax.largest, softmax.moment)
    return moved(unscaled, sums, rescale, step, of_sink)
