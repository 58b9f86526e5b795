"""Pipeline primitives: mbarrier rings, named barriers, semaphores in global memory, ping-pong.

A **ring** carries tiles from a producer to its consumers through `STAGES` buffers in shared memory.
It is a pair of mbarrier arrays, one mbarrier of each per stage: `full` completes when the stage
holds a new tile, `empty` when every consumer has released the old one.

A **cursor** is a side's position in the ring: stage and phase. The phase flips each time around,
because the mbarriers of a stage complete once per round; a wait for a phase passes once the latest
completion has that parity. The producer waits for the opposite parity, which a fresh mbarrier
passes: in the first round all stages are empty.

    producer:  producer_acquire, copy into the stage (which completes `full`), advance
    consumer:  consumer_wait, read, consumer_release, advance

Triton synchronises all threads of a partition before one of them arrives at an mbarrier. A ring may
have **named barriers** (`config.NamedBarriers`; PTX `bar.sync`, `bar.arrive`) in place of `empty`.
The threads of all consumers and of the producer meet there: each warp of a consumer arrives by
itself and continues. Named barriers have no phase, and their first round is like every other: all
stages have to be released first (`consumer_release_all`).

Where a consumer is to write into a stage that the producer then reads, the consumer **offers** the
stage: it releases the stage before the write, and not after.

    consumer:  consumer_release (or copy into the stage, which completes `empty`), consumer_wait,
               read, advance
    producer:  producer_accept, read, write, producer_commit, advance

CTAs that add to the same tile in global memory take turns by a **semaphore**, where the order of
the sums must not vary (`bwd/dq_semaphore.py`). A CTA's ticket is the number of CTAs that add before
it. One partition of each CTA works on the semaphore.

    semaphore_wait, add, wait until the sum is visible, semaphore_release

Consumers of one CTA take turns at the tensor cores, consumer 0 first: **ping-pong**, by named
barriers (`config.NamedBarrierId`).

    ping_pong_init (once), ping_pong_wait, issue, ping_pong_pass

`tests/tools/simulator.py` runs the kernels by these rules.
"""

from typing import Any, NamedTuple

from .gluon_compat import barrier, fence_async_shared, fence_global, gl, gluon, inline_ptx, mbarrier


class MbarrierRing(NamedTuple):
    """mbarriers in shared memory, int64 `(STAGES, 1)` each."""

    full: Any
    empty: Any  # (): something else says when a stage is empty


class RingCursor(NamedTuple):
    """The position of one side of a ring: `k_at` is the cursor of the ring of K, and so on."""

    stage: Any
    phase: Any


# -- rings ----------------------------------------------------------------------------------------


@gluon.jit
def mbarrier_ring(
    STAGES: gl.constexpr, PRODUCERS: gl.constexpr, CONSUMERS: gl.constexpr,
    BARRIERS: gl.constexpr = None,
):  # fmt: skip
    """Make a ring. `full` counts the arrivals of producers (a TMA load is one), `empty` those of
    consumers. Both have to be used (`full_barriers`).

    - `BARRIERS`: named barriers in place of `empty`, or None.
    """
    if BARRIERS is None:
        return MbarrierRing(_mbarriers(STAGES, PRODUCERS), _mbarriers(STAGES, CONSUMERS))
    else:
        return full_barriers(STAGES, PRODUCERS)


@gluon.jit
def full_barriers(STAGES: gl.constexpr, PRODUCERS: gl.constexpr):
    """Make a ring without `empty`: something else that is awaited says that a stage is empty.

    Never initialise an mbarrier that no partition uses: Triton reuses its shared memory, which PTX
    forbids without `mbarrier.inval`; on an H200 the numbers that stood there were overwritten, once
    in 10,000 work tiles.
    """
    return MbarrierRing(_mbarriers(STAGES, PRODUCERS), ())


@gluon.jit
def _mbarriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(bars.index(n), count=COUNT)
    return bars


@gluon.jit
def fence_barrier_init():
    """Make every initialised mbarrier visible to all partitions. Call it after the last ring."""
    fence_async_shared()


@gluon.jit
def first_stage():
    """Return the cursor of the first tile."""
    return RingCursor(gl.to_tensor(0), gl.to_tensor(0))


