"""The forward's epilogue: normalise O, and store out, lse and what else is asked for."""

from ..device.gluon_compat import fence_async_shared, gl, gluon, tma_store, tma_store_wait
from ..device.mma import (
    LN2,
    LOG2E,
    LOG_0,
    ROWS,
    acc_layout,
    moved_moment,
    propagate_nan,
    row_vector,
    scale_rows,
    split_halves,
)
from ..device.pipeline import consumer_release
from ..device.work_tile import WARPGROUP, read_fwd_tile, read_part
from .combine import Partial, combine_parts


@gluon.jit
def epilogue(acc, state, previous, SCORE: gl.constexpr, CONFIG: gl.constexpr):
    """Store a work tile (`previous`) whose softmax is complete. The rows of a sentinel tile all lie
    past the end, so nothing of it is stored. Its fields are read again here, to have been in no
    registers until now.

    - `acc`: O; `state`: its `SoftmaxState`.
    """
    m, l, moment, max_s = state.m, state.l, state.moment, state.max_s
    rows, smem, rings, outputs = previous.rows, previous.smem, previous.rings, previous.outputs
    sizes, schedule = previous.sizes, previous.schedule
    W: gl.constexpr = CONFIG.consumer
    q_len = sizes.q_len
    tile = read_fwd_tile(smem.work, previous.work_at, WARPGROUP)
    tile_in_head, first_row = tile.tile_in_head, tile.first_row
    if CONFIG.stream_k:
        part = read_part(smem.work, previous.work_at, WARPGROUP)
        acc, m, l, moment, max_s = combine_parts(
            Partial(acc, m, l, moment, max_s), part.share, part.earlier_parts, rows,
            outputs.partials, outputs.counter, CONFIG,
        )  # fmt: skip
        # Where another CTA combines the parts, this one stores nothing, as of a sentinel tile.
        tile_in_head = gl.where(part.earlier_parts < 0, -1, tile_in_head)
        first_row = gl.where(part.earlier_parts < 0, q_len, first_row)
    consumer_release(rings.work, previous.work_at)
    if CONFIG.slope_mma:
        m = m + previous.row_log2
    live = first_row + rows < q_len
    head = gl.cast(tile.batch, gl.int64) * sizes.heads + tile.head  # of all batch rows
    head_row = head * q_len  # in a tensor of a number per row
    if outputs.row_max is not None:
        row_max = outputs.row_max + head_row + first_row + rows
        gl.store(row_max, propagate_nan(m * LN2, l), mask=live)
    if outputs.max_logit is not None:
        if SCORE is None:
            max_s = m * LN2  # S is T
        max_s = gl.where(live, propagate_nan(max_s, l), float("-inf"))
        has_nan = gl.max((max_s != max_s).to(gl.int32), 0)
        largest = gl.where(has_nan > 0, float("nan"), gl.max(max_s, 0))
        tiles = (schedule.tile_rows >> 2) * CONFIG.subtiles  # of a head
        part_idx = head * (CONFIG.consumers * tiles) + CONFIG.consumers * tile_in_head + W
        gl.store(outputs.max_logit + part_idx, largest, mask=tile_in_head >= 0)
    scale = gl.full([ROWS], 1.0, gl.float32, layout=gl.SliceLayout(1, acc_layout(CONFIG.block)))
    if outputs.sink is not None:
        sink = gl.load(outputs.sink + tile.head).to(gl.float32) * LOG2E
        previous_m = m
        m = gl.maximum(m, sink)
        base = gl.where(m == float("-inf"), 0.0, m)
        scale = gl.exp2(previous_m - base)
        if outputs.entropy is not None:
            of_sink = gl.exp2(sink - base) * gl.maximum(sink - base, LOG_0)
            moment = (moved_moment(moment[0], l, previous_m - base, scale) + of_sink,)
        l = l * scale + gl.exp2(sink - base)
    gl.store(outputs.lse + head_row + first_row + rows, (m + gl.log2(l)) * LN2, mask=live)
    if outputs.entropy is not None:
        seen = gl.where(l == 0.0, 1.0, l)
        entropy = (gl.log2(seen) - moment[0] / seen) * LN2
        entropy = gl.where(entropy < 0.0, 0.0, entropy)
        gl.store(outputs.entropy + head_row + first_row + rows, entropy, mask=live)
    if previous.dropout is not None:
        scale = scale * previous.dropout.factor
    acc = scale_rows(acc, scale / gl.where(l == 0.0, 1.0, l))  # a query that sees nothing gets 0
    if outputs.wide_out is None:
        store_out(acc, outputs.out, tile.batch, tile.head, first_row + W * ROWS, smem.out, W)
    else:
        out = outputs.wide_out + (head_row + first_row) * sizes.dv
        store_wide_out(acc, out, rows, live, sizes.dv)


@gluon.jit
def store_out(acc, out, b, h, row, o_smem, W: gl.constexpr):
    """Store out through shared memory, by TMA, which writes the rows of the head that exist. Where
    shared memory holds half the columns, store one half after the other."""
    column = 0
    tma_store_wait(0)  # of the work tile before, from the same buffer
    for n in gl.static_range(len(acc)):
        if acc[n].shape[1] == o_smem[n].shape[2]:
            o_smem[n].index(W).store(acc[n].to(o_smem[n].dtype))
        else:
            left, right = split_halves(acc[n])
            o_smem[n].index(W).store(left.to(o_smem[n].dtype))
            fence_async_shared()
            tma_store(out[n], [b, h, row, 0], o_smem[n].index(W))
            column += o_smem[n].shape[2]
            tma_store_wait(0)
            o_smem[n].index(W).store(right.to(o_smem[n].dtype))
    fence_async_shared()
    for n in gl.static_range(len(acc)):
        tma_store(out[n], [b, h, row, column], o_smem[n].index(W))
        column += o_smem[n].shape[2]


@gluon.jit
def store_wide_out(acc, out, rows, live, dv):
    """Store out in float32, straight from registers: four threads write 32 bytes of a row."""
    column = 0
    for n in gl.static_range(len(acc)):
        _store_wide_piece(acc[n], out, rows, live, dv, column)
        column += acc[n].shape[1]


@gluon.jit
def _store_wide_piece(acc, out, rows, live, dv, column):
    WIDTH: gl.constexpr = acc.shape[1]
    rows = row_vector(rows, WIDTH)[:, None]
    live = row_vector(live, WIDTH)[:, None]
    columns = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, acc_layout(WIDTH)))[None, :]
    gl.store(out + rows * dv + columns, acc, mask=live & (columns < dv))
