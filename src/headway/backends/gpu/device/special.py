"""Inverse, hyperbolic and special functions that generated scores and masks call, in float32.

They do not use `libdevice`, as `maths` does not. Errors are those of float32 arithmetic; where exp
of a large number is taken, its hardware instruction is off by 1e-5 of the result.
"""

import triton.language as tl

import triton

from .maths import log1p, round_even


@triton.jit
def signbit(x):
    """Check the sign bit, which -0.0 and negative NaN have."""
    if x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True) < 0
    else:
        return x.to(tl.float32).to(tl.int32, bitcast=True) < 0


@triton.jit
def copysign(x, sign):
    """Return |x| with the sign bit of another float."""
    return tl.abs(x) * tl.where(signbit(sign), -1.0, 1.0)


@triton.jit
def atan(x):
    """Return the arc tangent; relative error at most 3e-7 (Moshier, Cephes, atanf)."""
    a = tl.abs(x)
    z = tl.where(a > 2.4142135, -1 / a, tl.where(a > 0.41421357, (a - 1) / (a + 1), a))
    y = z * z
    p = ((0.0805374449538 * y - 0.138776856032) * y + 0.199777106478) * y - 0.333329491539
    start = tl.where(a > 2.4142135, 1.5707964, tl.where(a > 0.41421357, 0.7853982, 0.0))
    return copysign(start + (p * y * z + z), x)


@triton.jit
def atan2(y, x):
    """Return the angle of the point (x, y), signed zeros and infinities included."""
    a, b = tl.abs(x), tl.abs(y)
    ratio = tl.minimum(a, b) / tl.maximum(a, b)
    ratio = tl.where(a == b, tl.where(a == 0, 0.0, 1.0), ratio)
    angle = tl.where(b > a, 1.5707964 - atan(ratio), atan(ratio))
    angle = copysign(tl.where(signbit(x), 3.1415927 - angle, angle), y)
    return tl.where((x != x) | (y != y), float("nan"), angle)


@triton.jit
def _arc(z, root):
    """Return the arc sine of `root`, whose square is z <= 1/4 (Moshier, Cephes, asinf)."""
    p = (0.042163199048 * z + 0.024181311049) * z + 0.045470025998
    p = (p * z + 0.074953002686) * z + 0.16666752422
    return p * z * root + root


@triton.jit
def asin(x):
    """Return the arc sine; relative error at most 4e-7."""
    a = tl.abs(x)
    far = a > 0.5
    z = tl.where(far, 0.5 * (1 - a), a * a)
    r = _arc(z, tl.where(far, tl.sqrt(z), a))
    return copysign(tl.where(far, 1.5707964 - 2 * r, r), x)


@triton.jit
def acos(x):
    """Return the arc cosine; relative error at most 4e-7."""
    a = tl.abs(x)
    far = a > 0.5
    z = tl.where(far, 0.5 * (1 - a), a * a)
    r = _arc(z, tl.where(far, tl.sqrt(z), x))
    return tl.where(far, tl.where(x < 0, 3.1415927 - 2 * r, 2 * r), 1.5707964 - r)


@triton.jit
def sinh(x):
    """Return (exp(x) - exp(-x)) / 2: near 0 by its series, and not infinite before it has to be."""
    y = x * x
    near = x + x * y * (0.16666667 + y * (0.0083333333 + y * (0.0001984127 + y * 2.7557319e-6)))
    t = tl.exp(0.5 * tl.abs(x))
    return tl.where(tl.abs(x) < 1, near, copysign(0.5 * t * t - 0.5 / (t * t), x))


@triton.jit
def cosh(x):
    """Return (exp(x) + exp(-x)) / 2, not infinite before it has to be."""
    t = tl.exp(0.5 * tl.abs(x))
    return 0.5 * t * t + 0.5 / (t * t)


@triton.jit
def asinh(x):
    """Return log(x + sqrt(x^2 + 1)) without cancellation (Kahan)."""
    a = tl.abs(x)
    near = log1p(a + a * a / (1 + tl.sqrt(1 + a * a)))
    return copysign(tl.where(a > 1e9, tl.log(a) + 0.6931472, near), x)


