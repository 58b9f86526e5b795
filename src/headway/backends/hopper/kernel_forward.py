"""The forward kernel: online softmax over the live tiles of 128 queries, on tensor cores that never
wait for it.

(Shah et al. 2024, FlashAttention-3, arXiv 2407.08608, algorithms 1 and 2, without its ping-pong.)

A persistent CTA has a **scheduler** (`kernel_forward_scheduler.py`), which takes the next 128
queries of a head (a rank) from a counter, longest line first, and tells what there is to do; a
**loader**, which copies their rows, and those of the keys and values that they visit, into shared
memory, and asks for one more rank a little before it is done with a long one; and two **consumers**
(or three), a warpgroup each, which own 64 of the queries. While a consumer turns S of one block
into P, the tensor cores compute P V of the one before:

    for every block n:
        in turn with the other consumers: issue S_n = q k_nᵀ;  issue O += P_{n-1} v_{n-1}
        wait for S_n;  P_n = exp2(S_n - m)
        wait for O;  O *= exp2(m_before - m), where m has changed (`lazy.py`)

and so from rank to rank: S of the first block of a rank is issued with the last product of the rank
before, whose out is stored then. At both ends of a CTA's work stands a **ghost**, a rank of rows
past the end, so that no rank is a special case: it sees one block, and nothing of it is stored.

Loader and consumers walk the blocks of a line by the same function, `tile.visit_rest`, and so agree
on them.
"""

from .diagonals import begin, read
from .gluon_api import (
    copy_out_wait,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma_wait,
)
from .kernel_forward_out import finish
from .kernel_forward_scheduler import schedule
from .lazy import SLACK, none, rescaled, shrunk, sum_of
from .linear import linear_scores
from .pipeline import (
    acquire,
    await_,
    await_own_turn,
    begin_turns,
    channel,
    end_turn,
    publish,
    ready,
    release,
    signal,
    start,
    step,
)
from .sides import by_thread, given, keep, of_columns, of_rows
from .tile import (
    NUMBERS,
    ROWS,
    RUNS,
    TOLD,
    add_product,
    at_stage,
    buffers,
    bytes_of,
    fetch,
    kept,
    left,
    mma,
    numbers,
    outer,
    pieces,
    positions,
    scores,
    settle,
    told,
    visit_rest,
    zeros,
)


# Numbers that change from call to call do not make a kernel of their own.
@gluon.jit(
    do_not_specialize=[
        "total", "heads", "group", "q_len", "kv_len", "dv", "score_numbers", "mask_numbers",
    ]
)  # fmt: skip
def forward(
    q0, q1, k0, k1, v0, v1, out0, out1,  # descriptors of pieces; no out where `wide_out` is given
    wide_out, lse, row_max, top, sink,  # pointers; all but lse may be None
    counter, total,  # of the ranks: the next one (0, before and after), and how many there are
    heads, group, q_len, kv_len, dv, scale, coords, walk, bands,
    score_tensors, mask_tensors, score_numbers, mask_numbers,  # what the functions capture
    SCORE: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,  # HOW: `config.How`
):  # fmt: skip
    """out and lse of every rank, and what else is asked for."""
    STAGES: gl.constexpr = HOW.stages
    # Launchers take descriptors one by one, and not in tuples.
    q, k, v, out = pieces(q0, q1), pieces(k0, k1), pieces(v0, v1), pieces(out0, out1)
    q_smem = buffers(HOW.consumers * HOW.queries, q)
    k_smem = buffers(STAGES, k)
    v_smem = buffers(STAGES, v)
    if wide_out is None:  # noqa: SIM108
        o_smem = buffers(HOW.consumers, out)
    else:
        o_smem = ()
    work_smem = numbers()
    rings = (
        channel(TOLD, 1, HOW.consumers + 1),  # work
        channel(HOW.queries, 1, HOW.consumers),  # queries
        channel(STAGES, 1, HOW.consumers),  # keys
        channel(STAGES, 1, HOW.consumers),  # values
        signal(1, 1),  # from the loader to the scheduler: one more
    )
    ready()
    smem = (work_smem, q_smem, k_smem, v_smem, o_smem)
    sizes = (heads, group, q_len, kv_len, dv)
    given = (scale, coords, bands, (score_tensors, score_numbers), (mask_tensors, mask_numbers))
    to = (out, wide_out, lse, row_max, top, sink)
    if HOW.consumers == 1:
        gl.warp_specialize(
            [
                (consume, (to, smem, rings, sizes, given, walk, SCORE, MASK, HOW.of(0))),
                (load, (q, k, v, smem, rings, sizes, walk, HOW)),
                (schedule, (smem, rings, counter, total, sizes, walk, HOW)),
            ],
            [1, 1],
            [24, 24],
        )  # fmt: skip
    elif HOW.consumers == 2:
        gl.warp_specialize(
            [
                (consume, (to, smem, rings, sizes, given, walk, SCORE, MASK, HOW.of(0))),
                (consume, (to, smem, rings, sizes, given, walk, SCORE, MASK, HOW.of(1))),
                (load, (q, k, v, smem, rings, sizes, walk, HOW)),
                (schedule, (smem, rings, counter, total, sizes, walk, HOW)),
            ],
            [4, 1, 1],
            [HOW.registers, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (to, smem, rings, sizes, given, walk, SCORE, MASK, HOW.of(0))),
                (consume, (to, smem, rings, sizes, given, walk, SCORE, MASK, HOW.of(1))),
                (consume, (to, smem, rings, sizes, given, walk, SCORE, MASK, HOW.of(2))),
                (load, (q, k, v, smem, rings, sizes, walk, HOW)),
                (schedule, (smem, rings, counter, total, sizes, walk, HOW)),
            ],
            [4, 4, 1, 1],
            [HOW.registers, HOW.registers, 24, 24],
        )  # fmt: skip


