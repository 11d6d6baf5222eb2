"""Gates of MLPs, unfused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.kernels.triton.exponentials import exponential
from octavo.kernels.triton.rounding import round_to

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.interface import Activation

_BLOCK = 1024


def gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """See `Kernels`."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    _gate[num_rows, triton.cdiv(width, _BLOCK)](
        gate_up, out, gate_up.stride(0), width, IS_SILU=activation == "silu", BLOCK=_BLOCK, enable_fp_fusion=False
    )
    return out


@triton.jit
def activated(x, IS_SILU: tl.constexpr):
    """Return silu(x), or GELU by tanh: x (1 + tanh(u)) / 2 is x / (1 + e^-2u)."""
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
