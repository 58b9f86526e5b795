"""dQ in bwd/wide.py: its consumer adds it to dQ-accum in global memory by itself."""

from ..device.gluon_compat import gl, gluon, reinterpret, warpgroup_mma, warpgroup_mma_wait
from ..device.mma import ROWS, acc_layout, matrix_layout
from ..device.pipeline import (
    RingCursor,
    advance,
    consumer_release,
    consumer_wait,
    first_stage,
    semaphore_release,
    semaphore_wait,
)
from ..device.work_tile import visit_q_blocks
from .common import (
    ACCUM_LAYOUT,
    ACCUM_WIDTH,
    CHUNK,
    CHUNK_ROWS,
    CHUNK_SIZE,
    counter_of,
    opaque_zero,
    ticket_of,
    to_accum_order,
)
from .context import WideReduceContext

P_STAGES = gl.constexpr(3)  # of P, which becomes dS


@gluon.jit
def consume_dq(dq_accum, smem, rings, tile, sizes, schedule, semaphore, CONFIG: gl.constexpr):
    """Compute dQ of the CTA's work tile, and add it to dQ-accum."""
    consumer_wait(rings.inputs.k, RingCursor(0, 0))
    ds_at = first_stage()
    for n in range(sizes.share):
        first_row = (tile.b * sizes.heads + tile.h + n) * sizes.q_rows
        context = WideReduceContext(
            dq_accum, smem, rings, first_row, sizes.share, semaphore, tile, schedule.step
        )
        state = (ds_at, gl.to_tensor(0))
        state = visit_q_blocks(
            state, context, schedule, tile.tile_col, (), sizes.q_len, 0, dq_q_block,
            None, None, None, CONFIG,
        )  # fmt: skip
        ds_at = state[0]


@gluon.jit
def dq_q_block(
    state, context, n, has_next, PARTIAL: gl.constexpr,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Add the work tile's part of dQ of the queries from n on, 64 columns at a time."""
    smem, rings, semaphore = context.smem, context.rings, context.semaphore
    ds_at, visited = state
    k = smem.inputs.k[0]
    STRIPS: gl.constexpr = k.shape[2] // CHUNK
    zero = opaque_zero(n, context.share)
    row = context.first_row + n
    chunk = gl.cast(row // CHUNK, gl.int64) * STRIPS
    k = reinterpret(k, k.dtype, [STRIPS, ROWS, CHUNK], matrix_layout(k.layout))
    zero_tile = gl.full([ROWS, CHUNK], 0.0, gl.float32, layout=acc_layout(CHUNK))
    if semaphore is not None:
        ticket = ticket_of(semaphore, context.tile, visited // context.step, CONFIG)
    consumer_wait(rings.ds, ds_at)
    if semaphore is not None:
        semaphore_wait(counter_of(semaphore, row, 0), ticket)
    ds = smem.p.index(ds_at.stage).permute((1, 0))
    # A loop that cannot be unrolled: the assembler would compute the next columns into registers
    # that it does not have.
    for strip in range(zero, STRIPS):
        x = warpgroup_mma(ds, k.index(strip), zero_tile, use_acc=False, is_async=True)
        x = warpgroup_mma_wait(0, deps=[x])
        add_chunk(context.dq_accum + (chunk + strip) * CHUNK_SIZE, x)
    consumer_release(rings.p, ds_at)
    if semaphore is not None:
        semaphore_release(counter_of(semaphore, row, 0), ticket)
    return advance(ds_at, P_STAGES), visited + CONFIG.block


@gluon.jit
def add_chunk(ptr, x):
    """Add 64 x 64 numbers to global memory: 16 bytes of a thread, threads adjacent."""
    x = gl.convert_layout(to_accum_order(x), ACCUM_LAYOUT)
    rows = gl.arange(0, CHUNK_ROWS, layout=gl.SliceLayout(1, ACCUM_LAYOUT))[:, None]
    columns = gl.arange(0, ACCUM_WIDTH, layout=gl.SliceLayout(0, ACCUM_LAYOUT))[None, :]
    gl.atomic_add(ptr + rows * ACCUM_WIDTH + columns, x, sem="relaxed")
