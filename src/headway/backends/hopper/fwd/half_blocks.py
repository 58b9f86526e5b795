"""What a consumer of the forward sees of a partial block, where that is known
(`fwd/half_block_table.py`).

Behind a causal mask the first of two consumers sees nothing of the right half of the block on the
diagonal, and the second one all of the left half; at the far end of a window it is the other way
round. So of a half that is not seen there is no S and no exponential, and P is 0; and in one that
is seen whole nothing is compared.
"""

from ..device.gluon_compat import gl, gluon
from ..device.hoisted import Rows, evaluate_mask, rows_for_width
from ..device.mma import ROWS, acc_layout, join_halves, row_vector, split_halves

# What is seen of a quarter.
NOTHING, SOME, ALL = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


@gluon.constexpr_function
def _quarters(HOW, FIRST, PARTIAL):
    """The consumer's, left and right."""
    if PARTIAL and HOW.half_blocks:
        return HOW.half_blocks[(0 if FIRST else 2) + HOW.consumer]
    return SOME, SOME


@gluon.constexpr_function
def live_columns(HOW, FIRST, PARTIAL):
    """The first column of a block that the consumer sees, and how many there are."""
    a, b = _quarters(HOW, FIRST, PARTIAL)
    half = HOW.block // 2
    if NOTHING in (a, b):
        return (half, half) if a == NOTHING else (0, half)
    return 0, HOW.block


@gluon.constexpr_function
def hidden_columns(HOW, FIRST, PARTIAL):
    """Of these, the first one that the mask is asked for, and how many there are."""
    a, b = _quarters(HOW, FIRST, PARTIAL)
    half = HOW.block // 2
    if NOTHING not in (a, b) and ALL in (a, b):
        return (half, half) if a == ALL else (0, half)
    return 0, live_columns(HOW, FIRST, PARTIAL)[1]


@gluon.jit
def hidden_positions(offset, n, HIDES: gl.constexpr, LAYOUT: gl.constexpr, HOW: gl.constexpr):
    """Positions of the columns that the mask is asked for; n is that of the first column."""
    return gl.cast(offset, HOW.index_type) + n + HIDES[0] + gl.arange(0, HIDES[1], layout=LAYOUT)


@gluon.jit
def hide(
    t, b, h, q_idx, kv_idx, first, rows, columns, of_mask,
    HIDES: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """T, or -inf where the mask does not keep a pair. Arguments as of `evaluate_mask`; `columns`
    are of those columns that the mask is asked for."""
    if HIDES[1] == t.shape[1]:
        kept_pairs = evaluate_mask(
            t, b, h, q_idx, kv_idx, first, rows, columns, of_mask, True, MASK, HOW
        )
        return gl.where(kept_pairs, t, float("-inf"))
    else:
        COLUMNS: gl.constexpr = HIDES[1]
        left, right = split_halves(t)
        part = left if HIDES[0] == 0 else right
        kv_idx = hidden_positions(first, 0, HIDES, gl.SliceLayout(0, acc_layout(COLUMNS)), HOW)
        q_idx, of_rows = row_vector(q_idx, COLUMNS), rows_for_width(rows.mask, COLUMNS)
        kept_pairs = evaluate_mask(
            part, b, h, q_idx, kv_idx, first + HIDES[0], Rows((), of_rows, ()), columns, of_mask,
            True, MASK, HOW,
        )  # fmt: skip
        part = gl.where(kept_pairs, part, float("-inf"))
        if HIDES[0] == 0:
            return join_halves(part, right)
        else:
            return join_halves(left, part)


@gluon.jit
def of_all_columns(p, SPAN: gl.constexpr, HOW: gl.constexpr):
    """P of a block, from that of the columns that are seen."""
    if SPAN[1] == HOW.block:
        return p
    else:
        nothing = gl.full([ROWS, SPAN[1]], 0.0, p.dtype, layout=acc_layout(SPAN[1]))
        if SPAN[0] == 0:
            return join_halves(p, nothing)
        else:
            return join_halves(nothing, p)
