"""Residual additions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.kernels.operation import Operation

if TYPE_CHECKING:
    from torch import Tensor


@Operation
def add(x: Tensor, residual: Tensor, scale: float) -> None:
    """Add x * scale to `residual` in place, in float32, rounded once.

    x and `residual` are [num_tokens, hidden], contiguous, of one dtype.
    """
    residual.copy_(residual.float() + x.float() * scale)
