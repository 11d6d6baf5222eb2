"""Soft caps of logits on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.kernels.triton.exponentials import hyperbolic_tangent

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024


def soft_cap(x: Tensor, cap: float) -> None:
    """Replace float32 x, contiguous, by cap * tanh(x / cap)."""
    _soft_cap[(triton.cdiv(x.numel(), _BLOCK),)](x, cap, x.numel(), BLOCK=_BLOCK, enable_fp_fusion=False)


@triton.jit
def _soft_cap(x_ptr, cap, num_values, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = index < num_values
    x = tl.load(x_ptr + index, mask=is_there)
    tl.store(x_ptr + index, hyperbolic_tangent(tl.div_rn(x, cap)) * cap, mask=is_there)
