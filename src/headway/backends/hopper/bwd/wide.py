"""The backward kernel of widths beyond 192: five products over the live tiles of 64 keys, with a
consumer for each gradient. (The mathematics is in bwd/kernel.py.)

dK and dV of 64 keys and 256 columns take all registers of one warpgroup. Here each has a warpgroup
of its own, and the third computes dQ:

- **dV**: Sᵀ = k qᵀ; Pᵀ, which it stores to shared memory; dv += Pᵀ dout
- **dK**: dPᵀ = v doutᵀ; dSᵀ = Pᵀ∘(dPᵀ − delta), in the place of Pᵀ; dk += dSᵀ q
- **dQ**: dq = dS k, which it adds to dQ-accum in global memory, straight from registers
  (bwd/wide_dq.py)

They meet only in a ring of stages for P, and so one computes exponentials while others multiply.
"""

from .. import config
from ..device.dropout import drop
from ..device.gluon_compat import (
    fence_async_shared,
    gl,
    gluon,
    reinterpret,
    tma_store,
    tma_store_wait,
    warpgroup_mma_wait,
)
from ..device.mma import (
    ROWS,
    acc_layout,
    alloc_stages,
    at_stage,
    lhs_layout,
    materialize,
    matrix_layout,
    upcast,
    wgmma_ab,
    wgmma_abt,
    wgmma_wait,
)
from ..device.pipeline import (
    MbarrierRing,
    RingCursor,
    advance,
    consumer_release,
    consumer_wait,
    fence_barrier_init,
    first_stage,
    full_barriers,
    mbarrier_ring,
    producer_acquire,
    producer_commit,
)
from ..device.relative_bias import add_bias_grad, locate_bias
from ..device.work_tile import ONE_WARP, WARPGROUP, locate_tile, visit_q_blocks
from .common import (
    DO_STAGES,
    captured_values_grads,
    draw_bits,
    hoist_keys,
    hoist_queries,
    issue_dp,
    kept_pairs,
    load_work_tile,
    locate_keys,
    opaque_zero,
    probabilities,
    store_float32,
)
from .context import (
    BwdModArgs,
    BwdSizes,
    InputDescriptors,
    InputRings,
    InputSmem,
    KeyTile,
    LoadCursors,
    PairContext,
    QueryHead,
    WideContext,
    WideRings,
    WideSmem,
    WideState,
)
from .wide_dq import P_STAGES, consume_dq

# Registers of the threads of the consumers of dK and dQ, and of the producer.
DK_REGISTERS = gl.constexpr(config.WIDE_DK_REGISTERS)
DQ_REGISTERS = gl.constexpr(config.WIDE_DQ_REGISTERS)
MIN_REGISTERS = gl.constexpr(config.MIN_REGISTERS)

_HALF = gl.constexpr(128)  # columns