@triton.jit
def acosh(x):
    """Return log(x + sqrt(x^2 - 1)) without cancellation; NaN below 1."""
    t = x - 1
    r = tl.where(x > 1e9, tl.log(x) + 0.6931472, log1p(t + tl.sqrt(t * (t + 2))))
    return tl.where(x < 1, float("nan"), r)


@triton.jit
def atanh(x):
    """Return log((1 + x) / (1 - x)) / 2 without cancellation."""
    a = tl.abs(x)
    return copysign(0.5 * log1p(2 * a / (1 - a)), x)


@triton.jit
def hypot(x, y):
    """Return sqrt(x^2 + y^2), not infinite before it has to be; infinite if either is."""
    a, b = tl.abs(x), tl.abs(y)
    most = tl.maximum(a, b)
    ratio = tl.where(most == 0, 0.0, tl.minimum(a, b) / most)
    r = tl.where((x != x) | (y != y), float("nan"), most * tl.sqrt(1 + ratio * ratio))
    return tl.where((a == float("inf")) | (b == float("inf")), float("inf"), r)


@triton.jit
def erfc(x):
    """Return 1 - erf(x); relative error 2e-7, and 1e-5 where it is below 1e-30 (Press et al. 2007,
    Numerical Recipes, section 6.2.2)."""
    z = tl.abs(x)
    t = 2 / (2 + z)
    p = (0.17087277 * t - 0.82215223) * t + 1.48851587
    p = ((p * t - 1.13520398) * t + 0.27886807) * t - 0.18628806
    p = ((p * t + 0.09678418) * t + 0.37409196) * t + 1.00002368
    r = t * tl.exp(p * t - 1.26551223 - z * z)
    r = tl.where(z == float("inf"), 0.0, r)
    return tl.where(x < 0, 2 - r, r)


@triton.jit
def erfinv(x):
    """Return the inverse of erf; relative error 1e-6 (Giles 2012, GPU Computing Gems, ch. 10)."""
    w = -tl.log((1 - x) * (1 + x))
    u = w - 2.5
    near = (2.81022636e-08 * u + 3.43273939e-07) * u - 3.5233877e-06
    near = ((near * u - 4.39150654e-06) * u + 0.00021858087) * u - 0.00125372503
    near = ((near * u - 0.00417768164) * u + 0.246640727) * u + 1.50140941
    u = tl.sqrt(w) - 3
    far = (-0.000200214257 * u + 0.000100950558) * u + 0.00134934322
    far = ((far * u - 0.00367342844) * u + 0.00573950773) * u - 0.0076224613
    far = ((far * u + 0.00943887047) * u + 1.00167406) * u + 2.83297682
    r = tl.where(w < 5, near, far) * x
    return tl.where(tl.abs(x) == 1, copysign(float("inf") * tl.abs(x), x), r)


@triton.jit
def _sin_pi(x):
    """Return sin(pi x) for x >= 0, exactly 0 at integers."""
    near = x - round_even(x)
    s = tl.sin(3.1415927 * near)
    half = 0.5 * round_even(x)
    return tl.where(half == tl.floor(half), s, -s)


@triton.jit
def lgamma(x):
    """Return log |gamma(x)|: Stirling's series from 7 on, below by gamma(x + 1) = x gamma(x), and
    by reflection; error at most 2e-6 of the larger of 1 and |x|."""
    a = tl.abs(x)
    y = tl.where(x < 0.5, 1 - x, x)
    product, z = tl.where(y == y, 1.0, y), y
    for _ in tl.static_range(7):
        product = tl.where(z < 7, product * z, product)
        z = tl.where(z < 7, z + 1, z)
    r = 1 / z
    series = r * (0.083333333 + r * r * (-0.0027777778 + r * r * 0.00079365079))
    log_gamma = (z - 0.5) * (tl.log(z) - 1) + 0.41893853 + series - tl.log(product)
    sine = tl.abs(_sin_pi(a))
    reflected = 1.1447299 - tl.log(sine) - log_gamma
    result = tl.where(x < 0.5, tl.where(sine == 0, float("inf"), reflected), log_gamma)
    return tl.where(a == float("inf"), float("inf"), result)


