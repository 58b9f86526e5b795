"""A block of queries in bwd/kernel.py, in the order that keeps the tensor cores busy while a
consumer works out P: dk and dq of a block come **lagged**, with S of the next. Per block, it

1. issues Sᵀ, dk of the block before, and, when both have stored that block's dSᵀ, its part of dq
2. computes Pᵀ as soon as Sᵀ is there; hands over dq
3. issues dPᵀ and dv
4. computes dSᵀ and stores it; as a left factor of the next dk it stays in registers, too

Where a mask or a score needs registers, nothing is left in flight while P is computed. Nothing lags
from rank to rank. It is not for scores that read a number for each pair or along diagonals, or have
gradients of their own, nor, with blocks of 128, for masks that read one: there are no registers.
"""

from ..device.gluon_compat import fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from ..device.mma import (
    ROWS,
    acc_layout,
    at_stage,
    broadcast_row,
    lhs_layout,
    materialize,
    wgmma_ab,
    wgmma_abt,
)
from ..device.pipeline import advance, consumer_release, consumer_wait, previous, producer_commit
from .common import DO_STAGES, factors, of_queries, outer_v, probabilities
from .dq import part, store_dq


@gluon.jit
def before_first(acc_k, acc_v, ats, k_smem, HOW: gl.constexpr):
    """Before the first block of a rank: dS of none, which is 0, and how many there were."""
    q_at, do_at, dq_at = ats
    zero = gl.full([ROWS, HOW.block], 0.0, gl.float32, layout=acc_layout(HOW.block))
    ds16 = gl.convert_layout(zero.to(k_smem[0].dtype), lhs_layout(k_smem[0].shape[2]))
    return ds16, gl.to_tensor(0), acc_k, acc_v, q_at, do_at, dq_at


@gluon.jit
def attend_pipelined(
    state, context, n, more, PARTIAL: gl.constexpr,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """One block of queries, from n on, but for its dk and dq; and those of the block before."""
    ds16, begun, acc_k, acc_v, q_at, do_at, dq_at = state
    (
        smem, rings, ring, of_head, kv_idx, live, rows, scale, coords, of_score, of_mask, _grads,
        _sums, q_len, opaque, _whole,
    ) = context  # fmt: skip
    W: gl.constexpr = HOW.consumer
    inputs, ds_smem, dq_smem, _ = smem
    k_smem, v_smem, q_smem, do_smem, lse_smem, dlt_smem = inputs
    of_inputs, ds_ring, _, _ = rings
    _, _, q_ring, do_ring = of_inputs
    BLOCK: gl.constexpr = HOW.block
    cols: gl.constexpr = gl.SliceLayout(0, acc_layout(BLOCK))
    dtype: gl.constexpr = v_smem.dtype
    zero = gl.full([ROWS, BLOCK], 0.0, gl.float32, layout=acc_layout(BLOCK))
    z = (n + opaque) >> 30  # always 0: see bwd/kernel.py
    FREE: gl.constexpr = (not PARTIAL) and (DERIVATIVE is None or HOW.affine is not None)
    # Of no block before, dk is 0 times these queries, and dq, of what lies there, is not published.
    lags = begun > 0
    q_before, ds_before = previous(q_at, HOW.stages), previous(do_at, DO_STAGES)

    columns = of_queries(n, of_head, rows, q_len, coords, of_score, of_mask, PARTIAL, HOW)
    consumer_wait(q_ring, q_at)
    if FREE:
        lse = lse_smem.index(q_at[0]).load(cols)
    s = wgmma_abt(at_stage(k_smem, z + W), at_stage(q_smem, q_at[0]), zero)
    dk = wgmma_ab(acc_k, ds16, at_stage(q_smem, gl.where(lags, q_before[0], q_at[0])))
    consumer_wait(ds_ring, ds_before, lags)
    dq = part(ds_smem, ds_before[0] * 2, k_smem, z, W)
    if not FREE:
        s, acc_k0, dq, _ = warpgroup_mma_wait(0, deps=[s, dk[0], dq, ds16])
        consumer_release(q_ring, q_before, lags, HOW.q_barriers())
        store_dq(dq, dq_smem[0].index(W), ring[0], dq_at)
        lse = lse_smem.index(q_at[0]).load(cols)
    else:
        s = warpgroup_mma_wait(2, deps=[s])
    p, by_s, _, _ = probabilities(
        s, lse, n, z, kv_idx, live, of_head, rows, columns, q_len, scale, coords, of_score, of_mask,
        PARTIAL, DERIVATIVE, MASK, HOW,
    )  # fmt: skip
    p16 = materialize(p.to(dtype))
    if HOW.constant_dscore:  # noqa: SIM108
        by_s = p16
    else:
        by_s = materialize(by_s.to(dtype))
    if FREE:
        acc_k0, dq, _ = warpgroup_mma_wait(0, deps=[dk[0], dq, ds16])
        consumer_release(q_ring, q_before, lags, HOW.q_barriers())
        store_dq(dq, dq_smem[0].index(W), ring[0], dq_at)

    consumer_wait(do_ring, do_at)
    less_delta = broadcast_row(dlt_smem.index(do_at[0]).load(cols), zero)
    dp = outer_v(v_smem.index(z + W), do_smem.index(do_at[0]), less_delta, True)
    p16 = gl.convert_layout(p16, lhs_layout(v_smem.shape[2]))
    dv = warpgroup_mma(p16, do_smem.index(do_at[0]), acc_v, is_async=True)
    fence_async_shared()
    producer_commit(ring[0], dq_at, lags)

    e = warpgroup_mma_wait(1, deps=[dp])
    ds16 = (factors(by_s, HOW.constant_dscore) * e).to(dtype)
    # In as many stages as dout; what fills one twice has been read in between.
    ds_smem.index(do_at[0] * 2 + W).store(ds16)
    fence_async_shared()
    producer_commit(ds_ring, do_at)
    ds16 = gl.convert_layout(ds16, lhs_layout(k_smem[0].shape[2]))
    acc_v, _ = warpgroup_mma_wait(0, deps=[dv, p16])
    consumer_release(do_ring, do_at, True, HOW.do_barriers())
    return (
        ds16, gl.to_tensor(1), (acc_k0,), acc_v,
        advance(q_at, HOW.stages), advance(do_at, DO_STAGES),
        (dq_at[0], dq_at[1] ^ begun),
    )  # fmt: skip


@gluon.jit
def after_last(state, smem, rings, ring, z, W: gl.constexpr, HOW: gl.constexpr):
    """dk and dq of the last block of a rank. **Returns:** dk, dv and the cursors."""
    ds16, _, acc_k, acc_v, q_at, do_at, dq_at = state
    inputs, ds_smem, dq_smem, _ = smem
    k_smem, _, q_smem, _, _, _ = inputs
    of_inputs, ds_ring, _, _ = rings
    _, _, q_ring, _ = of_inputs
    q_before, ds_before = previous(q_at, HOW.stages), previous(do_at, DO_STAGES)
    dk = wgmma_ab(acc_k, ds16, at_stage(q_smem, q_before[0]))
    consumer_wait(ds_ring, ds_before)
    dq = part(ds_smem, ds_before[0] * 2, k_smem, z, W)
    acc_k0, dq, _ = warpgroup_mma_wait(0, deps=[dk[0], dq, ds16])
    consumer_release(q_ring, q_before, True, HOW.q_barriers())
    store_dq(dq, dq_smem[0].index(W), ring[0], dq_at)
    fence_async_shared()
    producer_commit(ring[0], dq_at)
    return (acc_k0,), acc_v, q_at, do_at, advance(dq_at, 1)
