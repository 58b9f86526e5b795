"""Scores that read a tensor by relative position: one number for all pairs on a diagonal.

What a score reads at a distance does not depend on the tile. So a small kernel reads it once for
all distances (`fill_bias_table`) and writes it as a **relative-bias table**, in the order in which
threads want it. Of a 64-row accumulator a thread has columns 8 k + 2 p + {0, 1} of rows r and
r + 8. Eight columns on in the other row is the same diagonal. With x for column less row, it needs

    x = 16 t + (2 p - r) + {0, 1} + {0, 8}        for consecutive t

four numbers, which the table keeps side by side for every t and for each of the 14 values that
2 p - r takes: 9 loads for 64 pairs, from a few cache lines. Threads exchange nothing.

Gradients go the other way. A thread adds up what it has of a diagonal, four threads of a warp add
theirs up by shuffles, and the 80 sums of a tile of 16 rows and 64 columns are added to one number
per distance in global memory, float32 or an exact sum. `collect_bias_grad` adds those to the
gradient of the tensor.
"""

from typing import Any, NamedTuple

import triton.language as tl

import triton

from ...gpu.device import exact_sums, gradients
from .affine_score import octet_layout
from .gluon_compat import gl, gluon
from .mma import ROWS, acc_layout

GRAD_COLUMNS = gl.constexpr(64)  # of an accumulator whose diagonals are summed


class BiasRows(NamedTuple):
    """The tables of one head, for the rows of an accumulator."""

    starts: Any  # pointers, one per table
    shift: Any  # add the first column: index of the distance of the first row in a table


# -- in the kernels -------------------------------------------------------------------------------


@gluon.jit
def locate_bias(tables, b, h, row):
    """Return the `BiasRows` of a head, for an accumulator whose first row is `row`.

    - `tables`: the index of distance 0; then of every table a pointer, and its strides from one
      batch row and from one head to the next.
    """
    starts = ()
    shift = gl.to_tensor(0)
    for n in gl.static_range(len(tables) // 3):
        shift = tables[0] - row
        of_b = gl.cast(b, gl.int64) * tables[3 * n + 2]
        starts = starts + (tables[3 * n + 1] + of_b + gl.cast(h, gl.int64) * tables[3 * n + 3],)  # noqa: RUF005
    return BiasRows(starts, shift)


@gluon.jit
def load_bias(bias, column, COLUMNS: gl.constexpr):
    """Load the values of every table for a 64 x COLUMNS accumulator whose first column is `column`.

    - `bias`: from `locate_bias`.
    """
    # Rows before the first may lie anywhere: they read other values.
    offset = gl.maximum((column + bias.shift) & -16, 64)
    row, col = _rows_and_columns(COLUMNS)
    offset = ((col & 6) - (row & 7) + 7) * 4 + (offset - (row & 48)) * 4
    values = ()
    for n in gl.static_range(len(bias.starts)):
        x = gl.inline_asm_elementwise(
            loads(COLUMNS), operands(COLUMNS, "=f", "l"), [bias.starts[n] + offset],
            dtype=gl.float32, is_pure=False, pack=COLUMNS // 2,
        )  # fmt: skip
        x = gl.convert_layout(x.reshape([64, COLUMNS]), acc_layout(COLUMNS))
        values = values + (x,)  # noqa: RUF005
    return values


@gluon.jit
def add_bias_grad(sums, column, values, CONFIG: gl.constexpr):
    """Add the values of the 64 x 64 pairs of an accumulator to the sums of their distances.

    - `sums`: from `locate_bias`, of tables of sums.
    - `CONFIG.bias_grads` says which values go to each.
    """
    offset = gl.maximum(column + sums.shift, 64)
    row, col = _rows_and_columns(GRAD_COLUMNS)
    offset = offset - (row & 48) + (row & 7) + ((col & 2) >> 1) * 16 + ((col & 4) >> 2) * 40 - 16
    if CONFIG.exact_width:
        offset = exact_sums.place(offset, CONFIG.exact_width)
    for n in gl.static_range(len(sums.starts)):
        x = values[_bias_grad(CONFIG, n)].reshape([ROWS, GRAD_COLUMNS // 8, 8])
        x = gl.convert_layout(x, octet_layout(GRAD_COLUMNS))
        gl.inline_asm_elementwise(
            adds(CONFIG.exact_width), operands(GRAD_COLUMNS, "=r", "l", "f"),
            [(sums.starts[n] + offset).to(gl.int64), x],
            dtype=gl.int32, is_pure=False, pack=32,
        )  # fmt: skip


@gluon.constexpr_function
def _bias_grad(CONFIG, n):
    return CONFIG.bias_grads[n]


@gluon.jit
def _rows_and_columns(COLUMNS: gl.constexpr):
    """Return row and column of every pair, in `octet_layout`."""
    octets: gl.constexpr = octet_layout(COLUMNS)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, octets)))[:, None, None]
    over = gl.arange(0, COLUMNS // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, octets)))
    one = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, octets)))
    column = over[None, :, None] * 8 + one[None, None, :]
    return row + column * 0, column + row * 0


