"""The forward kernel: online softmax over the live tiles of 128 queries, on tensor cores that never
wait for it.

(Shah et al. 2024, FlashAttention-3, arXiv 2407.08608, algorithms 1 and 2, without its ping-pong.)

A persistent CTA has a **scheduler** (`fwd/scheduler.py`), which takes the next 128
queries of a head (a rank) from a counter, longest line first, and tells what there is to do; a
**loader**, which copies their rows, and those of the keys and values that they visit, into shared
memory, and asks for one more rank a little before it is done with a long one; and two **consumers**
(or three), a warpgroup each, which own 64 of the queries. While a consumer turns S of one block
into P, the tensor cores compute P V of the one before:

    for every block n:
        in turn with the other consumers: issue S_n = q k_nᵀ;  issue O += P_{n-1} v_{n-1}
        wait for S_n;  P_n = exp2(S_n - m)
        wait for O;  O *= exp2(m_before - m)

and so from rank to rank: S of the first block of a rank is issued with the last product of the rank
before, whose out is stored then (or after it, where there is one place for queries: it has to be
free first, `early`). At both ends of a CTA's work stands a **ghost**, a rank of rows past the end,
so that no rank is a special case: it sees one block, and nothing of it is stored.

Loader and consumers walk the blocks of a line by the same function, `walk.visit_rank`, and so agree
on them.
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
    FWD_RUNS,
    WORK_STAGES,
    read_work,
    visit_kv_blocks,
    work_buffer,
)
from .epilogue import epilogue
from .half_blocks import hidden_columns, hidden_positions, hide, live_columns, of_all_columns
from .producer import produce
from .scheduler import schedule


# Numbers that change from call to call do not make a kernel of their own.
@gluon.jit(
    do_not_specialize=[
        "total", "last", "whole", "share", "several", "heads", "group", "q_len", "kv_len", "dv",
        "score_numbers", "mask_numbers",
    ]
)  # fmt: skip
def forward(
    q0, q1, k0, k1, v0, v1, out0, out1,  # descriptors of pieces; no out where `wide_out` is given
    wide_out, lse, row_max, top, sink,  # pointers; all but lse may be None
    counter, total,  # of tickets: the next one (0, before and after), and how many there are
    last,  # lines whose ranks are dealt last
    whole, share, several, parts,  # `stream_k.Shares`, and memory for parts of ranks
    heads, group, q_len, kv_len, dv, scale, coords, walk, bands,
    score_tensors, mask_tensors, score_numbers, mask_numbers,  # what the functions capture
    SCORE: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,  # HOW: `config.How`
):  # fmt: skip
    """out and lse of every rank, and what else is asked for."""
    STAGES: gl.constexpr = HOW.stages
    # Launchers take descriptors one by one, and not in tuples.
    q, k, v, out = pieces(q0, q1), pieces(k0, k1), pieces(v0, v1), pieces(out0, out1)
    q_smem = alloc_stages(HOW.consumers * HOW.q_stages, q)
    k_smem = alloc_stages(STAGES, k)
    v_smem = alloc_stages(HOW.v_stages, v)
    if wide_out is None:  # noqa: SIM108
        o_smem = alloc_stages(HOW.consumers, out)
    else:
        o_smem = ()
    work_smem = work_buffer(FWD_FIELDS)
    if HOW.slope_mma:  # noqa: SIM108
        c_smem = (slope_rhs(HOW.block),)
    else:
        c_smem = ()
    rings = (
        mbarrier_ring(WORK_STAGES, 1, HOW.consumers + 1),  # work
        channels_of_queries(HOW),
        mbarrier_ring(STAGES, 1, HOW.consumers, HOW.k_barriers()),
        mbarrier_ring(HOW.v_stages, 1, HOW.consumers, HOW.v_barriers()),
        full_barriers(1, 1),  # from the loader to the scheduler: one more
    )
    fence_barrier_init()
    smem = (work_smem, q_smem, k_smem, v_smem, o_smem, c_smem)
    sizes = (heads, group, q_len, kv_len, dv)
    given = (scale, coords, bands, (score_tensors, score_numbers), (mask_tensors, mask_numbers))
    to = (out, wide_out, lse, row_max, top, sink, (parts, counter))
    shares = (whole, share, several)
    if HOW.consumers == 1:
        gl.warp_specialize(
            [
                (consumer, (to, smem, rings, sizes, given, walk, SCORE, MASK, HOW.for_consumer(0))),
                (produce, (q, k, v, smem, rings, sizes, walk, HOW)),
                (schedule, (smem, rings, counter, total, last, shares, sizes, walk, HOW)),
            ],
            [1, 1],
            [24, 24],
        )  # fmt: skip
    elif HOW.consumers == 2:
        gl.warp_specialize(
            [
                (consumer, (to, smem, rings, sizes, given, walk, SCORE, MASK, HOW.for_consumer(0))),
                (consumer, (to, smem, rings, sizes, given, walk, SCORE, MASK, HOW.for_consumer(1))),
                (produce, (q, k, v, smem, rings, sizes, walk, HOW)),
                (schedule, (smem, rings, counter, total, last, shares, sizes, walk, HOW)),
            ],
            [4, 1, 1],
            [HOW.registers, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consumer, (to, smem, rings, sizes, given, walk, SCORE, MASK, HOW.for_consumer(0))),
                (consumer, (to, smem, rings, sizes, given, walk, SCORE, MASK, HOW.for_consumer(1))),
                (consumer, (to, smem, rings, sizes, given, walk, SCORE, MASK, HOW.for_consumer(2))),
                (produce, (q, k, v, smem, rings, sizes, walk, HOW)),
                (schedule, (smem, rings, counter, total, last, shares, sizes, walk, HOW)),
            ],
            [4, 4, 1, 1],
            [HOW.registers, HOW.registers, 24, 24],
        )  # fmt: skip


@gluon.jit
def channels_of_queries(HOW: gl.constexpr):
    """One for all consumers; where the one place is given back early, one for each of the two."""
    if HOW.early_q_release:
        return mbarrier_ring(1, 1, 1), mbarrier_ring(1, 1, 1)
    else:
        return (mbarrier_ring(HOW.q_stages, 1, HOW.consumers),)


# -- a consumer -----------------------------------------------------------------------------------


@gluon.jit
def consumer(
    to, smem, rings, sizes, given, walk,
    SCORE: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Attend from rows 64 W to 64 W + 63 of every rank, W the number of the consumer."""
    W: gl.constexpr = HOW.consumer
    work_smem, q_smem, k_smem, v_smem, o_smem, c_smem = smem
    work_ring, q_rings, k_ring, v_ring, _ = rings
    q_ring = q_rings[W % len(q_rings)]
    _, _, q_len, kv_len, _ = sizes
    scale, coords, bands, of_score, of_mask = given
    BLOCK: gl.constexpr = HOW.block
    INDEX: gl.constexpr = HOW.index_type
    rows: gl.constexpr = gl.SliceLayout(1, acc_layout(BLOCK))
    last_at, q_at, k_at, v_at = first_stage(), first_stage(), first_stage(), first_stage()
    work_at = advance(last_at, WORK_STAGES)
    consumer_wait(work_ring, last_at)
    ping_pong_init(HOW)
    consumer_release_all(HOW.stages, HOW.k_barriers())
    consumer_release_all(HOW.v_stages, HOW.v_barriers())
    i = W * ROWS + gl.arange(0, ROWS, layout=rows)
    COUNT: gl.constexpr = FWD_RUNS + 1 if walk.full is None else FWD_FIELDS
    TWICE: gl.constexpr = FWD_RUNS - 1
    nothing = gl.full([ROWS], float("-inf"), gl.float32, layout=rows)
    none = gl.full([ROWS], 0.0, gl.float32, layout=rows)
    m, l, largest = nothing, none, nothing
    by_row = none  # what a straight line adds beside the rest of m
    acc = zero_acc(ROWS, v_smem)
    p = gl.zeros([ROWS, BLOCK], k_smem[0].dtype, layout=lhs_layout(v_smem[0].shape[2]))
    slot = gl.to_tensor(0)
    while slot >= 0:
        if HOW.early_q_release:
            tokens = add_values(acc, p, v_smem, v_ring, of_before(k_at, v_at, HOW))
        consumer_wait(q_ring, q_at)
        queries = at_stage(q_smem, HOW.consumers * q_at[0] + W)
        if HOW.q_in_registers:
            queries = (
                queries[0].load(lhs_layout(BLOCK)),
            )  # Shared memory is then read for keys alone.
        context = (queries, k_smem, v_smem, k_ring, v_ring, q_ring, q_at, ())
        if HOW.early_q_release:
            s = issue_scores(context, k_at, live_columns(HOW, True, True), HOW)
            ping_pong_pass(HOW)
        elif not HOW.first_block_in_loop:
            s, tokens = issue(context, acc, p, k_at, v_at, live_columns(HOW, True, True), HOW)
            if HOW.q_in_registers:  # A product has read them, so they have arrived: not before.
                consumer_release(q_ring, q_at)
        consumer_wait(work_ring, work_at)
        slot, first, h, b, row = read_work(work_smem, work_at, 0, 5, 4)
        to_go = gl.to_tensor(0)
        if HOW.early_q_release:
            (twice,) = read_work(work_smem, work_at, TWICE, FWD_RUNS, 4)
            to_go = twice // 2
        q_idx = positions(
            coords.q_pos, coords.q_stride, coords.q, b, first + i, first + i < q_len, INDEX
        )
        at = (gl.cast(coords.b, INDEX) + b, gl.cast(coords.h, INDEX) + h, q_idx, b)
        of_row = hoist_rows(at[0], at[1], q_idx, of_score, of_mask, True, HOW)
        bias = locate_bias(bands, b, h, first + W * ROWS)
        at = at + (Rows(of_row.score, of_row.mask, bias),)  # noqa: RUF005
        first_row = gl.cast(coords.q, INDEX) + first
        how_scored = (kv_len, scale, coords, of_score, of_mask, at, first_row)
        before = (last_at, i, by_row, work_smem, work_ring, to, o_smem, sizes, walk)
        if HOW.first_block_in_loop:
            state = (acc, m, l, largest, p, k_at, v_at, gl.to_tensor(1), to_go)
        else:
            state = (tokens, m, l, largest, p, k_at, v_at, gl.to_tensor(1), to_go)
            state = softmax_step(
                state, s, context, how_scored, before, row, True, True, SCORE, MASK, HOW
            )
        if HOW.slope_mma:  # This rank's, not known before its first block.
            a, by_row = slope_of_tile(scale, at, first_row, of_score, HOW)
            context = (queries, k_smem, v_smem, k_ring, v_ring, q_ring, q_at, (a, c_smem[0]))
        runs = read_work(work_smem, work_at, FWD_RUNS, COUNT, 4)
        state = visit_kv_blocks(
            state, (context, how_scored, before), walk, row, runs, kv_len,
            HOW.first_block_in_loop, attend, SCORE, MASK, HOW,
        )  # fmt: skip
        acc, m, l, largest, p, k_at, v_at, _, _ = state
        last_at, work_at = work_at, advance(work_at, WORK_STAGES)
        if not (HOW.q_in_registers or HOW.early_q_release):
            consumer_release(q_ring, q_at)
        q_at = advance(q_at, HOW.q_stages)
    tma_store_wait(0)


