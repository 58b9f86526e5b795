"""The main loop: a program visits the live tiles of its tile row, block by block (`visit`).

Partial tiles come mostly in short runs. A loop per run would fill and drain the pipeline of loads
every time, so one loop visits the blocks of all runs (`advance`). Full tiles come in long runs, and
each run has a loop of its own (`FullRuns`) that carries a row and nothing else: the state of the
other loop costs registers, and ptxas schedules it worse. Where a mask has many short runs of full
tiles (`scattered`), one loop visits those as well.

One loop for the runs took a window's forward from 260 to 280 TFLOP/s on an H200
(docs/lab/triton.md). For dk and dv a tile row is a column of the mask's tiles, and its blocks are
queries.
"""

from typing import Any, NamedTuple

import triton.language as tl

import triton

from . import tile

_RUNS_AT_ONCE = tl.constexpr(32)  # whose blocks are counted together


class FullRuns(NamedTuple):
    """The runs of full tiles of a tile row."""

    start: Any  # first tile of the first run
    count: Any  # number of its tiles
    first: Any  # index of the first run
    last: Any  # index of the last run plus 1


class BlockCursor(NamedTuple):
    """A block of the runs of a tile row, and the run after it."""

    row: Any  # first row of the block
    stop: Any  # end of rows of its run
    next_run: Any  # the next run in memory: first tile, number of tiles
    run: Any  # index of the next run
    last: Any  # index of the last run plus 1


