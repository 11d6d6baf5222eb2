"""Products with weights, x @ weight.T: see docs/gpu.md.

A row's bits depend only on its own values, because split products, small tiles and large tiles add the same products in
the same order, with the same instruction. tools/gpu_check.py tests on a device that a row of a tile's product (wgmma,
mma, mfma) does not depend on other rows.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.e4m3 import to_float32
from octavo.kernels.triton.launch import cdiv, kernel
from octavo.kernels.triton.loops import loop_bound
from octavo.kernels.triton.rounding import dot, round_to
from octavo.kernels.triton.target import has_tensor_memory, is_amd

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_M, BLOCK_N = 64, 128
LARGE_BLOCK_M = 128  # if there are many rows
PARTITION = 512  # columns of K; a multiple of BLOCK_K
_GROUP = 8  # tiles of rows that share cached inputs
_SPLIT_SHARE = 3  # K is divided for more than BLOCK_M rows if tiles occupy at most this part of the processors
_RESIDENT_WARPS = 8  # of a processor, with 255 registers per thread
_INTERPRETED_PROCESSORS = 4


def matmul(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    groups: tuple[Tensor, int] | None = None,
) -> Tensor:
    """Write x @ weight.T + bias into contiguous `out` [num_tokens, out_features], and return it.

    - Floats of different types are converted to float32.
    - int8 x and weight: sums are multiplied by (scales[0] of the row * scales[1] of the column).
    - weight in E4M3 bytes: groups = (scales float32 [out_features, groups], values in a group).

    The bias is added in float32. The result is rounded once.
    """
    num_rows, width = x.shape
    num_columns = weight.shape[0]
    num_partitions = max(1, cdiv(width, PARTITION))
    processors = num_processors(x.device)
    most_split_rows, least_large_rows = row_limits(num_partitions, num_columns, processors)
    row_scales, column_scales = (x, x) if scales is None else scales
    is_integer, has_bias = scales is not None, bias is not None
    options = {"WIDTH": width, "IS_INTEGER": is_integer, "FP8_GROUP": 0}
    if groups is None:
        options |= tile_options(x.dtype, weight.dtype)
    else:
        column_scales, group_size = groups
        options |= tile_options(x.dtype, x.dtype) | {"FP8_GROUP": min(group_size, width)}
    bias = x if bias is None else bias
    if num_rows > most_split_rows:
        if num_rows >= least_large_rows:
            options |= large_tile_options(options)
        tiles = cdiv(num_rows, options["BLOCK_M"]) * cdiv(num_columns, BLOCK_N)
        _matmul[(min(tiles, processors * (_RESIDENT_WARPS // options["num_warps"])),)](
            x, weight, out, bias, row_scales, column_scales, num_rows, num_columns, x.stride(0),
            HAS_BIAS=has_bias, GROUP=_GROUP, **options,
        )  # fmt: skip
        return out
    acc_dtype = torch.float32 if scales is None else torch.int32
    partials = torch.empty(num_partitions, num_rows, num_columns, dtype=acc_dtype, device=x.device)
    _multiply_partition[num_partitions, cdiv(num_columns, BLOCK_N), cdiv(num_rows, BLOCK_M)](
        x, weight, partials, column_scales, num_rows, num_columns, x.stride(0), **options
    )
    _add_partitions[num_rows, cdiv(num_columns, BLOCK_N)](
        partials, out, bias, row_scales, column_scales, num_rows, num_columns, NUM_PARTITIONS=num_partitions,
        HAS_BIAS=has_bias, IS_INTEGER=is_integer, BLOCK_N=BLOCK_N, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@functools.cache
def row_limits(num_partitions: int, num_columns: int, processors: int) -> tuple[int, int]:
    """Return (up to how many rows K is divided among programs, from how many rows on tiles are large).

    Tiles that cannot be large stay small: see `large_tile_options`.
    """
    column_tiles = cdiv(num_columns, BLOCK_N)
    most_split_rows = 0
    if num_partitions > 1 and column_tiles < processors:
        most_split_rows = BLOCK_M * max(1, processors // (_SPLIT_SHARE * column_tiles))
    row_tiles = cdiv(processors, 2 * column_tiles)  # large tiles for half of the processors
    least_large_rows = LARGE_BLOCK_M * (row_tiles - 1) + 1
    return most_split_rows, max(least_large_rows, most_split_rows + 1, BLOCK_M + 1)


def rows_of_tilings(num_columns: int, width: int, device: torch.device) -> tuple[int, int]:
    """Return the smallest numbers of rows of products that are not split, and of products with large tiles."""
    most_split_rows, least_large_rows = row_limits(cdiv(width, PARTITION), num_columns, num_processors(device))
    return most_split_rows + 1, least_large_rows


def largest_partial_sums(num_rows: int, num_columns: int, width: int, device: torch.device) -> int:
    """Return the bytes of partial sums of up to `num_rows` rows."""
    num_partitions = cdiv(width, PARTITION)
    most_split_rows, _ = row_limits(num_partitions, num_columns, num_processors(device))
    return num_partitions * min(num_rows, most_split_rows) * num_columns * 4


def tile_options(x_dtype: torch.dtype, weight_dtype: torch.dtype) -> dict[str, int | bool]:
    """Return tile shapes and compile options for any number of rows."""
    is_wide = x_dtype != weight_dtype or x_dtype == torch.float32
    return {
        "IS_WIDE": is_wide,
        "PARTITION": PARTITION,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": 32 if is_wide else 64,
        "num_warps": 8 if is_wide else 4,
        "num_stages": 2 if is_wide or is_amd() else 3,
        "enable_fp_fusion": False,
    }


def large_tile_options(options: dict[str, int | bool]) -> dict[str, int | bool]:
    """Return the changes of `tile_options` for many rows, or nothing if tiles must stay small.

    - On sm_100 the shape of the instruction depends on the number of rows.
    - float32 needs too many registers.
    - With weights in fp8, code of Triton before 3.9 lacks a barrier between warp groups (see compiled_code.py).
    """
    if options["IS_WIDE"] or options["FP8_GROUP"] or has_tensor_memory():
        return {}
    return {"BLOCK_M": LARGE_BLOCK_M, "num_warps": 8}


def num_processors(device: torch.device) -> int:
    """Return how many programs run simultaneously; few in the interpreter, so that programs loop."""
    return _INTERPRETED_PROCESSORS if device.type == "cpu" else _num_processors(device)


@functools.cache
def _num_processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def partition_product(
    x_ptr,
    weight_ptr,
    column_scales_ptr,
    row,
    column,
    num_rows,
    num_columns,
    x_stride,
    partition,
    WIDTH: tl.constexpr,
    PARTITION: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    IS_WIDE: tl.constexpr,
    FP8_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return a tile's float32 or int32 sums over one partition."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if IS_INTEGER else tl.float32)
    x_place = x_ptr + (row.to(tl.int64) * x_stride)[:, None]
    weight_place = weight_ptr + (column.to(tl.int64) * WIDTH)[None, :]
    is_row, is_column = (row < num_rows)[:, None], (column < num_columns)[None, :]
    first = partition * PARTITION
    for step in range(PARTITION // BLOCK_K):
        k = first + step * BLOCK_K + tl.arange(0, BLOCK_K)
        is_there = k < WIDTH
        x = tl.load(x_place + k[None, :], mask=is_row & is_there[None, :], other=0)
        weight = tl.load(weight_place + k[:, None], mask=is_column & is_there[:, None], other=0)
        if FP8_GROUP:
            group = tl.minimum(first + step * BLOCK_K, WIDTH - 1) // FP8_GROUP
            scale_place = column_scales_ptr + column.to(tl.int64) * tl.cdiv(WIDTH, FP8_GROUP) + group
            scale = tl.load(scale_place, mask=column < num_columns, other=0.0)
            weight = round_to(to_float32(weight) * scale[None, :], x.dtype)
        if IS_INTEGER:
            acc = tl.dot(x, weight, acc, out_dtype=tl.int32)
        elif IS_WIDE:
            acc = tl.dot(x.to(tl.float32), weight.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = dot(x, weight, acc)
    return acc


@triton.jit
def _finished(
    total, row, column, bias_ptr, row_scales_ptr, column_scales_ptr, num_rows, num_columns,
    HAS_BIAS: tl.constexpr, IS_INTEGER: tl.constexpr,
):  # fmt: skip
    if IS_INTEGER:
        row_scale = tl.load(row_scales_ptr + row, mask=row < num_rows, other=0.0)
        column_scale = tl.load(column_scales_ptr + column, mask=column < num_columns, other=0.0)
        total = total.to(tl.float32) * (row_scale[:, None] * column_scale[None, :])
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=column < num_columns, other=0.0).to(tl.float32)[None, :]
    return total


@kernel(do_not_specialize=["num_rows"])  # one binary for any number
def _matmul(
    x_ptr,
    weight_ptr,
    out_ptr,
    bias_ptr,
    row_scales_ptr,
    column_scales_ptr,
    num_rows,
    num_columns,
    x_stride,
    WIDTH: tl.constexpr,
    PARTITION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    IS_WIDE: tl.constexpr,
    FP8_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    row_tiles, column_tiles = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N)
    first, step = loop_bound(tl.program_id(0)), loop_bound(tl.num_programs(0))
    for tile in range(first, loop_bound(row_tiles * column_tiles), step):
        group = tile // (GROUP * column_tiles)
        of_group = tile % (GROUP * column_tiles)
        group_rows = tl.minimum(row_tiles - group * GROUP, GROUP)
        row = (group * GROUP + of_group % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
        column = (of_group // group_rows) * BLOCK_N + tl.arange(0, BLOCK_N)
        total = partition_product(
            x_ptr, weight_ptr, column_scales_ptr, row, column, num_rows, num_columns, x_stride, 0,
            WIDTH, PARTITION, IS_INTEGER, IS_WIDE, FP8_GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        for partition in range(1, tl.cdiv(WIDTH, PARTITION)):
            total += partition_product(
                x_ptr, weight_ptr, column_scales_ptr, row, column, num_rows, num_columns, x_stride, partition,
                WIDTH, PARTITION, IS_INTEGER, IS_WIDE, FP8_GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        result = _finished(
            total, row, column, bias_ptr, row_scales_ptr, column_scales_ptr, num_rows, num_columns, HAS_BIAS, IS_INTEGER
        )
        place = out_ptr + row.to(tl.int64)[:, None] * num_columns + column[None, :]
        is_there = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        tl.store(place, round_to(result, out_ptr.dtype.element_ty), mask=is_there)


@kernel(do_not_specialize=["num_rows"])
def _multiply_partition(
    x_ptr,
    weight_ptr,
    partials_ptr,
    column_scales_ptr,
    num_rows,
    num_columns,
    x_stride,
    WIDTH: tl.constexpr,
    PARTITION: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    IS_WIDE: tl.constexpr,
    FP8_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    partition = tl.program_id(0)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = partition_product(
        x_ptr, weight_ptr, column_scales_ptr, row, column, num_rows, num_columns, x_stride, partition,
        WIDTH, PARTITION, IS_INTEGER, IS_WIDE, FP8_GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    place = partials_ptr + (partition.to(tl.int64) * num_rows + row)[:, None] * num_columns + column[None, :]
    tl.store(place, acc, mask=(row < num_rows)[:, None] & (column < num_columns)[None, :])


@kernel(do_not_specialize=["num_rows"])
def _add_partitions(
    partials_ptr,
    out_ptr,
    bias_ptr,
    row_scales_ptr,
    column_scales_ptr,
    num_rows,
    num_columns,
    NUM_PARTITIONS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0) + tl.arange(0, 1)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_there = (column < num_columns)[None, :]
    place = row.to(tl.int64)[:, None] * num_columns + column[None, :]
    total = tl.load(partials_ptr + place, mask=is_there, other=0)
    for _ in range(1, NUM_PARTITIONS):
        partials_ptr += num_rows.to(tl.int64) * num_columns
        total += tl.load(partials_ptr + place, mask=is_there, other=0)
    result = _finished(
        total, row, column, bias_ptr, row_scales_ptr, column_scales_ptr, num_rows, num_columns, HAS_BIAS, IS_INTEGER
    )
    tl.store(out_ptr + place, round_to(result, out_ptr.dtype.element_ty), mask=is_there)
