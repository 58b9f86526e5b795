"""The functions that generated scores and masks call, with torch's semantics.

They do not use `libdevice`: the same source runs on NVIDIA, on AMD and in the interpreter, except
`approx_tanh`, which is an NVIDIA instruction.
"""

import triton.language as tl

import triton


@triton.jit
def clamp_index(index, size):
    """Return an index into a dimension of `size`. Negative ones count from the end, as in Python.

    An index that is still outside belongs to a masked-out pair, and is clamped.
    """
    index = tl.where(index < 0, index + size, index)
    return tl.minimum(tl.maximum(index, 0), size - 1)


@triton.jit
def clamp_small(x):
    """Return an integer clamped to +-2^29, as an int32: comparisons with smaller ones stay the
    same."""
    return tl.cast(tl.minimum(tl.maximum(x, -(1 << 29)), 1 << 29), tl.int32)


# The hardware's integer division is used for two numbers >= 0 only: there rounding down and
# rounding toward zero agree.


@triton.jit
def floordiv(a, b):
    """Return an integer quotient, rounded down."""
    a = tl.where(b < 0, -a, a)
    b = tl.where(b < 0, -b, b)
    q = tl.where(a < 0, -1 - a, a) // b
    return tl.where(a < 0, -1 - q, q)


@triton.jit
def mod(a, b):
    """Return the remainder of `floordiv`, which has the sign of b."""
    return a - floordiv(a, b) * b


@triton.jit
def truncdiv(a, b):
    """Return an integer quotient, rounded toward zero."""
    q = tl.where(a < 0, -a, a) // tl.where(b < 0, -b, b)
    return tl.where((a < 0) != (b < 0), -q, q)


@triton.jit
def trunc(x):
    """Round toward zero."""
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def round_even(x):
    """Round to the nearest integer, halves to the even one."""
    r = tl.floor(x)
    up = (x - r > 0.5) | ((x - r == 0.5) & (r - 2 * tl.floor(r * 0.5) == 1))
    return tl.where(up, r + 1, r)


@triton.jit
def sign(x):
    """Return -1, 0 or 1; 0 for NaN."""
    return tl.where(x > 0, 1, 0) - tl.where(x < 0, 1, 0)


@triton.jit
def tanh(x):
    """Return 1 - 2 / (1 + exp(2x)): two fast instructions, with an error of at most 1.2e-7.

    Near 0, where that would be a large part of the result, return the first terms of the series.
    """
    y = x * x
    near = x * (1 + y * (-0.33333333 + y * (0.13333333 - 0.05396825 * y)))
    return tl.where(tl.abs(x) < 0.2, near, 1 - 2 / (1 + tl.exp(2 * x)))


@triton.jit
def approx_tanh(x):
    """Return tanh in one instruction; relative error at most 2^-11 (PTX ISA, tanh.approx.f32)."""
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x))."""
    return 1 / (1 + tl.exp(-x))


@triton.jit
def expm1(x):
    """Return exp(x) - 1 without cancellation (Kahan; Higham 2002, section 1.14)."""
    u = tl.exp(x)
    return tl.where(
        u == 1, x, tl.where((u == 0) | (u == float("inf")), u - 1, (u - 1) * x / tl.log(u))
    )


@triton.jit
def log1p(x):
    """Return log(1 + x) without cancellation (Kahan, as `expm1`)."""
    u = 1 + x
    return tl.where((u == 1) | (u == float("inf")), x, tl.log(u) * x / (u - 1))


@triton.jit
def power(a, b):
    """Return a ** b for floats; NaN for a negative a and a b that is not an integer."""
    magnitude = tl.exp2(b * tl.log2(tl.abs(a)))
    magnitude = tl.where(b == 0, 1.0, magnitude)
    is_integer = tl.floor(b) == b
    is_odd = b - 2 * tl.floor(b * 0.5) == 1
    signed = tl.where(is_odd, -magnitude, magnitude)
    return tl.where(a < 0, tl.where(is_integer, signed, float("nan")), magnitude)
