"""Walking the live tiles of a line in one loop: those that need the mask, then the full ones.

A line's tiles come in runs. Under a window or packed documents a run is a few tiles long, and a
loop for each would fill and drain the pipeline of loads every time. So there is one loop over all
blocks of all runs, and where the next run begins is read one block ahead.
"""

import triton.language as tl

import triton

_MANY = tl.constexpr(32)  # runs that are counted at once


@triton.jit
def begin(walk, line, length, BLOCK: tl.constexpr):
    """How many blocks of BLOCK rows to visit, and the first: (run, row, end of the run; start and
    end of the next run; what the runs are)."""
    partial, full = tl.load(walk.partial[0] + line), tl.load(walk.full[0] + line)
    masked = tl.load(walk.partial[0] + line + 1) - partial
    unmasked = tl.load(walk.full[0] + line + 1) - full
    runs = (partial, full - masked, masked, masked + unmasked)
    blocks = 0
    for n in range(0, masked + unmasked, _MANY):
        start, stop = _run(walk, runs, n + tl.arange(0, _MANY), length)
        blocks += tl.sum((stop - start + (BLOCK - 1)) // BLOCK, 0)
    start, stop = _run(walk, runs, 0, length)
    then, until = _run(walk, runs, 1, length)
    return blocks, (0, start, stop, then, until, runs)


@triton.jit
def needs_mask(at):
    """Whether this block is of a run whose tiles are not full."""
    return at[0] < at[5][2]


@triton.jit
def advance(walk, at, length, BLOCK: tl.constexpr):
    """The block after this one."""
    run, row, stop, then, until, runs = at
    over = row + BLOCK >= stop
    run += over.to(tl.int32)
    row = tl.where(over, then, row + BLOCK)
    stop = tl.where(over, until, stop)
    then, until = _run(walk, runs, run + 1, length)
    return run, row, stop, then, until, runs


@triton.jit
def _run(walk, runs, run, length):
    """First row and end of runs (a line's last tile may be cut off); past the last, 0 and 0."""
    start = _read(walk, runs, run, 1) * walk.step
    return start, tl.minimum(start + _read(walk, runs, run, 2) * walk.step, length)


@triton.jit
def _read(walk, runs, run, WHAT: tl.constexpr):
    partial, full, masked, end = runs
    here = tl.load(walk.partial[WHAT] + (partial + run), mask=run < masked, other=0)
    return here + tl.load(
        walk.full[WHAT] + (full + run), mask=(run >= masked) & (run < end), other=0
    )
