"""Division of logits on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024


def divide(x: Tensor, divisor: float) -> None:
    """Divide float32 x, contiguous, in place."""
    _divide[(triton.cdiv(x.numel(), _BLOCK),)](x, divisor, x.numel(), BLOCK=_BLOCK, enable_fp_fusion=False)


@triton.jit
def _divide(x_ptr, divisor, num_values, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = index < num_values
    tl.store(x_ptr + index, tl.div_rn(tl.load(x_ptr + index, mask=is_there), divisor), mask=is_there)
