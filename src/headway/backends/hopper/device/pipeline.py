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


class Ring(NamedTuple):
    """mbarriers in shared memory, int64 `(STAGES, 1)` each."""

    full: Any
    empty: Any  # (): something else says when a stage is empty


class Cursor(NamedTuple):
    """Where one side of a ring is."""

    stage: Any
    phase: Any


# -- rings ----------------------------------------------------------------------------------------


@gluon.jit
def mbarrier_ring(
    STAGES: gl.constexpr, PRODUCERS: gl.constexpr, CONSUMERS: gl.constexpr,
    BARRIERS: gl.constexpr = None,
):  # fmt: skip
    """A ring. `full` counts the arrivals of producers (a TMA load is one), `empty` those of
    consumers. Both have to be used (`full_barriers`).

    - `BARRIERS`: named barriers in place of `empty`, or None.
    """
    if BARRIERS is None:
        return Ring(_mbarriers(STAGES, PRODUCERS), _mbarriers(STAGES, CONSUMERS))
    else:
        return full_barriers(STAGES, PRODUCERS)


@gluon.jit
def full_barriers(STAGES: gl.constexpr, PRODUCERS: gl.constexpr):
    """A ring without `empty`, where something else that is awaited says that a stage is empty.

    Never initialise an mbarrier that no partition uses: Triton reuses its shared memory, which PTX
    forbids without `mbarrier.inval`; on an H200 the numbers that stood there were overwritten, once
    in 10,000 work tiles.
    """
    return Ring(_mbarriers(STAGES, PRODUCERS), ())


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
    """The cursor of the first tile."""
    return Cursor(gl.to_tensor(0), gl.to_tensor(0))


@gluon.jit
def advance(at, STAGES: gl.constexpr):
    """The cursor of the next tile."""
    stage, phase = at
    if STAGES == 1:
        return Cursor(stage, phase ^ 1)
    elif STAGES == 2:
        return Cursor(stage ^ 1, phase ^ stage)
    else:
        last = stage == STAGES - 1
        return Cursor(gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase))


@gluon.jit
def previous(at, STAGES: gl.constexpr):
    """The cursor of the tile before."""
    stage, phase = at
    first = stage == 0
    return Cursor(gl.where(first, STAGES - 1, stage - 1), gl.where(first, phase ^ 1, phase))


@gluon.jit
def stage_of(n, STAGES: gl.constexpr):
    """The cursor of tile n: one number to keep instead of two, where registers are short."""
    return Cursor(n % STAGES, n // STAGES % 2)


@gluon.jit
def producer_acquire(ring, at, BARRIERS: gl.constexpr = None):
    """Wait until the stage may be written."""
    if BARRIERS is None:
        mbarrier.wait(ring.empty.index(at.stage), at.phase ^ 1)
    else:
        inline_ptx(BARRIERS.ptx("bar.sync"), BARRIERS.first + at.stage)


@gluon.jit
def producer_accept(ring, at, condition=True):
    """Wait until the stage is offered, if `condition` holds."""
    mbarrier.wait(ring.empty.index(at.stage), at.phase, pred=condition)


@gluon.jit
def producer_commit(ring, at, condition=True):
    """Signal that the stage, written by ordinary stores, holds this round's tile, if `condition`
    holds."""
    mbarrier.arrive(ring.full.index(at.stage), count=1, pred=condition)


@gluon.jit
def consumer_wait(ring, at, condition=True):
    """Wait until the stage holds this round's tile, if `condition` holds."""
    mbarrier.wait(ring.full.index(at.stage), at.phase, pred=condition)


@gluon.jit
def consumer_release(ring, at, condition=True, BARRIERS: gl.constexpr = None):
    """Let the producer write the stage again, if `condition` holds."""
    if BARRIERS is None:
        mbarrier.arrive(ring.empty.index(at.stage), count=1, pred=condition)
    else:
        inline_ptx(BARRIERS.ptx("bar.arrive"), BARRIERS.first + at.stage, condition)


@gluon.jit
def consumer_release_all(STAGES: gl.constexpr, BARRIERS: gl.constexpr):
    """Release every stage of a ring with named barriers, before the first round."""
    if BARRIERS is not None:
        for n in gl.static_range(STAGES):
            consumer_release(None, Cursor(n, 0), True, BARRIERS)


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
def ping_pong_init(HOW: gl.constexpr):
    """Give the first turn to consumer 0. A single consumer takes no turns."""
    if HOW.consumers > 1 and HOW.consumer == 0:
        inline_ptx(HOW.ping_pong_ptx("bar.arrive", 0))


@gluon.jit
def ping_pong_wait(HOW: gl.constexpr):
    """Wait for this consumer's turn."""
    if HOW.consumers > 1:
        inline_ptx(HOW.ping_pong_ptx("bar.sync", HOW.consumer))


@gluon.jit
def ping_pong_pass(HOW: gl.constexpr):
    """Pass the turn to the next consumer."""
    if HOW.consumers > 1:
        inline_ptx(HOW.ping_pong_ptx("bar.arrive", (HOW.consumer + 1) % HOW.consumers))
