"""What the two backward kernels share: the loader, P and its derivatives, and what follows them."""

import triton.language as tl

import triton

from ..device.affine_score import affine_exponent
from ..device.gluon_compat import gl, gluon, mbarrier, tma_load, warpgroup_mma
from ..device.hoisted import (
    Rows,
    affine_operands,
    evaluate_mask,
    hoist_columns,
    hoist_layout,
    hoist_rows,
)
from ..device.mma import (
    LOG2E,
    acc_layout,
    positions,
    produce_rows,
    tma_load_pieces,
    tx_bytes,
    upcast,
)
from ..device.pipeline import advance, producer_acquire
from ..device.relative_bias import load_bias, locate_bias
from ..device.work_tile import visit_q_blocks

DO_STAGES = gl.constexpr(2)
# How 256 numbers lie in a warpgroup's registers, in the order of `in_order`.
ORDER = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [2, 2], [1, 0]))


# -- the loader -----------------------------------------------------------------------------------


@gluon.jit
def load(state, inputs, smem, rings, at, runs, sizes, walk, HOW: gl.constexpr):
    """Copy the blocks of queries of every head of a rank, and its keys and values. These come after
    the first block, which has a place while the rank before still needs its own keys."""
    q, k, v, dout, lse, less_delta = inputs
    kv_at, q_at, do_at = state
    k_smem, v_smem, q_smem, do_smem, lse_smem, dlt_smem = smem
    k_ring, v_ring, q_ring, do_ring = rings
    line, _, first, h, b, share, group = at
    heads, q_len, q_rows, _ = sizes
    keys = ((k, k_smem, k_ring), ((v,), (v_smem,), v_ring), b, h // group, first)
    state = (q_at, do_at, kv_at, gl.to_tensor(True))
    for n in range(share):
        given = (q, dout, lse, less_delta, q_smem, do_smem, lse_smem, dlt_smem, q_ring, do_ring,
                 b, h + n, (b * heads + h + n) * q_rows, keys)  # fmt: skip
        state = visit_q_blocks(
            state, given, walk, line, runs, q_len, 0, load_block, None, None, None, HOW
        )
    q_at, do_at, kv_at, _ = state
    return kv_at, q_at, do_at


@gluon.jit
def load_block(
    state, given, n, more, PARTIAL: gl.constexpr,
    DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Copy the rows of queries from n on, and what belongs to them; after the first ones the keys
    and values."""
    (
        q, dout, lse, less_delta, q_smem, do_smem, lse_smem, dlt_smem, q_ring, do_ring, b, h, row0,
        keys,
    ) = given  # fmt: skip
    q_at, do_at, kv_at, is_first = state
    producer_acquire(q_ring, q_at, HOW.q_barriers())
    full = q_ring[0].index(q_at[0])
    mbarrier.expect(full, tx_bytes(q_smem, 1) + 4 * HOW.block)
    tma_load_pieces(q, b, h, n, full, q_smem, q_at[0])
    tma_load(lse, [row0 + n], full, lse_smem.index(q_at[0]))
    producer_acquire(do_ring, do_at, HOW.do_barriers())
    full = do_ring[0].index(do_at[0])
    mbarrier.expect(full, tx_bytes((do_smem,), 1) + 4 * HOW.block)
    tma_load(dout, [b, h, n, 0], full, do_smem.index(do_at[0]))
    tma_load(less_delta, [row0 + n], full, dlt_smem.index(do_at[0]))
    if is_first:
        of_k, of_v, kb, kh, first = keys
        TILES: gl.constexpr = of_v[1][0].shape[0]
        produce_rows(kv_at, of_k, kb, kh, first, TILES, 1)
        kv_at = produce_rows(kv_at, of_v, kb, kh, first, TILES, 1)
    return advance(q_at, HOW.stages), advance(do_at, DO_STAGES), kv_at, gl.to_tensor(False)


# -- whose turn it is (bwd/dq_semaphore.py) --------------------------------------------------------


@gluon.jit
def turn_of(turns, line, slot, tile, HOW: gl.constexpr):
    """The turn of this CTA at a block of the tile that is the tile-th of its line."""
    if turns is None:
        return gl.to_tensor(0)
    elif len(turns) == 1:
        return line
    else:
        of_line = gl.load(turns.turn + gl.load(turns.first + line) + tile)
        return of_line * HOW.subtiles + slot % HOW.subtiles


@gluon.jit
def counter_of(turns, row, n):
    """Who counts those that have added the n-th part of the queries from `row` on."""
    return turns.added + row // 64 * 4 + n


# -- of both kernels ------------------------------------------------------------------------------


@gluon.jit
def of_keys(kv_idx, first, of_head, coords, bands, of_score, of_mask, HOW: gl.constexpr):
    """What score and mask read of the keys of a rank, of which the first is told."""
    h, b = of_head
    b_idx, h_idx = gl.cast(coords.b, HOW.index_type) + b, gl.cast(coords.h, HOW.index_type) + h
    rows = hoist_rows(b_idx, h_idx, kv_idx, of_score, of_mask, False, HOW)
    return Rows(rows.score, rows.mask, locate_bias(bands, b, h, first))


@gluon.jit
def of_queries(
    n, of_head, rows, q_len, coords, of_score, of_mask, PARTIAL: gl.constexpr, HOW: gl.constexpr
):
    """What score and mask read of the queries from n on."""
    h, b = of_head
    i = n + gl.arange(0, HOW.block, layout=hoist_layout())
    at = positions(coords.q_pos, coords.q_stride, coords.q, b, i, i < q_len, HOW.index_type)
    b_idx, h_idx = gl.cast(coords.b, HOW.index_type) + b, gl.cast(coords.h, HOW.index_type) + h
    return hoist_columns(b_idx, h_idx, at, rows, of_score, of_mask, False, PARTIAL, HOW)


@gluon.jit
def probabilities(
    s, lse, n, z, kv_idx, live, of_head, rows, columns, q_len, scale, coords, of_score, of_mask,
    PARTIAL: gl.constexpr, DERIVATIVE: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Pᵀ of the queries from n on, Pᵀ times the score's derivative (but where that is a number for
    all, HOW.steady: `rate` has it), all that DERIVATIVE gives, and which pairs they are, with S.

    - `rows`, `columns`: from `of_keys` and `of_queries`.
    - `z`: a 0 that the compiler does not know. It keeps LLVM from holding the distances of all
      pairs of a tile in registers.
    """
    cols: gl.constexpr = gl.SliceLayout(0, acc_layout(HOW.block))
    h, b = of_head
    i = n + gl.arange(0, HOW.block, layout=cols)
    in_rows = i < q_len
    q_idx = positions(coords.q_pos, coords.q_stride, coords.q, b, i, in_rows, HOW.index_type)
    kv_idx += z
    b_idx = gl.cast(coords.b, HOW.index_type) + b
    h_idx = gl.cast(coords.h, HOW.index_type) + h
    first = gl.cast(coords.q, HOW.index_type) + n
    if DERIVATIVE is None:
        by = ()
        p = gl.exp2(s * (scale * LOG2E) - lse[None, :])
    elif HOW.affine is None:
        s = s * scale
        if HOW.relative_biases > 0:
            of_score = of_score + (load_bias(rows.bias, n, HOW.block),)  # noqa: RUF005
        by = DERIVATIVE(s, b_idx, h_idx, q_idx[None, :], kv_idx[:, None], of_score)
        p = gl.exp2(by[0] * LOG2E - lse[None, :])
    else:
        of_linear = affine_operands(of_score, rows, columns, False, HOW.block, HOW)
        t = affine_exponent(s, scale, lse, b_idx, h_idx, q_idx, kv_idx, first, of_linear, HOW)
        p = gl.exp2(t)
        s = s * scale
        by = DERIVATIVE(s, b_idx, h_idx, q_idx[None, :], kv_idx[:, None], of_score)
    if PARTIAL and MASK is not None:
        kept_pairs = evaluate_mask(
            p, b_idx, h_idx, q_idx, kv_idx, first, rows, columns, of_mask, False, MASK, HOW
        )
        p = gl.where(kept_pairs, p, 0.0)
    q_idx, kv_idx = q_idx[None, :], kv_idx[:, None]
    if not HOW.even_kv:
        p = gl.where(live[:, None], p, 0.0)
    if HOW.constant_dscore:  # noqa: SIM108
        by_s = p
    else:
        by_s = weighted(p, by[1], HOW.unbounded_dscore)
    return p, by_s, by, (s, b_idx, h_idx, q_idx, kv_idx)


@gluon.jit
def outer_v(v, dout, before, ADD: gl.constexpr):
    """Issue dPᵀ."""
    return warpgroup_mma(v, dout.permute((1, 0)), before, use_acc=ADD, is_async=True)


@gluon.jit
def weighted(p, by, UNBOUNDED: gl.constexpr):
    """P times a derivative; where P is 0 a derivative may be anything and counts nothing."""
    if UNBOUNDED:
        return gl.where(p == 0.0, 0.0, p * by)
    else:
        return p * by


@gluon.jit
def factors(by_s, STEADY: gl.constexpr):
    """P times the derivative, or P alone (STEADY), which may have been rounded, in float32.
    (`upcast` saves 7 % of a block's instructions. Timed on an H200: 64 wide takes 0.94 of the time
    behind a causal mask, 192 wide 0.96 without one. Of what is not P itself, ptxas runs out of
    registers at 192.)"""
    if STEADY:
        return upcast(by_s)
    else:
        return by_s.to(gl.float32)


@gluon.jit
def others(p, by, e, UNBOUNDED: gl.constexpr):
    """dT times the derivative by every gathered value that wants a gradient."""
    values = (weighted(p, by[2], UNBOUNDED) * e,)
    for n in gl.static_range(3, len(by)):
        values = values + (weighted(p, by[n], UNBOUNDED) * e,)  # noqa: RUF005
    return values


@gluon.jit
def in_order(x):
    """64 rows of a product as rows of 256 numbers in the order of registers: 4 adjacent ones per
    thread, threads adjacent. `finish` knows the order."""
    EIGHTS: gl.constexpr = x.shape[1] // 8
    x = x.reshape([4, 2, 8, EIGHTS, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return x.reshape([2 * EIGHTS, 256])


@gluon.jit
def in_rows(x):
    """Such rows of 256 numbers as the 64 rows of a product again."""
    EIGHTS: gl.constexpr = x.shape[0] // 2
    x = x.reshape([EIGHTS, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5))
    return x.reshape([64, 8 * EIGHTS])


@gluon.jit
def write(x, to, row, length, width, column):
    """In float32, straight from registers, the columns from `column` on."""
    rows = row + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, acc_layout(x.shape[1])))
    columns = column + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, acc_layout(x.shape[1])))
    inside = (rows < length)[:, None] & (columns < width)[None, :]
    gl.store(to + rows.to(gl.int64)[:, None] * width + columns[None, :], x, mask=inside)


# -- after ----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["q_len", "q_rows", "d"])
def finish(parts, dq, rate, q_len, q_rows, d, STRIPS: tl.constexpr):
    """dq from its 64 x 64 chunks, which lie in the order of registers."""
    chunk = tl.cast(tl.program_id(0), tl.int64)
    x = tl.load(parts + chunk * 4096 + tl.arange(0, 4096))
    # In a chunk: column / 8, warp, row % 8, lane % 4, half of 16 rows, column % 2.
    x = tl.reshape(x, [8, 4, 8, 4, 2, 2])
    x = tl.reshape(tl.permute(x, [1, 4, 2, 0, 3, 5]), [64, 64]) * rate
    row = chunk // STRIPS * 64
    head = row // q_rows
    i = row % q_rows + tl.arange(0, 64)
    j = chunk % STRIPS * 64 + tl.arange(0, 64)
    to = dq + (head * q_len + i[:, None]) * d + j[None, :]
    tl.store(to, x.to(dq.dtype.element_ty), mask=(i < q_len)[:, None] & (j < d)[None, :])
