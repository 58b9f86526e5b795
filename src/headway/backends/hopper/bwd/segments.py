"""A CTA of bwd/kernel.py owns **segments** (bwd/segment_table.py), and takes the work tiles of one
in order, tile column after tile column.

dQ of a block of queries is a sum over the tile columns that visit it. Here all of these belong to
the CTA, so the sum needs no tensor of its own, no zeroing before and no kernel after. What is
summed so far lies in the CTA's own float32 **dQ-accum** memory, which stays in the L2 cache from
segment to segment. Of all visits of a block

- the first one writes its part there
- those in between add theirs
- the last one reads what is there, adds its own part in registers, and writes dQ, scaled and
  rounded; if it is the first one as well, it reads nothing

So the order of the sum is that of the tile columns, always the same. All of it passes through the
shared memory of the dQ tiles. Before a last visit the reduce warp has TMA load dQ-accum into that
memory, and only then releases it to the consumer. dV and dK take the same way at the end of a work
tile, so the keys and values of the next one are loaded meanwhile.
"""

from ..device.gluon_compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_load,
    tma_reduce_add,
    tma_store,
    tma_store_wait,
    tma_store_wait_visible,
)
from ..device.mma import ROWS, acc_layout, matrix_layout
from ..device.pipeline import (
    RingCursor,
    advance,
    consumer_release,
    consumer_wait,
    first_stage,
    producer_accept,
    producer_commit,
)
from ..device.work_tile import ONE_WARP, WORK_STAGES, read_q_runs, visit_q_blocks
from .common import (
    ACCUM_LAYOUT,
    from_accum_order,
    read_key_tile,
    read_segment_visits,
    to_accum_order,
)
from .context import (
    HeadSegment,
    KeyTile,
    QueryHead,
    SegmentHeader,
    SegmentItem,
    SegmentReduceContext,
    SegmentTile,
    SegmentVisits,
)
from .dq_reduce import accum_row
from .epilogue import seen_as_keys

# The kind of a visit of a block (`visit_kind`): VISIT, and FIRST or LAST or both; 0 is no visit.
VISIT = gl.constexpr(1)
FIRST = gl.constexpr(2)
LAST = gl.constexpr(4)

# The columns of `Segments.items`.
TOTAL = gl.constexpr(SegmentHeader._fields.index("total"))
EQUAL_HEADS = gl.constexpr(SegmentHeader._fields.index("equal_heads"))
SPAN = gl.constexpr(SegmentHeader._fields.index("span"))
HEADER = gl.constexpr(len(SegmentHeader._fields))
ITEM = gl.constexpr(len(SegmentItem._fields))


@gluon.jit
def load_segment(segments, ticket):
    """Load the segment of a ticket that a CTA has taken."""
    equal_heads = gl.load(segments + EQUAL_HEADS)
    item = segments + HEADER + ticket // equal_heads * ITEM
    item = SegmentItem(gl.load(item), gl.load(item + 1), gl.load(item + 2))
    return HeadSegment(item, ticket % equal_heads)


