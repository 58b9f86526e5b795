"""Tiles of a matrix in Triton: loads, stores and products.

A row whose width is no power of two is held as two pieces, so that 192 costs 128 + 64 columns and
not 256 (`Width`). A tile is a tuple of its pieces: () is neither read nor multiplied. Rows and
columns past the end are zeros, and no pointer past the end is read.
"""

from typing import Any, NamedTuple

import triton.language as tl

import triton


class Width(NamedTuple):
    """The columns of a matrix, a constant of a kernel."""

    columns: Any  # in memory
    piece: Any  # columns of the first piece, a power of two; 0: there is none
    rest: Any  # columns of the second piece; 0: there is none


@triton.jit
def load(base, rows, stride, live, WIDTH: tl.constexpr, column_stride=None):
    """Load rows of a matrix, in one or two pieces.

    - `live`: which rows exist; None: all.
    - `column_stride`: None: 1.
    """
    if WIDTH.piece == 0:
        return ()
    elif WIDTH.rest == 0:
        return (_load(base, rows, stride, column_stride, live, WIDTH.columns, 0, WIDTH.piece),)
    else:
        return (
            _load(base, rows, stride, column_stride, live, WIDTH.columns, 0, WIDTH.piece),
            _load(base, rows, stride, column_stride, live, WIDTH.columns, WIDTH.piece, WIDTH.rest),
        )


@triton.jit
def _load(
    base, rows, stride, column_stride, live,
    COLUMNS: tl.constexpr, START: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    cols = START + tl.arange(0, SIZE)
    if column_stride is None:
        pointers = base + rows[:, None] * stride + cols[None, :]
    else:
        pointers = base + rows[:, None] * stride + cols[None, :] * tl.cast(column_stride, tl.int64)
    if COLUMNS >= START + SIZE:
        if live is None:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=live[:, None], other=0.0)
    else:
        inside = (cols < COLUMNS)[None, :]
        if live is None:
            return tl.load(pointers, mask=inside, other=0.0)
        else:
            return tl.load(pointers, mask=live[:, None] & inside, other=0.0)


@triton.jit
def store(base, rows, live, x, WIDTH: tl.constexpr):
    """Store the pieces of x to a matrix whose rows are contiguous; never past a row or column."""
    pointers = base + rows[:, None] * WIDTH.columns
    for n in tl.static_range(len(x)):
        cols = n * WIDTH.piece + tl.arange(0, x[n].shape[1])
        inside = live[:, None] & (cols < WIDTH.columns)[None, :]
        tl.store(pointers + cols[None, :], x[n].to(base.dtype.element_ty), mask=inside)


@triton.jit
def zeros(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return an accumulator of zeros in pieces."""
    if WIDTH.piece == 0:
        return ()
    elif WIDTH.rest == 0:
        return (tl.zeros([ROWS, WIDTH.piece], tl.float32),)
    else:
        return (tl.zeros([ROWS, WIDTH.piece], tl.float32), tl.zeros([ROWS, WIDTH.rest], tl.float32))


@triton.jit
def outer(a, b, PRECISION: tl.constexpr, s=None):
    """Return a bᵀ, summed over the pieces: S or dP; added to `s` if given."""
    s = tl.dot(a[0], tl.trans(b[0]), s, input_precision=PRECISION)
    if len(a) == 2:
        s = tl.dot(a[1], tl.trans(b[1]), s, input_precision=PRECISION)
    return s


@triton.jit
def add_product(acc, p, x, PRECISION: tl.constexpr):
    """Return acc + p x, piece by piece. p is rounded to the dtype of x, for tensor cores."""
    if len(acc) == 0:
        return ()
    else:
        p = p.to(x[0].dtype)
        first = tl.dot(p, x[0], acc[0], input_precision=PRECISION)
        if len(acc) == 1:
            return (first,)
        else:
            return (first, tl.dot(p, x[1], acc[1], input_precision=PRECISION))


@triton.jit
def times(acc, factor):
    """Return every piece times a factor: a number, or a column with one number per row."""
    if len(acc) == 0:
        return ()
    elif len(acc) == 1:
        return (acc[0] * factor,)
    else:
        return (acc[0] * factor, acc[1] * factor)
