"""torch's own bfloat16 product, oneDNN's: to compare ours with, where its self-check lets it serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from octavo.kernels.interface import PackedLinear

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.quantization import QuantizedWeight


class OneDnnProducts:
    """Packs weights for oneDNN, those whose product passes its self-check."""

    def __init__(self) -> None:
        self._verdicts: dict[tuple[int | bool, ...], bool] = {}

    def pack(self, weight: Tensor | Sequence[Tensor] | QuantizedWeight, bias: Tensor | None) -> PackedLinear | None:
        """Pack a weight of bfloat16; None where it is of another type, or where oneDNN is not to serve it."""
        if not OneDnnWeight.is_supported():
            return None
        if isinstance(weight, Sequence):
            weight = torch.cat(list(weight))
        if not isinstance(weight, torch.Tensor) or weight.dtype != torch.bfloat16:
            return None
        packed = OneDnnWeight.pack(weight, bias)
        if not self._accepts(packed, weight.shape):
            return None
        num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        return PackedLinear(weight.shape[0], weight.shape[1], packed, bias, num_bytes)

    def _accepts(self, weight: OneDnnWeight, shape: torch.Size) -> bool:
        """Whether a weight passes its self-check; asked once per kind, as oneDNN chooses its way without the values."""
        kind = (*shape, weight.bias is not None, torch.get_num_threads())
        if kind not in self._verdicts:
            self._verdicts[kind] = weight.rows_are_independent(shape[1])
        return self._verdicts[kind]


@dataclass(frozen=True, slots=True)
class OneDnnWeight:
    """A weight in oneDNN's blocked layout, through torch."""

    data: Tensor
    bias: Tensor | None

    @staticmethod
    def is_supported() -> bool:
        """Whether torch has such a product of bfloat16 on this processor: not without AVX-512 or its like."""
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None) -> OneDnnWeight:
        """Bring a weight into that layout."""
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None), bias)  # noqa: SLF001

    def multiply(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias."""
        assert x.dtype == torch.bfloat16
        if x.shape[0] == 1:  # a single row may take another path, with another order of sums
            return self._multiply(x.expand(2, -1).contiguous())[:1]
        return self._multiply(x)

    def _multiply(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.data, self.bias, "none", [], "")  # noqa: SLF001
        return out

    def rows_are_independent(self, in_features: int) -> bool:
        """Whether rows come out the same alone, in small and odd batches, behind others and among 512, here."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(512, in_features, generator=generator).to(torch.bfloat16)
        whole = self.multiply(x)
        first = [slice(rows) for rows in (1, 2, 3, 5, 7, 8, 9, 32, 65)]
        last = [slice(-rows, None) for rows in (1, 3, 9, 33)]
        return all(torch.equal(self.multiply(x[rows]), whole[rows]) for rows in first + last)
