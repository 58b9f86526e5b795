"""The backward kernel: five products in one pass over the live tiles of 128 keys.

With P = exp(T − lse), T = score(S), S = scale q kᵀ (the Triton backend's bwd/kernel.py has the
same mathematics):

    Sᵀ = k qᵀ;  Pᵀ = exp2(Tᵀ − lse);  dv += Pᵀ dout
    dPᵀ = v doutᵀ;  dSᵀ = Pᵀ∘(dPᵀ − delta)∘score'(Sᵀ);  dk += dSᵀ q
    dq += dS k

(Dao et al. 2022, arXiv 2205.14135, algorithm 4; Shah et al. 2024, arXiv 2407.08608, section 3.)

A persistent CTA has a **loader**, which takes the next 128 keys of a head (a rank) from a counter,
longest line first, and copies them and the queries that see them into shared memory. Two
**consumers**, a warpgroup each, own 64 of the keys: their dk and dv stay in registers, and so do Pᵀ
and dSᵀ as left factors. dq is a sum over ranks: a consumer computes a part of it from all keys, and
one of two **adders** has the copy engine add it to float32 in global memory (in turn, where the sum
shall be the same every time: bwd/dq_semaphore.py), in the order of the registers, to zeros that
one more warp
writes (bwd/dq_zero.py); `finish` puts it in order afterwards. dk and dv leave the same
way (bwd/epilogue.py). A block has 64 queries, of which a consumer's part is half of the
columns; at width 64 it has 128, where registers allow it, of which it is half of the queries: of
what shared memory and the L2 cache move per pair, that is a fifth and half less.

In which order a block goes depends on what registers are left: where they allow it, dk and dq come
with the next block (bwd/mainloop.py). Here, at once, a consumer

1. hands over dq of the block before; issues dPᵀ
2. computes Pᵀ meanwhile (Sᵀ came with the block before); issues dv
3. computes dSᵀ meanwhile, stores it, issues dk
4. when both have stored dSᵀ: issues its part of dq, and Sᵀ of the next block

Of many short heads or documents a CTA takes whole ones, with no `finish`
(bwd/segments.py). Widths 129 to 192 (MLA) are two pieces, 128 + 64 columns. dk and dv
then fill two thirds of a consumer's registers: P is kept as it was rounded, dP comes after P, and
dq in two pieces, one after the other.

Shared stores stand before the products that they would otherwise queue behind, and no product is in
flight over the loop's end, which the assembler would serialise.
"""

from ..device.gluon_compat import fence_async_shared, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from ..device.mma import (
    ROWS,
    acc_layout,
    alloc_stages,
    at_stage,
    broadcast_row,
    lhs_layout,
    materialize,
    matrix_layout,
    pieces,
    positions,
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
    WORK_STAGES,
    read_runs,
    read_work,
    visit_q_blocks,
    work_buffer,
)
from .common import DO_STAGES, factors, of_keys, of_queries, others, outer_v, probabilities
from .dq import part, parts, rings_of, store_dq, strip_of_part, zeros_of
from .dq_reduce import reduce_dq
from .dq_zero import nothing, of_work, write_zeros
from .epilogue import put_keys, write_keys
from .mainloop import after_last, attend_pipelined, before_first
from .producer import produce
from .segments import add_whole, offer, pass_keys, put


