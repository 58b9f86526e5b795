"""The adders of bwd/kernel.py: they have the copy engine add to dq what consumers made."""

from ..device.gluon_compat import gl, gluon, tma_reduce_add, tma_store_wait, tma_store_wait_visible
from ..device.mma import ROWS, at_stage
from ..device.pipeline import (
    advance,
    consumer_release,
    consumer_wait,
    first_stage,
    semaphore_release,
    semaphore_wait,
)
from ..device.work_tile import WORK_STAGES, read_runs, read_work, visit_q_blocks
from .common import counter_of, turn_of
from .dq_zero import await_zeros
from .epilogue import copy_keys


@gluon.jit
def reduce_dq(to, smem, rings, sizes, walk, turns, W: gl.constexpr, HOW: gl.constexpr):
    """Add the parts of dq that consumer W hands over. Where it does not lag, the last piece comes
    one block late, from rank to rank as within one; its first, from before the first block, is
    zeros."""
    dq, dk, dv, _, zeroing = to
    lines, zeroed = zeroing
    inputs, _, dq_smem, work_smem = smem
    _, _, dq_rings, work_ring = rings
    heads, _, share, q_len, q_rows, _ = sizes
    to = (dq, at_stage(dq_smem, W), dq_rings[W], W)
    work_at = first_stage()
    consumer_wait(work_ring, work_at)
    line, slot, _, h, b = read_work(work_smem, work_at, 0, 5, 1)
    dq_at, row, turn = first_stage(), (b * heads + h) * q_rows, gl.to_tensor(-1)
    while line >= 0:
        runs = read_runs(work_smem, work_at, walk, 1, HOW)
        for n in range(share):
            await_zeros(lines, zeroed, b * heads + h + n, q_rows)
            given = (to, (b * heads + h + n) * q_rows, turns, line, slot, walk.step)
            state = (dq_at, row, turn, gl.to_tensor(0))
            state = visit_q_blocks(
                state, given, walk, line, runs, q_len, 0, add_block, None, None, None, HOW
            )
            dq_at, row, turn, _visited = state
        if dv is not None:
            first, h, b = read_work(work_smem, work_at, 2, 5, 1)
            keys = (inputs[0], inputs[1])
            first += W * ROWS
            dq_at = copy_keys(dk, dv, b, h // share, first, keys, to[1], to[2], dq_at, W)
        consumer_release(work_ring, work_at)
        work_at = advance(work_at, WORK_STAGES)
        consumer_wait(work_ring, work_at)
        line, slot, _, h, b = read_work(work_smem, work_at, 0, 5, 1)
    if not HOW.pipelined:
        add_part(to, row, turns, turn, dq_at, len(dq) - 1, HOW)


@gluon.jit
def add_block(
    state, given, n, more, PARTIAL: gl.constexpr,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Add the pieces of the block from n on, which is remembered; those that come late are of the
    block before."""
    to, row0, turns, line, slot, tile = given
    dq_at, row, turn, visited = state
    COUNT: gl.constexpr = len(to[0]) if HOW.pipelined else len(to[0]) - 1
    if not HOW.pipelined:
        add_part(to, row, turns, turn, dq_at, COUNT, HOW)
    turn = turn_of(turns, line, slot, visited // tile, HOW)
    for piece in gl.static_range(COUNT):
        add_part(to, row0 + n, turns, turn, dq_at, piece, HOW)
    return advance(dq_at, 1), row0 + n, turn, visited + HOW.block


@gluon.jit
def add_part(to, row, turns, turn, at, PIECE: gl.constexpr, HOW: gl.constexpr):
    """Add one piece to the rows from `row` on, in turn where there are turns."""
    dq, dq_smem, rings, W = to
    if turns is not None:
        counter = counter_of(turns, row, 2 * PIECE) + W
    consumer_wait(rings[PIECE], at)
    if turns is not None:
        semaphore_wait(counter, turn)
    tma_reduce_add(dq[PIECE], [place_of(row, W, PIECE, dq_smem, HOW), 0], dq_smem[PIECE])
    tma_store_wait(0)
    consumer_release(rings[PIECE], at)
    if turns is not None:
        tma_store_wait_visible()
        semaphore_release(counter, turn)


@gluon.jit
def place_of(row, W, PIECE: gl.constexpr, dq_smem, HOW: gl.constexpr):
    """Where consumer W adds a piece for the queries from `row` on, in rows of 256 numbers: of 128
    queries each has the chunk of 64 x 64 that is its queries'; of 64, the chunk or the half of one
    that is its columns', and beyond 128 columns another half."""
    chunk = row // 64
    if len(dq_smem) == 2:
        if PIECE == 0:
            return (chunk * 3 + W) * 16
        else:
            return (chunk * 3 + 2) * 16 + W * 8
    elif HOW.block == 128:
        return (chunk + W) * 16
    else:
        return (chunk * 2 + W) * dq_smem[0].shape[0]
