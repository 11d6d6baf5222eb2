"""Gates of MLPs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.kernels.interface import GATE_LIMIT, GATE_SLOPE
from octavo.kernels.triton.exponentials import exponential
from octavo.kernels.triton.launch import cdiv, kernel
from octavo.kernels.triton.rounding import round_to

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.interface import Activation

_BLOCK = 1024
_LIMIT, _SLOPE = tl.constexpr(GATE_LIMIT), tl.constexpr(GATE_SLOPE)


def gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """See `Kernels`."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    _gate[num_rows, cdiv(width, _BLOCK)](
        gate_up, out, gate_up.stride(0), width, ACTIVATION=activation, BLOCK=_BLOCK, enable_fp_fusion=False
    )
    return out


@triton.jit
def activated(x, up, ACTIVATION: tl.constexpr):
    """Return activation(x) * up. The tanh approximation of GELU, x (1 + tanh(u)) / 2, is x / (1 + e^-2u)."""
    exponent = x
    if ACTIVATION == "gelu_tanh":
        exponent = 1.5957691216057308 * (x + 0.044715 * (x * x * x))  # 2 sqrt(2 / pi)
    if ACTIVATION == "clamped_silu":
        x = tl.where(x > _LIMIT, _LIMIT, x)  # NaN stays
        exponent = _SLOPE * x
        up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up)) + 1.0
    return tl.div_rn(x, 1.0 + exponential(-exponent)) * up


@kernel
def _gate(gate_up_ptr, out_ptr, stride, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < width
    place = gate_up_ptr + row * stride + column
    gate = tl.load(place, mask=is_there).to(tl.float32)
    up = tl.load(place + width, mask=is_there).to(tl.float32)
    product = activated(gate, up, ACTIVATION)
    tl.store(out_ptr + row * width + column, round_to(product, out_ptr.dtype.element_ty), mask=is_there)
