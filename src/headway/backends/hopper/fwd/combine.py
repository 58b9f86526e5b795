"""Stream-K fix-up: combine the parts of a work tile that several CTAs have computed (stream_k.py).

For disjoint sets J and K of keys, with o_J the sum of exp2(T - m_J) v over J, and so on,

    m = max(m_J, m_K),  o = o_J exp2(m_J - m) + o_K exp2(m_K - m),  and l likewise.
"""

from typing import Any, NamedTuple

from .. import config
from ..device.gluon_compat import barrier, gl, gluon
from ..device.mma import ROWS, acc_layout, add_acc, moved_moment, row_vector, scale_rows
from ..device.pipeline import semaphore_release, semaphore_wait

# Index of the flags behind the counter of tickets: 1 where a part is written.
FIRST_FLAG = gl.constexpr(config.FIRST_FLAG)


class Partial(NamedTuple):
    """The part of a work tile that one consumer has computed: fields as of `SoftmaxState`."""

    acc: Any
    m: Any
    l: Any
    moment: Any
    max_s: Any


@gluon.jit
def combine_parts(part, share, earlier_parts, rows, partials, counter, CONFIG: gl.constexpr):
    """Write a part down for another CTA (`earlier_parts` < 0), or add to it the parts of as many
    earlier shares. **Returns:** the part.

    - `share`: its number; `rows`: of the work tile.
    - `partials`: memory for parts, per share and consumer.
    """
    W: gl.constexpr = CONFIG.consumer
    idx = share * CONFIG.consumers + W
    if earlier_parts < 0:
        _write(partials, idx, part, rows, CONFIG)
        semaphore_release(counter + FIRST_FLAG + idx, share)
    acc, m, l, moment, max_s = part
    for n in range(0, earlier_parts):
        earlier = (share - earlier_parts + n) * CONFIG.consumers + W
        semaphore_wait(counter + FIRST_FLAG + earlier, 1)
        acc, m, l, moment, max_s = _add(partials, earlier, acc, m, l, moment, max_s, rows, CONFIG)
        barrier()
        gl.store(counter + FIRST_FLAG + earlier, 0)
    return Partial(acc, m, l, moment, max_s)


@gluon.jit
def _write(partials, idx, part, rows, CONFIG: gl.constexpr):
    pieces, row_values = _pointers(partials, idx, part.acc, rows, CONFIG)
    for n in gl.static_range(len(part.acc)):
        gl.store(pieces[n], part.acc[n])
    gl.store(row_values, part.m)
    gl.store(row_values + 1, part.l)
    if CONFIG.track_max:
        gl.store(row_values + 2, part.max_s)
    if len(part.moment) > 0:
        gl.store(row_values + 3, part.moment[0])


@gluon.jit
def _add(partials, idx, acc, m, l, moment, max_s, rows, CONFIG: gl.constexpr):
    pieces, row_values = _pointers(partials, idx, acc, rows, CONFIG)
    other_m = gl.load(row_values)
    new_m = gl.maximum(m, other_m)
    base = gl.where(new_m == float("-inf"), 0.0, new_m)
    factor, other_factor = gl.exp2(m - base), gl.exp2(other_m - base)
    other_l = gl.load(row_values + 1)
    if len(moment) > 0:
        other_sum = gl.load(row_values + 3)
        other_sum = moved_moment(other_sum, other_l, other_m - base, other_factor)
        moment = (moved_moment(moment[0], l, m - base, factor) + other_sum,)
    l = l * factor + other_l * other_factor
    if CONFIG.track_max:
        max_s = gl.maximum(max_s, gl.load(row_values + 2))
    acc = scale_rows(acc, factor)
    other_acc = ()
    for n in gl.static_range(len(acc)):
        other_acc = other_acc + (gl.load(pieces[n]),)  # noqa: RUF005
    return add_acc(acc, scale_rows(other_acc, other_factor)), new_m, l, moment, max_s


@gluon.jit
def _pointers(partials, idx, acc, rows, CONFIG: gl.constexpr):
    """Return pointers to the pieces of acc of a part, and to what follows them in every row: m, l,
    max_s and moment."""
    WIDTH: gl.constexpr = acc_width(acc)
    row = (gl.cast(idx, gl.int64) * ROWS + rows - CONFIG.consumer * ROWS) * (WIDTH + 4)
    pieces = ()
    column = 0
    for n in gl.static_range(len(acc)):
        pieces = pieces + (partials + _offsets(row, column, acc[n].shape[1]),)  # noqa: RUF005
        column += acc[n].shape[1]
    return pieces, partials + (row + WIDTH)


@gluon.jit
def _offsets(row, column, WIDTH: gl.constexpr):
    """Return the offsets of a piece of acc, from the offsets of its rows."""
    j = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, acc_layout(WIDTH)))
    return row_vector(row, WIDTH)[:, None] + (column + j)[None, :]


@gluon.constexpr_function
def acc_width(acc):
    """Return the columns of all pieces."""
    return sum(x.shape[1] for x in acc)
