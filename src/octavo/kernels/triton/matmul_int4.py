"""Products of int8 rows with int4 weights, with the bits of `octavo.kernels.quantization.linear_int4`.

A 16-bit weight is split into signed bytes, high * 256 + low. Their sums are exact in 32 bits, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from octavo.kernels.quantization import GROUP_MULTIPLE, INT4_ZERO, Int4Weight
from octavo.kernels.triton.launch import cdiv, kernel
from octavo.kernels.triton.loops import loop_bound
from octavo.kernels.triton.matmul_blocks import FEW_ROWS
from octavo.kernels.triton.rounding import round_to

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK_N = 64
_PAIR = 2 * GROUP_MULTIPLE


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """An int4 weight in the kernel's layout.

    values: as in `PackedBlocks.low`. The rest: see `Int4Weight`, its `whole_scales` and `whole_offsets`.
    """

    values: Tensor
    multiples: Tensor
    offsets: Tensor | None
    units: Tensor
    order: Tensor | None
    in_features: int
    group_size: int

    @property
    def nbytes(self) -> int:
        """Packed bytes."""
        parts = (self.values, self.multiples, self.offsets, self.units, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    def rows(self, token_ids: Tensor) -> Tensor:
        """Return float32 rows in the weight's column order."""
        pairs = self.values[token_ids].view(len(token_ids), -1, GROUP_MULTIPLE)
        values = torch.stack((pairs & 15, pairs >> 4), dim=2).view(len(token_ids), -1)[:, : self.in_features]
        group = torch.arange(self.in_features, device=values.device) // self.group_size
        whole = (values.float() - INT4_ZERO) * self.multiples[token_ids].float()[:, group]
        if self.offsets is not None:
            whole = whole - self.offsets[token_ids].float()[:, group]
        return (whole + 0.0) * self.units[token_ids].unsqueeze(1)


def pack_int4(weight: Int4Weight) -> PackedInt4:
    """Pack a weight."""
    num_rows, width = weight.shape
    padded = torch.nn.functional.pad(weight.values, (0, -width % _PAIR)).view(num_rows, -1, 2, GROUP_MULTIPLE)
    multiples, units = weight.whole_scales()
    values = (padded[:, :, 0] | padded[:, :, 1] << 4).reshape(num_rows, -1)
    offsets = weight.whole_offsets(multiples)
    return PackedInt4(values, multiples.contiguous(), offsets, units, weight.order, width, weight.group_size)


def matmul_int4(values: Tensor, scales: Tensor, weight: PackedInt4, bias: Tensor | None, out: Tensor) -> Tensor:
    """Write float(values @ weight.T) * (scale * column's unit) + bias into contiguous `out`, and return it."""
    num_rows, num_columns = out.shape
    block_m = FEW_ROWS if num_rows <= FEW_ROWS else 64
    _matmul_int4[cdiv(num_rows, block_m), cdiv(num_columns, _BLOCK_N)](
        values,
        scales,
        weight.values,
        weight.multiples,
        weight.multiples if weight.offsets is None else weight.offsets,
        weight.units,
        scales if bias is None else bias,
        out,
        num_rows,
        num_columns,
        values.shape[1],
        weight.multiples.shape[1],
        weight.group_size,
        HAS_OFFSETS=weight.offsets is not None,
        HAS_BIAS=bias is not None,
        BLOCK_M=block_m,
        BLOCK_N=_BLOCK_N,
        HALF=GROUP_MULTIPLE,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _add_products(high_acc, low_acc, x, value, group_ptr, offset_ptr, is_column, HAS_OFFSETS: tl.constexpr):
    multiple = tl.load(group_ptr, mask=is_column, other=0).to(tl.int32)[:, None]
    whole = (value.to(tl.int32) - 8) * multiple
    if HAS_OFFSETS:
        whole -= tl.load(offset_ptr, mask=is_column, other=0).to(tl.int32)[:, None]
    high = (whole + 128) >> 8
    low = whole - high * 256
    high_acc = tl.dot(x, tl.trans(high.to(tl.int8)), high_acc, out_dtype=tl.int32)
    return high_acc, tl.dot(x, tl.trans(low.to(tl.int8)), low_acc, out_dtype=tl.int32)


@kernel(do_not_specialize=["num_rows"])
def _matmul_int4(
    x_ptr,
    scales_ptr,
    values_ptr,
    multiples_ptr,
    offsets_ptr,
    units_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    padded,
    num_groups,
    group_size,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALF: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = row < num_rows, column < num_columns
    within = tl.arange(0, HALF)
    x_place = x_ptr + row.to(tl.int64)[:, None] * padded + within[None, :]
    value_place = values_ptr + column.to(tl.int64)[:, None] * (padded // 2) + within[None, :]
    group_place = column.to(tl.int64) * num_groups
    high_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    low_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for first in range(0, loop_bound(padded), 2 * HALF):
        pair = tl.load(value_place + first // 2, mask=is_column[:, None], other=0)
        for half in tl.static_range(2):
            x = tl.load(x_place + first + half * HALF, mask=is_row[:, None], other=0)
            group = tl.minimum((first + half * HALF) // group_size, num_groups - 1)  # padding is zeros
            high_acc, low_acc = _add_products(
                high_acc, low_acc, x, (pair >> (4 * half)) & 15,
                multiples_ptr + group_place + group, offsets_ptr + group_place + group, is_column, HAS_OFFSETS,
            )  # fmt: skip
    total = (high_acc.to(tl.int64) * 256 + low_acc).to(tl.float32)
    scale = tl.load(scales_ptr + row, mask=is_row, other=0.0)
    unit = tl.load(units_ptr + column, mask=is_column, other=0.0)
    result = total * (scale[:, None] * unit[None, :])
    if HAS_BIAS:
        result += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    place = out_ptr + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(place, round_to(result, out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
