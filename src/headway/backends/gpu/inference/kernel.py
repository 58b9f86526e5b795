"""The kernel: online softmax of the queries of a group over the keys of one row of the batch.

(Dao et al. 2022, arXiv 2205.14135; split over keys as in Dao et al. 2023, Flash-Decoding.)

All heads of a group read the same keys, so their queries are the rows of one tile: keys are read
once, whatever the group. What the keys are is read on the device: lengths, pages, key limits. A
CTA has an equal share of all key blocks (`work.py`), which is one unit, or the end of one, some
whole ones and the beginning of another (`merge.py`).
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
from .merge import merged, put
from .work import Coords, Sizes, all_blocks, find, inside, plain, row_of


@dataclass(frozen=True)
class How:
    """What the kernel is compiled for."""

    score: Any  # the generated function; None: T is S
    mask: Any  # None: every pair is kept
    limits: Any  # None: the mask limits no keys
    index: Any  # the type of positions
    precision: Any  # of products of float32
    positive: Any  # scale > 0
    track_max: Any  # whether the largest S is kept beside the largest T
    m: Any  # rows of a tile
    n: Any  # keys of a block
    group: Any  # query heads of a key head
    hk: Any  # key heads
    d: Any  # `tiles.Width`
    dv: Any
    page: Any  # keys of a page; 0: there are no pages
    q_unit: Any  # numbers that divide q's strides
    unit: Any  # numbers that divide the strides of k and v
    k_row: Any  # strides of rows
    v_row: Any
    shared: Any  # whether v is the first piece of k
    decode: Any  # whether k and v are e4m3 numbers as bytes, which the GPU cannot convert
    least: Any  # blocks that a CTA has at least, if there are as many
    merge: Any  # partial results that are added at once


class Pointers(NamedTuple):
    """Matrices, and what is written per query."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    row_max: Any  # None: not asked for
    top: Any  # the largest S; None: not asked for
    sink: Any  # None: there is none


class Mods(NamedTuple):
    """Captured values: tensors, and numbers."""

    score: Any
    mask: Any


class Tile(NamedTuple):
    """The rows of a tile."""

    i: Any  # number in the tile
    live: Any
    row: Any  # of the batch
    head: Any  # of keys
    query: Any  # number in its row, or among all that are packed
    place: Any  # of the query among those of all heads and rows, as out has them
    h: Any  # head of queries, in this tensor
    b_idx: Any  # global coordinates
    h_idx: Any
    q_idx: Any


