"""The backward kernel: five products in one pass over the live tiles of 128 keys.

With P = exp(T − lse), T = score(S), S = scale q kᵀ (the Triton backend's kernel_backward.py has the
same mathematics):

    Sᵀ = k qᵀ;  Pᵀ = exp2(Tᵀ − lse);  dv += Pᵀ dout
    dPᵀ = v doutᵀ;  dSᵀ = Pᵀ∘(dPᵀ − delta − dentropy log Pᵀ)∘score'(Sᵀ);  dk += dSᵀ q
    dq += dS k

(Dao et al. 2022, arXiv 2205.14135, algorithm 4; Shah et al. 2024, arXiv 2407.08608, section 3.)

The kernel is persistent. A CTA has these partitions:

- The **producer**, a warp, takes a work tile (128 keys of a head) from a global counter, longest
  tile column first, writes down what it is, and loads by TMA the keys, the values, and the queries
  that see them (bwd/producer.py).
- Two **consumers**, a warpgroup each, own 64 of the keys. Their dK and dV stay in registers, and so
  do Pᵀ and dSᵀ as left operands.
- Two **dQ reduce warps**, one for each consumer. dQ is a sum over work tiles. A consumer computes a
  tile of it from all 128 keys, and its reduce warp has TMA add that to dQ-accum: float32 in global
  memory, in the order of the registers (bwd/dq_reduce.py). A semaphore fixes the order of the sum
  where it shall be the same every time (bwd/dq_semaphore.py).
- A warp that zeroes dQ-accum (bwd/dq_zero.py).

`postprocess_dq` makes dQ of dQ-accum afterwards. dK and dV leave through the reduce warps as well
(bwd/epilogue.py). A block has 64 queries, of which a consumer's tile of dQ is half of the columns.
At width 64 it has 128 queries, where registers allow it, and the tile is half of the queries: of
what shared memory and the L2 cache move per pair, that is a fifth and half less.

The order of the products of a block depends on what registers are left. Where they allow it, dK and
dQ are software-pipelined: they come with the next block (bwd/mainloop.py). Here, where they come at
once, a consumer

1. stores dQ of the block before; issues dPᵀ
2. computes Pᵀ meanwhile (Sᵀ came with the block before); issues dV
3. computes dSᵀ meanwhile, stores it, issues dK
4. when both consumers have stored dSᵀ: issues its tile of dQ, and Sᵀ of the next block

Of many short heads or documents a CTA takes whole ones, and there is no `postprocess_dq`
(bwd/segments.py). Widths 129 to 192 (MLA) are two pieces, 128 + 64 columns. dK and dV then fill two
thirds of a consumer's registers: P is kept as it was rounded, dP comes after P, and dQ in two
pieces, one after the other.

Shared stores stand before the products that they would otherwise queue behind, and no product is in
flight over the loop's end, which the assembler would serialise.
"""

from .. import config
from ..device.dropout import drop
from ..device.gluon_compat import fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from ..device.mma import (
    ROWS,
    acc_layout,
    alloc_stages,
    at_stage,
    lhs_layout,
    log2_of,
    materialize,
    matrix_layout,
    pieces,
    wgmma_ab,
    wgmma_abt,
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
    producer_acquire,
    producer_commit,
    stage_of,
)
from ..device.relative_bias import add_bias_grad, locate_bias
from ..device.work_tile import (
    BWD_FIELDS,
    ONE_WARP,
    WARPGROUP,
    WORK_STAGES,
    read_q_runs,
    visit_q_blocks,
    work_buffer,
)
from .common import (
    DO_STAGES,
    added_to_dp,
    captured_values_grads,
    draw_bits,
    hoist_keys,
    hoist_queries,
    issue_dp,
    kept_pairs,
    locate_keys,
    opaque_zero,
    probabilities,
    read_key_location,
    read_key_tile,
    read_segment_visits,
    read_tile_col,
    widen,
)
from .context import (
    BwdModArgs,
    BwdRings,
    BwdSizes,
    BwdSmem,
    ConsumerOutputs,
    Cursors,
    InputDescriptors,
    InputRings,
    InputSmem,
    KeyGradOutputs,
    MainloopState,
    PairContext,
    QBlockContext,
    QueryHead,
    ReduceOutputs,
    SegmentContext,
)
from .dq import dq_buffers, dq_rings, issue_dq, issue_dq_strip, store_dq, zero_dq
from .dq_reduce import reduce_dq
from .dq_zero import work_ring, write_zeros, zero_buffer
from .epilogue import store_dkdv, store_dkdv_float32
from .mainloop import drain, mma_q_block_pipelined, prologue
from .producer import produce
from .segments import commit_dq, reduce_segments, store_gradient, store_visit

