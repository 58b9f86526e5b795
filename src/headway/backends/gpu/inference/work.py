"""Stream-K over ragged rows: every CTA gets the same number of key blocks.

The rows of a tile are the (query, head of the group) pairs of one key head and one row of the
batch. A **unit** is such a tile with all its key blocks. The blocks of all units, one unit after
the other, are cut into as many equal shares as there are CTAs (Osama et al. 2023, Stream-K,
arXiv 2301.03598). Only the device knows how many blocks there are: every CTA counts them, and finds
its share, from `lengths`, `cu_q` and the key limits of the mask. So the grid depends on the GPU
alone, and a captured launch is right for any lengths.

The count need not be exact. A unit's share of the blocks follows from the first and last query of
its row. The tile itself uses the limits of all of its rows, in proportion.
"""

from typing import Any, NamedTuple

import triton.language as tl

import triton

ROWS_AT_ONCE = tl.constexpr(128)  # of the batch, whose blocks are counted together


class DecodeSizes(NamedTuple):
    """Lengths and strides of a decode call, `unspecialized` on their way to the kernel.

    Strides of q are in units of `DecodeConfig.q_unit` elements, those of k and v in units of
    `DecodeConfig.kv_unit` elements.
    """

    b: Any  # rows of the batch
    q_len: Any  # queries of a row, or of all rows if they are packed
    kv_len: Any  # the capacity of a row
    pages: Any  # pages in memory
    table_stride: Any  # between rows of the page table
    q_b: Any
    q_h: Any
    q_row: Any
    k_b: Any  # between batch rows, or pages
    k_h: Any
    v_b: Any
    v_h: Any
    k_scale_b: Any
    k_scale_h: Any
    v_scale_b: Any
    v_scale_h: Any
    list_tiles: Any  # tiles of a key head in the lists of key blocks (`block_lists.py`)
    list_width: Any  # entries of such a list


class CachePointers(NamedTuple):
    """The pointers of `types.KV` and of `block_lists.KeyBlockLists`; each may be None."""

    lengths: Any
    page_table: Any
    cu_q: Any
    k_scale: Any
    v_scale: Any
    blocks: Any
    counts: Any
    max_counts: Any


class Offsets(NamedTuple):
    """The offsets of a call's batch rows, heads, queries and keys: the integers of `Coords`."""

    b: Any
    h: Any
    q: Any
    kv: Any


class BatchRow(NamedTuple):
    """A row of the batch, or several."""

    kv_len: Any
    first_query: Any  # among those of all rows
    q_len: Any
    first_position: Any  # of its first query
    units: Any
    blocks: Any  # of each unit, at least 1


@triton.jit
def decode_ints(encoded):
    """Return a tuple with its `unspecialized` integers decoded; pointers stay."""
    decoded = ()
    for n in tl.static_range(len(encoded)):
        if encoded[n].dtype.is_int():
            decoded = decoded + (encoded[n] >> 2,)  # noqa: RUF005
        else:
            decoded = decoded + (encoded[n],)  # noqa: RUF005
    return decoded


@triton.jit
def row_of(n, sizes, cache, offsets, mask_values, CONFIG: tl.constexpr):
    """Return the n-th `BatchRow`. If queries are packed, one more row has those of no row."""
    if cache.lengths is None:
        kv_len = n * 0 + sizes.kv_len
    else:
        kv_len = tl.load(cache.lengths + n, mask=n < sizes.b, other=0).to(tl.int32)
        kv_len = tl.minimum(tl.maximum(kv_len, 0), sizes.kv_len)
    if cache.cu_q is None:
        first_query = n * 0
        q_len = tl.where(n < sizes.b, sizes.q_len, 0)
    else:
        first_query = tl.load(cache.cu_q + n, mask=n <= sizes.b, other=sizes.q_len).to(tl.int32)
        end = tl.load(cache.cu_q + n + 1, mask=n < sizes.b, other=sizes.q_len).to(tl.int32)
        first_query = tl.minimum(tl.maximum(first_query, 0), sizes.q_len)
        q_len = tl.minimum(tl.maximum(end - first_query, 0), sizes.q_len - first_query)
    first_position = kv_len - q_len if cache.lengths is not None else n * 0 + offsets.q
    first_key, end_key = kv_len * 0, kv_len
    if CONFIG.limits is not None:
        b, h = tl.cast(offsets.b + n, CONFIG.index), tl.cast(offsets.h + n * 0, CONFIG.index)
        q_idx = tl.cast(first_position, CONFIG.index)
        of_first = CONFIG.limits(b, h, q_idx, mask_values)
        of_last = CONFIG.limits(b, h, q_idx + tl.maximum(q_len - 1, 0), mask_values)
        first_key, end_key = clamp_keys(
            tl.minimum(of_first[0], of_last[0]), tl.maximum(of_first[1], of_last[1]),
            kv_len, cache, offsets,
        )  # fmt: skip
    N: tl.constexpr = CONFIG.block_keys
    if cache.max_counts is not None:
        blocks = tl.maximum(tl.load(cache.max_counts + n, mask=n < sizes.b, other=0), 1)
    else:
        blocks = tl.maximum((end_key + (N - 1)) // N - first_key // N, 1)
    M: tl.constexpr = CONFIG.tile_rows
    units = (q_len * CONFIG.group + (M - 1)) // M * CONFIG.kv_heads
    return BatchRow(kv_len, first_query, q_len, first_position, units, blocks)


@triton.jit
def clamp_keys(first_position, last_position, kv_len, cache, offsets):
    """Return the first key of a row between two positions, and the end of its keys there, which is
    at least the first."""
    shift = offsets.kv if cache.lengths is None else 0
    end = tl.minimum(tl.maximum(last_position + 1 - shift, 0), kv_len)
    first = tl.minimum(tl.maximum(first_position - shift, 0), end)
    return first.to(tl.int32), end.to(tl.int32)


@triton.jit
def count_rows(sizes, cache):
    """Return the number of rows, with the one for queries of no row."""
    return sizes.b if cache.cu_q is None else sizes.b + 1


@triton.jit
def count_blocks(sizes, cache, offsets, mask_values, CONFIG: tl.constexpr):
    """Return the number of blocks of all units."""
    total = tl.full([], 0, tl.int64)
    for n in tl.range(0, count_rows(sizes, cache), ROWS_AT_ONCE):
        row = row_of(n + tl.arange(0, ROWS_AT_ONCE), sizes, cache, offsets, mask_values, CONFIG)
        total += tl.sum(row.units.to(tl.int64) * row.blocks, 0)
    return total


@triton.jit
def find_row(block, sizes, cache, offsets, mask_values, CONFIG: tl.constexpr):
    """Return the row that has a block, and the row's first block."""
    before = tl.full([], 0, tl.int64)
    first_block = tl.full([], 0, tl.int64)
    row_number = tl.full([], 0, tl.int32)
    for n in tl.range(0, count_rows(sizes, cache), ROWS_AT_ONCE):
        row = row_of(n + tl.arange(0, ROWS_AT_ONCE), sizes, cache, offsets, mask_values, CONFIG)
        ends = before + tl.cumsum(row.units.to(tl.int64) * row.blocks, 0)
        passed = ends <= block
        row_number += tl.sum(passed.to(tl.int32), 0)
        first_block = tl.maximum(first_block, tl.max(tl.where(passed, ends, 0), 0))
        before = tl.max(ends, 0)
    return row_number, first_block
