"""The zeros in dQ-accum, which a warp of bwd/kernel.py writes just ahead of their first use.

A kernel before this one would write them while nothing else runs. This warp is there anyhow:
partitions get registers by four warps, and the producer and the reduce warps are three.

Heads are zeroed in the order of the work tiles that need them, and shortly before, so that the
zeros are still in the L2 cache when something is added to them. When its CTA has a new work tile,
this warp sees to it that all blocks of all heads up to the work tile's own, and of some heads after
it, are taken. It takes blocks from a global counter, each for itself, and zeroes one at once. So
nobody waits for a CTA that does not run. A reduce warp waits for the heads that it adds to.
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
from ..device.work_tile import ONE_WARP, WORK_STAGES
from .common import ACCUM_WIDTH, read_key_tile

READERS = gl.constexpr(4)  # of a work tile: two consumers, two reduce warps
ZERO_ROWS = gl.constexpr(4)  # rows of dQ-accum, that one copy zeroes
AHEAD = gl.constexpr(1)  # work tiles of each CTA, whose heads are zeroed before they are needed


@gluon.jit
def zero_buffer(zero_rows):
    """Allocate shared memory for zeros; none where dQ-accum is zeroed before this kernel."""
    if zero_rows is None:
        return ()
    else:
        return gl.allocate_shared_memory(gl.float32, zero_rows.block_shape, zero_rows.layout)


@gluon.jit
def work_ring(zero_rows):
    """Make the pipeline of work tiles, to the consumers, the reduce warps, and this warp, where it
    writes zeros."""
    if zero_rows is None:
        return mbarrier_ring(WORK_STAGES, 1, READERS)
    else:
        return mbarrier_ring(WORK_STAGES, 1, READERS + 1)


@gluon.jit
def write_zeros(
    zero_rows, zeroed_blocks, zeros, work_smem, ring, sizes, total, schedule, COLUMNS: gl.constexpr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Zero dQ-accum of all heads, together with the other CTAs.

    - `zero_rows`: descriptor of dQ-accum, by `ZERO_ROWS` rows; `zeros`: as many, in shared memory.
    - `zeroed_blocks`: int32, 0 before: for each head how many blocks of `ROWS` queries are zeroed;
      then how many blocks of all heads are taken.
    """
    if zero_rows is not None:
        tiles_per_head = (schedule.tile_rows >> 2) * CONFIG.subtiles
        mask_batch = schedule.b  # batch rows of the mask: their work tiles go through these first
        all_heads = total // tiles_per_head * sizes.share
        ahead = (AHEAD * gl.num_programs(0) // tiles_per_head + 1) * sizes.share
        blocks = sizes.q_rows // ROWS
        block_rows: gl.constexpr = ROWS * COLUMNS // ACCUM_WIDTH
        layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 1], [1, 0])
        zeros.store(gl.full(zeros.shape, 0.0, gl.float32, layout=layout))
        fence_async_shared()
        work_at = first_stage()
        consumer_wait(ring, work_at)
        tile = read_key_tile(work_smem, work_at, ONE_WARP)
        while tile.tile_col >= 0:
            # The condition is always true; it makes the release wait until these numbers are read.
            consumer_release(ring, work_at, tile.tile_col + tile.h + tile.b >= 0)
            work_at = advance(work_at, WORK_STAGES)
            # The last head of the work tile, in that order.
            last_head = (
                tile.b // mask_batch * sizes.heads + tile.h + sizes.share - 1
            ) * mask_batch + tile.b % mask_batch
            needed_blocks = gl.minimum(last_head + 1 + ahead, all_heads) * blocks
            taken_blocks = gl.load(zeroed_blocks + all_heads, volatile=True)
            while taken_blocks < needed_blocks:
                block = gl.atomic_add(zeroed_blocks + all_heads, 1, sem="relaxed")
                if block < all_heads * blocks:
                    n = block // blocks
                    head = n % mask_batch * sizes.heads + n // mask_batch
                    first = (head * blocks + block % blocks) * block_rows
                    for row in range(0, block_rows, ZERO_ROWS):
                        tma_store(zero_rows, [first + row, 0], zeros)
                    tma_store_wait_visible()
                    gl.atomic_add(zeroed_blocks + head, 1, sem="release")
                taken_blocks = block + 1
            consumer_wait(ring, work_at)
            tile = read_key_tile(work_smem, work_at, ONE_WARP)


@gluon.jit
def wait_for_zeros(zero_rows, zeroed_blocks, head, q_rows):
    """Wait until all of a head's dQ-accum is zeros."""
    if zero_rows is not None:
        semaphore_wait(zeroed_blocks + head, q_rows // ROWS)