@triton.jit
def digamma(x):
    """Return the derivative of lgamma: an asymptotic series from 7 on, below by recurrence and
    reflection; error at most 2e-6 of the larger of 1 and its terms."""
    z = tl.where(x < 0.5, 1 - x, x)
    result = tl.where(z == z, 0.0, z)
    for _ in tl.static_range(7):
        result = tl.where(z < 7, result - 1 / z, result)
        z = tl.where(z < 7, z + 1, z)
    r = 1 / (z * z)
    result += tl.log(z) - 0.5 / z - r * (0.083333333 - r * (0.0083333333 - r * 0.003968254))
    near = 3.1415927 * (x - round_even(x))
    result = tl.where(x < 0.5, result - 3.1415927 * tl.cos(near) / tl.sin(near), result)
    result = tl.where((near == 0) & (x < 0), float("nan"), result)
    return tl.where(x == 0, copysign(float("inf") + x, -1 / x), result)


@triton.jit
def trigamma(x):
    """Return the derivative of digamma, in the same way; relative error 1e-5."""
    z = tl.where(x < 0.5, 1 - x, x)
    result = tl.where(z == z, 0.0, z)
    for _ in tl.static_range(7):
        result = tl.where(z < 7, result + 1 / (z * z), result)
        z = tl.where(z < 7, z + 1, z)
    r = 1 / (z * z)
    result += (1 + r * (0.16666667 - r * (0.033333333 - r * 0.023809524))) / z + 0.5 * r
    sine = tl.sin(3.1415927 * (x - round_even(x)))
    return tl.where(x < 0.5, 9.8696044 / (sine * sine) - result, result)


@triton.jit
def i0(x):
    """Return the modified Bessel function of order 0; relative error 3e-7, 1e-5 for large x
    (Abramowitz & Stegun 1964, 9.8.1 and 9.8.2)."""
    a = tl.abs(x)
    t = a * a * 0.071111111
    near = (0.0045813 * t + 0.0360768) * t + 0.2659732
    near = (((near * t + 1.2067492) * t + 3.0899424) * t + 3.5156229) * t + 1
    t = 3.75 / a
    far = ((0.00392377 * t - 0.01647633) * t + 0.02635537) * t - 0.02057706
    far = (((far * t + 0.00916281) * t - 0.00157565) * t + 0.00225319) * t + 0.01328592
    far = far * t + 0.39894228
    half = tl.exp(0.5 * a)
    far = half * (half * (far / tl.sqrt(a)))
    return tl.where(a < 3.75, near, far)


@triton.jit
def i1(x):
    """Return the modified Bessel function of order 1, the derivative of i0; errors as there
    (Abramowitz & Stegun 1964, 9.8.3 and 9.8.4)."""
    a = tl.abs(x)
    t = a * a * 0.071111111
    near = (0.00032411 * t + 0.00301532) * t + 0.02658733
    near = (((near * t + 0.15084934) * t + 0.51498869) * t + 0.87890594) * t + 0.5
    t = 3.75 / a
    far = ((-0.00420059 * t + 0.01787654) * t - 0.02895312) * t + 0.02282967
    far = (((far * t - 0.01031555) * t + 0.00163801) * t - 0.00362018) * t - 0.03988024
    far = far * t + 0.39894228
    half = tl.exp(0.5 * a)
    far = half * (half * (far / tl.sqrt(a)))
    return tl.where(a < 3.75, near * x, copysign(far, x))


@triton.jit
def nextafter(x, target):
    """Return the float32 next to x in the direction of another."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    bits += tl.where((target > x) == (x > 0), 1, -1)
    smallest = tl.where(target > 0, 1, -2147483647)
    stepped = tl.where(x == 0, smallest, bits).to(tl.float32, bitcast=True)
    stepped = tl.where(target == x, target, stepped)
    return tl.where((x != x) | (target != target), float("nan"), stepped)
