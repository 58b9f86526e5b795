"""Scores that read a tensor by relative position: one number for all pairs on a diagonal.

What a score reads at a distance does not depend on the tile. So a small kernel reads it once for
all distances (`fill_bias_table`), in the order in which threads want it, and writes it as
**bands**. In a product of 64 rows a thread has columns 8 k + 2 p + {0, 1} of rows r and r + 8.
Eight columns on in the other row is the same diagonal. With x for column less row, it needs

    x = 16 t + (2 p - r) + {0, 1} + {0, 8}        for a few t in a row

four numbers that lie side by side, for every t and for each of the 14 values that 2 p - r takes: 9
loads for 64 pairs, which find the tile's few lines in the cache. Nothing is exchanged by threads.

Gradients go the other way: a thread adds up what it has of a diagonal, four threads of a warp add
theirs up by shuffles, and 80 sums of a tile of 16 rows and 64 columns are added to one number per
distance in global memory, which `collect_bias_grad` brings to the gradient of the tensor
afterwards.
"""

import triton.language as tl

import triton

from .affine_score import octet_layout
from .gluon_compat import gl, gluon
from .mma import acc_layout

# -- in the kernels -------------------------------------------------------------------------------


@gluon.jit
def locate_bias(bands, b, h, row):
    """Where the numbers of a head begin, of every band; and what is added to the first column of a
    product whose first row is given, for the number that its distance has in a band.

    - `bands`: that number for 0; then of every band its memory, and how far it is from one batch
      row and one head to the next.
    """
    starts = ()
    more = gl.to_tensor(0)
    for n in gl.static_range(len(bands) // 3):
        more = bands[0] - row
        of_b = gl.cast(b, gl.int64) * bands[3 * n + 2]
        starts = starts + (bands[3 * n + 1] + of_b + gl.cast(h, gl.int64) * bands[3 * n + 3],)  # noqa: RUF005
    return starts, more


@gluon.jit
def load_bias(band, column, COLUMNS: gl.constexpr):
    """The numbers of every band for the pairs of a product of 64 rows, from a column on.

    - `band`: from `locate_bias`.
    """
    starts, more = band
    # Of rows that are none, which may lie anywhere before, others are read.
    at = gl.maximum((column + more) & -16, 64)
    row, one = _places(COLUMNS)
    at = ((one & 6) - (row & 7) + 7) * 4 + (at - (row & 48)) * 4
    found = ()
    for n in gl.static_range(len(starts)):
        x = gl.inline_asm_elementwise(
            loads(COLUMNS), operands(COLUMNS, "=f", "l"), [starts[n] + at],
            dtype=gl.float32, is_pure=False, pack=COLUMNS // 2,
        )  # fmt: skip
        found = found + (gl.convert_layout(x.reshape([64, COLUMNS]), acc_layout(COLUMNS)),)  # noqa: RUF005
    return found


@gluon.jit
def add_bias_grad(band, column, values, HOW: gl.constexpr):
    """Add what the 64 x 64 pairs of a product have to the numbers of their distances.

    - `band`: from `locate_bias`, of sums; to each go the values that `HOW.bias_grads` says.
    """
    starts, more = band
    at = gl.maximum(column + more, 64)
    row, one = _places(64)
    at = at - (row & 48) + (row & 7) + ((one & 2) >> 1) * 16 + ((one & 4) >> 2) * 40 - 16
    for n in gl.static_range(len(starts)):
        x = gl.convert_layout(values[_summed(HOW, n)].reshape([64, 8, 8]), octet_layout(64))
        gl.inline_asm_elementwise(
            ADDS, operands(64, "=r", "l", "f"), [(starts[n] + at).to(gl.int64), x],
            dtype=gl.int32, is_pure=False, pack=32,
        )  # fmt: skip


@gluon.constexpr_function
def _summed(HOW, n):
    return HOW.bias_grads[n]


@gluon.jit
def _places(COLUMNS: gl.constexpr):
    """Row and column of every pair, in eights."""
    whole: gl.constexpr = octet_layout(COLUMNS)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, whole)))[:, None, None]
    over = gl.arange(0, COLUMNS // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, whole)))
    one = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, whole)))
    column = over[None, :, None] * 8 + one[None, None, :]
    return row + column * 0, column + row * 0


# A thread has pair (row half a, eight k of columns, e of two columns) as number e + 2 a + 4 k.


