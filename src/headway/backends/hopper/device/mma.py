"""Tiles: their layouts, TMA loads, warpgroup MMAs (WGMMA) and scores.

A head dimension that is no power of two is held as two **pieces**: 96 is 64 + 32, 192 is 128 + 64.
The descriptors, the buffers and the accumulator of a matrix are always tuples of one or two pieces.
"""

from ...gpu import precision
from .gluon_compat import gl, gluon, mbarrier, tma_load, warpgroup_mma, warpgroup_mma_wait
from .pipeline import advance, producer_acquire

LOG2E, LN2 = gl.constexpr(precision.LOG2E), gl.constexpr(precision.LN2)
ROWS = gl.constexpr(64)  # of one WGMMA: what a consumer multiplies at a time


# -- layouts --------------------------------------------------------------------------------------


@gluon.constexpr_function
def acc_layout(columns):
    """Return the layout of a 64 x columns accumulator of one warpgroup."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.constexpr_function
def lhs_layout(columns):
    """Return the layout of the left operand in registers, for such an accumulator."""
    return gl.DotOperandLayout(operand_index=0, parent=acc_layout(columns), k_width=2)


@gluon.constexpr_function
def matrix_layout(layout):
    """Return the shared-memory layout of a matrix, from that of a descriptor of (batch, head, row,
    column)."""
    return gl.NVMMASharedLayout(
        swizzle_byte_width=layout.swizzle_byte_width,
        element_bitwidth=layout.element_bitwidth,
        rank=2,
    )


# -- tiles in pieces ------------------------------------------------------------------------------


@gluon.jit
def pieces(a, b):
    """Return the pieces that exist, of two descriptors or None."""
    if a is None:
        return ()
    elif b is None:
        return (a,)
    else:
        return (a, b)


@gluon.jit
def alloc_stages(STAGES: gl.constexpr, descs):
    """Allocate shared memory for `STAGES` blocks of each descriptor."""
    if len(descs) == 1:
        return (_buffer(STAGES, descs[0]),)
    else:
        return (_buffer(STAGES, descs[0]), _buffer(STAGES, descs[1]))


@gluon.jit
def _buffer(STAGES: gl.constexpr, desc):
    shape: gl.constexpr = [STAGES, desc.block_shape[2], desc.block_shape[3]]
    return gl.allocate_shared_memory(desc.dtype, shape, matrix_layout(desc.layout))


@gluon.jit
def tma_load_pieces(descs, b, h, row, bar, smem, n):
    """Issue TMA loads of the rows of one head, from `row` on, into buffer n of every piece."""
    column = 0
    for i in gl.static_range(len(descs)):
        tma_load(descs[i], [b, h, row, column], bar, smem[i].index(n))
        column += smem[i].shape[2]


@gluon.jit
def produce_rows(
    cursor, target, b, h, row,
    BUFFERS: gl.constexpr, STAGES: gl.constexpr, BARRIERS: gl.constexpr = None,
    FIRST: gl.constexpr = 0,
):  # fmt: skip
    """Acquire a stage and load the rows of one head into it, from `row` on.

    - `target`: descriptors, shared memory and ring.
    - `BUFFERS`: of a stage; `FIRST`: the first one of stage 0; `BARRIERS`: of the ring.

    **Returns:** the cursor of the next stage.
    """
    descs, smem, ring = target
    producer_acquire(ring, cursor, BARRIERS)
    full = ring.full.index(cursor.stage)
    mbarrier.expect(full, tx_bytes(smem, BUFFERS))
    for n in gl.static_range(BUFFERS):
        buffer = FIRST + BUFFERS * cursor.stage + n
        tma_load_pieces(descs, b, h, row + n * smem[0].shape[1], full, smem, buffer)
    return advance(cursor, STAGES)


@gluon.constexpr_function
def tx_bytes(smem, count):
    """Return the bytes that TMA writes to `count` buffers of 16-bit pieces, zeros past the end
    included."""
    return sum(2 * count * x.shape[1] * x.shape[2] for x in smem)


@gluon.jit
def wgmma_abt(a, b, zero):
    """Issue a bᵀ, summed over the pieces; b in shared memory, a there or in registers."""
    s = warpgroup_mma(a[0], b[0].permute((1, 0)), zero, use_acc=False, is_async=True)
    if len(a) == 2:
        s = warpgroup_mma(a[1], b[1].permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def at_stage(smem, n):
    """Return buffer n of every piece."""
    if len(smem) == 1:
        return (smem[0].index(n),)
    else:
        return (smem[0].index(n), smem[1].index(n))


@gluon.jit
def zero_acc(ROWS: gl.constexpr, smem):
    """Return a zero accumulator, with pieces as wide as those of smem."""
    if len(smem) == 1:
        return (_zeros(ROWS, smem[0].shape[2]),)
    else:
        return (_zeros(ROWS, smem[0].shape[2]), _zeros(ROWS, smem[1].shape[2]))


@gluon.jit
def _zeros(ROWS: gl.constexpr, WIDTH: gl.constexpr):
    return gl.full([ROWS, WIDTH], 0.0, gl.float32, layout=acc_layout(WIDTH))


@gluon.jit
def wgmma_ab(acc, p, x):
    """Issue acc + p x, by pieces; p in registers, x in shared memory."""
    a = warpgroup_mma(p, x[0], acc[0], is_async=True)
    if len(x) == 1:
        return (a,)
    else:
        p1 = gl.convert_layout(p, lhs_layout(x[1].shape[1]))
        return (a, warpgroup_mma(p1, x[1], acc[1], is_async=True))


@gluon.jit
def wgmma_wait(acc, p, OUTSTANDING: gl.constexpr):
    """Wait until at most `OUTSTANDING` WGMMAs are in flight. **Returns:** acc, complete if it was
    issued before those; the registers of its operand p stay as they are until then."""
    if len(acc) == 1:
        a, _ = warpgroup_mma_wait(OUTSTANDING, deps=[acc[0], p])
        return (a,)
    else:
        a, b, _ = warpgroup_mma_wait(OUTSTANDING, deps=[acc[0], acc[1], p])
        return (a, b)


@gluon.jit
def split_halves(x):
    """Return the left and the right half of the columns, each in the layout of its width."""
    HALF: gl.constexpr = x.shape[1] // 2
    a, b = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, HALF]), [0, 2, 1]))
    return gl.convert_layout(a, acc_layout(HALF)), gl.convert_layout(b, acc_layout(HALF))


@gluon.jit
def row_vector(x, COLUMNS: gl.constexpr):
    """Convert a row vector to the row layout of a 64 x COLUMNS accumulator."""
    return gl.convert_layout(x, gl.SliceLayout(1, acc_layout(COLUMNS)))


@gluon.jit
def join_halves(a, b):
    """Join the halves of `split_halves`."""
    WIDTH: gl.constexpr = 2 * a.shape[1]
    x = gl.reshape(gl.permute(gl.join(a, b), [0, 2, 1]), [a.shape[0], WIDTH])
    return gl.convert_layout(x, acc_layout(WIDTH))


@gluon.jit
def slice_rows(tiles, SPAN: gl.constexpr):
    """Return rows of every piece; `SPAN`: the first row, and how many."""
    if SPAN[1] == tiles[0].shape[0]:
        return tiles
    elif len(tiles) == 1:
        return (tiles[0].slice(SPAN[0], SPAN[1], dim=0),)
    else:
        a, b = tiles
        return a.slice(SPAN[0], SPAN[1], dim=0), b.slice(SPAN[0], SPAN[1], dim=0)


@gluon.jit
def materialize(x):
    """Return x, in registers as pairs of 16 bits. The compiler cannot see where they come from, so
    it keeps them alive, and not the float32 that they were rounded from."""
    return gl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=2)


@gluon.jit
def upcast(x):
    """Return x in float32. bfloat16 is the upper half of float32; left alone, ptxas splits pairs
    first and needs twice the instructions."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            _HALVES, "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2
        )  # fmt: skip
    else:
        return x.to(gl.float32)