@gluon.jit
def locate_in_segment(segment, n, schedule, sizes, SUB: gl.constexpr):
    """Return the n-th work tile of a segment, whose `h` is the head of dK and dV."""
    heads = sizes.heads // sizes.share
    tiles_per_head = (schedule.tile_rows >> 2) * SUB
    index = segment.item.first_tile + n
    mask_head, tile_in_head = index // tiles_per_head, index % tiles_per_head
    any_head = schedule.h == 1  # the mask is one for all heads
    nth = segment.nth_head
    h = gl.where(any_head, nth % heads, mask_head % schedule.h)
    nth = gl.where(any_head, nth // heads, nth)
    b = gl.where(schedule.b == 1, nth, mask_head // schedule.h)
    tile = KeyTile(index // SUB, tile_in_head, tile_in_head * (2 * ROWS), h, b)
    return SegmentTile(tile, index, segment.item.first_block)


@gluon.jit
def visits_to_write(visit_bits, tile, CONFIG: gl.constexpr):
    """Return the `SegmentVisits` of a work tile, from `locate_in_segment`; where CTAs own no
    segments, nothing reads them."""
    if CONFIG.owns_segment:
        first_bits = gl.load(visit_bits + 2 * tile.index)
        last_bits = gl.load(visit_bits + 2 * tile.index + 1)
        return SegmentVisits(first_bits, last_bits, tile.first_block)
    else:
        return SegmentVisits(0, 0, 0)


@gluon.jit
def visit_kind(visits, n):
    """Return the kind of the visit of the block of queries from n on."""
    block = n // ROWS - visits.first_block
    return VISIT + FIRST * (visits.first_bits >> block & 1) + LAST * (visits.last_bits >> block & 1)


@gluon.jit
def seen_as_dq(dq_smem, desc):
    """Return the shared memory of a dQ tile, as what TMA stores to dQ."""
    shape: gl.constexpr = [desc.block_shape[2], desc.block_shape[3]]
    return reinterpret(dq_smem, desc.dtype, shape, matrix_layout(desc.layout))


# -- a consumer -----------------------------------------------------------------------------------


@gluon.jit
def store_visit(dq, kind, segment, dq_smem, ring, dq_at):
    """Store the part of dQ that a visit of some kind has computed; or, if it is the last visit, dQ
    itself."""
    WIDTH: gl.constexpr = dq.shape[1]
    producer_accept(ring, dq_at, kind > 0)
    if kind >= LAST:
        x = gl.convert_layout(to_accum_order(dq), ACCUM_LAYOUT)
        if kind == VISIT + LAST:
            x += dq_smem.load(ACCUM_LAYOUT)
        x = gl.convert_layout(from_accum_order(x), acc_layout(WIDTH)) * segment.rate
        seen_as_dq(dq_smem, segment.dq).store(x.to(segment.dq.dtype))
    elif kind > 0:
        dq_smem.store(to_accum_order(dq))


@gluon.jit
def commit_dq(ring, dq_at, kind, n, segment, CONFIG: gl.constexpr):
    """Commit the last piece of dQ of the block before; in a segment, if there was a block.
    **Returns:** the cursor, and the kind of the visit from n on."""
    fence_async_shared()
    if CONFIG.owns_segment:
        producer_commit(ring, dq_at, kind > 0)
        dq_at = RingCursor(dq_at.stage, dq_at.phase ^ (kind & VISIT))
        kind = visit_kind(segment.visits, n)
    else:
        producer_commit(ring, dq_at)
    return dq_at, kind


@gluon.jit
def store_gradient(x, k, dq_smem, ring, dq_at):
    """Store dK or dV for the reduce warp; `k`: the keys or values. **Returns:** the cursor."""
    producer_accept(ring, dq_at)
    seen_as_keys(dq_smem, k).store(x.to(k.dtype))
    fence_async_shared()
    producer_commit(ring, dq_at)
    return advance(dq_at, 1)


# -- the reduce warps -----------------------------------------------------------------------------


@gluon.jit
def reduce_segments(
    outputs, smem, rings, sizes, schedule, semaphore, W: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    """Write and add the parts of dQ of consumer W, and then dQ, dV and dK."""
    inputs, dq_smem, ring = smem.inputs, smem.dq[0].index(W), rings.dq[W][0]
    span = gl.load(outputs.segments + SPAN)
    work_at, dq_at = first_stage(), first_stage()
    consumer_wait(rings.work, work_at)
    tile = read_key_tile(smem.work, work_at, ONE_WARP)
    visits = read_segment_visits(smem.work, work_at, ONE_WARP)
    while tile.tile_col >= 0:
        runs = read_q_runs(smem.work, work_at, schedule, ONE_WARP, CONFIG)
        # What earlier work tiles wrote has landed; within one, no block is visited twice.
        tma_store_wait_visible()
        for n in range(sizes.share):
            accum_head = gl.program_id(0) * sizes.share + n  # in the memory of all CTAs
            first_row = (accum_head * span - visits.first_block) * ROWS
            head = QueryHead(tile.h + n, tile.b)
            context = SegmentReduceContext(
                outputs.dq_accum[0], outputs.segment_dq, dq_smem, ring, W, first_row, visits, head
            )
            dq_at = visit_q_blocks(
                dq_at, context, schedule, tile.tile_col, runs, sizes.q_len, 0, _reduce_visit,
                None, None, None, CONFIG,
            )  # fmt: skip
        if outputs.dv is not None:
            coord = [tile.b, tile.h // sizes.share, tile.first_key + W * ROWS, 0]
            dq_at = copy_gradient_out(outputs.dv, coord, inputs.v.index(W), dq_smem, ring, dq_at)
            k = inputs.k[0].index(W)
            dq_at = copy_gradient_out(outputs.dk[0], coord, k, dq_smem, ring, dq_at)
        consumer_release(rings.work, work_at)
        work_at = advance(work_at, WORK_STAGES)
        consumer_wait(rings.work, work_at)
        tile = read_key_tile(smem.work, work_at, ONE_WARP)
        visits = read_segment_visits(smem.work, work_at, ONE_WARP)


@gluon.jit
def copy_gradient_out(desc, coord, k, dq_smem, ring, dq_at):
    """Release the dQ tile's memory for dK or dV, and store that. **Returns:** the cursor."""
    consumer_release(ring, dq_at)
    consumer_wait(ring, dq_at)
    tma_store(desc, coord, seen_as_keys(dq_smem, k))
    tma_store_wait(0)
    return advance(dq_at, 1)


@gluon.jit
def _reduce_visit(
    dq_at, context, n, has_next, PARTIAL: gl.constexpr,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Release the dQ tile's memory for the block of queries from n on, with what is to be read
    there; and store or add what the consumer makes of it."""
    dq_accum, dq, dq_smem = context.dq_accum, context.dq, context.dq_smem
    ring, W, head = context.ring, context.consumer, context.head
    COLUMNS: gl.constexpr = dq.block_shape[3]
    kind = visit_kind(context.visits, n)
    coord = [accum_row(context.first_row + n, W, 0, (dq_smem,), CONFIG), 0]
    reads = kind == VISIT + LAST
    empty = ring.empty.index(dq_at.stage)
    mbarrier.expect(empty, 4 * dq_smem.shape[0] * dq_smem.shape[1], pred=reads)
    tma_load(dq_accum, coord, empty, dq_smem, pred=reads)
    consumer_release(ring, dq_at, kind != VISIT + LAST)
    consumer_wait(ring, dq_at)
    if kind >= LAST:
        tma_store(dq, [head.b, head.h, n, W * COLUMNS], seen_as_dq(dq_smem, dq))
    elif kind >= FIRST:
        tma_store(dq_accum, coord, dq_smem)
    else:
        tma_reduce_add(dq_accum, coord, dq_smem)
    tma_store_wait(0)
    return advance(dq_at, 1)
