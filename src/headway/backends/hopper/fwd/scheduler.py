"""The forward's scheduler: it takes tickets from a counter, and tells what each is: a rank, or a
share of the last ones (stream_k.py), which is a part of one rank or of two.

What a block mask says of a rank stands in a table (`ranks.table`): from a ticket to what it means
is one read of global memory. The next rank is taken when this one is nearly copied: what is taken
earlier is kept from others, which may have nothing else to do. But a short rank is over before its
successor is found: behind it, the next one is taken at once.
"""

from ..device.gluon_compat import gl, gluon
from ..device.mma import ROWS
from ..device.pipeline import advance, consumer_wait, first_stage
from ..device.work_tile import map_work_tile, write_work

SHORT_TILE = gl.constexpr(4)  # blocks of a rank that others do not miss


@gluon.jit
def schedule(smem, rings, counter, total, last, shares, sizes, walk, HOW: gl.constexpr):
    """Take tickets, and tell what each is."""
    work_smem, _, _, _, _, _ = smem
    work_ring, _, _, _, more_ring = rings
    work_at = write_work(first_stage(), work_smem, work_ring, _sentinel_tile(walk, sizes[2], HOW))
    more_at = first_stage()
    # Relaxed: nothing is told by it, and a fence for the whole GPU takes as long as the addition.
    ticket = gl.atomic_add(counter, 1, sem="relaxed")
    while ticket < total:
        if HOW.stream_k:
            rank, low, high, number = _share(ticket, shares, sizes, HOW)
            if low < 0:  # of two ranks: of the later one first (`stream_k.py`)
                work, runs = _part(rank, 0, high, number, shares, sizes, walk, HOW)
                work_at = write_work(work_at, work_smem, work_ring, work + (2 * high + 1,) + runs)  # noqa: RUF005
                rank -= 1
                high = _blocks(sizes, HOW)
                low += high
            blocks = high - low
            work, runs = _part(rank, low, high, number, shares, sizes, walk, HOW)
        else:
            blocks, work, runs = _describe_tile(ticket, total, last, walk, sizes, HOW)
        # Short ones are taken ahead, but for the last ones.
        ahead = (blocks <= SHORT_TILE) & (ticket + 4 * gl.num_programs(0) < total)
        twice = 2 * blocks + gl.where(ahead, 1, 0)
        work_at = write_work(work_at, work_smem, work_ring, work + (twice,) + runs)  # noqa: RUF005
        if not ahead:
            consumer_wait(more_ring, more_at)
            more_at = advance(more_at, 1)
        ticket = gl.atomic_add(counter, 1, sem="relaxed")
    # Every CTA takes one too many. Whose is the last leaves 0 for the next launch.
    gl.store(counter, 0, mask=ticket == total + gl.num_programs(0) - 1)
    write_work(work_at, work_smem, work_ring, _sentinel_tile(walk, sizes[2], HOW))


@gluon.jit
def _describe_tile(rank, total, last, walk, sizes, HOW: gl.constexpr):
    """The blocks of a rank (`walk.dealt`), and its numbers but one."""
    heads, group, _, _, _ = sizes
    n, h, b = map_work_tile(rank, total, last, walk, heads, HOW.subtiles)
    if walk.full is None:
        blocks = _blocks(sizes, HOW)
        row = (blocks - 1) * HOW.block
        return blocks, (n, n * (HOW.consumers * ROWS), h, b, row, h // group), (blocks,)
    else:
        slot, first, of_h, of_b, row, blocks = _read(walk.order, n, 0, 6)
        runs = _read(walk.order, n, 8, 16)
        h = gl.where(walk.h == 1, h, of_h)
        b = gl.where(walk.b == 1, b, of_b)
        return blocks, (slot, first, h, b, row, h // group), runs


@gluon.jit
def _blocks(sizes, HOW: gl.constexpr):
    """Of a rank, where nothing is masked."""
    return gl.maximum((sizes[3] + HOW.block - 1) // HOW.block, 1)


@gluon.jit
def _share(ticket, shares, sizes, HOW: gl.constexpr):
    """The last rank of a ticket, from and to which of its blocks (from one below 0, where it begins
    in the rank before), and which share that is."""
    whole, share, several = shares
    blocks = _blocks(sizes, HOW)
    number = ticket - whole
    begin = number * share
    end = gl.minimum(begin + share, several)
    last = (end - 1) // blocks
    low, high = begin - last * blocks, end - last * blocks
    alone = number < 0
    rank = gl.where(alone, ticket, whole + last)
    return rank, gl.where(alone, 0, low), gl.where(alone, blocks, high), number


@gluon.jit
def _part(rank, low, high, number, shares, sizes, walk, HOW: gl.constexpr):
    """The numbers of a part of a rank, but one, and what `join` needs of it: which share it is,
    and how many shares before it have parts of this rank that it joins with its own; -1 where
    another one does."""
    _, work, _ = _describe_tile(rank, 0, 0, walk, sizes, HOW)
    n, first, h, b, _, of_kv = work
    whole, share, _ = shares
    blocks = _blocks(sizes, HOW)
    before = number - (rank - whole) * blocks // share
    others = gl.where(high < blocks, -1, gl.where(low > 0, before, 0))
    return (n, first, h, b, (high - 1) * HOW.block, of_kv), (high - low, number, others)


@gluon.jit
def _read(table, n, FROM: gl.constexpr, TO: gl.constexpr):
    """Some columns of row n of the table of ranks (`ranks.table`)."""
    found = ()
    for i in gl.static_range(FROM, TO):
        found = found + (gl.load(table + n * 16 + i),)  # noqa: RUF005
    return found


@gluon.jit
def _sentinel_tile(walk, q_len, HOW: gl.constexpr):
    """A rank of one block, past the end."""
    if HOW.stream_k:
        return -1, q_len, 0, 0, 0, 0, 2, 0, 0, 0
    elif walk.full is None:
        return -1, q_len, 0, 0, 0, 0, 2, 0
    else:
        return -1, q_len, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0