_HALVES = gl.constexpr(
    "{ .reg .b32 low, high; shl.b32 low, $2, 16; and.b32 high, $2, 0xffff0000; "
    "mov.b32 $0, low; mov.b32 $1, high; }"
)


@gluon.jit
def add_acc(acc, other):
    """Return the sum of two accumulators, by pieces."""
    if len(acc) == 1:
        return (acc[0] + other[0],)
    else:
        return (acc[0] + other[0], acc[1] + other[1])


@gluon.jit
def scale_rows(acc, factor):
    """Multiply every piece by a row vector."""
    a = acc[0] * row_vector(factor, acc[0].shape[1])[:, None]
    if len(acc) == 1:
        return (a,)
    else:
        return (a, acc[1] * row_vector(factor, acc[1].shape[1])[:, None])


@gluon.jit
def broadcast_row(x, like):
    """Repeat a column vector in every row: an accumulator to start from, shaped as `like`."""
    return gl.broadcast(x[None, :], like)[0]


# -- entropy --------------------------------------------------------------------------------------

# Stands for the logarithm of 0, since 0 times -inf is NaN.
LOG_0 = gl.constexpr(precision.LOG_0)


@gluon.jit
def moved_moment(moment, l, shift, factor):
    """Return the row sums of x exp2(x), where `shift` is added to all x.

    - `l`: row sums of exp2(x); `factor`: exp2(shift).
    """
    return factor * (moment + l * gl.maximum(shift, LOG_0))


