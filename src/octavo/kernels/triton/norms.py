"""Root mean square norms of rows or heads. The order of sums depends only on the width."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.launch import cdiv, kernel, power_of_2_from
from octavo.kernels.triton.reductions import sum_in_halves
from octavo.kernels.triton.rounding import round_to

if TYPE_CHECKING:
    from torch import Tensor

_MOST_LANES = 1024
_VALUES = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Kernels`."""
    width = x.shape[-1]
    # One token's heads are contiguous, but use the same kernel as many tokens'.
    heads, token_stride = (1, width) if x.ndim == 2 else (x.shape[1], x.stride(0))
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, None, weight, out, heads, token_stride, eps, 1.0)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float) -> Tensor:
    """See `Kernels`."""
    x, out = x.contiguous(), torch.empty_like(residual)
    _launch(x, residual, weight, out, 1, x.shape[1], eps, scale)
    return out


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    heads: int,
    token_stride: int,
    eps: float,
    scale: float,
) -> None:
    width = x.shape[-1]
    num_rows = x.numel() // width
    lanes = min(power_of_2_from(width), _MOST_LANES)
    rows = max(1, _VALUES // lanes)
    _rms_norm[(cdiv(num_rows, rows),)](
        x,
        out if residual is None else residual,
        weight,
        out,
        num_rows,
        heads,
        token_stride,
        eps,
        scale,
        WIDTH=width,
        HAS_RESIDUAL=residual is not None,
        ROWS=rows,
        LANES=lanes,
        LEVELS=lanes.bit_length() - 1,
        enable_fp_fusion=False,
    )


@triton.jit
def inverse_rms(squares, eps, WIDTH: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr):
    """Return [ROWS, 1] factors for squares [ROWS, 2 ** LEVELS]."""
    mean = tl.div_rn(sum_in_halves(squares, ROWS, LEVELS), WIDTH + 0.0)
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))[:, None]


@kernel(do_not_specialize=["num_rows"])
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    heads,
    token_stride,
    eps,
    scale,
    WIDTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    LEVELS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = (row < num_rows)[:, None]
    source = x_ptr + ((row // heads) * token_stride + (row % heads) * WIDTH)[:, None]
    place = (row * WIDTH)[:, None]
    squares = tl.zeros([ROWS, LANES], tl.float32)
    for first in range(0, WIDTH, LANES):
        column = (first + tl.arange(0, LANES))[None, :]
        is_there = is_row & (column < WIDTH)
        value = tl.load(source + column, mask=is_there, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            before = tl.load(residual_ptr + place + column, mask=is_there, other=0.0).to(tl.float32)
            rounded = round_to(before + value * scale, residual_ptr.dtype.element_ty)
            tl.store(residual_ptr + place + column, rounded, mask=is_there)
            value = rounded.to(tl.float32)
        squares += value * value
    inverse = inverse_rms(squares, eps, WIDTH, ROWS, LEVELS)
    if HAS_RESIDUAL:
        tl.debug_barrier()  # other threads' values are read below
        source = residual_ptr + place
    for first in range(0, WIDTH, LANES):
        column = (first + tl.arange(0, LANES))[None, :]
        is_there = is_row & (column < WIDTH)
        value = tl.load(source + column, mask=is_there, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        normed = round_to(value * inverse * weight, out_ptr.dtype.element_ty)
        tl.store(out_ptr + place + column, normed, mask=is_there)
