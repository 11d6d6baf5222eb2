"""Products with one weight per head, in one launch, with the bits of `matmul`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from octavo.kernels.triton.launch import cdiv, kernel
from octavo.kernels.triton.matmul import BLOCK_M, BLOCK_N, partition_product, tile_options
from octavo.kernels.triton.rounding import round_to

if TYPE_CHECKING:
    from torch import Tensor


def head_matmul(x: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """See `Kernels.head_linear`. weights [num_heads, out_features, in_features]."""
    num_rows, num_heads, width = x.shape
    num_columns = weights.shape[1]
    if num_rows:
        _head_matmul[cdiv(num_rows, BLOCK_M), cdiv(num_columns, BLOCK_N), num_heads](
            x, weights, out, num_rows, num_columns, x.stride(0), x.stride(1), out.stride(0), out.stride(1),
            WIDTH=width, **tile_options(x.dtype, weights.dtype),
        )  # fmt: skip
    return out


@kernel(do_not_specialize=["num_rows"])
def _head_matmul(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    num_columns,
    x_stride,
    x_head_stride,
    out_stride,
    out_head_stride,
    WIDTH: tl.constexpr,
    PARTITION: tl.constexpr,
    IS_WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    head = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = x_ptr + head * x_head_stride
    weight = weight_ptr + head * num_columns * WIDTH
    total = partition_product(
        x, weight, x, row, column, num_rows, num_columns, x_stride, 0,
        WIDTH, PARTITION, False, IS_WIDE, 0, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    for partition in range(1, tl.cdiv(WIDTH, PARTITION)):
        total += partition_product(
            x, weight, x, row, column, num_rows, num_columns, x_stride, partition,
            WIDTH, PARTITION, False, IS_WIDE, 0, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    place = out_ptr + head * out_head_stride + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    is_there = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    tl.store(place, round_to(total, out_ptr.dtype.element_ty), mask=is_there)
