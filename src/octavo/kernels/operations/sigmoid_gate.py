"""Gates of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.kernels.operation import Operation

if TYPE_CHECKING:
    from torch import Tensor


@Operation
def sigmoid_gate(x: Tensor, gate: Tensor) -> None:
    """Multiply x by sigmoid(gate), in float32, then round (Qiu et al., "Gated Attention", arXiv 2505.06708).

    x, gate [num_tokens, num_heads, head_dim]: one float dtype. Tokens may have any stride.
    """
    x.copy_(x.float() * gate.float().sigmoid())