# -- the loader -----------------------------------------------------------------------------------


@gluon.jit
def load(q, k, v, smem, rings, sizes, walk, HOW: gl.constexpr):
    """Copy what each rank needs."""
    work_smem, q_smem, k_smem, v_smem, _ = smem
    work_ring, q_ring, k_ring, v_ring, more_ring = rings
    _, _, q_len, kv_len, _ = sizes
    COUNT: gl.constexpr = RUNS + 1 if walk.full is None else NUMBERS
    release(work_ring, start())
    work_at = step(start(), TOLD)
    q_at = start()
    to = (k, v, k_smem, v_smem, k_ring, v_ring)
    # Of the ghost before, there is only its last product to come; of the one after, only its S.
    kv_at = (start(), load_values(start(), to, 0, 0, 0, HOW))
    await_(work_ring, work_at)
    (slot,) = told(work_smem, work_at, 0, 1, 1)
    while slot >= 0:
        first, h, b, row, of_kv, ask = told(work_smem, work_at, 1, RUNS, 1)
        runs = told(work_smem, work_at, RUNS, COUNT, 1)
        release(work_ring, work_at)
        work_at = step(work_at, TOLD)
        q_at = load_queries(q_at, q, q_smem, q_ring, b, h, first, HOW)
        given = (to, b, of_kv, more_ring)
        state = (kv_at[0], kv_at[1], ask)
        state = load_block(state, given, row, True, None, None, HOW)
        state = visit_rest(state, given, walk, runs, kv_len, load_block, None, None, HOW)
        kv_at = (state[0], state[1])
        await_(work_ring, work_at)
        (slot,) = told(work_smem, work_at, 0, 1, 1)
    q_at = load_queries(q_at, q, q_smem, q_ring, 0, 0, q_len, HOW)
    load_keys(kv_at[0], to, 0, 0, 0, HOW)


@gluon.jit
def load_queries(at, q, q_smem, q_ring, b, h, first, HOW: gl.constexpr):
    """Copy the rows of a rank, each consumer's apart."""
    COUNT: gl.constexpr = HOW.consumers
    acquire(q_ring, at)
    full = q_ring[0].index(at[0])
    mbarrier.expect(full, bytes_of(q_smem, COUNT))
    for w in gl.static_range(COUNT):
        fetch(q, b, h, first + w * ROWS, full, q_smem, COUNT * at[0] + w)
    return step(at, HOW.queries)


