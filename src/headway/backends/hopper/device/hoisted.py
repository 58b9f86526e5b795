"""Loop-invariant hoisting: what masks and affine scores need, computed ahead of the pairs of a tile
(gpu/codegen/hoist.py).

A value of the side that stays in a CTA is read once per work tile, by row. A value of the side that
moves is read once per block, one or two columns per thread, before the WGMMA is waited for. A
comparison of positions is one instruction per pair, against a constant: the place in the row.
"""

from typing import Any, NamedTuple

from .affine_score import octet_layout
from .gluon_compat import gl, gluon
from .mma import acc_layout, row_vector


class HoistedOperands(NamedTuple):
    """The operands that a score or a mask reads of the rows of an accumulator."""

    shared: Any  # scalars, the same for all pairs
    vectors: Any  # row vectors


class HoistedRows(NamedTuple):
    """The hoisted operands of the rows of a work tile."""

    score: Any  # `HoistedOperands`
    mask: Any
    bias: Any  # from `locate_bias`, or ()


class HoistedColumns(NamedTuple):
    """The hoisted operands of the columns of a block: column vectors, laid out `hoist_layout`."""

    score: Any
    mask: Any


@gluon.constexpr_function
def hoist_layout():
    """Return the layout of columns in which every thread holds two."""
    return gl.BlockedLayout([2], [32], [4], [0])


@gluon.jit
def hoist_rows(b, h, index, score_args, mask_args, QUERIES: gl.constexpr, CONFIG: gl.constexpr):
    """Compute the `HoistedRows` of a work tile, without biases.

    - `index`: positions of its rows; they are queries if `QUERIES`, else keys.
    - `score_args`, `mask_args`: what the two capture.
    """
    if QUERIES:
        return HoistedRows(
            _hoist(b, h, index, score_args, CONFIG.score_shared, CONFIG.score_of_q),
            _hoist(b, h, index, mask_args, CONFIG.mask_shared, CONFIG.mask_of_q),
            (),
        )
    else:
        return HoistedRows(
            _hoist(b, h, index, score_args, CONFIG.score_shared, CONFIG.score_of_kv),
            _hoist(b, h, index, mask_args, CONFIG.mask_shared, CONFIG.mask_of_kv),
            (),
        )


@gluon.jit
def _hoist(b, h, index, captured, SHARED: gl.constexpr, OF_ROW: gl.constexpr):
    if SHARED is None:
        return HoistedOperands((), ())
    else:
        shared = SHARED(b, h, captured)
        return HoistedOperands(shared, OF_ROW(b, h, index, shared, captured))


@gluon.jit
def rows_for_width(rows, COLUMNS: gl.constexpr):
    """Return a `HoistedOperands`, its row vectors converted for a 64 x COLUMNS accumulator."""
    values = ()
    for n in gl.static_range(len(rows.vectors)):
        values = values + (row_vector(rows.vectors[n], COLUMNS),)  # noqa: RUF005
    return HoistedOperands(rows.shared, values)