@gluon.jit
def log2_of(p):
    """Return log2(P) in one instruction, -126 where P is less; error at most 2^-22 (PTX ISA,
    lg2.approx.ftz.f32)."""
    p = gl.maximum(p, 2.0**-126)
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [p], dtype=gl.float32, is_pure=False, pack=1
    )  # fmt: skip


# -- scores ---------------------------------------------------------------------------------------


@gluon.jit
def first_position(pos, stride, offset, b, n, length, CONFIG: gl.constexpr):
    """Return the global position of row n, the first of a block, if those of the others follow it;
    else a number that nobody uses."""
    if pos is None:
        return gl.cast(offset, CONFIG.index_type) + n
    elif CONFIG.straight:
        ptr = pos + gl.cast(b, gl.int64) * stride + n
        return gl.cast(gl.load(ptr, mask=n < length, other=0), CONFIG.index_type)
    else:
        return gl.cast(0, CONFIG.index_type)


@gluon.jit
def positions(pos, stride, first, b, n, span, length, CONFIG: gl.constexpr):
    """Return global positions of the rows `n + span`, which follow `first` of row n or are read."""
    if pos is None or CONFIG.straight:
        return first + span
    else:
        ptr = pos + gl.cast(b, gl.int64) * stride + (n + span)
        return gl.load(ptr, mask=n + span < length, other=0).to(CONFIG.index_type)


@gluon.jit
def apply_score(
    s, scale, b, h, q_idx, kv_idx, score_args, SCORE: gl.constexpr, POSITIVE: gl.constexpr
):
    """Apply the score. **Returns:** t, `scale_log2` and S, where t times `scale_log2` is T over
    log 2: exp(T) = exp2(t scale_log2).

    Without a score t is q kᵀ, and a positive scale does not change which t is largest. The scale
    then stays in `scale_log2`, where it costs nothing. (A scale of 0 would make NaN of 0 times
    -inf.)
    """
    if SCORE is None and POSITIVE:
        t = s
        scale_log2 = scale * LOG2E
    else:
        s = s * scale
        t = s
        scale_log2 = gl.to_tensor(LOG2E)
        if SCORE is not None:
            t = SCORE(s, b, h, q_idx, kv_idx, score_args)
    return t, scale_log2, s


@gluon.jit
def propagate_nan(x, l):
    """Return a row maximum x, or NaN where the row sum l is NaN, which a maximum skips."""
    return gl.where((l != l) & (x != float("inf")), float("nan"), x)
