"""The loader of bwd/kernel.py: it takes ranks, or whole islands, and copies what they need."""

from ..device.gluon_compat import gl, gluon
from ..device.mma import ROWS
from ..device.pipeline import first_stage
from ..device.work_tile import locate_tile, runs_to_write, write_work
from .common import load
from .segments import island_of, of_island_to_tell, place_in_island


@gluon.jit
def produce(
    inputs, smem, rings, counter, total, last, marks, items, sizes, walk, HOW: gl.constexpr
):
    """Take ranks, or islands rank by rank; tell what they are, and copy what each needs."""
    of_inputs, _, _, work_smem = smem
    input_rings, _, _, work_ring = rings
    heads, group, share, q_len, q_rows, kv_len = sizes
    to = (inputs, of_inputs, input_rings, work_smem, work_ring, walk, marks)
    sizes = (share, group, (heads, q_len, q_rows, kv_len))
    state = (first_stage(), (first_stage(), first_stage(), first_stage()))
    if HOW.owns_segment:
        total = gl.load(items)
    taken = gl.atomic_add(counter, 1, sem="relaxed")
    while taken < total:
        if HOW.owns_segment:
            island = island_of(items, taken)
            for n in range(0, island[1]):
                at = place_in_island(island, n, walk, heads // share, HOW.subtiles)
                state = _deal_rank(state, at, to, sizes, HOW)
        else:
            at = locate_tile(taken, total, last, walk, heads // share, HOW.subtiles, 2 * ROWS)
            state = _deal_rank(state, at, to, sizes, HOW)
        taken = gl.atomic_add(counter, 1, sem="relaxed")
    # Every CTA takes one too many. Whose is the last leaves 0 for the next launch.
    gl.store(counter, 0, mask=taken == total + gl.num_programs(0) - 1)
    write_work(state[0], work_smem, work_ring, (-1, 0, 0, 0, 0))


@gluon.jit
def _deal_rank(state, at, to, sizes, HOW: gl.constexpr):
    """Tell and copy one rank; the state is where the channels stand."""
    work_at, copied = state
    inputs, smem, rings, work_smem, work_ring, walk, marks = to
    share, group, lengths = sizes
    line, slot, first, h, b = at[0], at[1], at[2], at[3] * share, at[4]
    runs = runs_to_write(walk, line, HOW)
    work = (line, slot, first, h, b) + of_island_to_tell(marks, at, HOW) + runs  # noqa: RUF005
    work_at = write_work(work_at, work_smem, work_ring, work)
    at = (line, slot, first, h, b, share, group)
    return work_at, load(copied, inputs, smem, rings, at, runs, lengths, walk, HOW)
