"""Integers for weights and activations: what the quantized kernels compute, said once, in torch.

W8A8: a weight has one scale per output feature, a row of activations one of its own, found on the way. Both are
symmetric: the largest magnitude stands at 127. Sums of integers are exact, so every backend gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

MAX_IN_FEATURES = 1 << 16  # more products of two bytes could overflow a 32-bit sum
_VALUES_AT_ONCE = 1 << 20  # of a weight, in float32 or float64
_LEAST_MAGNITUDE = 1e-30  # a row whose values are all smaller is zero


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight of integers: weight[i, j] is values[i, j] * scales[i].

    values int8 [out_features, in_features]; scales float32 [out_features].
    """

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """(out_features, in_features)."""
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes


def quantize_weight(weight: Tensor) -> QuantizedWeight:
    """Round a weight [out_features, in_features] of any floating type to int8, one scale per output feature."""
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for part in _parts(weight):
        rounded, scales[part] = quantize_rows(weight[part])
        values[part] = rounded.to(torch.int8)
    return QuantizedWeight(values, scales)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (float32 whole numbers of -127 .. 127 [rows, width], float32 scales [rows]).

    A row with a NaN or an infinity is zeros with the scale NaN: what is computed from it is NaN. So is what is computed
    from a row and a column whose scales have a product beyond float32.
    """
    wide = x.float()
    magnitude = wide.abs().amax(dim=1) if x.shape[1] else wide.new_zeros(x.shape[0])
    is_finite, most = magnitude.isfinite(), torch.full_like(magnitude, 127)  # by a number, torch may multiply instead
    scales = torch.where(is_finite, magnitude / most, torch.nan)
    inverse = torch.where(is_finite & (magnitude >= _LEAST_MAGNITUDE), most / magnitude, 0.0)
    return torch.where(is_finite.unsqueeze(1), (wide * inverse.unsqueeze(1)).round(), 0.0), scales


def linear_int8(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Return x @ weight.T + bias of quantized rows: float(integer sum) * (row's scale * column's scale) + bias."""
    values, scales = quantize_rows(x)
    values = values.double()
    out = torch.empty(x.shape[0], weight.shape[0], dtype=out_dtype, device=x.device)
    for part in _parts(weight.values):
        # Whole numbers below 2^53 are exact; a sum of nothing but -0.0 becomes the integers' 0.
        sums = (values @ weight.values[part].double().T).float() + 0.0
        scaled = sums * (scales.unsqueeze(1) * weight.scales[part])
        out[:, part] = (scaled if bias is None else scaled + bias[part].float()).to(out_dtype)
    return out


def _parts(weight: Tensor) -> Iterator[slice]:
    """Yield slices of a weight's rows that hold so few values that they can be widened."""
    rows = max(1, _VALUES_AT_ONCE // max(weight.shape[1], 1))
    for first in range(0, weight.shape[0], rows):
        yield slice(first, first + rows)
