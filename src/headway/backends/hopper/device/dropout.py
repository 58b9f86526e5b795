"""Dropout in registers: which pairs of a 64 x columns accumulator are kept (`headway.dropout`).

A Philox call decides eight pairs. Where queries are rows, one thread has them all, and a word's two
halves are those of one register of two neighbours. Where keys are rows, two threads have four each:
each of the two makes half of the calls, and they exchange bits once for a block.

Where sixteens of queries or keys do not begin at multiples of 16, and above a rate of 31 / 32
(`not CONFIG.in_sixteens`), each pair makes a call of its own.
"""

from typing import Any, NamedTuple

from .gluon_compat import gl, gluon
from .mma import ROWS, acc_layout

ROUNDS = gl.constexpr(7)  # of Philox; those of `headway.dropout`
_WIDE = "{{ .reg .b64 x; mul.wide.u32 x, $2, {}; mov.b64 {{$0, $1}}, x; }}"  # low and high word
MUL_0, MUL_1 = gl.constexpr(_WIDE.format(0xD2511F53)), gl.constexpr(_WIDE.format(0xCD9E8D57))
_W0, _W1 = gl.constexpr(0x9E3779B9 - 2**32), gl.constexpr(0xBB67AE85 - 2**32)
# 15 bits compare as half-precision numbers do, up to infinity: those above are NaN.
INFINITY = 0x7C00
# 1.0 in the halves of $1 whose low 15 bits are at least those of $2, and 0.0 in the others.
ONES = gl.constexpr("{ .reg .b32 x; abs.f16x2 x, $1; set.geu.f16x2.f16x2 $0, x, $2; }")
# Those halves of $3, and what $4 has.
MARK = gl.constexpr(
    "{ .reg .b32 x; abs.f16x2 x, $1; set.geu.u32.f16x2 x, x, $2;"
    " and.b32 x, x, $3; or.b32 $0, x, $4; }"
)
# Two numbers rounded to 16 bits, times those of $3. (A product of two 16-bit numbers, unlike `and`,
# ptxas writes straight to where the next WGMMA reads it: 32 instructions less for a block.)
_ROUND = "{{ .reg .b32 x; cvt.rn.{0}x2.f32 x, $2, $1; mul.{0}x2 $0, x, $3; }}"
ROUND_BFLOAT16, ROUND_FLOAT16 = (gl.constexpr(_ROUND.format(x)) for x in ("bf16", "f16"))


class DropoutArgs(NamedTuple):
    """The arguments of dropout."""

    seed: Any  # int64: a pointer, until `load_seed` has loaded it
    threshold: Any  # below which 15 bits drop their pair, in both halves of an int32; above 0
    factor: Any  # of the pairs that are kept


@gluon.jit
def load_seed(dropout):
    """Return the arguments with the seed itself."""
    return DropoutArgs(gl.load(dropout.seed), dropout.threshold, dropout.factor)


@gluon.jit
def _philox(i, j, h, b, dropout):
    """Return four words. Those of the counter may have any shapes that broadcast: what depends on
    rows or columns alone is computed once for them."""
    k0, k1 = gl.cast(dropout.seed, gl.int32), gl.cast(dropout.seed >> 32, gl.int32)
    c0, c1 = gl.cast(i, gl.int32), gl.cast(j, gl.int32)
    c2, c3 = gl.cast(h, gl.int32), gl.cast(b, gl.int32)
    for _ in gl.static_range(ROUNDS):
        low_0, high_0 = _multiply(c0, MUL_0)
        low_1, high_1 = _multiply(c2, MUL_1)
        c0, c1, c2, c3 = high_1 ^ (c1 ^ k0), low_1, high_0 ^ (c3 ^ k1), low_0
        k0, k1 = gl.cast(k0 + _W0, gl.int32), gl.cast(k1 + _W1, gl.int32)
    return c0, c1, c2, c3


@gluon.jit
def _multiply(x, ASM: gl.constexpr):
    """Return the low and the high word of a product."""
    words: gl.constexpr = (gl.int32, gl.int32)
    return gl.inline_asm_elementwise(ASM, "=r,=r,r", [x], dtype=words, is_pure=True, pack=1)


