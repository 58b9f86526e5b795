"""The forward's loader: it copies what each rank needs into shared memory, and asks the scheduler
for one more rank a little before it is done with a long one."""

from ..device.gluon_compat import gl, gluon
from ..device.mma import ROWS, produce_rows
from ..device.pipeline import advance, consumer_release, consumer_wait, first_stage, producer_commit
from ..device.work_tile import FWD_FIELDS, FWD_RUNS, WORK_STAGES, read_work, visit_kv_blocks


@gluon.jit
def produce(q, k, v, smem, rings, sizes, walk, HOW: gl.constexpr):
    """Copy what each rank needs."""
    work_smem, q_smem, k_smem, v_smem, _, _ = smem
    work_ring, q_ring, k_ring, v_ring, more_ring = rings
    _, _, q_len, kv_len, _ = sizes
    COUNT: gl.constexpr = FWD_RUNS + 1 if walk.full is None else FWD_FIELDS
    consumer_release(work_ring, first_stage())
    work_at = advance(first_stage(), WORK_STAGES)
    q_at = first_stage()
    to_q, to_k, to_v = (q, q_smem, q_ring), (k, k_smem, k_ring), (v, v_smem, v_ring)
    # Of the ghost before, there is only its last product to come; of the one after, only its S.
    kv_at = (
        first_stage(),
        produce_rows(first_stage(), to_v, 0, 0, 0, 1, HOW.v_stages, HOW.v_barriers()),
    )
    consumer_wait(work_ring, work_at)
    (slot,) = read_work(work_smem, work_at, 0, 1, 1)
    while slot >= 0:
        first, h, b, row, of_kv, twice = read_work(work_smem, work_at, 1, FWD_RUNS, 1)
        ask = gl.where(twice % 2 == 1, 0, gl.maximum(twice // 2 - 1, 1))
        runs = read_work(work_smem, work_at, FWD_RUNS, COUNT, 1)
        consumer_release(work_ring, work_at)
        work_at = advance(work_at, WORK_STAGES)
        if not HOW.early_q_release:
            q_at = load_queries(q_at, to_q, b, h, first, HOW)
        given = (to_q, to_k, to_v, b, h, first, of_kv, more_ring)
        state = (kv_at[0], kv_at[1], ask, q_at, gl.to_tensor(True))
        state = visit_kv_blocks(
            state, given, walk, row, runs, kv_len, True, load_block, None, None, HOW
        )
        kv_at = (state[0], state[1])
        q_at = state[3]
        consumer_wait(work_ring, work_at)
        (slot,) = read_work(work_smem, work_at, 0, 1, 1)
    load_queries(q_at, to_q, 0, 0, q_len, HOW)
    produce_rows(kv_at[0], to_k, 0, 0, 0, 1, HOW.stages, HOW.k_barriers())


@gluon.jit
def load_block(
    state, given, n, PARTIAL: gl.constexpr,
    SCORE: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Copy the keys and values from n on; at the `ask`-th block, ask for one more rank. Where the
    queries have one place, keys of the first block can be there before it is free."""
    to_q, to_k, to_v, b, h, first, of_kv, more_ring = given
    k_at, v_at, ask, q_at, is_first = state
    producer_commit(more_ring, first_stage(), ask == 1)
    k_at = produce_rows(k_at, to_k, b, of_kv, n, 1, HOW.stages, HOW.k_barriers())
    if HOW.early_q_release:  # noqa: SIM102  (it is known when this is compiled)
        if is_first:
            q_at = load_queries(q_at, to_q, b, h, first, HOW)
    v_at = produce_rows(v_at, to_v, b, of_kv, n, 1, HOW.v_stages, HOW.v_barriers())
    return k_at, v_at, ask - 1, q_at, gl.to_tensor(False)


@gluon.jit
def load_queries(at, to_q, b, h, first, HOW: gl.constexpr):
    """Copy the queries of a rank: of each consumer, where each has a channel, as it lets go."""
    q, q_smem, rings = to_q
    COUNT: gl.constexpr = len(rings)
    EACH: gl.constexpr = HOW.consumers // COUNT
    for n in gl.static_range(COUNT):
        to = (q, q_smem, rings[n])
        row = first + n * EACH * ROWS
        produce_rows(at, to, b, h, row, EACH, HOW.q_stages, FIRST=n * EACH)
    return advance(at, HOW.q_stages)
