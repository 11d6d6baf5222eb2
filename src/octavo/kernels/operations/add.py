"""Addition to the residual stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.kernels.operation import Operation

if TYPE_CHECKING:
    from torch import Tensor


@Operation
def add(x: Tensor, residual: Tensor, scale: float) -> None:
    """Add x * scale to `residual` in place. Both [num_tokens, hidden], contiguous, of one dtype.

    The sum is taken in float32 and rounded once.
    """
    residual.copy_(residual.float() + x.float() * scale)
