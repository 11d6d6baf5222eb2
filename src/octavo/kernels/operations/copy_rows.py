"""Copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.kernels.operation import Operation

if TYPE_CHECKING:
    from torch import Tensor


@Operation
def copy_rows(x: Tensor, out: Tensor) -> None:
    """Copy x [num_tokens, num_heads, head_dim] into `out`, of the same shape and dtype. Tokens may have any stride."""
    out.copy_(x)
