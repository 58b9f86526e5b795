"""The exponentials of the forward, and sums of them that are rescaled only where they must be.

Exponentials are taken from the largest T of a row so far, `m`. While it stays, in all rows of a
warp, nothing that was summed is multiplied, which would be every seventh instruction of a block.
"""

from .gluon_api import gl, gluon
from .linear import in_eights
from .tile import ROWS, mma

# By how much a T may be above `m` before it moves, in units of log 2. With 8 (FlashAttention-4 on
# Blackwell) almost nothing is ever multiplied, but the largest P is then no longer 1, which rounds
# to itself: errors of out double (LOG.md).
SLACK = gl.constexpr(0.0)


@gluon.jit
def sum_of(e):
    """The sum of the columns of e, as `none` holds it."""
    BLOCK: gl.constexpr = e.shape[1]
    x = gl.convert_layout(e.reshape([ROWS, BLOCK // 8, 8]), in_eights(BLOCK))
    return gl.sum(x, 1)


@gluon.jit
def none(BLOCK: gl.constexpr):
    """No sum yet: eight numbers of a row, two of a thread, which are added up at the end. Threads
    need not tell each other what they have in every block."""
    return gl.full([ROWS, 8], 0.0, gl.float32, layout=gl.SliceLayout(1, in_eights(BLOCK)))


@gluon.jit
def total(l, BLOCK: gl.constexpr):
    """The sums of the rows."""
    return gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, mma(BLOCK)))


@gluon.jit
def shrunk(l, factor, BLOCK: gl.constexpr):
    """Sums times a number per row."""
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, in_eights(BLOCK)))
    return l * gl.convert_layout(factor, rows)[:, None]


@gluon.jit
def rescaled(acc, factor):
    """Every piece times a number per row, which is 1 in most warps: these leave it as it is."""
    a = _rescaled(acc[0], factor)
    if len(acc) == 1:
        return (a,)
    else:
        return (a, _rescaled(acc[1], factor))


@gluon.jit
def _rescaled(a, factor):
    COUNT: gl.constexpr = a.shape[1] // 2  # numbers of a thread
    factor = gl.convert_layout(factor, gl.SliceLayout(1, mma(a.shape[1])))
    return gl.inline_asm_elementwise(
        _text(COUNT), _constraints(COUNT), [a, factor[:, None]],
        dtype=gl.float32, is_pure=True, pack=COUNT,
    )  # fmt: skip


@gluon.constexpr_function
def _text(count):
    # A thread has two numbers of a row, then two of the row eight further down, and so on.
    row = [2 * count, 2 * count + 2]
    lines = [f"setp.neu.f32 first, ${row[0]}, 0f3F800000;"]
    lines += [f"setp.neu.f32 second, ${row[1]}, 0f3F800000;"]
    lines += ["or.pred first, first, second;", "vote.sync.any.pred first, first, 0xffffffff;"]
    lines += ["@!first bra.uni AS_IT_IS;"]
    lines += [f"mul.f32 ${n}, ${n}, ${row[n // 2 % 2]};" for n in range(count)]
    return "{ .reg .pred first, second; " + " ".join(lines) + " AS_IT_IS: }"


@gluon.constexpr_function
def _constraints(count):
    return ",".join(["=f"] * count + [str(n) for n in range(count)] + ["f"] * count)
