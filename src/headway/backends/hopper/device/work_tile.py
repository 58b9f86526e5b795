"""What a rank is, as it is told to those who work on it, and the walk over its live blocks."""

from typing import Any, NamedTuple

from .gluon_compat import gl, gluon
from .pipeline import advance, producer_acquire, producer_commit

WORK_STAGES = gl.constexpr(4)  # stages of the channel of work: a rank, the one before, and ahead


class FwdTile(NamedTuple):
    """A work tile of the forward, as `write_work` publishes it: the queries of one CTA. The table's
    numbers of its runs follow (`visit_kv_blocks`): eight under a block mask, else how many blocks
    there are; and of a tile that stream-K may share out, what `combine_parts` needs."""

    slot: Any  # its number among the tiles of its head; -1: a sentinel tile
    first_row: Any  # of its queries
    head: Any
    batch: Any
    first_block: Any  # first row of the KV block that is visited first
    kv_head: Any
    twice_blocks: Any  # 2 * KV blocks, + 1 where the next tile is fetched before they are copied


class BwdTile(NamedTuple):
    """A work tile of the backward: the keys of one CTA. The numbers of its runs follow
    (`load_runs`)."""

    column: Any  # n_block column of the block mask
    slot: Any  # its number among the tiles of its head
    first_row: Any  # of its keys
    head: Any
    batch: Any
    first_visits: Any  # of segments (bwd/segments.py): Q blocks that it visits first, a bit each
    last_visits: Any  # and those that it visits last
    segment_block: Any  # the segment's first Q block


FWD_RUNS = gl.constexpr(len(FwdTile._fields))  # the first field behind
FWD_FIELDS = gl.constexpr(len(FwdTile._fields) + 8)
BWD_RUNS = gl.constexpr(len(BwdTile._fields))
BWD_FIELDS = gl.constexpr(len(BwdTile._fields) + 8)


@gluon.jit
def map_work_tile(rank, total, last, walk, heads, SUB: gl.constexpr):
    """Of a rank of so many: which line it is of in the order of the mask; and its head and batch
    row, where the mask does not tell them apart.

    Ranks of some heads (`walk.near`) follow one another, longest line first, then those of the next
    heads: while their keys are in the L2 cache. Under a mask the ranks of the `last` lines come
    after those of all heads: with long ones at the end some CTAs would be busy, and others not."""
    near = walk.near
    if walk.full is None:
        rest, n, turn = _swizzled(rank, walk.lines, near)
    else:
        lines = walk.lines * walk.b * walk.h * SUB
        of_line = total // lines
        first = lines - last
        after = rank - first * of_line
        if after < 0:
            rest, n, turn = _swizzled(rank, first, near)
        else:
            _, n, turn = _swizzled(after, last, of_line)
            rest, turn = turn // near, turn % near
            n += first
    turns = heads // near  # of a batch row's heads
    b = rest // turns
    h = (rest - b * turns) * near + turn
    return n, h, gl.where(walk.h == 1, b, rest)


@gluon.jit
def _swizzled(rank, lines, near):
    """Of ranks of so many lines, of which `near` follow one another: the group of heads, the line,
    and the head of the group."""
    several = lines * near
    rest = rank // several
    turn = rank - rest * several
    n = turn // near
    return rest, n, turn - n * near


