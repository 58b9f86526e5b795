"""What the two backward kernels share: the producer's loads, P and its derivatives, the order of
dQ-accum, and the kernel that follows them."""

import triton.language as tl

import triton

from .. import config
from ..device.affine_score import affine_exponent
from ..device.dropout import bits_of_keys, kept_of_keys, kept_one_by_one, load_seed
from ..device.gluon_compat import gl, gluon, mbarrier, tma_load, warpgroup_mma
from ..device.hoisted import (
    HoistedRows,
    affine_operands,
    evaluate_mask,
    hoist_columns,
    hoist_layout,
    hoist_rows,
)
from ..device.mma import (
    LOG2E,
    LOG_0,
    ROWS,
    acc_layout,
    broadcast_row,
    first_position,
    positions,
    produce_rows,
    tma_load_pieces,
    tx_bytes,
    upcast,
)
from ..device.pipeline import advance, producer_acquire
from ..device.relative_bias import load_bias, locate_bias
from ..device.work_tile import BWD_RUNS, BwdTile, read_work, visit_q_blocks
from .context import KeyLoads, KeyLocation, KeyTile, LoadContext, LoadCursors, SegmentVisits

DO_STAGES = gl.constexpr(config.DO_STAGES)

# dQ-accum: float32 in global memory, to which work tiles add. A chunk is 64 queries by 64 columns,
# in the order of an accumulator's registers, as rows of 256.
_CHUNK, _WIDTH = 64, 256
CHUNK = gl.constexpr(_CHUNK)
CHUNK_SIZE = gl.constexpr(_CHUNK * _CHUNK)
ACCUM_WIDTH = gl.constexpr(_WIDTH)
CHUNK_ROWS = gl.constexpr(_CHUNK * _CHUNK // _WIDTH)
COUNTERS = gl.constexpr(4)  # of the dQ semaphore, for each 64 queries
# How such rows lie in a warpgroup's registers: 16 adjacent bytes for each thread.
ACCUM_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [2, 2], [1, 0]))


# A `BwdTile` in shared memory: the fields of `KeyTile`, then those of `SegmentVisits`.
_COLUMN = gl.constexpr(BwdTile._fields.index("column"))
_FIRST_KEY = gl.constexpr(BwdTile._fields.index("first_row"))
_VISITS = gl.constexpr(BwdTile._fields.index("first_visits"))


# -- work tiles, as the producer has written them -------------------------------------------------


@gluon.jit
def read_key_tile(work_smem, cursor, WARPS: gl.constexpr):
    """Read the `KeyTile` of a stage. `WARPS`: `WARPGROUP` or `ONE_WARP`, of the partition that
    reads."""
    return KeyTile(*read_work(work_smem, cursor, 0, _VISITS, WARPS))


@gluon.jit
def read_tile_col(work_smem, cursor, WARPS: gl.constexpr):
    """Read the tile column alone."""
    return read_work(work_smem, cursor, _COLUMN, _COLUMN + 1, WARPS)[0]


@gluon.jit
def read_key_location(work_smem, cursor, WARPS: gl.constexpr):
    """Read the `KeyLocation` alone."""
    return KeyLocation(*read_work(work_smem, cursor, _FIRST_KEY, _VISITS, WARPS))


@gluon.jit
def read_segment_visits(work_smem, cursor, WARPS: gl.constexpr):
    """Read the `SegmentVisits` of a stage, where CTAs own segments."""
    return SegmentVisits(*read_work(work_smem, cursor, _VISITS, BWD_RUNS, WARPS))


# -- the producer ---------------------------------------------------------------------------------


