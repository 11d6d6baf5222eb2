"""Triton kernels with the matrix products of cuBLAS or hipBLAS: faster, NOT exact.

The library chooses tiles by the number of rows, so a row's bits, and sometimes a token, depend on other requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.triton.backend import TritonKernels

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.interface import PackedLinear


class InexactKernels(TritonKernels):
    """Kernels with exact products only for quantized weights."""

    name = "fast-inexact"

    def linear(
        self, x: Tensor, packed: PackedLinear, *, float32_out: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """See `Kernels`."""
        if isinstance(packed.storage, torch.Tensor):
            return ReferenceKernels.linear(self, x, packed, float32_out=float32_out, out=out)
        return super().linear(x, packed, float32_out=float32_out, out=out)
