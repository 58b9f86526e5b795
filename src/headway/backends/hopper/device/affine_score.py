"""Scores that are linear in S (gpu/codegen/affine.py), of a tile that a product left in registers.

What a score costs is instructions per pair. A number per row costs none in a softmax, one per
column is added by the instruction that multiplies with the scale, and what is proportional to the
distance is made of both. An absolute value is two instructions.

Where the largest T of a row is looked for, as in the forward, what is added for a column takes an
instruction all the same. So tensor cores add it, if it is a straight line (HOW.slanted): a product
S = q kᵀ is followed by one more of depth 16,

    S += a cᵀ,  every row of a: its slope, as the sum of three bfloat16;  every row of c: its number
                                                                          in the tile, three times

which is exact: three times 8 bits are a float's 24, and numbers below 256 have 8. What such a line
adds for a row is one number for the block, and one for the row, which the maxima of a rank are
without until it ends.
"""

from .gluon_compat import fence_async_shared, gl, gluon, warpgroup_mma
from .mma import LOG2E, ROWS, acc_layout, broadcast_row, lhs_layout

DEPTH = gl.constexpr(16)  # of one product


@gluon.jit
def affine_scores(
    s, scale, b, h, q_idx, kv_idx, first_row, first, of_score,
    SLANTED: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Of a score that is linear in S, rows being queries: T less a number per row, in some unit
    above 0; that unit over log 2; and the number of a row over log 2, 0 where the score is `lone`.
    If HOW.slanted it is one number for all rows, less what `slope_lhs` has of each.

    - `first_row`, `first`: a position near the rows, and the first one of the columns.
    - `SLANTED`: what a straight line adds for a column is in s (`wgmma_slope`).
    """
    if HOW.slope_mma:
        gain, row, along, _, _, _, _, _ = HOW.affine(
            b, h, q_idx, kv_idx, first_row, first, False, of_score
        )
        unit = scale * gain * LOG2E
        t = s
        if not SLANTED:
            t = s + _columns(along / (scale * gain), s.shape[1])[None, :]
        by_row = row * LOG2E
    else:
        gain, row, along, bent, bent_along, factor, of_row, of_col = HOW.affine(
            b, h, q_idx, kv_idx, q_idx, first, False, of_score
        )
        unit = scale * gain * LOG2E
        by_row = _no_rows(s)
        if HOW.has_abs:
            bend = gl.abs(_slanted(bent, bent_along, s.shape[1]))
        if HOW.abs_only and HOW.monotone:
            t = s + bend * (factor / (scale * gain))
        elif HOW.abs_only:
            t = s * unit + bend * (factor * LOG2E)
            unit = 1.0
        else:
            col = _columns(along * LOG2E, s.shape[1]) + of_col * LOG2E
            t = s * unit + col[None, :]
            if HOW.has_abs:
                t += bend * (factor * LOG2E)
            unit = 1.0
            by_row += (row + of_row) * LOG2E
    return t, unit, by_row


@gluon.jit
def affine_exponent(s, scale, less, b, h, q_idx, kv_idx, first, of_score, HOW: gl.constexpr):
    """Of such a score, rows being keys: T over log 2, less a number per column.

    - `first`: the first position of the columns.
    """
    gain, row, along, bent, bent_along, factor, of_col, of_row = HOW.affine(
        b, h, q_idx, kv_idx, first, kv_idx, True, of_score
    )
    unit = scale * gain * LOG2E
    if HOW.has_abs:
        bend = gl.abs(_slanted(bent, bent_along, s.shape[1]))
    if HOW.abs_only:
        t = s * unit + (bend * (factor * LOG2E) - less[None, :])
    else:
        col = _columns(along * LOG2E, s.shape[1]) - less + of_col * LOG2E
        t = s * unit + col[None, :]
        if HOW.has_abs:
            t += bend * (factor * LOG2E)
        by_row = _no_rows(s) + (row + of_row) * LOG2E
        t += by_row[:, None]
    return t


@gluon.jit
def _no_rows(s):
    """What adds nothing to the rows."""
    return gl.full([s.shape[0]], -0.0, gl.float32, layout=gl.SliceLayout(1, acc_layout(s.shape[1])))


@gluon.jit
def slope_rhs(COLUMNS: gl.constexpr):
    """Shared memory with c."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    each: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    n = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, each))
    k = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, each))
    smem = gl.allocate_shared_memory(gl.bfloat16, [COLUMNS, DEPTH], layout)
    smem.store(gl.where(k[None, :] < 3, n[:, None], 0).to(gl.bfloat16))
    fence_async_shared()
    return smem


