"""The forward's scheduler warp: a dynamic persistent tile scheduler.

It fetches tickets from a counter in global memory by atomics, and publishes what each is: a work
tile, or a share of the last ones (stream_k.py), which is a part of one tile or of two.

Under a block mask a work tile stands in a table (`tile_table.table`), so that a ticket becomes a
tile by one read of global memory. The next ticket is fetched when this tile is nearly loaded: an
earlier one would be kept from CTAs that may have nothing else to do. But a short tile is over
before its successor is found, so behind it the next ticket is fetched at once.
"""

from ..device.gluon_compat import gl, gluon
from ..device.mma import ROWS
from ..device.pipeline import advance, consumer_wait, first_stage
from ..device.work_tile import KVRuns, Share, map_work_tile, write_work
from .context import TABLE_COLUMNS, TABLE_FIELDS, TABLE_RUNS, TableEntry

SHORT_TILE = gl.constexpr(4)  # KV blocks of a tile that is no loss to other CTAs


@gluon.jit
def schedule(smem, rings, counter, tickets, last_rows, stream_k, sizes, walk, HOW: gl.constexpr):
    """Fetch tickets and publish their work tiles, between two sentinel tiles."""
    work_at = write_work(
        first_stage(), smem.work, rings.work, _sentinel_tile(walk, sizes.q_len, HOW)
    )
    next_at = first_stage()
    # Relaxed: the counter guards no data, and a fence for the whole GPU takes as long as the add.
    ticket = gl.atomic_add(counter, 1, sem="relaxed")
    while ticket < tickets:
        if HOW.stream_k:
            tile_idx, low, high, number = _share(ticket, stream_k, sizes, HOW)
            if low < 0:  # a part of two tiles: of the later one first (stream_k.py)
                tile, share = _part(tile_idx, 0, high, number, stream_k, sizes, walk, HOW)
                fields = tile + (2 * high + 1,) + share  # noqa: RUF005
                work_at = write_work(work_at, smem.work, rings.work, fields)
                tile_idx -= 1
                high = _kv_blocks(sizes, HOW)
                low += high
            blocks = high - low
            tile, runs = _part(tile_idx, low, high, number, stream_k, sizes, walk, HOW)
        else:
            blocks, tile, runs = _describe_tile(ticket, tickets, last_rows, walk, sizes, HOW)
        # Behind a short tile fetch the next one now; not behind the last ones.
        ahead = (blocks <= SHORT_TILE) & (ticket + 4 * gl.num_programs(0) < tickets)
        twice_blocks = 2 * blocks + gl.where(ahead, 1, 0)
        fields = tile + (twice_blocks,) + runs  # noqa: RUF005
        work_at = write_work(work_at, smem.work, rings.work, fields)
        if not ahead:
            consumer_wait(rings.next_tile, next_at)
            next_at = advance(next_at, 1)
        ticket = gl.atomic_add(counter, 1, sem="relaxed")
    # Each CTA fetches one ticket too many. The last to do so resets the counter.
    gl.store(counter, 0, mask=ticket == tickets + gl.num_programs(0) - 1)
    write_work(work_at, smem.work, rings.work, _sentinel_tile(walk, sizes.q_len, HOW))


@gluon.jit
def _describe_tile(ticket, tickets, last_rows, walk, sizes, HOW: gl.constexpr):
    """How many KV blocks the work tile of a ticket visits; the fields of `FwdTile` but the last;
    and the fields behind them."""
    n, h, b = map_work_tile(ticket, tickets, last_rows, walk, sizes.heads, HOW.subtiles)
    if walk.full is None:
        blocks = _kv_blocks(sizes, HOW)
        first_block = (blocks - 1) * HOW.block
        tile = (n, n * (HOW.consumers * ROWS), h, b, first_block, h // sizes.group)
        return blocks, tile, (blocks,)
    else:
        entry = TableEntry(*_read_table(walk.order, n, 0, TABLE_FIELDS))
        runs = KVRuns(*_read_table(walk.order, n, TABLE_RUNS, TABLE_COLUMNS))
        h = gl.where(walk.h == 1, h, entry.head)
        b = gl.where(walk.b == 1, b, entry.batch)
        tile = (entry.slot, entry.first_row, h, b, entry.first_block, h // sizes.group)
        return entry.blocks, tile, runs


@gluon.jit
def _read_table(table, n, FROM: gl.constexpr, TO: gl.constexpr):
    """Columns FROM to TO - 1 of row n of the work-tile table."""
    found = ()
    for i in gl.static_range(FROM, TO):
        found = found + (gl.load(table + n * TABLE_COLUMNS + i),)  # noqa: RUF005
    return found


@gluon.jit
def _kv_blocks(sizes, HOW: gl.constexpr):
    """KV blocks of a work tile, without a mask."""
    return gl.maximum((sizes.kv_len + HOW.block - 1) // HOW.block, 1)


@gluon.jit
def _share(ticket, stream_k, sizes, HOW: gl.constexpr):
    """The last work tile of a ticket; from which of its KV blocks to which (from one below 0, if
    the share begins in the tile before); and the number of the share, below 0 of a whole tile."""
    blocks = _kv_blocks(sizes, HOW)
    number = ticket - stream_k.whole_tiles
    begin = number * stream_k.share_blocks
    end = gl.minimum(begin + stream_k.share_blocks, stream_k.shared_blocks)
    last = (end - 1) // blocks
    low, high = begin - last * blocks, end - last * blocks
    is_whole = number < 0
    tile_idx = gl.where(is_whole, ticket, stream_k.whole_tiles + last)
    return tile_idx, gl.where(is_whole, 0, low), gl.where(is_whole, blocks, high), number


@gluon.jit
def _part(tile_idx, low, high, number, stream_k, sizes, walk, HOW: gl.constexpr):
    """The part of a work tile from KV block low to high: the fields of `FwdTile` but the last, and
    its `Share`. The CTA with the last block combines all parts of a tile."""
    _, tile, _ = _describe_tile(tile_idx, 0, 0, walk, sizes, HOW)
    slot, first_row, h, b, _, kv_head = tile
    blocks = _kv_blocks(sizes, HOW)
    before = number - (tile_idx - stream_k.whole_tiles) * blocks // stream_k.share_blocks
    others = gl.where(high < blocks, -1, gl.where(low > 0, before, 0))
    tile = (slot, first_row, h, b, (high - 1) * HOW.block, kv_head)
    return tile, Share(high - low, number, others)


@gluon.jit
def _sentinel_tile(walk, q_len, HOW: gl.constexpr):
    """A work tile of one KV block, whose rows lie past the end: nothing of it is stored."""
    if HOW.stream_k:
        return -1, q_len, 0, 0, 0, 0, 2, 0, 0, 0
    elif walk.full is None:
        return -1, q_len, 0, 0, 0, 0, 2, 0
    else:
        return -1, q_len, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0