@gluon.jit(
    do_not_specialize=[
        "total", "last", "heads", "group", "share", "q_len", "q_rows", "kv_len", "d_width",
        "dv_width", "score_numbers", "mask_numbers",
    ]
)  # fmt: skip
def backward(
    q0, q1, k0, k1, v, dout, lse, less_delta, dq0, dq1,  # descriptors, of pieces; dq's of its parts
    whole_dq, marks, items,  # where CTAs take islands: dq's descriptor, `islands.Work`; or None
    lines, zeroed,  # where zeros are written here: a descriptor of them, and counters; else None
    dk0, dk1, dv,  # descriptors; None where the wide ones are given
    wide_dk, wide_dv, grads,  # pointers
    bands, sums,  # what is read along diagonals, and added up (device/relative_bias.py)
    counter, total,  # of the ranks, or heads: the next one (0, before and after), and how many
    last,  # lines whose ranks are dealt last
    heads, group, share, q_len, q_rows, kv_len, d_width, dv_width,
    scale, rate,  # of S; and what dk and dq are multiplied by: the gain of T as well, if HOW.steady
    coords, walk, turns,
    score_tensors, mask_tensors, score_numbers, mask_numbers,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """dk and dv of 128 keys from `share` query heads, and what they add to dq."""
    BLOCK: gl.constexpr = HOW.block
    COLUMNS: gl.constexpr = k0.block_shape[3]
    STAGES: gl.constexpr = HOW.stages
    # Launchers take descriptors one by one, and not in tuples.
    q, k, dq, dk = pieces(q0, q1), pieces(k0, k1), pieces(dq0, dq1), pieces(dk0, dk1)
    DS_STAGES: gl.constexpr = ds_stages(k)
    k_smem = alloc_stages(2, k)
    v_smem = alloc_stages(2, (v,))[0]
    q_smem = alloc_stages(STAGES, q)
    do_smem = alloc_stages(DO_STAGES, (dout,))[0]
    ds_smem = gl.allocate_shared_memory(
        v.dtype, [2 * DS_STAGES, ROWS, BLOCK], matrix_layout(v.layout)
    )
    dq_smem = parts(dq)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], lse.layout)
    dlt_smem = gl.allocate_shared_memory(gl.float32, [DO_STAGES, BLOCK], lse.layout)
    work_smem = work_buffer(BWD_FIELDS)
    zeros_smem = nothing(lines)
    rings = (
        (
            mbarrier_ring(1, 1, 2),  # keys
            mbarrier_ring(1, 1, 2),  # values
            mbarrier_ring(STAGES, 1, 2, HOW.q_barriers()),  # and lse
            mbarrier_ring(DO_STAGES, 1, 2, HOW.do_barriers()),  # and -delta
        ),
        ring_of_ds(DS_STAGES),  # dS, from both consumers to both
        (rings_of(dq), rings_of(dq)),  # dq, from a consumer to its adder
        of_work(lines),
    )
    fence_barrier_init()
    inputs = (k_smem, v_smem, q_smem, do_smem, lse_smem, dlt_smem)
    smem = (inputs, ds_smem, dq_smem, work_smem)
    sizes = (heads, group, share, q_len, q_rows, kv_len)
    inputs = (q, k, v, dout, lse, less_delta)
    to = ((dk, dv, wide_dk, wide_dv, d_width, dv_width), grads, sums, whole_dq)
    of_score, of_mask = (score_tensors, score_numbers), (mask_tensors, mask_numbers)
    given = (scale, rate, coords, bands, of_score, of_mask)
    added = (dq, dk, dv, (whole_dq, items), (lines, zeroed))
    gl.warp_specialize(
        [
            (consumer, (to, smem, rings, sizes, given, walk, gl.constexpr(0),
                       DERIVATIVE, SCATTER, MASK, HOW)),
            (consumer, (to, smem, rings, sizes, given, walk, gl.constexpr(1),
                       DERIVATIVE, SCATTER, MASK, HOW)),
            (produce, (inputs, smem, rings, counter, total, last, marks, items, sizes, walk, HOW)),
            (add_whole if HOW.owns_segment else reduce_dq,
                      (added, smem, rings, sizes, walk, turns, gl.constexpr(0), HOW)),
            (add_whole if HOW.owns_segment else reduce_dq,
                      (added, smem, rings, sizes, walk, turns, gl.constexpr(1), HOW)),
            (write_zeros, (lines, zeroed, zeros_smem, work_smem, rings[3], sizes, total, walk,
                           COLUMNS, HOW)),
        ],
        [4, 1, 1, 1, 1],
        [240, 24, 24, 24, 24],
    )  # fmt: skip


@gluon.jit
def ring_of_ds(STAGES: gl.constexpr):
    """The channel of dS. Of two stages the one before is read when the next is written: both
    consumers have written that."""
    if STAGES == 1:
        return mbarrier_ring(1, 2, 2)
    else:
        return full_barriers(STAGES, 2)


@gluon.constexpr_function
def of_consumer(HOW, W):
    """For consumer W."""
    return HOW.for_consumer(W)


