"""The forward's scheduler: it takes ranks from a counter, and tells what each is.

What a block mask says of a rank stands in a table (`ranks.table`): from a ticket to what it means
is one read of global memory. The next rank is taken when this one is nearly copied: what is taken
earlier is kept from others, which may have nothing else to do. But a short rank is over before its
successor is found: behind it, the next one is taken at once.
"""

from .gluon_api import gl, gluon
from .pipeline import await_, start, step
from .tile import ROWS
from .walk import tell

SHORT = gl.constexpr(4)  # blocks of a rank that others do not miss


@gluon.jit
def schedule(smem, rings, counter, total, sizes, walk, HOW: gl.constexpr):
    """Take ranks, and tell what each is."""
    work_smem, _, _, _, _ = smem
    work_ring, _, _, _, more_ring = rings
    work_at = tell(start(), work_smem, work_ring, _ghost(walk, sizes[2]))
    more_at = start()
    turns = sizes[0] // walk.near
    # Relaxed: nothing is told by it, and a fence for the whole GPU takes as long as the addition.
    rank = gl.atomic_add(counter, 1, sem="relaxed")
    while rank < total:
        blocks, work, runs = _described(rank, walk, sizes, turns, HOW)
        # Short ones are taken ahead, but for the last ones.
        ahead = (blocks <= SHORT) & (rank + 4 * gl.num_programs(0) < total)
        twice = 2 * blocks + gl.where(ahead, 1, 0)
        work_at = tell(work_at, work_smem, work_ring, work + (twice,) + runs)  # noqa: RUF005
        if not ahead:
            await_(more_ring, more_at)
            more_at = step(more_at, 1)
        rank = gl.atomic_add(counter, 1, sem="relaxed")
    # Every CTA takes one rank too many. Whose is the last leaves 0 for the next launch.
    gl.store(counter, 0, mask=rank == total + gl.num_programs(0) - 1)
    tell(work_at, work_smem, work_ring, _ghost(walk, sizes[2]))


@gluon.jit
def _described(rank, walk, sizes, turns, HOW: gl.constexpr):
    """The blocks of a rank, and its numbers but one. Ranks of some heads follow one another,
    longest line first; `turns`: in how many parts of a batch row's heads that happens."""
    _, group, _, kv_len, _ = sizes
    if walk.full is None:  # noqa: SIM108
        ranks = walk.lines
    else:
        ranks = walk.lines * walk.b * walk.h * HOW.sub
    several = ranks * walk.near
    rest = rank // several
    turn = rank - rest * several
    n = turn // walk.near
    b = rest // turns
    h = (rest - b * turns) * walk.near + turn - n * walk.near
    if walk.full is None:
        blocks = gl.maximum((kv_len + HOW.block - 1) // HOW.block, 1)
        row = (blocks - 1) * HOW.block
        return blocks, (n, n * (HOW.consumers * ROWS), h, b, row, h // group), (blocks,)
    else:
        slot, first, of_h, of_b, row, blocks = _read(walk.order, n, 0, 6)
        runs = _read(walk.order, n, 8, 16)
        # What the mask does not tell apart, the rest of the rank does.
        free = walk.h == 1
        h = gl.where(free, h, of_h)
        b = gl.where(walk.b == 1, gl.where(free, b, rest), of_b)
        return blocks, (slot, first, h, b, row, h // group), runs


@gluon.jit
def _read(table, n, FROM: gl.constexpr, TO: gl.constexpr):
    """Some columns of row n of the table of ranks (`ranks.table`)."""
    found = ()
    for i in gl.static_range(FROM, TO):
        found = found + (gl.load(table + n * 16 + i),)  # noqa: RUF005
    return found


@gluon.jit
def _ghost(walk, q_len):
    """A rank of one block, past the end."""
    if walk.full is None:
        return -1, q_len, 0, 0, 0, 0, 2, 0
    else:
        return -1, q_len, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0