@gluon.jit
def load_block(
    state, given, n, PARTIAL: gl.constexpr,
    SCORE: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Copy the keys and values from n on; at the `ask`-th block, ask for one more rank."""
    to, b, h, more_ring = given
    k_at, v_at, ask = state
    publish(more_ring, start(), ask == 1)
    return load_keys(k_at, to, b, h, n, HOW), load_values(v_at, to, b, h, n, HOW), ask - 1


@gluon.jit
def load_keys(at, to, b, h, n, HOW: gl.constexpr):
    """Copy keys from n on."""
    k, _, k_smem, _, k_ring, _ = to
    acquire(k_ring, at)
    full = k_ring[0].index(at[0])
    mbarrier.expect(full, bytes_of(k_smem, 1))
    fetch(k, b, h, n, full, k_smem, at[0])
    return step(at, HOW.stages)


@gluon.jit
def load_values(at, to, b, h, n, HOW: gl.constexpr):
    """Copy values from n on."""
    _, v, _, v_smem, _, v_ring = to
    acquire(v_ring, at)
    full = v_ring[0].index(at[0])
    mbarrier.expect(full, bytes_of(v_smem, 1))
    fetch(v, b, h, n, full, v_smem, at[0])
    return step(at, HOW.stages)


# -- a consumer -----------------------------------------------------------------------------------


@gluon.jit
def consume(
    to, smem, rings, sizes, given, walk,
    SCORE: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Attend from rows 64 W to 64 W + 63 of every rank, W the number of the consumer."""
    W: gl.constexpr = HOW.consumer
    work_smem, q_smem, k_smem, v_smem, o_smem = smem
    work_ring, q_ring, k_ring, v_ring, _ = rings
    _, _, q_len, kv_len, _ = sizes
    scale, coords, bands, of_score, of_mask = given
    BLOCK: gl.constexpr = HOW.block
    INDEX: gl.constexpr = HOW.index
    rows: gl.constexpr = gl.SliceLayout(1, mma(BLOCK))
    last_at, q_at, k_at, v_at = start(), start(), start(), start()
    work_at = step(last_at, TOLD)
    await_(work_ring, last_at)
    begin_turns(HOW)
    i = W * ROWS + gl.arange(0, ROWS, layout=rows)
    COUNT: gl.constexpr = RUNS + 1 if walk.full is None else NUMBERS
    nothing = gl.full([ROWS], float("-inf"), gl.float32, layout=rows)
    m, l, peak, largest = nothing, none(BLOCK), nothing, nothing
    acc = zeros(ROWS, v_smem)
    p = gl.zeros([ROWS, BLOCK], k_smem[0].dtype, layout=left(v_smem[0].shape[2]))
    slot = gl.to_tensor(0)
    while slot >= 0:
        await_(q_ring, q_at)
        queries = at_stage(q_smem, HOW.consumers * q_at[0] + W)
        if HOW.held:
            queries = (queries[0].load(left(BLOCK)),)  # Shared memory is then read for keys alone.
            release(q_ring, q_at)
        context = (queries, k_smem, v_smem, k_ring, v_ring)
        s, tokens = issue(context, acc, p, k_at, v_at, HOW)
        await_(work_ring, work_at)
        slot, first, h, b, row = told(work_smem, work_at, 0, 5, 4)
        q_idx = positions(
            coords.q_pos, coords.q_stride, coords.q, b, first + i, first + i < q_len, INDEX
        )
        at = (gl.cast(coords.b, INDEX) + b, gl.cast(coords.h, INDEX) + h, q_idx, b)
        of_row = of_rows(at[0], at[1], q_idx, of_score, of_mask, True, HOW)
        at = at + (of_row + (begin(bands, b, h, first + W * ROWS),),)  # noqa: RUF005
        how_scored = (kv_len, scale, coords, of_score, of_mask, at)
        done = (m, l, peak, largest)
        fresh = (tokens, nothing, none(BLOCK), nothing, nothing, p, k_at, v_at)
        acc, m, l, peak, largest, p, k_at, v_at = absorb(
            fresh, s, context, how_scored, row, True, True, SCORE, MASK, HOW
        )
        last = told(work_smem, last_at, 0, 4, 4)
        release(work_ring, last_at)
        finish(acc, done, last, i, to, o_smem, sizes, walk, SCORE, HOW)
        runs = told(work_smem, work_at, RUNS, COUNT, 4)
        last_at, work_at = work_at, step(work_at, TOLD)
        state = (zeros(ROWS, v_smem), m, l, peak, largest, p, k_at, v_at)
        state = visit_rest(
            state, (context, how_scored), walk, runs, kv_len, attend, SCORE, MASK, HOW
        )  # fmt: skip
        acc, m, l, peak, largest, p, k_at, v_at = state
        if not HOW.held:
            release(q_ring, q_at)
        q_at = step(q_at, HOW.queries)
    copy_out_wait(0)


@gluon.jit
def attend(
    state, given, n, PARTIAL: gl.constexpr,
    SCORE: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """One block of keys but the first of a rank."""
    context, how_scored = given
    acc, m, l, peak, largest, p, k_at, v_at = state
    s, tokens = issue(context, acc, p, k_at, v_at, HOW)
    state = (tokens, m, l, peak, largest, p, k_at, v_at)
    return absorb(state, s, context, how_scored, n, False, PARTIAL, SCORE, MASK, HOW)


@gluon.jit
def issue(context, acc, p, k_at, v_at, HOW: gl.constexpr):
    """S of the next block, and the product of the one before."""
    queries, k_smem, v_smem, k_ring, v_ring = context
    await_(k_ring, k_at)
    await_own_turn(HOW)
    BLOCK: gl.constexpr = k_smem[0].shape[1]
    zero = gl.zeros([ROWS, BLOCK], gl.float32, layout=mma(BLOCK))
    s = outer(queries, at_stage(k_smem, k_at[0]), zero)
    await_(v_ring, v_at)
    acc = add_product(acc, p, at_stage(v_smem, v_at[0]))
    end_turn(HOW)
    return s, acc


@gluon.jit
def absorb(
    state, s, context, how_scored, n, FIRST: gl.constexpr, PARTIAL: gl.constexpr,
    SCORE: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """What follows of `issue`, for keys from n on: P of them, and acc, which is that of the rank
    before if they are the first of a rank."""
    tokens, m, l, peak, largest, p, k_at, v_at = state
    queries, k_smem, v_smem, k_ring, v_ring = context
    kv_len, scale, coords, of_score, of_mask, at = how_scored
    BLOCK: gl.constexpr = HOW.block
    INDEX: gl.constexpr = HOW.index
    SHIFTED: gl.constexpr = HOW.linear is not None and not HOW.lone
    b, h, q_idx, row, rows = at
    j = n + gl.arange(0, BLOCK, layout=by_thread())
    kv_idx = positions(coords.kv_pos, coords.kv_stride, coords.kv, row, j, j < kv_len, INDEX)
    columns = of_columns(b, h, kv_idx, rows, of_score, of_mask, True, PARTIAL, HOW)
    if HOW.bands > 0:
        of_score = of_score + (read(rows[2], n, BLOCK),)  # noqa: RUF005
    if HOW.held:  # Their registers stay as they are until then.
        s = settle((s,), queries[0], len(v_smem))[0]
    else:
        s = warpgroup_mma_wait(len(v_smem), deps=[s])
    release(k_ring, k_at)
    k_at = step(k_at, HOW.stages)

    j = n + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, mma(BLOCK)))
    live = j < kv_len
    kv_idx = positions(coords.kv_pos, coords.kv_stride, coords.kv, row, j, live, INDEX)
    # Plus 0, which LLVM does not know: or it would keep the distances of all pairs in registers.
    q_idx += (n + kv_len) >> 31
    kv_first = gl.cast(coords.kv, INDEX) + n
    if HOW.linear is None:
        t, unit, s = scores(
            s, scale, b, h, q_idx[:, None], kv_idx[None, :], of_score, SCORE, HOW.positive
        )
    else:
        of_linear = given(of_score, rows, columns, True, BLOCK, HOW)
        nothing = gl.full([BLOCK], 0.0, gl.float32, layout=gl.SliceLayout(0, mma(BLOCK)))
        t, unit, by_row = linear_scores(
            s, scale, nothing, b, h, q_idx, kv_idx, kv_first, of_linear, True, True, HOW
        )
        s = s * scale
    if PARTIAL and MASK is not None:
        kept_pairs = keep(t, b, h, q_idx, kv_idx, kv_first, rows, columns, of_mask, True, MASK, HOW)
        t = gl.where(kept_pairs, t, float("-inf"))
    if PARTIAL and not HOW.even:
        t = gl.where(live[None, :], t, float("-inf"))
    if HOW.largest:  # of S, where T says that the pair is kept
        whole = t + by_row[:, None] if SHIFTED else t
        seen = gl.where(whole == float("-inf"), float("-inf"), s)
        largest = gl.maximum(largest, gl.max(seen, 1))
    before = m
    most = gl.max(t, 1) * unit
    by_block = most + by_row if SHIFTED else most
    peak = gl.maximum(peak, by_block)  # Where nobody asks for it, the compiler drops it.
    m = by_block if FIRST else gl.where(by_block > m + SLACK, by_block, m)
    # A query that has seen nothing yet has m = -inf, and exp2(-inf - 0) = 0 is what it needs.
    base = gl.where(m == float("-inf"), 0.0, m)
    less = base
    if SHIFTED:  # Rounded, it may be too small: no exponential is to be above 2 ** SLACK.
        less = gl.maximum(base - by_row, most - SLACK)
    e = gl.exp2(t * unit - less[:, None])
    if FIRST:
        l = sum_of(e)
        acc = settle(tokens, p, 0)
    else:
        shrink = gl.exp2(before - base)
        l = shrunk(l, shrink, BLOCK) + sum_of(e)
        acc = rescaled(settle(tokens, p, 0), shrink)
    release(v_ring, v_at)
    v_at = step(v_at, HOW.stages)
    p = gl.convert_layout(kept(e.to(k_smem[0].dtype)), left(v_smem[0].shape[2]))
    return acc, m, l, peak, largest, p, k_at, v_at
