"""The producer of bwd/kernel.py: the tile scheduler, and the TMA loads of each work tile."""

from ..device.gluon_compat import gl, gluon
from ..device.mma import ROWS
from ..device.pipeline import first_stage
from ..device.work_tile import BwdTile, locate_tile, runs_to_write, write_work
from .common import load_work_tile
from .context import LoadCursors, WorkTile
from .segments import TOTAL, load_segment, locate_in_segment, visits_to_write


@gluon.jit
def produce(
    inputs, smem, rings, counter, total, last, visit_bits, segments, sizes, walk, HOW: gl.constexpr
):
    """Take work tiles, or segments, from the counter until there are no more. Write down each work
    tile for the other partitions, and load what it needs."""
    at = (first_stage(), LoadCursors(first_stage(), first_stage(), first_stage()))
    context = (inputs, smem, rings, sizes, visit_bits)
    if HOW.owns_segment:
        total = gl.load(segments + TOTAL)
    taken = gl.atomic_add(counter, 1, sem="relaxed")
    while taken < total:
        if HOW.owns_segment:
            segment = load_segment(segments, taken)
            for n in range(0, segment.item.tiles):
                tile = locate_in_segment(segment, n, walk, sizes, HOW.subtiles)
                at = _produce_tile(at, tile.tile, tile, context, walk, HOW)
        else:
            tile = locate_tile(
                taken, total, last, walk, sizes.heads // sizes.share, HOW.subtiles, 2 * ROWS
            )
            tile = WorkTile(*tile)
            at = _produce_tile(at, tile, None, context, walk, HOW)
        taken = gl.atomic_add(counter, 1, sem="relaxed")
    # Every CTA takes one too many. The one that takes the last resets the counter for the next
    # launch.
    gl.store(counter, 0, mask=taken == total + gl.num_programs(0) - 1)
    write_work(at[0], smem.work, rings.work, WorkTile(-1, 0, 0, 0, 0))


@gluon.jit
def _produce_tile(at, tile, segment_tile, context, walk, HOW: gl.constexpr):
    """Write down and load one work tile, whose `h` is the head of dK and dV. `segment_tile`: what
    `locate_in_segment` says of it, or None. **Returns:** the cursors of the work tiles and of the
    loads."""
    work_at, load_at = at
    inputs, smem, rings, sizes, visit_bits = context
    tile = WorkTile(tile.tile_col, tile.n_block, tile.first_key, tile.h * sizes.share, tile.b)
    runs = runs_to_write(walk, tile.tile_col, HOW)
    visits = visits_to_write(visit_bits, segment_tile, HOW)
    work = BwdTile(*tile, *visits) + runs
    work_at = write_work(work_at, smem.work, rings.work, work)
    load_at = load_work_tile(
        load_at, inputs, smem.inputs, rings.inputs, tile, runs, sizes, walk, HOW
    )
    return work_at, load_at
