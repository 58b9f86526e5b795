"""The kernel: online softmax of the queries of a group over the keys of one row of the batch.

(Dao et al. 2022, arXiv 2205.14135; split over keys as in Dao et al. 2023, Flash-Decoding.)

All heads of a group read the same keys, so their queries are the rows of one tile: keys are read
once, whatever the group. The device reads which keys there are: lengths, pages, key limits. A CTA
has an equal share of all key blocks (`work.py`). That is part of one unit, or the end of one unit,
some complete ones and the beginning of another (`merge.py`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton.language as tl

import triton

from ..device import tiles
from ..device.softmax import (
    LN2,
    LOG2E,
    Softmax,
    empty_softmax,
    log_sum_exp,
    or_nan,
    reciprocal,
    update_softmax,
    with_sink,
)
from .merge import merge_partials, write_partial
from .work import (
    DecodeSizes,
    Offsets,
    clamp_keys,
    count_blocks,
    count_rows,
    decode_ints,
    find_row,
    row_of,
)


@dataclass(frozen=True)
class DecodeConfig:
    """The constants that the kernel is compiled for."""

    score: Any  # the generated function; None: T is S
    mask: Any  # None: no pair is masked out
    limits: Any  # of keys, by the mask; None: it limits none, or block lists do
    index: Any  # the type of positions
    precision: Any  # of products of float32
    positive_scale: Any  # scale > 0
    track_max: Any  # whether the largest S is kept beside the largest T
    tile_rows: Any
    block_keys: Any
    group: Any  # query heads of a key head
    kv_heads: Any
    d: Any  # `tiles.Width`
    dv: Any
    page_keys: Any  # 0: there are no pages
    q_unit: Any  # elements of a vector load of q; divides its strides
    kv_unit: Any  # the same for k and v
    k_row_stride: Any
    v_row_stride: Any
    v_in_k: Any  # whether v is the first piece of k
    byte_format: Any  # "e4m3" or "e5m2": k and v are such numbers as bytes; else None
    min_blocks: Any  # blocks that a CTA has at least, if there are as many
    merged_at_once: Any  # partial results that are added together


class Pointers(NamedTuple):
    """Pointers to matrices, and to results per query."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    row_max: Any  # None: not asked for
    max_logit: Any  # the largest S; None: not asked for
    sink: Any  # None: there is none


class CapturedValues(NamedTuple):
    """Captured tensors and numbers of the score and of the mask."""

    score: Any
    mask: Any


class QueryTile(NamedTuple):
    """The queries of a tile, a row each."""

    i: Any  # row of the tile
    live: Any
    batch_row: Any
    kv_head: Any
    query: Any  # number in its batch row, or among all that are packed
    out_row: Any  # of the query in out, among those of all heads and batch rows
    h: Any  # query head, in this tensor
    b_idx: Any  # global coordinates
    h_idx: Any
    q_idx: Any


