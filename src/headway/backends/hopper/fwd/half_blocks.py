"""Half-block coverage: which columns of a partial block a consumer computes, and which it masks,
where that is known when the kernel is compiled (fwd/half_block_table.py).

Behind a causal mask the first of two consumers sees nothing of the right half of the diagonal
block, and the second one all of the left half; at the far end of a window it is the other way
round. Of a half that nobody sees there is no S and no exponential, and P is 0. In a half that is
seen whole nothing is compared.

A span of columns is the first one, and how many.
"""

from ..device.gluon_compat import gl, gluon
from ..device.hoisted import HoistedRows, evaluate_mask, rows_for_width
from ..device.mma import ROWS, acc_layout, join_halves, row_vector, split_halves

# What one consumer sees of one half of a block.
EMPTY, MIXED, FULL = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


@gluon.constexpr_function
def _coverage(CONFIG, FIRST, PARTIAL):
    """Return what the consumer sees of the left and of the right half."""
    if PARTIAL and CONFIG.half_blocks:
        return CONFIG.half_blocks[(0 if FIRST else 2) + CONFIG.consumer]
    return MIXED, MIXED


@gluon.constexpr_function
def live_columns(CONFIG, FIRST, PARTIAL):
    """Return the span of a block of which the consumer sees something.

    - `FIRST`: the block is the first of a work tile, outside of the loop; `PARTIAL`: it may be
      masked.
    """
    left, right = _coverage(CONFIG, FIRST, PARTIAL)
    half = CONFIG.block // 2
    if EMPTY in (left, right):
        return (half, half) if left == EMPTY else (0, half)
    return 0, CONFIG.block


@gluon.constexpr_function
def masked_columns(CONFIG, FIRST, PARTIAL):
    """Return the span, within the live columns, for which the mask is evaluated."""
    left, right = _coverage(CONFIG, FIRST, PARTIAL)
    half = CONFIG.block // 2
    if EMPTY not in (left, right) and FULL in (left, right):
        return (half, half) if left == FULL else (0, half)
    return 0, live_columns(CONFIG, FIRST, PARTIAL)[1]


@gluon.jit
def masked_positions(first_kv, MASKED: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the positions of the masked columns; `first_kv` is that of the first live key."""
    return first_kv + MASKED[0] + gl.arange(0, MASKED[1], layout=LAYOUT)


@gluon.jit
def apply_mask(
    t, b, h, q_idx, kv_idx, first_kv, rows, columns, mask_args,
    MASKED: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Return t, and -inf where the mask does not keep a pair.

    - Arguments as of `evaluate_mask`, for the live columns; but `columns` are of the masked ones.
    - `MASKED`: from `masked_columns`.
    """
    if MASKED[1] == t.shape[1]:
        keep = evaluate_mask(
            t, b, h, q_idx, kv_idx, first_kv, rows, columns, mask_args, True, MASK, CONFIG
        )
        return gl.where(keep, t, float("-inf"))
    else:
        COLUMNS: gl.constexpr = MASKED[1]
        left, right = split_halves(t)
        half = left if MASKED[0] == 0 else right
        layout: gl.constexpr = gl.SliceLayout(0, acc_layout(COLUMNS))
        kv_idx = masked_positions(first_kv, MASKED, layout)
        q_idx, row_operands = row_vector(q_idx, COLUMNS), rows_for_width(rows.mask, COLUMNS)
        keep = evaluate_mask(
            half, b, h, q_idx, kv_idx, first_kv + MASKED[0], HoistedRows((), row_operands, ()),
            columns,
            mask_args,
            True, MASK, CONFIG,
        )  # fmt: skip
        half = gl.where(keep, half, float("-inf"))
        if MASKED[0] == 0:
            return join_halves(half, right)
        else:
            return join_halves(left, half)


@gluon.jit
def fill_block(p, LIVE: gl.constexpr, CONFIG: gl.constexpr):
    """Extend P of the live columns to all columns of the block: 0 in the others."""
    if LIVE[1] == CONFIG.block:
        return p
    else:
        zero = gl.full([ROWS, LIVE[1]], 0.0, p.dtype, layout=acc_layout(LIVE[1]))
        if LIVE[0] == 0:
            return join_halves(p, zero)
        else:
            return join_halves(zero, p)
