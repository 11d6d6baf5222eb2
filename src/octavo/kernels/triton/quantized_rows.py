"""int8 activations with scales, with the bits of `octavo.kernels.quantization.quantize_rows`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from octavo.kernels.block_weight import GROUP_VALUES
from octavo.kernels.rotation import rotation_block
from octavo.kernels.triton.launch import cdiv, kernel
from octavo.kernels.triton.loops import loop_bound
from octavo.kernels.triton.rounding import round_to_whole

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024
_GROUPS = 32
_LEAST_MAGNITUDE = tl.constexpr(1e-30)


def quantize_rows(x: Tensor, padded: int, *, rotated: bool, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (int8 [num_tokens, padded], float32 scales [num_tokens]). Padding is zeros.

    order int32: each column's feature.
    """
    num_rows, width = x.shape
    values = torch.empty(num_rows, padded, dtype=torch.int8, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    _quantize_rows[(num_rows,)](
        x,
        x if order is None else order,
        values,
        scales,
        x.stride(0),
        width,
        padded,
        HAS_ORDER=order is not None,
        LEVELS=rotation_block(width).bit_length() - 1 if rotated else 0,
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )
    return values, scales


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round x to int8 with one scale per 32 columns. 32 must divide the width.

    Returns (int8 values, float32 scales [groups, num_tokens], float32 sums of values, likewise).
    """
    num_rows, width = x.shape
    num_groups = width // GROUP_VALUES
    values = torch.empty(num_rows, width, dtype=torch.int8, device=x.device)
    scales = torch.empty(num_groups, num_rows, dtype=torch.float32, device=x.device)
    sums = torch.empty_like(scales)
    _quantize_groups[num_rows, cdiv(num_groups, _GROUPS)](
        x, values, scales, sums, x.stride(0), width, num_rows,
        GROUPS=_GROUPS, SIZE=GROUP_VALUES, enable_fp_fusion=False,
    )  # fmt: skip
    return values, scales, sums


@triton.jit
def _rotated(x, BLOCK: tl.constexpr, LEVELS: tl.constexpr):
    """See `octavo.kernels.rotation`."""
    for level in tl.static_range(LEVELS):
        pairs = tl.permute(tl.reshape(x, [BLOCK >> (level + 1), 2, 1 << level]), (0, 2, 1))
        first, second = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 2, 1)), [BLOCK])
    return x


@triton.jit
def _load(x_ptr, order_ptr, column, width, HAS_ORDER: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr):
    is_there = column < width
    source = tl.load(order_ptr + column, mask=is_there, other=0) if HAS_ORDER else column
    return _rotated(tl.load(x_ptr + source, mask=is_there, other=0.0).to(tl.float32), BLOCK, LEVELS)


@triton.jit
def _scale_and_inverse(magnitude):
    is_finite = magnitude < float("inf")
    has_inverse = is_finite & (magnitude >= _LEAST_MAGNITUDE)
    inverse = tl.where(has_inverse, tl.div_rn(127.0, tl.where(has_inverse, magnitude, 1.0)), 0.0)
    return tl.where(is_finite, tl.div_rn(magnitude, 127.0), float("nan")), inverse


@triton.jit
def _rounded(x, inverse):
    return tl.where(inverse > 0.0, round_to_whole(x * inverse), 0.0)  # x may be NaN


@kernel(do_not_specialize=["num_rows"])
def _quantize_groups(
    x_ptr, values_ptr, scales_ptr, sums_ptr, x_stride, width, num_rows, GROUPS: tl.constexpr, SIZE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    is_given = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=is_given, other=0.0).to(tl.float32)
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)  # NaN is the largest
    scale, inverse = _scale_and_inverse(largest.to(tl.float32, bitcast=True))
    value = _rounded(x, inverse[:, None])
    place = group.to(tl.int64) * num_rows + row
    tl.store(scales_ptr + place, scale, mask=group * SIZE < width)
    tl.store(sums_ptr + place, tl.sum(value, axis=1), mask=group * SIZE < width)
    tl.store(values_ptr + row * width + column, value.to(tl.int8), mask=is_given)


@kernel
def _quantize_rows(
    x_ptr,
    order_ptr,
    values_ptr,
    scales_ptr,
    x_stride,
    width,
    padded,
    HAS_ORDER: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    lanes = tl.zeros([BLOCK], tl.int32)
    for first in range(0, loop_bound(width), BLOCK):
        x = _load(x_ptr, order_ptr, first + tl.arange(0, BLOCK), width, HAS_ORDER, BLOCK, LEVELS)
        lanes = tl.maximum(lanes, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)  # NaN is the largest
    scale, inverse = _scale_and_inverse(tl.max(lanes).to(tl.float32, bitcast=True))
    tl.store(scales_ptr + row, scale)
    for first in range(0, loop_bound(padded), BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = _load(x_ptr, order_ptr, column, width, HAS_ORDER, BLOCK, LEVELS)
        tl.store(values_ptr + row * padded + column, _rounded(x, inverse).to(tl.int8), mask=column < padded)
