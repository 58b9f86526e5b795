"""The walk over the live tiles of a tile row.

Partial tiles come mostly in short runs. A loop per run would fill and drain the pipeline of loads
every time, so one loop visits the blocks of all runs (`advance`). Full tiles come in long runs, and
each run has a loop of its own (`Runs`) that counts up a row and nothing else: the state that the
other loop carries from block to block costs registers, and ptxas schedules it worse. Where a mask
has many short runs of full tiles (`scattered`), one loop visits those as well.

For dk and dv a tile row is a column of the mask's tiles, and its blocks are queries.
"""

from typing import Any, NamedTuple

import triton.language as tl

import triton

_RUNS_AT_ONCE = tl.constexpr(32)  # that are counted


class Runs(NamedTuple):
    """The runs of full tiles of a tile row."""

    start: Any  # the first tile of the first run
    count: Any  # its tiles
    first: Any  # number of the first run
    last: Any  # number of the last run plus 1


class Cursor(NamedTuple):
    """A block of the runs of a tile row, and the run after it."""

    row: Any  # the block's first
    stop: Any  # end of rows of its run
    then: Any  # the next run as it stands in memory: first tile, number of tiles
    run: Any  # number of the next run
    last: Any  # number of the last run plus 1


def scattered(walk: Any, length: int) -> bool:
    """Whether full tiles come in many short runs: on average more than two per tile row, and more
    than one per eight tiles of `length`. (On an H200, 8k long, every other run of a checkerboard,
    the time with a loop per run over that with one loop: forward 1.69, 1.25, 1.11 and 1.04 with
    runs of 1, 2, 4 and 8 tiles, backward 1.14, 1.00, 0.95 and 0.91.)"""
    if walk.full is None:
        return False
    tile_rows, runs, tiles = len(walk.full[0]) - 1, len(walk.full[1]), -(-length // walk.step)
    return runs > 2 * tile_rows and 8 * runs > tiles * tile_rows


@triton.jit
def begin(
    walk, tile_row, length, EDGE: tl.constexpr, BLOCK: tl.constexpr, SCATTERED: tl.constexpr
):  # fmt: skip
    """The live tiles of a tile row: its partial tiles, as the number of blocks of EDGE rows and the
    `Cursor` of the first; and its full tiles, the same with blocks of BLOCK rows if SCATTERED, else
    as `Runs`. Without a block mask no tile is partial.

    A program waits for these loads, and most tile rows have one run of each kind. So both kinds are
    loaded together, and runs are counted only where there are several.

    - `length`: rows in all.
    """
    if walk.full is None:
        return (0, ()), Runs(0, 0, 0, 1)
    else:
        first, last = tl.load(walk.partial[0] + tile_row), tl.load(walk.partial[0] + tile_row + 1)
        first_full = tl.load(walk.full[0] + tile_row)
        last_full = tl.load(walk.full[0] + tile_row + 1)
        one = _read(walk.partial, first, last)
        one_full = _read(walk.full, first_full, last_full)
        if SCATTERED:
            full = _from(walk.full, one_full, first_full, last_full, walk.step, length, BLOCK)
        else:
            full = Runs(one_full[0], one_full[1], first_full, last_full)
        return _from(walk.partial, one, first, last, walk.step, length, EDGE), full


@triton.jit
def _from(runs, one, first, last, step, length, BLOCK: tl.constexpr):
    """`begin` for one kind of tiles, whose first run is `one`: blocks, and the first `Cursor`."""
    start, stop = _rows(one, step, length)
    blocks = (stop - start + (BLOCK - 1)) // BLOCK
    for n in range(first + 1, last, _RUNS_AT_ONCE):
        more = _rows(_read(runs, n + tl.arange(0, _RUNS_AT_ONCE), last), step, length)
        blocks += tl.sum((more[1] - more[0] + (BLOCK - 1)) // BLOCK, 0)
    return blocks, Cursor(start, stop, _read(runs, first + 1, last), first + 1, last)


@triton.jit
def advance(runs, at, step, length, BLOCK: tl.constexpr):
    """The `Cursor` after this one."""
    row, stop, then, run, last = at
    then, until = _rows(then, step, length)
    over = row + BLOCK >= stop
    row = tl.where(over, then, row + BLOCK)
    stop = tl.where(over, until, stop)
    run += over.to(tl.int32)
    return Cursor(row, stop, _read(runs, run, last), run, last)


@triton.jit
def rows_of(walk, full, run, length):
    """First row and end of rows of a run of full tiles, by its number.

    Those of the first run are loaded already; the others when their loop begins. The bounds of an
    inner loop must not be carried by the loop over runs: Triton 3.6 takes them for dead, and every
    run gets the bounds of the first (triton-lang/triton#9036).
    """
    if walk.full is None:
        # Kernels do not specialise `length`: of a loop that is known to have one iteration no load
        # would be pipelined, and ptxas makes wrong code of such a kernel (`launch._rows`).
        return 0, length
    else:
        later = run > full.first
        start = tl.load(walk.full[1] + run, mask=later, other=full.start)
        count = tl.load(walk.full[2] + run, mask=later, other=full.count)
        return _rows((start, count), walk.step, length)


@triton.jit
def _read(runs, run, last):
    """Runs as they stand in memory: first tile and number of tiles; 0 and 0 from `last` on."""
    live = run < last
    return tl.load(runs[1] + run, mask=live, other=0), tl.load(runs[2] + run, mask=live, other=0)


@triton.jit
def _rows(run, step, length):
    """First row and end of rows of runs. The last tile of a tile row may be cut off."""
    row = run[0] * step
    return row, tl.minimum(row + run[1] * step, length)
