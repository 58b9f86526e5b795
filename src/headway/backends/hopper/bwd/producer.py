"""The producer of bwd/kernel.py: the tile scheduler, and the TMA loads of each work tile."""

from ..device.gluon_compat import gl, gluon
from ..device.mma import ROWS
from ..device.pipeline import first_stage
from ..device.work_tile import BwdTile, locate_tile, runs_to_write, write_work
from .common import load_work_tile
from .context import KeyTile, LoadCursors
from .segments import TOTAL, load_segment, locate_in_segment, visits_to_write


@gluon.jit
def produce(
    inputs,
    smem,
    rings,
    counter,
    total,
    last_columns,
    visit_bits,
    segments,
    sizes,
    schedule,
    CONFIG: gl.constexpr,
):
    """Take work tiles, or segments, from the counter until there are no more. Write down each work
    tile for the other partitions, and load what it needs."""
    cursors = (first_stage(), LoadCursors(first_stage(), first_stage(), first_stage()))
    context = (inputs, smem, rings, sizes, visit_bits)
    if CONFIG.owns_segment:
        total = gl.load(segments + TOTAL)
    ticket = gl.atomic_add(counter, 1, sem="relaxed")
    while ticket < total:
        if CONFIG.owns_segment:
            segment = load_segment(segments, ticket)
            for n in range(0, segment.item.tiles):
                tile = locate_in_segment(segment, n, schedule, sizes, CONFIG.subtiles)
                cursors = _produce_tile(cursors, tile.tile, tile, context, schedule, CONFIG)
        else:
            tile = locate_tile(
                ticket,
                total,
                last_columns,
                schedule,
                sizes.heads // sizes.share,
                CONFIG.subtiles,
                2 * ROWS,
            )
            tile = KeyTile(*tile)
            cursors = _produce_tile(cursors, tile, None, context, schedule, CONFIG)
        ticket = gl.atomic_add(counter, 1, sem="relaxed")
    # Every CTA takes one too many. The one that takes the last resets the counter for the next
    # launch.
    gl.store(counter, 0, mask=ticket == total + gl.num_programs(0) - 1)
    write_work(cursors[0], smem.work, rings.work, KeyTile(-1, 0, 0, 0, 0))


@gluon.jit
def _produce_tile(cursors, tile, segment_tile, context, schedule, CONFIG: gl.constexpr):
    """Write down and load one work tile, whose `h` is the head of dK and dV. `segment_tile`: from
    `locate_in_segment`, or None. **Returns:** the cursors of the work tiles and of the
    loads."""
    work_at, load_at = cursors
    inputs, smem, rings, sizes, visit_bits = context
    tile = KeyTile(tile.tile_col, tile.tile_in_head, tile.first_key, tile.h * sizes.share, tile.b)
    runs = runs_to_write(schedule, tile.tile_col, CONFIG)
    visits = visits_to_write(visit_bits, segment_tile, CONFIG)
    work = BwdTile(*tile, *visits) + runs
    work_at = write_work(work_at, smem.work, rings.work, work)
    load_at = load_work_tile(
        load_at, inputs, smem.inputs, rings.inputs, tile, runs, sizes, schedule, CONFIG
    )
    return work_at, load_at
