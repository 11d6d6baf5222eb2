"""Row copies."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton.language as tl

from octavo.kernels.triton.launch import cdiv, kernel

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """See `Kernels`."""
    out = x.new_empty(rows.shape[0], *x.shape[1:])
    width = math.prod(x.shape[1:])
    _take_rows[rows.shape[0], cdiv(width, _BLOCK)](
        x, rows, out, x.stride(0), width, BLOCK=_BLOCK, enable_fp_fusion=False
    )
    return out


@kernel
def _take_rows(x_ptr, rows_ptr, out_ptr, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < width
    value = tl.load(x_ptr + tl.load(rows_ptr + row) * stride + column, mask=is_there)
    tl.store(out_ptr + row * width + column, value, mask=is_there)
