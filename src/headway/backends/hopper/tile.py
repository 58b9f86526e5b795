"""What the forward and the backward share: which tile a CTA works on, which blocks of the other
side it visits, products in pieces, and scores.

A width that is no power of two is held as two pieces: 96 is 64 + 32, 192 is 128 + 64. `Pieces` of a
tensor are a tuple of one or two; a descriptor, a buffer or an accumulator is never anything else.
"""

from .gluon_api import copy_in, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from .pipeline import acquire, publish, step

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
TOLD = gl.constexpr(4)  # stages of the channel of work: a rank, the one before, and ahead
ROWS = gl.constexpr(64)  # of a consumer of the forward: what one warpgroup multiplies at a time
# The numbers of a rank of the forward, at most: its tile of out (-1: a ghost), first row, head,
# batch row, first block, head of the keys, with which block to ask for one more rank (0: with
# none), and, from RUNS on, its runs (`visit_rank`).
NUMBERS = gl.constexpr(15)
RUNS = gl.constexpr(7)


# -- which tile, and which blocks -----------------------------------------------------------------


@gluon.jit
def place(rank, walk, heads, SUB: gl.constexpr, ROWS: gl.constexpr):
    """The work of a rank: its line of the block mask, its number among the tiles of its head, first
    row, head, batch row. Ranks of some heads follow one another, longest line first."""
    if walk.full is None:  # noqa: SIM108
        ranks = walk.lines
    else:
        ranks = walk.lines * walk.b * walk.h * SUB
    several = ranks * walk.near
    turn = rank % several
    rest = rank // several
    rank = turn // walk.near
    if walk.full is None:
        line = rank
        slot = rank
        first = rank * ROWS
        h = rest % (heads // walk.near) * walk.near + turn % walk.near
        b = rest // (heads // walk.near)
    else:
        line = gl.load(walk.order + rank // SUB)
        tile = line % walk.lines
        slot = tile * SUB + rank % SUB
        first = tile * walk.size + rank % SUB * ROWS
        # What the mask does not tell apart, the rest of the rank does.
        free = walk.h == 1
        of_mask = line // walk.lines
        turns = heads // walk.near
        h = gl.where(free, rest % turns * walk.near + turn % walk.near, of_mask % walk.h)
        rest = gl.where(free, rest // turns, rest)
        b = gl.where(walk.b == 1, rest, of_mask // walk.h)
    return line, slot, first, h, b


@gluon.jit
def tell(at, work_smem, ring, work):
    """Write down what a rank is, so that the other partitions need not work it out."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    acquire(ring, at)
    for n in gl.static_range(len(work)):
        number = gl.full([1], work[n], gl.int32, layout=one)
        work_smem.index(at[0] * NUMBERS + n).store(number)
    publish(ring, at)
    return step(at, TOLD)


@gluon.jit
def told(work_smem, at, FROM: gl.constexpr, TO: gl.constexpr, WARPS: gl.constexpr):
    """Some numbers of a rank, as `tell` wrote them; WARPS: of the partition that asks."""
    work = ()
    for n in gl.static_range(FROM, TO):
        work = work + (_number(work_smem, at[0] * NUMBERS + n, WARPS),)  # noqa: RUF005
    return work


@gluon.jit
def _number(work_smem, n, WARPS: gl.constexpr):
    return gl.max(work_smem.index(n).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def numbers():
    """Shared memory for what `tell` writes."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    return gl.allocate_shared_memory(gl.int32, [TOLD * NUMBERS, 1], layout)


@gluon.jit
def _stretch(runs, run, there, walk, length, BLOCK: gl.constexpr):
    """First row and number of blocks of a run; the first tile where it is not `there`."""
    start = gl.load(runs[1] + run, mask=there, other=0)
    count = gl.load(runs[2] + run, mask=there, other=1)
    return _rows(start, count, walk, length, BLOCK)


@gluon.jit
def _rows(start, count, walk, length, BLOCK: gl.constexpr):
    """First row and number of blocks of some tiles."""
    first = start * walk.step
    end = gl.minimum(first + count * walk.step, length)
    return first, (end - first + BLOCK - 1) // BLOCK


@gluon.jit
def _from_full(runs, HOW: gl.constexpr):
    """1 where the block that is visited first is not of a partial tile (`ranks.table`), else 0."""
    if HOW.even:
        return gl.where(runs[5] == 0, 1, 0)
    else:
        return gl.where((runs[1] > 0) | (runs[5] == 0), 1, 0)


@gluon.jit
def visit_rank(
    state, given, walk, row, runs, length, FIRST: gl.constexpr,
    BODY: gl.constexpr, SCORE: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """`BODY(state, given, row, PARTIAL)` on every live block of a line: the first one, at `row`, as
    if it were partial (only where FIRST), then partial ones, then full ones, those of a run from
    the last to the first. `runs`: the last numbers of a rank (`ranks.table`); without a block mask,
    how many blocks there are."""
    BLOCK: gl.constexpr = HOW.block
    if walk.full is None:
        if FIRST:
            state = BODY(state, given, row, True, SCORE, MASK, HOW)
        for i in range(1, runs[0]):
            state = BODY(state, given, (runs[0] - 1 - i) * BLOCK, False, SCORE, MASK, HOW)
    else:
        f1, runs_f, start_f, count_f, p1, runs_p, start_p, count_p = runs
        from_full = _from_full(runs, HOW)
        full = (walk.full, f1, runs_f, start_f, count_f, 0, from_full)
        if FIRST:
            partial = (walk.partial, p1, runs_p, start_p, count_p, from_full, 0)
        else:
            partial = (walk.partial, p1, runs_p, start_p, count_p, 0, 1 - from_full)
        state = _visit_runs(state, given, walk, row, partial, length, True, BODY, SCORE, MASK, HOW)
        state = _visit_runs(state, given, walk, row, full, length, False, BODY, SCORE, MASK, HOW)
    return state


@gluon.jit
def _visit_runs(
    state, given, walk, row, runs, length, PARTIAL: gl.constexpr,
    BODY: gl.constexpr, SCORE: gl.constexpr, MASK: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """The part of `visit_rank` for full or for partial blocks: before them `more` blocks at `row`,
    and `less` of them, the last ones of the first run, left out."""
    of_kind, end, several, start, count, more, less = runs
    for r in range(0 - more, several):
        own = r >= 0
        first, blocks = _rows(start, count, walk, length, HOW.block)
        first, blocks = gl.where(own, first, row), gl.where(own, blocks, 1)
        # The next run, which is there by the time that this one ends.
        there = own & (r + 1 < several)
        next_start = gl.load(of_kind[1] + (end - 2 - r), mask=there, other=0)
        next_count = gl.load(of_kind[2] + (end - 2 - r), mask=there, other=0)
        start, count = gl.where(own, next_start, start), gl.where(own, next_count, count)
        for i in range(gl.where(r == 0, less, 0), blocks):
            at = first + (blocks - 1 - i) * HOW.block
            state = BODY(state, given, at, PARTIAL, SCORE, MASK, HOW)
    return state


@gluon.jit
def visit(
    state, given, walk, line, length, after,
    BODY: gl.constexpr, DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr,
    HOW: gl.constexpr,
):  # fmt: skip
    """`BODY(state, given, row, more, PARTIAL)` on every live block of a line: partial ones, then
    full ones, each from the first to the last; or, of a walk that is `ordered`, all from the first
    to the last. `more`: another call follows, of this line or `after`. A line with no live tile
    gets its first, which the mask empties."""
    BLOCK: gl.constexpr = HOW.block
    if walk.full is None:
        blocks = (length + BLOCK - 1) // BLOCK
        for i in range(0, blocks):
            more = (i + 1 < blocks) | (after > 0)
            state = BODY(
                state, given, i * BLOCK, more, False, DERIVATIVE, SCATTER, MASK, HOW
            )  # fmt: skip
    elif HOW.ordered:
        begin = gl.load(walk.full[0] + line)
        end = gl.load(walk.full[0] + line + 1)
        for r in range(begin, end):
            after_run = (r + 1 < end) | (after > 0)
            first, blocks = _stretch(walk.partial, r, True, walk, length, BLOCK)
            first_f, blocks_f = _stretch(walk.full, r, True, walk, length, BLOCK)
            for i in range(0, blocks):
                more = (i + 1 < blocks) | (blocks_f > 0) | after_run
                state = BODY(
                    state, given, first + i * BLOCK, more, True, DERIVATIVE, SCATTER, MASK, HOW
                )  # fmt: skip
            for i in range(0, blocks_f):
                more = (i + 1 < blocks_f) | after_run
                state = BODY(
                    state, given, first_f + i * BLOCK, more, False, DERIVATIVE, SCATTER, MASK, HOW
                )  # fmt: skip
    else:
        f0 = gl.load(walk.full[0] + line)
        f1 = gl.load(walk.full[0] + line + 1)
        p0 = gl.load(walk.partial[0] + line)
        p1 = gl.load(walk.partial[0] + line + 1)
        runs = gl.where((f1 == f0) & (p1 == p0), 1, p1 - p0)
        for r in range(0, runs):
            first, blocks = _stretch(walk.partial, p0 + r, p1 > p0, walk, length, BLOCK)
            for i in range(0, blocks):
                more = (i + 1 < blocks) | (r + 1 < runs) | (f1 > f0) | (after > 0)
                state = BODY(
                    state, given, first + i * BLOCK, more, True, DERIVATIVE, SCATTER, MASK, HOW
                )  # fmt: skip
        for r in range(0, f1 - f0):
            first, blocks = _stretch(walk.full, f0 + r, f1 > f0, walk, length, BLOCK)
            for i in range(0, blocks):
                more = (i + 1 < blocks) | (f0 + r + 1 < f1) | (after > 0)
                state = BODY(
                    state, given, first + i * BLOCK, more, False, DERIVATIVE, SCATTER, MASK, HOW
                )  # fmt: skip
    return state


# -- tiles in pieces ------------------------------------------------------------------------------


@gluon.constexpr_function
def mma(columns):
    """The layout of a product of 64 rows by one warpgroup."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.constexpr_function
def left(columns):
    """The layout of a left factor in registers, for such a product."""
    return gl.DotOperandLayout(operand_index=0, parent=mma(columns), k_width=2)


@gluon.jit
def pieces(a, b):
    """Those of the two that there are."""
    if a is None:
        return ()
    elif b is None:
        return (a,)
    else:
        return (a, b)


@gluon.jit
def buffers(STAGES: gl.constexpr, descs):
    """Shared memory for what the descriptors copy, STAGES times."""
    if len(descs) == 1:
        return (_buffer(STAGES, descs[0]),)
    else:
        return (_buffer(STAGES, descs[0]), _buffer(STAGES, descs[1]))


@gluon.jit
def _buffer(STAGES: gl.constexpr, desc):
    shape: gl.constexpr = [STAGES, desc.block_shape[2], desc.block_shape[3]]
    return gl.allocate_shared_memory(desc.dtype, shape, matrix(desc.layout))


@gluon.constexpr_function
def matrix(layout):
    """The layout of a matrix, from that of a descriptor of (batch, head, row, column)."""
    return gl.NVMMASharedLayout(
        swizzle_byte_width=layout.swizzle_byte_width,
        element_bitwidth=layout.element_bitwidth,
        rank=2,
    )


@gluon.jit
def fetch(descs, b, h, row, bar, to, n):
    """Copy rows from `row` on of one head into place `n` of the pieces."""
    column = 0
    for i in gl.static_range(len(descs)):
        copy_in(descs[i], [b, h, row, column], bar, to[i].index(n))
        column += to[i].shape[2]


@gluon.constexpr_function
def bytes_of(smem, count):
    """Bytes of `count` places of the pieces: copies write all of them, zeros past the end."""
    return sum(2 * count * x.shape[1] * x.shape[2] for x in smem)


@gluon.jit
def outer(a, b, zero):
    """Issue a bᵀ over the pieces; a and b in shared memory."""
    s = warpgroup_mma(a[0], b[0].permute((1, 0)), zero, use_acc=False, is_async=True)
    if len(a) == 2:
        s = warpgroup_mma(a[1], b[1].permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def at_stage(smem, n):
    """Place n of every piece."""
    if len(smem) == 1:
        return (smem[0].index(n),)
    else:
        return (smem[0].index(n), smem[1].index(n))


@gluon.jit
def zeros(ROWS: gl.constexpr, smem):
    """An accumulator in pieces, as wide as those of smem."""
    if len(smem) == 1:
        return (_zeros(ROWS, smem[0].shape[2]),)
    else:
        return (_zeros(ROWS, smem[0].shape[2]), _zeros(ROWS, smem[1].shape[2]))


@gluon.jit
def _zeros(ROWS: gl.constexpr, WIDTH: gl.constexpr):
    return gl.full([ROWS, WIDTH], 0.0, gl.float32, layout=mma(WIDTH))


@gluon.jit
def add_product(acc, p, x):
    """Issue acc + p x, by pieces; p in registers, x in shared memory. `settle` completes it."""
    a = warpgroup_mma(p, x[0], acc[0], is_async=True)
    if len(x) == 1:
        return (a,)
    else:
        p1 = gl.convert_layout(p, left(x[1].shape[1]))
        return (a, warpgroup_mma(p1, x[1], acc[1], is_async=True))


@gluon.jit
def settle(acc, p, OUTSTANDING: gl.constexpr):
    """Wait for `add_product`; p's registers stay as they are until then."""
    if len(acc) == 1:
        a, _ = warpgroup_mma_wait(OUTSTANDING, deps=[acc[0], p])
        return (a,)
    else:
        a, b, _ = warpgroup_mma_wait(OUTSTANDING, deps=[acc[0], acc[1], p])
        return (a, b)


@gluon.jit
def halves(x):
    """The left and the right half of the columns, as products of that width."""
    HALF: gl.constexpr = x.shape[1] // 2
    a, b = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, HALF]), [0, 2, 1]))
    return gl.convert_layout(a, mma(HALF)), gl.convert_layout(b, mma(HALF))


@gluon.jit
def kept(x):
    """x, in pairs. The compiler does not see where they come from, and so keeps them and not what
    they were rounded from."""
    return gl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=2)


@gluon.jit
def widened(x):
    """x in float32. bfloat16 is its upper half, but ptxas takes pairs apart first, and needs twice
    the instructions."""
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
def times(acc, factor):
    """Every piece times a number per row."""
    a = acc[0] * gl.convert_layout(factor, gl.SliceLayout(1, mma(acc[0].shape[1])))[:, None]
    if len(acc) == 1:
        return (a,)
    else:
        by = gl.convert_layout(factor, gl.SliceLayout(1, mma(acc[1].shape[1])))
        return (a, acc[1] * by[:, None])


# -- scores ---------------------------------------------------------------------------------------


@gluon.jit
def positions(pos, stride, offset, b, index, live, INDEX: gl.constexpr):
    """Global positions of some rows: given ones, or `offset + index`."""
    if pos is None:
        return gl.cast(offset, INDEX) + index
    else:
        at = pos + gl.cast(b, gl.int64) * stride + index
        return gl.load(at, mask=live, other=0).to(INDEX)


@gluon.jit
def scores(s, scale, b, h, q_idx, kv_idx, of_score, SCORE: gl.constexpr, POSITIVE: gl.constexpr):
    """T in some unit, that unit over log 2, and S.

    Without a score, T is S, and a scale above 0 does not change which is largest: it stays in the
    unit, where it costs nothing. (A scale of 0 would make NaN of 0 times -inf.)
    """
    if SCORE is None and POSITIVE:
        t = s
        unit = scale * LOG2E
    else:
        s = s * scale
        t = s
        unit = gl.to_tensor(LOG2E)
        if SCORE is not None:
            t = SCORE(s, b, h, q_idx, kv_idx, of_score)
    return t, unit, s


@gluon.jit
def or_nan(x, l):
    """x, or NaN where the sum of a row is: a maximum skips NaN, and none shall be hidden."""
    return gl.where((l != l) & (x != float("inf")), float("nan"), x)
