"""Parts of a rank, which several CTAs have computed, made one (stream_k.py).

Of keys J and K, o_J and o_K being sums of exp2(T - m_J) v over J, and so on,

    m = max(m_J, m_K),  o = o_J exp2(m_J - m) + o_K exp2(m_K - m),  and l likewise.
"""

from ..device.gluon_compat import barrier, gl, gluon
from ..device.mma import ROWS, acc_layout, add_acc, row_vector, scale_rows
from ..device.pipeline import semaphore_release, semaphore_wait

FLAGS = gl.constexpr(32)  # behind the counter: of the parts that are written


@gluon.jit
def combine_parts(acc, state, number, others, i, shared, HOW: gl.constexpr):
    """What is known of a part of a rank is written down for another CTA (`others` < 0), or joined
    with that of as many CTAs, whose numbers come before this one's."""
    W: gl.constexpr = HOW.consumer
    m, l, largest = state
    parts, counter = shared
    own = number * HOW.consumers + W
    if others < 0:
        _write(parts, own, acc, m, l, largest, i, HOW)
        semaphore_release(counter + FLAGS + own, number)
    for n in range(0, others):
        at = (number - others + n) * HOW.consumers + W
        semaphore_wait(counter + FLAGS + at, 1)
        acc, m, l, largest = _add(parts, at, acc, m, l, largest, i, HOW)
        barrier()
        gl.store(counter + FLAGS + at, 0)
    return acc, m, l, largest


@gluon.jit
def _write(parts, at, acc, m, l, largest, i, HOW: gl.constexpr):
    columns, of_row = _places(parts, at, acc, i, HOW)
    for n in gl.static_range(len(acc)):
        gl.store(columns[n], acc[n])
    gl.store(of_row, m)
    gl.store(of_row + 1, l)
    if HOW.track_max:
        gl.store(of_row + 2, largest)


@gluon.jit
def _add(parts, at, acc, m, l, largest, i, HOW: gl.constexpr):
    columns, of_row = _places(parts, at, acc, i, HOW)
    of_m = gl.load(of_row)
    most = gl.maximum(m, of_m)
    base = gl.where(most == float("-inf"), 0.0, most)
    mine, theirs = gl.exp2(m - base), gl.exp2(of_m - base)
    l = l * mine + gl.load(of_row + 1) * theirs
    if HOW.track_max:
        largest = gl.maximum(largest, gl.load(of_row + 2))
    acc = scale_rows(acc, mine)
    other = ()
    for n in gl.static_range(len(acc)):
        other = other + (gl.load(columns[n]),)  # noqa: RUF005
    return add_acc(acc, scale_rows(other, theirs)), most, l, largest


@gluon.jit
def _places(parts, at, acc, i, HOW: gl.constexpr):
    """Of the numbers of a part, in rows of acc and up to three more: pointers to the pieces of acc,
    and to what follows them."""
    WIDTH: gl.constexpr = width(acc)
    row = (gl.cast(at, gl.int64) * ROWS + i - HOW.consumer * ROWS) * (WIDTH + 4)
    columns = ()
    column = 0
    for n in gl.static_range(len(acc)):
        rows = row_vector(row, acc[n].shape[1])[:, None]
        j = gl.arange(0, acc[n].shape[1], layout=gl.SliceLayout(0, acc_layout(acc[n].shape[1])))[
            None, :
        ]
        columns = columns + (parts + (rows + (column + j)),)  # noqa: RUF005
        column += acc[n].shape[1]
    return columns, parts + (row + WIDTH)


@gluon.constexpr_function
def width(acc):
    """Of all pieces."""
    return sum(x.shape[1] for x in acc)
