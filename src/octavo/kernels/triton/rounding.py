"""Conversions between number formats, with the same bits on a GPU and in Triton's interpreter.

The interpreter (3.6) truncates to bfloat16, and computes with bfloat16's bits as integers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to nearest even


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Round float32 `x` to a floating type, to nearest even. Callers must only store the result."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)  # noqa: PLR0124  NaN stays NaN
    return x.to(dtype)


@triton.jit
def round_to_whole(x):
    """Round float32 `x`, of a magnitude below 2^22, to nearest even."""
    return (x + _MAGIC) - _MAGIC


@triton.jit
def dot(a, b, acc):
    """Return a @ b + acc in full precision, summed in float32. a and b have one floating type."""
    if INTERPRETED and a.dtype == tl.bfloat16:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif a.dtype == tl.float32 and not INTERPRETED and is_cuda():
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc
