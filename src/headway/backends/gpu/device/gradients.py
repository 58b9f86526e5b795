"""Gradients of captured tensors: the functions that a generated `scatter` calls.

Each adds a tile of values to a gradient, after a reduction of the values that go to the same
number. The gradient has float32 numbers, or exact sums (exact_sums.py) if WIDTH is not 0.
`OFFSET(score, b, h, q_idx, kv_idx, captured)` is the offset in the gradient; `dependence_of` in
dependence.py chooses the function. Queries are along the axis of the tile along which `q_idx` is
longer than 1.
"""

import triton.language as tl
from triton.language.target_info import cuda_capability_geq

import triton

from . import exact_sums


@triton.jit
def add_one(
    grad, values, OFFSET: tl.constexpr, b, h, q_idx, kv_idx, captured, score,
    WIDTH: tl.constexpr = 0,
):  # fmt: skip
    """Add a tile whose pairs all read the same number."""
    # On Blackwell Triton 3.6 fails to compile some sums over one axis after the other.
    total = tl.sum(values) if cuda_capability_geq(10) else tl.sum(tl.sum(values, 1), 0)
    if WIDTH:
        exact_sums.add(grad, OFFSET(0.0, b, h, 0, 0, captured), total, WIDTH)
    else:
        tl.atomic_add(grad + OFFSET(0.0, b, h, 0, 0, captured), total, sem="relaxed")


@triton.jit
def add_rows(
    grad, values, OFFSET: tl.constexpr, b, h, q_idx, kv_idx, captured, score,
    WIDTH: tl.constexpr = 0,
):  # fmt: skip
    """Add a tile in which the pairs of a query read the same number."""
    KEYS: tl.constexpr = 1 if kv_idx.shape[0] == 1 else 0
    _add_sums(grad, values, OFFSET(0.0, b, h, q_idx, 0, captured), KEYS, WIDTH)


@triton.jit
def add_cols(
    grad, values, OFFSET: tl.constexpr, b, h, q_idx, kv_idx, captured, score,
    WIDTH: tl.constexpr = 0,
):  # fmt: skip
    """Add a tile in which the pairs of a key read the same number."""
    QUERIES: tl.constexpr = 0 if kv_idx.shape[0] == 1 else 1
    _add_sums(grad, values, OFFSET(0.0, b, h, 0, kv_idx, captured), QUERIES, WIDTH)


@triton.jit
def _add_sums(grad, values, offset, AXIS: tl.constexpr, WIDTH: tl.constexpr):
    """Add sums over an axis. The offsets have length 1 along it, and a maximum removes it.

    A tensor of length 1 along an axis may have several copies in the registers of a thread, and
    Triton 3.6 adds every copy: gradients of Hopper's layouts were doubled.
    """
    sums = tl.sum(values, AXIS)
    if WIDTH:
        exact_sums.add(grad, tl.max(offset, AXIS), sums, WIDTH)
    else:
        tl.atomic_add(grad + tl.max(offset, AXIS), sums, mask=sums != 0, sem="relaxed")


@triton.jit
def add(grad, offset, values, WIDTH: tl.constexpr):
    """Add values to the numbers of a gradient."""
    if WIDTH:
        exact_sums.add(grad, offset, values, WIDTH)
    else:
        pointers = grad + offset
        tl.atomic_add(pointers, values, mask=values != 0, sem="relaxed")


@triton.jit
def add_diagonals(
    grad, values, OFFSET: tl.constexpr, b, h, q_idx, kv_idx, captured, score,
    WIDTH: tl.constexpr = 0,
):  # fmt: skip
    """Add a tile in which the pairs on a diagonal read the same number.

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
    lane = tl.arange(0, 2 * LONG)
    square = lane // SIDE % (LONG // SIDE) * SIDE
    diagonal = lane % SIDE
    row = tl.arange(0, SIDE // 2)[:, None] * 2 + (lane // LONG)[None, :]
    column = row + diagonal[None, :]
    unwrapped = column < SIDE
    flat = row * N + (column & (SIDE - 1)) + (square if M < N else square * N)[None, :]
    skewed = tl.gather(tl.reshape(values, [M * N]), tl.reshape(flat, [M * N]), 0)
    skewed = tl.reshape(skewed, flat.shape)
    diagonal_sum = tl.sum(tl.where(unwrapped, skewed, 0.0), 0)
    wrapped_sum = tl.sum(tl.where(unwrapped, 0.0, skewed), 0)
    key = kv_first + diagonal + (square if M < N else -square)
    offset = OFFSET(0.0, b, h, q_first, key, captured)
    add(grad, offset, diagonal_sum, WIDTH)
    offset = OFFSET(0.0, b, h, q_first, key - SIDE, captured)
    add(grad, offset, wrapped_sum, WIDTH)


@triton.jit
def add_pairs(
    grad, values, OFFSET: tl.constexpr, b, h, q_idx, kv_idx, captured, score,
    WIDTH: tl.constexpr = 0,
):  # fmt: skip
    """Add a tile in which every pair may read another number."""
    add(grad, OFFSET(score, b, h, q_idx, kv_idx, captured), values, WIDTH)
