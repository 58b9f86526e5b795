"""The backward kernel of widths beyond 192: five products over the live tiles of 64 keys, with a
consumer for each gradient. (The mathematics is in bwd/kernel.py.)

dk and dv of 64 keys and 256 columns take all registers of one warpgroup. Here each has a warpgroup
of its own, and the third makes dq:

- **values**: Sᵀ = k qᵀ; Pᵀ, which it puts into shared memory; dv += Pᵀ dout
- **keys**: dPᵀ = v doutᵀ; dSᵀ = Pᵀ∘(dPᵀ − delta), in the place of Pᵀ; dk += dSᵀ q
- **queries**: dq = dS k, which it adds to float32 in global memory, straight from registers

They meet only in a ring of places for P, and so one computes exponentials while others multiply.
"""

from ..device.gluon_compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
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
    positions,
    upcast,
    wgmma_ab,
    wgmma_abt,
    wgmma_wait,
)
from ..device.pipeline import (
    Cursor,
    Ring,
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
from ..device.work_tile import locate_tile, visit_q_blocks
from .common import DO_STAGES, load, of_keys, of_queries, others, outer_v, probabilities, write
from .wide_dq import P_STAGES, queries

_HALF = gl.constexpr(128)


@gluon.jit(
    do_not_specialize=[
        "heads", "group", "share", "q_len", "q_rows", "kv_len", "d_width", "dv_width",
        "score_numbers", "mask_numbers",
    ]
)  # fmt: skip
def backward_wide(
    q, q1, k, k1, v, dout, lse, less_delta,  # descriptors; there are no second pieces
    dq, dq1,  # pointer to the parts, and None
    dk, dk1, dv,  # descriptors; None where the wide ones are given
    wide_dk, wide_dv, grads,  # pointers
    bands, sums,  # what is read along diagonals, and added up (device/relative_bias.py)
    heads, group, share, q_len, q_rows, kv_len, d_width, dv_width, scale, rate, coords, walk, turns,
    score_tensors, mask_tensors, score_numbers, mask_numbers,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """dk and dv of 64 keys from `share` query heads, and what they add to dq."""
    BLOCK: gl.constexpr = HOW.block
    STAGES: gl.constexpr = HOW.stages
    k_smem = alloc_stages(1, (k,))
    v_smem = alloc_stages(1, (v,))[0]
    q_smem = alloc_stages(STAGES, (q,))
    do_smem = alloc_stages(DO_STAGES, (dout,))[0]
    p_smem = gl.allocate_shared_memory(v.dtype, [P_STAGES, ROWS, BLOCK], matrix_layout(v.layout))
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], lse.layout)
    dlt_smem = gl.allocate_shared_memory(gl.float32, [DO_STAGES, BLOCK], lse.layout)
    of_inputs = (
        mbarrier_ring(1, 1, 2),  # keys, once
        mbarrier_ring(1, 1, 1),  # values, once
        mbarrier_ring(STAGES, 1, 2),  # queries and lse, for values and keys
        mbarrier_ring(DO_STAGES, 1, 2),  # dout and -delta, for values and keys
    )
    if SCATTER is None:
        p_ring = mbarrier_ring(
            P_STAGES, 1, 1
        )  # P, from values to keys; queries let go of the stage
    else:  # which nobody passes on
        p_ring = Ring((), full_barriers(P_STAGES, 1).full)
    ds_ring = full_barriers(P_STAGES, 1)  # dS in the same stages, from keys to queries
    rings = (of_inputs, p_ring, ds_ring)
    fence_barrier_init()
    inputs = (k_smem, v_smem, q_smem, do_smem, lse_smem, dlt_smem)
    smem = (inputs, p_smem)
    line, slot, first, h, b = locate_tile(
        gl.program_id(0), gl.num_programs(0), 0, walk, heads // share, HOW.subtiles, ROWS
    )
    h = h * share
    at = (line, slot, first, h, b, share, group)
    sizes = (heads, q_len, q_rows, kv_len)
    given = (scale, coords, bands, (score_tensors, score_numbers), (mask_tensors, mask_numbers))
    gl.warp_specialize(
        [
            (values, ((dv, wide_dv, dv_width), smem, rings, at, sizes, given, walk,
                      DERIVATIVE, SCATTER, MASK, HOW)),
            (keys, ((dk, wide_dk, d_width, grads, sums, rate), smem, rings, at, sizes, given, walk,
                    DERIVATIVE, SCATTER, MASK, HOW)),
            (queries, (dq, smem, rings, at, sizes, walk, turns, HOW)),
            (load_once, (((q,), (k,), v, dout, lse, less_delta), inputs, of_inputs, at, sizes, walk,
                         HOW)),
        ],
        [4, 4, 1],
        [208, 72, 24],
    )  # fmt: skip


