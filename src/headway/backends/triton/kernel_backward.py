"""The backward kernels: one for dq (and what the score captures), one for dk, dv, both, or all.

With P = exp(T − lse), T = score(S), S = scale q kᵀ, out = (P∘K) v, where K = keep / (1 − p):

    dv = (P∘K)ᵀ dout
    dP = (dout vᵀ)∘K
    dT = P∘(dP − delta),  delta_i = Σ_j P_ij dP_ij − dlse_i = Σ dout_i∘out_i − dlse_i
    dS = dT∘score'(S),    dq = scale dS k,    dk = scale dSᵀ q

The derivative of a softmax row is P_ij (dP_ij − Σ P dP); a gradient of lse adds P_ij dlse_i, which
is why delta carries both. lse is taken in units of log 2, and as inf for a query that sees
nothing, whose P is 0 (`gpu/preprocess.py`). Since lse and out are those of all keys, the sums
over disjoint sets of keys add up to the exact gradients. (Dao et al. 2022, algorithm 4.)

Two kernels compute S and dP twice: seven products instead of five. In return no sum crosses
programs: no atomics, and the same bits at every run. The first kernel, for dq, has the rows of dout
in registers: it computes delta and lse in units of log 2, and stores them for the second.
`backward_kv` computes those of dk and dv for which it gets memory: one at a time, in eight
products, where registers do not suffice for both. With a dq of float32 zeros it adds dS k to it as
well: five products, and a sum over keys in any order. delta and lse then come from a kernel before
it (`gpu.preprocess`).
"""

from typing import Any, NamedTuple

import triton.language as tl

import triton

from ..gpu.preprocess import in_log2
from . import tile
from .kernel_forward import LOG2E, scores
from .walk import advance, begin, rows_of


class How(NamedTuple):
    """What a kernel is compiled for, besides its mask and its blocks."""

    derivative: Any  # the generated function; None: T is S
    scatter: Any  # the generated function that adds to gradients of captured tensors, or None
    unbounded: Any  # whether a derivative may be infinite or NaN where P is 0
    index: Any  # the type of positions
    precision: Any  # of products of float32
    positive: Any  # scale > 0
    even: Any  # whether what is visited comes in whole blocks
    late: Any  # whether lse and delta are loaded after S, when they are needed, to save registers
    d: Any  # `tile.Width`
    dv: Any


class QueryTiles(NamedTuple):
    """What `backward_q` keeps of its queries."""

    q: Any
    dout: Any
    lse: Any  # over log 2
    delta: Any
    live: Any  # which rows exist


class Keys(NamedTuple):
    """Pointers to the first row of k and v of one head, strides of rows, and transposed copies."""

    k: Any
    v: Any
    k_stride: Any
    v_stride: Any
    transposed: Any


class KeyTiles(NamedTuple):
    """What `backward_kv` keeps of its keys."""

    k: Any
    v: Any


class Queries(NamedTuple):
    """Pointers to the first row of one head, strides of rows, and transposed copies."""

    q: Any
    dout: Any
    q_stride: Any
    dout_stride: Any
    transposed: Any
    lse: Any  # over log 2
    delta: Any
    dq: Any  # of all heads, or None
    row: Any  # the head's first, in dq
    length: Any


class KeyGrads(NamedTuple):
    """Accumulators in pieces; () is not computed."""

    dk: Any
    dv: Any


class Scores(NamedTuple):
    """S, and T over log 2 (-inf where not kept); derivatives: T, dT/dS, dT/d(gathered value) ..."""

    s: Any
    t: Any
    by: Any