@gluon.jit
def slope_lhs(scale, b, h, q_idx, first_row, of_score, COLUMNS: gl.constexpr, HOW: gl.constexpr):
    """a, over the unit of `affine_scores`; and what rows add beside `first_row`, over log 2."""
    gain, _, along, _, _, _, of_row, _ = HOW.affine(b, h, q_idx, q_idx, q_idx, 0, False, of_score)
    _, _, along_rows, _, _, _, _, _ = HOW.affine(b, h, q_idx, q_idx, q_idx, 0, True, of_score)
    by_row = ((q_idx - first_row).to(gl.float32) * along_rows + of_row) * LOG2E
    slope = along / (scale * gain)
    high = gl.cast(gl.cast(slope, gl.bfloat16), gl.float32)
    middle = gl.cast(gl.cast(slope - high, gl.bfloat16), gl.float32)
    low = slope - high - middle
    k = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, acc_layout(DEPTH)))
    row = gl.where(k == 0, high, gl.where(k == 1, middle, gl.where(k == 2, low, 0.0)))
    a = broadcast_row(row, gl.zeros([ROWS, DEPTH], gl.float32, layout=acc_layout(DEPTH)))
    return gl.convert_layout(a.to(gl.bfloat16), lhs_layout(COLUMNS)), by_row


@gluon.jit
def wgmma_slope(s, a, c):
    """Issue S + a cᵀ."""
    return warpgroup_mma(a, c.permute((1, 0)), s, is_async=True)


@gluon.constexpr_function
def octet_layout(columns):
    """The layout of a product of 64 rows, its columns as rows of eight."""
    over = [[0, 2**n, 0] for n in range((columns // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [8, 0, 0], *over],
        lane_bases=[[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]], block_bases=[], shape=[64, columns // 8, 8],
    )  # fmt: skip


@gluon.jit
def _slanted(row, slope, COLUMNS: gl.constexpr):
    """A number per row plus `slope` times the column, of a product. What is added for a column is
    a constant, but for where in eight columns a thread is: it takes no registers."""
    whole: gl.constexpr = octet_layout(COLUMNS)
    inner: gl.constexpr = gl.SliceLayout(1, whole)
    row = gl.convert_layout(row, gl.SliceLayout(1, inner))
    one = gl.arange(0, 8, layout=gl.SliceLayout(0, inner)).to(gl.float32) * slope
    over: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, whole))
    eights = gl.arange(0, COLUMNS // 8, layout=over).to(gl.float32) * (8 * slope)
    x = (row[:, None] + one[None, :])[:, None, :] + eights[None, :, None]
    return gl.convert_layout(x.reshape([64, COLUMNS]), acc_layout(COLUMNS))


@gluon.jit
def _columns(slope, COLUMNS: gl.constexpr):
    """`slope` times the column, of a product: as `_slanted`."""
    eights: gl.constexpr = gl.SliceLayout(0, octet_layout(COLUMNS))
    over = gl.arange(0, COLUMNS // 8, layout=gl.SliceLayout(1, eights)).to(gl.float32)
    one = gl.arange(0, 8, layout=gl.SliceLayout(0, eights)).to(gl.float32)
    x = (over * (8 * slope))[:, None] + (one * slope)[None, :]
    return gl.convert_layout(x.reshape([COLUMNS]), gl.SliceLayout(0, acc_layout(COLUMNS)))
