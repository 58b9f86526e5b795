"""Tile primitives of the forward and the backward: loads, products, work tiles, dropout.

Those of `gpu/device/tiles.py` are re-exported.
"""

from typing import Any, NamedTuple

import triton.language as tl

import triton

from ...dropout import ROUNDS
from ..gpu import preprocess
from ..gpu.device.tiles import Width as Width
from ..gpu.device.tiles import add_product as add_product
from ..gpu.device.tiles import load as load
from ..gpu.device.tiles import outer as outer
from ..gpu.device.tiles import store as store
from ..gpu.device.tiles import times as times
from ..gpu.device.tiles import zeros as zeros

WORKSPACE_ROWS = 16  # rows of a head in the workspace are a multiple of these
EVEN_ROWS = 16  # see `known_even`


class ProgramTile(NamedTuple):
    """The work tile of one program."""

    tile_row: Any  # of the block mask
    slot: Any  # index among the programs of its head
    first: Any  # first row
    end: Any  # end of rows
    h: Any  # head
    b: Any  # batch row


class RowCoords(NamedTuple):
    """The coordinates of the rows that a program keeps: queries, or keys."""

    b: Any  # global batch row
    h: Any  # global query head
    idx: Any  # global positions, along the rows of a tile of pairs
    batch: Any  # batch row in the tensors
    first: Any  # first row


class KeyPointers(NamedTuple):
    """Pointers to the first row of k and v of one head, strides, and transposed copies."""

    k: Any
    v: Any
    k_strides: Any
    v_strides: Any
    transposed: Any


class Pairs(NamedTuple):
    """The global coordinates of a tile of pairs; `q_idx` and `kv_idx` broadcast to its shape."""

    b: Any
    h: Any
    q_idx: Any
    kv_idx: Any


class ModArguments(NamedTuple):
    """The arguments of the score, the mask and dropout."""

    scale: Any
    coords: Any
    dropout: Any  # `Dropout`, or None
    score: Any  # captured values: (tensors, numbers), for `with_tile_origin`
    mask: Any  # captured values: (tensors, numbers)
    grads: Any  # gradients of the tensors that the score captures, or None


class Dropout(NamedTuple):
    """The arguments of dropout: a pair whose 15 bits are below `threshold` is dropped."""

    seed: Any  # pointer
    threshold: Any
    factor: Any  # of the pairs that are kept


# -- loads and products ---------------------------------------------------------------------------


@triton.jit
def head(base, strides, b, h):
    """Return a pointer to the first row of a head.

    The strides of batch and head, which depend on the length, are passed divided by 8 and
    `unspecialized`. So the compiler knows that 8 divides them and nothing else, and loads are 16
    bytes wide and pipelined (`launch._aligned_rows`).
    """
    return base + (b * (strides[0] >> 2) + h * (strides[1] >> 2)) * 8


@triton.jit
def row(base, strides, b, h, first):
    """Return a pointer to row `first` of a head."""
    return head(base, strides, b, h) + tl.cast(first, tl.int64) * strides[2]


@triton.jit
def workspace_row(head, q_len):
    """Return the row of the workspace where a head begins (`plan.Plan.workspace`).

    A head has a multiple of `WORKSPACE_ROWS`. So the compiler knows, at any length, that numbers of
    neighbouring rows may be read 16 bytes at a time.
    """
    return head * ((q_len + (_WORKSPACE_ROWS - 1)) // _WORKSPACE_ROWS * _WORKSPACE_ROWS)


@triton.jit
def load_vector(pointers, live, other):
    """Load one number per row. `live` None: all rows exist."""
    if live is None:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=live, other=other)


@triton.jit
def transposed_heads(transposed, b, h):
    """Return a pointer to a head in each of two transposed copies (`launch.transposed`), with
    strides."""
    first, second = transposed
    return (
        (head(first[0], first[1], b, h), first[1]),
        (head(second[0], second[1], b, h), second[1]),
    )


@triton.jit
def right_factor(x, transposed, WHICH: tl.constexpr, n, rows, live, WIDTH: tl.constexpr):
    """Load the right factor of `outer`, rows n + `rows` of a transposed copy.

    Without a copy, return x, the same rows of the matrix.
    """
    if transposed is None:
        return x
    else:
        base, strides = transposed[WHICH]
        return load(base + n, rows, strides[2], live, WIDTH, strides[3])


@triton.jit
def sums(x, dx):
    """Return rowsum(x∘dx) over the pieces, in float32."""
    total = preprocess.sums(x[0], dx[0])
    if len(x) == 2:
        total += preprocess.sums(x[1], dx[1])
    return total


