"""The backward kernel: five products in one pass over the live tiles of 128 keys.

With P = exp(T − lse), T = score(S), S = scale q kᵀ (the Triton backend's kernel_backward.py has the
same mathematics):

    Sᵀ = k qᵀ;  Pᵀ = exp2(Tᵀ − lse);  dv += Pᵀ dout
    dPᵀ = v doutᵀ;  dSᵀ = Pᵀ∘(dPᵀ − delta)∘score'(Sᵀ);  dk += dSᵀ q
    dq += dS k

(Dao et al. 2022, arXiv 2205.14135, algorithm 4; Shah et al. 2024, arXiv 2407.08608, section 3.)

A CTA has two **consumers**, a warpgroup each, that own 64 of the 128 keys: their dk and dv stay in
registers, and so do Pᵀ and dSᵀ as left factors. A **loader** copies blocks of queries in. dq is a
sum over CTAs: a consumer computes a 64 x 64 part of it, and one of two **adders** has the copy
engine add it to float32 in global memory, in the order of the registers; `finish` puts it in order
afterwards. Per block of queries, a consumer

1. hands over dq of the block before; issues dPᵀ
2. computes Pᵀ meanwhile (Sᵀ came with the block before); issues dv
3. computes dSᵀ meanwhile, stores it, issues dk
4. when both have stored dSᵀ: issues its part of dq, and Sᵀ of the next block

Shared stores stand before the products that they would otherwise queue behind, and no product is in
flight over the loop's end, which the assembler would serialise.
"""

import triton.language as tl

import triton