# Registers of the threads of a consumer, and of those that are one warp.
CONSUMER_REGISTERS = gl.constexpr(config.BWD_CONSUMER_REGISTERS)
MIN_REGISTERS = gl.constexpr(config.MIN_REGISTERS)


@gluon.jit(
    do_not_specialize=[
        "total", "last_columns", "heads", "group", "share", "q_len", "q_rows", "kv_len", "d_width",
        "dv_width", "score_numbers", "mask_numbers",
    ]
)  # fmt: skip
def backward(
    q0, q1, k0, k1, v, dout, lse, neg_delta, neg_dentropy,  # descriptors, of pieces
    dq_accum0, dq_accum1,  # descriptors, of pieces of a consumer's tile
    segment_dq, visit_bits, segments,  # where CTAs own segments: dQ, and of `SegmentWork`; or None
    zero_rows, zeroed_blocks,  # where dQ-accum is zeroed here: its descriptor, counters; or None
    dk0, dk1, dv,  # descriptors; None where those in float32 are given
    dk_float32, dv_float32, captured_grads,  # pointers
    bias_tables, bias_sums,  # read and summed along diagonals (device/relative_bias.py)
    counter, total,  # of work tiles, or segments: the next one (0, before and after); how many
    last_columns,  # tile columns, times CONFIG.subtiles, whose work tiles come last
    heads, group, share, q_len, q_rows, kv_len, d_width, dv_width,
    scale, rate,  # see `BwdModArgs`
    coords, dropout, schedule, semaphore,
    score_tensors, mask_tensors, score_numbers, mask_numbers,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of 128 keys from `share` query heads, and what these keys add to dQ."""
    BLOCK: gl.constexpr = CONFIG.block
    COLUMNS: gl.constexpr = k0.block_shape[3]
    STAGES: gl.constexpr = CONFIG.stages
    # Launchers take descriptors one by one, and not in tuples.
    q, k = pieces(q0, q1), pieces(k0, k1)
    dq_accum, dk = pieces(dq_accum0, dq_accum1), pieces(dk0, dk1)
    DS_STAGES: gl.constexpr = ds_stages(k)
    k_smem = alloc_stages(2, k)
    v_smem = alloc_stages(2, (v,))[0]
    q_smem = alloc_stages(STAGES, q)
    do_smem = alloc_stages(DO_STAGES, (dout,))[0]
    ds_smem = gl.allocate_shared_memory(
        v.dtype, [2 * DS_STAGES, ROWS, BLOCK], matrix_layout(v.layout)
    )
    dq_smem = dq_buffers(dq_accum)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], lse.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [DO_STAGES, BLOCK], lse.layout)
    dentropy_smem = None
    if CONFIG.entropy:
        dentropy_smem = gl.allocate_shared_memory(gl.float32, [DO_STAGES, BLOCK], lse.layout)
    work_smem = work_buffer(BWD_FIELDS)
    zeros_smem = zero_buffer(zero_rows)
    k_ring = mbarrier_ring(1, 1, 2)
    v_ring = mbarrier_ring(1, 1, 2)
    q_ring = mbarrier_ring(STAGES, 1, 2, CONFIG.q_barriers())
    do_ring = mbarrier_ring(DO_STAGES, 1, 2, CONFIG.do_barriers())
    rings = BwdRings(
        inputs=InputRings(k=k_ring, v=v_ring, q=q_ring, dout=do_ring),
        ds=ds_ring(DS_STAGES),
        dq=(dq_rings(dq_accum), dq_rings(dq_accum)),
        work=work_ring(zero_rows),
    )
    fence_barrier_init()
    input_smem = InputSmem(
        k=k_smem, v=v_smem, q=q_smem, dout=do_smem, lse=lse_smem, neg_delta=delta_smem,
        neg_dentropy=dentropy_smem,
    )  # fmt: skip
    smem = BwdSmem(inputs=input_smem, ds=ds_smem, dq=dq_smem, work=work_smem)
    sizes = BwdSizes(heads, group, share, q_len, q_rows, kv_len)
    inputs = InputDescriptors(q, k, v, dout, lse, neg_delta, neg_dentropy)
    key_grads = KeyGradOutputs(dk, dv, dk_float32, dv_float32, d_width, dv_width)
    outputs = ConsumerOutputs(key_grads, captured_grads, bias_sums, segment_dq)
    score_args, mask_args = (score_tensors, score_numbers), (mask_tensors, mask_numbers)
    mods = BwdModArgs(scale, rate, coords, dropout, bias_tables, score_args, mask_args)
    reduce_outputs = ReduceOutputs(dq_accum, dk, dv, segment_dq, segments, zero_rows, zeroed_blocks)
    gl.warp_specialize(
        [
            (consumer, (outputs, smem, rings, sizes, mods, schedule, gl.constexpr(0),
                        DERIVATIVE, SCATTER, MASK, CONFIG)),
            (consumer, (outputs, smem, rings, sizes, mods, schedule, gl.constexpr(1),
                        DERIVATIVE, SCATTER, MASK, CONFIG)),
            (produce, (inputs, smem, rings, counter, total, last_columns, visit_bits, segments,
                       sizes, schedule, CONFIG)),
            (reduce_segments if CONFIG.owns_segment else reduce_dq,
             (reduce_outputs, smem, rings, sizes, schedule, semaphore, gl.constexpr(0), CONFIG)),
            (reduce_segments if CONFIG.owns_segment else reduce_dq,
             (reduce_outputs, smem, rings, sizes, schedule, semaphore, gl.constexpr(1), CONFIG)),
            (write_zeros, (zero_rows, zeroed_blocks, zeros_smem, work_smem, rings.work, sizes,
                           total, schedule, COLUMNS, CONFIG)),
        ],
        # Warps of the partitions after the first, and registers of their threads.
        [WARPGROUP, ONE_WARP, ONE_WARP, ONE_WARP, ONE_WARP],
        [CONSUMER_REGISTERS, MIN_REGISTERS, MIN_REGISTERS, MIN_REGISTERS, MIN_REGISTERS],
    )  # fmt: skip


@gluon.jit
def ds_ring(STAGES: gl.constexpr):
    """Make the pipeline of dS. With two stages, the stage before is read when the next is written:
    both consumers have written that."""
    if STAGES == 1:
        return mbarrier_ring(1, 2, 2)
    else:
        return full_barriers(STAGES, 2)


@gluon.constexpr_function
def config_of(CONFIG, W):
    """Return the configuration for consumer W."""
    return CONFIG.for_consumer(W)


@gluon.constexpr_function
def ds_stages(k):
    """Return the stages of dS: a row in two pieces leaves memory for one."""
    return 3 - len(k)


# -- a consumer -----------------------------------------------------------------------------------


@gluon.jit
def consumer(
    outputs, smem, rings, sizes, mods, schedule, W: gl.constexpr,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of keys 64 W to 64 W + 63 of every work tile, and this consumer's tiles of
    dQ."""
    dq = zero_dq(smem.dq)
    cursors = Cursors(first_stage(), first_stage(), first_stage())
    tiles_done = gl.to_tensor(0)
    consumer_wait(rings.work, first_stage())
    consumer_release_all(CONFIG.stages, CONFIG.q_barriers())
    consumer_release_all(DO_STAGES, CONFIG.do_barriers())
    tile_col = read_tile_col(smem.work, first_stage(), WARPGROUP)
    while tile_col >= 0:
        dq, cursors = consume_tile(
            dq,
            cursors,
            tiles_done,
            outputs,
            smem,
            rings,
            sizes,
            mods,
            schedule,
            W,
            DERIVATIVE,
            SCATTER,
            MASK,
            CONFIG,
        )
        consumer_release(rings.work, stage_of(tiles_done, WORK_STAGES))
        tiles_done += 1
        consumer_wait(rings.work, stage_of(tiles_done, WORK_STAGES))
        tile_col = read_tile_col(smem.work, stage_of(tiles_done, WORK_STAGES), WARPGROUP)
    if not (CONFIG.pipelined or CONFIG.owns_segment):
        LAST: gl.constexpr = len(smem.dq) - 1
        store_dq(dq, smem.dq[LAST].index(W), rings.dq[W][LAST], cursors.dq)
        fence_async_shared()
        producer_commit(rings.dq[W][LAST], cursors.dq)


@gluon.jit
def consume_tile(
    dq, cursors, tiles_done, outputs, smem, rings, sizes, mods, schedule, W: gl.constexpr,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute a work tile, after `tiles_done` others. `dq` is the last piece of dQ before it, still
    to be stored. **Returns:** that of this work tile, and the cursors."""
    inputs, input_rings = smem.inputs, rings.inputs
    tile = read_key_tile(smem.work, stage_of(tiles_done, WORK_STAGES), WARPGROUP)
    first_key = tile.first_key + W * ROWS
    live, kv_idx, first_kv = locate_keys(first_key, tile.b, mods.coords, sizes.kv_len, CONFIG)
    dk = zero_acc(ROWS, inputs.k)
    dv = zero_acc(ROWS, (inputs.v,))[0]
    consumer_wait(input_rings.k, stage_of(tiles_done, 1))
    if CONFIG.pipelined:
        state = prologue(dk, dv, cursors, inputs.k, CONFIG)
    else:
        zero_tile = gl.full([ROWS, CONFIG.block], 0.0, gl.float32, layout=acc_layout(CONFIG.block))
        consumer_wait(input_rings.q, cursors.q)
        s = wgmma_abt(at_stage(inputs.k, W), at_stage(inputs.q, cursors.q.stage), zero_tile)
        s = warpgroup_mma_wait(0, deps=[s])
        state = MainloopState(
            s=s, dq=dq, visit=gl.to_tensor(0), dk=dk, dv=dv, q_at=cursors.q, dout_at=cursors.dout,
            dq_at=cursors.dq,
        )  # fmt: skip
    if CONFIG.owns_segment:
        visits = read_segment_visits(smem.work, stage_of(tiles_done, WORK_STAGES), WARPGROUP)
        segment = SegmentContext(outputs.segment_dq, visits, mods.rate)
    else:
        segment = SegmentContext(outputs.segment_dq, (), mods.rate)
    consumer_wait(input_rings.v, stage_of(tiles_done, 1))
    runs = read_q_runs(smem.work, stage_of(tiles_done, WORK_STAGES), schedule, WARPGROUP, CONFIG)
    # The number of the consumer goes with its configuration: in a tuple it would be no constexpr.
    CONFIG_W: gl.constexpr = config_of(CONFIG, W)
    for n in range(sizes.share):
        head = QueryHead(tile.h + n, tile.b)
        hoisted = hoist_keys(head, kv_idx, first_key, mods, CONFIG)
        pairs = PairContext(head, kv_idx, first_kv, live, hoisted, mods, sizes.q_len)
        bias_sums = locate_bias(outputs.bias_sums, head.b, head.h, first_key)
        context = QBlockContext(
            smem, rings, rings.dq[W], pairs, outputs.captured_grads, bias_sums, sizes.share, segment
        )
        state = visit_q_blocks(
            state, context, schedule, tile.tile_col, runs, sizes.q_len, sizes.share - 1 - n,
            mma_q_block_pipelined if CONFIG.pipelined else mma_q_block,
            DERIVATIVE, SCATTER, MASK, CONFIG_W,
        )  # fmt: skip
    if CONFIG.pipelined:
        zero = tile.first_key >> 31  # see `opaque_zero`
        dk, dv, cursors = drain(state, smem, rings, rings.dq[W], zero, W, CONFIG)
    else:
        dk, dv = state.dk, state.dv
        dq_at = state.dq_at
        if CONFIG.owns_segment:
            ring = rings.dq[W][0]
            store_visit(state.dq, state.visit, segment, smem.dq[0].index(W), ring, dq_at)
            fence_async_shared()
            producer_commit(ring, dq_at)
            dq_at = advance(dq_at, 1)
        else:
            dq = state.dq
        cursors = Cursors(state.q_at, state.dout_at, dq_at)
    if mods.dropout is not None:
        dv = dv * mods.dropout.factor
    consumer_release(input_rings.k, stage_of(tiles_done, 1))
    consumer_release(input_rings.v, stage_of(tiles_done, 1))
    # Read again, so that they were in no registers until now.
    keys = read_key_location(smem.work, stage_of(tiles_done, WORK_STAGES), WARPGROUP)
    if outputs.key_grads.dv is None:
        store_dkdv_float32(dk, dv, outputs.key_grads, keys, sizes, mods.rate, W)
        dq_at = cursors.dq
    elif CONFIG.owns_segment:
        dq_smem, ring = smem.dq[0].index(W), rings.dq[W][0]
        dq_at = store_gradient(dv, inputs.v.index(W), dq_smem, ring, cursors.dq)
        dq_at = store_gradient(dk[0] * mods.rate, inputs.k[0].index(W), dq_smem, ring, dq_at)
    else:
        dq_at = store_dkdv(dk, dv, smem, rings.dq[W], cursors.dq, mods.rate, W)
    return dq, Cursors(cursors.q, cursors.dout, dq_at)


@gluon.jit
def mma_q_block(
    state, context, n, has_next, PARTIAL: gl.constexpr,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute the block of queries from n on. See the steps in the docstring of this file."""
    smem, rings, pairs, ring = context.smem, context.rings, context.pairs, context.dq_ring
    inputs, input_rings = smem.inputs, rings.inputs
    s, q_at, dout_at, dq_at = state.s, state.q_at, state.dout_at, state.dq_at
    W: gl.constexpr = CONFIG.consumer
    BLOCK: gl.constexpr = CONFIG.block
    DV: gl.constexpr = inputs.v.shape[2]
    WIDE: gl.constexpr = len(inputs.k) == 2
    LAST: gl.constexpr = len(smem.dq) - 1
    cols: gl.constexpr = gl.SliceLayout(0, acc_layout(BLOCK))
    dtype: gl.constexpr = inputs.v.dtype
    zero_tile = gl.full([ROWS, BLOCK], 0.0, gl.float32, layout=acc_layout(BLOCK))
    zero = opaque_zero(n, context.share)

    # A fence waits for what was read before it: what a mask needs is read after it.
    MASK_READS: gl.constexpr = PARTIAL and CONFIG.mask_pairs is not None
    if not MASK_READS:
        queries = hoist_queries(n, pairs, PARTIAL, CONFIG)
    visit = state.visit
    if CONFIG.owns_segment:
        store_visit(state.dq, visit, context.segment, smem.dq[0].index(W), ring[0], dq_at)
    else:
        store_dq(state.dq, smem.dq[LAST].index(W), ring[LAST], dq_at)
    if MASK_READS:
        dq_at, visit = commit_dq(ring[LAST], dq_at, visit, n, context.segment, CONFIG)
        queries = hoist_queries(n, pairs, PARTIAL, CONFIG)
    DROPS: gl.constexpr = pairs.mods.dropout is not None
    # The product dP starts from what is added to it.
    STARTS_FROM_ADDED: gl.constexpr = WIDE or (CONFIG.entropy and not DROPS)
    lse = inputs.lse.index(q_at.stage).load(cols)
    consumer_wait(input_rings.dout, dout_at)
    if not (CONFIG.dp_after_p or STARTS_FROM_ADDED):
        dp = issue_dp(inputs.v.index(zero + W), inputs.dout.index(dout_at.stage), zero_tile, False)
    if DROPS:
        # Over already. But ptxas moves nothing over a wait, and would do this before the product.
        consumer_wait(input_rings.dout, dout_at)
        bits = draw_bits(n, zero, pairs, CONFIG)
    if not MASK_READS:
        dq_at, visit = commit_dq(ring[LAST], dq_at, visit, n, context.segment, CONFIG)

    # P times the derivative now, so that only the product stays in registers.
    p, log2_p, p_dscore, dscore, pair_args = probabilities(
        s, lse, n, zero, queries, pairs, PARTIAL, DERIVATIVE, MASK, CONFIG
    )
    if DROPS:  # noqa: SIM108
        p16 = drop(kept_pairs(bits, n, pairs, CONFIG), p).to(dtype)
    else:
        p16 = p.to(dtype)
    if STARTS_FROM_ADDED or not CONFIG.entropy:
        added = added_to_dp(inputs, dout_at.stage, log2_p, zero_tile, CONFIG)
    if STARTS_FROM_ADDED:  # P is rounded
        p16 = materialize(p16)
        if CONFIG.constant_dscore:  # noqa: SIM108
            p_dscore = p16
        else:
            p_dscore = materialize(p_dscore.to(dtype))
        dp = issue_dp(inputs.v.index(zero + W), inputs.dout.index(dout_at.stage), added, True)
    elif CONFIG.dp_after_p:
        dp = issue_dp(inputs.v.index(zero + W), inputs.dout.index(dout_at.stage), zero_tile, False)
    p16 = gl.convert_layout(p16, lhs_layout(DV))
    dv = warpgroup_mma(p16, inputs.dout.index(dout_at.stage), state.dv, is_async=True)

    dp = warpgroup_mma_wait(1, deps=[dp])
    if DROPS:
        dp = gl.where(kept_pairs(bits, n, pairs, CONFIG), dp, 0.0) * pairs.mods.dropout.factor
        if CONFIG.entropy:  # once more, for want of registers
            added = added_to_dp(inputs, dout_at.stage, log2_of(p), zero_tile, CONFIG)
    if not STARTS_FROM_ADDED:
        dp = dp + added
    ds = widen(p_dscore, CONFIG.constant_dscore) * dp
    if SCATTER is not None:
        grads = captured_values_grads(p, dscore, dp, CONFIG.unbounded_dscore)
        SCATTER(context.captured_grads, grads, *pair_args, pairs.mods.score_args)
    ds16 = ds.to(dtype)
    if WIDE:
        ds_at = dq_at
        producer_acquire(rings.ds, ds_at)
    else:
        ds_at = dout_at  # in as many stages; what fills one twice has been read in between
    smem.ds.index(ds_at.stage * 2 + W).store(ds16)
    ds16 = gl.convert_layout(ds16, lhs_layout(inputs.k[0].shape[2]))
    dk = wgmma_ab(state.dk, ds16, at_stage(inputs.q, q_at.stage))
    fence_async_shared()
    producer_commit(rings.ds, ds_at)
    if WIDE:  # dS, as an operand, needs registers that dQ shall have
        dv, dk0, dk1, _, _ = warpgroup_mma_wait(0, deps=[dv, dk[0], dk[1], p16, ds16])
    else:
        dv, _ = warpgroup_mma_wait(1, deps=[dv, p16])
    consumer_release(input_rings.dout, dout_at, True, CONFIG.do_barriers())

    consumer_wait(rings.ds, ds_at)
    dq = issue_dq(smem.ds, ds_at.stage, inputs.k, zero, W)
    next_q = advance(q_at, CONFIG.stages)
    if WIDE:
        second = issue_dq_strip(smem.ds, ds_at.stage, inputs.k[1], zero, W)
        dq = warpgroup_mma_wait(2, deps=[dq])
        store_dq(dq, smem.dq[0].index(W), ring[0], dq_at)
        fence_async_shared()
        producer_commit(ring[0], dq_at)
    consumer_wait(input_rings.q, next_q, has_next)
    s = wgmma_abt(at_stage(inputs.k, zero + W), at_stage(inputs.q, next_q.stage), zero_tile)
    if SCATTER is not None:  # while these are multiplied
        add_bias_grad(context.bias_sums, n, grads, CONFIG)
    if WIDE:
        s, dq = warpgroup_mma_wait(0, deps=[s, second])
        dk = (dk0, dk1)
        consumer_release(rings.ds, ds_at)
    else:
        s, dq, dk0, _ = warpgroup_mma_wait(0, deps=[s, dq, dk[0], ds16])
        dk = (dk0,)
    consumer_release(input_rings.q, q_at, True, CONFIG.q_barriers())
    if not CONFIG.owns_segment:
        dq_at = advance(dq_at, 1)
    return MainloopState(
        s=s, dq=dq, visit=visit, dk=dk, dv=dv, q_at=next_q, dout_at=advance(dout_at, DO_STAGES),
        dq_at=dq_at,
    )  # fmt: skip
