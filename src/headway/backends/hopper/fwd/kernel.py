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
P V of the tile before, whose output is stored then. (If HOW.early_q_release, there is one buffer
for Q, which has to be free first: that P V is issued before Q is waited for.) At both ends of a
CTA's work stands a **sentinel tile**, of one block and of rows past the end, which fills and drains
the pipeline: so no tile is a special case, and nothing of a sentinel is stored.

All partitions iterate over the blocks of a tile by the same function, `visit_kv_blocks`: partial
blocks first, then full ones, each kind from the last to the first.
"""

from ..device.affine_score import affine_scores, slope_lhs, slope_rhs, wgmma_slope
from ..device.gluon_compat import gl, gluon, tma_store_wait, warpgroup_mma_wait
from ..device.hoisted import (
    Columns,
    Rows,
    affine_operands,
    hoist_columns,
    hoist_layout,
    hoist_rows,
    rows_for_width,
)
from ..device.mma import (
    ROWS,
    acc_layout,
    alloc_stages,
    apply_score,
    at_stage,
    first_position,
    lhs_layout,
    materialize,
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
    WORK_STAGES,
    read_fwd_tile,
    read_kv_runs,
    visit_kv_blocks,
    work_buffer,
)
from .context import Inputs, Operands, Outputs, Previous, Rings, Sizes, Smem, State, StreamK, Tile
from .epilogue import epilogue
from .half_blocks import apply_mask, fill_block, live_columns, masked_columns, masked_positions
from .producer import produce
from .scheduler import schedule


# Numbers that change from call to call do not make a kernel of their own.
@gluon.jit(
    do_not_specialize=[
        "tickets", "last_rows", "whole_tiles", "share_blocks", "shared_blocks", "heads", "group",
        "q_len", "kv_len", "dv", "score_numbers", "mask_numbers",
    ]
)  # fmt: skip
def forward(
    q0, q1, k0, k1, v0, v1, out0, out1,  # descriptors of pieces; no out where `wide_out` is given
    wide_out, lse, row_max, max_logit, sink,  # pointers; all but lse may be None
    counter, tickets,  # the next ticket (0, before and after), and how many there are
    last_rows,  # the shortest tile rows, whose tiles come after those of all heads
    whole_tiles, share_blocks, shared_blocks, partials,  # `StreamK`, and memory for parts of tiles
    heads, group, q_len, kv_len, dv, scale, coords, walk, bias_tables,
    score_tensors, mask_tensors, score_numbers, mask_numbers,  # what score and mask capture
    SCORE: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,  # HOW: `config.How`
):  # fmt: skip
    """out and lse of every work tile, and what else is asked for."""
    # A launcher takes descriptors one by one, not in tuples.
    q, k, v, out = pieces(q0, q1), pieces(k0, k1), pieces(v0, v1), pieces(out0, out1)
    q_smem = alloc_stages(HOW.consumers * HOW.q_stages, q)
    k_smem = alloc_stages(HOW.stages, k)
    v_smem = alloc_stages(HOW.v_stages, v)
    if wide_out is None:  # noqa: SIM108
        o_smem = alloc_stages(HOW.consumers, out)
    else:
        o_smem = ()
    work_smem = work_buffer(FWD_FIELDS)
    if HOW.slope_mma:  # noqa: SIM108
        slope_smem = (slope_rhs(HOW.block),)
    else:
        slope_smem = ()
    smem = Smem(work_smem, q_smem, k_smem, v_smem, o_smem, slope_smem)
    rings = Rings(
        work=mbarrier_ring(WORK_STAGES, 1, HOW.consumers + 1),
        q=q_rings(HOW),
        k=mbarrier_ring(HOW.stages, 1, HOW.consumers, HOW.k_barriers()),
        v=mbarrier_ring(HOW.v_stages, 1, HOW.consumers, HOW.v_barriers()),
        next_tile=full_barriers(1, 1),
    )
    fence_barrier_init()
    sizes = Sizes(heads, group, q_len, kv_len, dv)
    of_score, of_mask = (score_tensors, score_numbers), (mask_tensors, mask_numbers)
    inputs = Inputs(scale, coords, bias_tables, of_score, of_mask)
    outputs = Outputs(out, wide_out, lse, row_max, max_logit, sink, partials, counter)
    stream_k = StreamK(whole_tiles, share_blocks, shared_blocks)
    HOW_0: gl.constexpr = HOW.for_consumer(0)
    HOW_1: gl.constexpr = HOW.for_consumer(1)
    HOW_2: gl.constexpr = HOW.for_consumer(2)
    if HOW.consumers == 1:
        gl.warp_specialize(
            [
                (consumer, (outputs, smem, rings, sizes, inputs, walk, SCORE, MASK, HOW_0)),
                (produce, (q, k, v, smem, rings, sizes, walk, HOW)),
                (schedule, (smem, rings, counter, tickets, last_rows, stream_k, sizes, walk, HOW)),
            ],
            [1, 1],
            [24, 24],
        )  # fmt: skip
    elif HOW.consumers == 2:
        gl.warp_specialize(
            [
                (consumer, (outputs, smem, rings, sizes, inputs, walk, SCORE, MASK, HOW_0)),
                (consumer, (outputs, smem, rings, sizes, inputs, walk, SCORE, MASK, HOW_1)),
                (produce, (q, k, v, smem, rings, sizes, walk, HOW)),
                (schedule, (smem, rings, counter, tickets, last_rows, stream_k, sizes, walk, HOW)),
            ],
            [4, 1, 1],
            [HOW.registers, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consumer, (outputs, smem, rings, sizes, inputs, walk, SCORE, MASK, HOW_0)),
                (consumer, (outputs, smem, rings, sizes, inputs, walk, SCORE, MASK, HOW_1)),
                (consumer, (outputs, smem, rings, sizes, inputs, walk, SCORE, MASK, HOW_2)),
                (produce, (q, k, v, smem, rings, sizes, walk, HOW)),
                (schedule, (smem, rings, counter, tickets, last_rows, stream_k, sizes, walk, HOW)),
            ],
            [4, 4, 1, 1],
            [HOW.registers, HOW.registers, 24, 24],
        )  # fmt: skip


@gluon.jit
def q_rings(HOW: gl.constexpr):
    """One ring for all consumers; or where each releases its rows of Q early, one for each of the
    two."""
    if HOW.early_q_release:
        return mbarrier_ring(1, 1, 1), mbarrier_ring(1, 1, 1)
    else:
        return (mbarrier_ring(HOW.q_stages, 1, HOW.consumers),)


# -- a consumer -----------------------------------------------------------------------------------


@gluon.jit
def consumer(
    outputs, smem, rings, sizes, inputs, walk,
    SCORE: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Attend from rows 64 W to 64 W + 63 of every work tile, W the number of the consumer."""
    W: gl.constexpr = HOW.consumer
    BLOCK: gl.constexpr = HOW.block
    row_layout: gl.constexpr = gl.SliceLayout(1, acc_layout(BLOCK))
    q_ring = rings.q[W % len(rings.q)]
    _, _, q_len, kv_len, _ = sizes

    # The first sentinel tile: no P, no output.
    previous_at, q_at, k_at, v_at = first_stage(), first_stage(), first_stage(), first_stage()
    work_at = advance(previous_at, WORK_STAGES)
    consumer_wait(rings.work, previous_at)
    ping_pong_init(HOW)
    consumer_release_all(HOW.stages, HOW.k_barriers())
    consumer_release_all(HOW.v_stages, HOW.v_barriers())
    i = W * ROWS + gl.arange(0, ROWS, layout=row_layout)
    minus_inf = gl.full([ROWS], float("-inf"), gl.float32, layout=row_layout)
    zero = gl.full([ROWS], 0.0, gl.float32, layout=row_layout)
    m, l, max_s = minus_inf, zero, minus_inf
    by_row = zero
    acc = zero_acc(ROWS, smem.v)
    p = gl.zeros([ROWS, BLOCK], smem.k[0].dtype, layout=lhs_layout(smem.v[0].shape[2]))

    slot = gl.to_tensor(0)
    while slot >= 0:
        # Issue S of the first block, and the last P V of the previous tile.
        FIRST: gl.constexpr = live_columns(HOW, True, True)
        if HOW.early_q_release:
            pending = issue_pv(acc, p, smem.v, rings.v, prior_v(k_at, v_at, HOW))
        consumer_wait(q_ring, q_at)
        q = at_stage(smem.q, HOW.consumers * q_at.stage + W)
        if HOW.q_in_registers:
            q = (q[0].load(lhs_layout(BLOCK)),)  # Shared memory is then read for K and V alone.
        ops = Operands(q, smem.k, smem.v, rings.k, rings.v, q_ring, q_at, ())
        if HOW.early_q_release:
            s = issue_qk(ops, k_at, FIRST, HOW)
            ping_pong_pass(HOW)
        elif not HOW.first_block_in_loop:
            s, pending = issue_qk_pv(ops, acc, p, k_at, v_at, FIRST, HOW)
            if HOW.q_in_registers:  # A WGMMA has read them, so the loads are complete: not before.
                consumer_release(q_ring, q_at)

        # Meanwhile find out what the tile is.
        consumer_wait(rings.work, work_at)
        work = read_fwd_tile(smem.work, work_at, 4)
        slot = work.slot
        blocks_left = gl.to_tensor(0)
        if HOW.early_q_release:
            blocks_left = work.twice_blocks // 2
        tile = Tile(kv_len, inputs, *locate_queries(work, i, inputs, q_len, HOW))
        previous = Previous(previous_at, i, by_row, smem, rings, outputs, sizes, walk)

        # The first block, with which the previous tile ends; then the others.
        if HOW.first_block_in_loop:
            state = State(acc, m, l, max_s, p, k_at, v_at, gl.to_tensor(1), blocks_left)
        else:
            state = State(pending, m, l, max_s, p, k_at, v_at, gl.to_tensor(1), blocks_left)
            state = softmax_step(
                state, s, ops, tile, previous, work.first_block, True, True, SCORE, MASK, HOW
            )
        if HOW.slope_mma:  # This tile's slope, which is not known before its first block.
            a, by_row = slope_of_tile(tile, HOW)
            slope = (a, smem.slope[0])
            ops = Operands(q, smem.k, smem.v, rings.k, rings.v, q_ring, q_at, slope)
        runs = read_kv_runs(smem.work, work_at, walk, 4)
        state = visit_kv_blocks(
            state, (ops, tile, previous), walk, work.first_block, runs, kv_len,
            HOW.first_block_in_loop, attend_block, SCORE, MASK, HOW,
        )  # fmt: skip

        acc, m, l, max_s, p, k_at, v_at, _, _ = state
        previous_at, work_at = work_at, advance(work_at, WORK_STAGES)
        if not (HOW.q_in_registers or HOW.early_q_release):
            consumer_release(q_ring, q_at)
        q_at = advance(q_at, HOW.q_stages)
    tma_store_wait(0)


