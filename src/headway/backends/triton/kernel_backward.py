"""The backward kernels: one for dq (and what the score captures), one for dk, dv, or both.

With P = exp(T − lse), T = score(S), S = scale q kᵀ, out = (P∘K) v, where K = keep / (1 − p):

    dv = (P∘K)ᵀ dout
    dP = (dout vᵀ)∘K
    dT = P∘(dP − delta − dH log P),  delta_i = Σ_j P_ij dP_ij − dlse_i = Σ dout_i∘out_i − dlse_i
    dS = dT∘score'(S),    dq = scale dS k,    dk = scale dSᵀ q

The derivative of a softmax row is P_ij (dP_ij − Σ P dP); a gradient of lse adds P_ij dlse_i, which
is why delta carries both. A gradient dH of the entropy H adds −P_ij dH_i (log P_ij + H_i), whose
last part is one of lse (`autograd`). Where the score observes a number f, H is its mean: f is in
the place of −log P, and P_ij dH_i f'(S) joins dS. lse is taken in units of log 2, and as inf for a
query that sees nothing, whose P is 0 (`gpu/preprocess.py`). Since lse and out are those of all
keys, the sums over disjoint sets of keys add up to the exact gradients. (Dao et al. 2022,
algorithm 4.)

Two kernels compute S and dP twice: seven products instead of five. In return no sum crosses
programs: no atomics, and the same bits at every run. The first kernel, for dq, has the rows of dout
in registers: it computes delta and lse in units of log 2, and stores them for the second.
`backward_kv` computes those of dk and dv for which it gets memory: one at a time, in eight
products, where registers do not suffice for both.
"""

from typing import Any, NamedTuple

import triton.language as tl

import triton

from ..gpu.device.softmax import LN2, at_least_log_0
from ..gpu.preprocess import in_log2
from . import tile
from .kernel_forward import LOG2E, scores
from .main_loop import advance, begin_program, rows_of, visit


class TritonBwdConfig(NamedTuple):
    """Compile-time constants of a kernel, besides its mask and its blocks."""

    derivative: Any  # the generated function; None: T is S
    scatter: Any  # the generated function that adds to gradients of captured tensors, or None
    unbounded: Any  # whether a derivative may be infinite or NaN where P is 0
    number: Any  # the generated derivative of a number, whose mean is in entropy's place, or None
    index: Any  # the type of positions
    precision: Any  # of products of float32
    positive: Any  # scale > 0
    even: Any  # whether the number of visited rows is a multiple of the block
    late: Any  # whether lse and delta are loaded after S, to save registers
    d: Any  # `tile.Width`
    dv: Any


class QueryTiles(NamedTuple):
    """The query rows that `backward_q` keeps."""

    q: Any
    dout: Any
    lse: Any  # over log 2
    delta: Any
    dentropy: Any  # over log 2 (of a number's mean: as it is), or None
    live: Any  # which rows exist


class KeyTiles(NamedTuple):
    """The key rows that `backward_kv` keeps."""

    k: Any
    v: Any


class QueryPointers(NamedTuple):
    """Pointers to the first row of one head, strides of rows, and transposed copies."""

    q: Any
    dout: Any
    q_stride: Any
    dout_stride: Any
    transposed: Any
    lse: Any  # over log 2
    delta: Any
    dentropy: Any  # or None


class KeyGradTiles(NamedTuple):
    """Accumulators in pieces; () is not computed."""

    dk: Any
    dv: Any


class ScoreTile(NamedTuple):
    """S; T over log 2 (-inf where not kept); T, dT/dS and dT by each gathered value; and the same
    of the number that the score observes, or ()."""

    s: Any
    t: Any
    derivatives: Any
    observed: Any


