"""The forward's loader: it copies what each rank needs into shared memory, and asks the scheduler
for one more rank a little before it is done with a long one."""

from .gluon_api import gl, gluon, mbarrier
from .pipeline import acquire, await_, publish, release, start, step
from .tile import ROWS, bytes_of, fetch
from .walk import NUMBERS, RUNS, TOLD, told, visit_rank


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
        state = visit_rank(state, given, walk, row, runs, kv_len, True, load_block, None, None, HOW)
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
