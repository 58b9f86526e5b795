"""Work tiles: what a CTA computes next, how its warps learn of it, and which blocks it visits.

A producer warp maps a ticket to a work tile (`map_work_tile`, `locate_tile`), publishes it through
shared memory (`write_work`), and every partition reads the fields that it needs (`read_work`). All
partitions iterate over the live blocks of the tile by the same function (`visit_kv_blocks`,
`visit_q_blocks`), so they agree on them.

A **tile row** is a row of tiles of the block mask: of the queries of one work tile in the forward.
In the backward it is an n_block column, of the keys. Live tiles of a row are stored as **runs** of
consecutive tiles, those of full and of partial tiles apart (`Walk`).
"""

from typing import Any, NamedTuple

from .gluon_compat import gl, gluon
from .pipeline import advance, producer_acquire, producer_commit

# -- work tiles -----------------------------------------------------------------------------------

WORK_STAGES = gl.constexpr(4)  # of the ring of work tiles: this one, the one before, and ahead


class FwdTile(NamedTuple):
    """A work tile of the forward: the queries of one CTA. In shared memory the fields from FWD_RUNS
    on follow: `KVRuns` under a block mask, else `Share`, of which without stream-K only the first
    field is written."""

    slot: Any  # its number among the tiles of its head; -1: a sentinel tile
    first_row: Any  # of its queries
    head: Any
    batch: Any
    first_block: Any  # first row of the KV block that is visited first
    kv_head: Any
    twice_blocks: Any  # 2 * KV blocks; + 1 where the next tile is fetched before they are loaded


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


class Share(NamedTuple):
    """The part of a work tile that a CTA computes (fwd/stream_k.py)."""

    blocks: Any  # KV blocks of it
    number: Any  # of the share that it belongs to
    others: (
        Any  # parts of this tile, of the shares before, to combine with it; -1: another CTA does
    )


class BwdTile(NamedTuple):
    """A work tile of the backward: the keys of one CTA. `QRuns` follow in shared memory, from
    BWD_RUNS on."""

    column: Any  # n_block column of the block mask
    slot: Any  # its number among the tiles of its head
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


# -- from a ticket to a work tile -----------------------------------------------------------------


@gluon.jit
def map_work_tile(ticket, total, last_rows, walk, heads, SUBTILES: gl.constexpr):
    """The tile row of a ticket, in the order of the mask, and its head and batch row, as far as the
    mask is one for all of them.

    Head swizzle for L2: the tiles of `walk.swizzle` heads follow one another, longest tile row
    first (LPT), then those of the next section of heads: what runs at a time shares keys in the L2
    cache. Under a mask the tiles of the `last_rows` shortest rows come after those of all heads:
    with long tiles at the end some CTAs would be busy while others have nothing to do.
    """
    near = walk.swizzle
    if walk.full is None:
        n, section, within = _swizzle(ticket, walk.tile_rows >> 2, near)
    else:
        rows = (walk.tile_rows >> 2) * walk.b * walk.h * SUBTILES
        tiles_of_row = total // rows
        first_rows = rows - last_rows
        behind = ticket - first_rows * tiles_of_row
        if behind < 0:
            n, section, within = _swizzle(ticket, first_rows, near)
        else:
            n, _, within = _swizzle(behind, last_rows, tiles_of_row)
            section, within = within // near, within % near
            n += first_rows
    sections = heads // near  # of a batch row
    b = section // sections
    h = (section - b * sections) * near + within
    return n, h, gl.where(walk.h == 1, b, section)


@gluon.jit
def _swizzle(ticket, rows, near):
    """The tile row of a ticket, where a section of `near` heads goes through all tile rows before
    the next one; the section; and the head within it."""
    tiles = rows * near
    section = ticket // tiles
    of_section = ticket - section * tiles
    n = of_section // near
    return n, section, of_section - n * near


