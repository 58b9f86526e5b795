"""The forward kernel: FlashAttention-3 on the live KV blocks of 128 queries.

(Shah et al. 2024, FlashAttention-3, arXiv 2407.08608, algorithms 1 and 2.)

A persistent CTA is warp-specialised:

- the **scheduler** (fwd/scheduler.py), one warp, fetches work tiles (128 queries of a head, longest
  first) from a counter in global memory and publishes them through shared memory;
- the **producer** (fwd/producer.py), one warp, loads Q of each tile and K and V of its live blocks
  by TMA;
- two **consumers** (or one, or three), a warpgroup each, own 64 of the queries each.

While a consumer turns S of one block into P, the tensor cores compute P V of the block before:

    for every live KV block n of a tile:
        in turn with the other consumers:  issue S_n = Q K_nᵀ;  issue O += P_{n-1} V_{n-1}
        wait for S_n;  P_n = exp2(S_n - m)
        wait for O;    O *= exp2(m_before - m)

This pipeline does not drain between work tiles: S of a tile's first block is issued with the last
P V of the tile before, whose output is stored then. (If CONFIG.early_q_release, there is one buffer
for Q, which has to be free first: that P V is issued before Q is waited for.) At both ends of a
CTA's work stands a **sentinel tile**, of one block and of rows past the end, which fills and drains
the pipeline: so no tile is a special case, and nothing of a sentinel is stored.

All partitions iterate over the blocks of a tile by the same function, `visit_kv_blocks`: partial
blocks first, then full ones, each kind from the last to the first.
"""

from .. import config
from ..device.affine_score import affine_scores, slope_lhs, slope_rhs, wgmma_slope
from ..device.dropout import draw_ones, drop, drop_pairs, kept_one_by_one, load_seed
from ..device.gluon_compat import gl, gluon, tma_store_wait, warpgroup_mma_wait
from ..device.hoisted import (
    HoistedColumns,
    HoistedRows,
    affine_operands,
    hoist_columns,
    hoist_layout,
    hoist_rows,
    rows_for_width,
)
from ..device.mma import (
    LOG_0,
    ROWS,
    acc_layout,
    alloc_stages,
    apply_score,
    at_stage,
    first_position,
    lhs_layout,
    materialize,
    moved_moment,
    pieces,
    positions,
    row_vector,
    scale_rows,
    slice_rows,
    wgmma_ab,
    wgmma_abt,
    wgmma_wait,
    zero_acc,
)
from ..device.pipeline import (
    advance,
    consumer_release,
    consumer_release_all,
    consumer_wait,
    fence_barrier_init,
    first_stage,
    full_barriers,
    mbarrier_ring,
    ping_pong_init,
    ping_pong_pass,
    ping_pong_wait,
)
from ..device.relative_bias import load_bias, locate_bias
from ..device.work_tile import (
    FWD_FIELDS,
    ONE_WARP,
    WARPGROUP,
    WORK_STAGES,
    count_blocks,
    read_fwd_tile,
    read_kv_runs,
    visit_kv_blocks,
    work_buffer,
)
from .context import (
    FwdModArgs,
    FwdOutputs,
    FwdRings,
    FwdSizes,
    FwdSmem,
    PreviousTile,
    SoftmaxState,
    StreamKArgs,
    TileContext,
    WgmmaOperands,
)
from .epilogue import epilogue
from .half_blocks import apply_mask, fill_block, live_columns, masked_columns, masked_positions
from .producer import produce
from .scheduler import schedule_tiles

# Registers of the threads of producer and scheduler.
MIN_REGISTERS = gl.constexpr(config.MIN_REGISTERS)