@triton.jit(do_not_specialize=["q_len", "kv_len", "score_numbers", "mask_numbers"])
def backward_q(
    q, k, v, dout, out, lse, dlse, dentropy, lse2, delta, dq,  # dlse and dentropy may be None
    q_strides, k_strides, v_strides, dout_strides, transposed,  # copies of k and v, or None
    heads, group, q_len, kv_len, d: tl.constexpr, dv: tl.constexpr,
    scale, coords, dropout, schedule,
    score_tensors, mask_tensors, score_numbers, mask_numbers, grads,
    DERIVATIVE: tl.constexpr, SCATTER: tl.constexpr, MASK: tl.constexpr,
    UNBOUNDED: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr, POSITIVE: tl.constexpr,
    NUMBER: tl.constexpr,
    EVEN: tl.constexpr, EVEN_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_EDGE: tl.constexpr, SCATTERED: tl.constexpr, SUB: tl.constexpr,
    D: tl.constexpr, D_REST: tl.constexpr, DV: tl.constexpr, DV_REST: tl.constexpr,
):  # fmt: skip
    """Compute dq of BLOCK_M queries of one head; and lse2 (lse over log 2) and delta, for
    `backward_kv`.

    Every query has a program, whether it sees a key or not. The rows of out are contiguous.
    """
    CONFIG: tl.constexpr = TritonBwdConfig(
        DERIVATIVE, SCATTER, UNBOUNDED, NUMBER, INDEX, PRECISION, POSITIVE, EVEN, False,
        tile.Width(d, D, D_REST), tile.Width(dv, DV, DV_REST),
    )  # fmt: skip
    q_len = tile.known_even(q_len, EVEN_ROWS)
    program = begin_program(
        schedule, heads, q_len, kv_len, SUB, BLOCK_M, BLOCK_EDGE, BLOCK_N, SCATTERED
    )
    first, b, h, b64, h64 = program.first, program.b, program.h, program.b64, program.h64
    i, live = program.index, program.live
    q_rows = tile.row(q, q_strides, b64, h64, first)
    # Rows past the end are the last query, for which a score is defined: their P is 0, and not NaN.
    clamped_i = tl.minimum(i, tl.minimum(program.end, q_len) - 1 - first)
    q_tile = tile.load(q_rows, clamped_i, q_strides[2], None, CONFIG.d)
    dout_rows = tile.row(dout, dout_strides, b64, h64, first)
    dout_tile = tile.load(dout_rows, i, dout_strides[2], live, CONFIG.dv)
    row = (b64 * heads + h) * q_len + first
    workspace_row = tile.workspace_row(b64 * heads + h, q_len) + first
    lse_i = in_log2(tl.load(lse + row + i, mask=live, other=float("inf")))
    delta_i = tl.zeros([BLOCK_M], tl.float32)
    if dv > 0:
        delta_i = tile.sums(tile.load(out + row * dv, i, dv, live, CONFIG.dv), dout_tile)
    if dlse is not None:
        delta_i -= tl.load(dlse + row + i, mask=live, other=0.0)
    dentropy_i = None
    if dentropy is not None:
        dentropy_i = tl.load(dentropy + workspace_row + i, mask=live, other=0.0)
        if NUMBER is None:
            dentropy_i = dentropy_i * LN2
    if (
        schedule.full is None
    ):  # else below: the place of these stores decides how ptxas orders loops
        tl.store(lse2 + workspace_row + i, lse_i, mask=live)
        tl.store(delta + workspace_row + i, delta_i, mask=live)
    k_head = tile.head(k, k_strides, b64, h64 // group)
    v_head = tile.head(v, v_strides, b64, h64 // group)
    if transposed is not None:
        transposed = tile.transposed_heads(transposed, b64, h64 // group)
    keys = tile.KeyPointers(k_head, v_head, k_strides, v_strides, transposed)
    q_idx = tile.positions(
        coords.q_pos, coords.q_stride, coords.q, b, first + clamped_i, None, INDEX
    )
    rows = tile.row_coords(coords, b, h, q_idx, first, INDEX)
    mods = tile.ModArguments(
        scale, coords, dropout, (score_tensors, score_numbers), (mask_tensors, mask_numbers), grads
    )
    queries = QueryTiles(q_tile, dout_tile, lse_i, delta_i, dentropy_i, live)

    acc = visit(
        tile.zeros(BLOCK_M, CONFIG.d), queries, keys, rows, mods, schedule, program, kv_len, add_dq,
        MASK, BLOCK_N, BLOCK_EDGE, SCATTERED, CONFIG,
    )  # fmt: skip
    if schedule.full is not None:
        tl.store(lse2 + workspace_row + i, lse_i, mask=live)
        tl.store(delta + workspace_row + i, delta_i, mask=live)
    tile.store(dq + row * d, i, live, tile.times(acc, scale), CONFIG.d)


@triton.jit
def add_dq(
    acc, queries, keys, n, stop, rows, mods,
    MASK: tl.constexpr, BLOCK_N: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Return acc + dS k over the keys from n to n + BLOCK_N. Keys from `stop` on do not count."""
    coords, dropout = mods.coords, mods.dropout
    captured = tile.with_tile_origin(mods.score, coords, rows.first, n)
    j = tl.arange(0, BLOCK_N)
    live = None if CONFIG.even else n + j < stop
    n64 = tl.cast(n, tl.int64)
    kv_idx = tile.positions(
        coords.kv_pos, coords.kv_stride, coords.kv, rows.batch, n + j, live, CONFIG.index
    )
    k_stride, v_stride = keys.k_strides[2], keys.v_strides[2]
    k_tile = tile.load(keys.k + n64 * k_stride, j, k_stride, live, CONFIG.d)
    k_right = tile.right_factor(k_tile, keys.transposed, 0, n64, j, live, CONFIG.d)
    s = tile.outer(queries.q, k_right, CONFIG.precision)
    pairs = tile.Pairs(rows.b, rows.h, rows.idx, kv_idx[None, :])
    s, t, derivatives, observed = differentiate(s, mods, pairs, captured, MASK, CONFIG)
    log_p = t - queries.lse[:, None]
    p = tl.exp2(log_p)
    if not CONFIG.even:
        p = tl.where(live[None, :], p, 0.0)
    v_tile = tile.load(keys.v + n64 * v_stride, j, v_stride, live, CONFIG.dv)
    v_right = tile.right_factor(v_tile, keys.transposed, 1, n64, j, live, CONFIG.dv)
    if len(v_tile) == 0:
        dp = tl.zeros_like(p)
    else:
        dp = tile.outer(queries.dout, v_right, CONFIG.precision)
    if dropout is not None:
        dp = tl.where(tile.dropout_keep(dropout, pairs), dp * dropout.factor, 0.0)
    slope = queries.delta[:, None]
    if queries.dentropy is not None:
        slope = slope + queries.dentropy[:, None] * weight(log_p, observed, p, CONFIG)
    dt = p * (dp - slope)
    dnumber = ()
    if CONFIG.number is not None and queries.dentropy is not None:
        dnumber = (p * queries.dentropy[:, None],)
    if CONFIG.derivative is None and CONFIG.number is None:
        ds = dt
    else:
        ds = chain(dt, derivatives, dnumber, observed, 1, p, CONFIG)
        if CONFIG.scatter is not None:
            dt = tl.where(queries.live[:, None], dt, 0.0)
            values = partials(dt, derivatives, dnumber, observed, p, CONFIG)
            CONFIG.scatter(
                mods.grads, values, s, pairs.b, pairs.h, pairs.q_idx, pairs.kv_idx, captured
            )
    return tile.add_product(acc, ds, k_tile, CONFIG.precision)


@triton.jit(do_not_specialize=["q_len", "kv_len", "score_numbers", "mask_numbers"])
def backward_kv(
    q, k, v, dout, lse2, delta, dentropy, dk, dv_,  # of the last two, None is not computed
    q_strides, k_strides, v_strides, dout_strides, transposed,  # copies of q and dout, or None
    heads, group, q_len, kv_len, d: tl.constexpr, dv: tl.constexpr,
    scale, coords, dropout, schedule,
    score_tensors, mask_tensors, score_numbers, mask_numbers,
    DERIVATIVE: tl.constexpr, MASK: tl.constexpr,
    UNBOUNDED: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr, POSITIVE: tl.constexpr,
    NUMBER: tl.constexpr,
    EVEN: tl.constexpr, EVEN_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_EDGE: tl.constexpr, SCATTERED: tl.constexpr, SUB: tl.constexpr,
    D: tl.constexpr, D_REST: tl.constexpr, DV: tl.constexpr, DV_REST: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of BLOCK_N keys from one query head, or one of the two.

    The caller sums over the query heads of a key head. Tiles are transposed, keys by queries, so
    that Pᵀ and dSᵀ are left factors as they are. `schedule` is that of the transposed block mask.
    """
    # lse and delta are loaded late where registers are short: under masks, and with wide rows (with
    # a softcap that loses 2 %).
    LATE: tl.constexpr = schedule.full is not None or (DERIVATIVE is None and D > 64)
    CONFIG: tl.constexpr = TritonBwdConfig(
        DERIVATIVE, None, UNBOUNDED, NUMBER, INDEX, PRECISION, POSITIVE, EVEN, LATE,
        tile.Width(d, D, D_REST), tile.Width(dv, DV, DV_REST),
    )  # fmt: skip
    kv_len = tile.known_even(kv_len, EVEN_ROWS)
    program = begin_program(
        schedule, heads, kv_len, q_len, SUB, BLOCK_N, BLOCK_EDGE, BLOCK_M, SCATTERED
    )
    first, b, h, b64, h64 = program.first, program.b, program.h, program.b64, program.h64
    j, live = program.index, program.live
    first64 = tl.cast(first, tl.int64)
    k_rows = tile.head(k, k_strides, b64, h64 // group) + first64 * k_strides[2]
    v_rows = tile.head(v, v_strides, b64, h64 // group) + first64 * v_strides[2]
    k_tile = tile.load(k_rows, j, k_strides[2], live, CONFIG.d)
    v_tile = ()
    if dk is not None:
        v_tile = tile.load(v_rows, j, v_strides[2], live, CONFIG.dv)
    kv_idx = tile.positions(coords.kv_pos, coords.kv_stride, coords.kv, b, first + j, live, INDEX)
    mods = tile.ModArguments(
        scale, coords, dropout, (score_tensors, score_numbers), (mask_tensors, mask_numbers), None
    )
    keys = KeyTiles(k_tile, v_tile)

    q_head = tile.head(q, q_strides, b64, h64)
    dout_head = tile.head(dout, dout_strides, b64, h64)
    workspace_row = tile.workspace_row(b64 * heads + h, q_len)
    if transposed is not None:
        transposed = tile.transposed_heads(transposed, b64, h64)
    queries = QueryPointers(
        q_head, dout_head, q_strides[2], dout_strides[2], transposed, lse2 + workspace_row,
        delta + workspace_row, None if dentropy is None else dentropy + workspace_row,
    )  # fmt: skip
    rows = tile.row_coords(coords, b, h, kv_idx, first, INDEX)

    dk_acc, dv_acc = (), ()
    if dk is not None:
        dk_acc = tile.zeros(BLOCK_N, CONFIG.d)
    if dv_ is not None:
        dv_acc = tile.zeros(BLOCK_N, CONFIG.dv)
    # The loops of `main_loop.visit`, written out: called, they spill 52 bytes for 20 at width 128.
    acc = KeyGradTiles(dk_acc, dv_acc)
    BLOCK_LOOPS: tl.constexpr = 0 if schedule.full is None else (2 if SCATTERED else 1)
    for FULL in tl.static_range(BLOCK_LOOPS):
        runs = schedule.full if FULL else schedule.partial
        blocks, cursor = program.full if FULL else program.partial
        for _ in tl.range(0, blocks):
            acc = add_dkdv(
                acc, keys, queries, cursor.row, cursor.stop, rows, mods, None if FULL else MASK,
                BLOCK_M if FULL else BLOCK_EDGE, CONFIG,
            )  # fmt: skip
            cursor = advance(runs, cursor, schedule.step, q_len, BLOCK_M if FULL else BLOCK_EDGE)
    if BLOCK_LOOPS < 2:
        for run in tl.range(program.full.first, program.full.last):
            start, stop = rows_of(schedule, program.full, run, q_len)
            for n in tl.range(start, stop, BLOCK_M):
                acc = add_dkdv(
                    acc, keys, queries, n, stop, rows, mods,
                    MASK if schedule.full is None else None, BLOCK_M, CONFIG,
                )  # fmt: skip
    row = (b64 * heads + h) * kv_len + first
    if dk is not None:
        tile.store(dk + row * d, j, live, tile.times(acc.dk, scale), CONFIG.d)
    if dv_ is not None:
        dv_acc = acc.dv
        if dropout is not None:
            dv_acc = tile.times(dv_acc, dropout.factor)
        tile.store(dv_ + row * dv, j, live, dv_acc, CONFIG.dv)


@triton.jit
def add_dkdv(
    acc, keys, queries, n, stop, rows, mods,
    MASK: tl.constexpr, BLOCK_M: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Return (dk + dSᵀ q, dv + Pᵀ dout) over the queries from n to n + BLOCK_M.

    Queries from `stop` on do not count. () stays ().
    """
    coords, dropout = mods.coords, mods.dropout
    captured = tile.with_tile_origin(mods.score, coords, n, rows.first)
    i = tl.arange(0, BLOCK_M)
    live = None if CONFIG.even else n + i < stop
    if not CONFIG.late:
        lse_i = tile.load_vector(queries.lse + n + i, live, float("inf"))
        delta_i = tile.load_vector(queries.delta + n + i, live, 0.0)
    n64 = tl.cast(n, tl.int64)
    q_idx = tile.positions(
        coords.q_pos, coords.q_stride, coords.q, rows.batch, n + i, live, CONFIG.index
    )
    q_tile = tile.load(queries.q + n64 * queries.q_stride, i, queries.q_stride, live, CONFIG.d)
    q_right = tile.right_factor(q_tile, queries.transposed, 0, n64, i, live, CONFIG.d)
    s = tile.outer(keys.k, q_right, CONFIG.precision)
    pairs = tile.Pairs(rows.b, rows.h, q_idx[None, :], rows.idx)
    s, t, derivatives, observed = differentiate(s, mods, pairs, captured, MASK, CONFIG)
    if CONFIG.late:
        lse_i = tile.load_vector(queries.lse + n + i, live, float("inf"))
        delta_i = tile.load_vector(queries.delta + n + i, live, 0.0)
    log_p = t - lse_i[None, :]
    p = tl.exp2(log_p)
    if not CONFIG.even:
        p = tl.where(live[None, :], p, 0.0)
    dout_rows = queries.dout + n64 * queries.dout_stride
    dout_tile = tile.load(dout_rows, i, queries.dout_stride, live, CONFIG.dv)
    dk, dv = acc
    survives = None
    if dropout is not None:
        survives = tile.dropout_keep(dropout, pairs)
    if len(dk) > 0:
        dout_right = tile.right_factor(dout_tile, queries.transposed, 1, n64, i, live, CONFIG.dv)
        start = None
        if queries.dentropy is not None:
            dentropy_i = tile.load_vector(queries.dentropy + n + i, live, 0.0)
            if CONFIG.number is None:
                dentropy_i = dentropy_i * LN2
            slope = delta_i[None, :] + dentropy_i[None, :] * weight(log_p, observed, p, CONFIG)
            if dropout is None:  # the product begins with it: one tile less in registers
                start = -slope
        if len(keys.v) > 0:
            dp = tile.outer(keys.v, dout_right, CONFIG.precision, start)
        elif start is None:
            dp = tl.zeros_like(p)
        else:
            dp = start
        if dropout is not None:
            dp = tl.where(survives, dp * dropout.factor, 0.0)
    if len(dv) > 0:
        p_dropped = p if dropout is None else tl.where(survives, p, 0.0)
        dv = tile.add_product(dv, p_dropped, dout_tile, CONFIG.precision)
    if len(dk) > 0:
        if start is not None:
            ds = p * dp
        elif queries.dentropy is not None:
            ds = p * (dp - slope)
        else:  # the broadcast stands here: above the product, ptxas spills on sm_100
            ds = p * (dp - delta_i[None, :])
        if CONFIG.derivative is not None or CONFIG.number is not None:
            dnumber = ()
            if CONFIG.number is not None and queries.dentropy is not None:
                dnumber = (p * dentropy_i[None, :],)
            ds = chain(ds, derivatives, dnumber, observed, 1, p, CONFIG)
        dk = tile.add_product(dk, ds, q_tile, CONFIG.precision)
    return KeyGradTiles(dk, dv)


@triton.jit
def differentiate(s, mods, pairs, captured, MASK: tl.constexpr, CONFIG: tl.constexpr):
    """Return the `ScoreTile` of `s`, which is q kᵀ or its transpose."""
    derivatives, observed = (), ()
    if CONFIG.number is not None:
        scaled = s * mods.scale
        observed = CONFIG.number(scaled, pairs.b, pairs.h, pairs.q_idx, pairs.kv_idx, captured)
    if CONFIG.derivative is None:
        t, unit, s = scores(s, mods, pairs, captured, None, MASK, CONFIG.positive)
        t = t * unit
    else:
        s = s * mods.scale
        derivatives = CONFIG.derivative(s, pairs.b, pairs.h, pairs.q_idx, pairs.kv_idx, captured)
        t = derivatives[0] * LOG2E
        if MASK is not None:
            keep = MASK(pairs.b, pairs.h, pairs.q_idx, pairs.kv_idx, mods.mask)
            t = tl.where(keep, t, float("-inf"))
    return ScoreTile(s, t, derivatives, observed)


@triton.jit
def weight(log_p, observed, p, CONFIG: tl.constexpr):
    """Return log P over log 2, which P is multiplied with in the entropy; or for the mean of the
    number that the score observes, that number, negative."""
    if CONFIG.number is not None:
        return -(tl.where(p == 0.0, 0.0, observed[0]) if CONFIG.unbounded else observed[0])
    else:
        return at_least_log_0(log_p)


@triton.jit
def chain(dt, derivatives, dnumber, observed, N: tl.constexpr, p, CONFIG: tl.constexpr):
    """Return dT times the N-th derivative of T (without any, T is S), plus the gradient of the
    number that the score observes times its N-th, if there is one. Where P is 0 it is 0, whatever
    the derivatives are."""
    if len(derivatives) > 0:
        product = dt * derivatives[N]
    elif N == 1:
        product = dt
    else:
        product = tl.zeros_like(dt)
    if len(dnumber) > 0:
        product += dnumber[0] * observed[N]
    if CONFIG.unbounded:
        return tl.where(p == 0.0, 0.0, product)
    else:
        return product


@triton.jit
def partials(dt, derivatives, dnumber, observed, p, CONFIG: tl.constexpr):
    """Return the gradient of each gathered value that needs one."""
    OUTPUTS: tl.constexpr = max(len(derivatives), len(observed))
    values = (chain(dt, derivatives, dnumber, observed, 2, p, CONFIG),)
    for n in tl.static_range(3, OUTPUTS):
        value = chain(dt, derivatives, dnumber, observed, n, p, CONFIG)
        values = values + (value,)  # noqa: RUF005
    return values
