"""Walking the live tiles of a line.

Tiles that are kept in part come in short runs mostly, for which a loop each would fill and drain
the pipeline of loads every time. So there is one loop over the blocks of all their runs
(`advance`). Full tiles come in long ones, and each has a loop of its own (`Runs`), in which only a
row counts up: what the other loop keeps from block to block costs registers, and ptxas orders it
worse. Where a mask has many short runs of full tiles (`scattered`), those go as partial ones do.
"""

from typing import Any, NamedTuple

import triton.language as tl

import triton

_MANY = tl.constexpr(32)  # runs that are counted at once


class Runs(NamedTuple):
    """Runs of full tiles: start and tiles of the first; its number, and that of the last plus 1."""

    start: Any
    count: Any
    first: Any
    last: Any


def scattered(walk: Any, length: int) -> bool:
    """Whether full tiles come in many short runs, of lines that are so long: more than two in a
    line, of less than eight tiles if half of them are full. (On an H200, 8k long, every other run
    of a checkerboard, a loop for each in terms of one for all: forward 1.69, 1.25, 1.11 and 1.04
    with runs of 1, 2, 4 and 8 tiles, backward 1.14, 1.00, 0.95 and 0.91.)"""
    if walk.full is None:
        return False
    lines, runs, tiles = len(walk.full[0]) - 1, len(walk.full[1]), -(-length // walk.step)
    return runs > 2 * lines and 8 * runs > tiles * lines


@triton.jit
def begin(
    walk, line, length, EDGE: tl.constexpr, BLOCK: tl.constexpr, SCATTERED: tl.constexpr
):  # fmt: skip
    """Of the partial tiles of a line: how many blocks of EDGE rows to visit, and the first: (row,
    end of its run, the next run as it stands in memory, number of that run and of the last). And
    its full tiles: the same, of BLOCK rows, if SCATTERED, else `Runs`. Without a block mask no tile
    is partial.

    A program waits for what it reads here, and a line has a run of each kind mostly: so both kinds
    are read together, and runs are counted only where there are several.

    - `length`: rows in all.
    """
    if walk.full is None:
        return (0, ()), Runs(0, 0, 0, 1)
    else:
        first, last = tl.load(walk.partial[0] + line), tl.load(walk.partial[0] + line + 1)
        first_full, last_full = tl.load(walk.full[0] + line), tl.load(walk.full[0] + line + 1)
        one = _read(walk.partial, first, last)
        one_full = _read(walk.full, first_full, last_full)
        if SCATTERED:
            full = _from(walk.full, one_full, first_full, last_full, walk.step, length, BLOCK)
        else:
            full = Runs(one_full[0], one_full[1], first_full, last_full)
        return _from(walk.partial, one, first, last, walk.step, length, EDGE), full


@triton.jit
def _from(runs, one, first, last, step, length, BLOCK: tl.constexpr):
    """`begin` for one kind, whose first run is `one`."""
    start, stop = _rows(one, step, length)
    blocks = (stop - start + (BLOCK - 1)) // BLOCK
    for n in range(first + 1, last, _MANY):
        more = _rows(_read(runs, n + tl.arange(0, _MANY), last), step, length)
        blocks += tl.sum((more[1] - more[0] + (BLOCK - 1)) // BLOCK, 0)
    return blocks, (start, stop, _read(runs, first + 1, last), first + 1, last)


@triton.jit
def advance(runs, at, step, length, BLOCK: tl.constexpr):
    """The block after this one."""
    row, stop, then, run, last = at
    then, until = _rows(then, step, length)
    over = row + BLOCK >= stop
    row = tl.where(over, then, row + BLOCK)
    stop = tl.where(over, until, stop)
    run += over.to(tl.int32)
    return row, stop, _read(runs, run, last), run, last


@triton.jit
def rows_of(walk, full, run, length):
    """First row and end of the run of full tiles with this number.

    Those of the first are known; others are read when they begin. What loops within are bounded by
    must not be carried by the loop over runs: Triton 3.6 takes that for dead, and leaves every run
    the first one's bounds (triton-lang/triton#9036).
    """
    if walk.full is None:
        if isinstance(length, int):
            # 1, which Triton takes for a constant: of one round there would be no loop, no load
            # would run ahead, and ptxas makes wrong code of such a kernel (`launch._rows`). The
            # grid has one program here, which the compiler does not know.
            return 0, length + tl.program_id(1)
        else:
            return 0, length
    else:
        later = run > full.first
        start = tl.load(walk.full[1] + run, mask=later, other=full.start)
        count = tl.load(walk.full[2] + run, mask=later, other=full.count)
        return _rows((start, count), walk.step, length)


@triton.jit
def _read(runs, run, last):
    """Runs as they stand in memory: first tile and number of tiles; 0 and 0 past the last."""
    live = run < last
    return tl.load(runs[1] + run, mask=live, other=0), tl.load(runs[2] + run, mask=live, other=0)


@triton.jit
def _rows(run, step, length):
    """First row and end of runs (a line's last tile may be cut off)."""
    row = run[0] * step
    return row, tl.minimum(row + run[1] * step, length)