@gluon.jit
def _ones(word, dropout):
    """Return 1.0 of half precision in the halves of a word that keep their pair, 0.0 in others."""
    args = [word, gl.to_tensor(dropout.threshold)]
    return gl.inline_asm_elementwise(ONES, "=r,r,r", args, dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _mark(word, number, marks, dropout):
    """Set the bits of a number in the halves of marks where a word keeps its pair."""
    args = [word, gl.to_tensor(dropout.threshold), number, marks]
    return gl.inline_asm_elementwise(MARK, "=r,r,r,r,r", args, dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def kept_one_by_one(q_idx, kv_idx, h, b, dropout):
    """Return which pairs are kept, each by a call of its own."""
    words = _philox(q_idx & ~8, kv_idx & ~9, h, b, dropout)
    is_left = (kv_idx & 8) == 0
    upper, lower = gl.where(is_left, words[0], words[1]), gl.where(is_left, words[2], words[3])
    word = gl.where((q_idx & 8) == 0, upper, lower)
    bits = (word >> gl.cast((kv_idx & 1) * 16, gl.int32)) & 0x7FFF
    return bits >= (gl.to_tensor(dropout.threshold) & 0x7FFF)


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
def _bases(count, dims, axis):
    """Return the bases of `count` neighbours along an axis."""
    powers = range(count.bit_length() - 1)
    return [[2**n if a == axis else 0 for a in range(dims)] for n in powers]


# -- queries are rows -----------------------------------------------------------------------------


@gluon.constexpr_function
def _calls_of_queries(columns):
    """Return the layout of calls as (row without bit 3, sixteen of columns, two neighbours of its
    first eight)."""
    return gl.DistributedLinearLayout(
        reg_bases=_bases(columns // 16, dims=3, axis=1),
        lane_bases=[[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[8, 0, 0], [16, 0, 0]], block_bases=[], shape=[ROWS // 2, columns // 16, 4],
    )  # fmt: skip


@gluon.jit
def draw_ones(tile, first_kv, COLUMNS: gl.constexpr):
    """Return which pairs of a block are kept: 1.0 or 0.0 of half precision, in the halves of a word
    for two neighbours. They are laid out as (row without bit 3, sixteen of columns, two neighbours
    of its first eight, bit 3 of the column, of the row).

    - `tile`: a `TileContext`; `first_kv`: the position of the first key.
    """
    calls: gl.constexpr = _calls_of_queries(COLUMNS)
    row = gl.arange(0, ROWS // 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, calls)))
    sixteen = gl.arange(0, COLUMNS // 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, calls)))
    two = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, calls)))
    i = gl.cast(tile.first_q, gl.int32) + ((row >> 3) * 16 + (row & 7))[:, None, None]
    j = (gl.cast(first_kv, gl.int32) + 16 * sixteen)[None, :, None] + (2 * two)[None, None, :]
    words = _philox(i, j, tile.h, tile.b, tile.mods.dropout)
    upper = gl.join(_ones(words[0], tile.mods.dropout), _ones(words[1], tile.mods.dropout))
    lower = gl.join(_ones(words[2], tile.mods.dropout), _ones(words[3], tile.mods.dropout))
    return gl.join(upper, lower)


@gluon.jit
def drop_pairs(ones, x, like):
    """Return float32 numbers x rounded to 16 bits, and 0 where pairs are dropped, in registers as
    pairs (`mma.materialize`). bfloat16 takes 1.0 of half precision for 2^-7, and so has x times
    that. `ones`: from `draw_ones`."""
    ASM: gl.constexpr = ROUND_BFLOAT16 if like.dtype == gl.bfloat16 else ROUND_FLOAT16
    COLUMNS: gl.constexpr = x.shape[1]
    halves = gl.join(gl.cast(ones, gl.int16), gl.cast(ones >> 16, gl.int16))
    halves = gl.reshape(halves, [4, 8, COLUMNS // 16, 4, 2, 2, 2])
    halves = gl.permute(halves, (0, 5, 1, 2, 4, 3, 6))
    factors = gl.convert_layout(
        gl.reshape(halves, [ROWS, COLUMNS]), acc_layout(COLUMNS), assert_trivial=True
    )
    return gl.inline_asm_elementwise(
        ASM, "=r,r,r,r", [x, factors], dtype=like.dtype, is_pure=False, pack=2
    )


# -- keys are rows --------------------------------------------------------------------------------


@gluon.constexpr_function
def _calls_of_keys(columns):
    """Return the layout of calls as (sixteen of columns, one of its first eight, row without bits 3
    and 0). Of the two threads that share calls, one makes those of even columns."""
    return gl.DistributedLinearLayout(
        reg_bases=_bases(columns // 16, dims=3, axis=0),
        lane_bases=[[0, 2, 0], [0, 4, 0], [0, 1, 0], [0, 0, 1], [0, 0, 2]],
        warp_bases=[[0, 0, 4], [0, 0, 8]], block_bases=[], shape=[columns // 16, 8, ROWS // 4],
    )  # fmt: skip


@gluon.constexpr_function
def _pairs_of_keys(columns):
    """Return the layout of an accumulator seen as (sixteen of rows, bit 3 of the row, row, octet of
    columns, column)."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 0, 1], [0, 1, 0, 0, 0], *_bases(columns // 8, dims=5, axis=3)],
        lane_bases=[
            [0, 0, 0, 0, 2], [0, 0, 0, 0, 4], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 0, 4, 0, 0],
        ],
        warp_bases=[[1, 0, 0, 0, 0], [2, 0, 0, 0, 0]], block_bases=[],
        shape=[4, 2, 8, columns // 8, 8],
    )  # fmt: skip


@gluon.jit
def bits_of_keys(b, h, first_q, first_kv, dropout, COLUMNS: gl.constexpr):
    """Return which pairs of a block of 64 queries are kept: a number for each sixteen of rows, row
    of its first eight and column of an octet. Bit 2 n is that of octet n, and the next one that of
    the row below by 8.

    - `first_q`, `first_kv`: positions of the first query and key.
    """
    calls: gl.constexpr = _calls_of_keys(COLUMNS)
    sixteen = gl.arange(0, COLUMNS // 16, layout=gl.SliceLayout(1, gl.SliceLayout(2, calls)))
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, calls)))
    row = gl.arange(0, ROWS // 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, calls)))
    i = (gl.cast(first_q, gl.int32) + 16 * sixteen)[:, None, None] + column[None, :, None]
    j = gl.cast(first_kv, gl.int32) + ((row >> 2) * 16 + (row & 3) * 2)[None, None, :]
    # Here: in registers of the whole loop the seed takes 59 more accesses to spilled ones.
    words = _philox(i, j, h, b, load_seed(dropout))
    bit = _bit(4 * sixteen)[:, None, None] * 0x10001
    bits = bit * 0
    for n in gl.static_range(4):
        bits = _mark(words[n], bit << n, bits, dropout)
    bits = gl.cast(gl.sum(bits, 0), gl.int32)
    # Exchange: rows of one parity, columns of both.
    bits = gl.reshape(gl.join(bits & 0xFFFF, (bits >> 16) & 0xFFFF), [8, ROWS // 16, 8])
    pairs: gl.constexpr = _pairs_of_keys(COLUMNS)
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, pairs))
    return gl.convert_layout(gl.permute(bits, (1, 2, 0)), layout)


@gluon.jit
def kept_of_keys(bits, COLUMNS: gl.constexpr):
    """Return which pairs of a block are kept. `bits`: from `bits_of_keys`."""
    pairs: gl.constexpr = _pairs_of_keys(COLUMNS)
    over: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(4, pairs)))
    # Opaque: or LLVM would keep the results of all pairs from one use to the next.
    bits = gl.inline_asm_elementwise("", "=r,0", [bits], dtype=gl.int32, is_pure=False, pack=1)
    octet = gl.arange(0, COLUMNS // 8, layout=gl.SliceLayout(0, over))
    below = gl.arange(0, 2, layout=gl.SliceLayout(1, over))
    n = 2 * octet[None, :] + below[:, None]
    kept = (bits[:, None, :, None, :] & _bit(n)[None, :, None, :, None]) != 0
    return gl.convert_layout(
        gl.reshape(kept, [ROWS, COLUMNS]), acc_layout(COLUMNS), assert_trivial=True
    )
