"""The forward kernel: online softmax over the live tiles of a block of queries.

(Dao et al. 2022, arXiv 2205.14135, algorithm 1; Dao 2023, arXiv 2307.08691, section 3.1.)

One program computes `BLOCK_M` queries of one head. Per query i it keeps the largest score so far m,
the sum l = Σ exp(T − m), and acc = Σ exp(T − m) v, all in float32. m is in units of log 2: the
hardware has exp2, and the factor log2(e) costs nothing where it joins the scale.
"""

import triton.language as tl

import triton

from ..gpu import precision
from . import tile
from .walk import advance, begin, rows_of

LOG2E, LN2 = tl.constexpr(precision.LOG2E), tl.constexpr(precision.LN2)


# Of a single key, were it known that there is but one, Triton 3.6 compiles no kernel for Blackwell.
@triton.jit(do_not_specialize=["kv_len", "score_numbers", "mask_numbers"])
def forward(
    q, k, v, out, lse, row_max, top, sink,  # pointers; the last three may be None
    q_strides, k_strides, v_strides,  # of batch and head in eights, of row; of a turned k's column
    heads, group, q_len, kv_len, d: tl.constexpr, dv: tl.constexpr,
    scale, coords, dropout, walk,
    score_tensors, mask_tensors, score_numbers, mask_numbers,  # what the functions capture
    SCORE: tl.constexpr, MASK: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr,
    POSITIVE: tl.constexpr,  # scale > 0
    EVEN: tl.constexpr,  # keys come in whole blocks of BLOCK_N
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_EDGE: tl.constexpr,
    SCATTERED: tl.constexpr, SUB: tl.constexpr,
    D: tl.constexpr, D_REST: tl.constexpr, DV: tl.constexpr, DV_REST: tl.constexpr,
):  # fmt: skip
    """out and lse of BLOCK_M queries of one head, and what else is asked for."""
    line, slot, first, end, h, b = tile.place(walk, heads, SUB, BLOCK_M)
    partial, full = begin(walk, line, kv_len, BLOCK_EDGE, BLOCK_N, SCATTERED)
    b64, h64 = tl.cast(b, tl.int64), tl.cast(h, tl.int64)
    i = tl.arange(0, BLOCK_M)
    live = first + i < tl.minimum(end, q_len)
    q_at = tile.head(q, q_strides, b64, h64) + tl.cast(first, tl.int64) * q_strides[2]
    q_rows = tile.load(q_at, i, q_strides[2], live, d, D, D_REST)
    k_at = tile.head(k, k_strides, b64, h64 // group)
    v_at = tile.head(v, v_strides, b64, h64 // group)
    keys = (k_at, v_at, k_strides, v_strides[2])
    q_idx = tile.positions(coords.q_pos, coords.q_stride, coords.q, b, first + i, live, INDEX)
    at = (tl.cast(coords.b, INDEX) + b, tl.cast(coords.h, INDEX) + h, q_idx[:, None], b, first)
    of_score, of_mask = (score_tensors, score_numbers), (mask_tensors, mask_numbers)
    given = (scale, coords, dropout, of_score, of_mask)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    state = (tile.zeros(BLOCK_M, DV, DV_REST), m, l, m)
    LARGEST: tl.constexpr = top is not None and SCORE is not None
    STEPPED: tl.constexpr = 0 if walk.full is None else (2 if SCATTERED else 1)
    for FULL in tl.static_range(STEPPED):
        runs = walk.full if FULL else walk.partial
        blocks, here = full if FULL else partial
        for _ in tl.range(0, blocks):
            state = attend(
                state, q_rows, keys, here[0], here[1], at, given, SCORE, None if FULL else MASK,
                INDEX, PRECISION, POSITIVE, LARGEST, EVEN, BLOCK_N if FULL else BLOCK_EDGE,
                d, dv, D, D_REST, DV, DV_REST,
            )  # fmt: skip
            here = advance(runs, here, walk.step, kv_len, BLOCK_N if FULL else BLOCK_EDGE)
    if STEPPED < 2:
        for run in tl.range(full.first, full.last):
            row, stop = rows_of(walk, full, run, kv_len)
            for n in tl.range(row, stop, BLOCK_N):
                state = attend(
                    state, q_rows, keys, n, stop, at, given, SCORE,
                    MASK if walk.full is None else None, INDEX, PRECISION, POSITIVE, LARGEST, EVEN,
                    BLOCK_N, d, dv, D, D_REST, DV, DV_REST,
                )  # fmt: skip
    acc, m, l, largest = state

    rows = (b64 * heads + h) * q_len + first
    if row_max is not None:
        tl.store(row_max + rows + i, or_nan(m * LN2, l), mask=live)
    if top is not None:
        if SCORE is None:
            largest = m * LN2  # S is T
        largest = tl.where(live, or_nan(largest, l), float("-inf"))
        bad = tl.max((largest != largest).to(tl.int32), 0)
        largest = tl.where(bad > 0, float("nan"), tl.max(largest, 0))
        tl.store(top + (b64 * heads + h) * (walk.tile_rows * SUB) + slot, largest)
    if sink is not None:
        s = tl.load(sink + h).to(tl.float32) * LOG2E
        before = m
        m = tl.maximum(m, s)
        base = tl.where(m == float("-inf"), 0.0, m)
        shrink = tl.exp2(before - base)
        l = l * shrink + tl.exp2(s - base)
        acc = tile.times(acc, shrink[:, None])
    tl.store(lse + rows + i, (m + tl.log2(l)) * LN2, mask=live)
    by = 1.0 / tl.where(l == 0.0, 1.0, l)  # a query that sees nothing gets 0
    if dropout is not None:
        by = by * dropout.factor
    tile.store(out + rows * dv, i, dv, live, dv, tile.times(acc, by[:, None]), DV)


@triton.jit
def attend(
    state, q_rows, keys, n, stop, at, given,
    SCORE: tl.constexpr, MASK: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr,
    POSITIVE: tl.constexpr, LARGEST: tl.constexpr, EVEN: tl.constexpr, BLOCK_N: tl.constexpr,
    d: tl.constexpr, dv: tl.constexpr,
    D: tl.constexpr, D_REST: tl.constexpr, DV: tl.constexpr, DV_REST: tl.constexpr,
):  # fmt: skip
    """One block of keys, n up to n + BLOCK_N, of which those from `stop` on do not count."""
    acc, m, l, largest = state
    k_at, v_at, k_strides, v_stride = keys
    b, h, q_idx, row, first = at
    scale, coords, dropout, score_captured, mask_captured = given
    score_captured = tile.with_origin(score_captured, coords, first, n)
    j = tl.arange(0, BLOCK_N)
    live = None if EVEN else n + j < stop
    n64 = tl.cast(n, tl.int64)
    k_at += n64 * k_strides[2]
    k_rows = tile.load(k_at, j, k_strides[2], live, d, D, D_REST, k_strides[3])
    s = tile.outer(q_rows, k_rows, PRECISION)
    kv_idx = tile.positions(coords.kv_pos, coords.kv_stride, coords.kv, row, n + j, live, INDEX)
    t, unit, s = scores(
        s, scale, b, h, q_idx, kv_idx[None, :], score_captured, mask_captured, SCORE, MASK,
        POSITIVE,
    )  # fmt: skip
    if not EVEN:
        t = tl.where(live[None, :], t, float("-inf"))
    if LARGEST:  # of S, where T says that the pair is kept
        seen = tl.where(t == float("-inf"), float("-inf"), s)
        largest = tl.maximum(largest, tl.max(seen, 1))
    before = m
    m = tl.maximum(m, tl.max(t, 1) * unit)
    # A query that has seen nothing yet has m = -inf, and exp2(-inf - 0) = 0 is what it needs.
    base = tl.where(m == float("-inf"), 0.0, m)
    p = tl.exp2(t * unit - base[:, None])
    shrink = tl.exp2(before - base)
    l = l * shrink + tl.sum(p, 1)
    if dropout is not None:
        p = tl.where(tile.kept_by(dropout, b, h, q_idx, kv_idx[None, :]), p, 0.0)
    v_rows = tile.load(v_at + n64 * v_stride, j, v_stride, live, dv, DV, DV_REST)
    acc = tile.add_product(tile.times(acc, shrink[:, None]), p, v_rows, PRECISION)
    return acc, m, l, largest


@triton.jit
def scores(
    s, scale, b, h, q_idx, kv_idx, score_captured, mask_captured,
    SCORE: tl.constexpr, MASK: tl.constexpr, POSITIVE: tl.constexpr,
):  # fmt: skip
    """T in some unit (-inf where not kept), that unit over log 2, and S.

    Without a score, T is S, and a scale above 0 does not change which is largest: it stays in the
    unit, where it costs nothing. (A scale of 0 would make NaN of 0 times -inf.)
    """
    if SCORE is None and POSITIVE:
        t = s
        unit = scale * LOG2E
    else:
        s = s * scale
        t = s
        unit = LOG2E
        if SCORE is not None:
            t = SCORE(s, b, h, q_idx, kv_idx, score_captured)
    if MASK is not None:
        t = tl.where(MASK(b, h, q_idx, kv_idx, mask_captured), t, float("-inf"))
    return t, unit, s


@triton.jit
def or_nan(x, l):
    """x, or NaN where the sum of a row is: a maximum skips NaN, and none shall be hidden."""
    return tl.where((l != l) & (x != float("inf")), float("nan"), x)