# Numbers that change from call to call do not make a kernel of their own.
@gluon.jit(
    do_not_specialize=[
        "tickets", "last_rows", "whole_tiles", "share_blocks", "shared_blocks", "heads", "group",
        "q_len", "kv_len", "dv", "score_numbers", "mask_numbers",
    ]
)  # fmt: skip
def forward(
    q0, q1, k0, k1, v0, v1, out0, out1,  # descriptors of pieces; no out where `wide_out` is given
    wide_out, lse, row_max, max_logit, entropy, sink,  # pointers; all but lse may be None
    counter, tickets,  # the next ticket (0, before and after), and how many there are
    last_rows,  # the shortest tile rows, whose tiles come after those of all heads
    whole_tiles, share_blocks, shared_blocks, partials,  # `StreamKArgs`, and memory for parts
    heads, group, q_len, kv_len, dv, scale, coords, dropout, schedule, bias_tables,
    score_tensors, mask_tensors, score_numbers, mask_numbers,  # what score and mask capture
    SCORE: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr,  # `config.FwdKernelConfig`
):  # fmt: skip
    """Write out and lse of every work tile, and what else is asked for."""
    # A launcher takes descriptors one by one, not in tuples.
    q, k, v, out = pieces(q0, q1), pieces(k0, k1), pieces(v0, v1), pieces(out0, out1)
    q_smem = alloc_stages(CONFIG.consumers * CONFIG.q_stages, q)
    k_smem = alloc_stages(CONFIG.stages, k)
    v_smem = alloc_stages(CONFIG.v_stages, v)
    if wide_out is None:  # noqa: SIM108
        o_smem = alloc_stages(CONFIG.consumers, out)
    else:
        o_smem = ()
    work_smem = work_buffer(FWD_FIELDS)
    if CONFIG.slope_mma:  # noqa: SIM108
        slope_smem = (slope_rhs(CONFIG.block),)
    else:
        slope_smem = ()
    smem = FwdSmem(work_smem, q_smem, k_smem, v_smem, o_smem, slope_smem)
    rings = FwdRings(
        work=mbarrier_ring(WORK_STAGES, 1, CONFIG.consumers + 1),
        q=q_rings(CONFIG),
        k=mbarrier_ring(CONFIG.stages, 1, CONFIG.consumers, CONFIG.k_barriers()),
        v=mbarrier_ring(CONFIG.v_stages, 1, CONFIG.consumers, CONFIG.v_barriers()),
        next_tile=full_barriers(1, 1),
    )
    fence_barrier_init()
    sizes = FwdSizes(heads, group, q_len, kv_len, dv)
    score_args, mask_args = (score_tensors, score_numbers), (mask_tensors, mask_numbers)
    if dropout is not None:
        dropout = load_seed(dropout)
    mods = FwdModArgs(scale, coords, dropout, bias_tables, score_args, mask_args)
    outputs = FwdOutputs(out, wide_out, lse, row_max, max_logit, entropy, sink, partials, counter)
    stream_k = StreamKArgs(whole_tiles, share_blocks, shared_blocks)
    # The code of a consumer depends on its number, so each has a configuration of its own.
    CONFIG_0: gl.constexpr = CONFIG.for_consumer(0)
    CONFIG_1: gl.constexpr = CONFIG.for_consumer(1)
    CONFIG_2: gl.constexpr = CONFIG.for_consumer(2)
    if CONFIG.consumers == 1:
        gl.warp_specialize(
            [
                (consumer, (outputs, smem, rings, sizes, mods, schedule, SCORE, MASK, CONFIG_0)),
                (produce, (q, k, v, smem, rings, sizes, schedule, CONFIG)),
                (schedule_tiles, (smem, rings, counter, tickets, last_rows, stream_k, sizes,
                                  schedule, CONFIG)),
            ],
            [ONE_WARP, ONE_WARP],  # warps of the partitions after the first
            [MIN_REGISTERS, MIN_REGISTERS],  # registers of their threads
        )  # fmt: skip
    elif CONFIG.consumers == 2:
        gl.warp_specialize(
            [
                (consumer, (outputs, smem, rings, sizes, mods, schedule, SCORE, MASK, CONFIG_0)),
                (consumer, (outputs, smem, rings, sizes, mods, schedule, SCORE, MASK, CONFIG_1)),
                (produce, (q, k, v, smem, rings, sizes, schedule, CONFIG)),
                (schedule_tiles, (smem, rings, counter, tickets, last_rows, stream_k, sizes,
                                  schedule, CONFIG)),
            ],
            [WARPGROUP, ONE_WARP, ONE_WARP],
            [CONFIG.registers, MIN_REGISTERS, MIN_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consumer, (outputs, smem, rings, sizes, mods, schedule, SCORE, MASK, CONFIG_0)),
                (consumer, (outputs, smem, rings, sizes, mods, schedule, SCORE, MASK, CONFIG_1)),
                (consumer, (outputs, smem, rings, sizes, mods, schedule, SCORE, MASK, CONFIG_2)),
                (produce, (q, k, v, smem, rings, sizes, schedule, CONFIG)),
                (schedule_tiles, (smem, rings, counter, tickets, last_rows, stream_k, sizes,
                                  schedule, CONFIG)),
            ],
            [WARPGROUP, WARPGROUP, ONE_WARP, ONE_WARP],
            [CONFIG.registers, CONFIG.registers, MIN_REGISTERS, MIN_REGISTERS],
        )  # fmt: skip