@triton.jit
def infer(
    pointers, cache, partials, counters, scale, integers,
    score_tensors, mask_tensors, score_ints, mask_ints, score_floats, mask_floats,
    HOW: tl.constexpr, FIRST_COUNTER: tl.constexpr,
):  # fmt: skip
    """out and lse of all queries; `row_max` and `top` if they are there.

    - `partials`: memory for two partial results of every CTA; `counters`: int32 zeros, one for
      every CTA, from `FIRST_COUNTER` on. They are left at 0.
    - `integers`: the fields of `Sizes`, then b, h, q and kv of `Coords`. All integers are
      `unspecialized` (`work.plain`).
    """
    x = plain(integers)
    sizes = Sizes(
        x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], x[12], x[13],
        x[14], x[15], x[16], x[17],
    )  # fmt: skip
    coords = Coords(x[18], x[19], x[20], x[21])
    mods = Mods(
        (plain(score_tensors), plain(score_ints) + score_floats),
        (plain(mask_tensors), plain(mask_ints) + mask_floats),
    )
    pid = tl.program_id(0)
    total = all_blocks(sizes, cache, coords, mods.mask, HOW)
    ctas = tl.num_programs(0)
    share = tl.maximum((total + (ctas - 1)) // ctas, HOW.least)
    at = pid * share
    end = tl.minimum(at + share, total)
    while at < end:
        n, first = find(at, sizes, cache, coords, mods.mask, HOW)
        row = row_of(n, sizes, cache, coords, mods.mask, HOW)
        unit = ((at - first) // row.blocks).to(tl.int32)
        begin = first + unit.to(tl.int64) * row.blocks
        stop = tl.minimum(begin + row.blocks, end)
        tile = tile_of(n, unit, row, sizes, cache, coords, HOW)
        state = attend(
            pointers, cache, scale, sizes, coords, mods, tile, row, unit,
            (at - begin).to(tl.int32), (stop - begin).to(tl.int32), HOW,
        )  # fmt: skip
        complete = (at == begin) & (stop == begin + row.blocks)
        if not complete:
            put(partials, 2 * pid + (at == begin).to(tl.int32), state, tile.i, tile.live, HOW)
            # All threads have written, then one of them says so; who reads that number reads what
            # was written before it.
            tl.debug_barrier()
            of_first = (begin // share).to(tl.int32)
            others = ((begin + row.blocks - 1) // share).to(tl.int32) - of_first
            counter = counters + FIRST_COUNTER + of_first
            came = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            complete = came == others
            if complete:
                tl.store(counter, 0)
                state = merged(partials, of_first, others + 1, tile.i, tile.live, HOW)
        if complete:
            finish(pointers, cache, sizes, tile, state, HOW)
        at = stop


@triton.jit
def tile_of(n, unit, row, sizes, cache, coords, HOW: tl.constexpr):
    """The `Tile` of a unit of a row: neighbouring units share keys."""
    tiles_of_head = row.units // HOW.hk
    head, tile = unit // tiles_of_head, unit % tiles_of_head
    i = tl.arange(0, HOW.m)
    at = tile * HOW.m + i
    query, h = at // HOW.group, head * HOW.group + at % HOW.group
    of_batch = tl.cast(n, tl.int64) * 0 if cache.cu_q is not None else tl.cast(n, tl.int64)
    place = (of_batch * (HOW.hk * HOW.group) + h) * sizes.q_len + (row.start + query)
    return Tile(
        i, query < row.q_len, n, head, row.start + query, place, h,
        tl.cast(coords.b + n, HOW.index), tl.cast(coords.h + h, HOW.index),
        tl.cast(row.past + query, HOW.index),
    )  # fmt: skip


@triton.jit
def attend(
    pointers, cache, scale, sizes, coords, mods, tile, row, number, begin, end, HOW: tl.constexpr
):  # fmt: skip
    """The `Softmax` of a tile, of the row's unit `number`, over a part of its keys: that from the
    `begin`-th to the `end`-th of `row.blocks` equal parts."""
    first, stop = 0, row.length
    if HOW.limits is not None:
        firsts, lasts = HOW.limits(tile.b_idx, tile.h_idx, tile.q_idx, mods.mask)
        far: tl.constexpr = 1 << 40
        firsts, lasts = tl.where(tile.live, firsts, far), tl.where(tile.live, lasts, -far)
        first, stop = inside(tl.min(firsts, 0), tl.max(lasts, 0), row.length, cache, coords)
    low, blocks = first // HOW.n, (stop + (HOW.n - 1)) // HOW.n - first // HOW.n
    if cache.blocks is not None:
        # (More queries than `max_q` says are clamped, as all that the host cannot see.)
        of_head = tl.minimum(number % (row.units // HOW.hk), sizes.list_tiles - 1)
        of_list = (tl.cast(tile.row, tl.int64) * HOW.hk + tile.head) * sizes.list_tiles + of_head
        low, blocks = 0, tl.load(cache.counts + of_list, mask=tile.row < sizes.b, other=0)
    blocks = blocks.to(tl.int64)
    from_block = low + (blocks * begin // row.blocks).to(tl.int32)
    to_block = low + (blocks * end // row.blocks).to(tl.int32)

    of_batch = tl.cast(0, tl.int64) if cache.cu_q is not None else tl.cast(tile.row, tl.int64)
    at = of_batch * sizes.q_b + tile.h.to(tl.int64) * sizes.q_h
    at += tile.query.to(tl.int64) * sizes.q_row
    Q_UNIT: tl.constexpr = HOW.q_unit
    UNIT: tl.constexpr = HOW.unit
    D: tl.constexpr = HOW.d
    DV: tl.constexpr = HOW.dv
    M: tl.constexpr = HOW.m
    PRECISION: tl.constexpr = HOW.precision
    q_tile = tiles.load(pointers.q, at, Q_UNIT, tile.live, D)
    if cache.k_scale is not None:
        of_k = tile.row * sizes.k_scale_b + tile.head * sizes.k_scale_h
        scale = scale * tl.load(cache.k_scale + of_k, mask=tile.row < sizes.b, other=0.0)
    shift = coords.kv if cache.lengths is None else 0

    state = empty_softmax(M, DV)
    for at_block in tl.range(from_block, to_block):
        block = at_block
        if cache.blocks is not None:
            block = tl.load(cache.blocks + of_list * sizes.list_width + at_block)
        j = block * HOW.n + tl.arange(0, HOW.n)
        k_at, v_at, of_key, live = keys_of(pointers, cache, sizes, tile, block, j, stop, HOW)
        k_tile = in_dtype(
            tiles.load(k_at, of_key[0], UNIT, live, D), q_tile[0].dtype, HOW
        )  # fmt: skip
        s = tiles.outer(q_tile, k_tile, PRECISION)
        kv_idx = tl.cast(shift + j, HOW.index)[None, :]
        if HOW.score is None and HOW.positive and cache.k_scale is None:
            # T is S, and a scale above 0 does not change which is largest.
            t, unit = s, scale * LOG2E
        else:
            s = s * scale
            t, unit = s, LOG2E
            if HOW.score is not None:
                t = HOW.score(
                    s, tile.b_idx, tile.h_idx[:, None], tile.q_idx[:, None], kv_idx, mods.score
                )
        if HOW.mask is not None:
            kept = HOW.mask(tile.b_idx, tile.h_idx[:, None], tile.q_idx[:, None], kv_idx, mods.mask)
            t = tl.where(kept, t, float("-inf"))
        t = tl.where(live[None, :], t, float("-inf"))
        p, rescale, state = update_softmax(state, t, unit, s, HOW.track_max)
        if HOW.shared:
            v_tile = (k_tile[0],)
        else:
            v_tile = in_dtype(
                tiles.load(v_at, of_key[1], UNIT, live, DV), q_tile[0].dtype, HOW
            )  # fmt: skip
        acc = tiles.add_product(tiles.times(state.acc, rescale[:, None]), p, v_tile, PRECISION)
        state = Softmax(acc, state.m, state.l, state.largest)
    return state


@triton.jit
def keys_of(pointers, cache, sizes, tile, block, j, stop, HOW: tl.constexpr):
    """Where a block of keys lies: pointers to k and v, the offsets of both for every key j, in
    units, and which keys there are. A key on a page that does not exist is none."""
    K_ROW: tl.constexpr = HOW.k_row // HOW.unit
    V_ROW: tl.constexpr = HOW.v_row // HOW.unit
    live = j < stop
    head = tile.head.to(tl.int64)
    k_at, v_at = pointers.k + head * sizes.k_h * HOW.unit, pointers.v + head * sizes.v_h * HOW.unit
    if HOW.page == 0:
        of_batch, first = tl.cast(tile.row, tl.int64), tl.cast(block * HOW.n, tl.int64)
        k_at += (of_batch * sizes.k_b + first * K_ROW) * HOW.unit
        v_at += (of_batch * sizes.v_b + first * V_ROW) * HOW.unit
        n = tl.arange(0, HOW.n)
        return k_at, v_at, (n * K_ROW, n * V_ROW), live
    else:
        table = cache.page_table + tl.cast(tile.row, tl.int64) * sizes.table
        if HOW.page % HOW.n == 0:  # a block lies on one page
            first = block * HOW.n
            page = tl.load(table + first // HOW.page).to(tl.int64)
            live = live & (page >= 0) & (page < sizes.pages)
            page = tl.minimum(tl.maximum(page, 0), sizes.pages - 1)
            on_page = tl.cast(first % HOW.page, tl.int64)
            k_at += (page * sizes.k_b + on_page * K_ROW) * HOW.unit
            v_at += (page * sizes.v_b + on_page * V_ROW) * HOW.unit
            n = tl.arange(0, HOW.n)
            return k_at, v_at, (n * K_ROW, n * V_ROW), live
        else:
            page = tl.load(table + j // HOW.page, mask=live, other=0).to(tl.int64)
            live = live & (page >= 0) & (page < sizes.pages)
            on_page = j % HOW.page
            of_k = page * sizes.k_b + on_page * K_ROW
            of_v = page * sizes.v_b + on_page * V_ROW
            return k_at, v_at, (of_k, of_v), live


@triton.jit
def in_dtype(x, dtype: tl.constexpr, HOW: tl.constexpr):
    """A tile of the cache in q's dtype."""
    if len(x) == 1:
        return (_in_dtype(x[0], dtype, HOW),)
    else:
        return (_in_dtype(x[0], dtype, HOW), _in_dtype(x[1], dtype, HOW))


@triton.jit
def _in_dtype(x, dtype: tl.constexpr, HOW: tl.constexpr):
    if HOW.decode:
        # An e4m3 number has the bits of a float16 with a shorter fraction, 2^-8 of it in value; but
        # for NaN, all ones.
        bits = x.to(tl.uint16)
        size = (bits & 0x7F) << 7
        value = (size | ((bits & 0x80) << 8)).to(tl.float16, bitcast=True) * 256.0
        return tl.where(size == 0x3F80, float("nan"), value).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def finish(pointers, cache, sizes, tile, state, HOW: tl.constexpr):
    """Write the results of a tile."""
    DV: tl.constexpr = HOW.dv
    if pointers.row_max is not None:
        tl.store(pointers.row_max + tile.place, or_nan(state.m * LN2, state.l), mask=tile.live)
    if pointers.top is not None:
        largest = state.largest if HOW.track_max else state.m * LN2  # where not kept, S is T
        tl.store(pointers.top + tile.place, or_nan(largest, state.l), mask=tile.live)
    if pointers.sink is not None:
        state = with_sink(state, tl.load(pointers.sink + tile.h))
    tl.store(pointers.lse + tile.place, log_sum_exp(state.m, state.l), mask=tile.live)
    by = reciprocal(state.l)
    if cache.v_scale is not None:
        of_v = tile.row * sizes.v_scale_b + tile.head * sizes.v_scale_h
        by = by * tl.load(cache.v_scale + of_v, mask=tile.row < sizes.b, other=0.0)
    tiles.store(pointers.out, tile.place, tile.live, tiles.times(state.acc, by[:, None]), DV)