@gluon.jit(
    do_not_specialize=[
        "heads", "group", "share", "q_len", "q_rows", "kv_len", "d_width", "dv_width",
        "score_numbers", "mask_numbers",
    ]
)  # fmt: skip
def backward_wide(
    q, q1, k, k1, v, dout, lse, neg_delta, neg_dentropy,  # descriptors; there are no second pieces
    dq_accum, dq_accum1,  # pointer to dQ-accum, and None
    dk, dk1, dv,  # descriptors; None where those in float32 are given
    dk_float32, dv_float32, captured_grads,  # pointers
    bias_tables, bias_sums,  # read and summed along diagonals (device/relative_bias.py)
    heads, group, share, q_len, q_rows, kv_len, d_width, dv_width,
    scale, rate,  # see `BwdModArgs`
    coords, dropout, schedule, semaphore,
    score_tensors, mask_tensors, score_numbers, mask_numbers,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of 64 keys from `share` query heads, and what these keys add to dQ."""
    BLOCK: gl.constexpr = CONFIG.block
    STAGES: gl.constexpr = CONFIG.stages
    k_smem = alloc_stages(1, (k,))
    v_smem = alloc_stages(1, (v,))[0]
    q_smem = alloc_stages(STAGES, (q,))
    do_smem = alloc_stages(DO_STAGES, (dout,))[0]
    p_smem = gl.allocate_shared_memory(v.dtype, [P_STAGES, ROWS, BLOCK], matrix_layout(v.layout))
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], lse.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [DO_STAGES, BLOCK], lse.layout)
    dentropy_smem = None
    if CONFIG.entropy:
        dentropy_smem = gl.allocate_shared_memory(gl.float32, [DO_STAGES, BLOCK], lse.layout)
    input_rings = InputRings(
        k=mbarrier_ring(1, 1, 2),  # once
        v=mbarrier_ring(1, 1, 1),  # once
        q=mbarrier_ring(STAGES, 1, 2),  # to the consumers of dV and dK
        dout=mbarrier_ring(DO_STAGES, 1, 2),  # to the consumers of dV and dK
    )
    if passes_p(SCATTER, CONFIG):
        # From the consumer of dV to that of dK; the consumer of dQ releases the stage.
        p_ring = mbarrier_ring(P_STAGES, 1, 1)
    else:  # P goes nowhere
        p_ring = MbarrierRing((), full_barriers(P_STAGES, 1).full)
    ds_ring = full_barriers(P_STAGES, 1)  # dS in the same stages
    rings = WideRings(inputs=input_rings, p=p_ring, ds=ds_ring)
    fence_barrier_init()
    input_smem = InputSmem(
        k=k_smem, v=v_smem, q=q_smem, dout=do_smem, lse=lse_smem, neg_delta=delta_smem,
        neg_dentropy=dentropy_smem,
    )  # fmt: skip
    smem = WideSmem(inputs=input_smem, p=p_smem)
    tile = KeyTile(
        *locate_tile(
            gl.program_id(0), gl.num_programs(0), 0, schedule, heads // share, CONFIG.subtiles, ROWS
        )
    )
    tile = KeyTile(tile.tile_col, tile.tile_in_head, tile.first_key, tile.h * share, tile.b)
    sizes = BwdSizes(heads, group, share, q_len, q_rows, kv_len)
    score_args, mask_args = (score_tensors, score_numbers), (mask_tensors, mask_numbers)
    mods = BwdModArgs(scale, rate, coords, dropout, bias_tables, score_args, mask_args)
    inputs = InputDescriptors((q,), (k,), v, dout, lse, neg_delta, neg_dentropy)
    gl.warp_specialize(
        [
            (consume_dv, ((dv, dv_float32, dv_width), smem, rings, tile, sizes, mods, schedule,
                          DERIVATIVE, SCATTER, MASK, CONFIG)),
            (consume_dk, ((dk, dk_float32, d_width), captured_grads, bias_sums, smem, rings, tile,
                          sizes, mods, schedule, DERIVATIVE, SCATTER, MASK, CONFIG)),
            (consume_dq, (dq_accum, smem, rings, tile, sizes, schedule, semaphore, CONFIG)),
            (produce, (inputs, input_smem, input_rings, tile, sizes, schedule, CONFIG)),
        ],
        [WARPGROUP, WARPGROUP, ONE_WARP],  # warps of the partitions after the first
        [DK_REGISTERS, DQ_REGISTERS, MIN_REGISTERS],  # registers of their threads
    )  # fmt: skip


@gluon.constexpr_function
def passes_p(SCATTER, CONFIG):
    """Return whether the consumer of dK has P from that of dV; else it computes P once more."""
    return SCATTER is None and not CONFIG.entropy


@gluon.jit
def produce(inputs, smem, rings, tile, sizes, schedule, CONFIG: gl.constexpr):
    """Load what the CTA's one work tile needs."""
    cursors = LoadCursors(first_stage(), first_stage(), first_stage())
    load_work_tile(cursors, inputs, smem, rings, tile, (), sizes, schedule, CONFIG)


# -- dV -------------------------------------------------------------------------------------------


@gluon.jit
def consume_dv(
    output, smem, rings, tile, sizes, mods, schedule,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute P and dV of the CTA's work tile."""
    inputs, input_rings = smem.inputs, rings.inputs
    keys = locate_keys(tile.first_key, tile.b, mods.coords, sizes.kv_len, CONFIG)
    zero_tile = gl.full([ROWS, CONFIG.block], 0.0, gl.float32, layout=acc_layout(CONFIG.block))
    half = gl.full([ROWS, _HALF], 0.0, gl.float32, layout=acc_layout(_HALF))
    q_at, dout_at, p_at = first_stage(), first_stage(), first_stage()
    consumer_wait(input_rings.k, RingCursor(0, 0))
    consumer_wait(input_rings.q, q_at)
    s = wgmma_abt(at_stage(inputs.k, 0), at_stage(inputs.q, 0), zero_tile)
    s = warpgroup_mma_wait(0, deps=[s])
    state = WideState(s, (half, half), q_at, dout_at, p_at)
    state = visit_heads(
        state, keys, None, (), smem, rings, tile, sizes, mods, schedule, dv_q_block, True,
        DERIVATIVE, SCATTER, MASK, CONFIG,
    )  # fmt: skip
    # In the place of the last block of dout, when both consumers have released it.
    dout_at = advance(state.dout_at, DO_STAGES)
    producer_acquire(input_rings.dout, dout_at)
    factor = 1.0 if mods.dropout is None else mods.dropout.factor
    store_gradient(state.acc, factor, output, inputs.dout, dout_at.stage, tile, sizes)


@gluon.jit
def dv_q_block(
    state, context, n, has_next, PARTIAL: gl.constexpr,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute P of the block of queries from n on, and its part of dV."""
    smem, rings, pairs = context.smem, context.rings, context.pairs
    inputs, input_rings = smem.inputs, rings.inputs
    s, q_at, dout_at, p_at = state.product, state.q_at, state.dout_at, state.p_at
    cols: gl.constexpr = gl.SliceLayout(0, acc_layout(CONFIG.block))
    zero_tile = gl.full([ROWS, CONFIG.block], 0.0, gl.float32, layout=acc_layout(CONFIG.block))
    zero = opaque_zero(n, context.share)
    lse = inputs.lse.index(q_at.stage).load(cols)
    queries = hoist_queries(n, pairs, PARTIAL, CONFIG)
    p, _, p_dscore, _, _ = probabilities(
        s, lse, n, zero, queries, pairs, PARTIAL, DERIVATIVE, MASK, CONFIG
    )
    p16 = materialize(p.to(inputs.v.dtype))
    dropped = p16
    if pairs.mods.dropout is not None:
        kept = kept_pairs(draw_bits(n, zero, pairs, CONFIG), n, pairs, CONFIG)
        dropped = materialize(drop(kept, p).to(inputs.v.dtype))
    if passes_p(SCATTER, CONFIG):
        producer_acquire(rings.p, p_at)
        if CONFIG.constant_dscore:
            smem.p.index(p_at.stage).store(p16)
        else:
            smem.p.index(p_at.stage).store(p_dscore.to(inputs.v.dtype))
        producer_commit(rings.p, p_at)
    consumer_release(input_rings.q, q_at)
    p16 = gl.convert_layout(dropped, lhs_layout(_HALF))
    consumer_wait(input_rings.dout, dout_at)
    dv = wgmma_ab(state.acc, p16, column_halves(inputs.dout, dout_at.stage))
    q_at = advance(q_at, CONFIG.stages)
    consumer_wait(input_rings.q, q_at, has_next)
    # Not both at a time: the assembler of Triton 3.9 finds no registers for it. Others multiply.
    dv = wgmma_wait(dv, p16, 0)
    s = wgmma_abt(at_stage(inputs.k, zero), at_stage(inputs.q, q_at.stage), zero_tile)
    consumer_release(input_rings.dout, dout_at)
    s = warpgroup_mma_wait(0, deps=[s])
    return WideState(s, dv, q_at, advance(dout_at, DO_STAGES), advance(p_at, P_STAGES))


# -- dK -------------------------------------------------------------------------------------------


@gluon.jit
def consume_dk(
    output, captured_grads, bias_sums, smem, rings, tile, sizes, mods, schedule,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute dS and dK of the CTA's work tile."""
    inputs, input_rings = smem.inputs, rings.inputs
    keys = locate_keys(tile.first_key, tile.b, mods.coords, sizes.kv_len, CONFIG)
    zero_tile = gl.full([ROWS, CONFIG.block], 0.0, gl.float32, layout=acc_layout(CONFIG.block))
    half = gl.full([ROWS, _HALF], 0.0, gl.float32, layout=acc_layout(_HALF))
    q_at, dout_at, p_at = first_stage(), first_stage(), first_stage()
    if not passes_p(SCATTER, CONFIG):
        consumer_wait(input_rings.k, RingCursor(0, 0))
    consumer_wait(input_rings.v, RingCursor(0, 0))
    consumer_wait(input_rings.dout, dout_at)
    dp = issue_dp(inputs.v.index(0), inputs.dout.index(0), zero_tile, False)
    dp = warpgroup_mma_wait(0, deps=[dp])
    state = WideState(dp, (half, half), q_at, dout_at, p_at)
    state = visit_heads(
        state, keys, captured_grads, bias_sums, smem, rings, tile, sizes, mods, schedule,
        dk_q_block, not passes_p(SCATTER, CONFIG) or mods.dropout is not None,
        DERIVATIVE, SCATTER, MASK, CONFIG,
    )  # fmt: skip
    # In the place of the last block of queries, when both consumers have released it.
    q_at = advance(state.q_at, CONFIG.stages)
    producer_acquire(input_rings.q, q_at)
    store_gradient(state.acc, mods.rate, output, inputs.q[0], q_at.stage, tile, sizes)


@gluon.jit
def dk_q_block(
    state, context, n, has_next, PARTIAL: gl.constexpr,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute dS of the block of queries from n on, and its part of dK."""
    smem, rings, pairs = context.smem, context.rings, context.pairs
    inputs, input_rings = smem.inputs, rings.inputs
    q_at, dout_at, p_at = state.q_at, state.dout_at, state.p_at
    cols: gl.constexpr = gl.SliceLayout(0, acc_layout(CONFIG.block))
    zero_tile = gl.full([ROWS, CONFIG.block], 0.0, gl.float32, layout=acc_layout(CONFIG.block))
    zero = opaque_zero(n, context.share)
    neg_delta = inputs.neg_delta.index(dout_at.stage).load(cols)
    dp = state.product
    if context.dropout is not None:
        kept = kept_pairs(draw_bits(n, zero, pairs, CONFIG), n, pairs, CONFIG)
        dp = gl.where(kept, dp, 0.0) * context.dropout.factor
    dp = dp + neg_delta[None, :]
    if CONFIG.entropy:
        neg_dentropy = inputs.neg_dentropy.index(dout_at.stage).load(cols)
    consumer_release(input_rings.dout, dout_at)
    consumer_wait(input_rings.q, q_at)
    if passes_p(SCATTER, CONFIG):
        consumer_wait(rings.p, p_at)
        p_dscore = upcast(smem.p.index(p_at.stage).load(acc_layout(CONFIG.block)))
    else:  # P once more, for all that it is multiplied with
        s = wgmma_abt(at_stage(inputs.k, zero), at_stage(inputs.q, q_at.stage), zero_tile)
        queries = hoist_queries(n, pairs, PARTIAL, CONFIG)
        s = warpgroup_mma_wait(0, deps=[s])
        lse = inputs.lse.index(q_at.stage).load(cols)
        p, log2_p, p_dscore, dscore, pair_args = probabilities(
            s, lse, n, zero, queries, pairs, PARTIAL, DERIVATIVE, MASK, CONFIG
        )
        if CONFIG.entropy:
            dp = dp + neg_dentropy[None, :] * log2_p
        if SCATTER is not None:
            grads = captured_values_grads(p, dscore, dp, CONFIG.unbounded_dscore)
            SCATTER(context.captured_grads, grads, *pair_args, pairs.mods.score_args)
            add_bias_grad(context.bias_sums, n, grads, CONFIG)
        producer_acquire(rings.p, p_at)
    ds16 = (p_dscore * dp).to(inputs.v.dtype)
    smem.p.index(p_at.stage).store(ds16)
    ds16 = gl.convert_layout(ds16, lhs_layout(_HALF))
    fence_async_shared()
    producer_commit(rings.ds, p_at)
    dk = wgmma_ab(state.acc, ds16, column_halves(inputs.q[0], q_at.stage))
    dout_at = advance(dout_at, DO_STAGES)
    consumer_wait(input_rings.dout, dout_at, has_next)
    dp = issue_dp(inputs.v.index(zero), inputs.dout.index(dout_at.stage), zero_tile, False)
    dp, dk0, dk1, _ = warpgroup_mma_wait(0, deps=[dp, dk[0], dk[1], ds16])
    consumer_release(input_rings.q, q_at)
    return WideState(dp, (dk0, dk1), advance(q_at, CONFIG.stages), dout_at, advance(p_at, P_STAGES))


# -- dV and dK ------------------------------------------------------------------------------------


@gluon.jit
def visit_heads(
    state, keys, captured_grads, bias_sums, smem, rings, tile, sizes, mods, schedule,
    BODY: gl.constexpr, NEEDS_P: gl.constexpr,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Call `BODY` for every live block of queries of every head. `keys`: from `locate_keys`;
    `NEEDS_P`: whether it computes P, or what dropout keeps of it."""
    live, kv_idx, first_kv = keys
    for n in range(sizes.share):
        head = QueryHead(tile.h + n, tile.b)
        if NEEDS_P:
            hoisted = hoist_keys(head, kv_idx, tile.first_key, mods, CONFIG)
            pairs = PairContext(head, kv_idx, first_kv, live, hoisted, mods, sizes.q_len)
        else:
            pairs = None
        sums = locate_bias(bias_sums, head.b, head.h, tile.first_key)
        context = WideContext(smem, rings, pairs, mods.dropout, sizes.share, captured_grads, sums)
        state = visit_q_blocks(
            state, context, schedule, tile.tile_col, (), sizes.q_len, sizes.share - 1 - n, BODY,
            DERIVATIVE, SCATTER, MASK, CONFIG,
        )  # fmt: skip
    return state


@gluon.jit
def column_halves(smem, stage):
    """Return the halves of the columns of one stage. (A product of 256 columns has more registers
    than the kernel starts with, which the assembler refuses.)"""
    x = reinterpret(smem, smem.dtype, [2 * smem.shape[0], ROWS, _HALF], matrix_layout(smem.layout))
    return x.index(2 * stage), x.index(2 * stage + 1)


@gluon.jit
def store_gradient(acc, factor, output, smem, stage, tile, sizes):
    """Store dK or dV, through a stage of shared memory; or in float32, straight from registers.

    - `output`: descriptor, or None and a pointer; and the width.
    """
    desc, ptr, width = output
    if desc is not None:
        halves = column_halves(smem, stage)
        for n in gl.static_range(2):
            halves[n].store((acc[n] * factor).to(smem.dtype))
        fence_async_shared()
        tma_store(desc, [tile.b, tile.h // sizes.share, tile.first_key, 0], smem.index(stage))
        tma_store_wait(0)
    else:
        heads = sizes.heads // sizes.share
        base = (gl.cast(tile.b, gl.int64) * heads + tile.h // sizes.share) * sizes.kv_len
        for n in gl.static_range(2):
            store_float32(
                acc[n] * factor, ptr + base * width, tile.first_key, sizes.kv_len, width,
                n * _HALF,
            )  # fmt: skip