@gluon.jit
def load_work_tile(cursors, inputs, smem, rings, tile, runs, sizes, schedule, CONFIG: gl.constexpr):
    """Load the blocks of queries of every head of a work tile, and its keys and values. Those come
    after the first block, which has a free stage while the work tile before still needs its own
    keys. **Returns:** the cursors."""
    k, v = (inputs.k, smem.k, rings.k), ((inputs.v,), (smem.v,), rings.v)
    keys = KeyLoads(k, v, tile.b, tile.h // sizes.group, tile.first_key)
    state = (cursors.q, cursors.dout, cursors.kv, gl.to_tensor(True))
    for n in range(sizes.share):
        h = tile.h + n
        first_row = (tile.b * sizes.heads + h) * sizes.q_rows
        context = LoadContext(inputs, smem, rings, tile.b, h, first_row, keys)
        state = visit_q_blocks(
            state, context, schedule, tile.tile_col, runs, sizes.q_len, 0, _load_q_block,
            None, None, None, CONFIG,
        )  # fmt: skip
    q_at, dout_at, kv_at, _ = state
    return LoadCursors(kv_at, q_at, dout_at)


@gluon.jit
def _load_q_block(
    state, context, n, has_next, PARTIAL: gl.constexpr,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Load the block of queries from n on, dout, lse and -delta; after the first block, the keys
    and values."""
    inputs, smem, rings = context.inputs, context.smem, context.rings
    b, h, first_row, keys = context.b, context.h, context.first_row, context.keys
    q_at, dout_at, kv_at, is_first = state
    producer_acquire(rings.q, q_at, CONFIG.q_barriers())
    full = rings.q.full.index(q_at.stage)
    mbarrier.expect(full, tx_bytes(smem.q, 1) + 4 * CONFIG.block)
    tma_load_pieces(inputs.q, b, h, n, full, smem.q, q_at.stage)
    tma_load(inputs.lse, [first_row + n], full, smem.lse.index(q_at.stage))
    producer_acquire(rings.dout, dout_at, CONFIG.do_barriers())
    full = rings.dout.full.index(dout_at.stage)
    VECTORS: gl.constexpr = 2 if CONFIG.entropy else 1
    mbarrier.expect(full, tx_bytes((smem.dout,), 1) + 4 * CONFIG.block * VECTORS)
    tma_load(inputs.dout, [b, h, n, 0], full, smem.dout.index(dout_at.stage))
    tma_load(inputs.neg_delta, [first_row + n], full, smem.neg_delta.index(dout_at.stage))
    if CONFIG.entropy:
        row_vector = smem.neg_dentropy.index(dout_at.stage)
        tma_load(inputs.neg_dentropy, [first_row + n], full, row_vector)
    if is_first:
        TILES: gl.constexpr = smem.v.shape[0]
        produce_rows(kv_at, keys.k, keys.b, keys.h, keys.first_key, TILES, 1)
        kv_at = produce_rows(kv_at, keys.v, keys.b, keys.h, keys.first_key, TILES, 1)
    return advance(q_at, CONFIG.stages), advance(dout_at, DO_STAGES), kv_at, gl.to_tensor(False)


# -- the dQ semaphore (bwd/dq_semaphore.py) -------------------------------------------------------


@gluon.jit
def ticket_of(semaphore, tile, nth_tile, CONFIG: gl.constexpr):
    """Return how many work tiles add to a block of queries before this one. The block belongs to
    the nth tile of the work tile's column."""
    if semaphore is None:
        return gl.to_tensor(0)
    elif len(semaphore) == 1:
        return tile.tile_col
    else:
        first = gl.load(semaphore.first + tile.tile_col)
        return (
            gl.load(semaphore.tickets + first + nth_tile) * CONFIG.subtiles
            + tile.tile_in_head % CONFIG.subtiles
        )


@gluon.jit
def counter_of(semaphore, row, n):
    """Return the counter of the n-th part of the 64 queries from `row` on."""
    return semaphore.counters + row // CHUNK * COUNTERS + n


# -- P --------------------------------------------------------------------------------------------


@gluon.jit
def opaque_zero(n, share):
    """Return 0, which the compiler does not know. It keeps LLVM from hoisting out of the loop what
    then would spill: descriptors of operands, distances of all pairs of a tile."""
    return (n + share) >> 30


@gluon.jit
def locate_keys(first_key, b, coords, kv_len, CONFIG: gl.constexpr):
    """Return which of the 64 keys from `first_key` on exist, their positions, and their
    `first_position`."""
    pos, stride, n = coords.kv_pos, coords.kv_stride, first_key
    span = gl.arange(0, ROWS, layout=gl.SliceLayout(1, acc_layout(CONFIG.block)))
    first_kv = first_position(pos, stride, coords.kv, b, n, kv_len, CONFIG)
    kv_idx = positions(pos, stride, first_kv, b, n, span, kv_len, CONFIG)
    return n + span < kv_len, kv_idx, first_kv


@gluon.jit
def hoist_keys(head, kv_idx, first_key, mods, CONFIG: gl.constexpr):
    """Read what score and mask need of a work tile's 64 keys from `first_key` on."""
    b = gl.cast(mods.coords.b, CONFIG.index_type) + head.b
    h = gl.cast(mods.coords.h, CONFIG.index_type) + head.h
    rows = hoist_rows(b, h, kv_idx, mods.score_args, mods.mask_args, False, CONFIG)
    bias = locate_bias(mods.bias_tables, head.b, head.h, first_key)
    return HoistedRows(rows.score, rows.mask, bias)


@gluon.jit
def hoist_queries(n, pairs, PARTIAL: gl.constexpr, CONFIG: gl.constexpr):
    """Read the position of query n, and what score and mask need of all queries from n on."""
    mods, coords, b = pairs.mods, pairs.mods.coords, pairs.head.b
    pos, stride = coords.q_pos, coords.q_stride
    span = gl.arange(0, CONFIG.block, layout=hoist_layout())
    first_q = first_position(pos, stride, coords.q, b, n, pairs.q_len, CONFIG)
    q_idx = positions(pos, stride, first_q, b, n, span, pairs.q_len, CONFIG)
    b = gl.cast(coords.b, CONFIG.index_type) + b
    h = gl.cast(coords.h, CONFIG.index_type) + pairs.head.h
    columns = hoist_columns(
        b, h, q_idx, pairs.hoisted, mods.score_args, mods.mask_args, False, PARTIAL, CONFIG
    )
    return first_q, columns


@gluon.jit
def probabilities(
    s, lse, n, zero, queries, pairs, PARTIAL: gl.constexpr,
    DERIVATIVE: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute P of the queries from n on, from Sᵀ.

    - `zero`: from `opaque_zero`; `queries`: from `hoist_queries`; `pairs`: a `PairContext`.

    **Returns:** Pᵀ; log2(Pᵀ) if CONFIG.entropy, finite where Pᵀ is 0; Pᵀ times dT/dS, or Pᵀ alone
    where dT/dS is one number for all pairs (CONFIG.constant_dscore: `BwdModArgs.rate` has it); all
    that DERIVATIVE gives; and what SCATTER takes of the pairs: S, batch row, head, positions of
    queries and keys.
    """
    mods, coords, hoisted = pairs.mods, pairs.mods.coords, pairs.hoisted
    first_q, columns = queries
    span = gl.arange(0, CONFIG.block, layout=gl.SliceLayout(0, acc_layout(CONFIG.block)))
    q_idx = positions(
        coords.q_pos, coords.q_stride, first_q, pairs.head.b, n, span, pairs.q_len, CONFIG
    )  # fmt: skip
    kv_idx = pairs.kv_idx + zero
    b = gl.cast(coords.b, CONFIG.index_type) + pairs.head.b
    h = gl.cast(coords.h, CONFIG.index_type) + pairs.head.h
    if DERIVATIVE is None:
        dscore = ()
        p = _exp2_of_log(s * (mods.scale * LOG2E) - lse[None, :], CONFIG)
    elif CONFIG.affine is None:
        s = s * mods.scale
        score_args = mods.score_args
        if CONFIG.relative_biases > 0:
            score_args = score_args + (load_bias(hoisted.bias, n, CONFIG.block),)  # noqa: RUF005
        dscore = DERIVATIVE(s, b, h, q_idx[None, :], kv_idx[:, None], score_args)
        p = _exp2_of_log(dscore[0] * LOG2E - lse[None, :], CONFIG)
    else:
        affine_args = affine_operands(
            mods.score_args, hoisted, columns, False, CONFIG.block, CONFIG
        )
        t = affine_exponent(s, mods.scale, lse, b, h, q_idx, kv_idx, first_q, affine_args, CONFIG)
        p = _exp2_of_log(t, CONFIG)
        s = s * mods.scale
        dscore = DERIVATIVE(s, b, h, q_idx[None, :], kv_idx[:, None], mods.score_args)
    # Of pairs that are not kept. With the entropy p is log2(P) until all masks are applied.
    NOTHING: gl.constexpr = LOG_0 if CONFIG.entropy else 0.0
    if PARTIAL and MASK is not None:
        kept_pairs = evaluate_mask(
            p, b, h, q_idx, kv_idx, first_q, hoisted, columns, mods.mask_args, False, MASK, CONFIG
        )
        p = gl.where(kept_pairs, p, NOTHING)
    q_idx, kv_idx = q_idx[None, :], kv_idx[:, None]
    if not CONFIG.even_kv:
        p = gl.where(pairs.live[:, None], p, NOTHING)
    if CONFIG.score_past_end:  # where it may be NaN; else an lse of inf makes P 0
        p = gl.where((n + span < pairs.q_len)[None, :], p, NOTHING)
    log2_p = ()
    if CONFIG.entropy:
        p, log2_p = gl.exp2(p), p
        if DERIVATIVE is not None:  # A score may give -inf.
            log2_p = gl.maximum(log2_p, LOG_0)
    if CONFIG.constant_dscore:
        p_dscore = p
    else:
        p_dscore = _times_derivative(p, dscore[1], CONFIG.unbounded_dscore)
    return p, log2_p, p_dscore, dscore, (s, b, h, q_idx, kv_idx)


@gluon.jit
def _exp2_of_log(log2_p, CONFIG: gl.constexpr):
    """Return P; with the entropy its logarithm, which is needed as well."""
    if CONFIG.entropy:
        return log2_p
    else:
        return gl.exp2(log2_p)


@gluon.jit
def _times_derivative(p, derivative, UNBOUNDED: gl.constexpr):
    """Multiply P by a derivative. Where P is 0, the derivative may be anything and adds nothing."""
    if UNBOUNDED:
        return gl.where(p == 0.0, 0.0, p * derivative)
    else:
        return p * derivative


@gluon.jit
def draw_bits(n, zero, pairs, CONFIG: gl.constexpr):
    """Return `bits_of_keys` for the queries from n on; () where each pair makes a call of its
    own. `zero`: from `opaque_zero`."""
    if CONFIG.in_sixteens:
        b, h, first_q = _locate_queries(n, pairs, CONFIG)
        first_kv = pairs.first_kv + zero
        return bits_of_keys(b, h, first_q, first_kv, pairs.mods.dropout, CONFIG.block)
    else:
        return ()


@gluon.jit
def kept_pairs(bits, n, pairs, CONFIG: gl.constexpr):
    """Return which pairs of the queries from n on dropout keeps. `bits`: from `draw_bits`."""
    if CONFIG.in_sixteens:
        return kept_of_keys(bits, CONFIG.block)
    else:
        coords = pairs.mods.coords
        b, h, first_q = _locate_queries(n, pairs, CONFIG)
        span = gl.arange(0, CONFIG.block, layout=gl.SliceLayout(0, acc_layout(CONFIG.block)))
        q_idx = positions(
            coords.q_pos, coords.q_stride, first_q, pairs.head.b, n, span, pairs.q_len, CONFIG
        )
        dropout = load_seed(pairs.mods.dropout)
        return kept_one_by_one(q_idx[None, :], pairs.kv_idx[:, None], h, b, dropout)


@gluon.jit
def _locate_queries(n, pairs, CONFIG: gl.constexpr):
    """Return the batch row, the head and the `first_position` of the queries from n on."""
    coords, b = pairs.mods.coords, pairs.head.b
    first_q = first_position(coords.q_pos, coords.q_stride, coords.q, b, n, pairs.q_len, CONFIG)
    h = gl.cast(coords.h, CONFIG.index_type) + pairs.head.h
    return gl.cast(coords.b, CONFIG.index_type) + b, h, first_q


@gluon.jit
def added_to_dp(inputs, stage, log2_p, like, CONFIG: gl.constexpr):
    """Return what P multiplies beside dP: -delta; for the entropy, -dentropy log P. `like`: shaped
    as dP; `log2_p`: from `probabilities`."""
    cols: gl.constexpr = gl.SliceLayout(0, acc_layout(CONFIG.block))
    added = broadcast_row(inputs.neg_delta.index(stage).load(cols), like)
    if CONFIG.entropy:
        neg_dentropy = inputs.neg_dentropy.index(stage).load(cols)
        added = added + neg_dentropy[None, :] * log2_p
    return added


@gluon.jit
def issue_dp(v, dout, init, ADD: gl.constexpr):
    """Issue dPᵀ = v doutᵀ; if ADD, plus `init`."""
    return warpgroup_mma(v, dout.permute((1, 0)), init, use_acc=ADD, is_async=True)


@gluon.jit
def widen(p_dscore, CONSTANT: gl.constexpr):
    """Return P times dT/dS in float32, or P alone (CONSTANT), which may have been rounded.

    (`upcast` saves 7 % of a block's instructions. Timed on an H200: 64 wide takes 0.94 of the time
    behind a causal mask, 192 wide 0.96 without one. Of what is not P itself, ptxas runs out of
    registers at 192.)
    """
    if CONSTANT:
        return upcast(p_dscore)
    else:
        return p_dscore.to(gl.float32)


@gluon.jit
def captured_values_grads(p, dscore, dp, UNBOUNDED: gl.constexpr):
    """Return dT times the derivative by every captured value that requires a gradient.

    - `dscore`: from DERIVATIVE; `dp`: dP - delta.
    """
    grads = (_times_derivative(p, dscore[2], UNBOUNDED) * dp,)
    for n in gl.static_range(3, len(dscore)):
        grads = grads + (_times_derivative(p, dscore[n], UNBOUNDED) * dp,)  # noqa: RUF005
    return grads


# -- dQ-accum, and gradients in float32 -----------------------------------------------------------


@gluon.jit
def to_accum_order(x):
    """Return an accumulator of 64 rows as rows of dQ-accum, in the order of its registers: 4
    adjacent numbers for each thread, threads adjacent. `postprocess_dq` undoes it."""
    EIGHTS: gl.constexpr = x.shape[1] // 8
    x = x.reshape([4, 2, 8, EIGHTS, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return x.reshape([2 * EIGHTS, ACCUM_WIDTH])


@gluon.jit
def from_accum_order(x):
    """Undo `to_accum_order`."""
    EIGHTS: gl.constexpr = x.shape[0] // 2
    x = x.reshape([EIGHTS, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5))
    return x.reshape([64, 8 * EIGHTS])


@gluon.jit
def store_float32(x, ptr, row, length, width, column):
    """Store a product to rows from `row` on and columns from `column` on, straight from
    registers."""
    rows = row + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, acc_layout(x.shape[1])))
    columns = column + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, acc_layout(x.shape[1])))
    inside = (rows < length)[:, None] & (columns < width)[None, :]
    gl.store(ptr + rows.to(gl.int64)[:, None] * width + columns[None, :], x, mask=inside)


@triton.jit(do_not_specialize=["q_len", "q_rows", "d"])
def postprocess_dq(dq_accum, dq, rate, q_len, q_rows, d, STRIPS: tl.constexpr):
    """Write dQ from dQ-accum, one chunk of 64 x 64 in each program: scaled, rounded, in rows."""
    chunk = tl.cast(tl.program_id(0), tl.int64)
    x = tl.load(dq_accum + chunk * CHUNK_SIZE + tl.arange(0, CHUNK_SIZE))
    # In a chunk: column / 8, warp, row % 8, lane % 4, half of 16 rows, column % 2.
    x = tl.reshape(x, [8, 4, 8, 4, 2, 2])
    x = tl.reshape(tl.permute(x, [1, 4, 2, 0, 3, 5]), [CHUNK, CHUNK]) * rate
    row = chunk // STRIPS * CHUNK
    head = row // q_rows
    i = row % q_rows + tl.arange(0, CHUNK)
    j = chunk % STRIPS * CHUNK + tl.arange(0, CHUNK)
    ptr = dq + (head * q_len + i[:, None]) * d + j[None, :]
    tl.store(ptr, x.to(dq.dtype.element_ty), mask=(i < q_len)[:, None] & (j < d)[None, :])