# A thread has the pair (row half a, octet k of columns, e of two columns) as number e + 2 a + 4 k.


@gluon.constexpr_function
def operands(columns, *kinds):
    """Return the constraints of inline PTX whose every operand has columns / 2 registers."""
    return ",".join(kind for kind in kinds for _ in range(columns // 2))


@gluon.constexpr_function
def loads(columns):
    """Return PTX that loads the values of a thread's pairs, from its place in a table."""
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


@gluon.constexpr_function
def adds(width):
    """Return PTX that adds the values of a thread's pairs to the sums of their distances.

    - `width`: WIDTH of exact sums; 0: the sums are float32.
    """
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
            f"setp.lt.s32 low{e}, t, 0;",  # its values belong to the octet before
            f"and.b32 from{e}, t, 7;", f"shl.b32 from{e}, from{e}, 2;",
            f"or.b32 from{e}, from{e}, p;", "add.s32 t, t, 1;",
        ]  # fmt: skip
    lines += ["and.b32 lane, p, 1;", "setp.ne.s32 right, lane, 0;"]
    lines += ["and.b32 lane, p, 2;", "setp.ne.s32 left, lane, 0;"]
    # The sums of both rows, by octet of distances m = k - a, from -1 on.
    for e in (0, 1):
        for m in range(-1, 8):
            d = f"d{9 * e + m + 1}"
            if m == -1:
                lines.append(f"mov.f32 {d}, {pair(1, 0, e)};")
            elif m == 7:
                lines.append(f"mov.f32 {d}, {pair(0, 7, e)};")
            else:
                lines.append(f"add.f32 {d}, {pair(0, m, e)}, {pair(1, m + 1, e)};")
    # The same from octet -2 on, gathered so that four lanes hold one distance modulo 8.
    for m in range(-2, 8):
        for e in (0, 1):
            of = lambda n: f"d{9 * e + n + 1}" if -1 <= n < 8 else "0f00000000"  # noqa: B023
            to = f"x{m + 2}" if e == 0 else "y"
            lines += [f"selp.f32 {to}, {of(m + 1)}, {of(m)}, low{e};"]
            lines += [f"shfl.sync.idx.b32 {to}, {to}, from{e}, 31, -1;"]
        lines.append(f"add.f32 x{m + 2}, x{m + 2}, y;")
    # Reduce these ten over four lanes: each lane of a pair keeps half, twice.
    for other, condition, pairs in (
        (2, "left", [(n, n + 5) for n in range(5)]), (1, "right", [(0, 2), (1, 3)]),
    ):  # fmt: skip
        for n, m in pairs:
            lines += [
                f"selp.f32 y, x{m}, x{n}, {condition};", f"selp.f32 z, x{n}, x{m}, {condition};",
                f"shfl.sync.bfly.b32 z, z, {other}, 31, -1;", f"add.f32 x{n}, y, z;",
            ]  # fmt: skip
    lines += ["shfl.sync.bfly.b32 z, x4, 1, 31, -1;", "add.f32 x4, x4, z;"]
    if width:
        lines += [
            ".reg .pred zero, below, special, whole;", ".reg .b32 bits, e, f, shift;",
            ".reg .b64 m, n, at;",
        ]  # fmt: skip
    for guard, n, distance in (("", 0, 0), ("", 1, 8), ("@!right ", 4, 32)):
        if width:
            lines += _exact_addition(width, guard, f"x{n}", distance)
        else:
            at = f"[$32 + {4 * distance}]"
            lines.append(f"{guard}red.relaxed.gpu.global.add.f32 {at}, x{n};")
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def _exact_addition(width, guard, x, distance):
    """Return PTX that adds a number to an exact sum, as `exact_sums.add` does. It is `distance`
    sums, a multiple of their groups, behind that at $32."""
    return [
        f"mov.b32 bits, {x};", "and.b32 f, bits, 0x7fffff;",
        "shr.u32 e, bits, 23;", "and.b32 e, e, 255;",
        "setp.eq.s32 zero, e, 0;", "setp.eq.s32 special, e, 255;", "setp.eq.s32 whole, f, 0;",
        "setp.lt.s32 below, bits, 0;",
        "or.b32 bits, f, 0x800000;", "selp.b32 bits, f, bits, zero;", "max.u32 e, e, 1;",
        f"and.b32 shift, e, {width - 1};", "cvt.u64.u32 m, bits;", "shl.b64 m, m, shift;",
        "neg.s64 n, m;", "selp.b64 m, n, m, below;",
        f"selp.b64 n, {1 << 32}, 1, below;", f"selp.b64 n, n, {1 + (1 << 32)}, whole;",
        "selp.b64 m, n, m, special;", "selp.b32 e, 256, e, special;",
        f"shr.u32 e, e, {width.bit_length() - 1};", "shl.b32 e, e, 6;",  # 8 integers of a row
        "cvt.u64.u32 at, e;", "add.s64 at, at, $32;",
        f"{guard}red.relaxed.gpu.global.add.u64 [at + {8 * distance * (256 // width + 1)}], m;",
    ]  # fmt: skip


# -- before and after the kernels -----------------------------------------------------------------


@triton.jit(do_not_specialize=["zero", "count", "b_first", "h_first", "distance", "numbers"])
def fill_bias_table(
    table, tensors, numbers, zero, count, heads, b_first, h_first, distance,
    BAND: tl.constexpr, SIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill a table: `count` distances for every batch row and head.

    - `zero`: the index of distance 0 of a column from a row; a multiple of 16, as `count` is.
    - `distance`: key less query, of the first column and the first row.
    - `SIGN`: 1 where columns are keys; else -1.
    - `BAND`: the generated function of a distance.
    """
    blocks = tl.cdiv(count, BLOCK * 16)
    row = tl.program_id(0) // blocks
    at = tl.program_id(0) % blocks * BLOCK * 64 + tl.arange(0, BLOCK * 64)
    sixteen, slot, octet, one = at // 64, at // 4 % 16, at // 2 % 2, at % 2
    x = sixteen * 16 - zero + slot - 7 + octet * 8 + one
    captured = (tensors, numbers)
    y = BAND(0.0, b_first + row // heads, h_first + row % heads, 0, distance + SIGN * x, captured)
    to = table + tl.cast(row, tl.int64) * count * 4 + at
    tl.store(to, y.to(tl.float32), mask=at < count * 4)


@triton.jit(do_not_specialize=["zero", "count", "b_first", "h_first", "distance", "numbers"])
def collect_bias_grad(
    sums, grad, tensors, numbers, zero, count, heads, b_first, h_first, distance,
    OFFSET: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the sums of all distances to a gradient; `OFFSET`: the generated function of a distance
    that says where."""
    blocks = tl.cdiv(count, BLOCK)
    row = tl.program_id(0) // blocks
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    if WIDTH:
        x = exact_sums.rounded(sums, row * count + at, there, WIDTH)
    else:
        x = tl.load(sums + tl.cast(row, tl.int64) * count + at, mask=there, other=0.0)
    captured = (tensors, numbers)
    b, h = b_first + row // heads, h_first + row % heads
    offset = OFFSET(0.0, b, h, 0, distance - (at - zero), captured)
    gradients.add(grad, offset, x, WIDTH)
