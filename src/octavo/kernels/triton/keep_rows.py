"""Copies of inputs that later steps replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.kernels.triton.launch import cdiv, kernel

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.state_batch import StateBatch

_BLOCK = 1024


def keep_rows(x: Tensor, mixed: Tensor, rates: Tensor, kept: Tensor, batch: StateBatch) -> None:
    """See `octavo.kernels.operations.keep_rows`."""
    _keep_rows[len(batch.keep_from), cdiv(kept.shape[1], _BLOCK)](
        x, mixed, rates, kept, batch.keep_from, batch.keep_to, x.stride(0), mixed.stride(0), rates.stride(0),
        kept.stride(0), x.shape[1], mixed.shape[1], rates.shape[1], BLOCK=_BLOCK, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _copy_part(part_ptr, source, stride, width, kept_ptr, column):
    is_there = (column >= 0) & (column < width)
    tl.store(kept_ptr + column, tl.load(part_ptr + source * stride + column, mask=is_there), mask=is_there)


@kernel
def _keep_rows(
    x_ptr, mixed_ptr, rates_ptr, kept_ptr, keep_from_ptr, keep_to_ptr, x_stride, mixed_stride, rates_stride,
    kept_stride, x_width, mixed_width, rates_width, BLOCK: tl.constexpr,
):  # fmt: skip
    source = tl.load(keep_from_ptr + tl.program_id(0)).to(tl.int64)
    kept_ptr += tl.load(keep_to_ptr + tl.program_id(0)).to(tl.int64) * kept_stride
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _copy_part(x_ptr, source, x_stride, x_width, kept_ptr, column)
    _copy_part(mixed_ptr, source, mixed_stride, mixed_width, kept_ptr + x_width, column - x_width)
    before = x_width + mixed_width
    _copy_part(rates_ptr, source, rates_stride, rates_width, kept_ptr + before, column - before)