@gluon.jit
def locate_tile(rank, total, last, walk, heads, SUB: gl.constexpr, ROWS: gl.constexpr):
    """The work of a rank (`dealt`): its line of the block mask, its number among the tiles of its
    head, first row, head, batch row."""
    n, h, b = map_work_tile(rank, total, last, walk, heads, SUB)
    if walk.full is None:
        return n, n, n * ROWS, h, b
    else:
        line = gl.load(walk.order + n // SUB)
        tile = line % walk.lines
        slot = tile * SUB + n % SUB
        first = tile * walk.size + n % SUB * ROWS
        of_mask = line // walk.lines
        h = gl.where(walk.h == 1, h, of_mask % walk.h)
        b = gl.where(walk.b == 1, b, of_mask // walk.h)
        return line, slot, first, h, b


@gluon.jit
def write_work(at, work_smem, ring, work):
    """Write down what a rank is, so that the other partitions need not work it out."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    COUNT: gl.constexpr = work_smem.shape[0] // WORK_STAGES
    producer_acquire(ring, at)
    for n in gl.static_range(len(work)):
        number = gl.full([1], work[n], gl.int32, layout=one)
        work_smem.index(at[0] * COUNT + n).store(number)
    producer_commit(ring, at)
    return advance(at, WORK_STAGES)


@gluon.jit
def read_work(work_smem, at, FROM: gl.constexpr, TO: gl.constexpr, WARPS: gl.constexpr):
    """Some numbers of a rank, as `tell` wrote them; WARPS: of the partition that asks."""
    COUNT: gl.constexpr = work_smem.shape[0] // WORK_STAGES
    work = ()
    for n in gl.static_range(FROM, TO):
        work = work + (_read_field(work_smem, at[0] * COUNT + n, WARPS),)  # noqa: RUF005
    return work


@gluon.jit
def _read_field(work_smem, n, WARPS: gl.constexpr):
    return gl.max(work_smem.index(n).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def work_buffer(COUNT: gl.constexpr):
    """Shared memory for what `tell` writes, so many numbers of a rank."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    return gl.allocate_shared_memory(gl.int32, [WORK_STAGES * COUNT, 1], layout)


@gluon.jit
def _rows(start, count, walk, length, BLOCK: gl.constexpr):
    """First row and number of blocks of some tiles."""
    first = start * walk.step
    end = gl.minimum(first + count * walk.step, length)
    return first, (end - first + BLOCK - 1) // BLOCK


@gluon.jit
def _from_full(runs, HOW: gl.constexpr):
    """1 where the block that is visited first is not of a partial tile (`ranks.table`), else 0."""
    if HOW.even_kv:
        return gl.where(runs[5] == 0, 1, 0)
    else:
        return gl.where((runs[1] > 0) | (runs[5] == 0), 1, 0)


@gluon.jit
def visit_kv_blocks(
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
            state = BODY(state, given, row - i * BLOCK, False, SCORE, MASK, HOW)
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
        first, blocks = _rows_of_run(of_kind, end - 1 - r, r, start, count, walk, length, HOW.block)
        first, blocks = gl.where(r >= 0, first, row), gl.where(r >= 0, blocks, 1)
        for i in range(gl.where(r == 0, less, 0), blocks):
            at = first + (blocks - 1 - i) * HOW.block
            state = BODY(state, given, at, PARTIAL, SCORE, MASK, HOW)
    return state


@gluon.jit
def visit_q_blocks(
    state, given, walk, line, runs, length, after,
    BODY: gl.constexpr, DERIVATIVE: gl.constexpr, SCATTER: gl.constexpr, MASK: gl.constexpr,
    HOW: gl.constexpr,
):  # fmt: skip
    """`BODY(state, given, row, more, PARTIAL)` on every live block of a line: partial ones, then
    full ones, each from the first to the last; or, of a walk that is `ordered`, all from the first
    to the last. `more`: another call follows, of this line or `after`. A line with no live tile
    gets its first, which the mask empties. `runs`: from `load_runs`, where somebody knows them."""
    BLOCK: gl.constexpr = HOW.block
    if walk.full is None:
        blocks = (length + BLOCK - 1) // BLOCK
        for i in range(0, blocks):
            more = (i + 1 < blocks) | (after > 0)
            state = BODY(
                state, given, i * BLOCK, more, False, DERIVATIVE, SCATTER, MASK, HOW
            )  # fmt: skip
    elif HOW.deterministic:
        begin = gl.load(walk.full[0] + line)
        end = gl.load(walk.full[0] + line + 1)
        for r in range(begin, end):
            after_run = (r + 1 < end) | (after > 0)
            first, blocks = _rows(*_run(walk.partial, r, True), walk, length, BLOCK)
            first_f, blocks_f = _rows(*_run(walk.full, r, True), walk, length, BLOCK)
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
        if len(runs) == 0:
            runs = load_runs(walk, line)
        p0, runs_p, start_p, count_p, f0, runs_f, start_f, count_f = runs
        runs_p = gl.where(runs_p + runs_f == 0, 1, runs_p)
        for r in range(0, runs_p):
            first, blocks = _rows_of_run(
                walk.partial, p0 + r, r, start_p, count_p, walk, length, BLOCK
            )
            for i in range(0, blocks):
                more = (i + 1 < blocks) | (r + 1 < runs_p) | (runs_f > 0) | (after > 0)
                state = BODY(
                    state, given, first + i * BLOCK, more, True, DERIVATIVE, SCATTER, MASK, HOW
                )  # fmt: skip
        for r in range(0, runs_f):
            first, blocks = _rows_of_run(
                walk.full, f0 + r, r, start_f, count_f, walk, length, BLOCK
            )
            for i in range(0, blocks):
                more = (i + 1 < blocks) | (r + 1 < runs_f) | (after > 0)
                state = BODY(
                    state, given, first + i * BLOCK, more, False, DERIVATIVE, SCATTER, MASK, HOW
                )  # fmt: skip
    return state


@gluon.jit
def _rows_of_run(runs, at, r, start, count, walk, length, BLOCK: gl.constexpr):
    """First row and number of blocks of the r-th run that is visited, which stands `at`; the first
    one's start and tiles are known.

    (Another is read when it begins. Read one ahead, the loop over runs would carry its count, as
    nothing but the end of the loop in it: see `rows_of` in the Triton backend's
    device/work_tile.py.)
    """
    next_start, next_count = _run(runs, at, r > 0)
    start, count = gl.where(r > 0, next_start, start), gl.where(r > 0, next_count, count)
    return _rows(start, count, walk, length, BLOCK)


@gluon.jit
def load_runs(walk, line):
    """Of the runs of partial tiles of a line the first one, how many there are, and its start and
    tiles; and the same of full ones. Where there are none, the first tile."""
    p0 = gl.load(walk.partial[0] + line)
    f0 = gl.load(walk.full[0] + line)
    runs_p = gl.load(walk.partial[0] + line + 1) - p0
    runs_f = gl.load(walk.full[0] + line + 1) - f0
    start_p, count_p = _run(walk.partial, p0, runs_p > 0)
    start_f, count_f = _run(walk.full, f0, runs_f > 0)
    return p0, runs_p, start_p, count_p, f0, runs_f, start_f, count_f


@gluon.jit
def _run(runs, n, there):
    """Start and tiles of a run; the first tile where it is not `there`."""
    start = gl.load(runs[1] + n, mask=there, other=0)
    return start, gl.load(runs[2] + n, mask=there, other=1)


@gluon.constexpr_function
def broadcasts_runs(full, HOW):
    """Whether the loader tells the runs of a rank, which it reads before the copies that everybody
    else's reads would queue behind; else `visit` finds them itself. `full`: of the walk."""
    return full is not None and not HOW.deterministic


@gluon.jit
def runs_to_write(walk, line, HOW: gl.constexpr):
    """What the loader tells of the runs of a line."""
    if broadcasts_runs(walk.full, HOW):
        return load_runs(walk, line)
    else:
        return ()


@gluon.jit
def read_runs(work_smem, at, walk, WARPS: gl.constexpr, HOW: gl.constexpr):
    """The same, as it was told of a rank."""
    if broadcasts_runs(walk.full, HOW):
        return read_work(work_smem, at, BWD_RUNS, BWD_FIELDS, WARPS)
    else:
        return ()
