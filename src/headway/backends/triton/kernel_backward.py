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

With two kernels, S and dP are computed in both, seven products in place of five, and in return
nothing is added up across programs: no atomics, the same bits at every run. The first, for dq, has
the rows of dout at hand: it makes delta and lse in units of log 2, and leaves them to the second.
`backward_kv` makes what it is given a place for. dk and dv apart are eight products, where
registers do not do for both. Given a dq, of float32 zeros, it adds dS k to it as well: five
products, and a sum over keys in any order; what it needs of every row is then made before
(`rows.row_terms`).
"""

import triton.language as tl

import triton

from ..gpu.preprocess import in_log2
from . import tile
from .kernel_forward import LOG2E, scores
from .walk import advance, begin, rows_of


@triton.jit(do_not_specialize=["score_numbers", "mask_numbers"])
def backward_q(
    q, k, v, dout, out, lse, dlse, lse2, delta, dq,  # dlse may be None
    q_strides, k_strides, v_strides, dout_strides, turned,  # copies of k and v, or None
    heads, group, q_len, kv_len, d: tl.constexpr, dv: tl.constexpr,
    scale, coords, dropout, walk,
    score_tensors, mask_tensors, score_numbers, mask_numbers, grads,
    DERIVATIVE: tl.constexpr, SCATTER: tl.constexpr, MASK: tl.constexpr,
    UNBOUNDED: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr, POSITIVE: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_EDGE: tl.constexpr,
    SCATTERED: tl.constexpr, SUB: tl.constexpr,
    D: tl.constexpr, D_REST: tl.constexpr, DV: tl.constexpr, DV_REST: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M queries of one head, and for `backward_kv` their lse2 and delta. Every query is
    one program's, whether it sees a key or not. The rows of out are dv numbers each."""
    line, _, first, end, h, b = tile.place(walk, heads, SUB, BLOCK_M)
    partial, full = begin(walk, line, kv_len, BLOCK_EDGE, BLOCK_N, SCATTERED)
    b64, h64 = tl.cast(b, tl.int64), tl.cast(h, tl.int64)
    i = tl.arange(0, BLOCK_M)
    live = first + i < tl.minimum(end, q_len)
    q_at = tile.head(q, q_strides, b64, h64) + tl.cast(first, tl.int64) * q_strides[2]
    q_rows = tile.load(q_at, i, q_strides[2], live, d, D, D_REST)
    o_at = tile.head(dout, dout_strides, b64, h64)
    o_at += tl.cast(first, tl.int64) * dout_strides[2]
    o_rows = tile.load(o_at, i, dout_strides[2], live, dv, DV, DV_REST)
    rows = (b64 * heads + h) * q_len + first
    lse_rows = in_log2(tl.load(lse + rows + i, mask=live, other=float("inf")))
    delta_rows = tile.sums(tile.load(out + rows * dv, i, dv, live, dv, DV, DV_REST), o_rows)
    if dlse is not None:
        delta_rows -= tl.load(dlse + rows + i, mask=live, other=0.0)
    if walk.full is None:  # else later: where these stand decides how ptxas orders the loops
        tl.store(lse2 + rows + i, lse_rows, mask=live)
        tl.store(delta + rows + i, delta_rows, mask=live)
    k_at = tile.head(k, k_strides, b64, h64 // group)
    v_at = tile.head(v, v_strides, b64, h64 // group)
    if turned is not None:
        turned = tile.turned_heads(turned, b64, h64 // group)
    keys = (k_at, v_at, k_strides[2], v_strides[2], turned)
    q_idx = tile.positions(coords.q_pos, coords.q_stride, coords.q, b, first + i, live, INDEX)
    at = (tl.cast(coords.b, INDEX) + b, tl.cast(coords.h, INDEX) + h, q_idx[:, None], b, first)
    of_score, of_mask = (score_tensors, score_numbers), (mask_tensors, mask_numbers)
    given = (scale, coords, dropout, of_score, of_mask, grads)
    queries = (q_rows, o_rows, lse_rows, delta_rows, live)

    acc = tile.zeros(BLOCK_M, D, D_REST)
    STEPPED: tl.constexpr = 0 if walk.full is None else (2 if SCATTERED else 1)
    for FULL in tl.static_range(STEPPED):
        runs = walk.full if FULL else walk.partial
        blocks, here = full if FULL else partial
        for _ in tl.range(0, blocks):
            acc = add_dq(
                acc, queries, keys, here[0], here[1], at, given, DERIVATIVE, SCATTER,
                None if FULL else MASK, UNBOUNDED, INDEX, PRECISION, POSITIVE, EVEN,
                BLOCK_N if FULL else BLOCK_EDGE, d, dv, D, D_REST, DV, DV_REST,
            )  # fmt: skip
            here = advance(runs, here, walk.step, kv_len, BLOCK_N if FULL else BLOCK_EDGE)
    if STEPPED < 2:
        for run in tl.range(full.first, full.last):
            row, stop = rows_of(walk, full, run, kv_len)
            for n in tl.range(row, stop, BLOCK_N):
                acc = add_dq(
                    acc, queries, keys, n, stop, at, given, DERIVATIVE, SCATTER,
                    MASK if walk.full is None else None, UNBOUNDED, INDEX, PRECISION, POSITIVE,
                    EVEN, BLOCK_N, d, dv, D, D_REST, DV, DV_REST,
                )  # fmt: skip
    if walk.full is not None:
        tl.store(lse2 + rows + i, lse_rows, mask=live)
        tl.store(delta + rows + i, delta_rows, mask=live)
    tile.store(dq + rows * d, i, d, live, d, tile.times(acc, scale), D)


@triton.jit
def add_dq(
    acc, queries, keys, n, stop, at, given,
    DERIVATIVE: tl.constexpr, SCATTER: tl.constexpr, MASK: tl.constexpr, UNBOUNDED: tl.constexpr,
    INDEX: tl.constexpr, PRECISION: tl.constexpr, POSITIVE: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    d: tl.constexpr, dv: tl.constexpr,
    D: tl.constexpr, D_REST: tl.constexpr, DV: tl.constexpr, DV_REST: tl.constexpr,
):  # fmt: skip
    """acc + dS k over one block of keys."""
    q_rows, o_rows, lse_rows, delta_rows, in_rows = queries
    k_at, v_at, k_stride, v_stride, turned = keys
    b, h, q_idx, row, first = at
    scale, coords, dropout, score_captured, mask_captured, grads = given
    score_captured = tile.with_origin(score_captured, coords, first, n)
    j = tl.arange(0, BLOCK_N)
    live = None if EVEN else n + j < stop
    n64 = tl.cast(n, tl.int64)
    kv_idx = tile.positions(coords.kv_pos, coords.kv_stride, coords.kv, row, n + j, live, INDEX)
    k_rows = tile.load(k_at + n64 * k_stride, j, k_stride, live, d, D, D_REST)
    k_right = tile.right(k_rows, turned, 0, n64, j, live, d, D, D_REST)
    s = tile.outer(q_rows, k_right, PRECISION)
    s, t, by = slopes(
        s, scale, b, h, q_idx, kv_idx[None, :], score_captured, mask_captured, DERIVATIVE,
        MASK, POSITIVE,
    )  # fmt: skip
    p = tl.exp2(t - lse_rows[:, None])
    if not EVEN:
        p = tl.where(live[None, :], p, 0.0)
    v_rows = tile.load(v_at + n64 * v_stride, j, v_stride, live, dv, DV, DV_REST)
    v_right = tile.right(v_rows, turned, 1, n64, j, live, dv, DV, DV_REST)
    dp = tile.outer(o_rows, v_right, PRECISION)
    if dropout is not None:
        survives = tile.kept_by(dropout, b, h, q_idx, kv_idx[None, :])
        dp = tl.where(survives, dp * dropout.factor, 0.0)
    dt = p * (dp - delta_rows[:, None])
    if DERIVATIVE is None:
        ds = dt
    else:
        ds = chain(dt, by[1], p, UNBOUNDED)
        if SCATTER is not None:
            values = partials(tl.where(in_rows[:, None], dt, 0.0), by, p, UNBOUNDED)
            SCATTER(grads, values, s, b, h, q_idx, kv_idx[None, :], score_captured)
    return tile.add_product(acc, ds, k_rows, PRECISION)


@triton.jit(do_not_specialize=["score_numbers", "mask_numbers"])
def backward_kv(
    q, k, v, dout, lse2, delta, dk, dv_, dq,  # what is None is not made
    q_strides, k_strides, v_strides, dout_strides, turned,  # copies of q and dout, or None
    heads, group, q_len, kv_len, d: tl.constexpr, dv: tl.constexpr,
    scale, coords, dropout, walk,
    score_tensors, mask_tensors, score_numbers, mask_numbers,
    DERIVATIVE: tl.constexpr, MASK: tl.constexpr,
    UNBOUNDED: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr, POSITIVE: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_EDGE: tl.constexpr,
    SCATTERED: tl.constexpr, SUB: tl.constexpr,
    D: tl.constexpr, D_REST: tl.constexpr, DV: tl.constexpr, DV_REST: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys from one query head, or one of them; the caller sums those that
    share a key head, and multiplies dq by the scale.

    Everything is transposed, keys by queries, so that Pᵀ and dSᵀ are in place as left factors.
    """
    line, _, first, end, h, b = tile.place(walk, heads, SUB, BLOCK_N)
    partial, full = begin(walk, line, q_len, BLOCK_EDGE, BLOCK_M, SCATTERED)
    b64, h64 = tl.cast(b, tl.int64), tl.cast(h, tl.int64)
    j = tl.arange(0, BLOCK_N)
    live = first + j < tl.minimum(end, kv_len)
    first64 = tl.cast(first, tl.int64)
    k_at = tile.head(k, k_strides, b64, h64 // group) + first64 * k_strides[2]
    v_at = tile.head(v, v_strides, b64, h64 // group) + first64 * v_strides[2]
    k_rows = tile.load(k_at, j, k_strides[2], live, d, D, D_REST)
    v_rows = ()
    if dk is not None:
        v_rows = tile.load(v_at, j, v_strides[2], live, dv, DV, DV_REST)
    kv_idx = tile.positions(coords.kv_pos, coords.kv_stride, coords.kv, b, first + j, live, INDEX)
    of_score, of_mask = (score_tensors, score_numbers), (mask_tensors, mask_numbers)
    given = (scale, coords, dropout, of_score, of_mask)

    q_at = tile.head(q, q_strides, b64, h64)
    o_at = tile.head(dout, dout_strides, b64, h64)
    rows = (b64 * heads + h) * q_len
    if turned is not None:
        turned = tile.turned_heads(turned, b64, h64)
    queries = (
        q_at, o_at, q_strides[2], dout_strides[2], turned, lse2 + rows, delta + rows, dq, rows,
        q_len,
    )  # fmt: skip
    at = (tl.cast(coords.b, INDEX) + b, tl.cast(coords.h, INDEX) + h, kv_idx[:, None], b, first)

    by_k, by_v = (), ()
    if dk is not None:
        by_k = tile.zeros(BLOCK_N, D, D_REST)
    if dv_ is not None:
        by_v = tile.zeros(BLOCK_N, DV, DV_REST)
    acc = (by_k, by_v)
    # Where registers are short: under masks, and with wide rows (with a softcap that loses 2 %).
    LATE: tl.constexpr = walk.full is not None or (DERIVATIVE is None and D > 64)
    STEPPED: tl.constexpr = 0 if walk.full is None else (2 if SCATTERED else 1)
    for FULL in tl.static_range(STEPPED):
        runs = walk.full if FULL else walk.partial
        blocks, here = full if FULL else partial
        for _ in tl.range(0, blocks):
            acc = add_dkdv(
                acc, k_rows, v_rows, queries, here[0], here[1], at, given, DERIVATIVE,
                None if FULL else MASK, UNBOUNDED, INDEX, PRECISION, POSITIVE, EVEN, LATE,
                BLOCK_M if FULL else BLOCK_EDGE, d, dv, D, D_REST, DV, DV_REST,
            )  # fmt: skip
            here = advance(runs, here, walk.step, q_len, BLOCK_M if FULL else BLOCK_EDGE)
    if STEPPED < 2:
        for run in tl.range(full.first, full.last):
            row, stop = rows_of(walk, full, run, q_len)
            for n in tl.range(row, stop, BLOCK_M):
                acc = add_dkdv(
                    acc, k_rows, v_rows, queries, n, stop, at, given, DERIVATIVE,
                    MASK if walk.full is None else None, UNBOUNDED, INDEX, PRECISION, POSITIVE,
                    EVEN, LATE, BLOCK_M, d, dv, D, D_REST, DV, DV_REST,
                )  # fmt: skip
    rows = (b64 * heads + h) * kv_len + first
    if dk is not None:
        tile.store(dk + rows * d, j, d, live, d, tile.times(acc[0], scale), D)
    if dv_ is not None:
        by_v = acc[1]
        if dropout is not None:
            by_v = tile.times(by_v, dropout.factor)
        tile.store(dv_ + rows * dv, j, dv, live, dv, by_v, DV)


@triton.jit
def add_dkdv(
    acc, k_rows, v_rows, queries, n, stop, at, given,
    DERIVATIVE: tl.constexpr, MASK: tl.constexpr, UNBOUNDED: tl.constexpr,
    INDEX: tl.constexpr, PRECISION: tl.constexpr, POSITIVE: tl.constexpr, EVEN: tl.constexpr,
    LATE: tl.constexpr,  # lse and delta are read when lse is needed, and not before S
    BLOCK_M: tl.constexpr,
    d: tl.constexpr, dv: tl.constexpr,
    D: tl.constexpr, D_REST: tl.constexpr, DV: tl.constexpr, DV_REST: tl.constexpr,
):  # fmt: skip
    """(dk + dSᵀ q, dv + Pᵀ dout) over one block of queries, and dq += dS k. () stays ()."""
    q_at, o_at, q_stride, o_stride, turned, lse2, delta, dq, rows, q_len = queries
    b, h, kv_idx, row, first = at
    scale, coords, dropout, score_captured, mask_captured = given
    score_captured = tile.with_origin(score_captured, coords, n, first)
    i = tl.arange(0, BLOCK_M)
    live = None if EVEN else n + i < stop
    if not LATE:
        lse_rows = tile.load_row(lse2 + n + i, live, float("inf"))
        delta_rows = tile.load_row(delta + n + i, live, 0.0)
    n64 = tl.cast(n, tl.int64)
    q_idx = tile.positions(coords.q_pos, coords.q_stride, coords.q, row, n + i, live, INDEX)
    q_rows = tile.load(q_at + n64 * q_stride, i, q_stride, live, d, D, D_REST)
    q_right = tile.right(q_rows, turned, 0, n64, i, live, d, D, D_REST)
    s = tile.outer(k_rows, q_right, PRECISION)
    s, t, by = slopes(
        s, scale, b, h, q_idx[None, :], kv_idx, score_captured, mask_captured, DERIVATIVE,
        MASK, POSITIVE,
    )  # fmt: skip
    if LATE:
        lse_rows = tile.load_row(lse2 + n + i, live, float("inf"))
        delta_rows = tile.load_row(delta + n + i, live, 0.0)
    p = tl.exp2(t - lse_rows[None, :])
    if not EVEN:
        p = tl.where(live[None, :], p, 0.0)
    o_rows = tile.load(o_at + n64 * o_stride, i, o_stride, live, dv, DV, DV_REST)
    by_k, by_v = acc
    survives = None
    if dropout is not None:
        survives = tile.kept_by(dropout, b, h, q_idx[None, :], kv_idx)
    if len(by_k) > 0:
        o_right = tile.right(o_rows, turned, 1, n64, i, live, dv, DV, DV_REST)
        dp = tile.outer(v_rows, o_right, PRECISION)
        if dropout is not None:
            dp = tl.where(survives, dp * dropout.factor, 0.0)
    if len(by_v) > 0:
        kept = p if dropout is None else tl.where(survives, p, 0.0)
        by_v = tile.add_product(by_v, kept, o_rows, PRECISION)
    if len(by_k) > 0:
        ds = p * (dp - delta_rows[None, :])
        if DERIVATIVE is not None:
            ds = chain(ds, by[1], p, UNBOUNDED)
        by_k = tile.add_product(by_k, ds, q_rows, PRECISION)
        if dq is not None:
            here = n + i < q_len if live is None else live
            tile.add(dq + (rows + n64) * d, i, d, here, d, tile.inner(ds, k_rows, PRECISION), D)
    return by_k, by_v


@triton.jit
def slopes(
    s, scale, b, h, q_idx, kv_idx, score_captured, mask_captured,
    DERIVATIVE: tl.constexpr, MASK: tl.constexpr, POSITIVE: tl.constexpr,
):  # fmt: skip
    """S, T in units of log 2 (-inf where not kept), and (T, dT/dS, dT/d(gathered) ...)."""
    by = (s,)
    if DERIVATIVE is None:
        t, unit, s = scores(
            s, scale, b, h, q_idx, kv_idx, score_captured, mask_captured, None, MASK,
            POSITIVE,
        )  # fmt: skip
        t = t * unit
    else:
        s = s * scale
        by = DERIVATIVE(s, b, h, q_idx, kv_idx, score_captured)
        t = by[0] * LOG2E
        if MASK is not None:
            t = tl.where(MASK(b, h, q_idx, kv_idx, mask_captured), t, float("-inf"))
    return s, t, by


@triton.jit
def chain(dt, by, p, UNBOUNDED: tl.constexpr):
    """dT times a derivative; where P is 0 a derivative may be anything and counts nothing."""
    if UNBOUNDED:
        return tl.where(p == 0.0, 0.0, dt * by)
    else:
        return dt * by


@triton.jit
def partials(dt, by, p, UNBOUNDED: tl.constexpr):
    """dT times the derivative by every gathered value that wants a gradient."""
    values = (chain(dt, by[2], p, UNBOUNDED),)
    for n in tl.static_range(3, len(by)):
        values = values + (chain(dt, by[n], p, UNBOUNDED),)  # noqa: RUF005
    return values