@triton.jit(do_not_specialize=["q_len", "kv_len", "score_numbers", "mask_numbers"])
def backward_q(
    q, k, v, dout, out, lse, dlse, lse2, delta, dq,  # dlse may be None
    q_strides, k_strides, v_strides, dout_strides, transposed,  # copies of k and v, or None
    heads, group, q_len, kv_len, d: tl.constexpr, dv: tl.constexpr,
    scale, coords, dropout, walk,
    score_tensors, mask_tensors, score_numbers, mask_numbers, grads,
    DERIVATIVE: tl.constexpr, SCATTER: tl.constexpr, MASK: tl.constexpr,
    UNBOUNDED: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr, POSITIVE: tl.constexpr,
    EVEN: tl.constexpr, EVEN_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_EDGE: tl.constexpr, SCATTERED: tl.constexpr, SUB: tl.constexpr,
    D: tl.constexpr, D_REST: tl.constexpr, DV: tl.constexpr, DV_REST: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M queries of one head; and lse2 (lse over log 2) and delta, for `backward_kv`.
    Every query has a program, whether it sees a key or not. The rows of out are contiguous."""
    HOW: tl.constexpr = How(
        DERIVATIVE, SCATTER, UNBOUNDED, INDEX, PRECISION, POSITIVE, EVEN, False,
        tile.Width(d, D, D_REST), tile.Width(dv, DV, DV_REST),
    )  # fmt: skip
    q_len = tile.rows_in_all(q_len, EVEN_ROWS)
    tile_row, _, first, end, h, b = tile.map_work_tile(walk, heads, SUB, BLOCK_M)
    partial, full = begin(walk, tile_row, kv_len, BLOCK_EDGE, BLOCK_N, SCATTERED)
    b64, h64 = tl.cast(b, tl.int64), tl.cast(h, tl.int64)
    i = tl.arange(0, BLOCK_M)
    live = first + i < tl.minimum(end, q_len)
    q_at = tile.head(q, q_strides, b64, h64) + tl.cast(first, tl.int64) * q_strides[2]
    # Rows past the end are the last query, for which a score is defined: their P is 0, and not NaN.
    within = tl.minimum(i, tl.minimum(end, q_len) - 1 - first)
    q_tile = tile.load(q_at, within, q_strides[2], None, HOW.d)
    dout_at = tile.head(dout, dout_strides, b64, h64)
    dout_at += tl.cast(first, tl.int64) * dout_strides[2]
    dout_tile = tile.load(dout_at, i, dout_strides[2], live, HOW.dv)
    row = (b64 * heads + h) * q_len + first
    to = tile.workspace_row(b64 * heads + h, q_len) + first
    lse_i = in_log2(tl.load(lse + row + i, mask=live, other=float("inf")))
    delta_i = tile.sums(tile.load(out + row * dv, i, dv, live, HOW.dv), dout_tile)
    if dlse is not None:
        delta_i -= tl.load(dlse + row + i, mask=live, other=0.0)
    if walk.full is None:  # else below: where these stand decides how ptxas orders the loops
        tl.store(lse2 + to + i, lse_i, mask=live)
        tl.store(delta + to + i, delta_i, mask=live)
    k_at = tile.head(k, k_strides, b64, h64 // group)
    v_at = tile.head(v, v_strides, b64, h64 // group)
    if transposed is not None:
        transposed = tile.transposed_heads(transposed, b64, h64 // group)
    keys = Keys(k_at, v_at, k_strides[2], v_strides[2], transposed)
    at = first + within
    q_idx = tile.positions(coords.q_pos, coords.q_stride, coords.q, b, at, None, INDEX)
    rows = tile.Rows(
        tl.cast(coords.b, INDEX) + b, tl.cast(coords.h, INDEX) + h, q_idx[:, None], b, first
    )
    of_score, of_mask = (score_tensors, score_numbers), (mask_tensors, mask_numbers)
    mods = tile.Mods(scale, coords, dropout, of_score, of_mask, grads)
    queries = QueryTiles(q_tile, dout_tile, lse_i, delta_i, live)

    acc = tile.zeros(BLOCK_M, HOW.d)
    BLOCK_LOOPS: tl.constexpr = 0 if walk.full is None else (2 if SCATTERED else 1)
    for FULL in tl.static_range(BLOCK_LOOPS):
        runs = walk.full if FULL else walk.partial
        blocks, here = full if FULL else partial
        for _ in tl.range(0, blocks):
            acc = add_dq(
                acc, queries, keys, here.row, here.stop, rows, mods, None if FULL else MASK,
                BLOCK_N if FULL else BLOCK_EDGE, HOW,
            )  # fmt: skip
            here = advance(runs, here, walk.step, kv_len, BLOCK_N if FULL else BLOCK_EDGE)
    if BLOCK_LOOPS < 2:
        for run in tl.range(full.first, full.last):
            start, stop = rows_of(walk, full, run, kv_len)
            for n in tl.range(start, stop, BLOCK_N):
                acc = add_dq(
                    acc, queries, keys, n, stop, rows, mods, MASK if walk.full is None else None,
                    BLOCK_N, HOW,
                )  # fmt: skip
    if walk.full is not None:
        tl.store(lse2 + to + i, lse_i, mask=live)
        tl.store(delta + to + i, delta_i, mask=live)
    tile.store(dq + row * d, i, live, tile.times(acc, scale), HOW.d)


@triton.jit
def add_dq(
    acc, queries, keys, n, stop, rows, mods,
    MASK: tl.constexpr, BLOCK_N: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """acc + dS k over the keys from n to n + BLOCK_N; those from `stop` on do not count."""
    coords, dropout = mods.coords, mods.dropout
    captured = tile.with_tile_origin(mods.score, coords, rows.first, n)
    j = tl.arange(0, BLOCK_N)
    live = None if HOW.even else n + j < stop
    n64 = tl.cast(n, tl.int64)
    kv_idx = tile.positions(
        coords.kv_pos, coords.kv_stride, coords.kv, rows.batch, n + j, live, HOW.index
    )
    k_tile = tile.load(keys.k + n64 * keys.k_stride, j, keys.k_stride, live, HOW.d)
    k_right = tile.right_factor(k_tile, keys.transposed, 0, n64, j, live, HOW.d)
    s = tile.outer(queries.q, k_right, HOW.precision)
    pairs = tile.Pairs(rows.b, rows.h, rows.idx, kv_idx[None, :])
    s, t, by = differentiated(s, mods, pairs, captured, MASK, HOW)
    p = tl.exp2(t - queries.lse[:, None])
    if not HOW.even:
        p = tl.where(live[None, :], p, 0.0)
    v_tile = tile.load(keys.v + n64 * keys.v_stride, j, keys.v_stride, live, HOW.dv)
    v_right = tile.right_factor(v_tile, keys.transposed, 1, n64, j, live, HOW.dv)
    dp = tile.outer(queries.dout, v_right, HOW.precision)
    if dropout is not None:
        dp = tl.where(tile.dropout_keep(dropout, pairs), dp * dropout.factor, 0.0)
    dt = p * (dp - queries.delta[:, None])
    if HOW.derivative is None:
        ds = dt
    else:
        ds = chain(dt, by[1], p, HOW.unbounded)
        if HOW.scatter is not None:
            dt = tl.where(queries.live[:, None], dt, 0.0)
            values = partials(dt, by, p, HOW.unbounded)
            HOW.scatter(
                mods.grads, values, s, pairs.b, pairs.h, pairs.q_idx, pairs.kv_idx, captured
            )
    return tile.add_product(acc, ds, k_tile, HOW.precision)


@triton.jit(do_not_specialize=["q_len", "kv_len", "score_numbers", "mask_numbers"])
def backward_kv(
    q, k, v, dout, lse2, delta, dk, dv_, dq,  # of the last three, None is not computed
    q_strides, k_strides, v_strides, dout_strides, transposed,  # copies of q and dout, or None
    heads, group, q_len, kv_len, d: tl.constexpr, dv: tl.constexpr,
    scale, coords, dropout, walk,
    score_tensors, mask_tensors, score_numbers, mask_numbers,
    DERIVATIVE: tl.constexpr, MASK: tl.constexpr,
    UNBOUNDED: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr, POSITIVE: tl.constexpr,
    EVEN: tl.constexpr, EVEN_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_EDGE: tl.constexpr, SCATTERED: tl.constexpr, SUB: tl.constexpr,
    D: tl.constexpr, D_REST: tl.constexpr, DV: tl.constexpr, DV_REST: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys from one query head, or one of the two. The caller sums over the
    query heads of a key head, and multiplies dq by the scale.

    Tiles are transposed, keys by queries, so that Pᵀ and dSᵀ are left factors as they are. `walk`
    is that of the transposed block mask.
    """
    # lse and delta are loaded late where registers are short: under masks, and with wide rows (with
    # a softcap that loses 2 %).
    LATE: tl.constexpr = walk.full is not None or (DERIVATIVE is None and D > 64)
    HOW: tl.constexpr = How(
        DERIVATIVE, None, UNBOUNDED, INDEX, PRECISION, POSITIVE, EVEN, LATE,
        tile.Width(d, D, D_REST), tile.Width(dv, DV, DV_REST),
    )  # fmt: skip
    kv_len = tile.rows_in_all(kv_len, EVEN_ROWS)
    tile_row, _, first, end, h, b = tile.map_work_tile(walk, heads, SUB, BLOCK_N)
    partial, full = begin(walk, tile_row, q_len, BLOCK_EDGE, BLOCK_M, SCATTERED)
    b64, h64 = tl.cast(b, tl.int64), tl.cast(h, tl.int64)
    j = tl.arange(0, BLOCK_N)
    live = first + j < tl.minimum(end, kv_len)
    first64 = tl.cast(first, tl.int64)
    k_at = tile.head(k, k_strides, b64, h64 // group) + first64 * k_strides[2]
    v_at = tile.head(v, v_strides, b64, h64 // group) + first64 * v_strides[2]
    k_tile = tile.load(k_at, j, k_strides[2], live, HOW.d)
    v_tile = ()
    if dk is not None:
        v_tile = tile.load(v_at, j, v_strides[2], live, HOW.dv)
    kv_idx = tile.positions(coords.kv_pos, coords.kv_stride, coords.kv, b, first + j, live, INDEX)
    of_score, of_mask = (score_tensors, score_numbers), (mask_tensors, mask_numbers)
    mods = tile.Mods(scale, coords, dropout, of_score, of_mask, None)
    keys = KeyTiles(k_tile, v_tile)

    q_at = tile.head(q, q_strides, b64, h64)
    dout_at = tile.head(dout, dout_strides, b64, h64)
    row = (b64 * heads + h) * q_len
    of_rows = tile.workspace_row(b64 * heads + h, q_len)
    if transposed is not None:
        transposed = tile.transposed_heads(transposed, b64, h64)
    queries = Queries(
        q_at, dout_at, q_strides[2], dout_strides[2], transposed, lse2 + of_rows, delta + of_rows,
        dq, row, q_len,
    )  # fmt: skip
    rows = tile.Rows(
        tl.cast(coords.b, INDEX) + b, tl.cast(coords.h, INDEX) + h, kv_idx[:, None], b, first
    )

    dk_acc, dv_acc = (), ()
    if dk is not None:
        dk_acc = tile.zeros(BLOCK_N, HOW.d)
    if dv_ is not None:
        dv_acc = tile.zeros(BLOCK_N, HOW.dv)
    acc = KeyGrads(dk_acc, dv_acc)
    BLOCK_LOOPS: tl.constexpr = 0 if walk.full is None else (2 if SCATTERED else 1)
    for FULL in tl.static_range(BLOCK_LOOPS):
        runs = walk.full if FULL else walk.partial
        blocks, here = full if FULL else partial
        for _ in tl.range(0, blocks):
            acc = add_dkdv(
                acc, keys, queries, here.row, here.stop, rows, mods, None if FULL else MASK,
                BLOCK_M if FULL else BLOCK_EDGE, HOW,
            )  # fmt: skip
            here = advance(runs, here, walk.step, q_len, BLOCK_M if FULL else BLOCK_EDGE)
    if BLOCK_LOOPS < 2:
        for run in tl.range(full.first, full.last):
            start, stop = rows_of(walk, full, run, q_len)
            for n in tl.range(start, stop, BLOCK_M):
                acc = add_dkdv(
                    acc, keys, queries, n, stop, rows, mods, MASK if walk.full is None else None,
                    BLOCK_M, HOW,
                )  # fmt: skip
    row = (b64 * heads + h) * kv_len + first
    if dk is not None:
        tile.store(dk + row * d, j, live, tile.times(acc.dk, scale), HOW.d)
    if dv_ is not None:
        dv_acc = acc.dv
        if dropout is not None:
            dv_acc = tile.times(dv_acc, dropout.factor)
        tile.store(dv_ + row * dv, j, live, dv_acc, HOW.dv)


@triton.jit
def add_dkdv(
    acc, keys, queries, n, stop, rows, mods,
    MASK: tl.constexpr, BLOCK_M: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """(dk + dSᵀ q, dv + Pᵀ dout) over the queries from n to n + BLOCK_M, those from `stop` on do
    not count; and dq += dS k. () stays ()."""
    coords, dropout = mods.coords, mods.dropout
    captured = tile.with_tile_origin(mods.score, coords, n, rows.first)
    i = tl.arange(0, BLOCK_M)
    live = None if HOW.even else n + i < stop
    if not HOW.late:
        lse_i = tile.load_vector(queries.lse + n + i, live, float("inf"))
        delta_i = tile.load_vector(queries.delta + n + i, live, 0.0)
    n64 = tl.cast(n, tl.int64)
    q_idx = tile.positions(
        coords.q_pos, coords.q_stride, coords.q, rows.batch, n + i, live, HOW.index
    )
    q_tile = tile.load(queries.q + n64 * queries.q_stride, i, queries.q_stride, live, HOW.d)
    q_right = tile.right_factor(q_tile, queries.transposed, 0, n64, i, live, HOW.d)
    s = tile.outer(keys.k, q_right, HOW.precision)
    pairs = tile.Pairs(rows.b, rows.h, q_idx[None, :], rows.idx)
    s, t, by = differentiated(s, mods, pairs, captured, MASK, HOW)
    if HOW.late:
        lse_i = tile.load_vector(queries.lse + n + i, live, float("inf"))
        delta_i = tile.load_vector(queries.delta + n + i, live, 0.0)
    p = tl.exp2(t - lse_i[None, :])
    if not HOW.even:
        p = tl.where(live[None, :], p, 0.0)
    dout_at = queries.dout + n64 * queries.dout_stride
    dout_tile = tile.load(dout_at, i, queries.dout_stride, live, HOW.dv)
    dk, dv = acc
    survives = None
    if dropout is not None:
        survives = tile.dropout_keep(dropout, pairs)
    if len(dk) > 0:
        dout_right = tile.right_factor(dout_tile, queries.transposed, 1, n64, i, live, HOW.dv)
        dp = tile.outer(keys.v, dout_right, HOW.precision)
        if dropout is not None:
            dp = tl.where(survives, dp * dropout.factor, 0.0)
    if len(dv) > 0:
        kept = p if dropout is None else tl.where(survives, p, 0.0)
        dv = tile.add_product(dv, kept, dout_tile, HOW.precision)
    if len(dk) > 0:
        ds = p * (dp - delta_i[None, :])
        if HOW.derivative is not None:
            ds = chain(ds, by[1], p, HOW.unbounded)
        dk = tile.add_product(dk, ds, q_tile, HOW.precision)
        if queries.dq is not None:
            exists = n + i < queries.length if live is None else live
            dq_at = queries.dq + (queries.row + n64) * HOW.d.columns
            tile.atomic_add(dq_at, i, exists, tile.inner(ds, keys.k, HOW.precision), HOW.d)
    return KeyGrads(dk, dv)


@triton.jit
def differentiated(s, mods, pairs, captured, MASK: tl.constexpr, HOW: tl.constexpr):
    """The `Scores` of a tile of pairs, `s` being q kᵀ or its transpose."""
    by = (s,)
    if HOW.derivative is None:
        t, unit, s = scores(s, mods, pairs, captured, None, MASK, HOW.positive)
        t = t * unit
    else:
        s = s * mods.scale
        by = HOW.derivative(s, pairs.b, pairs.h, pairs.q_idx, pairs.kv_idx, captured)
        t = by[0] * LOG2E
        if MASK is not None:
            kept = MASK(pairs.b, pairs.h, pairs.q_idx, pairs.kv_idx, mods.mask)
            t = tl.where(kept, t, float("-inf"))
    return Scores(s, t, by)


@triton.jit
def chain(dt, by, p, UNBOUNDED: tl.constexpr):
    """dT times a derivative. Where P is 0 the product is 0, whatever the derivative is."""
    if UNBOUNDED:
        return tl.where(p == 0.0, 0.0, dt * by)
    else:
        return dt * by


@triton.jit
def partials(dt, by, p, UNBOUNDED: tl.constexpr):
    """dT times the derivative by each gathered value that wants a gradient."""
    values = (chain(dt, by[2], p, UNBOUNDED),)
    for n in tl.static_range(3, len(by)):
        values = values + (chain(dt, by[n], p, UNBOUNDED),)  # noqa: RUF005
    return values
