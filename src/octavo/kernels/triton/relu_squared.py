"""Activations of MLPs without a gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from octavo.kernels.triton.launch import cdiv, kernel
from octavo.kernels.triton.rounding import round_to

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024


def relu_squared(x: Tensor) -> None:
    """See `octavo.kernels.operations.relu_squared`."""
    num_rows, width = x.shape
    _relu_squared[num_rows, cdiv(width, _BLOCK)](x, width, BLOCK=_BLOCK, enable_fp_fusion=False)


@kernel
def _relu_squared(x_ptr, width, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < width
    place = x_ptr + tl.program_id(0).to(tl.int64) * width + column
    x = tl.load(place, mask=is_there).to(tl.float32)
    x = tl.where(x < 0.0, 0.0, x)  # NaN stays
    tl.store(place, round_to(x * x, x_ptr.dtype.element_ty), mask=is_there)
