"""What the forward and the backward do with a tile: load, multiply, place, drop, add up.

A row of width d that is no power of two is held as two pieces, so that 192 costs 128 + 64 columns
and not 256: `WIDTH` columns and `REST` more (0: one piece). Rows, columns and pieces past the end
are zeros, and no pointer past the end is read.
"""

from typing import Any, NamedTuple

import triton.language as tl

import triton
from headway.dropout import ROUNDS

from ..gpu import preprocess as of_rows


class Dropout(NamedTuple):
    """`headway.dropout`: pointer to the seed; words below `threshold` drop."""

    seed: Any
    threshold: Any
    factor: Any  # 1 / (1 - p)


# -- loads and products ---------------------------------------------------------------------------


@triton.jit
def head(base, strides, b, h):
    """Where a head begins. The strides of batch and head are given in eights: so it is known that
    eight divides them, and loads are 16 bytes wide and run ahead (`launch._rows`)."""
    return base + (b * strides[0] + h * strides[1]) * 8


@triton.jit
def load(
    base, rows, stride, live, width: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
    column=None,
):  # fmt: skip
    """Rows of a matrix, in one or two pieces. `live` None: all rows are there; `column`: from one
    column to the next, None for 1."""
    if REST == 0:
        return (_load(base, rows, stride, column, live, width, 0, WIDTH),)
    else:
        return (
            _load(base, rows, stride, column, live, width, 0, WIDTH),
            _load(base, rows, stride, column, live, width, WIDTH, REST),
        )


@triton.jit
def _load(
    base, rows, stride, column, live,
    width: tl.constexpr, START: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    cols = START + tl.arange(0, SIZE)
    if column is None:
        at = base + rows[:, None] * stride + cols[None, :]
    else:
        at = base + rows[:, None] * stride + cols[None, :] * tl.cast(column, tl.int64)
    if width >= START + SIZE:
        if live is None:
            return tl.load(at)
        else:
            return tl.load(at, mask=live[:, None], other=0.0)
    else:
        inside = (cols < width)[None, :]
        if live is None:
            return tl.load(at, mask=inside, other=0.0)
        else:
            return tl.load(at, mask=live[:, None] & inside, other=0.0)


@triton.jit
def load_row(at, live, other):
    """A number of every row. `live` None: all rows are there."""
    if live is None:
        return tl.load(at)
    else:
        return tl.load(at, mask=live, other=other)


@triton.jit
def turned_heads(turned, b, h):
    """Where a head begins in two turned copies (`launch.turned`), each with its strides."""
    one, two = turned
    return (head(one[0], one[1], b, h), one[1]), (head(two[0], two[1], b, h), two[1])


@triton.jit
def right(
    x, turned, WHICH: tl.constexpr, n, rows, live,
    width: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """The right factor of `outer`: rows n + `rows` of a turned copy; where there is none, x, which
    are the same rows of the matrix."""
    if turned is None:
        return x
    else:
        base, strides = turned[WHICH]
        return load(base + n, rows, strides[2], live, width, WIDTH, REST, strides[3])


@triton.jit
def store(base, rows, stride, live, width, x, WIDTH: tl.constexpr):
    """Write the pieces of x; never past a row or column that is there."""
    to = base + rows[:, None] * stride
    for n in tl.static_range(len(x)):
        cols = n * WIDTH + tl.arange(0, x[n].shape[1])
        inside = live[:, None] & (cols < width)[None, :]
        tl.store(to + cols[None, :], x[n].to(base.dtype.element_ty), mask=inside)


@triton.jit
def add(base, rows, stride, live, width, x, WIDTH: tl.constexpr):
    """Add the pieces of x to float32 numbers that other programs add to as well."""
    to = base + rows[:, None] * stride
    for n in tl.static_range(len(x)):
        cols = n * WIDTH + tl.arange(0, x[n].shape[1])
        inside = live[:, None] & (cols < width)[None, :]
        tl.atomic_add(to + cols[None, :], x[n], mask=inside, sem="relaxed")


@triton.jit
def zeros(ROWS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr):
    """An accumulator in pieces."""
    if REST == 0:
        return (tl.zeros([ROWS, WIDTH], tl.float32),)
    else:
        return (tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, REST], tl.float32))


@triton.jit
def outer(a, b, PRECISION: tl.constexpr):
    """a bᵀ over the pieces: logits, and dP."""
    s = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    if len(a) == 2:
        s = tl.dot(a[1], tl.trans(b[1]), s, input_precision=PRECISION)
    return s


