"""The activation of MLPs without a gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.kernels.operation import Operation

if TYPE_CHECKING:
    from torch import Tensor


@Operation
def relu_squared(x: Tensor) -> None:
    """Replace x by max(x, 0)^2, rounded once (So et al., "Primer", arXiv 2109.08668).

    x [num_tokens, size]: float32 or bfloat16, contiguous.
    """
    x.copy_(x.float().relu().square())
