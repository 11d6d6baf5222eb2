"""Products of rows with their group's weight, in one launch.

Each group has its own tiles in the shape and order of `matmul`, so results have its bits. Only the device reads the
groups' sizes, so a launch has enough tiles for any sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from octavo.kernels.triton.launch import cdiv, kernel, power_of_2_from
from octavo.kernels.triton.loops import loop_bound
from octavo.kernels.triton.matmul import BLOCK_M, BLOCK_N, num_processors, partition_product, tile_options
from octavo.kernels.triton.rounding import round_to

if TYPE_CHECKING:
    from torch import Tensor


def grouped_matmul(
    x: Tensor, weights: Tensor, group_start: Tensor, out: Tensor, sources: Tensor | None = None
) -> Tensor:
    """See `Kernels`. weights [num_groups, out_features, in_features]."""
    num_rows, width = len(out), x.shape[1]
    num_groups, num_columns, _ = weights.shape
    row_tiles = cdiv(num_rows, BLOCK_M) + num_groups  # at most
    tiles = row_tiles * cdiv(num_columns, BLOCK_N)
    _grouped_matmul[(min(tiles, num_processors(x.device)),)](
        x, weights, out, group_start, group_start if sources is None else sources, row_tiles, num_groups, len(x),
        num_columns, x.stride(0), WIDTH=width, HAS_SOURCES=sources is not None,
        MOST_GROUPS=power_of_2_from(num_groups), **tile_options(x.dtype, weights.dtype),
    )  # fmt: skip
    return out


@kernel(do_not_specialize=["most_row_tiles", "num_x_rows"])
def _grouped_matmul(
    x_ptr,
    weight_ptr,
    out_ptr,
    group_start_ptr,
    sources_ptr,
    most_row_tiles,
    num_groups,
    num_x_rows,
    num_columns,
    x_stride,
    WIDTH: tl.constexpr,
    HAS_SOURCES: tl.constexpr,
    MOST_GROUPS: tl.constexpr,
    PARTITION: tl.constexpr,
    IS_WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    groups = tl.arange(0, MOST_GROUPS)
    starts = tl.load(group_start_ptr + groups, mask=groups < num_groups, other=0)
    ends = tl.load(group_start_ptr + groups + 1, mask=groups < num_groups, other=0)
    tiles_until = tl.cumsum(tl.cdiv(ends - starts, BLOCK_M), 0)
    num_row_tiles = tl.max(tiles_until, 0)
    first, step = loop_bound(tl.program_id(0)), loop_bound(tl.num_programs(0))
    for tile in range(first, loop_bound(most_row_tiles * tl.cdiv(num_columns, BLOCK_N)), step):
        row_tile, column_tile = tile % most_row_tiles, tile // most_row_tiles
        if row_tile < num_row_tiles:
            group = tl.sum((tiles_until <= row_tile).to(tl.int32), 0)
            is_group = groups == group
            start, end = tl.sum(tl.where(is_group, starts, 0), 0), tl.sum(tl.where(is_group, ends, 0), 0)
            tiles_before = tl.max(tl.where(groups < group, tiles_until, 0), 0)
            row = start + (row_tile - tiles_before) * BLOCK_M + tl.arange(0, BLOCK_M)
            column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
            x_row, x_end = row, end
            if HAS_SOURCES:
                x_row, x_end = tl.load(sources_ptr + row, mask=row < end, other=0), num_x_rows
            weight = weight_ptr + group.to(tl.int64) * num_columns * WIDTH
            total = partition_product(
                x_ptr, weight, x_ptr, x_row, column, x_end, num_columns, x_stride, 0,
                WIDTH, PARTITION, False, IS_WIDE, 0, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            for partition in range(1, tl.cdiv(WIDTH, PARTITION)):
                total += partition_product(
                    x_ptr, weight, x_ptr, x_row, column, x_end, num_columns, x_stride, partition,
                    WIDTH, PARTITION, False, IS_WIDE, 0, BLOCK_M, BLOCK_N, BLOCK_K,
                )  # fmt: skip
            place = out_ptr + row.to(tl.int64)[:, None] * num_columns + column[None, :]
            is_there = (row < end)[:, None] & (column < num_columns)[None, :]
            tl.store(place, round_to(total, out_ptr.dtype.element_ty), mask=is_there)
