"""dq in bwd/wide.py: the consumer of queries adds it to global memory by itself."""

from ..device.gluon_compat import gl, gluon, reinterpret, warpgroup_mma, warpgroup_mma_wait
from ..device.mma import ROWS, acc_layout, matrix_layout
from ..device.pipeline import (
    Cursor,
    advance,
    consumer_release,
    consumer_wait,
    first_stage,
    semaphore_release,
    semaphore_wait,
)
from ..device.work_tile import visit_q_blocks
from .common import ORDER, counter_of, in_order, turn_of

P_STAGES = gl.constexpr(3)  # of P, which becomes dS


@gluon.jit
def queries(dq, smem, rings, at, sizes, walk, turns, HOW: gl.constexpr):
    """dq."""
    line, slot, _, h, b, share, _ = at
    heads, q_len, q_rows, _ = sizes
    consumer_wait(rings[0][0], Cursor(0, 0))
    at = first_stage()
    for n in range(share):
        row0 = (b * heads + h + n) * q_rows
        given = (dq, smem, rings, row0, share, turns, line, slot, walk.step)
        state = (at, gl.to_tensor(0))
        state = visit_q_blocks(
            state, given, walk, line, (), q_len, 0, queries_block, None, None, None, HOW
        )
        at = state[0]


@gluon.jit
def queries_block(
    state, given, n, more, PARTIAL: gl.constexpr,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """What the keys add to dq of the queries from n on, 64 columns at a time."""
    dq, smem, rings, row0, opaque, turns, line, slot, tile = given
    at, visited = state
    inputs, p_smem = smem
    k = inputs[0][0]
    _, p_ring, ds_ring = rings
    STRIPS: gl.constexpr = k.shape[2] // 64
    z = (n + opaque) >> 30
    chunk = gl.cast((row0 + n) // 64, gl.int64) * STRIPS
    k = reinterpret(k, k.dtype, [STRIPS, ROWS, 64], matrix_layout(k.layout))
    zero = gl.full([ROWS, 64], 0.0, gl.float32, layout=acc_layout(64))
    if turns is not None:
        turn = turn_of(turns, line, slot, visited // tile, HOW)
    consumer_wait(ds_ring, at)
    if turns is not None:
        semaphore_wait(counter_of(turns, row0 + n, 0), turn)
    ds = p_smem.index(at[0]).permute((1, 0))
    # A loop that cannot be unrolled: the assembler would compute the next columns into registers
    # that it does not have.
    for strip in range(z, STRIPS):
        x = warpgroup_mma(ds, k.index(strip), zero, use_acc=False, is_async=True)
        add_part(dq + (chunk + strip) * 4096, warpgroup_mma_wait(0, deps=[x]))
    consumer_release(p_ring, at)
    if turns is not None:
        semaphore_release(counter_of(turns, row0 + n, 0), turn)
    return advance(at, P_STAGES), visited + HOW.block


@gluon.jit
def add_part(to, x):
    """Add 64 x 64 numbers to global memory: 16 bytes of a thread, threads adjacent."""
    x = gl.convert_layout(in_order(x), ORDER)
    rows = gl.arange(0, 16, layout=gl.SliceLayout(1, ORDER))[:, None]
    columns = gl.arange(0, 256, layout=gl.SliceLayout(0, ORDER))[None, :]
    gl.atomic_add(to + rows * 256 + columns, x, sem="relaxed")
