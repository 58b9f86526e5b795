"""Stream-K over ragged rows: every CTA gets the same number of key blocks.

The rows of a tile are the (query, head of the group) pairs of one key head and one row of the
batch. A **unit** is such a tile with all its key blocks. The blocks of all units, one unit after
the other, are cut into as many equal shares as there are CTAs (Osama et al. 2023, Stream-K,
arXiv 2301.03598). How many blocks there are, only the device knows: every CTA adds them up, and
finds its share, from `lengths`, `cu_q` and the key limits of the mask. So the grid depends on the
GPU alone, and a captured launch is right for whatever lengths it finds.

Counting need not be exact. A unit's share of the blocks is worked out from its row's first and last
query; the tile itself goes by the limits of all of its rows, in proportion.
"""

from typing import Any, NamedTuple

import triton.language as tl

import triton

ROWS = tl.constexpr(128)  # of the batch, that are looked at at once


class Sizes(NamedTuple):
    """Lengths and strides."""

    b: Any  # rows of the batch
    q_len: Any  # queries of a row, or of all rows if they are packed
    kv_len: Any  # keys that a row has room for
    pages: Any  # pages in memory
    table: Any  # stride of rows of the page table
    # Strides: of q in units of `How.q_unit` numbers, of k and v in units of `How.unit` numbers.
    q_b: Any
    q_h: Any
    q_row: Any
    k_b: Any  # of batch rows, or pages
    k_h: Any
    v_b: Any
    v_h: Any
    k_scale_b: Any
    k_scale_h: Any
    v_scale_b: Any
    v_scale_h: Any
    # Of lists of key blocks (`listed.py`): tiles of a key head, and entries of a list.
    list_tiles: Any
    list_width: Any


class Cache(NamedTuple):
    """The pointers of `types.KV` and of `listed.Listed`; each may be None."""

    lengths: Any
    page_table: Any
    cu_q: Any
    k_scale: Any
    v_scale: Any
    blocks: Any
    counts: Any
    most: Any


class Coords(NamedTuple):
    """The integers of `types.Coords`."""

    b: Any
    h: Any
    q: Any
    kv: Any


class Row(NamedTuple):
    """A row of the batch, or several."""

    length: Any  # keys
    start: Any  # its first query
    q_len: Any
    past: Any  # position of its first query
    units: Any
    blocks: Any  # of each unit, at least 1


@triton.jit
def plain(unspecialized):
    """Integers that were `unspecialized`, in a tuple with pointers."""
    found = ()
    for n in tl.static_range(len(unspecialized)):
        if unspecialized[n].dtype.is_int():
            found = found + (unspecialized[n] >> 2,)  # noqa: RUF005
        else:
            found = found + (unspecialized[n],)  # noqa: RUF005
    return found


@triton.jit
def row_of(n, sizes, cache, coords, of_mask, HOW: tl.constexpr):
    """The `Row` with number n; behind those of the batch, where queries are packed, one of the
    queries that belong to no row."""
    if cache.lengths is None:
        length = n * 0 + sizes.kv_len
    else:
        length = tl.load(cache.lengths + n, mask=n < sizes.b, other=0).to(tl.int32)
        length = tl.minimum(tl.maximum(length, 0), sizes.kv_len)
    if cache.cu_q is None:
        start = n * 0
        q_len = tl.where(n < sizes.b, sizes.q_len, 0)
    else:
        start = tl.load(cache.cu_q + n, mask=n <= sizes.b, other=sizes.q_len).to(tl.int32)
        stop = tl.load(cache.cu_q + n + 1, mask=n < sizes.b, other=sizes.q_len).to(tl.int32)
        start = tl.minimum(tl.maximum(start, 0), sizes.q_len)
        q_len = tl.minimum(tl.maximum(stop - start, 0), sizes.q_len - start)
    past = length - q_len if cache.lengths is not None else n * 0 + coords.q
    first, stop = length * 0, length
    if HOW.limits is not None:
        b, h = tl.cast(coords.b + n, HOW.index), tl.cast(coords.h + n * 0, HOW.index)
        q_idx = tl.cast(past, HOW.index)
        of_first = HOW.limits(b, h, q_idx, of_mask)
        of_last = HOW.limits(b, h, q_idx + tl.maximum(q_len - 1, 0), of_mask)
        first, stop = inside(
            tl.minimum(of_first[0], of_last[0]), tl.maximum(of_first[1], of_last[1]),
            length, cache, coords,
        )  # fmt: skip
    if cache.most is not None:
        blocks = tl.maximum(tl.load(cache.most + n, mask=n < sizes.b, other=0), 1)
    else:
        blocks = tl.maximum((stop + (HOW.n - 1)) // HOW.n - first // HOW.n, 1)
    units = (q_len * HOW.group + (HOW.m - 1)) // HOW.m * HOW.hk
    return Row(length, start, q_len, past, units, blocks)


@triton.jit
def inside(first, last, length, cache, coords):
    """The keys of a row between two positions: the first, and the end; the first is at most the
    end."""
    shift = coords.kv if cache.lengths is None else 0
    stop = tl.minimum(tl.maximum(last + 1 - shift, 0), length)
    first = tl.minimum(tl.maximum(first - shift, 0), stop)
    return first.to(tl.int32), stop.to(tl.int32)


@triton.jit
def rows_of_batch(sizes, cache):
    """Rows, with that of the queries of no row."""
    return sizes.b if cache.cu_q is None else sizes.b + 1


@triton.jit
def all_blocks(sizes, cache, coords, of_mask, HOW: tl.constexpr):
    """The blocks of all units."""
    total = tl.full([], 0, tl.int64)
    for n in tl.range(0, rows_of_batch(sizes, cache), ROWS):
        row = row_of(n + tl.arange(0, ROWS), sizes, cache, coords, of_mask, HOW)
        total += tl.sum(row.units.to(tl.int64) * row.blocks, 0)
    return total


@triton.jit
def find(block, sizes, cache, coords, of_mask, HOW: tl.constexpr):
    """The row that has a block, and the row's first block."""
    before = tl.full([], 0, tl.int64)
    first = tl.full([], 0, tl.int64)
    found = tl.full([], 0, tl.int32)
    for n in tl.range(0, rows_of_batch(sizes, cache), ROWS):
        row = row_of(n + tl.arange(0, ROWS), sizes, cache, coords, of_mask, HOW)
        ends = before + tl.cumsum(row.units.to(tl.int64) * row.blocks, 0)
        passed = ends <= block
        found += tl.sum(passed.to(tl.int32), 0)
        first = tl.maximum(first, tl.max(tl.where(passed, ends, 0), 0))
        before = tl.max(ends, 0)
    return found, first
