"""The dQ reduce warps of bwd/kernel.py: TMA adds to dQ-accum what the consumers have stored."""

from ..device.gluon_compat import gl, gluon, tma_reduce_add, tma_store_wait, tma_store_wait_visible
from ..device.mma import at_stage
from ..device.pipeline import (
    advance,
    consumer_release,
    consumer_wait,
    first_stage,
    semaphore_release,
    semaphore_wait,
)
from ..device.work_tile import ONE_WARP, WORK_STAGES, read_q_runs, visit_q_blocks
from .common import CHUNK, CHUNK_ROWS, counter_of, read_key_tile, ticket_of
from .context import ReduceContext
from .dq_zero import wait_for_zeros
from .epilogue import copy_dkdv_out


@gluon.jit
def reduce_dq(
    outputs, smem, rings, sizes, schedule, semaphore, W: gl.constexpr, CONFIG: gl.constexpr
):
    """Add the dQ tiles of consumer W.

    Where the main loop is not software-pipelined, the last piece comes one block late, across work
    tiles as well. The very first one, before the first block, is zeros.
    """
    dq_smem = at_stage(smem.dq, W)
    work_at = first_stage()
    consumer_wait(rings.work, work_at)
    tile = read_key_tile(smem.work, work_at, ONE_WARP)
    dq_at, ticket = first_stage(), gl.to_tensor(-1)
    row = (tile.b * sizes.heads + tile.h) * sizes.q_rows
    while tile.tile_col >= 0:
        runs = read_q_runs(smem.work, work_at, schedule, ONE_WARP, CONFIG)
        for n in range(sizes.share):
            head = tile.b * sizes.heads + tile.h + n
            wait_for_zeros(outputs.zero_rows, outputs.zeroed_blocks, head, sizes.q_rows)
            context = ReduceContext(
                outputs.dq_accum, dq_smem, rings.dq[W], W, head * sizes.q_rows, semaphore, tile,
                schedule.step,
            )  # fmt: skip
            state = (dq_at, row, ticket, gl.to_tensor(0))
            state = visit_q_blocks(
                state, context, schedule, tile.tile_col, runs, sizes.q_len, 0, reduce_q_block,
                None, None, None, CONFIG,
            )  # fmt: skip
            dq_at, row, ticket, _visited = state
        if outputs.dv is not None:
            dq_at = copy_dkdv_out(outputs, smem, rings, work_at, sizes, dq_at, W)
        consumer_release(rings.work, work_at)
        work_at = advance(work_at, WORK_STAGES)
        consumer_wait(rings.work, work_at)
        tile = read_key_tile(smem.work, work_at, ONE_WARP)
    if not CONFIG.pipelined:
        context = ReduceContext(
            outputs.dq_accum, dq_smem, rings.dq[W], W, row, semaphore, tile, schedule.step
        )
        reduce_piece(context, row, ticket, dq_at, len(outputs.dq_accum) - 1, CONFIG)


@gluon.jit
def reduce_q_block(
    state, context, n, has_next, PARTIAL: gl.constexpr,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Add the pieces of the block of queries from n on. A piece that comes one block late is of the
    block before, which the state has."""
    dq_at, row, ticket, visited = state
    COUNT: gl.constexpr = len(context.rings) if CONFIG.pipelined else len(context.rings) - 1
    if not CONFIG.pipelined:
        reduce_piece(context, row, ticket, dq_at, COUNT, CONFIG)
    ticket = ticket_of(context.semaphore, context.tile, visited // context.step, CONFIG)
    for piece in gl.static_range(COUNT):
        reduce_piece(context, context.first_row + n, ticket, dq_at, piece, CONFIG)
    return advance(dq_at, 1), context.first_row + n, ticket, visited + CONFIG.block


@gluon.jit
def reduce_piece(context, row, ticket, dq_at, PIECE: gl.constexpr, CONFIG: gl.constexpr):
    """Add one piece to the rows from `row` on; when the semaphore says so, if there is one."""
    W, semaphore, ring = context.consumer, context.semaphore, context.rings[PIECE]
    if semaphore is not None:
        counter = counter_of(semaphore, row, 2 * PIECE) + W
    consumer_wait(ring, dq_at)
    if semaphore is not None:
        semaphore_wait(counter, ticket)
    coord = [accum_row(row, W, PIECE, context.dq_smem, CONFIG), 0]
    tma_reduce_add(context.dq_accum[PIECE], coord, context.dq_smem[PIECE])
    tma_store_wait(0)
    consumer_release(ring, dq_at)
    if semaphore is not None:
        tma_store_wait_visible()
        semaphore_release(counter, ticket)


@gluon.jit
def accum_row(row, W, PIECE: gl.constexpr, dq_smem, CONFIG: gl.constexpr):
    """Return the row of dQ-accum to which consumer W adds a piece, for the queries from `row` on.

    Of 128 queries a consumer has the chunk of its 64 queries. Of 64 queries it has the chunk, or
    the half of one, of its columns; and beyond 128 columns another half.
    """
    chunk = row // CHUNK
    if len(dq_smem) == 2:
        if PIECE == 0:
            return (chunk * 3 + W) * CHUNK_ROWS
        else:
            return (chunk * 3 + 2) * CHUNK_ROWS + W * (CHUNK_ROWS // 2)
    elif CONFIG.block == 128:
        return (chunk + W) * CHUNK_ROWS
    else:
        return (chunk * 2 + W) * dq_smem[0].shape[0]
