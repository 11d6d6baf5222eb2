"""torch's product of prepacked weights by oneDNN, for benchmarks that compare octavo's product with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from octavo.kernels.cpu import CpuKernels
from octavo.kernels.interface import Activation, PackedLinear

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from octavo.kernels.quantization import QuantizedWeight


def has_product(dtype: torch.dtype) -> bool:
    """Return True if torch has this product for a dtype on this machine. bfloat16 needs AVX-512 or similar."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001


def pack(weight: Tensor) -> Tensor:
    """Convert a weight [out, in] to oneDNN's own layout."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)  # noqa: SLF001
    return packed


def multiply(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # noqa: SLF001
    return out


class OneDnnKernels(CpuKernels):
    """octavo's kernels with torch's products for bfloat16 weights; these round float32 results to bfloat16."""

    name = "onednn"

    def pack_linear(
        self, weight: Tensor | Sequence[Tensor] | QuantizedWeight, bias: Tensor | None = None
    ) -> PackedLinear:
        """Pack a single bfloat16 weight for oneDNN, all other weights for octavo."""
        if not isinstance(weight, torch.Tensor) or weight.dtype != torch.bfloat16:
            return super().pack_linear(weight, bias)
        if not has_product(weight.dtype):
            raise SystemExit("torch has no product of oneDNN for bfloat16 on this processor")
        num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        return PackedLinear(weight.shape[0], weight.shape[1], pack(weight), bias, num_bytes)

    def linear(
        self, x: Tensor, packed: PackedLinear, *, float32_out: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """Return x @ weight.T + bias."""
        if not isinstance(packed.storage, torch.Tensor):
            return super().linear(x, packed, float32_out=float32_out, out=out)
        product = multiply(x, packed.storage, packed.bias).to(torch.float32 if float32_out else x.dtype)
        return product if out is None else out.copy_(product)

    def gated_linear(self, x: Tensor, packed: PackedLinear, activation: Activation = "silu") -> Tensor:
        """Return activation(gate) * up of x @ weight.T + bias, in two steps."""
        if not isinstance(packed.storage, torch.Tensor):
            return super().gated_linear(x, packed, activation)
        return self.gate(self.linear(x, packed), activation)