@gluon.jit
def q_rings(CONFIG: gl.constexpr):
    """Make one ring for all consumers; or where each releases its rows of Q early, one for each of
    the two."""
    if CONFIG.early_q_release:
        return mbarrier_ring(1, 1, 1), mbarrier_ring(1, 1, 1)
    else:
        return (mbarrier_ring(CONFIG.q_stages, 1, CONFIG.consumers),)


# -- a consumer -----------------------------------------------------------------------------------


@gluon.jit
def consumer(
    outputs, smem, rings, sizes, mods, schedule,
    SCORE: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Attend from rows 64 W to 64 W + 63 of every work tile, W the number of the consumer."""
    W: gl.constexpr = CONFIG.consumer
    BLOCK: gl.constexpr = CONFIG.block
    row_layout: gl.constexpr = gl.SliceLayout(1, acc_layout(BLOCK))
    q_ring = rings.q[W % len(rings.q)]
    _, _, q_len, kv_len, _ = sizes

    # The first sentinel tile: no P, no output.
    previous_at, q_at, k_at, v_at = first_stage(), first_stage(), first_stage(), first_stage()
    work_at = advance(previous_at, WORK_STAGES)
    consumer_wait(rings.work, previous_at)
    ping_pong_init(CONFIG)
    consumer_release_all(CONFIG.stages, CONFIG.k_barriers())
    consumer_release_all(CONFIG.v_stages, CONFIG.v_barriers())
    rows = W * ROWS + gl.arange(0, ROWS, layout=row_layout)
    minus_inf = gl.full([ROWS], float("-inf"), gl.float32, layout=row_layout)
    zero = gl.full([ROWS], 0.0, gl.float32, layout=row_layout)
    m, l, max_s = minus_inf, zero, minus_inf
    moment = () if outputs.entropy is None else (zero,)
    row_log2 = zero
    acc = zero_acc(ROWS, smem.v)
    p = gl.zeros([ROWS, BLOCK], smem.k[0].dtype, layout=lhs_layout(smem.v[0].shape[2]))

    tile_in_head = gl.to_tensor(0)
    while tile_in_head >= 0:  # the last sentinel tile has -1
        # Issue S of the first block, and the last P V of the previous tile.
        FIRST: gl.constexpr = live_columns(CONFIG, True, True)
        if CONFIG.early_q_release:
            pending = issue_pv(acc, p, smem.v, rings.v, prior_v(k_at, v_at, CONFIG))
        consumer_wait(q_ring, q_at)
        q = at_stage(smem.q, CONFIG.consumers * q_at.stage + W)
        if CONFIG.q_in_registers:
            q = (q[0].load(lhs_layout(BLOCK)),)  # Shared memory is then read for K and V alone.
        ops = WgmmaOperands(
            q=q, k=smem.k, v=smem.v, k_ring=rings.k, v_ring=rings.v, q_ring=q_ring, q_at=q_at,
            slope=(),
        )  # fmt: skip
        if CONFIG.early_q_release:
            s = issue_qk(ops, k_at, FIRST, CONFIG)
            ping_pong_pass(CONFIG)
        elif not CONFIG.first_block_in_loop:
            s, pending = issue_qk_pv(ops, acc, p, k_at, v_at, FIRST, CONFIG)
            if CONFIG.q_in_registers:  # Only a WGMMA that has read them shows that they are loaded.
                consumer_release(q_ring, q_at)
        else:
            pending = acc

        # Meanwhile find out what the tile is.
        consumer_wait(rings.work, work_at)
        work = read_fwd_tile(smem.work, work_at, WARPGROUP)
        tile_in_head = work.tile_in_head
        blocks_left = gl.to_tensor(0)
        if CONFIG.early_q_release:
            blocks_left = count_blocks(work.packed_blocks)
        tile = TileContext(kv_len, mods, *locate_queries(work, rows, mods, q_len, CONFIG))
        previous = PreviousTile(
            previous_at, rows, row_log2, mods.dropout, smem, rings, outputs, sizes, schedule
        )

        # The first block, with which the previous tile ends; then the others.
        state = SoftmaxState(
            acc=pending, m=m, l=l, moment=moment, max_s=max_s, p=p, k_at=k_at, v_at=v_at,
            is_first=gl.to_tensor(1), blocks_left=blocks_left,
        )  # fmt: skip
        if not CONFIG.first_block_in_loop:
            ones = draw_block(tile, work.first_block, FIRST, CONFIG)
            state = softmax_step(
                state, s, ones, ops, tile, previous, work.first_block, True, True,
                SCORE, MASK, CONFIG,
            )  # fmt: skip
        if CONFIG.slope_mma:  # This tile's slope, which is not known before its first block.
            a, row_log2 = slope_of_tile(tile, CONFIG)
            ops = WgmmaOperands(
                q=q, k=smem.k, v=smem.v, k_ring=rings.k, v_ring=rings.v, q_ring=q_ring, q_at=q_at,
                slope=(a, smem.slope[0]),
            )  # fmt: skip
        runs = read_kv_runs(smem.work, work_at, schedule, WARPGROUP)
        state = visit_kv_blocks(
            state, (ops, tile, previous), schedule, work.first_block, runs, kv_len,
            CONFIG.first_block_in_loop, attend_block, SCORE, MASK, CONFIG,
        )  # fmt: skip

        acc, m, l, moment, max_s, p, k_at, v_at, _, _ = state
        previous_at, work_at = work_at, advance(work_at, WORK_STAGES)
        if not (CONFIG.q_in_registers or CONFIG.early_q_release):
            consumer_release(q_ring, q_at)
        q_at = advance(q_at, CONFIG.q_stages)
    tma_store_wait(0)


@gluon.jit
def locate_queries(work, rows, mods, q_len, CONFIG: gl.constexpr):
    """Return the fields of `TileContext` from b on, for this consumer's rows of a tile."""
    INDEX: gl.constexpr = CONFIG.index_type
    coords = mods.coords
    batch, head, first_row = work.batch, work.head, work.first_row
    n = first_row + CONFIG.consumer * ROWS
    span = rows - CONFIG.consumer * ROWS
    first_q = first_position(coords.q_pos, coords.q_stride, coords.q, batch, n, q_len, CONFIG)
    q_idx = positions(coords.q_pos, coords.q_stride, first_q, batch, n, span, q_len, CONFIG)
    b, h = gl.cast(coords.b, INDEX) + batch, gl.cast(coords.h, INDEX) + head
    operands = hoist_rows(b, h, q_idx, mods.score_args, mods.mask_args, True, CONFIG)
    bias = locate_bias(mods.bias_tables, batch, head, n)
    operands = HoistedRows(operands.score, operands.mask, bias)
    return b, h, q_idx, batch, operands, first_q


@gluon.jit
def slope_of_tile(tile, CONFIG: gl.constexpr):
    """Return a of device/affine_score.py for a work tile, and what the slope adds to its rows."""
    mods, no_columns = tile.mods, HoistedColumns((), ())
    captured = affine_operands(mods.score_args, tile.rows, no_columns, True, CONFIG.block, CONFIG)
    return slope_lhs(
        mods.scale, tile.b, tile.h, tile.q_idx, tile.first_q, captured, CONFIG.block, CONFIG
    )


# -- one KV block ---------------------------------------------------------------------------------


@gluon.jit
def attend_block(
    state, context, n, PARTIAL: gl.constexpr,
    SCORE: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Attend to one KV block, keys from row n on: the body of the main loop.

    - `context`: operands, tile, previous tile.
    """
    ops, tile, previous = context
    LIVE: gl.constexpr = live_columns(CONFIG, False, PARTIAL)
    # Drawn before S: behind P V it does not hide (docs/lab/forward.md, 2026-11-28).
    ones = draw_block(tile, n, LIVE, CONFIG)
    s, pending = issue_qk_pv(ops, state.acc, state.p, state.k_at, state.v_at, LIVE, CONFIG)
    state = SoftmaxState(
        acc=pending, m=state.m, l=state.l, moment=state.moment, max_s=state.max_s,
        p=state.p, k_at=state.k_at, v_at=state.v_at, is_first=state.is_first,
        blocks_left=state.blocks_left,
    )  # fmt: skip
    return softmax_step(state, s, ones, ops, tile, previous, n, False, PARTIAL, SCORE, MASK, CONFIG)


@gluon.jit
def draw_block(tile, n, LIVE: gl.constexpr, CONFIG: gl.constexpr):
    """Return `draw_ones` for the live columns of the block of keys from row n on."""
    if CONFIG.in_sixteens:
        return draw_ones(tile, first_key(tile, n + LIVE[0], CONFIG), LIVE[1])
    else:
        return ()


@gluon.jit
def issue_qk_pv(ops, acc, p, k_at, v_at, LIVE: gl.constexpr, CONFIG: gl.constexpr):
    """Issue S of this block and P V of the one before, in this consumer's ping-pong turn."""
    s = issue_qk(ops, k_at, LIVE, CONFIG)
    acc = issue_pv(acc, p, ops.v, ops.v_ring, prior_v(k_at, v_at, CONFIG))
    ping_pong_pass(CONFIG)
    return s, acc


@gluon.jit
def issue_qk(ops, k_at, LIVE: gl.constexpr, CONFIG: gl.constexpr):
    """Wait for K and for this consumer's turn; issue S = Q Kᵀ, of the live columns of the block."""
    consumer_wait(ops.k_ring, k_at)
    ping_pong_wait(CONFIG)
    COLUMNS: gl.constexpr = LIVE[1]
    zero = gl.zeros([ROWS, COLUMNS], gl.float32, layout=acc_layout(COLUMNS))
    s = wgmma_abt(ops.q, slice_rows(at_stage(ops.k, k_at.stage), LIVE), zero)
    if len(ops.slope) > 0:  # The slope counts columns from the first live one.
        a = gl.convert_layout(ops.slope[0], lhs_layout(COLUMNS))
        s = wgmma_slope(s, a, slice_rows((ops.slope[1],), (0, COLUMNS))[0])
    return s


@gluon.jit
def issue_pv(acc, p, v_smem, v_ring, v_at):
    """Wait for V; issue O += P V."""
    consumer_wait(v_ring, v_at)
    return wgmma_ab(acc, p, at_stage(v_smem, v_at.stage))


@gluon.jit
def prior_v(k_at, v_at, CONFIG: gl.constexpr):
    """Return the cursor of V of the block before the one whose K is at `k_at`. The first V belongs
    to no block; so with as many stages of V as of K, one cursor serves both."""
    if CONFIG.v_stages == CONFIG.stages:
        return k_at
    else:
        return v_at


@gluon.jit
def softmax_step(
    state, s, ones, ops, tile, previous, n, FIRST: gl.constexpr, PARTIAL: gl.constexpr,
    SCORE: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Finish a block whose S, and the P V before it, are issued: the online softmax. Before a work
    tile's first block (FIRST; or `state.is_first`, where the loop computes it among others) the
    state is that of the previous tile, which is finished here.

    - `s`: S in flight, of keys from row n on. `ones`: from `draw_block`.
    """
    LIVE: gl.constexpr = live_columns(CONFIG, FIRST, PARTIAL)
    MASKED: gl.constexpr = masked_columns(CONFIG, FIRST, PARTIAL)
    MAYBE_FIRST: gl.constexpr = CONFIG.first_block_in_loop and PARTIAL
    n += LIVE[0]

    # While S is in flight, read what score and mask need of the keys.
    first_kv = first_key(tile, n, CONFIG)
    columns = columns_of_block(tile, first_kv, n, LIVE, MASKED, PARTIAL, CONFIG)
    score_args = tile.mods.score_args
    if CONFIG.relative_biases > 0:
        score_args = score_args + (load_bias(tile.rows.bias, n, LIVE[1]),)  # noqa: RUF005

    # S is there; release K, and Q after its last block.
    s = wait_for_qk(s, ops, FIRST, CONFIG)
    consumer_release(ops.k_ring, state.k_at, True, CONFIG.k_barriers())
    pv_at = prior_v(state.k_at, state.v_at, CONFIG)
    blocks_left = state.blocks_left
    if CONFIG.early_q_release:
        blocks_left -= 1
        consumer_release(ops.q_ring, ops.q_at, blocks_left == 0)
    k_at = advance(state.k_at, CONFIG.stages)

    # P, while the tensor cores compute P V of the block before.
    t, scale_log2, s, row_log2 = score_block(
        s, ops, tile, columns, first_kv, n, score_args, MASKED, PARTIAL, SCORE, MASK, CONFIG
    )
    MAYBE_EMPTY: gl.constexpr = SCORE is not None or (
        PARTIAL and (MASK is not None or not CONFIG.even_kv)
    )
    e, m, l, moment, max_s, rescale = online_softmax(
        t, scale_log2, s, row_log2, state, FIRST or MAYBE_FIRST, MAYBE_EMPTY, CONFIG
    )  # fmt: skip

    # P V of the block before is complete: release V, and P's registers.
    acc = wgmma_wait(state.acc, state.p, 0)
    consumer_release(ops.v_ring, pv_at, True, CONFIG.v_barriers())
    v_at = advance(state.v_at, CONFIG.v_stages)
    # What dropout drops is in the sums of rows.
    if tile.mods.dropout is not None and not CONFIG.in_sixteens:
        e = drop_one_by_one(e, tile, first_kv, n, CONFIG)
    if CONFIG.in_sixteens:  # noqa: SIM108
        p = drop_pairs(ones, e, ops.k[0])
    else:
        p = materialize(e.to(ops.k[0].dtype))
    p = fill_block(p, LIVE, CONFIG)
    p = gl.convert_layout(p, lhs_layout(ops.v[0].shape[2]))

    # O of the previous tile is complete, or O of this one is rescaled.
    if FIRST:
        epilogue(acc, state, previous, SCORE, CONFIG)
        acc = zero_acc(ROWS, ops.v)
    elif MAYBE_FIRST:
        if state.is_first > 0:
            epilogue(acc, state, previous, SCORE, CONFIG)
            acc = zero_acc(ROWS, ops.v)
        else:
            acc = scale_rows(acc, rescale)
    else:
        acc = scale_rows(acc, rescale)
    return SoftmaxState(
        acc=acc, m=m, l=l, moment=moment, max_s=max_s, p=p, k_at=k_at, v_at=v_at,
        is_first=gl.to_tensor(0), blocks_left=blocks_left,
    )  # fmt: skip


@gluon.jit
def drop_one_by_one(e, tile, first_kv, n, CONFIG: gl.constexpr):
    """Return P of the pairs that dropout keeps, and 0, where each pair makes a Philox call of its
    own. `first_kv`: `first_key` of n."""
    COLUMNS: gl.constexpr = e.shape[1]
    coords = tile.mods.coords
    span = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, acc_layout(COLUMNS)))
    kv_idx = positions(
        coords.kv_pos, coords.kv_stride, first_kv, tile.batch, n, span, tile.kv_len, CONFIG
    )
    q_idx = row_vector(tile.q_idx, COLUMNS)[:, None]
    kept = kept_one_by_one(q_idx, kv_idx[None, :], tile.h, tile.b, tile.mods.dropout)
    return drop(kept, e)


@gluon.jit
def first_key(tile, n, CONFIG: gl.constexpr):
    """Return the `first_position` of the keys from row n on."""
    coords = tile.mods.coords
    return first_position(
        coords.kv_pos, coords.kv_stride, coords.kv, tile.batch, n, tile.kv_len, CONFIG
    )


@gluon.jit
def columns_of_block(
    tile, first_kv, n, LIVE: gl.constexpr, MASKED: gl.constexpr, PARTIAL: gl.constexpr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Read the hoisted operands of a block's live columns, and of its masked ones for the mask,
    while S is in flight.

    - `first_kv`: `first_key` of n.
    """
    mods, coords = tile.mods, tile.mods.coords
    span = gl.arange(0, LIVE[1], layout=hoist_layout())
    kv_idx = positions(
        coords.kv_pos, coords.kv_stride, first_kv, tile.batch, n, span, tile.kv_len, CONFIG
    )
    columns = hoist_columns(
        tile.b, tile.h, kv_idx, tile.rows, mods.score_args, mods.mask_args, True, PARTIAL, CONFIG
    )
    if MASKED[1] < LIVE[1]:
        kv_idx = masked_positions(first_kv, MASKED, hoist_layout())
        masked = hoist_columns(
            tile.b,
            tile.h,
            kv_idx,
            tile.rows,
            mods.score_args,
            mods.mask_args,
            True,
            PARTIAL,
            CONFIG,
        )
        columns = HoistedColumns(columns.score, masked.mask)
    return columns


@gluon.jit
def wait_for_qk(s, ops, FIRST: gl.constexpr, CONFIG: gl.constexpr):
    """Wait for S. The P V of the block before may go on; but at the first block of a tile with
    CONFIG.early_q_release it was issued before S."""
    if CONFIG.q_in_registers:  # The registers of Q, or of the slope, stay as they are until then.
        return wgmma_wait((s,), ops.q[0], len(ops.v))[0]
    elif len(ops.slope) > 0:
        return wgmma_wait((s,), ops.slope[0], len(ops.v))[0]
    else:
        return warpgroup_mma_wait(0 if CONFIG.early_q_release and FIRST else len(ops.v), deps=[s])


@gluon.jit
def score_block(
    s, ops, tile, columns, first_kv, n, score_args, MASKED: gl.constexpr, PARTIAL: gl.constexpr,
    SCORE: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Apply score and mask. **Returns:** t, `scale_log2`, S and `row_log2`.

    T over log 2 is t scale_log2, plus `row_log2` of an affine score; t is -inf where the mask does
    not keep a pair."""
    COLUMNS: gl.constexpr = s.shape[1]
    scale, coords, mask_args = tile.mods.scale, tile.mods.coords, tile.mods.mask_args
    span = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, acc_layout(COLUMNS)))
    live = n + span < tile.kv_len
    kv_idx = positions(
        coords.kv_pos, coords.kv_stride, first_kv, tile.batch, n, span, tile.kv_len, CONFIG
    )
    # Plus an opaque 0: or LLVM would keep the distances of all pairs in registers.
    q_idx = row_vector(tile.q_idx + ((n + tile.kv_len) >> 31), COLUMNS)
    operands = tile.rows
    rows = HoistedRows(
        rows_for_width(operands.score, COLUMNS), rows_for_width(operands.mask, COLUMNS),
        operands.bias,
    )  # fmt: skip
    if CONFIG.affine is None:
        t, scale_log2, s = apply_score(
            s, scale, tile.b, tile.h, q_idx[:, None], kv_idx[None, :], score_args,
            SCORE, CONFIG.positive_scale,
        )  # fmt: skip
        row_log2 = ()
    else:
        captured = affine_operands(score_args, rows, columns, True, COLUMNS, CONFIG)
        t, scale_log2, row_log2 = affine_scores(
            s, scale, tile.b, tile.h, q_idx, kv_idx, tile.first_q, first_kv, captured,
            len(ops.slope) > 0, CONFIG,
        )  # fmt: skip
        s = s * scale
    if PARTIAL and MASK is not None:
        t = apply_mask(
            t,
            tile.b,
            tile.h,
            q_idx,
            kv_idx,
            first_kv,
            rows,
            columns,
            mask_args,
            MASKED,
            MASK,
            CONFIG,
        )
    if PARTIAL and not CONFIG.even_kv:
        t = gl.where(live[None, :], t, float("-inf"))
    return t, scale_log2, s, row_log2


@gluon.jit
def online_softmax(
    t, scale_log2, s, row_log2, state, MAYBE_FIRST: gl.constexpr, MAYBE_EMPTY: gl.constexpr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute P of a block in float32, the new m, l, moment and max_s, and the factor that
    rescales O and l. With MAYBE_FIRST, the maxima and sums of the previous tile are dropped if
    `state.is_first`.

    - `t`, `scale_log2`, `s`, `row_log2`: from `score_block`.
    - `MAYBE_EMPTY`: a mask or a score may make T -inf.
    """
    COLUMNS: gl.constexpr = t.shape[1]
    # t of an affine score is T less a row vector.
    BY_ROW: gl.constexpr = CONFIG.affine is not None and not CONFIG.abs_only
    m, l, max_s = state.m, state.l, state.max_s
    if MAYBE_FIRST:
        m = gl.where(state.is_first > 0, float("-inf"), m)
        l = gl.where(state.is_first > 0, 0.0, l)
        max_s = gl.where(state.is_first > 0, float("-inf"), max_s)
    if CONFIG.track_max:  # of S, where T says that the pair is kept
        t_log2 = t + row_log2[:, None] if BY_ROW else t
        kept_s = gl.where(t_log2 == float("-inf"), float("-inf"), s)
        max_s = gl.maximum(max_s, row_vector(gl.max(kept_s, 1), CONFIG.block))
    previous_m = m
    m_block = gl.max(t, 1) * scale_log2
    m = gl.maximum(m, row_vector(m_block + row_log2 if BY_ROW else m_block, CONFIG.block))
    # A query that has seen nothing yet has m = -inf, and needs exp2(-inf - 0) = 0.
    base = gl.where(m == float("-inf"), 0.0, m)
    base_of_t = row_vector(base, COLUMNS)
    if BY_ROW:  # Rounding may leave it below the largest T: no exponential is to exceed 1.
        base_of_t = gl.maximum(base_of_t - row_log2, m_block)
    log_e = t * scale_log2 - base_of_t[:, None]
    e = gl.exp2(log_e)
    rescale = gl.exp2(previous_m - base)
    moment = ()
    if len(state.moment) > 0:
        before = state.moment[0]
        if MAYBE_FIRST:
            before = gl.where(state.is_first > 0, 0.0, before)
        if MAYBE_EMPTY:  # 0 times -inf is 0
            log_e = gl.maximum(log_e, LOG_0)
        before = moved_moment(before, l, previous_m - base, rescale)
        moment = (before + row_vector(gl.sum(e * log_e, 1), CONFIG.block),)
    l = l * rescale + row_vector(gl.sum(e, 1), CONFIG.block)
    return e, m, l, moment, max_s, rescale