@triton.jit
def infer(
    pointers, cache, partials, counters, scale, encoded_sizes, encoded_offsets,
    score_tensors, mask_tensors, score_ints, mask_ints, score_floats, mask_floats,
    CONFIG: tl.constexpr, FIRST_COUNTER: tl.constexpr,
):  # fmt: skip
    """Write out and lse of all queries; `row_max` and `max_logit` if they are asked for.

    - `partials`: memory for two partial results of every CTA.
    - `counters`: int32 zeros, one for every CTA, from `FIRST_COUNTER` on. They are left at 0.
    - `encoded_sizes`, `encoded_offsets`: `DecodeSizes` and `Offsets`. All integers are
      `unspecialized` (`work.decode_ints`).
    """
    sizes = DecodeSizes(*decode_ints(encoded_sizes))
    offsets = Offsets(*decode_ints(encoded_offsets))
    captured = CapturedValues(
        (decode_ints(score_tensors), decode_ints(score_ints) + score_floats),
        (decode_ints(mask_tensors), decode_ints(mask_ints) + mask_floats),
    )
    pid = tl.program_id(0)
    rows = count_rows(sizes, cache)
    n, row_begin = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)
    if rows == 1:  # it is not searched for, which saves 1 us
        only = row_of(n, sizes, cache, offsets, captured.mask, CONFIG)
        total = only.units.to(tl.int64) * only.blocks
    else:
        total = count_blocks(sizes, cache, offsets, captured.mask, CONFIG)
    ctas = tl.num_programs(0)
    share = tl.maximum((total + (ctas - 1)) // ctas, CONFIG.min_blocks)
    block = pid * share
    share_end = tl.minimum(block + share, total)
    while block < share_end:
        if rows > 1:
            n, row_begin = find_row(block, sizes, cache, offsets, captured.mask, CONFIG)
        row = row_of(n, sizes, cache, offsets, captured.mask, CONFIG)
        unit = ((block - row_begin) // row.blocks).to(tl.int32)
        unit_begin = row_begin + unit.to(tl.int64) * row.blocks
        end = tl.minimum(unit_begin + row.blocks, share_end)
        tile = tile_of(n, unit, row, sizes, cache, offsets, CONFIG)
        state = attend(
            pointers, cache, scale, sizes, offsets, captured, tile, row, unit,
            (block - unit_begin).to(tl.int32), (end - unit_begin).to(tl.int32), CONFIG,
        )  # fmt: skip
        complete = (block == unit_begin) & (end == unit_begin + row.blocks)
        if not complete:
            begins_unit = (block == unit_begin).to(tl.int32)
            write_partial(partials, 2 * pid + begins_unit, state, tile.i, tile.live, CONFIG)
            # All threads have written, then one of them counts it: whoever reads that count reads
            # what was written before it.
            tl.debug_barrier()
            first_cta = (unit_begin // share).to(tl.int32)
            others = ((unit_begin + row.blocks - 1) // share).to(tl.int32) - first_cta
            counter = counters + FIRST_COUNTER + first_cta
            arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            complete = arrived == others
            if complete:
                tl.store(counter, 0)
                state = merge_partials(partials, first_cta, others + 1, tile.i, tile.live, CONFIG)
        if complete:
            finish(pointers, cache, sizes, tile, state, CONFIG)
        block = end


@triton.jit
def tile_of(n, unit, row, sizes, cache, offsets, CONFIG: tl.constexpr):
    """Return the `QueryTile` of a unit of the n-th row: neighbouring units share keys."""
    tiles_of_head = row.units // CONFIG.kv_heads
    kv_head, tile = unit // tiles_of_head, unit % tiles_of_head
    i = tl.arange(0, CONFIG.tile_rows)
    tile_row = tile * CONFIG.tile_rows + i
    query, h = tile_row // CONFIG.group, kv_head * CONFIG.group + tile_row % CONFIG.group
    b = tl.cast(n, tl.int64) * 0 if cache.cu_q is not None else tl.cast(n, tl.int64)
    query_heads = CONFIG.kv_heads * CONFIG.group
    out_row = (b * query_heads + h) * sizes.q_len + (row.first_query + query)
    return QueryTile(
        i, query < row.q_len, n, kv_head, row.first_query + query, out_row, h,
        tl.cast(offsets.b + n, CONFIG.index), tl.cast(offsets.h + h, CONFIG.index),
        tl.cast(row.first_position + query, CONFIG.index),
    )  # fmt: skip


@triton.jit
def attend(
    pointers, cache, scale, sizes, offsets, captured, tile, row, unit, begin, end,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Return the `Softmax` of a tile, the row's `unit`, over part of its keys: from the `begin`-th
    to the `end`-th of `row.blocks` equal parts."""
    N: tl.constexpr = CONFIG.block_keys
    first_key, end_key = 0, row.kv_len
    if CONFIG.limits is not None:
        firsts, lasts = CONFIG.limits(tile.b_idx, tile.h_idx, tile.q_idx, captured.mask)
        FAR: tl.constexpr = 1 << 40
        firsts, lasts = tl.where(tile.live, firsts, FAR), tl.where(tile.live, lasts, -FAR)
        first_key, end_key = clamp_keys(
            tl.min(firsts, 0), tl.max(lasts, 0), row.kv_len, cache, offsets
        )
    first_block, blocks = first_key // N, (end_key + (N - 1)) // N - first_key // N
    if cache.blocks is not None:
        # (More queries than `max_q` are clamped, like all numbers that the host cannot see.)
        tile_of_head = tl.minimum(unit % (row.units // CONFIG.kv_heads), sizes.list_tiles - 1)
        head_of_all = tl.cast(tile.batch_row, tl.int64) * CONFIG.kv_heads + tile.kv_head
        key_list = head_of_all * sizes.list_tiles + tile_of_head
        first_block = 0
        blocks = tl.load(cache.counts + key_list, mask=tile.batch_row < sizes.b, other=0)
    blocks = blocks.to(tl.int64)
    from_block = first_block + (blocks * begin // row.blocks).to(tl.int32)
    to_block = first_block + (blocks * end // row.blocks).to(tl.int32)

    b = tl.cast(0, tl.int64) if cache.cu_q is not None else tl.cast(tile.batch_row, tl.int64)
    q_rows = b * sizes.q_b + tile.h.to(tl.int64) * sizes.q_h
    q_rows += tile.query.to(tl.int64) * sizes.q_row
    Q_UNIT: tl.constexpr = CONFIG.q_unit
    KV_UNIT: tl.constexpr = CONFIG.kv_unit
    D: tl.constexpr = CONFIG.d
    DV: tl.constexpr = CONFIG.dv
    ROWS: tl.constexpr = CONFIG.tile_rows
    PRECISION: tl.constexpr = CONFIG.precision
    q_tile = tiles.load(pointers.q, q_rows, Q_UNIT, tile.live, D)
    if cache.k_scale is not None:
        k_scale_at = tile.batch_row * sizes.k_scale_b + tile.kv_head * sizes.k_scale_h
        in_batch = tile.batch_row < sizes.b
        scale = scale * tl.load(cache.k_scale + k_scale_at, mask=in_batch, other=0.0)
    kv_offset = offsets.kv if cache.lengths is None else 0

    state = empty_softmax(ROWS, DV, False)
    for list_entry in tl.range(from_block, to_block):
        block = list_entry
        if cache.blocks is not None:
            block = tl.load(cache.blocks + key_list * sizes.list_width + list_entry)
        j = block * N + tl.arange(0, N)
        k_base, v_base, kv_rows, live = keys_of(
            pointers, cache, sizes, tile, block, j, end_key, CONFIG
        )
        k_tile = in_dtype(
            tiles.load(k_base, kv_rows[0], KV_UNIT, live, D), q_tile[0].dtype, CONFIG
        )  # fmt: skip
        s = tiles.outer(q_tile, k_tile, PRECISION)
        kv_idx = tl.cast(kv_offset + j, CONFIG.index)[None, :]
        if CONFIG.score is None and CONFIG.positive_scale and cache.k_scale is None:
            # T is S, and a scale above 0 does not change which is largest.
            t, log2_factor = s, scale * LOG2E
        else:
            s = s * scale
            t, log2_factor = s, LOG2E
            if CONFIG.score is not None:
                t = CONFIG.score(
                    s, tile.b_idx, tile.h_idx[:, None], tile.q_idx[:, None], kv_idx, captured.score
                )
        if CONFIG.mask is not None:
            attended = CONFIG.mask(
                tile.b_idx, tile.h_idx[:, None], tile.q_idx[:, None], kv_idx, captured.mask
            )
            t = tl.where(attended, t, float("-inf"))
        t = tl.where(live[None, :], t, float("-inf"))
        p, rescale, state = update_softmax(state, t, log2_factor, s, CONFIG.track_max, ())
        if CONFIG.v_in_k:
            v_tile = (k_tile[0],)
        else:
            v_tile = in_dtype(
                tiles.load(v_base, kv_rows[1], KV_UNIT, live, DV), q_tile[0].dtype, CONFIG
            )  # fmt: skip
        acc = tiles.add_product(tiles.times(state.acc, rescale[:, None]), p, v_tile, PRECISION)
        state = Softmax(acc, state.m, state.l, state.largest, ())
    return state


@triton.jit
def keys_of(pointers, cache, sizes, tile, block, j, end_key, CONFIG: tl.constexpr):
    """Return the addresses of a block of keys: pointers to k and v, the offsets of both for every
    key j, in units, and which keys exist. A key on a page that does not exist is none."""
    K_ROW: tl.constexpr = CONFIG.k_row_stride // CONFIG.kv_unit
    V_ROW: tl.constexpr = CONFIG.v_row_stride // CONFIG.kv_unit
    KV_UNIT: tl.constexpr = CONFIG.kv_unit
    N: tl.constexpr = CONFIG.block_keys
    live = j < end_key
    head = tile.kv_head.to(tl.int64)
    k_base, v_base = (
        pointers.k + head * sizes.k_h * KV_UNIT,
        pointers.v + head * sizes.v_h * KV_UNIT,
    )
    if CONFIG.page_keys == 0:
        b, first_key = tl.cast(tile.batch_row, tl.int64), tl.cast(block * N, tl.int64)
        k_base += (b * sizes.k_b + first_key * K_ROW) * KV_UNIT
        v_base += (b * sizes.v_b + first_key * V_ROW) * KV_UNIT
        n = tl.arange(0, N)
        return k_base, v_base, (n * K_ROW, n * V_ROW), live
    else:
        table = cache.page_table + tl.cast(tile.batch_row, tl.int64) * sizes.table_stride
        if CONFIG.page_keys % N == 0:  # a block lies on one page
            first_key = block * N
            page = tl.load(table + first_key // CONFIG.page_keys).to(tl.int64)
            live = live & (page >= 0) & (page < sizes.pages)
            page = tl.minimum(tl.maximum(page, 0), sizes.pages - 1)
            key_on_page = tl.cast(first_key % CONFIG.page_keys, tl.int64)
            k_base += (page * sizes.k_b + key_on_page * K_ROW) * KV_UNIT
            v_base += (page * sizes.v_b + key_on_page * V_ROW) * KV_UNIT
            n = tl.arange(0, N)
            return k_base, v_base, (n * K_ROW, n * V_ROW), live
        else:
            page = tl.load(table + j // CONFIG.page_keys, mask=live, other=0).to(tl.int64)
            live = live & (page >= 0) & (page < sizes.pages)
            key_on_page = j % CONFIG.page_keys
            k_rows = page * sizes.k_b + key_on_page * K_ROW
            v_rows = page * sizes.v_b + key_on_page * V_ROW
            return k_base, v_base, (k_rows, v_rows), live


@triton.jit
def in_dtype(x, dtype: tl.constexpr, CONFIG: tl.constexpr):
    """Return a tile of the cache in q's dtype."""
    if len(x) == 1:
        return (_in_dtype(x[0], dtype, CONFIG),)
    else:
        return (_in_dtype(x[0], dtype, CONFIG), _in_dtype(x[1], dtype, CONFIG))


@triton.jit
def _in_dtype(x, dtype: tl.constexpr, CONFIG: tl.constexpr):
    if CONFIG.byte_format == "e5m2":  # the upper half of a float16
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(dtype)
    elif CONFIG.byte_format == "e4m3":
        # An e4m3 number has the bits of a float16 with a shorter fraction and 2^-8 of its value.
        # NaN has all bits set.
        bits = x.to(tl.uint16)
        magnitude = (bits & 0x7F) << 7
        value = (magnitude | ((bits & 0x80) << 8)).to(tl.float16, bitcast=True) * 256.0
        return tl.where(magnitude == 0x3F80, float("nan"), value).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def finish(pointers, cache, sizes, tile, state, CONFIG: tl.constexpr):
    """Write the results of a tile."""
    DV: tl.constexpr = CONFIG.dv
    rows = tile.out_row
    if pointers.row_max is not None:
        tl.store(pointers.row_max + rows, or_nan(state.m * LN2, state.l), mask=tile.live)
    if pointers.max_logit is not None:
        largest = state.largest if CONFIG.track_max else state.m * LN2  # if not tracked, S is T
        tl.store(pointers.max_logit + rows, or_nan(largest, state.l), mask=tile.live)
    if pointers.sink is not None:
        state = with_sink(state, tl.load(pointers.sink + tile.h), False)
    tl.store(pointers.lse + rows, log_sum_exp(state.m, state.l), mask=tile.live)
    factor = reciprocal(state.l)
    if cache.v_scale is not None:
        v_scale_at = tile.batch_row * sizes.v_scale_b + tile.kv_head * sizes.v_scale_h
        in_batch = tile.batch_row < sizes.b
        factor = factor * tl.load(cache.v_scale + v_scale_at, mask=in_batch, other=0.0)
    tiles.store(pointers.out, rows, tile.live, tiles.times(state.acc, factor[:, None]), DV)