@gluon.constexpr_function
def operands(columns, *kinds):
    """The constraints of so many results and arguments."""
    return ",".join(kind for kind in kinds for _ in range(columns // 2))


@gluon.constexpr_function
def loads(columns):
    """Of a thread's place in a band, the numbers for its pairs."""
    count = columns // 2
    at, lines = f"${count}", []
    for t in range(columns // 16):
        k = 8 * t
        to = f"{{${k}, ${k + 1}, ${k + 4}, ${k + 5}}}"
        lines.append(f"ld.global.nc.v4.f32 {to}, [{at} + {256 * t}];")
    lines.append(f"ld.global.nc.v2.f32 {{$2, $3}}, [{at} + -248];")
    for k in range(1, columns // 8):
        lines += [f"mov.f32 ${4 * k + 2 + e}, ${4 * (k - 1) + e};" for e in (0, 1)]
    return "\n".join(lines)


def _adds() -> str:
    """Of a thread's place among the numbers of distances, and its pairs, the sums added there."""
    pair = lambda a, k, e: f"${64 + e + 2 * a + 4 * k}"
    lines = [
        ".reg .pred low<2>, left, right;",
        ".reg .b32 lane, p, t, from<2>;",
        ".reg .f32 d<18>, x<10>, y, z;",
        "mov.u32 lane, %laneid;", "and.b32 p, lane, 3;", "shr.u32 t, lane, 2;",
        "shl.b32 lane, p, 1;", "sub.s32 t, lane, t;",  # 2 p - r
    ]  # fmt: skip
    for e in (0, 1):
        lines += [
            f"setp.lt.s32 low{e}, t, 0;",  # its numbers belong to the eight before
            f"and.b32 from{e}, t, 7;", f"shl.b32 from{e}, from{e}, 2;",
            f"or.b32 from{e}, from{e}, p;", "add.s32 t, t, 1;",
        ]  # fmt: skip
    lines += ["and.b32 lane, p, 1;", "setp.ne.s32 right, lane, 0;"]
    lines += ["and.b32 lane, p, 2;", "setp.ne.s32 left, lane, 0;"]
    # By eights of distances m = k - a from -1 on: what both rows have.
    for e in (0, 1):
        for m in range(-1, 8):
            d = f"d{9 * e + m + 1}"
            if m == -1:
                lines.append(f"mov.f32 {d}, {pair(1, 0, e)};")
            elif m == 7:
                lines.append(f"mov.f32 {d}, {pair(0, 7, e)};")
            else:
                lines.append(f"add.f32 {d}, {pair(0, m, e)}, {pair(1, m + 1, e)};")
    # By eights from -2 on, of the distance modulo 8 that is the number of four lanes.
    for m in range(-2, 8):
        for e in (0, 1):
            of = lambda n: f"d{9 * e + n + 1}" if -1 <= n < 8 else "0f00000000"  # noqa: B023
            to = f"x{m + 2}" if e == 0 else "y"
            lines += [f"selp.f32 {to}, {of(m + 1)}, {of(m)}, low{e};"]
            lines += [f"shfl.sync.idx.b32 {to}, {to}, from{e}, 31, -1;"]
        lines.append(f"add.f32 x{m + 2}, x{m + 2}, y;")
    # Of these ten, the sums of four lanes: half of them here, half there; then once more.
    for other, condition, pairs in (
        (2, "left", [(n, n + 5) for n in range(5)]), (1, "right", [(0, 2), (1, 3)]),
    ):  # fmt: skip
        for n, m in pairs:
            lines += [
                f"selp.f32 y, x{m}, x{n}, {condition};", f"selp.f32 z, x{n}, x{m}, {condition};",
                f"shfl.sync.bfly.b32 z, z, {other}, 31, -1;", f"add.f32 x{n}, y, z;",
            ]  # fmt: skip
    lines += ["shfl.sync.bfly.b32 z, x4, 1, 31, -1;", "add.f32 x4, x4, z;"]
    for n, at in ((0, 0), (1, 32)):
        lines.append(f"red.relaxed.gpu.global.add.f32 [$32 + {at}], x{n};")
    lines.append("@!right red.relaxed.gpu.global.add.f32 [$32 + 128], x4;")
    return "{\n" + "\n".join(lines) + "\n}"


ADDS = gl.constexpr(_adds())


# -- before and after -----------------------------------------------------------------------------


@triton.jit(do_not_specialize=["zero", "count", "b_first", "h_first", "distance", "numbers"])
def fill_bias_table(
    bands, tensors, numbers, zero, count, heads, b_first, h_first, distance,
    BAND: tl.constexpr, SIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A band: `count` distances for every batch row and head.

    - `zero`: the number of distance 0 of a column from a row; a multiple of 16, as `count` is.
    - `distance`: of the key from the query where the first column meets the first row.
    - `SIGN`: 1 where columns are keys; else -1.
    """
    row = tl.program_id(1)
    at = tl.program_id(0) * BLOCK * 64 + tl.arange(0, BLOCK * 64)
    sixteen, slot, eight, one = at // 64, at // 4 % 16, at // 2 % 2, at % 2
    x = sixteen * 16 - zero + slot - 7 + eight * 8 + one
    captured = (tensors, numbers)
    y = BAND(0.0, b_first + row // heads, h_first + row % heads, 0, distance + SIGN * x, captured)
    to = bands + tl.cast(row, tl.int64) * count * 4 + at
    tl.store(to, y.to(tl.float32), mask=at < count * 4)


@triton.jit(do_not_specialize=["zero", "count", "b_first", "h_first", "distance", "numbers"])
def collect_bias_grad(
    sums, grad, tensors, numbers, zero, count, heads, b_first, h_first, distance,
    OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the sums of all distances to a gradient."""
    row = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    x = tl.load(sums + tl.cast(row, tl.int64) * count + at, mask=there, other=0.0)
    captured = (tensors, numbers)
    b, h = b_first + row // heads, h_first + row % heads
    to = grad + OFFSET(0.0, b, h, 0, distance - (at - zero), captured)
    tl.atomic_add(to, x, mask=x != 0, sem="relaxed")
