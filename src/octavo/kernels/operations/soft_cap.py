"""Soft caps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.kernels.operation import Operation

if TYPE_CHECKING:
    from torch import Tensor


@Operation
def soft_cap(x: Tensor, cap: float) -> None:
    """Replace float32 x, contiguous, by cap * tanh(x / cap) (Gemma Team 2024)."""
    x.div_(cap).tanh_().mul_(cap)
