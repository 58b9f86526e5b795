"""Work tiles: what a CTA computes next, how its warps learn of it, and which blocks it visits.

A producer warp maps a ticket to a work tile (`map_work_tile`, `locate_tile`), publishes it through
shared memory (`write_work`), and every partition reads the fields that it needs (`read_work`). All
partitions iterate over the live blocks of the tile by the same function (`visit_kv_blocks`,
`visit_q_blocks`), so they agree on them.

A **tile row** is a row of tiles of the block mask: of the queries of one work tile in the forward.
In the backward it is an n_block column, of the keys. Live tiles of a row are stored as **runs** of
consecutive tiles, those of full and of partial tiles apart (`TileSchedule`).
"""

from typing import Any, NamedTuple

from .. import config
from .gluon_compat import gl, gluon
from .pipeline import advance, producer_acquire, producer_commit

# -- work tiles -----------------------------------------------------------------------------------

WORK_STAGES = gl.constexpr(4)  # of the ring of work tiles: this one, the one before, and ahead

# Warps of the partition that reads a work tile.
WARPGROUP = gl.constexpr(config.WARPGROUP)
ONE_WARP = gl.constexpr(config.ONE_WARP)


class FwdTile(NamedTuple):
    """A work tile of the forward: the queries of one CTA. In shared memory the fields from FWD_RUNS
    on follow: `KVRuns` under a block mask, else `StreamKPart`,
    of which without stream-K only the first
    field is written."""

    tile_in_head: Any  # its number among the tiles of its head; -1: a sentinel, the end of the work
    first_row: Any  # of its queries
    head: Any
    batch: Any
    first_block: Any  # first row of the KV block that is visited first
    kv_head: Any
    packed_blocks: Any  # KV blocks, and whether the next tile was fetched early (`pack_blocks`)


class KVRuns(NamedTuple):
    """The runs of live KV tiles of a row, of full and of partial ones: the index behind the last
    run, how many runs, and start and count of the last one, in tiles."""

    full_end: Any
    full_runs: Any
    full_start: Any
    full_count: Any
    partial_end: Any
    partial_runs: Any
    partial_start: Any
    partial_count: Any


class StreamKPart(NamedTuple):
    """The part of a work tile that a CTA computes (fwd/stream_k.py)."""

    blocks: Any  # KV blocks of the part
    share: Any  # number of the share that the part belongs to
    earlier_parts: Any  # parts of earlier shares to combine with this one; -1: another CTA combines


class BwdTile(NamedTuple):
    """A work tile of the backward: the keys of one CTA. `QRuns` follow in shared memory, from
    BWD_RUNS on."""

    column: Any  # n_block column of the block mask
    tile_in_head: Any  # its number among the tiles of its head
    first_row: Any  # of its keys
    head: Any
    batch: Any
    first_visits: Any  # of segments (bwd/segments.py): Q blocks that it visits first, a bit each
    last_visits: Any  # and those that it visits last
    segment_block: Any  # the segment's first Q block


class QRuns(NamedTuple):
    """The runs of live Q tiles of a column, of partial and of full ones: the index of the first
    run, how many runs, and start and count of the first one, in tiles."""

    partial_first: Any
    partial_runs: Any
    partial_start: Any
    partial_count: Any
    full_first: Any
    full_runs: Any
    full_start: Any
    full_count: Any


FWD_RUNS = gl.constexpr(len(FwdTile._fields))
FWD_FIELDS = gl.constexpr(len(FwdTile._fields) + len(KVRuns._fields))
BWD_RUNS = gl.constexpr(len(BwdTile._fields))
BWD_FIELDS = gl.constexpr(len(BwdTile._fields) + len(QRuns._fields))


@gluon.jit
def pack_blocks(blocks, fetched_early):
    """Return one number for a count of KV blocks and, in bit 0, whether the next work tile is
    fetched before these blocks are loaded."""
    return 2 * blocks + gl.where(fetched_early, 1, 0)


