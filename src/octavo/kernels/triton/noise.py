"""Octavo noise v1 (`octavo.kernels.noise`) on a GPU.

Compile callers with `enable_fp_fusion=False`: each operation must be rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SQRT_HALF_BITS = tl.constexpr(0x3F3504F3)
_LN2_HIGH = tl.constexpr(6.9313812256e-01)
_LN2_LOW = tl.constexpr(9.0580006145e-06)


@triton.jit
def noise_words(counter, seed, position, sample_index):
    """Return each counter's four random words, uint32. `tl.philox` gives the same, slowly in the interpreter."""
    key_0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    key_1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    nothing = counter.to(tl.uint32) * 0
    word_0, word_1 = counter.to(tl.uint32), nothing + position.to(tl.uint32)
    word_2, word_3 = nothing + sample_index.to(tl.uint32), nothing
    for _ in tl.static_range(10):
        product_0 = word_0.to(tl.uint64) * 0xD2511F53
        product_1 = word_2.to(tl.uint64) * 0xCD9E8D57
        word_0 = (product_1 >> 32).to(tl.uint32) ^ word_1 ^ key_0
        word_2 = (product_0 >> 32).to(tl.uint32) ^ word_3 ^ key_1
        word_1, word_3 = product_1.to(tl.uint32), product_0.to(tl.uint32)
        key_0 += 0x9E3779B9
        key_1 += 0xBB67AE85
    return word_0, word_1, word_2, word_3


@triton.jit
def word_to_gumbel(word):
    """Return Gumbel noise."""
    signed = word.to(tl.int32, bitcast=True)
    is_upper = signed < 0
    distance = tl.where(is_upper, ~signed, signed)  # 2^32 - 1 - word is its complement
    t = (distance.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    exponential = tl.where(is_upper, -logarithm(t), twice_atanh(tl.div_rn(t, 2.0 - t)))
    return -logarithm(exponential)


@triton.jit
def logarithm(value):
    """Return ln of positive float32 numbers that are not subnormal."""
    bits = value.to(tl.int32, bitcast=True)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    power = exponent.to(tl.float32)
    return power * _LN2_HIGH + (twice_atanh(tl.div_rn(mantissa - 1.0, mantissa + 1.0)) + power * _LN2_LOW)


@triton.jit
def twice_atanh(s):
    """Return 2 atanh(s) of float32 |s| <= 1/3."""
    z = s * s
    q = s * 0.0 + 1.0 / 15.0
    q = q * z + 1.0 / 13.0
    q = q * z + 1.0 / 11.0
    q = q * z + 1.0 / 9.0
    q = q * z + 1.0 / 7.0
    q = q * z + 1.0 / 5.0
    q = q * z + 1.0 / 3.0
    twice = s + s
    return twice + twice * (z * q)
