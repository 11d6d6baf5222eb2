"""Bytes of E4M3 (float8_e4m3fn), converted with integer arithmetic, with torch's bits on every device.

Triton refuses E4M3 on sm_80, gfx942 has another format (e4m3fnuz), and the interpreter (3.6) rounds differently.

    bit    7     6 5 4 3   2 1 0         value                            0x7F and 0xFF are NaN
           sign  exponent  mantissa      (1 + m / 8) * 2^(e - 7), or m / 8 * 2^-6 if e is 0
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

_BIAS = tl.constexpr(120)  # 127 of float32 - 7 of E4M3
_LEAST_NORMAL = tl.constexpr(0.015625)  # 2^-6
_MAGIC = tl.constexpr(16384.0)  # 2^14: its last float32 bit is 2^-9, as in E4M3 below 2^-6
_MAGIC_BITS = tl.constexpr(0x46800000)


def as_bytes(values: Tensor) -> Tensor:
    """View fp8 as uint8."""
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values


@triton.jit
def to_e4m3(x):
    """Round float32 `x` to E4M3 bytes, to nearest even, clamped to -448 .. 448. NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    nearest = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20  # carries into the exponent
    normal = tl.minimum(nearest - (_BIAS << 3), 0x7E)
    small = (tl.abs(x) + _MAGIC).to(tl.int32, bitcast=True) - _MAGIC_BITS
    code = tl.where(magnitude < ((_BIAS + 1) << 23), small, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def to_float32(x):
    """Convert E4M3 (uint8), or another type, to float32."""
    if x.dtype == tl.uint8:
        code = x.to(tl.int32)
        magnitude = code & 0x7F
        is_small = magnitude < 8  # subnormal
        value = ((magnitude << 20) + (tl.where(is_small, _BIAS + 1, _BIAS) << 23)).to(tl.float32, bitcast=True)
        value = tl.where(is_small, value - _LEAST_NORMAL, value)
        value = tl.where(magnitude == 0x7F, float("nan"), value)
        value = (value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
    else:
        value = x.to(tl.float32)
    return value