from .gluon_api import (
    copy_in,
    copy_out,
    copy_out_add,
    copy_out_wait,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    seen_as,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .kernel_forward import ROWS
from .pipeline import acquire, await_, channel, publish, ready, release, start, step
from .tile import LOG2E, left, matrix, mma, place, positions, visit

_DO_STAGES = gl.constexpr(2)


@gluon.jit(
    do_not_specialize=[
        "heads", "group", "share", "q_len", "q_rows", "kv_len", "d_width", "dv_width",
        "score_numbers", "mask_numbers",
    ]
)  # fmt: skip
def backward(
    q, k, v, dout, lse, delta, dq,  # descriptors
    dk, dv,  # descriptors; None where the wide ones are given
    wide_dk, wide_dv, grads,  # pointers
    heads, group, share, q_len, q_rows, kv_len, d_width, dv_width, scale, coords, walk,
    score_tensors, mask_tensors, score_numbers, mask_numbers,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """dk and dv of 128 keys from `share` query heads, and what they add to dq."""
    BLOCK: gl.constexpr = HOW.block
    STAGES: gl.constexpr = HOW.stages
    D: gl.constexpr = k.block_shape[3]
    DV: gl.constexpr = v.block_shape[3]
    dtype: gl.constexpr = k.dtype
    flat: gl.constexpr = matrix(k.layout)
    k_smem = gl.allocate_shared_memory(dtype, [2, ROWS, D], flat)
    v_smem = gl.allocate_shared_memory(dtype, [2, ROWS, DV], flat)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, D], flat)
    do_smem = gl.allocate_shared_memory(dtype, [_DO_STAGES, BLOCK, DV], flat)
    ds_smem = gl.allocate_shared_memory(dtype, [2 * _DO_STAGES, ROWS, BLOCK], flat)
    dq_smem = gl.allocate_shared_memory(gl.float32, [2, 16, 256], dq.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], lse.layout)
    dlt_smem = gl.allocate_shared_memory(gl.float32, [_DO_STAGES, BLOCK], lse.layout)
    rings = (
        channel(2, 1, 1),  # keys, and values: once
        channel(STAGES, 1, 2),  # queries and lse
        channel(_DO_STAGES, 1, 2),  # dout and delta
        channel(_DO_STAGES, 2, 2),  # dS, from both consumers to both
        (channel(1, 1, 1), channel(1, 1, 1)),  # dq, from a consumer to its adder
    )
    ready()
    smem = (k_smem, v_smem, q_smem, do_smem, ds_smem, dq_smem, lse_smem, dlt_smem)
    line, _, first, h, b = place(gl.program_id(0), walk, heads // share, HOW.sub, 2 * ROWS)
    h = h * share
    at = (line, first, h, b, share, group)
    sizes = (heads, q_len, q_rows, kv_len)
    to = (dk, dv, wide_dk, wide_dv, grads, d_width, dv_width)
    given = (scale, coords, (score_tensors, score_numbers), (mask_tensors, mask_numbers))
    gl.warp_specialize(
        [
            (consume, (to, smem, rings, at, sizes, given, walk, gl.constexpr(0),
                       DERIVATIVE, SCATTER, MASK, HOW)),
            (consume, (to, smem, rings, at, sizes, given, walk, gl.constexpr(1),
                       DERIVATIVE, SCATTER, MASK, HOW)),
            (load, (q, k, v, dout, lse, delta, smem, rings, at, sizes, walk, HOW)),
            (add, (dq, smem, rings, at, sizes, walk, gl.constexpr(0), HOW)),
            (add, (dq, smem, rings, at, sizes, walk, gl.constexpr(1), HOW)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )  # fmt: skip


# -- the loader -----------------------------------------------------------------------------------


@gluon.jit
def load(q, k, v, dout, lse, delta, smem, rings, at, sizes, walk, HOW: gl.constexpr):
    """Copy keys and values once, and the blocks of queries of every head."""
    k_smem, v_smem, q_smem, do_smem, _, _, lse_smem, dlt_smem = smem
    kv_ring, q_ring, do_ring, _, _ = rings
    line, first, h, b, share, group = at
    heads, q_len, q_rows, _ = sizes
    kv_full = kv_ring[0].index(0)
    mbarrier.expect(kv_full, 4 * ROWS * k_smem.shape[2])
    copy_in(k, [b, h // group, first, 0], kv_full, k_smem.index(0))
    copy_in(k, [b, h // group, first + ROWS, 0], kv_full, k_smem.index(1))
    kv_full = kv_ring[0].index(1)
    mbarrier.expect(kv_full, 4 * ROWS * v_smem.shape[2])
    copy_in(v, [b, h // group, first, 0], kv_full, v_smem.index(0))
    copy_in(v, [b, h // group, first + ROWS, 0], kv_full, v_smem.index(1))
    state = (start(), start())
    for n in range(share):
        given = (q, dout, lse, delta, q_smem, do_smem, lse_smem, dlt_smem, q_ring, do_ring,
                 b, h + n, (b * heads + h + n) * q_rows)  # fmt: skip
        state = visit(state, given, walk, line, q_len, 0, load_block, None, None, None, HOW)


@gluon.jit
def load_block(
    state, given, n, more, PARTIAL: gl.constexpr,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Copy the rows of queries from n on, and what belongs to them."""
    q, dout, lse, delta, q_smem, do_smem, lse_smem, dlt_smem, q_ring, do_ring, b, h, row0 = given
    q_at, do_at = state
    acquire(q_ring, q_at)
    full = q_ring[0].index(q_at[0])
    mbarrier.expect(full, HOW.block * (2 * q_smem.shape[2] + 4))
    copy_in(q, [b, h, n, 0], full, q_smem.index(q_at[0]))
    copy_in(lse, [row0 + n], full, lse_smem.index(q_at[0]))
    acquire(do_ring, do_at)
    full = do_ring[0].index(do_at[0])
    mbarrier.expect(full, HOW.block * (2 * do_smem.shape[2] + 4))
    copy_in(dout, [b, h, n, 0], full, do_smem.index(do_at[0]))
    copy_in(delta, [row0 + n], full, dlt_smem.index(do_at[0]))
    return step(q_at, HOW.stages), step(do_at, _DO_STAGES)


# -- an adder -------------------------------------------------------------------------------------


@gluon.jit
def add(dq, smem, rings, at, sizes, walk, W: gl.constexpr, HOW: gl.constexpr):
    """Add the parts of dq that consumer W hands over. Each comes one block late; the first, from
    before the first block, is zeros."""
    k_smem, _, _, _, _, dq_smem, _, _ = smem
    D: gl.constexpr = k_smem.shape[2]
    line, _, h, b, share, _ = at
    heads, q_len, q_rows, _ = sizes
    ring = rings[4][W]
    state = (start(), (b * heads + h) * q_rows)
    for n in range(share):
        given = (dq, dq_smem.index(W), ring, k_smem, (b * heads + h + n) * q_rows, W)
        state = visit(state, given, walk, line, q_len, 0, add_block, None, None, None, HOW)
    dq_at, row = state
    await_(ring, dq_at)
    copy_out_add(dq, [_chunk(row, W, D) * 16, 0], dq_smem.index(W))
    copy_out_wait(0)
    release(ring, dq_at)


@gluon.jit
def add_block(
    state, given, n, more, PARTIAL: gl.constexpr,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Add what belongs to the block before n, and remember n."""
    dq, dq_smem, ring, k_smem, row0, W = given
    D: gl.constexpr = k_smem.shape[2]
    dq_at, row = state
    await_(ring, dq_at)
    copy_out_add(dq, [_chunk(row, W, D) * 16, 0], dq_smem)
    copy_out_wait(0)
    release(ring, dq_at)
    return step(dq_at, 1), row0 + n


@gluon.jit
def _chunk(row, W, D: gl.constexpr):
    """The 64 x 64 chunk of dq to which consumer W adds for the queries from `row` on: its half of
    the columns, or for width 64 what its keys give."""
    if D == 64:
        return row // 64
    else:
        return row // 64 * 2 + W


# -- a consumer -----------------------------------------------------------------------------------


@gluon.jit
def consume(
    to, smem, rings, at, sizes, given, walk, W: gl.constexpr,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """dk and dv of keys 64 W to 64 W + 63 of the tile, and this consumer's parts of dq."""
    dk, dv, wide_dk, wide_dv, grads, d_width, dv_width = to
    k_smem, v_smem, q_smem, _, _, dq_smem, _, _ = smem
    kv_ring, q_ring, _, _, dq_rings = rings
    line, first, h, b, share, _ = at
    heads, q_len, _, kv_len = sizes
    scale, coords, of_score, of_mask = given
    BLOCK: gl.constexpr = HOW.block
    D: gl.constexpr = k_smem.shape[2]
    DV: gl.constexpr = v_smem.shape[2]
    row = first + W * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma(BLOCK)))
    live = row < kv_len
    kv_idx = positions(coords.kv_pos, coords.kv_stride, coords.kv, b, row, live, HOW.index)
    acc_k = gl.full([ROWS, D], 0.0, gl.float32, layout=mma(D))
    acc_v = gl.full([ROWS, DV], 0.0, gl.float32, layout=mma(DV))
    acc_q = gl.full([ROWS, 64], 0.0, gl.float32, layout=mma(64))
    zero = gl.full([ROWS, BLOCK], 0.0, gl.float32, layout=mma(BLOCK))
    q_at, do_at, dq_at = start(), start(), start()
    await_(kv_ring, (0, 0))
    await_(q_ring, q_at)
    s = warpgroup_mma(k_smem.index(W), q_smem.index(0).permute((1, 0)), zero, use_acc=False)
    await_(kv_ring, (1, 0))
    state = (s, acc_q, acc_k, acc_v, q_at, do_at, dq_at)
    for n in range(share):
        of_head = (h + n, b)
        context = (smem, rings, dq_rings[W], of_head, kv_idx, live, scale, coords, of_score,
                   of_mask, grads, q_len, share, W)  # fmt: skip
        state = visit(
            state, context, walk, line, q_len, share - 1 - n, attend_back,
            DERIVATIVE, SCATTER, MASK, HOW,
        )  # fmt: skip
    s, acc_q, acc_k, acc_v, q_at, do_at, dq_at = state
    ring = dq_rings[W]
    hand_over(acc_q, dq_smem.index(W), ring, dq_at)
    fence_async_shared()
    publish(ring, dq_at)
    dq_at = step(dq_at, 1)
    out_h = h // share
    if dk is not None:
        v_smem.index(W).store(acc_v.to(v_smem.dtype))
        fence_async_shared()
        copy_out(dv, [b, out_h, first + W * ROWS, 0], v_smem.index(W))
        # The other consumer may still multiply with these keys: dk goes where dq was.
        acquire(ring, dq_at)
        place_k = seen_as(dq_smem.index(W), k_smem.dtype, [ROWS, D], k_smem.layout)
        place_k.store((acc_k * scale).to(k_smem.dtype))
        fence_async_shared()
        copy_out(dk, [b, out_h, first + W * ROWS, 0], place_k)
        copy_out_wait(0)
    else:
        base = (gl.cast(b, gl.int64) * (heads // share) + out_h) * kv_len
        write(acc_k * scale, wide_dk + base * d_width, first + W * ROWS, kv_len, d_width)
        write(acc_v, wide_dv + base * dv_width, first + W * ROWS, kv_len, dv_width)


@gluon.jit
def hand_over(acc_q, dq_smem, ring, at):
    """Store dq for the adder: 4 adjacent floats per thread, threads adjacent, so that 16-byte
    stores meet no conflict."""
    acquire(ring, at)
    x = acc_q.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([16, 256])
    dq_smem.store(x)


@gluon.jit
def attend_back(
    state, context, n, more, PARTIAL: gl.constexpr,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """One block of queries, from n on."""
    s, acc_q, acc_k, acc_v, q_at, do_at, dq_at = state
    (
        smem, rings, ring, of_head, kv_idx, live, scale, coords, of_score, of_mask, grads, q_len,
        opaque, W,
    ) = context  # fmt: skip
    k_smem, v_smem, q_smem, do_smem, ds_smem, dq_smem, lse_smem, dlt_smem = smem
    _, q_ring, do_ring, ds_ring, _ = rings
    h, b = of_head
    BLOCK: gl.constexpr = HOW.block
    D: gl.constexpr = k_smem.shape[2]
    DV: gl.constexpr = v_smem.shape[2]
    cols: gl.constexpr = gl.SliceLayout(0, mma(BLOCK))
    dtype: gl.constexpr = k_smem.dtype
    zero = gl.full([ROWS, BLOCK], 0.0, gl.float32, layout=mma(BLOCK))
    # Always 0; it keeps LLVM from hoisting the operands' descriptors out of the loop and spilling.
    z = (n + opaque) >> 30

    hand_over(acc_q, dq_smem.index(W), ring, dq_at)
    lse = lse_smem.index(q_at[0]).load(cols)
    await_(do_ring, do_at)
    if not HOW.late:
        dp = outer_v(v_smem.index(W + z), do_smem.index(do_at[0]), zero)
    fence_async_shared()
    publish(ring, dq_at)

    i = n + gl.arange(0, BLOCK, layout=cols)
    in_rows = i < q_len
    q_idx = positions(coords.q_pos, coords.q_stride, coords.q, b, i, in_rows, HOW.index)[None, :]
    kv_idx = kv_idx[:, None] + z  # nor the distances of all pairs of a tile
    b_idx = gl.cast(coords.b, HOW.index) + b
    h_idx = gl.cast(coords.h, HOW.index) + h
    if DERIVATIVE is None:
        p = gl.exp2(s * (scale * LOG2E) - lse[None, :])
    else:
        s = s * scale
        by = DERIVATIVE(s, b_idx, h_idx, q_idx, kv_idx, of_score)
        p = gl.exp2(by[0] * LOG2E - lse[None, :])
    if PARTIAL and MASK is not None:
        p = gl.where(MASK(b_idx, h_idx, q_idx, kv_idx, of_mask), p, 0.0)
    if not HOW.even:
        p = gl.where(live[:, None], p, 0.0)
    if HOW.late:
        dp = outer_v(v_smem.index(W + z), do_smem.index(do_at[0]), zero)
    delta = dlt_smem.index(do_at[0]).load(cols)
    p16 = gl.convert_layout(p.to(dtype), left(DV))
    dv = warpgroup_mma(p16, do_smem.index(do_at[0]), acc_v, is_async=True)
    # P times each derivative now, so that only the products stay in registers.
    if DERIVATIVE is None:  # noqa: SIM108
        by_s = p
    else:
        by_s = weighted(p, by[1], HOW.unbounded)

    dp = warpgroup_mma_wait(1, deps=[dp])
    e = dp - delta[None, :]
    ds = by_s * e
    if SCATTER is not None:
        SCATTER(grads, others(p, by, e, HOW.unbounded), s, b_idx, h_idx, q_idx, kv_idx, of_score)
    ds16 = ds.to(dtype)
    ds_smem.index(do_at[0] * 2 + W).store(ds16)
    ds16 = gl.convert_layout(ds16, left(D))
    dk = warpgroup_mma(ds16, q_smem.index(q_at[0]), acc_k, is_async=True)
    fence_async_shared()
    publish(ds_ring, do_at)
    acc_v, _ = warpgroup_mma_wait(1, deps=[dv, p16])
    release(do_ring, do_at)

    await_(ds_ring, do_at)
    a = do_at[0] * 2
    nothing = gl.full([ROWS, 64], 0.0, gl.float32, layout=mma(64))
    if D == 64:  # from its own keys
        dq = warpgroup_mma(
            ds_smem.index(a + W).permute((1, 0)), k_smem.index(W + z), nothing,
            use_acc=False, is_async=True,
        )  # fmt: skip
    else:  # from all keys, half of the columns
        halves = seen_as(k_smem, dtype, [4, ROWS, 64], matrix(k_smem.layout))
        dq = warpgroup_mma(
            ds_smem.index(a).permute((1, 0)), halves.index(W + z), nothing,
            use_acc=False, is_async=True,
        )  # fmt: skip
        dq = warpgroup_mma(
            ds_smem.index(a + 1).permute((1, 0)), halves.index(2 + W + z), dq, is_async=True
        )
    next_q = step(q_at, HOW.stages)
    mbarrier.wait(q_ring[0].index(next_q[0]), next_q[1], pred=more)
    s = warpgroup_mma(
        k_smem.index(W + z), q_smem.index(next_q[0]).permute((1, 0)), zero,
        use_acc=False, is_async=True,
    )  # fmt: skip
    s, acc_q, acc_k, _ = warpgroup_mma_wait(0, deps=[s, dq, dk, ds16])
    release(q_ring, q_at)
    return s, acc_q, acc_k, acc_v, next_q, step(do_at, _DO_STAGES), step(dq_at, 1)


@gluon.jit
def outer_v(v, dout, zero):
    """Issue dPᵀ."""
    return warpgroup_mma(v, dout.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def weighted(p, by, UNBOUNDED: gl.constexpr):
    """P times a derivative; where P is 0 a derivative may be anything and counts nothing."""
    if UNBOUNDED:
        return gl.where(p == 0.0, 0.0, p * by)
    else:
        return p * by


@gluon.jit
def others(p, by, e, UNBOUNDED: gl.constexpr):
    """dT times the derivative by every gathered value that wants a gradient."""
    values = (weighted(p, by[2], UNBOUNDED) * e,)
    for n in gl.static_range(3, len(by)):
        values = values + (weighted(p, by[n], UNBOUNDED) * e,)  # noqa: RUF005
    return values


@gluon.jit
def write(x, to, row, length, width):
    """In float32, straight from registers."""
    rows = row + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, mma(x.shape[1])))
    columns = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, mma(x.shape[1])))
    inside = (rows < length)[:, None] & (columns < width)[None, :]
    gl.store(to + rows.to(gl.int64)[:, None] * width + columns[None, :], x, mask=inside)


# -- after ----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["q_len", "q_rows", "d"])
def finish(parts, dq, scale, q_len, q_rows, d, STRIPS: tl.constexpr):
    """dq from its 64 x 64 chunks, which lie in the order of registers."""
    chunk = tl.cast(tl.program_id(0), tl.int64)
    x = tl.load(parts + chunk * 4096 + tl.arange(0, 4096))
    # In a chunk: column / 8, warp, row % 8, lane % 4, half of 16 rows, column % 2.
    x = tl.reshape(x, [8, 4, 8, 4, 2, 2])
    x = tl.reshape(tl.permute(x, [1, 4, 2, 0, 3, 5]), [64, 64]) * scale
    row = chunk // STRIPS * 64
    head = row // q_rows
    i = row % q_rows + tl.arange(0, 64)
    j = chunk % STRIPS * 64 + tl.arange(0, 64)
    to = dq + (head * q_len + i[:, None]) * d + j[None, :]
    tl.store(to, x.to(dq.dtype.element_ty), mask=(i < q_len)[:, None] & (j < d)[None, :])
