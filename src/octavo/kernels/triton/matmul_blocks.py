"""Products of int8 rows with weights in GGUF's blocks, with the bits of `octavo.kernels.quantization.linear_blocks`.

Sums of 32 integers are exact, so tiles may have any shape. Narrow tiles for few rows let more processors read the
weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.kernels.block_weight import GROUP_VALUES, SUPER_GROUPS, BlockKind
from octavo.kernels.triton.launch import cdiv, kernel
from octavo.kernels.triton.loops import loop_bound
from octavo.kernels.triton.rounding import round_to

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.triton.packed_blocks import PackedBlocks

FEW_ROWS = 16  # maximum for narrow tiles


def matmul_blocks(
    rows: tuple[Tensor, Tensor, Tensor], weight: PackedBlocks, bias: Tensor | None, out: Tensor
) -> Tensor:
    """Write rows @ weight.T + bias into `out` (any row stride), and return it. rows: from `quantize_groups`."""
    values, scales, sums = rows
    num_rows, num_columns = out.shape
    block_m, block_n, num_warps = (16, 16, 2) if num_rows <= FEW_ROWS else (64, 32, 4)
    low_bits, high_bits, center, subgroups = weight.layout
    stored = weight.scales
    _matmul_blocks[cdiv(num_rows, block_m), cdiv(num_columns, block_n)](
        values,
        scales,
        sums,
        weight.low,
        weight.low if weight.high is None else weight.high,
        stored.scales,
        stored.scales if stored.minima is None else stored.minima,
        stored.scales if stored.scales_of_blocks is None else stored.scales_of_blocks,
        stored.scales if stored.minima_of_blocks is None else stored.minima_of_blocks,
        scales if bias is None else bias,
        out,
        num_rows,
        num_columns,
        out.stride(0),
        values.shape[1],
        weight.low.shape[1],
        0 if weight.high is None else weight.high.shape[1],
        weight.in_features // GROUP_VALUES,
        LOW_BITS=low_bits,
        HIGH_BITS=high_bits,
        CENTER=center,
        SUBGROUPS=subgroups,
        IS_MXFP4=weight.kind is BlockKind.MXFP4,
        HAS_MINIMA=stored.minima is not None,
        HAS_BLOCK_SCALES=stored.scales_of_blocks is not None,
        HAS_BIAS=bias is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        GROUP=GROUP_VALUES,
        SUPER_GROUPS=SUPER_GROUPS,
        num_warps=num_warps,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _load_pair(low_place, high_place, pair, is_column, HIGH_BITS: tl.constexpr, GROUP: tl.constexpr):
    """Return 64 values per column, in int32: the low four bits of two values, then their high bits."""
    bits = tl.load(low_place + pair * GROUP, mask=is_column[:, None], other=0).to(tl.int32)
    if HIGH_BITS:
        pairs_of_byte = 4 // HIGH_BITS
        high = tl.load(high_place + pair // pairs_of_byte * GROUP, mask=is_column[:, None], other=0).to(tl.int32)
        bits |= (high >> (pair % pairs_of_byte * 2 * HIGH_BITS)) << 8
    return bits


@triton.jit
def _unpack(bits, half, HIGH_BITS: tl.constexpr, CENTER: tl.constexpr, IS_MXFP4: tl.constexpr):
    code = (bits >> (4 * half)) & 15
    if HIGH_BITS:
        code |= ((bits >> (8 + half * HIGH_BITS)) & ((1 << HIGH_BITS) - 1)) << 4
    if IS_MXFP4:  # e2m1, doubled
        size = code & 7
        size = tl.where(size < 2, size, (2 + (size & 1)) << (tl.maximum(size >> 1, 1) - 1))
        code = tl.where(code < 8, size, -size)
    return (code - CENTER).to(tl.int8)


@triton.jit
def _scale(place, block_place, is_given, IS_MXFP4: tl.constexpr, HAS_BLOCK_SCALES: tl.constexpr):
    stored = tl.load(place, mask=is_given, other=0)
    if IS_MXFP4:
        exponent = stored.to(tl.int32)
        tiny = 0x00200000 << tl.minimum(exponent, 1)  # 2^-128 and 2^-127
        scale = tl.where(exponent < 2, tiny, (exponent - 1) << 23).to(tl.float32, bitcast=True)
    else:
        scale = stored.to(tl.float32)
        if HAS_BLOCK_SCALES:
            scale *= tl.load(block_place, mask=is_given, other=0.0).to(tl.float32)
    return scale


@triton.jit
def _minimum(place, block_place, is_given, HAS_BLOCK_SCALES: tl.constexpr):
    minimum = tl.load(place, mask=is_given, other=0).to(tl.float32)
    if HAS_BLOCK_SCALES:
        minimum = (0.0 - minimum) * tl.load(block_place, mask=is_given, other=0.0).to(tl.float32)
    return minimum


@kernel(do_not_specialize=["num_rows"])
def _matmul_blocks(
    x_ptr,
    x_scales_ptr,
    x_sums_ptr,
    low_ptr,
    high_ptr,
    scales_ptr,
    minima_ptr,
    block_scales_ptr,
    block_minima_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    out_stride,
    width,
    low_stride,
    high_stride,
    num_groups,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    CENTER: tl.constexpr,
    SUBGROUPS: tl.constexpr,
    IS_MXFP4: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    HAS_BLOCK_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    SUPER_GROUPS: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = row < num_rows, column < num_columns
    within = tl.arange(0, GROUP)
    wide_column = column.to(tl.int64)
    x_place = x_ptr + row.to(tl.int64)[:, None] * width + within[None, :]
    low_place = low_ptr + wide_column[:, None] * low_stride + within[None, :]
    high_place = high_ptr + wide_column[:, None] * high_stride + within[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for pair in range(loop_bound(tl.cdiv(num_groups, 2))):
        if LOW_BITS == 4:
            bits = _load_pair(low_place, high_place, pair, is_column, HIGH_BITS, GROUP)
        block = wide_column * (num_groups // SUPER_GROUPS) + pair // (SUPER_GROUPS // 2)
        for half in tl.static_range(2):
            group = 2 * pair + half
            is_given, is_row_given = is_column & (group < num_groups), is_row & (group < num_groups)
            x = tl.load(x_place + group * GROUP, mask=is_row_given[:, None], other=0)
            if LOW_BITS == 4:
                value = _unpack(bits, half, HIGH_BITS, CENTER, IS_MXFP4)
            else:
                value = tl.load(low_place + group * GROUP, mask=is_given[:, None], other=0)
            x_scale = tl.load(x_scales_ptr + group * num_rows + row, mask=is_row_given, other=0.0)[:, None]
            place = wide_column * num_groups + group
            for part in tl.static_range(SUBGROUPS):
                picked = value
                if SUBGROUPS > 1:
                    picked = tl.where((within // (GROUP // SUBGROUPS) == part)[None, :], value, 0)
                term = tl.dot(x, tl.trans(picked), out_dtype=tl.int32).to(tl.float32)
                scale_place = scales_ptr + place * SUBGROUPS + part
                term *= _scale(scale_place, block_scales_ptr + block, is_given, IS_MXFP4, HAS_BLOCK_SCALES)[None, :]
                if HAS_MINIMA:
                    x_sum = tl.load(x_sums_ptr + group * num_rows + row, mask=is_row_given, other=0.0)[:, None]
                    minimum = _minimum(minima_ptr + place, block_minima_ptr + block, is_given, HAS_BLOCK_SCALES)
                    term += x_sum * minimum[None, :]
                total += term * x_scale
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    place = out_ptr + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(place, round_to(total, out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