@triton.jit
def add_product(acc, p, x, PRECISION: tl.constexpr):
    """acc + p x, piece by piece; p in x's dtype, which is what tensor cores multiply."""
    p = p.to(x[0].dtype)
    first = tl.dot(p, x[0], acc[0], input_precision=PRECISION)
    if len(acc) == 1:
        return (first,)
    else:
        return (first, tl.dot(p, x[1], acc[1], input_precision=PRECISION))


@triton.jit
def inner(p, x, PRECISION: tl.constexpr):
    """pᵀ x over the pieces of x."""
    p = tl.trans(p.to(x[0].dtype))
    first = tl.dot(p, x[0], input_precision=PRECISION)
    if len(x) == 1:
        return (first,)
    else:
        return (first, tl.dot(p, x[1], input_precision=PRECISION))


@triton.jit
def sums(x, dx):
    """rowsum(x∘dx) over the pieces, in float32."""
    found = of_rows.sums(x[0], dx[0])
    if len(x) == 2:
        found += of_rows.sums(x[1], dx[1])
    return found


@triton.jit
def times(acc, factor):
    """Every piece times a factor: a number, or one per row as (rows, 1)."""
    if len(acc) == 1:
        return (acc[0] * factor,)
    else:
        return (acc[0] * factor, acc[1] * factor)


# -- places ---------------------------------------------------------------------------------------


@triton.jit
def place(walk, heads, SUB: tl.constexpr, ROWS: tl.constexpr):
    """The work of this program: its line of the block mask, its number among the programs of its
    head, first row, end of rows, head, batch row.

    Programs of a head follow one another, longest line first, so that they share its keys in cache
    and the last ones are short. Where the block mask differs between heads or batch rows its order
    is one for all of these.
    """
    pid = tl.program_id(0)
    if walk.full is None:
        slot = pid % walk.tile_rows
        rest = pid // walk.tile_rows
        first = slot * ROWS
        return slot, slot, first, first + ROWS, rest % heads, rest // heads
    else:
        ranks = walk.tile_rows * walk.b * walk.h * SUB
        rank = pid % ranks
        rest = pid // ranks
        line = tl.load(walk.order + rank // SUB)
        of_mask = line // walk.tile_rows
        tiles = line % walk.tile_rows
        first = tiles * walk.size + (rank % SUB) * ROWS
        end = tl.minimum(first + ROWS, (tiles + 1) * walk.size)
        # What the mask does not tell apart, the rest of the program's number does.
        if walk.h == 1:
            h = rest % heads
            rest = rest // heads
        else:
            h = of_mask % walk.h
        b = rest if walk.b == 1 else of_mask // walk.h
        return line, tiles * SUB + rank % SUB, first, end, h, b


@triton.jit
def positions(pos, stride, offset, b, index, live, INDEX: tl.constexpr):
    """Global positions of some rows: given ones, or `offset + index`."""
    if pos is None:
        return tl.cast(offset, INDEX) + index
    else:
        at = pos + tl.cast(b, tl.int64) * stride + index
        if live is None:  # every row is there
            return tl.load(at).to(INDEX)
        else:
            return tl.load(at, mask=live, other=0).to(INDEX)


@triton.jit
def with_origin(captured, coords, q_index, kv_index):
    """What a score captures, and where its tile begins, if positions are consecutive."""
    if coords.q_pos is None and coords.kv_pos is None:
        return captured[0], captured[1], (coords.q + q_index, coords.kv + kv_index)
    else:
        return captured


# -- dropout --------------------------------------------------------------------------------------


@triton.jit
def kept_by(dropout, b, h, q_idx, kv_idx):
    """Which pairs survive: Philox-4x32 on (j / 4, i, h, b), word j mod 4 (`headway.dropout`)."""
    j = (kv_idx & 3).to(tl.int32)
    group, i = tl.broadcast((kv_idx >> 2).to(tl.int32), q_idx.to(tl.int32))
    head = group * 0 + tl.cast(h, tl.int32)
    row = group * 0 + tl.cast(b, tl.int32)
    words = tl.philox(tl.load(dropout.seed), group, i, head, row, _ROUNDS)
    low = tl.where(j == 0, words[0], words[1])
    high = tl.where(j == 2, words[2], words[3])
    return tl.where(j < 2, low, high).to(tl.uint32).to(tl.int64) >= dropout.threshold


_ROUNDS = tl.constexpr(ROUNDS)
