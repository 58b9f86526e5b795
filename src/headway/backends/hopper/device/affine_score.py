"""Scores that are affine in S (gpu/codegen/affine.py), on an accumulator of S in registers.

    T = gain S + f(q_idx) + g(kv_idx) + factor |line|

The cost of a score is instructions per pair. A number per row costs none in a softmax. A number per
column is added by the instruction that multiplies by the scale. A multiple of the distance is made
of both. An absolute value takes two instructions.

Where the row maximum of T is needed, as in the forward, the number per column takes an instruction
after all. If it is a straight line (CONFIG.slope_mma), tensor cores add it: a WGMMA of depth 16
follows S = q kᵀ,

    S += a cᵀ,  every row of a: its slope, as the sum of three bfloat16
                every row of c: its index in the tile, three times

which is exact: three times 8 bits are the 24 of a float32, and an index below 256 has 8. What is
left of the line for a row is one number for the block and one for the row. Row maxima are kept
without the latter until the work tile ends.
"""

from typing import Any, NamedTuple

from .gluon_compat import fence_async_shared, gl, gluon, warpgroup_mma
from .mma import LOG2E, ROWS, acc_layout, broadcast_row, lhs_layout

DEPTH = gl.constexpr(16)  # of one WGMMA


class AffineTerms(NamedTuple):
    """An affine score on a tile, as `CONFIG.affine` returns it (`linear` of gpu/codegen/affine.py).
    `column` below counts from the tile's first one."""

    gain: Any  # of S
    row: Any  # the line at the first column, per row or for all rows
    slope: Any  # of the line: what each column adds
    abs_row: Any  # the line whose absolute value is taken, likewise
    abs_slope: Any
    abs_factor: Any  # what that absolute value is multiplied by
    of_q: Any  # what depends on the query beside the lines
    of_kv: Any  # and on the key


@gluon.jit
def affine_scores(
    s, scale, b, h, q_idx, kv_idx, first_row, first_column, score_args,
    SLOPE_IN_S: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Apply an affine score; rows are queries.

    - `first_row`, `first_column`: a position near the rows, and that of the first column.
    - `SLOPE_IN_S`: `wgmma_slope` has added to s what depends on the column.

    **Returns:** t, `scale_log2` (above 0) and `row_log2`: T over log 2 is t scale_log2 + row_log2.
    `row_log2` is a row vector (0 where CONFIG.abs_only). If CONFIG.slope_mma it is one number for
    all rows, and `slope_lhs` returns the rest.
    """
    if CONFIG.slope_mma:
        terms = AffineTerms(
            *CONFIG.affine(b, h, q_idx, kv_idx, first_row, first_column, False, score_args)
        )
        scale_log2 = scale * terms.gain * LOG2E
        t = s
        if not SLOPE_IN_S:
            t = s + _per_column(terms.slope / (scale * terms.gain), s.shape[1])[None, :]
        row_log2 = terms.row * LOG2E
    else:
        terms = AffineTerms(
            *CONFIG.affine(b, h, q_idx, kv_idx, q_idx, first_column, False, score_args)
        )
        scale_log2 = scale * terms.gain * LOG2E
        row_log2 = _zero_rows(s)
        if CONFIG.has_abs:
            line = gl.abs(_per_pair(terms.abs_row, terms.abs_slope, s.shape[1]))
        if CONFIG.abs_only and CONFIG.monotone:
            t = s + line * (terms.abs_factor / (scale * terms.gain))
        elif CONFIG.abs_only:
            t = s * scale_log2 + line * (terms.abs_factor * LOG2E)
            scale_log2 = 1.0
        else:
            col = _per_column(terms.slope * LOG2E, s.shape[1]) + terms.of_kv * LOG2E
            t = s * scale_log2 + col[None, :]
            if CONFIG.has_abs:
                t += line * (terms.abs_factor * LOG2E)
            scale_log2 = 1.0
            row_log2 += (terms.row + terms.of_q) * LOG2E
    return t, scale_log2, row_log2


@gluon.jit
def affine_exponent(
    s, scale, lse_log2, b, h, q_idx, kv_idx, first_column, score_args, CONFIG: gl.constexpr
):  # fmt: skip
    """Apply an affine score; rows are keys. **Returns:** T over log 2, less a column vector: the
    exponent of P.

    - `lse_log2`: that column vector, lse over log 2.
    - `first_column`: the position of the first column.
    """
    terms = AffineTerms(*CONFIG.affine(b, h, q_idx, kv_idx, first_column, kv_idx, True, score_args))
    scale_log2 = scale * terms.gain * LOG2E
    if CONFIG.has_abs:
        line = gl.abs(_per_pair(terms.abs_row, terms.abs_slope, s.shape[1]))
    if CONFIG.abs_only:
        t = s * scale_log2 + (line * (terms.abs_factor * LOG2E) - lse_log2[None, :])
    else:
        col = _per_column(terms.slope * LOG2E, s.shape[1]) - lse_log2 + terms.of_q * LOG2E
        t = s * scale_log2 + col[None, :]
        if CONFIG.has_abs:
            t += line * (terms.abs_factor * LOG2E)
        row_log2 = _zero_rows(s) + (terms.row + terms.of_kv) * LOG2E
        t += row_log2[:, None]
    return t


@gluon.jit
def _zero_rows(s):
    """Return a row vector that adds nothing."""
    return gl.full([s.shape[0]], -0.0, gl.float32, layout=gl.SliceLayout(1, acc_layout(s.shape[1])))


# -- the slope as a WGMMA -------------------------------------------------------------------------


@gluon.jit
def slope_rhs(COLUMNS: gl.constexpr):
    """Return shared memory with c."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    threads: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    n = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, threads))
    k = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, threads))
    smem = gl.allocate_shared_memory(gl.bfloat16, [COLUMNS, DEPTH], layout)
    smem.store(gl.where(k[None, :] < 3, n[:, None], 0).to(gl.bfloat16))
    fence_async_shared()
    return smem