@gluon.jit
def locate_queries(work, i, inputs, q_len, HOW: gl.constexpr):
    """What scores and masks read of this consumer's rows `i`: the fields of `Tile` from b on."""
    INDEX: gl.constexpr = HOW.index_type
    coords = inputs.coords
    batch, head, first_row = work.batch, work.head, work.first_row
    n = first_row + HOW.consumer * ROWS
    span = i - HOW.consumer * ROWS
    first_q = first_position(coords.q_pos, coords.q_stride, coords.q, batch, n, q_len, HOW)
    q_idx = positions(coords.q_pos, coords.q_stride, first_q, batch, n, span, q_len, HOW)
    b, h = gl.cast(coords.b, INDEX) + batch, gl.cast(coords.h, INDEX) + head
    rows = hoist_rows(b, h, q_idx, inputs.of_score, inputs.of_mask, True, HOW)
    rows = Rows(rows.score, rows.mask, locate_bias(inputs.bias_tables, batch, head, n))
    return b, h, q_idx, batch, rows, first_q


@gluon.jit
def slope_of_tile(tile, HOW: gl.constexpr):
    """a of device/affine_score.py for a work tile, and what the slope adds to its rows."""
    inputs, none = tile.inputs, Columns((), ())
    captured = affine_operands(inputs.of_score, tile.rows, none, True, HOW.block, HOW)
    return slope_lhs(
        inputs.scale, tile.b, tile.h, tile.q_idx, tile.first_q, captured, HOW.block, HOW
    )


