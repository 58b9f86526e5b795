"""The words in which the kernels talk about their pipelines, and nothing else.

A **channel** carries tiles from one side of a kernel to the other through a ring of `STAGES`
places in shared memory. It is a pair of arrays of mbarriers, `(full, empty)`, one of each per
stage: `full` completes when a stage holds a new tile, `empty` when every reader has let go of the
old one.

A **cursor** `(stage, phase)` says where a side stands in the ring. The phase flips at every turn:
the barriers of a stage complete once per turn, and a wait for a phase passes once the completion
of that parity is the latest. A writer waits for the opposite one, which on a fresh barrier passes:
in the first turn all stages are empty.

    writer:  acquire, copy into the stage (which completes `full`), step
    reader:  await_, read, release, step

Triton lets all threads of a partition meet before one of them arrives at an mbarrier. A
**numbered** channel, `(full,)`, has barriers of the hardware in the place of `empty`
(`config.Barriers`), where the threads of all readers and of the writer meet: each warp of a reader
arrives by itself, and goes on. They have no phase, and the first turn is like every other: its
stages are to be released too.

Where the reader shall first put something into the stage that the writer reads, it **offers** it:
it lets go of a stage before, and not after, what is written there.

    reader:  release (or copy into the stage, which completes `empty`), await_, read, step
    writer:  accept, read, write, publish, step

CTAs that add to the same place take **turns** at a counter in global memory, where the order of
their sums shall not vary (`bwd/dq_semaphore.py`): a turn is the number of those that add before.
The counter is of one partition of each CTA.

    await_turn, add, wait until that has landed, pass_on

Consumers take **turns of their own** at the tensor cores, the first one first, with the barriers of
the hardware that have numbers:

    begin_turns (once), await_own_turn, issue, end_turn

`tests/hopper/simulator.py` runs the kernels by these rules.
"""

from .gluon_compat import barrier, fence_async_shared, fence_global, gl, gluon, inline_ptx, mbarrier


@gluon.jit
def mbarrier_ring(
    STAGES: gl.constexpr, WRITERS: gl.constexpr, READERS: gl.constexpr,
    BARRIERS: gl.constexpr = None,
):  # fmt: skip
    """A channel: `full` counts arrivals of the writers (a TMA copy is one), `empty` of readers.
    Both are to be used (`signal`). `BARRIERS`: of a numbered one."""
    if BARRIERS is None:
        return full_barriers(STAGES, WRITERS) + full_barriers(STAGES, READERS)
    else:
        return full_barriers(STAGES, WRITERS)


@gluon.jit
def full_barriers(STAGES: gl.constexpr, WRITERS: gl.constexpr):
    """Half a channel, where what else is awaited says that a stage is empty.

    A barrier that no partition uses must not be made: Triton gives its place in shared memory to
    something else, which PTX forbids without `mbarrier.inval`, and on an H200 numbers that stood
    there were overwritten, once in 10,000 ranks.
    """
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(full.index(n), count=WRITERS)
    return (full,)


@gluon.jit
def fence_barrier_init():
    """After the last channel is made: what follows, in every partition, sees them all."""
    fence_async_shared()


@gluon.jit
def first_stage():
    """The cursor of the first tile."""
    return gl.to_tensor(0), gl.to_tensor(0)


@gluon.jit
def advance(at, STAGES: gl.constexpr):
    """The cursor of the next tile."""
    stage, phase = at
    if STAGES == 1:
        return stage, phase ^ 1
    elif STAGES == 2:
        return stage ^ 1, phase ^ stage
    else:
        last = stage == STAGES - 1
        return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def previous(at, STAGES: gl.constexpr):
    """The cursor of the tile before."""
    stage, phase = at
    first = stage == 0
    return gl.where(first, STAGES - 1, stage - 1), gl.where(first, phase ^ 1, phase)


@gluon.jit
def stage_of(n, STAGES: gl.constexpr):
    """The cursor of tile n: one number to remember, where registers are short."""
    return n % STAGES, n // STAGES % 2


@gluon.jit
def producer_acquire(ring, at, BARRIERS: gl.constexpr = None):
    """Wait until the stage may be written."""
    if BARRIERS is None:
        mbarrier.wait(ring[1].index(at[0]), at[1] ^ 1)
    else:
        inline_ptx(BARRIERS.ptx("bar.sync"), BARRIERS.first + at[0])


@gluon.jit
def producer_accept(ring, at, condition=True):
    """Wait until the stage is offered, if it will be."""
    mbarrier.wait(ring[1].index(at[0]), at[1], pred=condition)


@gluon.jit
def consumer_wait(ring, at, condition=True):
    """Wait until the stage holds this turn's tile, if one is to come."""
    mbarrier.wait(ring[0].index(at[0]), at[1], pred=condition)


@gluon.jit
def consumer_release(ring, at, condition=True, BARRIERS: gl.constexpr = None):
    """Let the stage be written again, if it was read."""
    if BARRIERS is None:
        mbarrier.arrive(ring[1].index(at[0]), count=1, pred=condition)
    else:
        inline_ptx(BARRIERS.ptx("bar.arrive"), BARRIERS.first + at[0], condition)


@gluon.jit
def consumer_release_all(STAGES: gl.constexpr, BARRIERS: gl.constexpr):
    """Let every stage of a numbered channel be written: a reader's first word about it."""
    if BARRIERS is not None:
        for n in gl.static_range(STAGES):
            consumer_release(None, (n, 0), True, BARRIERS)


@gluon.jit
def producer_commit(ring, at, condition=True):
    """Say that the stage, written by ordinary stores, holds this turn's tile, if it does."""
    mbarrier.arrive(ring[0].index(at[0]), count=1, pred=condition)


@gluon.jit
def semaphore_wait(counter, turn):
    """Wait until so many have added; of all threads, each."""
    while gl.load(counter, volatile=True) < turn:
        pass
    fence_global()


@gluon.jit
def semaphore_release(counter, turn):
    """Let the next one add, when all threads of the partition have added; not after turn -1, which
    is nobody's."""
    barrier()
    gl.atomic_add(counter, 1, mask=turn >= 0, sem="release")


@gluon.jit
def ping_pong_init(HOW: gl.constexpr):
    """The first turn is that of consumer 0; of one consumer there are no turns."""
    if HOW.consumers > 1 and HOW.consumer == 0:
        inline_ptx(HOW.ping_pong_ptx("bar.arrive", 0))


@gluon.jit
def ping_pong_wait(HOW: gl.constexpr):
    """Wait until it is this consumer's turn."""
    if HOW.consumers > 1:
        inline_ptx(HOW.ping_pong_ptx("bar.sync", HOW.consumer))


@gluon.jit
def ping_pong_pass(HOW: gl.constexpr):
    """It is the next consumer's turn."""
    if HOW.consumers > 1:
        inline_ptx(HOW.ping_pong_ptx("bar.arrive", (HOW.consumer + 1) % HOW.consumers))