@gluon.constexpr_function
def ds_stages(k):
    """Stages of dS: a row in two pieces leaves memory for one."""
    return 3 - len(k)


# -- a consumer -----------------------------------------------------------------------------------


@gluon.jit
def consumer(
    to, smem, rings, sizes, given, walk, W: gl.constexpr,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """dk and dv of keys 64 W to 64 W + 63 of every rank, and this consumer's parts of dq."""
    _, _, dq_smem, work_smem = smem
    _, _, dq_rings, work_ring = rings
    acc_q = zeros_of(dq_smem)
    ats = (first_stage(), first_stage(), first_stage())
    done = gl.to_tensor(0)  # ranks
    consumer_wait(work_ring, first_stage())
    consumer_release_all(HOW.stages, HOW.q_barriers())
    consumer_release_all(DO_STAGES, HOW.do_barriers())
    (line,) = read_work(work_smem, first_stage(), 0, 1, 4)
    while line >= 0:
        acc_q, ats = consume_tile(
            acc_q, ats, done, to, smem, rings, sizes, given, walk, W,
            DERIVATIVE, SCATTER, MASK, HOW,
        )  # fmt: skip
        consumer_release(work_ring, stage_of(done, WORK_STAGES))
        done += 1
        consumer_wait(work_ring, stage_of(done, WORK_STAGES))
        (line,) = read_work(work_smem, stage_of(done, WORK_STAGES), 0, 1, 4)
    if not (HOW.pipelined or HOW.owns_segment):
        LAST: gl.constexpr = len(dq_smem) - 1
        store_dq(acc_q, dq_smem[LAST].index(W), dq_rings[W][LAST], ats[2])
        fence_async_shared()
        producer_commit(dq_rings[W][LAST], ats[2])


@gluon.jit
def consume_tile(
    acc_q, ats, done, to, smem, rings, sizes, given, walk, W: gl.constexpr,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """A rank, after so many; `acc_q` is the last piece of dq before it, still to be handed over."""
    keys_to, grads, sums, whole_dq = to
    inputs, _, dq_smem, work_smem = smem
    k_smem, v_smem, q_smem, _, _, _ = inputs
    of_inputs, _, dq_rings, _ = rings
    k_ring, v_ring, q_ring, _ = of_inputs
    q_at, do_at, dq_at = ats
    line, _, first, h, b = read_work(work_smem, stage_of(done, WORK_STAGES), 0, 5, 4)
    heads, _, share, q_len, _, kv_len = sizes
    scale, rate, coords, bands, of_score, of_mask = given
    BLOCK: gl.constexpr = HOW.block
    row = first + W * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, acc_layout(BLOCK)))
    live = row < kv_len
    kv_idx = positions(coords.kv_pos, coords.kv_stride, coords.kv, b, row, live, HOW.index_type)
    acc_k = zero_acc(ROWS, k_smem)
    acc_v = zero_acc(ROWS, (v_smem,))[0]
    consumer_wait(k_ring, stage_of(done, 1))
    if HOW.pipelined:
        state = before_first(acc_k, acc_v, ats, k_smem, HOW)
    else:
        zero = gl.full([ROWS, BLOCK], 0.0, gl.float32, layout=acc_layout(BLOCK))
        consumer_wait(q_ring, q_at)
        s = wgmma_abt(at_stage(k_smem, W), at_stage(q_smem, q_at[0]), zero)
        s = warpgroup_mma_wait(0, deps=[s])
        state = (s, (acc_q, gl.to_tensor(0)), acc_k, acc_v, q_at, do_at, dq_at)
    whole = (
        whole_dq,
        read_work(work_smem, stage_of(done, WORK_STAGES), 5, 8, 4) if HOW.owns_segment else (),
        rate,
    )
    consumer_wait(v_ring, stage_of(done, 1))
    runs = read_runs(work_smem, stage_of(done, WORK_STAGES), walk, 4, HOW)
    # A constant in a tuple is none afterwards.
    MINE: gl.constexpr = of_consumer(HOW, W)
    for n in range(share):
        of_head = (h + n, b)
        rows = of_keys(kv_idx, first + W * ROWS, of_head, coords, bands, of_score, of_mask, HOW)
        to_sums = locate_bias(sums, b, h + n, first + W * ROWS)
        context = (smem, rings, dq_rings[W], of_head, kv_idx, live, rows, scale, coords, of_score,
                   of_mask, grads, to_sums, q_len, share, whole)  # fmt: skip
        state = visit_q_blocks(
            state, context, walk, line, runs, q_len, share - 1 - n,
            attend_pipelined if HOW.pipelined else attend_back, DERIVATIVE, SCATTER, MASK, MINE,
        )  # fmt: skip
    if HOW.pipelined:
        acc_k, acc_v, q_at, do_at, dq_at = after_last(
            state, smem, rings, dq_rings[W], first >> 31, W, HOW
        )
    else:
        s, late, acc_k, acc_v, q_at, do_at, dq_at = state
        if HOW.owns_segment:
            put(late, rate, whole_dq, dq_smem[0].index(W), dq_rings[W][0], dq_at)
            fence_async_shared()
            producer_commit(dq_rings[W][0], dq_at)
            dq_at = advance(dq_at, 1)
        else:
            acc_q = late[0]
    consumer_release(k_ring, stage_of(done, 1))
    consumer_release(v_ring, stage_of(done, 1))
    # Told again, to have been in no registers until now.
    first, h, b = read_work(work_smem, stage_of(done, WORK_STAGES), 2, 5, 4)
    if keys_to[1] is None:
        at = (first + W * ROWS, h // share, b, heads // share, kv_len)
        write_keys(acc_k, acc_v, at, keys_to[2:], rate)
    elif HOW.owns_segment:
        dq_at = pass_keys(acc_v, v_smem.index(W), dq_smem[0].index(W), dq_rings[W][0], dq_at)
        dk = acc_k[0] * rate
        dq_at = pass_keys(dk, k_smem[0].index(W), dq_smem[0].index(W), dq_rings[W][0], dq_at)
    else:
        keys = (k_smem, v_smem)
        dq_at = put_keys(acc_k, acc_v, keys, dq_smem, dq_rings[W], dq_at, rate, W)
    return acc_q, (q_at, do_at, dq_at)


@gluon.jit
def attend_back(
    state, context, n, more, PARTIAL: gl.constexpr,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """One block of queries, from n on."""
    s, late, acc_k, acc_v, q_at, do_at, dq_at = state
    (
        smem, rings, ring, of_head, kv_idx, live, rows, scale, coords, of_score, of_mask, grads,
        sums, q_len, opaque, whole,
    ) = context  # fmt: skip
    W: gl.constexpr = HOW.consumer
    inputs, ds_smem, dq_smem, _ = smem
    k_smem, v_smem, q_smem, do_smem, lse_smem, dlt_smem = inputs
    of_inputs, ds_ring, _, _ = rings
    _, _, q_ring, do_ring = of_inputs
    BLOCK: gl.constexpr = HOW.block
    DV: gl.constexpr = v_smem.shape[2]
    WIDE: gl.constexpr = len(k_smem) == 2
    LAST: gl.constexpr = len(dq_smem) - 1
    cols: gl.constexpr = gl.SliceLayout(0, acc_layout(BLOCK))
    dtype: gl.constexpr = v_smem.dtype
    zero = gl.full([ROWS, BLOCK], 0.0, gl.float32, layout=acc_layout(BLOCK))
    # Always 0; it keeps LLVM from hoisting the operands' descriptors out of the loop and spilling.
    z = (n + opaque) >> 30

    # A fence waits for what was read before it: what a mask needs is read after it.
    READS: gl.constexpr = PARTIAL and HOW.mask_pairs is not None
    if not READS:
        columns = of_queries(n, of_head, rows, q_len, coords, of_score, of_mask, PARTIAL, HOW)
    kind = late[1]
    if HOW.owns_segment:
        put(late, whole[2], whole[0], dq_smem[0].index(W), ring[0], dq_at)
    else:
        store_dq(late[0], dq_smem[LAST].index(W), ring[LAST], dq_at)
    if READS:
        dq_at, kind = offer(ring[LAST], dq_at, kind, n, whole, HOW)
        columns = of_queries(n, of_head, rows, q_len, coords, of_score, of_mask, PARTIAL, HOW)
    lse = lse_smem.index(q_at[0]).load(cols)
    consumer_wait(do_ring, do_at)
    if not (HOW.dp_after_p or WIDE):
        dp = outer_v(v_smem.index(z + W), do_smem.index(do_at[0]), zero, False)
    if not READS:
        dq_at, kind = offer(ring[LAST], dq_at, kind, n, whole, HOW)

    # P times the derivative now, so that only the product stays in registers.
    p, by_s, by, pairs = probabilities(
        s, lse, n, z, kv_idx, live, of_head, rows, columns, q_len, scale, coords, of_score, of_mask,
        PARTIAL, DERIVATIVE, MASK, HOW,
    )  # fmt: skip
    p16 = p.to(dtype)
    less_delta = dlt_smem.index(do_at[0]).load(cols)
    if WIDE:  # and rounded; the product begins with -delta
        p16 = materialize(p16)
        if HOW.constant_dscore:  # noqa: SIM108
            by_s = p16
        else:
            by_s = materialize(by_s.to(dtype))
        less_delta = broadcast_row(less_delta, zero)
        dp = outer_v(v_smem.index(z + W), do_smem.index(do_at[0]), less_delta, True)
    elif HOW.dp_after_p:
        dp = outer_v(v_smem.index(z + W), do_smem.index(do_at[0]), zero, False)
    p16 = gl.convert_layout(p16, lhs_layout(DV))
    dv = warpgroup_mma(p16, do_smem.index(do_at[0]), acc_v, is_async=True)

    e = warpgroup_mma_wait(1, deps=[dp])
    if not WIDE:
        e = e + less_delta[None, :]
    ds = factors(by_s, HOW.constant_dscore) * e
    if SCATTER is not None:
        values = others(p, by, e, HOW.unbounded_dscore)
        SCATTER(grads, values, *pairs, of_score)
    ds16 = ds.to(dtype)
    if WIDE:
        ds_at = dq_at
        producer_acquire(ds_ring, ds_at)
    else:
        ds_at = do_at  # in as many stages; what fills one twice has been read in between
    a = ds_at[0] * 2
    ds_smem.index(a + W).store(ds16)
    ds16 = gl.convert_layout(ds16, lhs_layout(k_smem[0].shape[2]))
    dk = wgmma_ab(acc_k, ds16, at_stage(q_smem, q_at[0]))
    fence_async_shared()
    producer_commit(ds_ring, ds_at)
    if WIDE:  # dS, as a factor, needs registers that dq shall have
        acc_v, acc_k0, acc_k1, _, _ = warpgroup_mma_wait(0, deps=[dv, dk[0], dk[1], p16, ds16])
    else:
        acc_v, _ = warpgroup_mma_wait(1, deps=[dv, p16])
    consumer_release(do_ring, do_at, True, HOW.do_barriers())

    consumer_wait(ds_ring, ds_at)
    dq = part(ds_smem, a, k_smem, z, W)
    next_q = advance(q_at, HOW.stages)
    if WIDE:
        rest = strip_of_part(ds_smem, a, k_smem[1], z, W)
        acc_q = warpgroup_mma_wait(2, deps=[dq])
        store_dq(acc_q, dq_smem[0].index(W), ring[0], dq_at)
        fence_async_shared()
        producer_commit(ring[0], dq_at)
    consumer_wait(q_ring, next_q, more)
    s = wgmma_abt(at_stage(k_smem, z + W), at_stage(q_smem, next_q[0]), zero)
    if SCATTER is not None:  # while these are multiplied
        add_bias_grad(sums, n, values, HOW)
    if WIDE:
        s, acc_q = warpgroup_mma_wait(0, deps=[s, rest])
        acc_k = (acc_k0, acc_k1)
        consumer_release(ds_ring, ds_at)
    else:
        s, acc_q, acc_k0, _ = warpgroup_mma_wait(0, deps=[s, dq, dk[0], ds16])
        acc_k = (acc_k0,)
    consumer_release(q_ring, q_at, True, HOW.q_barriers())
    if not HOW.owns_segment:
        dq_at = advance(dq_at, 1)
    return s, (acc_q, kind), acc_k, acc_v, next_q, advance(do_at, DO_STAGES), dq_at
