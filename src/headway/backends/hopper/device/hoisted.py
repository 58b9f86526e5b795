"""What masks and linear scores need, worked out before the pairs of a tile (gpu/codegen/hoist.py).

What it reads of the side that stays in a CTA is read once per rank, by row; of the side that moves
once per block, a column or two per thread, and before the product is waited for. Comparisons of
positions are one instruction per pair, with a number that is a constant: its place in the row.
"""

from .affine_score import octet_layout
from .gluon_compat import gl, gluon
from .mma import acc_layout, row_vector


@gluon.constexpr_function
def hoist_layout():
    """The layout of columns in which every thread has two."""
    return gl.BlockedLayout([2], [32], [4], [0])


@gluon.jit
def hoist_rows(b, h, at, of_score, of_mask, QUERIES: gl.constexpr, HOW: gl.constexpr):
    """Of the score and of the mask: what all pairs share, and what depends on a row of a product.
    `at`: positions of its rows, which are queries if `QUERIES`."""
    if QUERIES:
        return (
            _at(b, h, at, of_score, HOW.score_shared, HOW.score_of_q),
            _at(b, h, at, of_mask, HOW.mask_shared, HOW.mask_of_q),
        )
    else:
        return (
            _at(b, h, at, of_score, HOW.score_shared, HOW.score_of_kv),
            _at(b, h, at, of_mask, HOW.mask_shared, HOW.mask_of_kv),
        )


@gluon.jit
def _at(b, h, at, captured, SHARED: gl.constexpr, OF_ROW: gl.constexpr):
    if SHARED is None:
        return (), ()
    else:
        shared = SHARED(b, h, captured)
        return shared, OF_ROW(b, h, at, shared, captured)


@gluon.jit
def rows_for_width(of_rows, COLUMNS: gl.constexpr):
    """What all pairs share, and rows, for a product with so many columns."""
    shared, values = of_rows
    made = ()
    for n in gl.static_range(len(values)):
        made = made + (row_vector(values[n], COLUMNS),)  # noqa: RUF005
    return shared, made


@gluon.jit
def hoist_columns(
    b, h, at, rows, of_score, of_mask,
    QUERIES: gl.constexpr, PARTIAL: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Of the score and, in a tile that is `PARTIAL`, of the mask: what depends on a column.

    - `at`: positions of columns, laid out `hoist_layout`; `rows`: from `hoist_rows`; `QUERIES`:
      as there.
    """
    columns, of_pairs = (), ()
    if HOW.score_shared is not None:
        OF_SCORE: gl.constexpr = HOW.score_of_kv if QUERIES else HOW.score_of_q
        columns = OF_SCORE(b, h, at, rows[0][0], of_score)
    if HOW.mask_pairs is not None and PARTIAL:
        OF_MASK: gl.constexpr = HOW.mask_of_kv if QUERIES else HOW.mask_of_q
        of_pairs = OF_MASK(b, h, at, rows[1][0], of_mask)
    return columns, of_pairs


@gluon.jit
def affine_operands(
    of_score, rows, columns, QUERIES: gl.constexpr, COLUMNS: gl.constexpr, HOW: gl.constexpr
):
    """What `HOW.linear` is given beside positions, of a product with so many columns."""
    if HOW.score_shared is None:
        return of_score
    else:
        shared, of_row = rows[0]
        of_column = _spread(columns[0], COLUMNS, HOW.scarce_smem)
        if QUERIES:
            return of_score + (shared, of_row, of_column)  # noqa: RUF005
        else:
            return of_score + (shared, of_column, of_row)  # noqa: RUF005


@gluon.jit
def evaluate_mask(
    s, b, h, q_idx, kv_idx, first, rows, columns, of_mask,
    QUERIES: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Which pairs of a product `s` are kept; `QUERIES`: its rows are queries.

    - `first`: the first position of the columns.
    - `rows`, `columns`: from `hoist_rows` and `hoist_columns`.
    """
    if HOW.mask_pairs is None:
        if QUERIES:
            return MASK(b, h, q_idx[:, None], kv_idx[None, :], of_mask)
        else:
            return MASK(b, h, q_idx[None, :], kv_idx[:, None], of_mask)
    else:
        shared, of_row = rows[1]
        of_row = _expanded(of_row, 1)
        of_column = _expanded(_spread(columns[1], s.shape[1], HOW.scarce_smem), 0)
        if QUERIES:
            found = HOW.mask_steps(b, h, q_idx, first, True, shared, of_mask)
        else:
            found = HOW.mask_steps(b, h, first, kv_idx, False, shared, of_mask)
        steps = ()
        for n in gl.static_range(len(found) // 2):
            below = _below(found[2 * n], found[2 * n + 1], s.shape[0], s.shape[1])
            steps = steps + (below,)  # noqa: RUF005
        if QUERIES:
            return HOW.mask_pairs(
                b, h, q_idx[:, None], kv_idx[None, :], shared, of_row, of_column, steps, of_mask
            )
        else:
            return HOW.mask_pairs(
                b, h, q_idx[None, :], kv_idx[:, None], shared, of_column, of_row, steps, of_mask
            )


@gluon.jit
def _expanded(values, AXIS: gl.constexpr):
    made = ()
    for n in gl.static_range(len(values)):
        x = values[n][:, None] if AXIS == 1 else values[n][None, :]
        made = made + (x,)  # noqa: RUF005
    return made


@gluon.jit
def _spread(values, COLUMNS: gl.constexpr, SHORT: gl.constexpr):
    """Columns from a thread each to all that need them, through shared memory: of four bytes each,
    where it is short."""
    layout: gl.constexpr = gl.SliceLayout(0, acc_layout(COLUMNS))
    made = ()
    for n in gl.static_range(len(values)):
        x = values[n]
        if SHORT and x.dtype == gl.int64:
            low = gl.convert_layout(x.to(gl.int32), layout).to(gl.int64)
            high = gl.convert_layout((x >> 32).to(gl.int32), layout).to(gl.int64)
            made = made + ((high << 32) | (low & 0xFFFFFFFF),)  # noqa: RUF005
        else:
            made = made + (gl.convert_layout(x, layout),)  # noqa: RUF005
    return made


@gluon.jit
def _below(row, slope, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Where a number per row plus `slope` times the column is 0 at most, of a product."""
    whole: gl.constexpr = octet_layout(COLUMNS)
    inner: gl.constexpr = gl.SliceLayout(1, whole)
    row += gl.full([ROWS], 0, gl.int32, layout=gl.SliceLayout(1, acc_layout(COLUMNS)))
    row = gl.convert_layout(row, gl.SliceLayout(1, inner))
    one = gl.arange(0, 8, layout=gl.SliceLayout(0, inner)) * slope
    most = 0 - (row[:, None] + one[None, :])
    # Not known before the product is there: the compiler would compare early, and keep what it
    # found of every pair in bits.
    most = gl.inline_asm_elementwise("", "=r,0", [most], dtype=gl.int32, is_pure=False, pack=1)
    over: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, whole))
    eights = gl.arange(0, COLUMNS // 8, layout=over) * (8 * slope)
    found = eights[None, :, None] <= most[:, None, :]
    return gl.convert_layout(found.reshape([ROWS, COLUMNS]), acc_layout(COLUMNS))
