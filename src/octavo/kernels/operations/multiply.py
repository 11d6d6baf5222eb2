"""Products of elements."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.kernels.operation import Operation

if TYPE_CHECKING:
    from torch import Tensor


@Operation
def multiply(x: Tensor, factor: Tensor) -> None:
    """Multiply x by factor, in float32, then round. Both are [num_tokens, size], of one float dtype.

    Tokens may have any stride.
    """
    x.copy_(x.float() * factor.float())
