"""Stream-K fix-up: combine the parts of a work tile that several CTAs have computed (stream_k.py).

For disjoint sets J and K of keys, with o_J the sum of exp2(T - m_J) v over J, and so on,

    m = max(m_J, m_K),  o = o_J exp2(m_J - m) + o_K exp2(m_K - m),  and l likewise.
"""

from typing import Any, NamedTuple

from .. import config
from ..device.gluon_compat import barrier, gl, gluon
from ..device.mma import ROWS, acc_layout, add_acc, row_vector, scale_rows
from ..device.pipeline import semaphore_release, semaphore_wait

# Index of the flags behind the counter of tickets: 1 where a part is written.
FIRST_FLAG = gl.constexpr(config.FIRST_FLAG)


class Partial(NamedTuple):
    """One consumer's part of a work tile: fields as of `State`."""

    acc: Any
    m: Any
    l: Any
    max_s: Any


@gluon.jit
def combine_parts(part, number, others, i, partials, counter, HOW: gl.constexpr):
    """Write a part down for another CTA (`others` < 0), or add to it the parts of as many shares,
    whose numbers come before this one's. **Returns:** the part.

    - `number`: of the share; `i`: rows of the work tile.
    - `partials`: memory for parts, per share and consumer.
    """
    W: gl.constexpr = HOW.consumer
    own = number * HOW.consumers + W
    if others < 0:
        _write(partials, own, part, i, HOW)
        semaphore_release(counter + FIRST_FLAG + own, number)
    acc, m, l, max_s = part
    for n in range(0, others):
        at = (number - others + n) * HOW.consumers + W
        semaphore_wait(counter + FIRST_FLAG + at, 1)
        acc, m, l, max_s = _add(partials, at, acc, m, l, max_s, i, HOW)
        barrier()
        gl.store(counter + FIRST_FLAG + at, 0)
    return Partial(acc, m, l, max_s)


@gluon.jit
def _write(partials, at, part, i, HOW: gl.constexpr):
    pieces, of_row = _pointers(partials, at, part.acc, i, HOW)
    for n in gl.static_range(len(part.acc)):
        gl.store(pieces[n], part.acc[n])
    gl.store(of_row, part.m)
    gl.store(of_row + 1, part.l)
    if HOW.track_max:
        gl.store(of_row + 2, part.max_s)


@gluon.jit
def _add(partials, at, acc, m, l, max_s, i, HOW: gl.constexpr):
    pieces, of_row = _pointers(partials, at, acc, i, HOW)
    other_m = gl.load(of_row)
    new_m = gl.maximum(m, other_m)
    base = gl.where(new_m == float("-inf"), 0.0, new_m)
    mine, theirs = gl.exp2(m - base), gl.exp2(other_m - base)
    l = l * mine + gl.load(of_row + 1) * theirs
    if HOW.track_max:
        max_s = gl.maximum(max_s, gl.load(of_row + 2))
    acc = scale_rows(acc, mine)
    other = ()
    for n in gl.static_range(len(acc)):
        other = other + (gl.load(pieces[n]),)  # noqa: RUF005
    return add_acc(acc, scale_rows(other, theirs)), new_m, l, max_s


@gluon.jit
def _pointers(partials, at, acc, i, HOW: gl.constexpr):
    """A part is stored by rows: acc, then m, l and max_s. **Returns:** pointers to the pieces of
    acc, and to what follows them in every row."""
    WIDTH: gl.constexpr = acc_width(acc)
    row = (gl.cast(at, gl.int64) * ROWS + i - HOW.consumer * ROWS) * (WIDTH + 4)
    pieces = ()
    column = 0
    for n in gl.static_range(len(acc)):
        pieces = pieces + (partials + _offsets(row, column, acc[n].shape[1]),)  # noqa: RUF005
        column += acc[n].shape[1]
    return pieces, partials + (row + WIDTH)


@gluon.jit
def _offsets(row, column, WIDTH: gl.constexpr):
    """Of a piece of acc, from the rows' offsets."""
    j = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, acc_layout(WIDTH)))
    return row_vector(row, WIDTH)[:, None] + (column + j)[None, :]


@gluon.constexpr_function
def acc_width(acc):
    """Columns of all pieces."""
    return sum(x.shape[1] for x in acc)
