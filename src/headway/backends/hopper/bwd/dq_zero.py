"""The zeros that parts of dq are added to in bwd/kernel.py, written by a warp of it.

A kernel before would do so while nothing else runs. This warp is there anyhow: partitions are given
registers by four warps, and loader and adders are three.

Heads are filled in the order of the ranks that need them, and shortly before, so that zeros are in
the L2 cache still when something is added to them. When its CTA has a new rank, this warp sees to
it that the blocks of all heads to the rank's own, and of some after it, are taken: from a counter,
each by a CTA that fills it at once. So nobody waits for a CTA that does not run. An adder waits for
the heads that it adds to.
"""

from ..device.gluon_compat import fence_async_shared, gl, gluon, tma_store, tma_store_wait_visible
from ..device.mma import ROWS
from ..device.pipeline import (
    advance,
    consumer_release,
    consumer_wait,
    first_stage,
    mbarrier_ring,
    semaphore_wait,
)
from ..device.work_tile import WORK_STAGES, read_work

LINES = gl.constexpr(4)  # of 256 numbers, that are copied at once
AHEAD = gl.constexpr(1)  # ranks of each CTA, whose heads are filled before they are needed


@gluon.jit
def nothing(lines):
    """Shared memory for zeros; nothing, where they are written before."""
    if lines is None:
        return ()
    else:
        return gl.allocate_shared_memory(gl.float32, lines.block_shape, lines.layout)


@gluon.jit
def of_work(lines):
    """The channel of work, to consumers and adders, and to this warp, where it writes zeros."""
    if lines is None:
        return mbarrier_ring(WORK_STAGES, 1, 4)
    else:
        return mbarrier_ring(WORK_STAGES, 1, 5)


@gluon.jit
def write_zeros(
    lines, zeroed, zeros, work_smem, ring, sizes, total, walk, COLUMNS: gl.constexpr,
    HOW: gl.constexpr,
):  # fmt: skip
    """Fill all heads, together with the other CTAs.

    - `lines`: descriptor of the parts, of `LINES` at once; `zeros`: as many, in shared memory.
    - `zeroed`: int32, 0 before: for each head, how many blocks of `ROWS`
      queries are zeros; then how many are taken.
    """
    if lines is not None:
        heads, _, share, _, q_rows, _ = sizes
        ranks = walk.tile_rows * HOW.subtiles
        batch = walk.b  # of the mask: its ranks go through these first
        all_heads = total // ranks * share
        ahead = (AHEAD * gl.num_programs(0) // ranks + 1) * share
        blocks = q_rows // ROWS
        layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 1], [1, 0])
        zeros.store(gl.full(zeros.shape, 0.0, gl.float32, layout=layout))
        fence_async_shared()
        at = first_stage()
        consumer_wait(ring, at)
        line, _, _, h, b = read_work(work_smem, at, 0, 5, 1)
        while line >= 0:
            consumer_release(ring, at, line + h + b >= 0)  # always; when these numbers are there
            at = advance(at, WORK_STAGES)
            # Its last head, in that order.
            own = (b // batch * heads + h + share - 1) * batch + b % batch
            needed = gl.minimum(own + 1 + ahead, all_heads) * blocks
            taken = gl.load(zeroed + all_heads, volatile=True)
            while taken < needed:
                block = gl.atomic_add(zeroed + all_heads, 1, sem="relaxed")
                if block < all_heads * blocks:
                    n = block // blocks
                    head = n % batch * heads + n // batch
                    first = (head * blocks + block % blocks) * (COLUMNS // 4)
                    for piece in range(0, COLUMNS // 4, LINES):
                        tma_store(lines, [first + piece, 0], zeros)
                    tma_store_wait_visible()
                    gl.atomic_add(zeroed + head, 1, sem="release")
                taken = block + 1
            consumer_wait(ring, at)
            line, _, _, h, b = read_work(work_smem, at, 0, 5, 1)


@gluon.jit
def await_zeros(lines, zeroed, head, q_rows):
    """Wait until all of a head's memory is zeros."""
    if lines is not None:
        semaphore_wait(zeroed + head, q_rows // ROWS)
