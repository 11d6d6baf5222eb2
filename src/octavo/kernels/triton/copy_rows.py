"""Copies of heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from octavo.kernels.triton.launch import cdiv, kernel

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024


def copy_rows(x: Tensor, out: Tensor) -> None:
    """See `octavo.kernels.operations.copy_rows`."""
    num_rows, width = len(x), x.shape[1] * x.shape[2]
    _copy_rows[num_rows, cdiv(width, _BLOCK)](
        x, out, x.stride(0), out.stride(0), width, BLOCK=_BLOCK, enable_fp_fusion=False
    )


@kernel
def _copy_rows(x_ptr, out_ptr, x_stride, out_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < width
    value = tl.load(x_ptr + row * x_stride + column, mask=is_there)
    tl.store(out_ptr + row * out_stride + column, value, mask=is_there)
