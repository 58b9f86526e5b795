"""The software-pipelined main loop of bwd/kernel.py. It keeps the tensor cores busy while a
consumer computes P: dK and dQ of a block of queries come one block late, with S of the next. For
each block, it

1. issues Sᵀ, dK of the block before, and, when both consumers have stored that block's dSᵀ, its
   tile of dQ
2. computes Pᵀ as soon as Sᵀ is there; stores dQ
3. issues dPᵀ and dV
4. computes dSᵀ and stores it; as a left operand of the next dK it stays in registers, too

Where a mask or a score needs registers, nothing is left in flight while P is computed. Each work
tile drains the pipeline. It is not for scores that read a number for each pair or along diagonals,
or have gradients of their own, nor, with blocks of 128, for masks that read one: there are no
registers.
"""

from ..device.gluon_compat import fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from ..device.mma import (
    ROWS,
    acc_layout,
    at_stage,
    lhs_layout,
    materialize,
    wgmma_ab,
    wgmma_abt,
)
from ..device.pipeline import (
    RingCursor,
    advance,
    consumer_release,
    consumer_wait,
    producer_commit,
    step_back,
)
from .common import (
    DO_STAGES,
    added_to_dp,
    hoist_queries,
    issue_dp,
    opaque_zero,
    probabilities,
    widen,
)
from .context import Cursors, PipelinedState
from .dq import issue_dq, store_dq


@gluon.jit
def prologue(dk, dv, cursors, k_smem, CONFIG: gl.constexpr):
    """Return the state before the first block of a work tile: dS is 0, as that of no block."""
    zero = gl.full([ROWS, CONFIG.block], 0.0, gl.float32, layout=acc_layout(CONFIG.block))
    ds16 = gl.convert_layout(zero.to(k_smem[0].dtype), lhs_layout(k_smem[0].shape[2]))
    return PipelinedState(ds16, gl.to_tensor(0), dk, dv, cursors.q, cursors.dout, cursors.dq)