@gluon.jit
def hoist_columns(
    b, h, index, rows, score_args, mask_args,
    QUERIES: gl.constexpr, PARTIAL: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute the `HoistedColumns` of a block; the mask's only of a partial one.

    - `index`: positions of its columns, laid out `hoist_layout`.
    - `rows`: of the work tile; they are queries if `QUERIES`.
    """
    for_score, for_mask = (), ()
    if CONFIG.score_shared is not None:
        OF_SCORE: gl.constexpr = CONFIG.score_of_kv if QUERIES else CONFIG.score_of_q
        for_score = OF_SCORE(b, h, index, rows.score.shared, score_args)
    if CONFIG.mask_pairs is not None and PARTIAL:
        OF_MASK: gl.constexpr = CONFIG.mask_of_kv if QUERIES else CONFIG.mask_of_q
        for_mask = OF_MASK(b, h, index, rows.mask.shared, mask_args)
    return HoistedColumns(for_score, for_mask)


@gluon.jit
def affine_operands(
    score_args, rows, columns, QUERIES: gl.constexpr, COLUMNS: gl.constexpr, CONFIG: gl.constexpr
):
    """Return the operands that `CONFIG.affine` takes besides positions, for a 64 x COLUMNS
    accumulator: what the score captures, then what was hoisted, of queries and of keys."""
    if CONFIG.score_shared is None:
        return score_args
    else:
        shared, of_row = rows.score
        of_column = _broadcast(columns.score, COLUMNS, CONFIG.scarce_smem)
        if QUERIES:
            return score_args + (shared, of_row, of_column)  # noqa: RUF005
        else:
            return score_args + (shared, of_column, of_row)  # noqa: RUF005


@gluon.jit
def evaluate_mask(
    s, b, h, q_idx, kv_idx, first_column, rows, columns, mask_args,
    QUERIES: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Evaluate the mask on the pairs of an accumulator `s`, whose rows are queries if `QUERIES`.

    - `first_column`: the position of its first column.
    - `rows`, `columns`: from `hoist_rows` and `hoist_columns`.
    """
    if CONFIG.mask_pairs is None:
        if QUERIES:
            return MASK(b, h, q_idx[:, None], kv_idx[None, :], mask_args)
        else:
            return MASK(b, h, q_idx[None, :], kv_idx[:, None], mask_args)
    else:
        shared, of_row = rows.mask
        of_row = _expand(of_row, 1)
        of_column = _expand(_broadcast(columns.mask, s.shape[1], CONFIG.scarce_smem), 0)
        if QUERIES:
            lines = CONFIG.mask_steps(b, h, q_idx, first_column, True, shared, mask_args)
        else:
            lines = CONFIG.mask_steps(b, h, first_column, kv_idx, False, shared, mask_args)
        steps = ()
        for n in gl.static_range(len(lines) // 2):
            step = _not_above(lines[2 * n], lines[2 * n + 1], s.shape[0], s.shape[1])
            steps = steps + (step,)  # noqa: RUF005
        if QUERIES:
            return CONFIG.mask_pairs(
                b, h, q_idx[:, None], kv_idx[None, :], shared, of_row, of_column, steps, mask_args
            )
        else:
            return CONFIG.mask_pairs(
                b, h, q_idx[None, :], kv_idx[:, None], shared, of_column, of_row, steps, mask_args
            )


@gluon.jit
def _expand(values, AXIS: gl.constexpr):
    vectors = ()
    for n in gl.static_range(len(values)):
        x = values[n][:, None] if AXIS == 1 else values[n][None, :]
        vectors = vectors + (x,)  # noqa: RUF005
    return vectors


@gluon.jit
def _broadcast(values, COLUMNS: gl.constexpr, SCARCE: gl.constexpr):
    """Convert column vectors, from two columns per thread to every thread that needs them. They
    pass through shared memory; where that is `SCARCE`, 32 bits at a time."""
    layout: gl.constexpr = gl.SliceLayout(0, acc_layout(COLUMNS))
    vectors = ()
    for n in gl.static_range(len(values)):
        x = values[n]
        if SCARCE and x.dtype == gl.int64:
            low = gl.convert_layout(x.to(gl.int32), layout).to(gl.int64)
            high = gl.convert_layout((x >> 32).to(gl.int32), layout).to(gl.int64)
            vectors = vectors + ((high << 32) | (low & 0xFFFFFFFF),)  # noqa: RUF005
        else:
            vectors = vectors + (gl.convert_layout(x, layout),)  # noqa: RUF005
    return vectors


@gluon.jit
def _not_above(row, slope, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Return the tile of booleans `row[i] + slope * j <= 0`, for columns j of an accumulator."""
    octets: gl.constexpr = octet_layout(COLUMNS)
    inner: gl.constexpr = gl.SliceLayout(1, octets)
    row += gl.full([ROWS], 0, gl.int32, layout=gl.SliceLayout(1, acc_layout(COLUMNS)))
    row = gl.convert_layout(row, gl.SliceLayout(1, inner))
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, inner)) * slope
    bound = 0 - (row[:, None] + column[None, :])
    # Opaque until the WGMMA is complete: or the compiler would compare early, and keep the result
    # of every pair in bits.
    bound = gl.inline_asm_elementwise("", "=r,0", [bound], dtype=gl.int32, is_pure=False, pack=1)
    over: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, octets))
    octet = gl.arange(0, COLUMNS // 8, layout=over) * (8 * slope)
    not_above = octet[None, :, None] <= bound[:, None, :]
    return gl.convert_layout(not_above.reshape([ROWS, COLUMNS]), acc_layout(COLUMNS))