@gluon.jit
def locate_tile(ticket, total, last_rows, walk, heads, SUBTILES: gl.constexpr, ROWS: gl.constexpr):
    """The work tile of a ticket in the backward: its n_block column of the block mask, its number
    among the tiles of its head, first row, head, batch row."""
    n, h, b = map_work_tile(ticket, total, last_rows, walk, heads, SUBTILES)
    if walk.full is None:
        return n, n, n * ROWS, h, b
    else:
        column = gl.load(walk.order + n // SUBTILES)
        tile = column % (walk.tile_rows >> 2)
        slot = tile * SUBTILES + n % SUBTILES
        first = tile * walk.size + n % SUBTILES * ROWS
        of_mask = column // (walk.tile_rows >> 2)
        h = gl.where(walk.h == 1, h, of_mask % walk.h)
        b = gl.where(walk.b == 1, b, of_mask // walk.h)
        return column, slot, first, h, b


# -- publishing it --------------------------------------------------------------------------------


@gluon.jit
def work_buffer(FIELDS: gl.constexpr):
    """Shared memory for `WORK_STAGES` work tiles."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    return gl.allocate_shared_memory(gl.int32, [WORK_STAGES * FIELDS, 1], layout)


@gluon.jit
def write_work(at, work_smem, ring, fields):
    """Publish a work tile: `fields`, and the runs behind them. **Returns:** the next cursor."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    FIELDS: gl.constexpr = work_smem.shape[0] // WORK_STAGES
    producer_acquire(ring, at)
    for n in gl.static_range(len(fields)):
        field = gl.full([1], fields[n], gl.int32, layout=one)
        work_smem.index(at.stage * FIELDS + n).store(field)
    producer_commit(ring, at)
    return advance(at, WORK_STAGES)


@gluon.jit
def read_work(work_smem, at, FROM: gl.constexpr, TO: gl.constexpr, WARPS: gl.constexpr):
    """Fields FROM to TO - 1 of the published work tile; `WARPS`: of the partition that reads."""
    FIELDS: gl.constexpr = work_smem.shape[0] // WORK_STAGES
    fields = ()
    for n in gl.static_range(FROM, TO):
        fields = fields + (_read_field(work_smem, at.stage * FIELDS + n, WARPS),)  # noqa: RUF005
    return fields


@gluon.jit
def _read_field(work_smem, n, WARPS: gl.constexpr):
    return gl.max(work_smem.index(n).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def read_fwd_tile(work_smem, at, WARPS: gl.constexpr):
    """The published `FwdTile`. Fields that nobody uses are not read."""
    return FwdTile(*read_work(work_smem, at, 0, FWD_RUNS, WARPS))


@gluon.jit
def read_share(work_smem, at, WARPS: gl.constexpr):
    """The published `Share`, where HOW.stream_k."""
    return Share(*read_work(work_smem, at, FWD_RUNS, FWD_RUNS + 3, WARPS))


@gluon.jit
def read_kv_runs(work_smem, at, walk, WARPS: gl.constexpr):
    """The runs of the published `FwdTile`; without a block mask, how many KV blocks there are."""
    if walk.full is None:
        return read_work(work_smem, at, FWD_RUNS, FWD_RUNS + 1, WARPS)
    else:
        return KVRuns(*read_work(work_smem, at, FWD_RUNS, FWD_FIELDS, WARPS))


# -- KV blocks of a work tile ---------------------------------------------------------------------


@gluon.jit
def visit_kv_blocks(
    state, given, walk, first_block, runs, length, FIRST: gl.constexpr,
    BODY: gl.constexpr, SCORE: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Call `BODY(state, given, row, PARTIAL, SCORE, MASK, HOW)` for every live KV block of a tile
    row, and return the last state: partial blocks, then full ones, each kind from the last to the
    first.

    - `first_block`: first row of the block that comes before them all, as if it were partial. Only
      where FIRST; else the caller has visited it.
    - `runs`: from `read_kv_runs`; `length`: of keys.
    """
    BLOCK: gl.constexpr = HOW.block
    if walk.full is None:
        if FIRST:
            state = BODY(state, given, first_block, True, SCORE, MASK, HOW)
        for i in range(1, runs[0]):
            state = BODY(state, given, first_block - i * BLOCK, False, SCORE, MASK, HOW)
    else:
        from_full = _first_is_full(runs, HOW)
        if FIRST:  # The partial loop visits it, whatever it is.
            more, less = from_full, 0
        else:
            more, less = 0, 1 - from_full
        state = _visit_runs(
            state, given, walk, walk.partial, first_block, runs.partial_end, runs.partial_runs,
            runs.partial_start, runs.partial_count, more, less, length, True,
            BODY, SCORE, MASK, HOW,
        )  # fmt: skip
        state = _visit_runs(
            state, given, walk, walk.full, first_block, runs.full_end, runs.full_runs,
            runs.full_start, runs.full_count, 0, from_full, length, False,
            BODY, SCORE, MASK, HOW,
        )  # fmt: skip
    return state


@gluon.jit
def _first_is_full(runs, HOW: gl.constexpr):
    """1 where the block that is visited first is of a full tile (fwd/tile_table.py), else 0."""
    if HOW.even_kv:
        return gl.where(runs.partial_runs == 0, 1, 0)
    else:
        return gl.where((runs.full_runs > 0) | (runs.partial_runs == 0), 1, 0)


@gluon.jit
def _visit_runs(
    state, given, walk, kind, first_block, end, runs, start, count, more, less, length,
    PARTIAL: gl.constexpr, BODY: gl.constexpr, SCORE: gl.constexpr, MASK: gl.constexpr,
    HOW: gl.constexpr,
):  # fmt: skip
    """The part of `visit_kv_blocks` for one kind of tiles, `walk.full` or `walk.partial`.

    - `more`: 1 to visit `first_block` before them; `less`: 1 to leave out the last block of the run
      that comes first, which was visited already.
    """
    for r in range(0 - more, runs):
        first, blocks = _rows_of_run(kind, end - 1 - r, r, start, count, walk, length, HOW.block)
        first, blocks = gl.where(r >= 0, first, first_block), gl.where(r >= 0, blocks, 1)
        for i in range(gl.where(r == 0, less, 0), blocks):
            at = first + (blocks - 1 - i) * HOW.block
            state = BODY(state, given, at, PARTIAL, SCORE, MASK, HOW)
    return state


# -- Q blocks of a work tile ----------------------------------------------------------------------


@gluon.jit
def visit_q_blocks(
    state, given, walk, column, runs, length, after,
    BODY: gl.constexpr, DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr,
    HOW: gl.constexpr,
):  # fmt: skip
    """Call `BODY(state, given, row, more, PARTIAL, ...)` for every live Q block of an n_block
    column, and return the last state: partial blocks, then full ones, each kind from the first to
    the last; or if HOW.deterministic, all from the first to the last. A column with no live tile
    gets its first, which the mask empties.

    - `more`: whether another call follows, of this column or because `after` > 0.
    - `runs`: from `load_runs`, or () to load them here; `length`: of queries.
    """
    BLOCK: gl.constexpr = HOW.block
    if walk.full is None:
        blocks = (length + BLOCK - 1) // BLOCK
        for i in range(0, blocks):
            more = (i + 1 < blocks) | (after > 0)
            state = BODY(
                state, given, i * BLOCK, more, False, DERIVATIVE, SCATTER, MASK, HOW
            )  # fmt: skip
    elif HOW.deterministic:
        begin = gl.load(walk.full[0] + column)
        end = gl.load(walk.full[0] + column + 1)
        for r in range(begin, end):
            after_run = (r + 1 < end) | (after > 0)
            first, blocks = _rows(*_run(walk.partial, r, True), walk, length, BLOCK)
            first_f, blocks_f = _rows(*_run(walk.full, r, True), walk, length, BLOCK)
            for i in range(0, blocks):
                more = (i + 1 < blocks) | (blocks_f > 0) | after_run
                state = BODY(
                    state, given, first + i * BLOCK, more, True, DERIVATIVE, SCATTER, MASK, HOW
                )  # fmt: skip
            for i in range(0, blocks_f):
                more = (i + 1 < blocks_f) | after_run
                state = BODY(
                    state, given, first_f + i * BLOCK, more, False, DERIVATIVE, SCATTER, MASK, HOW
                )  # fmt: skip
    else:
        if len(runs) == 0:
            runs = load_runs(walk, column)
        p0, runs_p, start_p, count_p, f0, runs_f, start_f, count_f = runs
        runs_p = gl.where(runs_p + runs_f == 0, 1, runs_p)
        for r in range(0, runs_p):
            first, blocks = _rows_of_run(
                walk.partial, p0 + r, r, start_p, count_p, walk, length, BLOCK
            )
            for i in range(0, blocks):
                more = (i + 1 < blocks) | (r + 1 < runs_p) | (runs_f > 0) | (after > 0)
                state = BODY(
                    state, given, first + i * BLOCK, more, True, DERIVATIVE, SCATTER, MASK, HOW
                )  # fmt: skip
        for r in range(0, runs_f):
            first, blocks = _rows_of_run(
                walk.full, f0 + r, r, start_f, count_f, walk, length, BLOCK
            )
            for i in range(0, blocks):
                more = (i + 1 < blocks) | (r + 1 < runs_f) | (after > 0)
                state = BODY(
                    state, given, first + i * BLOCK, more, False, DERIVATIVE, SCATTER, MASK, HOW
                )  # fmt: skip
    return state


@gluon.constexpr_function
def broadcasts_runs(full, HOW):
    """Whether the backward's producer publishes the runs of a column, which it loads ahead of the
    TMA loads that every other partition's load would queue behind; else `visit_q_blocks` loads them
    itself. `full`: of the walk."""
    return full is not None and not HOW.deterministic


@gluon.jit
def runs_to_write(walk, column, HOW: gl.constexpr):
    """What the producer publishes of the runs of a column."""
    if broadcasts_runs(walk.full, HOW):
        return load_runs(walk, column)
    else:
        return ()


@gluon.jit
def read_runs(work_smem, at, walk, WARPS: gl.constexpr, HOW: gl.constexpr):
    """The same, as published."""
    if broadcasts_runs(walk.full, HOW):
        return read_work(work_smem, at, BWD_RUNS, BWD_FIELDS, WARPS)
    else:
        return ()


# -- runs -----------------------------------------------------------------------------------------


@gluon.jit
def load_runs(walk, column):
    """The `QRuns` of a column, from global memory."""
    p0 = gl.load(walk.partial[0] + column)
    f0 = gl.load(walk.full[0] + column)
    runs_p = gl.load(walk.partial[0] + column + 1) - p0
    runs_f = gl.load(walk.full[0] + column + 1) - f0
    start_p, count_p = _run(walk.partial, p0, runs_p > 0)
    start_f, count_f = _run(walk.full, f0, runs_f > 0)
    return QRuns(p0, runs_p, start_p, count_p, f0, runs_f, start_f, count_f)


@gluon.jit
def _run(runs, n, exists):
    """Start and count of run n, in tiles; the first tile where it does not exist."""
    start = gl.load(runs[1] + n, mask=exists, other=0)
    return start, gl.load(runs[2] + n, mask=exists, other=1)


@gluon.jit
def _rows(start, count, walk, length, BLOCK: gl.constexpr):
    """First row and number of blocks of some tiles."""
    first = start * walk.step
    end = gl.minimum(first + count * walk.step, length)
    return first, (end - first + BLOCK - 1) // BLOCK


@gluon.jit
def _rows_of_run(runs, n, r, start, count, walk, length, BLOCK: gl.constexpr):
    """First row and number of blocks of run n, which is visited as the r-th. Start and count of the
    first one that is visited are known.

    (Any other run is loaded when it begins. Loaded one ahead, the loop over runs would carry its
    count, and nothing but the loop's end would use it: see `rows_of` in the Triton backend's
    device/work_tile.py.)
    """
    next_start, next_count = _run(runs, n, r > 0)
    start, count = gl.where(r > 0, next_start, start), gl.where(r > 0, next_count, count)
    return _rows(start, count, walk, length, BLOCK)