@gluon.jit
def slope_lhs(
    scale, b, h, q_idx, first_row, score_args, COLUMNS: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    """Return a, in the unit of t of `affine_scores`; and what each row adds beside `first_row`,
    over log 2."""
    terms = AffineTerms(*CONFIG.affine(b, h, q_idx, q_idx, q_idx, 0, False, score_args))
    row_terms = AffineTerms(*CONFIG.affine(b, h, q_idx, q_idx, q_idx, 0, True, score_args))
    row_log2 = ((q_idx - first_row).to(gl.float32) * row_terms.slope + terms.of_q) * LOG2E
    slope = terms.slope / (scale * terms.gain)
    high = gl.cast(gl.cast(slope, gl.bfloat16), gl.float32)
    middle = gl.cast(gl.cast(slope - high, gl.bfloat16), gl.float32)
    low = slope - high - middle
    k = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, acc_layout(DEPTH)))
    row = gl.where(k == 0, high, gl.where(k == 1, middle, gl.where(k == 2, low, 0.0)))
    a = broadcast_row(row, gl.zeros([ROWS, DEPTH], gl.float32, layout=acc_layout(DEPTH)))
    return gl.convert_layout(a.to(gl.bfloat16), lhs_layout(COLUMNS)), row_log2


@gluon.jit
def wgmma_slope(s, a, c):
    """Issue S + a cᵀ."""
    return warpgroup_mma(a, c.permute((1, 0)), s, is_async=True)


# -- values per column, without registers ---------------------------------------------------------


@gluon.constexpr_function
def octet_layout(columns):
    """Return the layout of a 64 x columns accumulator seen as (row, octet of columns, column in
    it)."""
    octets = [[0, 2**n, 0] for n in range((columns // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [8, 0, 0], *octets],
        lane_bases=[[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]], block_bases=[], shape=[64, columns // 8, 8],
    )  # fmt: skip


@gluon.jit
def _per_pair(row, slope, COLUMNS: gl.constexpr):
    """Return a row vector plus `slope` times the column, of an accumulator. The octet is a constant
    of the instruction; only the column in it depends on the thread. So no registers are taken."""
    octets: gl.constexpr = octet_layout(COLUMNS)
    inner: gl.constexpr = gl.SliceLayout(1, octets)
    row = gl.convert_layout(row, gl.SliceLayout(1, inner))
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, inner)).to(gl.float32) * slope
    over: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, octets))
    octet = gl.arange(0, COLUMNS // 8, layout=over).to(gl.float32) * (8 * slope)
    x = (row[:, None] + column[None, :])[:, None, :] + octet[None, :, None]
    return gl.convert_layout(x.reshape([64, COLUMNS]), acc_layout(COLUMNS))


@gluon.jit
def _per_column(slope, COLUMNS: gl.constexpr):
    """Return `slope` times the column, of an accumulator: as `_per_pair`."""
    octets: gl.constexpr = gl.SliceLayout(0, octet_layout(COLUMNS))
    octet = gl.arange(0, COLUMNS // 8, layout=gl.SliceLayout(1, octets)).to(gl.float32)
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, octets)).to(gl.float32)
    x = (octet * (8 * slope))[:, None] + (column * slope)[None, :]
    return gl.convert_layout(x.reshape([COLUMNS]), gl.SliceLayout(0, acc_layout(COLUMNS)))
