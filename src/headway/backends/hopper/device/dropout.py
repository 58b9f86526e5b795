"""Dropout in registers: which pairs of a 64 x columns accumulator are kept (`headway.dropout`).

A Philox call makes the words of four keys and one query, which several threads hold: two threads
two neighbours each where queries are rows, four threads one each where keys are rows. So each
thread makes calls that its neighbours do not, and packs the results into the bits of a number.
Shuffles of these numbers, once for a block, give every thread the bits of its own pairs.

Where fours of keys do not begin at multiples of 4 (`not CONFIG.keys_in_fours`), there are no such
bits, and each pair makes a call of its own.
"""

from typing import Any, NamedTuple

from .gluon_compat import gl, gluon
from .mma import ROWS, acc_layout

ROUNDS = gl.constexpr(7)  # of Philox; those of `headway.dropout`
_WIDE = "{{ .reg .b64 x; mul.wide.u32 x, $2, {}; mov.b64 {{$0, $1}}, x; }}"  # low and high word
MUL_0, MUL_1 = gl.constexpr(_WIDE.format(0xD2511F53)), gl.constexpr(_WIDE.format(0xCD9E8D57))
_W0, _W1 = gl.constexpr(0x9E3779B9 - 2**32), gl.constexpr(0xBB67AE85 - 2**32)


class DropoutArgs(NamedTuple):
    """The arguments of dropout."""

    seed: Any  # int64 pointer
    last_dropped: Any  # the largest word that drops its pair: its bits as int32
    factor: Any  # of the pairs that are kept


@gluon.jit
def _philox(group, i, h, b, dropout):
    """Return for each of four words whether it keeps its pair. The words of the counter may have
    any shapes that broadcast: what depends on rows or columns alone is computed once for them."""
    seed = gl.load(dropout.seed)  # where it is needed: it would take registers of the whole loop
    k0, k1 = gl.cast(seed, gl.int32), gl.cast(seed >> 32, gl.int32)
    c0, c1 = gl.cast(group, gl.int32), gl.cast(i, gl.int32)
    c2, c3 = gl.cast(h, gl.int32), gl.cast(b, gl.int32)
    for _ in gl.static_range(ROUNDS):
        low_0, high_0 = _multiply(c0, MUL_0)
        low_1, high_1 = _multiply(c2, MUL_1)
        c0, c1, c2, c3 = high_1 ^ (c1 ^ k0), low_1, high_0 ^ (c3 ^ k1), low_0
        k0, k1 = gl.cast(k0 + _W0, gl.int32), gl.cast(k1 + _W1, gl.int32)
    last = _unsigned(gl.to_tensor(dropout.last_dropped))
    return _unsigned(c0) > last, _unsigned(c1) > last, _unsigned(c2) > last, _unsigned(c3) > last


@gluon.jit
def _multiply(x, ASM: gl.constexpr):
    """Return the low and the high word of a product."""
    words: gl.constexpr = (gl.int32, gl.int32)
    return gl.inline_asm_elementwise(ASM, "=r,=r,r", [x], dtype=words, is_pure=True, pack=1)


@gluon.jit
def _unsigned(x):
    return gl.cast(x, gl.int64) & 0xFFFFFFFF


@gluon.jit
def kept_one_by_one(q_idx, kv_idx, h, b, dropout):
    """Return which pairs are kept, each by a call of its own."""
    kept = _philox(kv_idx >> 2, q_idx, h, b, dropout)
    word = kv_idx & 3
    left, right = gl.where(word == 0, kept[0], kept[1]), gl.where(word == 2, kept[2], kept[3])
    return gl.where(word < 2, left, right)


