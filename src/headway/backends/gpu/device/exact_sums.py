"""Exact sums of float32 numbers: the same bits in whatever order programs add to them.

Integers may be added in any order. A float32 number is m 2^(e - 150), with a 24-bit integer m and
an exponent e from 1 to 254. An exact sum has an int64 for every WIDTH exponents (a **row**), to
which m 2^(e % WIDTH) is added by an atomic: one addition for each number, as for a float32 sum.
`exact_width` (gpu/exact_sums.py) chooses WIDTH such that no row overflows. Nothing is rounded until
`rounded` adds the rows up, in one order. (Kulisch's accumulator, in rows that carry nothing.)

One more row counts the infinities, the positive ones in its low half and the negative ones in its
high half; a NaN counts as both.

Sums lie in memory in groups of 8: row by row, the numbers of a group side by side.
"""

import triton.language as tl

import triton

GROUP = tl.constexpr(8)
POSITIVE, NEGATIVE = tl.constexpr(1), tl.constexpr(1 << 32)  # an infinity in the last row
_LOWEST = tl.constexpr(2.0**-150)  # what 1 stands for in row 0


@triton.jit
def place(n, WIDTH: tl.constexpr):
    """Return where row 0 of sum n lies. Its other rows follow at a distance of GROUP."""
    return (n & -8) * (256 // WIDTH + 1) + (n & 7)


@triton.jit
def add(sums, n, values, WIDTH: tl.constexpr):
    """Add values to the sums n."""
    bits = tl.cast(values, tl.int32, bitcast=True)
    fraction = bits & 0x7FFFFF
    exponent = (bits >> 23) & 255
    m = tl.where(exponent == 0, fraction, fraction + 0x800000)
    exponent = tl.maximum(exponent, 1)
    integer = tl.cast(m, tl.int64) << tl.cast(exponent % WIDTH, tl.int64)
    integer = tl.where(bits < 0, -integer, integer)
    count = tl.where(bits < 0, NEGATIVE, POSITIVE)
    count = tl.where(fraction == 0, count, POSITIVE + NEGATIVE)
    integer = tl.where(exponent == 255, count, integer)
    row = tl.where(exponent == 255, 256 // WIDTH, exponent // WIDTH)
    tl.atomic_add(sums + place(n, WIDTH) + row * GROUP, integer, mask=bits != 0, sem="relaxed")


@triton.jit
def rounded(sums, n, mask, WIDTH: tl.constexpr):
    """Return the sums n, in float32; 0 where `mask` is False."""
    first = sums + place(n, WIDTH)
    total = tl.zeros(n.shape, tl.float64)
    scale = tl.full(n.shape, _LOWEST, tl.float64)
    for row in range(256 // WIDTH):
        integers = tl.load(first + row * GROUP, mask=mask, other=0)
        total += tl.cast(integers, tl.float64) * scale
        scale *= 2.0**WIDTH
    counts = tl.load(first + 256 // WIDTH * GROUP, mask=mask, other=0)
    total = tl.where(counts % NEGATIVE == 0, total, total + float("inf"))
    total = tl.where(counts // NEGATIVE == 0, total, total - float("inf"))
    return tl.cast(total, tl.float32)


@triton.jit(do_not_specialize=["count"])
def round_sums(sums, result, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write BLOCK sums, rounded."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(result + n, rounded(sums, n, n < count, WIDTH), mask=n < count)