@gluon.jit
def advance(cursor, STAGES: gl.constexpr):
    """Return the cursor of the next tile."""
    stage, phase = cursor
    if STAGES == 1:
        return RingCursor(stage, phase ^ 1)
    elif STAGES == 2:
        return RingCursor(stage ^ 1, phase ^ stage)
    else:
        last = stage == STAGES - 1
        return RingCursor(gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase))


@gluon.jit
def step_back(cursor, STAGES: gl.constexpr):
    """Return the cursor of the tile before."""
    stage, phase = cursor
    first = stage == 0
    return RingCursor(gl.where(first, STAGES - 1, stage - 1), gl.where(first, phase ^ 1, phase))


@gluon.jit
def stage_of(n, STAGES: gl.constexpr):
    """Return the cursor of tile n: one number to keep instead of two, where registers are short."""
    return RingCursor(n % STAGES, n // STAGES % 2)


@gluon.jit
def producer_acquire(ring, cursor, BARRIERS: gl.constexpr = None):
    """Wait until the stage may be written."""
    if BARRIERS is None:
        mbarrier.wait(ring.empty.index(cursor.stage), cursor.phase ^ 1)
    else:
        inline_ptx(BARRIERS.ptx("bar.sync"), BARRIERS.first + cursor.stage)


@gluon.jit
def producer_accept(ring, cursor, condition=True):
    """Wait until the stage is offered, if `condition` holds."""
    mbarrier.wait(ring.empty.index(cursor.stage), cursor.phase, pred=condition)


@gluon.jit
def producer_commit(ring, cursor, condition=True):
    """Signal that the stage, written by ordinary stores, holds this round's tile, if `condition`
    holds."""
    mbarrier.arrive(ring.full.index(cursor.stage), count=1, pred=condition)


@gluon.jit
def consumer_wait(ring, cursor, condition=True):
    """Wait until the stage holds this round's tile, if `condition` holds."""
    mbarrier.wait(ring.full.index(cursor.stage), cursor.phase, pred=condition)


@gluon.jit
def consumer_release(ring, cursor, condition=True, BARRIERS: gl.constexpr = None):
    """Let the producer write the stage again, if `condition` holds."""
    if BARRIERS is None:
        mbarrier.arrive(ring.empty.index(cursor.stage), count=1, pred=condition)
    else:
        inline_ptx(BARRIERS.ptx("bar.arrive"), BARRIERS.first + cursor.stage, condition)


@gluon.jit
def consumer_release_all(STAGES: gl.constexpr, BARRIERS: gl.constexpr):
    """Release every stage of a ring with named barriers, before the first round."""
    if BARRIERS is not None:
        for n in gl.static_range(STAGES):
            consumer_release(None, RingCursor(n, 0), True, BARRIERS)


# -- semaphores in global memory ------------------------------------------------------------------


@gluon.jit
def semaphore_wait(counter, ticket):
    """Wait until the counter has reached `ticket`; every thread waits for itself."""
    while gl.load(counter, volatile=True) < ticket:
        pass
    fence_global()


@gluon.jit
def semaphore_release(counter, ticket):
    """Count up, once all threads of the partition have added. Ticket -1 belongs to nobody and is
    not counted."""
    barrier()
    gl.atomic_add(counter, 1, mask=ticket >= 0, sem="release")


# -- ping-pong ------------------------------------------------------------------------------------


@gluon.jit
def ping_pong_init(CONFIG: gl.constexpr):
    """Give the first turn to consumer 0. A single consumer takes no turns."""
    if CONFIG.consumers > 1 and CONFIG.consumer == 0:
        inline_ptx(CONFIG.ping_pong_ptx("bar.arrive", 0))


@gluon.jit
def ping_pong_wait(CONFIG: gl.constexpr):
    """Wait for this consumer's turn."""
    if CONFIG.consumers > 1:
        inline_ptx(CONFIG.ping_pong_ptx("bar.sync", CONFIG.consumer))


@gluon.jit
def ping_pong_pass(CONFIG: gl.constexpr):
    """Pass the turn to the next consumer."""
    if CONFIG.consumers > 1:
        inline_ptx(CONFIG.ping_pong_ptx("bar.arrive", (CONFIG.consumer + 1) % CONFIG.consumers))
