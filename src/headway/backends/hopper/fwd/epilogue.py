"""What becomes of a rank of the forward: out, lse, and what else is asked for."""

from ..device.gluon_compat import fence_async_shared, gl, gluon, tma_store, tma_store_wait
from ..device.mma import (
    LN2,
    LOG2E,
    ROWS,
    acc_layout,
    propagate_nan,
    row_vector,
    scale_rows,
    split_halves,
)
from ..device.pipeline import consumer_release
from ..device.work_tile import FWD_RUNS, read_work
from .combine import combine_parts


@gluon.jit
def epilogue(acc, state, rank, SCORE: gl.constexpr, HOW: gl.constexpr):
    """Store what is known of a rank; of a ghost, whose rows are all past the end, nothing."""
    at, i, by_row, work_smem, work_ring, to, o_smem, sizes, walk = rank
    out, wide_out, lse, row_max, top, sink, shared = to
    heads, _, q_len, _, dv = sizes
    W: gl.constexpr = HOW.consumer
    m, l, largest = state
    slot, first, h, b = read_work(work_smem, at, 0, 4, 4)
    if HOW.stream_k:
        number, others = read_work(work_smem, at, FWD_RUNS + 1, FWD_RUNS + 3, 4)
        acc, m, l, largest = combine_parts(acc, (m, l, largest), number, others, i, shared, HOW)
        slot = gl.where(others < 0, -1, slot)  # as of a ghost, here nothing is stored
        first = gl.where(others < 0, q_len, first)
    consumer_release(work_ring, at)
    if HOW.slope_mma:
        m = m + by_row
    live = first + i < q_len
    head = (gl.cast(b, gl.int64) * heads + h) * q_len
    if row_max is not None:
        gl.store(row_max + head + first + i, propagate_nan(m * LN2, l), mask=live)
    if top is not None:
        if SCORE is None:
            largest = m * LN2  # S is T
        largest = gl.where(live, propagate_nan(largest, l), float("-inf"))
        bad = gl.max((largest != largest).to(gl.int32), 0)
        largest = gl.where(bad > 0, float("nan"), gl.max(largest, 0))
        slots = walk.lines * HOW.subtiles
        at_top = (
            (gl.cast(b, gl.int64) * heads + h) * (HOW.consumers * slots) + HOW.consumers * slot + W
        )
        gl.store(top + at_top, largest, mask=slot >= 0)
    shrink = gl.full([ROWS], 1.0, gl.float32, layout=gl.SliceLayout(1, acc_layout(HOW.block)))
    if sink is not None:
        s = gl.load(sink + h).to(gl.float32) * LOG2E
        before = m
        m = gl.maximum(m, s)
        base = gl.where(m == float("-inf"), 0.0, m)
        shrink = gl.exp2(before - base)
        l = l * shrink + gl.exp2(s - base)
    gl.store(lse + head + first + i, (m + gl.log2(l)) * LN2, mask=live)
    acc = scale_rows(acc, shrink / gl.where(l == 0.0, 1.0, l))  # a query that sees nothing gets 0
    if wide_out is None:
        store(acc, out, b, h, first + W * ROWS, o_smem, W)
    else:
        store_wide(acc, wide_out + (head + first) * dv, i, live, dv)


@gluon.jit
def store(acc, out, b, h, row, o_smem, W: gl.constexpr):
    """Through shared memory to the rows of one head that there are."""
    column = 0
    tma_store_wait(0)  # of the rank before, from the same place
    for n in gl.static_range(len(acc)):
        if acc[n].shape[1] == o_smem[n].shape[2]:
            o_smem[n].index(W).store(acc[n].to(o_smem[n].dtype))
        else:  # one half after the other
            half, other = split_halves(acc[n])
            o_smem[n].index(W).store(half.to(o_smem[n].dtype))
            fence_async_shared()
            tma_store(out[n], [b, h, row, 0], o_smem[n].index(W))
            column += o_smem[n].shape[2]
            tma_store_wait(0)
            o_smem[n].index(W).store(other.to(o_smem[n].dtype))
    fence_async_shared()
    for n in gl.static_range(len(acc)):
        tma_store(out[n], [b, h, row, column], o_smem[n].index(W))
        column += o_smem[n].shape[2]


@gluon.jit
def store_wide(acc, to, i, live, dv):
    """In float32, straight from registers: four threads write 32 bytes of a row."""
    column = 0
    for n in gl.static_range(len(acc)):
        rows = row_vector(i, acc[n].shape[1])[:, None]
        there = row_vector(live, acc[n].shape[1])[:, None]
        columns = (
            column
            + gl.arange(0, acc[n].shape[1], layout=gl.SliceLayout(0, acc_layout(acc[n].shape[1])))[
                None, :
            ]
        )
        gl.store(to + rows * dv + columns, acc[n], mask=there & (columns < dv))
        column += acc[n].shape[1]
