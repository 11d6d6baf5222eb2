"""Division of logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.kernels.operation import Operation

if TYPE_CHECKING:
    from torch import Tensor


@Operation
def divide(x: Tensor, divisor: float) -> None:
    """Divide float32 x, contiguous, in place."""
    x.div_(divisor)