@gluon.jit
def drop(kept, x):
    """Return float32 numbers x of the pairs that are kept, and 0 of the others. LLVM cannot see
    where they come from: it would choose after rounding, and take pairs of 16 bits apart for it."""
    x = gl.where(kept, x, 0.0)
    return gl.inline_asm_elementwise("", "=f,0", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _bit(n):
    """Return numbers with bit n alone."""
    return (n * 0 + 1) << n


@gluon.constexpr_function
def _octets(columns, dims, axis):
    """Return the bases of the octets of columns, along an axis."""
    count = (columns // 8).bit_length() - 1
    return [[2**n if a == axis else 0 for a in range(dims)] for n in range(count)]


# -- queries are rows -----------------------------------------------------------------------------


@gluon.constexpr_function
def calls_of_queries(columns):
    """Return the layout of calls as (row, octet of columns, four of its columns). Of the two
    neighbours that share calls, one makes those of a row and one those of the row 8 below."""
    return gl.DistributedLinearLayout(
        reg_bases=_octets(columns, dims=3, axis=1),
        lane_bases=[[8, 0, 0], [0, 0, 1], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]], block_bases=[], shape=[64, columns // 8, 2],
    )  # fmt: skip


@gluon.constexpr_function
def _pairs_of_queries(columns):
    """Return the layout of an accumulator seen as (row, octet of columns, two of its columns,
    column)."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [8, 0, 0, 0], *_octets(columns, dims=4, axis=1)],
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]], block_bases=[],
        shape=[64, columns // 8, 4, 2],
    )  # fmt: skip


@gluon.jit
def bits_of_queries(tile, first_kv, COLUMNS: gl.constexpr, CONFIG: gl.constexpr):
    """Return which pairs of a block are kept: a number for each row and each two columns of an
    octet, with the bits of these columns of all octets.

    - `tile`: a `TileContext`; `first_kv`: the position of the first of `COLUMNS` keys.
    """
    if not CONFIG.keys_in_fours:
        return ()
    else:
        calls: gl.constexpr = calls_of_queries(COLUMNS)
        octet = gl.arange(0, COLUMNS // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, calls)))
        four = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, calls)))
        first_group = gl.cast(first_kv >> 2, gl.int32)
        group = (2 * octet)[None, :, None] + (four + first_group)[None, None, :]
        rows = gl.convert_layout(tile.dropout_rows, gl.SliceLayout(1, gl.SliceLayout(2, calls)))
        kept = _philox(group, rows[:, None, None], tile.h, tile.b, tile.mods.dropout)
        even, odd = _bit(2 * octet)[None, :, None], _bit(2 * octet + 1)[None, :, None]
        left = gl.where(kept[0], even, 0) | gl.where(kept[1], odd, 0)
        right = gl.where(kept[2], even, 0) | gl.where(kept[3], odd, 0)
        bits = gl.reshape(gl.join(gl.sum(left, 1), gl.sum(right, 1)), [ROWS, 4])
        pairs: gl.constexpr = _pairs_of_queries(COLUMNS)
        layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, pairs))
        return gl.convert_layout(gl.cast(bits, gl.int32), layout)


@gluon.jit
def kept_of_queries(bits, tile, q_idx, kv_idx, CONFIG: gl.constexpr):
    """Return which pairs of a block are kept.

    - `bits`: from `bits_of_queries`; `q_idx`, `kv_idx`: positions of rows and columns.
    """
    if not CONFIG.keys_in_fours:
        return kept_one_by_one(q_idx[:, None], kv_idx[None, :], tile.h, tile.b, tile.mods.dropout)
    else:
        COLUMNS: gl.constexpr = kv_idx.shape[0]
        pairs: gl.constexpr = _pairs_of_queries(COLUMNS)
        columns: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, pairs))
        octet = gl.arange(0, COLUMNS // 8, layout=gl.SliceLayout(1, columns))
        column = gl.arange(0, 2, layout=gl.SliceLayout(0, columns))
        bit = _bit((2 * octet)[:, None] + column[None, :])
        kept = (bits[:, None, :, None] & bit[None, :, None, :]) != 0
        return gl.convert_layout(gl.reshape(kept, [ROWS, COLUMNS]), acc_layout(COLUMNS))


# -- keys are rows --------------------------------------------------------------------------------


@gluon.constexpr_function
def calls_of_keys(columns):
    """Return the layout of calls as (four rows, octet of columns, column). Of the four threads that
    share calls, each makes those of another of two columns and of two times four rows."""
    return gl.DistributedLinearLayout(
        reg_bases=_octets(columns, dims=3, axis=1),
        lane_bases=[[0, 0, 2], [0, 0, 4], [2, 0, 0], [0, 0, 1], [1, 0, 0]],
        warp_bases=[[4, 0, 0], [8, 0, 0]], block_bases=[], shape=[16, columns // 8, 8],
    )  # fmt: skip


@gluon.constexpr_function
def _pairs_of_keys(columns):
    """Return the layout of an accumulator seen as (four rows, row, octet of columns, column)."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [2, 0, 0, 0], *_octets(columns, dims=4, axis=2)],
        lane_bases=[[0, 0, 0, 2], [0, 0, 0, 4], [0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0]],
        warp_bases=[[4, 0, 0, 0], [8, 0, 0, 0]], block_bases=[],
        shape=[16, 4, columns // 8, 8],
    )  # fmt: skip


@gluon.jit
def bits_of_keys(b, h, q_idx, first_kv, dropout, COLUMNS: gl.constexpr):
    """Return which pairs of a block of 64 queries are kept: a number for each four rows and each
    column of an octet, with the bits of this column of all octets, for the first row, then for the
    others.

    - `q_idx`: positions of the queries, as (octet, column).
    - `first_kv`: the position of the first key.
    """
    calls: gl.constexpr = calls_of_keys(COLUMNS)
    group = gl.arange(0, ROWS // 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, calls)))
    group += gl.cast(first_kv >> 2, gl.int32)
    octet = gl.arange(0, COLUMNS // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, calls)))
    kept = _philox(group[:, None, None], q_idx[None, :, :], h, b, dropout)
    bits = gl.where(kept[0], _bit(octet)[None, :, None], 0)
    for word in gl.static_range(1, 4):
        bits |= gl.where(kept[word], _bit(octet + word * (COLUMNS // 8))[None, :, None], 0)
    pairs: gl.constexpr = _pairs_of_keys(COLUMNS)
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, pairs))
    bits = gl.convert_layout(gl.cast(gl.sum(bits, 1), gl.int32), layout)
    row = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(2, pairs))))
    return bits[:, None, :] >> (row * (COLUMNS // 8))[None, :, None]


@gluon.jit
def kept_of_keys(bits, COLUMNS: gl.constexpr):
    """Return which pairs of a block are kept. `bits`: from `bits_of_keys`."""
    pairs: gl.constexpr = _pairs_of_keys(COLUMNS)
    over: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, pairs)))
    # Opaque: or LLVM would keep the results of all pairs from one use to the next.
    bits = gl.inline_asm_elementwise("", "=r,0", [bits], dtype=gl.int32, is_pure=False, pack=1)
    bit = _bit(gl.arange(0, COLUMNS // 8, layout=over))
    kept = (bits[:, :, None, :] & bit[None, None, :, None]) != 0
    return gl.convert_layout(gl.reshape(kept, [ROWS, COLUMNS]), acc_layout(COLUMNS))
