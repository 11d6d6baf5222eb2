"""e^x with the same bits on every GPU and in the interpreter. Compile callers with `enable_fp_fusion=False`."""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN2_HIGH = tl.constexpr(0.693145751953125)  # last 9 bits 0: products with small integers are exact
_LN2_LOW = tl.constexpr(1.42860682030941723212e-6)
_LN2_HIGH_64 = tl.constexpr(6.93147180369123816490e-01)
_LN2_LOW_64 = tl.constexpr(1.90821492927058770002e-10)
_ROUNDING_64 = tl.constexpr(6755399441055744.0)  # 1.5 * 2^52: the low bits of a sum with it are a rounded integer


@triton.jit
def _powers(x):
    """Return (2^n, e^r - 1) with x = n ln 2 + r, |r| <= ln 2 / 2; float32 x in -87 .. 88."""
    n = tl.floor(x * _LOG2_E + 0.5)
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = r * (1.0 / 5040.0) + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    return ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True), r + (r * r) * p


@triton.jit
def exponential(x):
    """Return e^x of float32, infinity above 88, and e^-87 below -87."""
    power, rest = _powers(tl.minimum(tl.maximum(x, -87.0), 88.0))
    return tl.where(x > 88.0, float("inf"), power + power * rest)


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + e^-x) of float32."""
    return tl.where(x == x, tl.div_rn(1.0, 1.0 + exponential(-x)), x)  # noqa: PLR0124  NaN stays


@triton.jit
def hyperbolic_tangent(x):
    """Return tanh(x) = m / (m + 2) for m = e^2|x| - 1, with the sign of x."""
    magnitude = tl.abs(x)
    power, rest = _powers(tl.minimum(magnitude + magnitude, 40.0))
    minus_one = (power - 1.0) + power * rest
    result = tl.div_rn(minus_one, minus_one + 2.0)
    result = tl.where(x < 0.0, -result, result)
    return tl.where((x == 0.0) | (x != x), x, result)  # noqa: PLR0124  NaN, and the sign of 0


@triton.jit
def exponential_64(x):
    """Return e^x of float64 x <= 0, and e^-700 below -700, as in csrc/selection.h."""
    x = tl.minimum(tl.maximum(x, -700.0), 0.0)
    shifted = x * _LOG2_E + _ROUNDING_64
    n = shifted - _ROUNDING_64
    r = (x - n * _LN2_HIGH_64) - n * _LN2_LOW_64
    p = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0
    p = p * r + 1.0 / 39916800.0
    p = p * r + 1.0 / 3628800.0
    p = p * r + 1.0 / 362880.0
    p = p * r + 1.0 / 40320.0
    p = p * r + 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    return (p.to(tl.int64, bitcast=True) + (shifted.to(tl.int64, bitcast=True) << 52)).to(tl.float64, bitcast=True)