@gluon.jit
def mma_q_block_pipelined(
    state, context, n, has_next, PARTIAL: gl.constexpr,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute the block of queries from n on, except for its dK and dQ; and those of the block
    before."""
    smem, rings, pairs, ring = context.smem, context.rings, context.pairs, context.dq_ring
    inputs, input_rings = smem.inputs, rings.inputs
    ds16, has_previous = state.ds, state.has_previous
    q_at, dout_at, dq_at = state.q_at, state.dout_at, state.dq_at
    W: gl.constexpr = CONFIG.consumer
    BLOCK: gl.constexpr = CONFIG.block
    cols: gl.constexpr = gl.SliceLayout(0, acc_layout(BLOCK))
    dtype: gl.constexpr = inputs.v.dtype
    zero_tile = gl.full([ROWS, BLOCK], 0.0, gl.float32, layout=acc_layout(BLOCK))
    zero = opaque_zero(n, context.share)
    # There are registers for products in flight while P is computed.
    OVERLAPS: gl.constexpr = (not PARTIAL) and (DERIVATIVE is None or CONFIG.affine is not None)
    # Without a block before, dK is 0 times these queries, and dQ, of whatever is in dS's memory, is
    # not committed.
    has_before = has_previous > 0
    q_before, ds_before = step_back(q_at, CONFIG.stages), step_back(dout_at, DO_STAGES)

    queries = hoist_queries(n, pairs, PARTIAL, CONFIG)
    consumer_wait(input_rings.q, q_at)
    if OVERLAPS:
        lse = inputs.lse.index(q_at.stage).load(cols)
    s = wgmma_abt(at_stage(inputs.k, zero + W), at_stage(inputs.q, q_at.stage), zero_tile)
    q_stage = gl.where(has_before, q_before.stage, q_at.stage)
    dk = wgmma_ab(state.dk, ds16, at_stage(inputs.q, q_stage))
    consumer_wait(rings.ds, ds_before, has_before)
    dq = issue_dq(smem.ds, ds_before.stage, inputs.k, zero, W)
    if not OVERLAPS:
        s, dk0, dq, _ = warpgroup_mma_wait(0, deps=[s, dk[0], dq, ds16])
        consumer_release(input_rings.q, q_before, has_before, CONFIG.q_barriers())
        store_dq(dq, smem.dq[0].index(W), ring[0], dq_at)
        lse = inputs.lse.index(q_at.stage).load(cols)
    else:
        s = warpgroup_mma_wait(2, deps=[s])
    p, log2_p, p_dscore, _, _ = probabilities(
        s, lse, n, zero, queries, pairs, PARTIAL, DERIVATIVE, MASK, CONFIG
    )
    p16 = materialize(p.to(dtype))
    if CONFIG.constant_dscore:  # noqa: SIM108
        p_dscore = p16
    else:
        p_dscore = materialize(p_dscore.to(dtype))
    if OVERLAPS:
        dk0, dq, _ = warpgroup_mma_wait(0, deps=[dk[0], dq, ds16])
        consumer_release(input_rings.q, q_before, has_before, CONFIG.q_barriers())
        store_dq(dq, smem.dq[0].index(W), ring[0], dq_at)

    consumer_wait(input_rings.dout, dout_at)
    added = added_to_dp(inputs, dout_at.stage, log2_p, zero_tile, CONFIG)
    dp = issue_dp(inputs.v.index(zero + W), inputs.dout.index(dout_at.stage), added, True)
    p16 = gl.convert_layout(p16, lhs_layout(inputs.v.shape[2]))
    dv = warpgroup_mma(p16, inputs.dout.index(dout_at.stage), state.dv, is_async=True)
    fence_async_shared()
    producer_commit(ring[0], dq_at, has_before)

    dp = warpgroup_mma_wait(1, deps=[dp])
    ds16 = (widen(p_dscore, CONFIG.constant_dscore) * dp).to(dtype)
    # In as many stages as dout; what fills one twice has been read in between.
    smem.ds.index(dout_at.stage * 2 + W).store(ds16)
    fence_async_shared()
    producer_commit(rings.ds, dout_at)
    ds16 = gl.convert_layout(ds16, lhs_layout(inputs.k[0].shape[2]))
    dv, _ = warpgroup_mma_wait(0, deps=[dv, p16])
    consumer_release(input_rings.dout, dout_at, True, CONFIG.do_barriers())
    return PipelinedState(
        ds16, gl.to_tensor(1), (dk0,), dv, advance(q_at, CONFIG.stages),
        advance(dout_at, DO_STAGES),
        RingCursor(dq_at.stage, dq_at.phase ^ has_previous),
    )  # fmt: skip


@gluon.jit
def drain(state, smem, rings, ring, zero, W: gl.constexpr, CONFIG: gl.constexpr):
    """Compute dK and dQ of the last block of a work tile. **Returns:** dK, dV and the cursors."""
    inputs, input_rings = smem.inputs, rings.inputs
    q_before, ds_before = step_back(state.q_at, CONFIG.stages), step_back(state.dout_at, DO_STAGES)
    dk = wgmma_ab(state.dk, state.ds, at_stage(inputs.q, q_before.stage))
    consumer_wait(rings.ds, ds_before)
    dq = issue_dq(smem.ds, ds_before.stage, inputs.k, zero, W)
    dk0, dq, _ = warpgroup_mma_wait(0, deps=[dk[0], dq, state.ds])
    consumer_release(input_rings.q, q_before, True, CONFIG.q_barriers())
    store_dq(dq, smem.dq[0].index(W), ring[0], state.dq_at)
    fence_async_shared()
    producer_commit(ring[0], state.dq_at)
    return (dk0,), state.dv, Cursors(state.q_at, state.dout_at, advance(state.dq_at, 1))
