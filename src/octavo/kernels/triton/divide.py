"""Division of logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from octavo.kernels.triton.launch import cdiv, kernel

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024


def divide(x: Tensor, divisor: float) -> None:
    """See `octavo.kernels.operations.divide`."""
    width = x.shape[-1]
    _divide[x.numel() // width, cdiv(width, _BLOCK)](x, divisor, width, BLOCK=_BLOCK, enable_fp_fusion=False)


@kernel
def _divide(x_ptr, divisor, width, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < width
    place = x_ptr + tl.program_id(0).to(tl.int64) * width + column
    tl.store(place, tl.div_rn(tl.load(place, mask=is_there), divisor), mask=is_there)
