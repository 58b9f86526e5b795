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


class Hoisted(NamedTuple):
    """What a score or a mask reads of the rows of an accumulator."""

    shared: Any  # scalars, the same for all pairs
    vectors: Any  # row vectors


class Rows(NamedTuple):
    """Hoisted operands of the rows of a work tile."""

    score: Any  # `Hoisted`
    mask: Any
    bias: Any  # from `locate_bias`, or ()


class Columns(NamedTuple):
    """Hoisted operands of the columns of a block: column vectors, laid out `hoist_layout`."""

    score: Any
    mask: Any


@gluon.constexpr_function
def hoist_layout():
    """The layout of columns in which every thread holds two."""
    return gl.BlockedLayout([2], [32], [4], [0])


@gluon.jit
def hoist_rows(b, h, at, of_score, of_mask, QUERIES: gl.constexpr, HOW: gl.constexpr):
    """The `Rows` of a work tile, without biases.

    - `at`: positions of its rows; they are queries if `QUERIES`, else keys.
    - `of_score`, `of_mask`: what the two capture.
    """
    if QUERIES:
        return Rows(
            _hoist(b, h, at, of_score, HOW.score_shared, HOW.score_of_q),
            _hoist(b, h, at, of_mask, HOW.mask_shared, HOW.mask_of_q),
            (),
        )
    else:
        return Rows(
            _hoist(b, h, at, of_score, HOW.score_shared, HOW.score_of_kv),
            _hoist(b, h, at, of_mask, HOW.mask_shared, HOW.mask_of_kv),
            (),
        )


@gluon.jit
def _hoist(b, h, at, captured, SHARED: gl.constexpr, OF_ROW: gl.constexpr):
    if SHARED is None:
        return Hoisted((), ())
    else:
        shared = SHARED(b, h, captured)
        return Hoisted(shared, OF_ROW(b, h, at, shared, captured))


@gluon.jit
def rows_for_width(rows, COLUMNS: gl.constexpr):
    """A `Hoisted`, its row vectors converted for a 64 x COLUMNS accumulator."""
    values = ()
    for n in gl.static_range(len(rows.vectors)):
        values = values + (row_vector(rows.vectors[n], COLUMNS),)  # noqa: RUF005
    return Hoisted(rows.shared, values)


@gluon.jit
def hoist_columns(
    b, h, at, rows, of_score, of_mask,
    QUERIES: gl.constexpr, PARTIAL: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """The `Columns` of a block; the mask's only of a partial one.

    - `at`: positions of its columns, laid out `hoist_layout`.
    - `rows`: of the work tile; they are queries if `QUERIES`.
    """
    of_pairs, of_kept = (), ()
    if HOW.score_shared is not None:
        OF_SCORE: gl.constexpr = HOW.score_of_kv if QUERIES else HOW.score_of_q
        of_pairs = OF_SCORE(b, h, at, rows.score.shared, of_score)
    if HOW.mask_pairs is not None and PARTIAL:
        OF_MASK: gl.constexpr = HOW.mask_of_kv if QUERIES else HOW.mask_of_q
        of_kept = OF_MASK(b, h, at, rows.mask.shared, of_mask)
    return Columns(of_pairs, of_kept)


@gluon.jit
def affine_operands(
    of_score, rows, columns, QUERIES: gl.constexpr, COLUMNS: gl.constexpr, HOW: gl.constexpr
):
    """What `HOW.affine` takes besides positions, for a 64 x COLUMNS accumulator: what the score
    captures, then what was hoisted, of both, of queries and of keys."""
    if HOW.score_shared is None:
        return of_score
    else:
        shared, of_row = rows.score
        of_column = _broadcast(columns.score, COLUMNS, HOW.scarce_smem)
        if QUERIES:
            return of_score + (shared, of_row, of_column)  # noqa: RUF005
        else:
            return of_score + (shared, of_column, of_row)  # noqa: RUF005


@gluon.jit
def evaluate_mask(
    s, b, h, q_idx, kv_idx, first, rows, columns, of_mask,
    QUERIES: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Which pairs of an accumulator `s` the mask keeps; its rows are queries if `QUERIES`.

    - `first`: the position of its first column.
    - `rows`, `columns`: from `hoist_rows` and `hoist_columns`.
    """
    if HOW.mask_pairs is None:
        if QUERIES:
            return MASK(b, h, q_idx[:, None], kv_idx[None, :], of_mask)
        else:
            return MASK(b, h, q_idx[None, :], kv_idx[:, None], of_mask)
    else:
        shared, of_row = rows.mask
        of_row = _expand(of_row, 1)
        of_column = _expand(_broadcast(columns.mask, s.shape[1], HOW.scarce_smem), 0)
        if QUERIES:
            lines = HOW.mask_steps(b, h, q_idx, first, True, shared, of_mask)
        else:
            lines = HOW.mask_steps(b, h, first, kv_idx, False, shared, of_mask)
        steps = ()
        for n in gl.static_range(len(lines) // 2):
            step = _not_above(lines[2 * n], lines[2 * n + 1], s.shape[0], s.shape[1])
            steps = steps + (step,)  # noqa: RUF005
        if QUERIES:
            return HOW.mask_pairs(
                b, h, q_idx[:, None], kv_idx[None, :], shared, of_row, of_column, steps, of_mask
            )
        else:
            return HOW.mask_pairs(
                b, h, q_idx[None, :], kv_idx[:, None], shared, of_column, of_row, steps, of_mask
            )


@gluon.jit
def _expand(values, AXIS: gl.constexpr):
    made = ()
    for n in gl.static_range(len(values)):
        x = values[n][:, None] if AXIS == 1 else values[n][None, :]
        made = made + (x,)  # noqa: RUF005
    return made


@gluon.jit
def _broadcast(values, COLUMNS: gl.constexpr, SCARCE: gl.constexpr):
    """Column vectors, from two columns per thread to every thread that needs them. They pass
    through shared memory; where that is `SCARCE`, 32 bits at a time."""
    layout: gl.constexpr = gl.SliceLayout(0, acc_layout(COLUMNS))
    made = ()
    for n in gl.static_range(len(values)):
        x = values[n]
        if SCARCE and x.dtype == gl.int64:
            low = gl.convert_layout(x.to(gl.int32), layout).to(gl.int64)
            high = gl.convert_layout((x >> 32).to(gl.int32), layout).to(gl.int64)
            made = made + ((high << 32) | (low & 0xFFFFFFFF),)  # noqa: RUF005
        else:
            made = made + (gl.convert_layout(x, layout),)  # noqa: RUF005
    return made


@gluon.jit
def _not_above(row, slope, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """The tile of booleans `row[i] + slope * j <= 0`, for columns j of an accumulator."""
    octets: gl.constexpr = octet_layout(COLUMNS)
    inner: gl.constexpr = gl.SliceLayout(1, octets)
    row += gl.full([ROWS], 0, gl.int32, layout=gl.SliceLayout(1, acc_layout(COLUMNS)))
    row = gl.convert_layout(row, gl.SliceLayout(1, inner))
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, inner)) * slope
    most = 0 - (row[:, None] + column[None, :])
    # Opaque until the WGMMA is complete: or the compiler would compare early, and keep the result
    # of every pair in bits.
    most = gl.inline_asm_elementwise("", "=r,0", [most], dtype=gl.int32, is_pure=False, pack=1)
    over: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, octets))
    octet = gl.arange(0, COLUMNS // 8, layout=over) * (8 * slope)
    found = octet[None, :, None] <= most[:, None, :]
    return gl.convert_layout(found.reshape([ROWS, COLUMNS]), acc_layout(COLUMNS))
