"""A CTA of bwd/kernel.py takes **whole islands** (bwd/segment_table.py), one line after the other.

dq of a block of queries is a sum over the lines that visit it. Here they are all the CTA's, so the
sum needs no tensor of its own, no zeros before and no kernel after: what was added up so far lies
in float32 **parts** of the CTA, which stay in the L2 cache from island to island. Of all visits of
a block

- the first one writes its part there
- those between add theirs
- the last one reads what is there, adds its own in registers, and writes dq, scaled and rounded;
  if it is the first one as well, nothing is read

So the order of a sum is that of the lines, always the same. All of it passes through the places
that a consumer hands its parts over in. Before a last visit the adder has the copy engine read into
the place, and only then offers it. dv and dk take the same way at the end of a rank, and so the
next one's keys and values are copied meanwhile.
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
    advance,
    consumer_release,
    consumer_wait,
    first_stage,
    producer_accept,
    producer_commit,
)
from ..device.work_tile import WORK_STAGES, read_runs, read_work, visit_q_blocks
from .common import ORDER, in_order, in_rows
from .dq_reduce import place_of
from .epilogue import as_keys

# What a visit of a block is (`kind_of`): VISIT, and one of the others or both; 0 is none.
VISIT = gl.constexpr(1)
FIRST = gl.constexpr(2)
LAST = gl.constexpr(4)
# Numbers of `Islands.items`: before the islands, and of each.
HEADER = gl.constexpr(3)
ITEM = gl.constexpr(3)


@gluon.jit
def island_of(items, taken):
    """First rank, ranks, first block of an island; and which head of those alike."""
    alike = gl.load(items + 1)
    item = items + HEADER + taken // alike * ITEM
    return gl.load(item), gl.load(item + 1), gl.load(item + 2), taken % alike


@gluon.jit
def place_in_island(island, n, walk, heads, SUB: gl.constexpr):
    """The work of the n-th rank of an island, as `place` tells it; its number, and the island's
    first block."""
    first, _, block, rest = island
    ranks = walk.tile_rows * SUB
    rank = first + n
    of_mask, slot = rank // ranks, rank % ranks
    free = walk.h == 1
    h = gl.where(free, rest % heads, of_mask % walk.h)
    rest = gl.where(free, rest // heads, rest)
    b = gl.where(walk.b == 1, rest, of_mask // walk.h)
    return rank // SUB, slot, slot * (2 * ROWS), h, b, rank, block


@gluon.jit
def of_island_to_tell(marks, at, HOW: gl.constexpr):
    """What is told of a rank besides, from `place_in_island`: which blocks it visits first, which
    last, and its island's first block."""
    if HOW.owns_segment:
        return gl.load(marks + 2 * at[5]), gl.load(marks + 2 * at[5] + 1), at[6]
    else:
        return 0, 0, 0


@gluon.jit
def kind_of(of_rank, n):
    """What the visit of the block from n on is."""
    first, last, block = of_rank
    at = n // ROWS - block
    return VISIT + FIRST * (first >> at & 1) + LAST * (last >> at & 1)


@gluon.jit
def as_dq(place, to):
    """The place of a part, as what the copy engine writes to dq."""
    shape: gl.constexpr = [to.block_shape[2], to.block_shape[3]]
    return reinterpret(place, to.dtype, shape, matrix_layout(to.layout))


# -- a consumer -----------------------------------------------------------------------------------


@gluon.jit
def put(late, rate, to, place, ring, at):
    """Store the part of a visit, of some kind; or, where it is the last one, dq."""
    acc_q, kind = late
    WIDTH: gl.constexpr = acc_q.shape[1]
    producer_accept(ring, at, kind > 0)
    if kind >= LAST:
        x = gl.convert_layout(in_order(acc_q), ORDER)
        if kind == VISIT + LAST:
            x += place.load(ORDER)
        x = gl.convert_layout(in_rows(x), acc_layout(WIDTH)) * rate
        as_dq(place, to).store(x.to(to.dtype))
    elif kind > 0:
        place.store(in_order(acc_q))