def scattered(schedule: Any, length: int) -> bool:
    """Check whether full tiles come in many short runs: on average more than two per tile row, and
    more than one per eight tiles of `length`.

    On an H200, 8k long, every other run of a checkerboard, a loop per run takes 1.69, 1.25, 1.11
    and 1.04 times as long as one loop in the forward, with runs of 1, 2, 4 and 8 tiles, and 1.14,
    1.00, 0.95 and 0.91 times in the backward.
    """
    if schedule.full is None:
        return False
    tile_rows, runs, tiles = (
        len(schedule.full[0]) - 1,
        len(schedule.full[1]),
        -(-length // schedule.step),
    )
    return runs > 2 * tile_rows and 8 * runs > tiles * tile_rows


class Program(NamedTuple):
    """The rows of one program and the live tiles that it visits."""

    slot: Any  # index among the programs of its head
    first: Any  # first row
    end: Any  # end of rows
    h: Any  # head
    b: Any  # batch row
    h64: Any  # the same as int64
    b64: Any
    index: Any  # 0, 1, ...: the rows from `first` on
    live: Any  # which of these rows exist
    partial: Any  # from `begin`
    full: Any


@triton.jit
def begin_program(
    schedule, heads, length, other_length, SUB: tl.constexpr, ROWS: tl.constexpr,
    EDGE: tl.constexpr, BLOCK: tl.constexpr, SCATTERED: tl.constexpr,
):  # fmt: skip
    """Return the `Program` that computes ROWS rows of `length`, from blocks of `other_length`."""
    work = tile.map_work_tile(schedule, heads, SUB, ROWS)
    partial, full = begin(schedule, work.tile_row, other_length, EDGE, BLOCK, SCATTERED)
    b64, h64 = tl.cast(work.b, tl.int64), tl.cast(work.h, tl.int64)
    index = tl.arange(0, ROWS)
    live = work.first + index < tl.minimum(work.end, length)
    return Program(
        work.slot, work.first, work.end, work.h, work.b, h64, b64, index, live, partial, full
    )  # fmt: skip


@triton.jit
def visit(
    state, stationary, streamed, rows, mods, schedule, program, length, STEP: tl.constexpr,
    MASK: tl.constexpr, BLOCK: tl.constexpr, EDGE: tl.constexpr, SCATTERED: tl.constexpr,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Return `state` after STEP has visited every live block of the program's tile row.

    - `stationary`: the tiles that stay in registers.
    - `streamed`: pointers to the tiles that STEP loads.
    - `length`: the number of rows that the blocks are cut from.
    """
    # How many kinds of tiles, of partial and full ones, have one loop over all blocks.
    BLOCK_LOOPS: tl.constexpr = 0 if schedule.full is None else (2 if SCATTERED else 1)
    for FULL in tl.static_range(BLOCK_LOOPS):
        runs = schedule.full if FULL else schedule.partial
        blocks, cursor = program.full if FULL else program.partial
        for _ in tl.range(0, blocks):
            state = STEP(
                state, stationary, streamed, cursor.row, cursor.stop, rows, mods,
                None if FULL else MASK, BLOCK if FULL else EDGE, CONFIG,
            )  # fmt: skip
            cursor = advance(runs, cursor, schedule.step, length, BLOCK if FULL else EDGE)
    if BLOCK_LOOPS < 2:
        for run in tl.range(program.full.first, program.full.last):
            start, stop = rows_of(schedule, program.full, run, length)
            for n in tl.range(start, stop, BLOCK):
                state = STEP(
                    state, stationary, streamed, n, stop, rows, mods,
                    MASK if schedule.full is None else None, BLOCK, CONFIG,
                )  # fmt: skip
    return state


@triton.jit
def begin(
    schedule, tile_row, length, EDGE: tl.constexpr, BLOCK: tl.constexpr, SCATTERED: tl.constexpr
):  # fmt: skip
    """Return the live tiles of a tile row, partial and full.

    Partial tiles: the number of blocks of EDGE rows, and the `BlockCursor` of the first. Full
    tiles: the same with blocks of BLOCK rows if SCATTERED, else `FullRuns`. Without a block mask no
    tile is partial.

    A program waits for these loads, and most tile rows have one run of each kind. So both kinds are
    loaded together, and runs are counted only if there are several.

    - `length`: the number of rows.
    """
    if schedule.full is None:
        return (0, ()), FullRuns(0, 0, 0, 1)
    else:
        first, last = (
            tl.load(schedule.partial[0] + tile_row),
            tl.load(schedule.partial[0] + tile_row + 1),
        )
        first_full = tl.load(schedule.full[0] + tile_row)
        last_full = tl.load(schedule.full[0] + tile_row + 1)
        first_run = _read(schedule.partial, first, last)
        first_full_run = _read(schedule.full, first_full, last_full)
        if SCATTERED:
            full = _blocks(
                schedule.full, first_full_run, first_full, last_full, schedule.step, length, BLOCK
            )
        else:
            full = FullRuns(first_full_run[0], first_full_run[1], first_full, last_full)
        return _blocks(schedule.partial, first_run, first, last, schedule.step, length, EDGE), full


@triton.jit
def _blocks(runs, first_run, first, last, step, length, BLOCK: tl.constexpr):
    """Return the number of blocks of one kind of tiles, and the first `BlockCursor`."""
    start, stop = _rows(first_run, step, length)
    blocks = (stop - start + (BLOCK - 1)) // BLOCK
    for n in range(first + 1, last, _RUNS_AT_ONCE):
        starts, stops = _rows(_read(runs, n + tl.arange(0, _RUNS_AT_ONCE), last), step, length)
        blocks += tl.sum((stops - starts + (BLOCK - 1)) // BLOCK, 0)
    return blocks, BlockCursor(start, stop, _read(runs, first + 1, last), first + 1, last)


@triton.jit
def advance(runs, cursor, step, length, BLOCK: tl.constexpr):
    """Return the `BlockCursor` after this one."""
    row, stop, next_run, run, last = cursor
    next_row, next_stop = _rows(next_run, step, length)
    run_ends = row + BLOCK >= stop
    row = tl.where(run_ends, next_row, row + BLOCK)
    stop = tl.where(run_ends, next_stop, stop)
    run += run_ends.to(tl.int32)
    return BlockCursor(row, stop, _read(runs, run, last), run, last)


@triton.jit
def rows_of(schedule, full, run, length):
    """Return the first row and the end of rows of a run of full tiles, by its index.

    The first run is loaded already; the others when their loop begins. The bounds of an
    inner loop must not be carried by the loop over runs: Triton 3.6 takes them for dead, and every
    run gets the bounds of the first (triton-lang/triton#9036).
    """
    if schedule.full is None:
        # Kernels do not specialise `length`: no load would be pipelined in a loop that is known to
        # have one iteration, and ptxas miscompiles such a kernel (`launch._aligned_rows`).
        return 0, length
    else:
        later = run > full.first
        start = tl.load(schedule.full[1] + run, mask=later, other=full.start)
        count = tl.load(schedule.full[2] + run, mask=later, other=full.count)
        return _rows((start, count), schedule.step, length)


@triton.jit
def _read(runs, run, last):
    """Load runs: first tile and number of tiles; 0 and 0 from `last` on."""
    live = run < last
    return tl.load(runs[1] + run, mask=live, other=0), tl.load(runs[2] + run, mask=live, other=0)


@triton.jit
def _rows(run, step, length):
    """Return the first row and the end of rows of runs. The last tile of a tile row may be cut
    off."""
    row = run[0] * step
    return row, tl.minimum(row + run[1] * step, length)