# -- one KV block ---------------------------------------------------------------------------------


@gluon.jit
def attend_block(
    state, given, n, PARTIAL: gl.constexpr,
    SCORE: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """The mainloop: one KV block, keys from row n on. `given`: operands, tile, previous tile."""
    ops, tile, previous = given
    LIVE: gl.constexpr = live_columns(HOW, False, PARTIAL)
    acc, m, l, max_s, p, k_at, v_at, is_first, blocks_left = state
    s, pending = issue_qk_pv(ops, acc, p, k_at, v_at, LIVE, HOW)
    state = State(pending, m, l, max_s, p, k_at, v_at, is_first, blocks_left)
    return softmax_step(state, s, ops, tile, previous, n, False, PARTIAL, SCORE, MASK, HOW)


@gluon.jit
def issue_qk_pv(ops, acc, p, k_at, v_at, LIVE: gl.constexpr, HOW: gl.constexpr):
    """Issue S of this block and P V of the one before, in this consumer's ping-pong turn."""
    s = issue_qk(ops, k_at, LIVE, HOW)
    acc = issue_pv(acc, p, ops.v, ops.v_ring, prior_v(k_at, v_at, HOW))
    ping_pong_pass(HOW)
    return s, acc


@gluon.jit
def issue_qk(ops, k_at, LIVE: gl.constexpr, HOW: gl.constexpr):
    """Wait for K and for this consumer's turn; issue S = Q Kᵀ, of the live columns of the block."""
    consumer_wait(ops.k_ring, k_at)
    ping_pong_wait(HOW)
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
def prior_v(k_at, v_at, HOW: gl.constexpr):
    """The cursor of V of the block before the one whose K is at `k_at`. The first V belongs to no
    block; so with as many stages of V as of K, one cursor serves both."""
    if HOW.v_stages == HOW.stages:
        return k_at
    else:
        return v_at


@gluon.jit
def softmax_step(
    state, s, ops, tile, previous, n, FIRST: gl.constexpr, PARTIAL: gl.constexpr,
    SCORE: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """The rest of a block, once S and the P V before are issued: the online softmax. Before a work
    tile's first block (FIRST; or `state.is_first`, where the loop computes it among others) the
    state is that of the previous tile, which is finished here.

    - `s`: S in flight, of keys from row n on.
    """
    LIVE: gl.constexpr = live_columns(HOW, FIRST, PARTIAL)
    MASKED: gl.constexpr = masked_columns(HOW, FIRST, PARTIAL)
    MAYBE_FIRST: gl.constexpr = HOW.first_block_in_loop and PARTIAL
    n += LIVE[0]

    # While S is in flight, read what score and mask need of the keys.
    first = first_key(tile, n, HOW)
    columns = columns_of_block(tile, first, n, LIVE, MASKED, PARTIAL, HOW)
    of_score = tile.inputs.of_score
    if HOW.relative_biases > 0:
        of_score = of_score + (load_bias(tile.rows.bias, n, LIVE[1]),)  # noqa: RUF005

    # S is there; release K, and Q after its last block.
    s = wait_for_qk(s, ops, FIRST, HOW)
    consumer_release(ops.k_ring, state.k_at, True, HOW.k_barriers())
    pv_at = prior_v(state.k_at, state.v_at, HOW)
    blocks_left = state.blocks_left
    if HOW.early_q_release:
        blocks_left -= 1
        consumer_release(ops.q_ring, ops.q_at, blocks_left == 0)
    k_at = advance(state.k_at, HOW.stages)

    # P, while the tensor cores compute P V of the block before.
    t, unit, s, by_row = score_block(
        s, ops, tile, columns, first, n, of_score, MASKED, PARTIAL, SCORE, MASK, HOW
    )
    e, m, l, max_s, rescale = online_softmax(
        t, unit, s, by_row, state, FIRST or MAYBE_FIRST, HOW
    )  # fmt: skip

    # P V of the block before is complete: release V, and P's registers.
    acc = wgmma_wait(state.acc, state.p, 0)
    consumer_release(ops.v_ring, pv_at, True, HOW.v_barriers())
    v_at = advance(state.v_at, HOW.v_stages)
    p = fill_block(materialize(e.to(ops.k[0].dtype)), LIVE, HOW)
    p = gl.convert_layout(p, lhs_layout(ops.v[0].shape[2]))

    # O of the previous tile is complete, or O of this one is rescaled.
    if FIRST:
        epilogue(acc, state.m, state.l, state.max_s, previous, SCORE, HOW)
        acc = zero_acc(ROWS, ops.v)
    elif MAYBE_FIRST:
        if state.is_first > 0:
            epilogue(acc, state.m, state.l, state.max_s, previous, SCORE, HOW)
            acc = zero_acc(ROWS, ops.v)
        else:
            acc = scale_rows(acc, rescale)
    else:
        acc = scale_rows(acc, rescale)
    return State(acc, m, l, max_s, p, k_at, v_at, gl.to_tensor(0), blocks_left)


@gluon.jit
def first_key(tile, n, HOW: gl.constexpr):
    """`first_position` of the keys from row n on."""
    at = tile.inputs.coords
    return first_position(at.kv_pos, at.kv_stride, at.kv, tile.batch, n, tile.kv_len, HOW)


@gluon.jit
def columns_of_block(
    tile, first, n, LIVE: gl.constexpr, MASKED: gl.constexpr, PARTIAL: gl.constexpr,
    HOW: gl.constexpr,
):  # fmt: skip
    """The hoisted operands of a block's live columns, and of its masked ones for the mask; read
    while S is in flight.

    - `first`: `first_key` of n.
    """
    inputs, at = tile.inputs, tile.inputs.coords
    span = gl.arange(0, LIVE[1], layout=hoist_layout())
    kv_idx = positions(at.kv_pos, at.kv_stride, first, tile.batch, n, span, tile.kv_len, HOW)
    columns = hoist_columns(
        tile.b, tile.h, kv_idx, tile.rows, inputs.of_score, inputs.of_mask, True, PARTIAL, HOW
    )
    if MASKED[1] < LIVE[1]:
        kv_idx = masked_positions(first, MASKED, hoist_layout())
        masked = hoist_columns(
            tile.b, tile.h, kv_idx, tile.rows, inputs.of_score, inputs.of_mask, True, PARTIAL, HOW
        )
        columns = Columns(columns.score, masked.mask)
    return columns


@gluon.jit
def wait_for_qk(s, ops, FIRST: gl.constexpr, HOW: gl.constexpr):
    """Wait for S. The P V of the block before may go on; but at the first block of a tile with
    HOW.early_q_release it was issued before S."""
    if HOW.q_in_registers:  # The registers of Q, or of the slope, stay as they are until then.
        return wgmma_wait((s,), ops.q[0], len(ops.v))[0]
    elif len(ops.slope) > 0:
        return wgmma_wait((s,), ops.slope[0], len(ops.v))[0]
    else:
        return warpgroup_mma_wait(0 if HOW.early_q_release and FIRST else len(ops.v), deps=[s])


@gluon.jit
def score_block(
    s, ops, tile, columns, first, n, of_score, MASKED: gl.constexpr, PARTIAL: gl.constexpr,
    SCORE: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Apply score and mask. **Returns:** T in some unit, less `by_row`, and -inf where the mask
    does not keep a pair; the unit over log 2; S; and `by_row` over log 2, of an affine score."""
    COLUMNS: gl.constexpr = s.shape[1]
    scale, at, _, _, of_mask = tile.inputs
    span = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, acc_layout(COLUMNS)))
    live = n + span < tile.kv_len
    kv_idx = positions(at.kv_pos, at.kv_stride, first, tile.batch, n, span, tile.kv_len, HOW)
    # Plus an opaque 0: or LLVM would keep the distances of all pairs in registers.
    q_idx = row_vector(tile.q_idx + ((n + tile.kv_len) >> 31), COLUMNS)
    of_rows = tile.rows
    rows = Rows(
        rows_for_width(of_rows.score, COLUMNS), rows_for_width(of_rows.mask, COLUMNS), of_rows.bias
    )
    if HOW.affine is None:
        t, unit, s = apply_score(
            s, scale, tile.b, tile.h, q_idx[:, None], kv_idx[None, :], of_score,
            SCORE, HOW.positive_scale,
        )  # fmt: skip
        by_row = ()
    else:
        captured = affine_operands(of_score, rows, columns, True, COLUMNS, HOW)
        t, unit, by_row = affine_scores(
            s, scale, tile.b, tile.h, q_idx, kv_idx, tile.first_q, first, captured,
            len(ops.slope) > 0, HOW,
        )  # fmt: skip
        s = s * scale
    if PARTIAL and MASK is not None:
        t = apply_mask(
            t, tile.b, tile.h, q_idx, kv_idx, first, rows, columns, of_mask, MASKED, MASK, HOW
        )
    if PARTIAL and not HOW.even_kv:
        t = gl.where(live[None, :], t, float("-inf"))
    return t, unit, s, by_row


@gluon.jit
def online_softmax(
    t, unit, s, by_row, state, MAYBE_FIRST: gl.constexpr, HOW: gl.constexpr
):  # fmt: skip
    """P of a block in float32, the new m, l and max_s, and what O and l are rescaled by. What is
    `MAYBE_FIRST` of a tile forgets the previous one, if `state.is_first`.

    - `t`, `unit`, `s`, `by_row`: from `score_block`.
    """
    COLUMNS: gl.constexpr = t.shape[1]
    # T of an affine score is kept less a row vector.
    BY_ROW: gl.constexpr = HOW.affine is not None and not HOW.abs_only
    m, l, max_s = state.m, state.l, state.max_s
    if MAYBE_FIRST:
        m = gl.where(state.is_first > 0, float("-inf"), m)
        l = gl.where(state.is_first > 0, 0.0, l)
        max_s = gl.where(state.is_first > 0, float("-inf"), max_s)
    if HOW.track_max:  # of S, where T says that the pair is kept
        whole = t + by_row[:, None] if BY_ROW else t
        seen = gl.where(whole == float("-inf"), float("-inf"), s)
        max_s = gl.maximum(max_s, row_vector(gl.max(seen, 1), HOW.block))
    m_before = m
    m_block = gl.max(t, 1) * unit
    m = gl.maximum(m, row_vector(m_block + by_row if BY_ROW else m_block, HOW.block))
    # A query that has seen nothing yet has m = -inf, and needs exp2(-inf - 0) = 0.
    base = gl.where(m == float("-inf"), 0.0, m)
    less = row_vector(base, COLUMNS)
    if BY_ROW:  # Rounding may leave it below the largest T: no exponential is to exceed 1.
        less = gl.maximum(less - by_row, m_block)
    e = gl.exp2(t * unit - less[:, None])
    rescale = gl.exp2(m_before - base)
    l = l * rescale + row_vector(gl.sum(e, 1), HOW.block)
    return e, m, l, max_s, rescale
