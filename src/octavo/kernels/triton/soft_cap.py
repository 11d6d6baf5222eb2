"""Soft caps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from octavo.kernels.triton.exponentials import hyperbolic_tangent
from octavo.kernels.triton.launch import cdiv, kernel

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024


def soft_cap(x: Tensor, cap: float) -> None:
    """See `octavo.kernels.operations.soft_cap`."""
    width = x.shape[-1]
    _soft_cap[x.numel() // width, cdiv(width, _BLOCK)](x, cap, width, BLOCK=_BLOCK, enable_fp_fusion=False)


@kernel
def _soft_cap(x_ptr, cap, width, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < width
    place = x_ptr + tl.program_id(0).to(tl.int64) * width + column
    x = tl.load(place, mask=is_there)
    tl.store(place, hyperbolic_tangent(tl.div_rn(x, cap)) * cap, mask=is_there)
