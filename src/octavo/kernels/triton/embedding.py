"""Embedding table rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl

from octavo.kernels.triton.launch import cdiv, kernel
from octavo.kernels.triton.rounding import round_to

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024


def embedding(token_ids: Tensor, weight: Tensor, dtype: Any, scale: float) -> Tensor:
    """See `Kernels`."""
    out = torch.empty(token_ids.shape[0], weight.shape[1], dtype=dtype, device=weight.device)
    _embedding[token_ids.shape[0], cdiv(weight.shape[1], _BLOCK)](
        token_ids, weight, out, weight.shape[1], scale, BLOCK=_BLOCK, enable_fp_fusion=False
    )
    return out


@kernel
def _embedding(token_ids_ptr, weight_ptr, out_ptr, width, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < width
    value = tl.load(weight_ptr + tl.load(token_ids_ptr + row) * width + column, mask=is_there).to(tl.float32)
    tl.store(out_ptr + row * width + column, round_to(value * scale, out_ptr.dtype.element_ty), mask=is_there)