@gluon.jit
def count_blocks(packed_blocks):
    """Return the KV blocks of `pack_blocks`."""
    return packed_blocks // 2


@gluon.jit
def fetched_early(packed_blocks):
    """Return the flag of `pack_blocks`, as a condition."""
    return packed_blocks % 2 == 1


# -- from a ticket to a work tile -----------------------------------------------------------------


@gluon.jit
def map_work_tile(ticket, total, last_rows, schedule, heads, SUBTILES: gl.constexpr):
    """Return the tile row of a ticket, in the order of the mask; and its head and batch row, if one
    mask serves all of them.

    Head swizzle for L2: the tiles of `schedule.swizzle` heads follow one another, longest tile row
    first (LPT), then those of the next section of heads: what runs at a time shares keys in the L2
    cache. Under a mask the tiles of the `last_rows` shortest rows come after those of all heads:
    with long tiles at the end some CTAs would be busy while others have nothing to do.
    """
    swizzle = schedule.swizzle
    if schedule.full is None:
        n, section, section_head = _swizzle(ticket, schedule.tile_rows >> 2, swizzle)
    else:
        rows = (schedule.tile_rows >> 2) * schedule.b * schedule.h * SUBTILES
        tiles_of_row = total // rows
        first_rows = rows - last_rows
        ticket_of_last = ticket - first_rows * tiles_of_row
        if ticket_of_last < 0:
            n, section, section_head = _swizzle(ticket, first_rows, swizzle)
        else:
            n, _, section_head = _swizzle(ticket_of_last, last_rows, tiles_of_row)
            section, section_head = section_head // swizzle, section_head % swizzle
            n += first_rows
    sections = heads // swizzle  # of a batch row
    b = section // sections
    h = (section - b * sections) * swizzle + section_head
    return n, h, gl.where(schedule.h == 1, b, section)


@gluon.jit
def _swizzle(ticket, rows, swizzle):
    """Return the tile row of a ticket, the section of its head, and the head within the section. A
    section of `swizzle` heads goes through all tile rows before the next one."""
    tiles = rows * swizzle
    section = ticket // tiles
    tile_in_section = ticket - section * tiles
    n = tile_in_section // swizzle
    return n, section, tile_in_section - n * swizzle