@gluon.jit
def offer(ring, at, kind, n, whole, HOW: gl.constexpr):
    """Offer the last piece of dq of the block before; of an island, if there was a block.
    **Returns:** the cursor, and the kind of the visit from n on."""
    fence_async_shared()
    if HOW.owns_segment:
        producer_commit(ring, at, kind > 0)
        at = (at[0], at[1] ^ (kind & VISIT))
        kind = kind_of(whole[1], n)
    else:
        producer_commit(ring, at)
    return at, kind


@gluon.jit
def pass_keys(x, k, place, ring, at):
    """Hand dk or dv over; `k`: the keys or values. **Returns:** the cursor."""
    producer_accept(ring, at)
    as_keys(place, k).store(x.to(k.dtype))
    fence_async_shared()
    producer_commit(ring, at)
    return advance(at, 1)


# -- the adders -----------------------------------------------------------------------------------


@gluon.jit
def add_whole(
    to, smem, rings, sizes, walk, turns, W: gl.constexpr, HOW: gl.constexpr
):  # fmt: skip
    """Write and add the parts that consumer W makes of dq, and then dq and dk themselves."""
    parts, dk, dv, whole, _ = to
    dq, items = whole
    inputs, _, dq_smem, work_smem = smem
    _, _, dq_rings, work_ring = rings
    _, _, share, q_len, _, _ = sizes
    place, ring = dq_smem[0].index(W), dq_rings[W][0]
    span = gl.load(items + 2)
    work_at, at = first_stage(), first_stage()
    consumer_wait(work_ring, work_at)
    line, _, first, h, b, first_bits, last_bits, block = read_work(work_smem, work_at, 0, 8, 1)
    while line >= 0:
        runs = read_runs(work_smem, work_at, walk, 1, HOW)
        # What was written in earlier ranks; within one, no place is visited twice.
        tma_store_wait_visible()
        for n in range(share):
            row0 = ((gl.program_id(0) * share + n) * span - block) * ROWS
            of_rank = (first_bits, last_bits, block)
            given = (parts[0], dq, place, ring, of_rank, row0, h + n, b, W)
            at = visit_q_blocks(
                at, given, walk, line, runs, q_len, 0, add_visit, None, None, None, HOW
            )
        if dv is not None:
            rows = [b, h // share, first + W * ROWS, 0]
            at = copy_keys(dv, rows, inputs[1].index(W), place, ring, at)
            at = copy_keys(dk[0], rows, inputs[0][0].index(W), place, ring, at)
        consumer_release(work_ring, work_at)
        work_at = advance(work_at, WORK_STAGES)
        consumer_wait(work_ring, work_at)
        line, _, first, h, b, first_bits, last_bits, block = read_work(work_smem, work_at, 0, 8, 1)


@gluon.jit
def copy_keys(to, rows, k, place, ring, at):
    """Offer the place for dk or dv, and copy it. **Returns:** the cursor."""
    consumer_release(ring, at)
    consumer_wait(ring, at)
    tma_store(to, rows, as_keys(place, k))
    tma_store_wait(0)
    return advance(at, 1)


@gluon.jit
def add_visit(
    at, given, n, more, PARTIAL: gl.constexpr,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Offer the place for the block from n on, with what is to be read there; and copy from it."""
    parts, dq, place, ring, of_rank, row0, h, b, W = given
    COLUMNS: gl.constexpr = dq.block_shape[3]
    kind = kind_of(of_rank, n)
    there = [place_of(row0 + n, W, 0, (place,), HOW), 0]
    reads = kind == VISIT + LAST
    empty = ring[1].index(at[0])
    mbarrier.expect(empty, 4 * place.shape[0] * place.shape[1], pred=reads)
    tma_load(parts, there, empty, place, pred=reads)
    consumer_release(ring, at, kind != VISIT + LAST)
    consumer_wait(ring, at)
    if kind >= LAST:
        tma_store(dq, [b, h, n, W * COLUMNS], as_dq(place, dq))
    elif kind >= FIRST:
        tma_store(parts, there, place)
    else:
        tma_reduce_add(parts, there, place)
    tma_store_wait(0)
    return advance(at, 1)
