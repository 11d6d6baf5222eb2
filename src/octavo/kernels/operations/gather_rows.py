"""Copies of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.kernels.operation import Operation

if TYPE_CHECKING:
    from torch import Tensor


@Operation
def gather_rows(x: Tensor, sources: Tensor, out: Tensor) -> None:
    """Write x[sources] into contiguous `out`. A row of x may occur several times."""
    out.copy_(x[sources])