# -- work tiles -----------------------------------------------------------------------------------


@triton.jit
def known_even(length, EVEN: tl.constexpr):
    """Return a number of rows; if EVEN, the compiler knows that it is a multiple of `EVEN_ROWS`.

    The predicate of a row is then the same for so many neighbours and takes one register instead
    of 16. At width 128 on sm_90 `backward_kv` spills 20 bytes outside of its loops, and 140
    without this.
    """
    if EVEN:
        return length // _EVEN_ROWS * _EVEN_ROWS
    else:
        return length


@triton.jit
def map_work_tile(schedule, heads, SUB: tl.constexpr, ROWS: tl.constexpr):
    """Return the `ProgramTile` of this program: ROWS rows, SUB programs per tile row.

    Programs of a head are neighbours, so that they share its keys in the L2 cache. They start with
    the longest tile row (LPT), so that the last programs are short. Where the block mask differs
    between heads or batch rows, one order holds for all of them.
    """
    pid = tl.program_id(0)
    tile_rows = schedule.tile_rows >> 2
    if schedule.full is None:
        slot = pid % tile_rows
        head_idx = pid // tile_rows
        first = slot * ROWS
        return ProgramTile(slot, slot, first, first + ROWS, head_idx % heads, head_idx // heads)
    else:
        work_tiles = (
            tile_rows * schedule.b * schedule.h * SUB
        )  # of all heads and batch rows of the mask
        tile_idx = pid % work_tiles
        head_idx = pid // work_tiles
        tile_row = tl.load(schedule.order + tile_idx // SUB)
        mask_idx = tile_row // tile_rows
        tile = tile_row % tile_rows
        first = tile * schedule.size + (tile_idx % SUB) * ROWS
        end = tl.minimum(first + ROWS, (tile + 1) * schedule.size)
        # Heads or batch rows that share the mask are numbered by the rest of the program's id.
        if schedule.h == 1:
            h = head_idx % heads
            head_idx = head_idx // heads
        else:
            h = mask_idx % schedule.h
        b = head_idx if schedule.b == 1 else mask_idx // schedule.h
        return ProgramTile(tile_row, tile * SUB + tile_idx % SUB, first, end, h, b)


@triton.jit
def positions(pos, stride, offset, b, index, live, INDEX: tl.constexpr):
    """Return global positions of some rows: loaded from `pos`, or `offset + index`.

    `live` None: all rows exist.
    """
    if pos is None:
        return tl.cast(offset, INDEX) + index
    else:
        pointers = pos + tl.cast(b, tl.int64) * stride + index
        return load_vector(pointers, live, 0).to(INDEX)


@triton.jit
def row_coords(coords, b, h, idx, first, INDEX: tl.constexpr):
    """Return the `RowCoords` of rows with global positions `idx`."""
    return RowCoords(
        tl.cast(coords.b, INDEX) + b, tl.cast(coords.h, INDEX) + h, idx[:, None], b, first
    )


@triton.jit
def with_tile_origin(captured, coords, q_index, kv_index):
    """Return the captured values of a score and, if positions are consecutive, the first positions
    of its tile."""
    if coords.q_pos is None and coords.kv_pos is None:
        return captured[0], captured[1], (coords.q + q_index, coords.kv + kv_index)
    else:
        return captured


# -- dropout --------------------------------------------------------------------------------------


@triton.jit
def dropout_keep(dropout, pairs):
    """Return the pairs that survive (`headway.dropout`); each makes a call of its own."""
    q_idx, kv_idx = pairs.q_idx.to(tl.int32), pairs.kv_idx.to(tl.int32)
    i, j = tl.broadcast(q_idx & ~8, kv_idx & ~9)
    h = i * 0 + tl.cast(pairs.h, tl.int32)
    b = i * 0 + tl.cast(pairs.b, tl.int32)
    words = tl.philox(tl.load(dropout.seed), i, j, h, b, _ROUNDS)
    is_left = (kv_idx & 8) == 0
    upper_rows, lower_rows = (
        tl.where(is_left, words[0], words[1]), tl.where(is_left, words[2], words[3])
    )  # fmt: skip
    word = tl.where((q_idx & 8) == 0, upper_rows, lower_rows).to(tl.uint32)
    return ((word >> ((kv_idx & 1) * 16)) & 0x7FFF).to(tl.int32) >= dropout.threshold


_ROUNDS = tl.constexpr(ROUNDS)
_WORKSPACE_ROWS, _EVEN_ROWS = tl.constexpr(WORKSPACE_ROWS), tl.constexpr(EVEN_ROWS)
