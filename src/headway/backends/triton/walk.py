"""Walking the live tiles of a line, a run of tiles after the other, in one loop.

Under a window or packed documents runs are a few tiles long, and a loop for each would fill and
drain the pipeline of loads every time. So there is one loop over the blocks of all runs, and where
the next run begins is read one block ahead.
"""

import triton.language as tl

import triton

_MANY = tl.constexpr(32)  # runs that are counted at once


@triton.jit
def begin(walk, line, length, BLOCK: tl.constexpr):
    """Of the partial and of the full tiles of a line: how many blocks of BLOCK rows to visit, and
    the first: (row, end of its run; start and end of the next run; number of that run and of the
    last).

    A program waits for what it reads here, and a line has a run of each kind mostly: so both kinds
    are read together, and runs are counted only where there are several.

    - `length`: rows in all.
    """
    first, last = tl.load(walk.partial[0] + line), tl.load(walk.partial[0] + line + 1)
    first_full, last_full = tl.load(walk.full[0] + line), tl.load(walk.full[0] + line + 1)
    one = _run(walk.partial, first, last, walk.step, length)
    one_full = _run(walk.full, first_full, last_full, walk.step, length)
    return (
        _from(walk.partial, one, first, last, walk.step, length, BLOCK),
        _from(walk.full, one_full, first_full, last_full, walk.step, length, BLOCK),
    )


@triton.jit
def _from(runs, one, first, last, step, length, BLOCK: tl.constexpr):
    """`begin` for one kind, whose first run is `one`."""
    start, stop = one
    blocks = (stop - start + (BLOCK - 1)) // BLOCK
    for n in range(first + 1, last, _MANY):
        more = _run(runs, n + tl.arange(0, _MANY), last, step, length)
        blocks += tl.sum((more[1] - more[0] + (BLOCK - 1)) // BLOCK, 0)
    then, until = _run(runs, first + 1, last, step, length)
    return blocks, (start, stop, then, until, first + 1, last)


@triton.jit
def advance(runs, at, step, length, BLOCK: tl.constexpr):
    """The block after this one."""
    row, stop, then, until, run, last = at
    over = row + BLOCK >= stop
    row = tl.where(over, then, row + BLOCK)
    stop = tl.where(over, until, stop)
    run += over.to(tl.int32)
    then, until = _run(runs, run, last, step, length)
    return row, stop, then, until, run, last


@triton.jit
def _run(runs, run, last, step, length):
    """First row and end of runs (a line's last tile may be cut off); past the last, 0 and 0."""
    row = tl.load(runs[1] + run, mask=run < last, other=0) * step
    return row, tl.minimum(row + tl.load(runs[2] + run, mask=run < last, other=0) * step, length)
