"""What is computed value by value: sums with the residual, gates, soft caps, quotients.

Nothing is fused and every step rounds once, so that a value is the same whatever else a program holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.kernels.triton.exponentials import exponential, hyperbolic_tangent
from octavo.kernels.triton.rounding import round_to

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.interface import Activation

_BLOCK = 1024


def add(x: Tensor, residual: Tensor, scale: float) -> None:
    """Add x * scale to `residual` [num_tokens, hidden] in place, in float32, rounded once."""
    num_rows, width = residual.shape
    _add[num_rows, triton.cdiv(width, _BLOCK)](
        x, residual, x.stride(0), residual.stride(0), scale, width, BLOCK=_BLOCK, enable_fp_fusion=False
    )


def gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return activation(gate) * up: [num_tokens, 2 * intermediate], gate first -> [num_tokens, intermediate]."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    _gate[num_rows, triton.cdiv(width, _BLOCK)](
        gate_up, out, gate_up.stride(0), width, IS_SILU=activation == "silu", BLOCK=_BLOCK, enable_fp_fusion=False
    )
    return out


def soft_cap(x: Tensor, cap: float) -> None:
    """Replace float32 x, contiguous, by cap * tanh(x / cap)."""
    _soft_cap[(triton.cdiv(x.numel(), _BLOCK),)](x, cap, x.numel(), BLOCK=_BLOCK, enable_fp_fusion=False)


def divide(x: Tensor, divisor: float) -> None:
    """Divide float32 x, contiguous, in place."""
    _divide[(triton.cdiv(x.numel(), _BLOCK),)](x, divisor, x.numel(), BLOCK=_BLOCK, enable_fp_fusion=False)


@triton.jit
def _add(x_ptr, residual_ptr, x_stride, residual_stride, scale, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=is_there).to(tl.float32)
    place = residual_ptr + row * residual_stride + column
    total = tl.load(place, mask=is_there).to(tl.float32) + x * scale
    tl.store(place, round_to(total, residual_ptr.dtype.element_ty), mask=is_there)


@triton.jit
def activated(x, IS_SILU: tl.constexpr):
    """Return silu(x), or GELU as tanh approximates it: x (1 + tanh(u)) / 2 is x / (1 + e^-2u)."""
    exponent = x if IS_SILU else 1.5957691216057308 * (x + 0.044715 * (x * x * x))  # 2 sqrt(2 / pi)
    return tl.div_rn(x, 1.0 + exponential(-exponent))


@triton.jit
def _gate(gate_up_ptr, out_ptr, stride, width, IS_SILU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < width
    place = gate_up_ptr + row * stride + column
    gate = tl.load(place, mask=is_there).to(tl.float32)
    up = tl.load(place + width, mask=is_there).to(tl.float32)
    product = activated(gate, IS_SILU) * up
    tl.store(out_ptr + row * width + column, round_to(product, out_ptr.dtype.element_ty), mask=is_there)


@triton.jit
def _soft_cap(x_ptr, cap, num_values, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = index < num_values
    x = tl.load(x_ptr + index, mask=is_there)
    tl.store(x_ptr + index, hyperbolic_tangent(tl.div_rn(x, cap)) * cap, mask=is_there)


@triton.jit
def _divide(x_ptr, divisor, num_values, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = index < num_values
    tl.store(x_ptr + index, tl.div_rn(tl.load(x_ptr + index, mask=is_there), divisor), mask=is_there)