@gluon.jit
def locate_tile(
    ticket, total, last_rows, schedule, heads, SUBTILES: gl.constexpr, ROWS: gl.constexpr
):
    """Return the work tile of a ticket in the backward: its n_block column of the block mask, its
    number among the tiles of its head, first row, head, batch row."""
    n, h, b = map_work_tile(ticket, total, last_rows, schedule, heads, SUBTILES)
    if schedule.full is None:
        return n, n, n * ROWS, h, b
    else:
        column = gl.load(schedule.order + n // SUBTILES)
        tile = column % (schedule.tile_rows >> 2)
        tile_in_head = tile * SUBTILES + n % SUBTILES
        first_row = tile * schedule.size + n % SUBTILES * ROWS
        mask_head = column // (schedule.tile_rows >> 2)
        h = gl.where(schedule.h == 1, h, mask_head % schedule.h)
        b = gl.where(schedule.b == 1, b, mask_head // schedule.h)
        return column, tile_in_head, first_row, h, b


# -- publishing it --------------------------------------------------------------------------------


@gluon.jit
def work_buffer(FIELDS: gl.constexpr):
    """Allocate shared memory for `WORK_STAGES` work tiles."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    return gl.allocate_shared_memory(gl.int32, [WORK_STAGES * FIELDS, 1], layout)


@gluon.jit
def write_work(cursor, work_smem, ring, fields):
    """Publish a work tile: `fields`, and the runs behind them. **Returns:** the next cursor."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    FIELDS: gl.constexpr = work_smem.shape[0] // WORK_STAGES
    producer_acquire(ring, cursor)
    for n in gl.static_range(len(fields)):
        field = gl.full([1], fields[n], gl.int32, layout=layout)
        work_smem.index(cursor.stage * FIELDS + n).store(field)
    producer_commit(ring, cursor)
    return advance(cursor, WORK_STAGES)


@gluon.jit
def read_work(work_smem, cursor, FROM: gl.constexpr, TO: gl.constexpr, WARPS: gl.constexpr):
    """Return fields FROM to TO - 1 of the published work tile.

    - `WARPS`: `WARPGROUP` or `ONE_WARP`, of the partition that reads.
    """
    FIELDS: gl.constexpr = work_smem.shape[0] // WORK_STAGES
    fields = ()
    for n in gl.static_range(FROM, TO):
        fields = fields + (_read_field(work_smem, cursor.stage * FIELDS + n, WARPS),)  # noqa: RUF005
    return fields


@gluon.jit
def _read_field(work_smem, n, WARPS: gl.constexpr):
    return gl.max(work_smem.index(n).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def read_fwd_tile(work_smem, cursor, WARPS: gl.constexpr):
    """Return the published `FwdTile`. Fields that nobody uses are not read."""
    return FwdTile(*read_work(work_smem, cursor, 0, FWD_RUNS, WARPS))


@gluon.jit
def read_part(work_smem, cursor, WARPS: gl.constexpr):
    """Return the published `StreamKPart`, where CONFIG.stream_k."""
    return StreamKPart(*read_work(work_smem, cursor, FWD_RUNS, FWD_RUNS + 3, WARPS))


@gluon.jit
def read_kv_runs(work_smem, cursor, schedule, WARPS: gl.constexpr):
    """Return the runs of the published `FwdTile`; without a block mask, the number of KV blocks."""
    if schedule.full is None:
        return read_work(work_smem, cursor, FWD_RUNS, FWD_RUNS + 1, WARPS)
    else:
        return KVRuns(*read_work(work_smem, cursor, FWD_RUNS, FWD_FIELDS, WARPS))


# -- KV blocks of a work tile ---------------------------------------------------------------------


@gluon.jit
def visit_kv_blocks(
    state, context, schedule, first_block, runs, kv_len, FIRST: gl.constexpr,
    BODY: gl.constexpr, SCORE: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Call `BODY(state, context, row, PARTIAL, SCORE, MASK, CONFIG)` for every live KV block of a
    tile row, and return the last state. Partial blocks come first, then full ones, each kind from
    the last to the first.

    - `first_block`: first row of the block that comes before them all, as if it were partial. It is
      visited only if FIRST; else the caller has visited it.
    - `runs`: from `read_kv_runs`.
    """
    BLOCK: gl.constexpr = CONFIG.block
    if schedule.full is None:
        if FIRST:
            state = BODY(state, context, first_block, True, SCORE, MASK, CONFIG)
        for i in range(1, runs[0]):
            state = BODY(state, context, first_block - i * BLOCK, False, SCORE, MASK, CONFIG)
    else:
        first_is_full = _first_is_full(runs, CONFIG)
        if FIRST:  # The partial loop visits it, whatever it is.
            extra_visit, skip = first_is_full, 0
        else:
            extra_visit, skip = 0, 1 - first_is_full
        state = _visit_runs(
            state, context, schedule, schedule.partial, first_block, runs.partial_end,
            runs.partial_runs, runs.partial_start, runs.partial_count, extra_visit, skip, kv_len,
            True, BODY, SCORE, MASK, CONFIG,
        )  # fmt: skip
        state = _visit_runs(
            state, context, schedule, schedule.full, first_block, runs.full_end, runs.full_runs,
            runs.full_start, runs.full_count, 0, first_is_full, kv_len, False,
            BODY, SCORE, MASK, CONFIG,
        )  # fmt: skip
    return state


@gluon.jit
def _first_is_full(runs, CONFIG: gl.constexpr):
    """Return 1 where the first visited block is of a full tile (fwd/tile_table.py), else 0."""
    if CONFIG.even_kv:
        return gl.where(runs.partial_runs == 0, 1, 0)
    else:
        return gl.where((runs.full_runs > 0) | (runs.partial_runs == 0), 1, 0)


@gluon.jit
def _visit_runs(
    state, context, schedule, tiles, first_block, end, runs, start, count, extra_visit, skip,
    kv_len, PARTIAL: gl.constexpr, BODY: gl.constexpr, SCORE: gl.constexpr, MASK: gl.constexpr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Visit the blocks of one kind of tiles, for `visit_kv_blocks`.

    - `tiles`: `schedule.full` or `schedule.partial`.
    - `extra_visit`: 1 to visit `first_block` before them.
    - `skip`: 1 to leave out the last block of the run that comes first, which was visited already.
    """
    for r in range(0 - extra_visit, runs):
        first, blocks = _rows_of_run(
            tiles, end - 1 - r, r, start, count, schedule, kv_len, CONFIG.block
        )
        first, blocks = gl.where(r >= 0, first, first_block), gl.where(r >= 0, blocks, 1)
        for i in range(gl.where(r == 0, skip, 0), blocks):
            row = first + (blocks - 1 - i) * CONFIG.block
            state = BODY(state, context, row, PARTIAL, SCORE, MASK, CONFIG)
    return state


# -- Q blocks of a work tile ----------------------------------------------------------------------


@gluon.jit
def visit_q_blocks(
    state, context, schedule, column, runs, q_len, calls_after,
    BODY: gl.constexpr, DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Call `BODY(state, context, row, has_next, PARTIAL, ...)` for every live Q block of an n_block
    column, and return the last state. Partial blocks come first, then full ones, each kind from the
    first to the last; if CONFIG.deterministic, all go from the first to the last. A column with no
    live tile gets its first, which the mask empties.

    - `has_next`: whether another call follows, of this column or because `calls_after` > 0.
    - `runs`: from `load_runs`, or () to load them here.
    """
    BLOCK: gl.constexpr = CONFIG.block
    if schedule.full is None:
        blocks = (q_len + BLOCK - 1) // BLOCK
        for i in range(0, blocks):
            has_next = (i + 1 < blocks) | (calls_after > 0)
            state = BODY(
                state, context, i * BLOCK, has_next, False, DERIVATIVE, SCATTER, MASK, CONFIG
            )  # fmt: skip
    elif CONFIG.deterministic:
        begin = gl.load(schedule.full[0] + column)
        end = gl.load(schedule.full[0] + column + 1)
        for r in range(begin, end):
            next_after_run = (r + 1 < end) | (calls_after > 0)
            first, blocks = _rows(*_load_run(schedule.partial, r, True), schedule, q_len, BLOCK)
            first_full, full_blocks = _rows(
                *_load_run(schedule.full, r, True), schedule, q_len, BLOCK
            )
            for i in range(0, blocks):
                has_next = (i + 1 < blocks) | (full_blocks > 0) | next_after_run
                state = BODY(
                    state, context, first + i * BLOCK, has_next, True, DERIVATIVE, SCATTER, MASK,
                    CONFIG
                )  # fmt: skip
            for i in range(0, full_blocks):
                has_next = (i + 1 < full_blocks) | next_after_run
                state = BODY(
                    state, context, first_full + i * BLOCK, has_next, False, DERIVATIVE, SCATTER,
                    MASK, CONFIG
                )  # fmt: skip
    else:
        if len(runs) == 0:
            runs = load_runs(schedule, column)
        full_runs = runs.full_runs
        partial_runs = gl.where(runs.partial_runs + full_runs == 0, 1, runs.partial_runs)
        for r in range(0, partial_runs):
            first, blocks = _rows_of_run(
                schedule.partial, runs.partial_first + r, r, runs.partial_start, runs.partial_count,
                schedule, q_len, BLOCK,
            )  # fmt: skip
            for i in range(0, blocks):
                in_run, in_partial = i + 1 < blocks, r + 1 < partial_runs
                has_next = in_run | in_partial | (full_runs > 0) | (calls_after > 0)
                state = BODY(
                    state, context, first + i * BLOCK, has_next, True, DERIVATIVE, SCATTER, MASK,
                    CONFIG
                )  # fmt: skip
        for r in range(0, full_runs):
            first, blocks = _rows_of_run(
                schedule.full, runs.full_first + r, r, runs.full_start, runs.full_count, schedule,
                q_len, BLOCK,
            )  # fmt: skip
            for i in range(0, blocks):
                has_next = (i + 1 < blocks) | (r + 1 < full_runs) | (calls_after > 0)
                state = BODY(
                    state, context, first + i * BLOCK, has_next, False, DERIVATIVE, SCATTER, MASK,
                    CONFIG
                )  # fmt: skip
    return state


@gluon.constexpr_function
def broadcasts_runs(full, CONFIG):
    """Return whether the backward's producer publishes the runs of a column. It loads them ahead of
    the TMA loads, which every other partition's load would queue behind. If not, `visit_q_blocks`
    loads them itself. `full`: of the schedule."""
    return full is not None and not CONFIG.deterministic


@gluon.jit
def runs_to_write(schedule, column, CONFIG: gl.constexpr):
    """Return the runs of a column that the producer publishes; () where it publishes none."""
    if broadcasts_runs(schedule.full, CONFIG):
        return load_runs(schedule, column)
    else:
        return ()


@gluon.jit
def read_q_runs(work_smem, cursor, schedule, WARPS: gl.constexpr, CONFIG: gl.constexpr):
    """Return the published `QRuns` of a column; () where the producer publishes none."""
    if broadcasts_runs(schedule.full, CONFIG):
        return QRuns(*read_work(work_smem, cursor, BWD_RUNS, BWD_FIELDS, WARPS))
    else:
        return ()


# -- runs -----------------------------------------------------------------------------------------


@gluon.jit
def load_runs(schedule, column):
    """Load the `QRuns` of a column from global memory."""
    partial_first = gl.load(schedule.partial[0] + column)
    full_first = gl.load(schedule.full[0] + column)
    partial_runs = gl.load(schedule.partial[0] + column + 1) - partial_first
    full_runs = gl.load(schedule.full[0] + column + 1) - full_first
    partial_start, partial_count = _load_run(schedule.partial, partial_first, partial_runs > 0)
    full_start, full_count = _load_run(schedule.full, full_first, full_runs > 0)
    return QRuns(
        partial_first, partial_runs, partial_start, partial_count,
        full_first, full_runs, full_start, full_count,
    )  # fmt: skip


@gluon.jit
def _load_run(tiles, n, exists):
    """Return start and count of run n, in tiles; the first tile where it does not exist."""
    start = gl.load(tiles[1] + n, mask=exists, other=0)
    return start, gl.load(tiles[2] + n, mask=exists, other=1)


@gluon.jit
def _rows(start, count, schedule, length, BLOCK: gl.constexpr):
    """Return the first row and the number of blocks of some tiles."""
    first = start * schedule.step
    end = gl.minimum(first + count * schedule.step, length)
    return first, (end - first + BLOCK - 1) // BLOCK


@gluon.jit
def _rows_of_run(tiles, n, r, start, count, schedule, length, BLOCK: gl.constexpr):
    """Return the first row and the number of blocks of run n, which is visited as the r-th. `start`
    and `count` are those of the run that is visited first.

    (Any other run is loaded when it begins. Loaded one ahead, the loop over runs would carry its
    count, and nothing but the loop's end would use it: see `rows_of` in the Triton backend's
    schedule.py.)
    """
    next_start, next_count = _load_run(tiles, n, r > 0)
    start, count = gl.where(r > 0, next_start, start), gl.where(r > 0, next_count, count)
    return _rows(start, count, schedule, length, BLOCK)