@gluon.jit
def load_once(inputs, smem, rings, at, sizes, walk, HOW: gl.constexpr):
    """What the one rank needs."""
    load(
        (first_stage(), first_stage(), first_stage()), inputs, smem, rings, at, (), sizes, walk, HOW
    )


# -- values ---------------------------------------------------------------------------------------


@gluon.jit
def values(
    to, smem, rings, at, sizes, given, walk,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """P, and dv."""
    dv, wide_dv, width = to
    inputs, _ = smem
    k_smem, _, q_smem, do_smem, _, _ = inputs
    k_ring, _, q_ring, do_ring = rings[0]
    line, _, first, h, b, share, _ = at
    _, q_len, _, kv_len = sizes
    scale, coords, bands, of_score, of_mask = given
    live, kv_idx = tile_keys(coords, first, b, kv_len, HOW)
    zero = gl.full([ROWS, HOW.block], 0.0, gl.float32, layout=acc_layout(HOW.block))
    half = gl.full([ROWS, _HALF], 0.0, gl.float32, layout=acc_layout(_HALF))
    q_at, do_at, p_at = first_stage(), first_stage(), first_stage()
    consumer_wait(k_ring, Cursor(0, 0))
    consumer_wait(q_ring, q_at)
    s = warpgroup_mma_wait(0, deps=[wgmma_abt(at_stage(k_smem, 0), at_stage(q_smem, 0), zero)])
    state = (s, (half, half), q_at, do_at, p_at)
    for n in range(share):
        rows = of_keys(kv_idx, first, (h + n, b), coords, bands, of_score, of_mask, HOW)
        context = (smem, rings, (h + n, b), kv_idx, live, rows, scale, coords, of_score, of_mask,
                   q_len, share)  # fmt: skip
        state = visit_q_blocks(
            state, context, walk, line, (), q_len, share - 1 - n, values_block,
            DERIVATIVE, SCATTER, MASK, HOW,
        )  # fmt: skip
    s, acc, q_at, do_at, p_at = state
    # In the place of the last block of dout, when both have let go of it.
    do_at = advance(do_at, DO_STAGES)
    producer_acquire(do_ring, do_at)
    put(acc, 1.0, dv, wide_dv, width, do_smem, do_at[0], at, sizes)


@gluon.jit
def values_block(
    state, context, n, more, PARTIAL: gl.constexpr,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """P of one block of queries, from n on, and its part of dv."""
    s, acc, q_at, do_at, p_at = state
    (
        smem, rings, of_head, kv_idx, live, rows, scale, coords, of_score, of_mask, q_len, opaque,
    ) = context  # fmt: skip
    inputs, p_smem = smem
    k_smem, v_smem, q_smem, do_smem, lse_smem, _ = inputs
    of_inputs, p_ring, _ = rings
    _, _, q_ring, do_ring = of_inputs
    cols: gl.constexpr = gl.SliceLayout(0, acc_layout(HOW.block))
    zero = gl.full([ROWS, HOW.block], 0.0, gl.float32, layout=acc_layout(HOW.block))
    z = (n + opaque) >> 30  # always 0: see bwd/kernel.py
    lse = lse_smem.index(q_at[0]).load(cols)
    columns = of_queries(n, of_head, rows, q_len, coords, of_score, of_mask, PARTIAL, HOW)
    p, by_s, _, _ = probabilities(
        s, lse, n, z, kv_idx, live, of_head, rows, columns, q_len, scale, coords, of_score, of_mask,
        PARTIAL, DERIVATIVE, MASK, HOW,
    )  # fmt: skip
    p16 = materialize(p.to(v_smem.dtype))
    if SCATTER is None:
        producer_acquire(p_ring, p_at)
        if HOW.constant_dscore:
            p_smem.index(p_at[0]).store(p16)
        else:
            p_smem.index(p_at[0]).store(by_s.to(v_smem.dtype))
        producer_commit(p_ring, p_at)
    consumer_release(q_ring, q_at)
    p16 = gl.convert_layout(p16, lhs_layout(_HALF))
    consumer_wait(do_ring, do_at)
    dv = wgmma_ab(acc, p16, halves(do_smem, do_at[0]))
    q_at = advance(q_at, HOW.stages)
    mbarrier.wait(q_ring[0].index(q_at[0]), q_at[1], pred=more)
    # Not both at a time: the assembler of Triton 3.9 finds no registers for it. Others multiply.
    acc = wgmma_wait(dv, p16, 0)
    s = wgmma_abt(at_stage(k_smem, z), at_stage(q_smem, q_at[0]), zero)
    consumer_release(do_ring, do_at)
    s = warpgroup_mma_wait(0, deps=[s])
    return s, acc, q_at, advance(do_at, DO_STAGES), advance(p_at, P_STAGES)


# -- keys -----------------------------------------------------------------------------------------


@gluon.jit
def keys(
    to, smem, rings, at, sizes, given, walk,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """dS, and dk."""
    dk, wide_dk, width, grads, sums, rate = to
    inputs, _ = smem
    _, v_smem, q_smem, do_smem, _, _ = inputs
    k_ring, v_ring, q_ring, do_ring = rings[0]
    line, _, first, h, b, share, _ = at
    _, q_len, _, kv_len = sizes
    scale, coords, bands, of_score, of_mask = given
    live, kv_idx = tile_keys(coords, first, b, kv_len, HOW)
    zero = gl.full([ROWS, HOW.block], 0.0, gl.float32, layout=acc_layout(HOW.block))
    half = gl.full([ROWS, _HALF], 0.0, gl.float32, layout=acc_layout(_HALF))
    q_at, do_at, p_at = first_stage(), first_stage(), first_stage()
    if SCATTER is not None:
        consumer_wait(k_ring, Cursor(0, 0))
    consumer_wait(v_ring, Cursor(0, 0))
    consumer_wait(do_ring, do_at)
    dp = warpgroup_mma_wait(0, deps=[outer_v(v_smem.index(0), do_smem.index(0), zero, False)])
    state = (dp, (half, half), q_at, do_at, p_at)
    for n in range(share):
        if SCATTER is not None:
            rows = of_keys(kv_idx, first, (h + n, b), coords, bands, of_score, of_mask, HOW)
        else:
            rows = ()
        context = (smem, rings, (h + n, b), kv_idx, live, rows, scale, coords, of_score, of_mask,
                   q_len, share, grads, locate_bias(sums, b, h + n, first))  # fmt: skip
        state = visit_q_blocks(
            state, context, walk, line, (), q_len, share - 1 - n, keys_block,
            DERIVATIVE, SCATTER, MASK, HOW,
        )  # fmt: skip
    dp, acc, q_at, do_at, p_at = state
    # In the place of the last block of queries, when both have let go of it.
    q_at = advance(q_at, HOW.stages)
    producer_acquire(q_ring, q_at)
    put(acc, rate, dk, wide_dk, width, q_smem[0], q_at[0], at, sizes)


@gluon.jit
def keys_block(
    state, context, n, more, PARTIAL: gl.constexpr,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """dS of one block of queries, from n on, and its part of dk."""
    dp, acc, q_at, do_at, p_at = state
    (
        smem, rings, of_head, kv_idx, live, rows, scale, coords, of_score, of_mask, q_len, opaque,
        grads, sums,
    ) = context  # fmt: skip
    inputs, p_smem = smem
    k_smem, v_smem, q_smem, do_smem, lse_smem, dlt_smem = inputs
    of_inputs, p_ring, ds_ring = rings
    _, _, q_ring, do_ring = of_inputs
    cols: gl.constexpr = gl.SliceLayout(0, acc_layout(HOW.block))
    dtype: gl.constexpr = v_smem.dtype
    zero = gl.full([ROWS, HOW.block], 0.0, gl.float32, layout=acc_layout(HOW.block))
    z = (n + opaque) >> 30
    less_delta = dlt_smem.index(do_at[0]).load(cols)
    e = dp + less_delta[None, :]
    consumer_release(do_ring, do_at)
    consumer_wait(q_ring, q_at)
    if SCATTER is None:
        consumer_wait(p_ring, p_at)
        by_s = upcast(p_smem.index(p_at[0]).load(acc_layout(HOW.block)))
    else:  # P once more, for all that it is multiplied with
        s = wgmma_abt(at_stage(k_smem, z), at_stage(q_smem, q_at[0]), zero)
        columns = of_queries(n, of_head, rows, q_len, coords, of_score, of_mask, PARTIAL, HOW)
        s = warpgroup_mma_wait(0, deps=[s])
        lse = lse_smem.index(q_at[0]).load(cols)
        p, by_s, by, pairs = probabilities(
            s, lse, n, z, kv_idx, live, of_head, rows, columns, q_len, scale, coords, of_score,
            of_mask, PARTIAL, DERIVATIVE, MASK, HOW,
        )  # fmt: skip
        values = others(p, by, e, HOW.unbounded_dscore)
        SCATTER(grads, values, *pairs, of_score)
        add_bias_grad(sums, n, values, HOW)
        producer_acquire(p_ring, p_at)
    ds16 = (by_s * e).to(dtype)
    p_smem.index(p_at[0]).store(ds16)
    ds16 = gl.convert_layout(ds16, lhs_layout(_HALF))
    fence_async_shared()
    producer_commit(ds_ring, p_at)
    dk = wgmma_ab(acc, ds16, halves(q_smem[0], q_at[0]))
    do_at = advance(do_at, DO_STAGES)
    mbarrier.wait(do_ring[0].index(do_at[0]), do_at[1], pred=more)
    dp = outer_v(v_smem.index(z), do_smem.index(do_at[0]), zero, False)
    dp, acc0, acc1, _ = warpgroup_mma_wait(0, deps=[dp, dk[0], dk[1], ds16])
    consumer_release(q_ring, q_at)
    return dp, (acc0, acc1), advance(q_at, HOW.stages), do_at, advance(p_at, P_STAGES)


# -- of values and keys ---------------------------------------------------------------------------


@gluon.jit
def tile_keys(coords, first, b, kv_len, HOW: gl.constexpr):
    """Which rows of the tile there are, and their positions."""
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, acc_layout(HOW.block)))
    live = row < kv_len
    kv_idx = positions(coords.kv_pos, coords.kv_stride, coords.kv, b, row, live, HOW.index_type)
    return live, kv_idx


@gluon.jit
def halves(smem, stage):
    """The halves of the columns of one stage. (A product of 256 columns has more registers than the
    kernel starts with, which the assembler refuses.)"""
    x = reinterpret(smem, smem.dtype, [2 * smem.shape[0], ROWS, _HALF], matrix_layout(smem.layout))
    return x.index(2 * stage), x.index(2 * stage + 1)


@gluon.jit
def put(acc, factor, desc, wide, width, smem, stage, at, sizes):
    """Write dk or dv, through shared memory; or in float32, straight from registers."""
    _, _, first, h, b, share, _ = at
    heads, _, _, kv_len = sizes
    if desc is not None:
        to = halves(smem, stage)
        for n in gl.static_range(2):
            to[n].store((acc[n] * factor).to(smem.dtype))
        fence_async_shared()
        tma_store(desc, [b, h // share, first, 0], smem.index(stage))
        tma_store_wait(0)
    else:
        base = (gl.cast(b, gl.int64) * (heads // share) + h // share) * kv_len
        for n in gl.static_range(2):
            write(acc[n] * factor, wide + base * width, first, kv_len, width, n * _HALF)
