"""Gradients of captured tensors: the functions that a generated `scatter` calls.

Each adds a tile of values to a float32 gradient, after a reduction of the values that go to the
same number. `OFFSET(score, b, h, q_idx, kv_idx, captured)` is the offset in the gradient;
`dependence_of` in dependence.py chooses the function. Queries are along the axis of the tile along
which `q_idx` is longer than 1.
"""

import triton.language as tl
from triton.language.target_info import cuda_capability_geq

import triton


@triton.jit
def add_one(grad, values, OFFSET: tl.constexpr, b, h, q_idx, kv_idx, captured, score):
    """All pairs of the tile read the same number."""
    # On Blackwell Triton 3.6 fails to compile some sums over one axis after the other.
    total = tl.sum(values) if cuda_capability_geq(10) else tl.sum(tl.sum(values, 1), 0)
    tl.atomic_add(grad + OFFSET(0.0, b, h, 0, 0, captured), total, sem="relaxed")


@triton.jit
def add_rows(grad, values, OFFSET: tl.constexpr, b, h, q_idx, kv_idx, captured, score):
    """The pairs of a query read the same number."""
    KEYS: tl.constexpr = 1 if kv_idx.shape[0] == 1 else 0
    _add_sums(grad, values, OFFSET(0.0, b, h, q_idx, 0, captured), KEYS)


@triton.jit
def add_cols(grad, values, OFFSET: tl.constexpr, b, h, q_idx, kv_idx, captured, score):
    """The pairs of a key read the same number."""
    QUERIES: tl.constexpr = 0 if kv_idx.shape[0] == 1 else 1
    _add_sums(grad, values, OFFSET(0.0, b, h, 0, kv_idx, captured), QUERIES)


@triton.jit
def _add_sums(grad, values, offset, AXIS: tl.constexpr):
    """Add sums over an axis, along which the offsets have length 1: a maximum removes it there.

    A tensor of length 1 along an axis may have several copies in the registers of a thread, and
    Triton 3.6 adds every copy: gradients of Hopper's layouts were doubled.
    """
    sums = tl.sum(values, AXIS)
    tl.atomic_add(grad + tl.max(offset, AXIS), sums, mask=sums != 0, sem="relaxed")


@triton.jit
def add_diagonals(grad, values, OFFSET: tl.constexpr, b, h, q_idx, kv_idx, captured, score):
    """The pairs on a diagonal read the same number.

    The tile is read skewed through shared memory, so that a diagonal becomes a column, which one
    thread sums: no exchange between threads. (A sum across warps would also make ptxas serialise
    the wgmmas.) The tile is cut into squares of SIDE rows. In a skewed square, columns that wrap
    around belong to another diagonal, SIDE before: every value is read once, and goes to one of two
    sums. Even and odd rows are summed separately, so that all threads have work. Positions are
    consecutive from `captured[2]`: the first query and key.
    """
    M: tl.constexpr = values.shape[0]
    N: tl.constexpr = values.shape[1]
    SIDE: tl.constexpr = M if M < N else N
    LONG: tl.constexpr = N if M < N else M
    q_first, kv_first = captured[2]
    mine = tl.arange(0, 2 * LONG)
    square = mine // SIDE % (LONG // SIDE) * SIDE
    diagonal = mine % SIDE
    row = tl.arange(0, SIDE // 2)[:, None] * 2 + (mine // LONG)[None, :]
    column = row + diagonal[None, :]
    first = column < SIDE
    at = row * N + (column & (SIDE - 1)) + (square if M < N else square * N)[None, :]
    read = tl.gather(tl.reshape(values, [M * N]), tl.reshape(at, [M * N]), 0)
    read = tl.reshape(read, at.shape)
    of_first = tl.sum(tl.where(first, read, 0.0), 0)
    of_other = tl.sum(tl.where(first, 0.0, read), 0)
    key = kv_first + diagonal + (square if M < N else -square)
    to = grad + OFFSET(0.0, b, h, q_first, key, captured)
    tl.atomic_add(to, of_first, mask=of_first != 0, sem="relaxed")
    to = grad + OFFSET(0.0, b, h, q_first, key - SIDE, captured)
    tl.atomic_add(to, of_other, mask=of_other != 0, sem="relaxed")


@triton.jit
def add_pairs(grad, values, OFFSET: tl.constexpr, b, h, q_idx, kv_idx, captured, score):
    """Every pair may read another number."""
    at = grad + OFFSET(score, b, h, q_idx, kv_idx, captured)
    tl.atomic_add(at, values, mask=values != 0, sem="relaxed")
