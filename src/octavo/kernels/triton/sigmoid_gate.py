"""Gates of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from octavo.kernels.triton.exponentials import sigmoid
from octavo.kernels.triton.launch import cdiv, kernel
from octavo.kernels.triton.rounding import round_to

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024


def sigmoid_gate(x: Tensor, gate: Tensor) -> None:
    """See `octavo.kernels.operations.sigmoid_gate`."""
    num_rows, width = len(x), x.shape[1] * x.shape[2]
    _sigmoid_gate[num_rows, cdiv(width, _BLOCK)](
        x, gate, x.stride(0), gate.stride(0), width, BLOCK=_BLOCK, enable_fp_fusion=False
    )


@kernel
def _sigmoid_gate(x_ptr, gate_ptr, x_stride, gate_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < width
    place = x_ptr + row * x_stride + column
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=is_there).to(tl.float32)
    product = tl.load(place, mask=is_there).to(tl.float32) * sigmoid(gate)
    tl.store(place, round_to(product, x_ptr.dtype.element_ty), mask=is_there)
