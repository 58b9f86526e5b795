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
from ..device.work_tile import FwdTile, KVRuns, StreamKPart, map_work_tile, pack_blocks, write_work
from .context import TABLE_COLUMNS, TABLE_FIELDS, TABLE_RUNS, TableEntry

SHORT_TILE = gl.constexpr(4)  # KV blocks of a tile that is no loss to other CTAs
ONE_BLOCK = gl.constexpr(2)  # `pack_blocks(1, False)`
LAST_WAVES = gl.constexpr(4)  # tickets of each CTA, at the end, that are never fetched early


@gluon.jit
def schedule_tiles(
    smem, rings, counter, tickets, last_rows, stream_k, sizes, schedule, CONFIG: gl.constexpr
):  # fmt: skip
    """Fetch tickets and publish their work tiles, between two sentinel tiles."""
    work_at = write_work(
        first_stage(), smem.work, rings.work, _sentinel_tile(schedule, sizes.q_len, CONFIG)
    )
    next_at = first_stage()
    # Relaxed: the counter guards no data, and a fence for the whole GPU takes as long as the add.
    ticket = gl.atomic_add(counter, 1, sem="relaxed")
    while ticket < tickets:
        if CONFIG.stream_k:
            tile_idx, low, high, share = _share_of_ticket(ticket, stream_k, sizes, CONFIG)
            if low < 0:  # a part of two tiles: of the later one first (stream_k.py)
                tile, part = _part(tile_idx, 0, high, share, stream_k, sizes, schedule, CONFIG)
                fields = tile + (pack_blocks(high, True),) + part  # noqa: RUF005
                work_at = write_work(work_at, smem.work, rings.work, fields)
                tile_idx -= 1
                high = _kv_blocks(sizes, CONFIG)
                low += high
            blocks = high - low
            tile, runs = _part(tile_idx, low, high, share, stream_k, sizes, schedule, CONFIG)
        else:
            blocks, tile, runs = _describe_tile(ticket, tickets, last_rows, schedule, sizes, CONFIG)
        # Behind a short tile fetch the next one now; not behind the last ones.
        early = (blocks <= SHORT_TILE) & (ticket + LAST_WAVES * gl.num_programs(0) < tickets)
        packed_blocks = pack_blocks(blocks, early)
        fields = tile + (packed_blocks,) + runs  # noqa: RUF005
        work_at = write_work(work_at, smem.work, rings.work, fields)
        if not early:
            consumer_wait(rings.next_tile, next_at)
            next_at = advance(next_at, 1)
        ticket = gl.atomic_add(counter, 1, sem="relaxed")
    # Each CTA fetches one ticket too many. The last to do so resets the counter.
    gl.store(counter, 0, mask=ticket == tickets + gl.num_programs(0) - 1)
    write_work(work_at, smem.work, rings.work, _sentinel_tile(schedule, sizes.q_len, CONFIG))


@gluon.jit
def _describe_tile(ticket, tickets, last_rows, schedule, sizes, CONFIG: gl.constexpr):
    """Return the number of KV blocks that the work tile of a ticket visits, the fields of `FwdTile`
    but the last, and the fields behind them."""
    n, h, b = map_work_tile(ticket, tickets, last_rows, schedule, sizes.heads, CONFIG.subtiles)
    if schedule.full is None:
        blocks = _kv_blocks(sizes, CONFIG)
        first_block = (blocks - 1) * CONFIG.block
        tile = (n, n * (CONFIG.consumers * ROWS), h, b, first_block, h // sizes.group)
        return blocks, tile, (blocks,)
    else:
        entry = TableEntry(*_read_table(schedule.order, n, 0, TABLE_FIELDS))
        runs = KVRuns(*_read_table(schedule.order, n, TABLE_RUNS, TABLE_COLUMNS))
        h = gl.where(schedule.h == 1, h, entry.head)
        b = gl.where(schedule.b == 1, b, entry.batch)
        tile = (entry.tile_in_head, entry.first_row, h, b, entry.first_block, h // sizes.group)
        return entry.blocks, tile, runs


@gluon.jit
def _read_table(table, n, FROM: gl.constexpr, TO: gl.constexpr):
    """Load columns FROM to TO - 1 of row n of the work-tile table."""
    fields = ()
    for i in gl.static_range(FROM, TO):
        fields = fields + (gl.load(table + n * TABLE_COLUMNS + i),)  # noqa: RUF005
    return fields


@gluon.jit
def _kv_blocks(sizes, CONFIG: gl.constexpr):
    """Return the KV blocks of a work tile, without a mask."""
    return gl.maximum((sizes.kv_len + CONFIG.block - 1) // CONFIG.block, 1)


@gluon.jit
def _share_of_ticket(ticket, stream_k, sizes, CONFIG: gl.constexpr):
    """Return the last work tile of a ticket, its first KV block and the end of its KV blocks, and
    the number of the share. The first block is below 0 if the share begins in the tile before; the
    number is below 0 for a whole tile."""
    blocks = _kv_blocks(sizes, CONFIG)
    share = ticket - stream_k.whole_tiles
    begin = share * stream_k.share_blocks
    end = gl.minimum(begin + stream_k.share_blocks, stream_k.shared_blocks)
    last_tile = (end - 1) // blocks
    low, high = begin - last_tile * blocks, end - last_tile * blocks
    is_whole = share < 0
    tile_idx = gl.where(is_whole, ticket, stream_k.whole_tiles + last_tile)
    return tile_idx, gl.where(is_whole, 0, low), gl.where(is_whole, blocks, high), share


@gluon.jit
def _part(tile_idx, low, high, share, stream_k, sizes, schedule, CONFIG: gl.constexpr):
    """Describe the part of a work tile from KV block low to high: the fields of `FwdTile` but the
    last, and its `StreamKPart`. The CTA with the last block combines all parts of a tile."""
    _, tile, _ = _describe_tile(tile_idx, 0, 0, schedule, sizes, CONFIG)
    tile_in_head, first_row, h, b, _, kv_head = tile
    blocks = _kv_blocks(sizes, CONFIG)
    before = share - (tile_idx - stream_k.whole_tiles) * blocks // stream_k.share_blocks
    earlier_parts = gl.where(high < blocks, -1, gl.where(low > 0, before, 0))
    tile = (tile_in_head, first_row, h, b, (high - 1) * CONFIG.block, kv_head)
    return tile, StreamKPart(high - low, share, earlier_parts)


@gluon.jit
def _sentinel_tile(schedule, q_len, CONFIG: gl.constexpr):
    """Return a work tile of one KV block, whose rows lie past the end: nothing of it is stored."""
    tile = FwdTile(
        tile_in_head=-1, first_row=q_len, head=0, batch=0, first_block=0, kv_head=0,
        packed_blocks=ONE_BLOCK,
    )  # fmt: skip
    if CONFIG.stream_k:
        return tile + StreamKPart(0, 0, 0)
    elif schedule.full is None:
        return tile + (0,)  # noqa: RUF005
    else:
        return tile + KVRuns(0, 0, 0, 0, 0, 0, 0, 0)
