"""Products of elements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from octavo.kernels.triton.launch import cdiv, kernel
from octavo.kernels.triton.rounding import round_to

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024


def multiply(x: Tensor, factor: Tensor) -> None:
    """See `octavo.kernels.operations.multiply`."""
    num_rows, width = x.shape
    _multiply[num_rows, cdiv(width, _BLOCK)](
        x, factor, x.stride(0), factor.stride(0), width, BLOCK=_BLOCK, enable_fp_fusion=False
    )


@kernel
def _multiply(x_ptr, factor_ptr, x_stride, factor_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < width
    place = x_ptr + row * x_stride + column
    factor = tl.load(factor_ptr + row * factor_stride + column, mask=is_there).to(tl.float32)
    product = tl.load(place, mask=is_there).to(tl.float32) * factor
    tl.store(place, round_to(product, x_ptr.dtype.element_ty), mask=is_there)