@gluon.jit
def slope_of_tile(scale, at, first_row, of_score, HOW: gl.constexpr):
    """What `wgmma_slope` needs of a rank, and what its rows add."""
    b, h, q_idx, _, rows = at
    of_linear = affine_operands(of_score, rows, Columns((), ()), True, HOW.block, HOW)
    return slope_lhs(scale, b, h, q_idx, first_row, of_linear, HOW.block, HOW)


@gluon.jit
def attend(
    state, given, n, PARTIAL: gl.constexpr,
    SCORE: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """One block of keys."""
    context, how_scored, before = given
    acc, m, l, largest, p, k_at, v_at, fresh, to_go = state
    s, tokens = issue(context, acc, p, k_at, v_at, live_columns(HOW, False, PARTIAL), HOW)
    state = (tokens, m, l, largest, p, k_at, v_at, fresh, to_go)
    return softmax_step(state, s, context, how_scored, before, n, False, PARTIAL, SCORE, MASK, HOW)


@gluon.jit
def issue(context, acc, p, k_at, v_at, SPAN: gl.constexpr, HOW: gl.constexpr):
    """S of the next block, and the product of the one before."""
    s = issue_scores(context, k_at, SPAN, HOW)
    acc = add_values(acc, p, context[2], context[4], of_before(k_at, v_at, HOW))
    ping_pong_pass(HOW)
    return s, acc


@gluon.jit
def issue_scores(context, k_at, SPAN: gl.constexpr, HOW: gl.constexpr):
    """S of the next block, or of the part of it that is seen, in this consumer's turn, which
    begins."""
    queries, k_smem, _, k_ring, _, _, _, slanted = context
    consumer_wait(k_ring, k_at)
    ping_pong_wait(HOW)
    BLOCK: gl.constexpr = SPAN[1]
    zero = gl.zeros([ROWS, BLOCK], gl.float32, layout=acc_layout(BLOCK))
    s = wgmma_abt(queries, slice_rows(at_stage(k_smem, k_at[0]), SPAN), zero)
    if len(slanted) > 0:  # whose columns are counted from the first one
        s = wgmma_slope(
            s,
            gl.convert_layout(slanted[0], lhs_layout(BLOCK)),
            slice_rows((slanted[1],), (0, BLOCK))[0],
        )
    return s


@gluon.jit
def add_values(acc, p, v_smem, v_ring, v_at):
    """The product of P and its values."""
    consumer_wait(v_ring, v_at)
    return wgmma_ab(acc, p, at_stage(v_smem, v_at[0]))


@gluon.jit
def of_before(k_at, v_at, HOW: gl.constexpr):
    """The cursor of the values that are multiplied with S of the keys at `k_at`: those of the block
    before. The first ones are of no block, so with as many stages one cursor is that of both."""
    if HOW.v_stages == HOW.stages:
        return k_at
    else:
        return v_at


@gluon.jit
def softmax_step(
    state, s, context, how_scored, before, n, FIRST: gl.constexpr, PARTIAL: gl.constexpr,
    SCORE: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """What follows of `issue`, for keys from n on: P of them, and acc. If they are the first of a
    rank (FIRST; or `fresh`, where that is computed among others), what was summed so far is of the
    rank before, and is finished."""
    tokens, m, l, largest, p, k_at, v_at, fresh, to_go = state
    queries, k_smem, v_smem, k_ring, v_ring, q_ring, q_at, slanted = context
    kv_len, scale, coords, of_score, of_mask, at, first_row = how_scored
    # What is seen of the block, which may be a half, and of that what the mask is asked for.
    SPAN: gl.constexpr = live_columns(HOW, FIRST, PARTIAL)
    HIDES: gl.constexpr = hidden_columns(HOW, FIRST, PARTIAL)
    BLOCK: gl.constexpr = SPAN[1]
    INDEX: gl.constexpr = HOW.index_type
    SHIFTED: gl.constexpr = HOW.affine is not None and not HOW.abs_only
    MERGED: gl.constexpr = HOW.first_block_in_loop and PARTIAL
    b, h, q_idx, row, rows = at
    n += SPAN[0]
    j = n + gl.arange(0, BLOCK, layout=hoist_layout())
    kv_idx = positions(coords.kv_pos, coords.kv_stride, coords.kv, row, j, j < kv_len, INDEX)
    columns = hoist_columns(b, h, kv_idx, rows, of_score, of_mask, True, PARTIAL, HOW)
    if HIDES[1] < BLOCK:
        kv_idx = hidden_positions(coords.kv, n, HIDES, hoist_layout(), HOW)
        of_hidden = hoist_columns(b, h, kv_idx, rows, of_score, of_mask, True, PARTIAL, HOW)
        columns = Columns(columns.score, of_hidden.mask)
    if HOW.relative_biases > 0:
        of_score = of_score + (load_bias(rows.bias, n, BLOCK),)  # noqa: RUF005
    if HOW.q_in_registers:  # Their registers stay as they are until then.
        s = wgmma_wait((s,), queries[0], len(v_smem))[0]
    elif len(slanted) > 0:
        s = wgmma_wait((s,), slanted[0], len(v_smem))[0]
    else:  # The product of the block before may go on; that of the rank before was issued first.
        s = warpgroup_mma_wait(0 if HOW.early_q_release and FIRST else len(v_smem), deps=[s])
    consumer_release(k_ring, k_at, True, HOW.k_barriers())
    at_before = of_before(k_at, v_at, HOW)
    if HOW.early_q_release:
        to_go -= 1
        consumer_release(q_ring, q_at, to_go == 0)
    k_at = advance(k_at, HOW.stages)

    j = n + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, acc_layout(BLOCK)))
    live = j < kv_len
    kv_idx = positions(coords.kv_pos, coords.kv_stride, coords.kv, row, j, live, INDEX)
    # Plus 0, which LLVM does not know: or it would keep the distances of all pairs in registers.
    q_idx = row_vector(q_idx + ((n + kv_len) >> 31), BLOCK)
    rows = Rows(rows_for_width(rows.score, BLOCK), rows_for_width(rows.mask, BLOCK), rows.bias)
    kv_first = gl.cast(coords.kv, INDEX) + n
    if HOW.affine is None:
        t, unit, s = apply_score(
            s, scale, b, h, q_idx[:, None], kv_idx[None, :], of_score, SCORE, HOW.positive_scale
        )
    else:
        of_linear = affine_operands(of_score, rows, columns, True, BLOCK, HOW)
        t, unit, by_row = affine_scores(
            s, scale, b, h, q_idx, kv_idx, first_row, kv_first, of_linear, len(slanted) > 0, HOW
        )
        s = s * scale
    if PARTIAL and MASK is not None:
        t = hide(t, b, h, q_idx, kv_idx, kv_first, rows, columns, of_mask, HIDES, MASK, HOW)
    if PARTIAL and not HOW.even_kv:
        t = gl.where(live[None, :], t, float("-inf"))
    done = (m, l, largest)
    if FIRST or MERGED:
        m = gl.where(fresh > 0, float("-inf"), m)
        l = gl.where(fresh > 0, 0.0, l)
        largest = gl.where(fresh > 0, float("-inf"), largest)
    if HOW.track_max:  # of S, where T says that the pair is kept
        whole = t + by_row[:, None] if SHIFTED else t
        seen = gl.where(whole == float("-inf"), float("-inf"), s)
        largest = gl.maximum(largest, row_vector(gl.max(seen, 1), HOW.block))
    m_before = m
    most = gl.max(t, 1) * unit
    m = gl.maximum(m, row_vector(most + by_row if SHIFTED else most, HOW.block))
    # A query that has seen nothing yet has m = -inf, and exp2(-inf - 0) = 0 is what it needs.
    base = gl.where(m == float("-inf"), 0.0, m)
    less = row_vector(base, BLOCK)
    if SHIFTED:  # Rounded, it may be less than the largest T: no exponential is to be above 1.
        less = gl.maximum(less - by_row, most)
    e = gl.exp2(t * unit - less[:, None])
    shrink = gl.exp2(m_before - base)
    l = l * shrink + row_vector(gl.sum(e, 1), HOW.block)
    acc = wgmma_wait(tokens, p, 0)
    consumer_release(v_ring, at_before, True, HOW.v_barriers())
    v_at = advance(v_at, HOW.v_stages)
    p = of_all_columns(materialize(e.to(k_smem[0].dtype)), SPAN, HOW)
    p = gl.convert_layout(p, lhs_layout(v_smem[0].shape[2]))
    if FIRST:
        epilogue(acc, done, before, SCORE, HOW)
        acc = zero_acc(ROWS, v_smem)
    elif MERGED:  # FIRST or not, as the loop goes
        if fresh > 0:
            epilogue(acc, done, before, SCORE, HOW)
            acc = zero_acc(ROWS, v_smem)
        else:
            acc = scale_rows(acc, shrink)
    else:
        acc = scale_rows(acc, shrink)
    return acc, m, l, largest, p, k_at, v_at, gl.to_tensor(0), to_go
