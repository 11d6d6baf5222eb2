"""Norms with a gate. The order of sums depends only on the size of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.kernels.triton.elementwise import activated
from octavo.kernels.triton.launch import cdiv, kernel, power_of_2_from
from octavo.kernels.triton.norms import inverse_rms
from octavo.kernels.triton.rounding import round_to

if TYPE_CHECKING:
    from torch import Tensor

_VALUES = 1024  # that a program loads together


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int, gate_first: bool, out: Tensor
) -> None:
    """See `octavo.kernels.operations.gated_norm`."""
    num_groups = x.shape[1] // group_size
    lanes = min(power_of_2_from(group_size), _VALUES)
    rows = _VALUES // lanes
    _gated_norm[(cdiv(len(x) * num_groups, rows),)](
        x, gate, weight, out, len(x) * num_groups, num_groups, x.stride(0), gate.stride(0), out.stride(0), eps,
        WIDTH=group_size, IS_SHARED=len(weight) == group_size, GATE_FIRST=gate_first, ROWS=rows, LANES=lanes,
        LEVELS=lanes.bit_length() - 1, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _values(x_ptr, gate_ptr, column, is_there, GATE_FIRST: tl.constexpr):
    """Return the values to normalize, and the gate."""
    x = tl.load(x_ptr + column, mask=is_there, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + column, mask=is_there, other=0.0).to(tl.float32)
    if GATE_FIRST:
        x = activated(gate, x, "silu")
    return x, gate


@kernel(do_not_specialize=["num_rows"])
def _gated_norm(
    x_ptr, gate_ptr, weight_ptr, out_ptr, num_rows, num_groups, x_stride, gate_stride, out_stride, eps,
    WIDTH: tl.constexpr, IS_SHARED: tl.constexpr, GATE_FIRST: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    token, first_column = row // num_groups, row % num_groups * WIDTH
    x_ptr += token * x_stride + first_column
    gate_ptr += token * gate_stride + first_column
    out_ptr += token * out_stride + first_column
    if not IS_SHARED:
        weight_ptr += first_column
    squares = tl.zeros([ROWS, LANES], tl.float32)
    for first in range(0, WIDTH, LANES):
        column = (first + tl.arange(0, LANES))[None, :]
        value, _ = _values(x_ptr, gate_ptr, column, (row < num_rows) & (column < WIDTH), GATE_FIRST)
        squares += value * value
    inverse = inverse_rms(squares, eps, WIDTH, ROWS, LEVELS)
    for first in range(0, WIDTH, LANES):
        column = (first + tl.arange(0, LANES))[None, :]
        is_there = (row < num_rows) & (column < WIDTH)
        value, gate = _values(x_ptr, gate_ptr, column, is_there, GATE_FIRST)
        result = value * inverse * tl.load(weight_ptr + column, mask=is_there, other=0.0).to(tl.float32)
        if not GATE_FIRST:
            result = activated(gate, result, "silu")
        tl.store(out_ptr + column, round_to(result, out_ptr.dtype.element_ty), mask=is_there)
