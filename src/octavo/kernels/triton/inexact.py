"""Products by torch's library, cuBLAS or hipBLAS, beside the kernels in Triton: NOT exact.

A library picks tiles, and splits of the sum, by the number of rows: so the last bits of a row, and now and then a
token, depend on who else is in the batch. To be asked for by name, where speed is worth that.
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
    """The kernels in Triton, but products with weights of floats are the library's; those of integers stay exact."""

    name = "fast-inexact"

    def linear(
        self, x: Tensor, packed: PackedLinear, *, float32_out: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """Return x @ weight.T + bias."""
        if isinstance(packed.storage, torch.Tensor):
            return ReferenceKernels.linear(self, x, packed, float32_out=float32_out, out=out)
        return super().linear(x, packed, float32_out=float32_out, out=out)
