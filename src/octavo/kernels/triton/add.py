"""Residual additions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from octavo.kernels.triton.launch import cdiv, kernel
from octavo.kernels.triton.rounding import round_to

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024


def add(x: Tensor, residual: Tensor, scale: float) -> None:
    """See `octavo.kernels.operations.add`."""
    num_rows, width = residual.shape
    _add[num_rows, cdiv(width, _BLOCK)](
        x, residual, x.stride(0), residual.stride(0), scale, width, BLOCK=_BLOCK, enable_fp_fusion=False
    )


@kernel
def _add(x_ptr, residual_ptr, x_stride, residual_stride, scale, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=is_there).to(tl.float32)
    place = residual_ptr + row * residual_stride + column
    total = tl.load(place, mask=is_there).to(tl.float32) + x * scale
    tl.store(place, round_to(total, residual_ptr.dtype.element_ty), mask=is_there)
