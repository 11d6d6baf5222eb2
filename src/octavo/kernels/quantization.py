"""Quantized weights, activations, KV and products, defined in torch for all backends (docs/why.md).

- Products with int8 and int4 weights round activations to int8 with one scale per row: the largest magnitude becomes
  127. With GGUF's blocks, activations have one scale per 32 columns. With fp8 weights, they are not rounded.
- With int8 weights (W8A8), activations and weights are rotated first. With int4 weights (W4A8), nothing is rotated.
- int8 KV is rounded like activations, per token and head. In fp8 KV (E4M3 of Micikevicius et al. 2022), the largest
  magnitude becomes 448.

Integer sums are exact, so every backend gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from octavo.kernels.block_weight import GROUP_VALUES
from octavo.kernels.rotation import rotate, rotation_block

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from octavo.kernels.block_weight import BlockWeight

ROUNDING_VERSION = 3  # an increase invalidates packed weights on disk
MAX_IN_FEATURES = 1 << 16  # sums of more products of two bytes could overflow 32 bits
GROUP_MULTIPLE = 32  # divides the group size, unless a group is a row
KV_SCALE_BYTES = 4
INT4_ZERO = 8
E4M3_MAX = 448.0
FP8_GROUP_MULTIPLE = 64  # GROUP_MULTIPLE for fp8: the length of a tile
ROUNDED_KV_DTYPES = (torch.int8, torch.float8_e4m3fn)
_INT8_MAX = 127.0
_INT4_MAX = 15
_MOST_WORD = 32639  # 127 * 256 + 127, the maximum of two signed bytes
_LANES = 16
_VALUES_AT_ONCE = 1 << 20
_LEAST_MAGNITUDE = 1e-30
_CLIPPINGS = (1.0, 0.92, 0.84, 0.76)
_SAMPLED_ROWS = 64


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A rotated int8 weight: weight[i] is rotate(values[i]) * scales[i]. scales are float32."""

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """(out_features, in_features)."""
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """Bytes without padding."""
        return self.values.nbytes + self.scales.nbytes

    def dequantize(self) -> Tensor:
        """Expand to float32."""
        return rotate(self.values) * self.scales.unsqueeze(1)

    def rows(self, index: slice | Tensor) -> Int8Weight:
        """Select rows."""
        return Int8Weight(self.values[index], self.scales[index])

    def to(self, device: torch.device) -> Int8Weight:
        """Move to `device`."""
        return Int8Weight(self.values.to(device), self.scales.to(device))


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """An int4 weight in groups: weight[i, j] is (values[i, j] - zeros[i, j // size]) * scales[i, j // size].

    values uint8 [out_features, in_features], 0 .. 15. scales floating [out_features, groups].
    zeros uint8 or fractional float16, 0 .. 16; None if all are 8. group_size: a multiple of 32, or in_features or more.
    order int32: each column's input feature (GPTQ's act-order); None if in order.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    order: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """(out_features, in_features)."""
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """Bytes without padding."""
        groups = self.scales.numel() + (0 if self.zeros is None else self.zeros.numel())
        order = 0 if self.order is None else self.order.nbytes
        return self.values.numel() // 2 + 2 * groups + 4 * self.shape[0] + order

    def dequantize(self) -> Tensor:
        """Return the float32 weight in feature order, with unrounded scales."""
        group = torch.arange(self.shape[1], device=self.values.device) // self.group_size
        zeros = torch.full_like(self.scales, INT4_ZERO) if self.zeros is None else self.zeros
        weight = (self.values.float() - zeros.float()[:, group]) * self.scales.float()[:, group]
        return weight if self.order is None else weight[:, self.order.argsort()]

    def whole_scales(self) -> tuple[Tensor, Tensor]:
        """Return the scales for products: int16 multiples [out_features, groups] of float32 units [out_features].

        A row's largest multiple is 4,079 (with zero points, 2,039), so weights fit in 16 bits. An infinite or NaN scale
        makes its row NaN. Raises `ValueError` for a zero point above 16.
        """
        if self.zeros is not None and bool((self.zeros > 2 * INT4_ZERO).any()):
            raise ValueError(f"zero points reach {self.zeros.max()}; the maximum is 15")
        scales = self.scales.float()
        largest = scales.abs().amax(dim=1) if scales.shape[1] else scales.new_zeros(scales.shape[0])
        most = torch.full_like(largest, _MOST_WORD // (INT4_ZERO if self.zeros is None else 2 * INT4_ZERO))
        is_finite = largest.isfinite()
        inverse = torch.where(is_finite & (largest >= _LEAST_MAGNITUDE), most / largest, 0.0)
        multiples = torch.where(is_finite.unsqueeze(1), (scales * inverse.unsqueeze(1)).round(), 0.0)
        return multiples.to(torch.int16), torch.where(is_finite, largest / most, torch.nan)

    def whole_offsets(self, multiples: Tensor) -> Tensor | None:
        """Return (zero point - 8) * multiple, rounded to int16, or None without zero points."""
        if self.zeros is None:
            return None
        return ((self.zeros.float() - INT4_ZERO) * multiples.float()).round().to(torch.int16)

    def whole_values(self) -> tuple[Tensor, Tensor]:
        """Return float64 (value - 8) * multiple - offset, and the float32 units."""
        multiples, units = self.whole_scales()
        offsets = self.whole_offsets(multiples)
        group = torch.arange(self.shape[1], device=self.values.device) // self.group_size
        whole = (self.values.double() - INT4_ZERO) * multiples.double()[:, group]
        return (whole if offsets is None else whole - offsets.double()[:, group]) + 0.0, units  # turns -0.0 into 0.0

    def rows(self, index: slice | Tensor) -> Int4Weight:
        """Select rows."""
        zeros = None if self.zeros is None else self.zeros[index]
        return Int4Weight(self.values[index], self.scales[index], zeros, self.group_size, self.order)

    def to(self, device: torch.device) -> Int4Weight:
        """Move to `device`."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        order = None if self.order is None else self.order.to(device)
        return Int4Weight(self.values.to(device), self.scales.to(device), zeros, self.group_size, order)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """An fp8 weight: weight[i, j] is values[i, j] * scales[i, j // group_size], rounded to the activations' dtype.

    scales: float32. group_size: a multiple of 64, or in_features or more.
    """

    values: Tensor
    scales: Tensor
    group_size: int

    @property
    def shape(self) -> torch.Size:
        """(out_features, in_features)."""
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """Bytes with scales."""
        return self.values.nbytes + self.scales.nbytes

    def dequantize(self) -> Tensor:
        """Expand to float32."""
        group = torch.arange(self.shape[1], device=self.values.device) // self.group_size
        return self.values.float() * self.scales[:, group]

    def rows(self, index: slice | Tensor) -> Fp8Weight:
        """Select rows."""
        values = self.values.view(torch.uint8)[index].view(self.values.dtype)
        return Fp8Weight(values, self.scales[index], self.group_size)

    def to(self, device: torch.device) -> Fp8Weight:
        """Copy to a device."""
        return Fp8Weight(self.values.to(device, copy=True), self.scales.to(device, copy=True), self.group_size)


QuantizedWeight = Int8Weight | Int4Weight | Fp8Weight


def quantize_int8(weight: Tensor) -> Int8Weight:
    """Rotate a weight and round it to int8."""
    return Int8Weight(*round_to_int8(weight, rotated=True))


def round_to_int8(weight: Tensor, *, rotated: bool) -> tuple[Tensor, Tensor]:
    """Return int8 values and float32 scales. rotated: rotate first."""
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    share = 1.0 / rotation_block(weight.shape[1])  # two rotations multiply a row by the block size
    for part in _parts(weight.shape):
        rounded, scales[part] = quantize_rows(rotate(weight[part]) * share if rotated else weight[part])
        values[part] = rounded.to(torch.int8)
    return values, scales


def quantize_fp8(weight: Tensor) -> Fp8Weight:
    """Round to fp8, with a scale per row."""
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for part in _parts(weight.shape):
        scaled, scales[part] = _scale_rows(weight[part], E4M3_MAX)
        values[part].copy_(round_to_e4m3(scaled))
    return Fp8Weight(values, scales.unsqueeze(1), max(weight.shape[1], 1))


def quantize_int4(weight: Tensor, group_size: int = GROUP_MULTIPLE, *, minima: bool | None = None) -> Int4Weight:
    """Round a weight to int4, with one bfloat16 scale per group.

    minima: If False, the scale maps a group's first value of largest magnitude to -8 steps. If True, a scale and a
    float16 zero point map min(group, 0) to 0 and max(group, 0) to 15. If None, `minima_pay` decides.
    Of several clipped ranges, the first with the least squared error wins. NaN becomes zero.
    """
    if minima is None:
        minima = minima_pay(weight, lambda some, tried: quantize_int4(some, group_size, minima=tried))
    out_features, in_features = weight.shape
    num_groups = -(-in_features // group_size)
    values = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(out_features, num_groups, dtype=torch.bfloat16, device=weight.device)
    zeros = torch.empty_like(scales, dtype=torch.float16) if minima else None
    for part in _parts(weight.shape):
        wide = torch.nan_to_num(weight[part].float(), nan=0.0)
        padded = torch.nn.functional.pad(wide, (0, num_groups * group_size - in_features))
        is_there = torch.nn.functional.pad(torch.ones_like(wide), (0, padded.shape[1] - in_features))
        best, best_scale, best_zero = _round_groups(
            padded.view(-1, num_groups, group_size), is_there.view(-1, num_groups, group_size), minima=minima
        )
        values[part] = best.view(padded.shape)[:, :in_features].to(torch.uint8)
        scales[part] = best_scale.squeeze(2)
        if zeros is not None:
            zeros[part] = best_zero.squeeze(2)
    return Int4Weight(values, scales, zeros, group_size)


def minima_pay(weight: Tensor, round_rows: Callable[[Tensor, bool], Int4Weight]) -> bool:
    """Return True if minima more than halve the squared error of `round_rows(rows, minima)` on sampled rows."""
    rows = sampled_rows(weight).float()
    errors = [(round_rows(rows, minima).dequantize() - rows).double().square().sum() for minima in (False, True)]
    return bool(errors[1] < 0.5 * errors[0])


def sampled_rows(weight: Tensor) -> Tensor:
    """Return the rows that `minima_pay` tries. Sampling them again changes nothing."""
    return weight[:: max(1, weight.shape[0] // _SAMPLED_ROWS)]


def _round_groups(groups: Tensor, is_there: Tensor, *, minima: bool) -> tuple[Tensor, Tensor, Tensor]:
    extreme = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    low, high = groups.amin(2, keepdim=True).clamp(max=0.0), groups.amax(2, keepdim=True).clamp(min=0.0)
    found: list[Tensor] = []
    for clipping in _CLIPPINGS:
        if minima:
            least = low * clipping
            scale = ((high * clipping - least) / torch.full_like(low, _INT4_MAX)).to(torch.bfloat16)
        else:
            scale = (extreme * (-clipping / INT4_ZERO)).to(torch.bfloat16)
        inverse = torch.where(scale.float().abs() >= _LEAST_MAGNITUDE, 1.0 / scale.float(), 0.0)
        zero = (-least * inverse).clamp(0, _INT4_MAX) if minima else torch.full_like(inverse, INT4_ZERO)
        zero = zero.to(torch.float16)
        nearest = (groups * inverse + (zero.float() - INT4_ZERO)).round() + INT4_ZERO
        rounded = nearest.clamp(0, _INT4_MAX)
        difference = torch.where(is_there > 0, (rounded - zero.float()) * scale.float() - groups, 0.0)
        tried = [_sum_in_lanes(difference.square()), rounded, scale, zero]
        is_better = tried[0] < found[0] if found else None
        found = (
            tried if is_better is None else [torch.where(is_better, *pair) for pair in zip(tried, found, strict=True)]
        )
    return found[1], found[2], found[3]


def _sum_in_lanes(values: Tensor) -> Tensor:
    """Sum in compiled kernels' order."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % _LANES))
    lanes = padded.view(*values.shape[:-1], -1, _LANES)
    total: Tensor = lanes[..., 0, :]
    for index in range(1, lanes.shape[-2]):
        total = total + lanes[..., index, :]
    width = _LANES
    while width > 1:
        width //= 2
        total = total[..., :width] + total[..., width:]
    return total


def fuse_quantized(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Concatenate. Types, group sizes and column orders must be equal."""
    if len(weights) == 1:
        return weights[0]
    first = weights[0]
    values = torch.cat([weight.values.view(torch.uint8) for weight in weights]).view(first.values.dtype)
    scales = torch.cat([weight.scales for weight in weights])
    if isinstance(first, Fp8Weight):
        return Fp8Weight(values, scales, first.group_size)
    if isinstance(first, Int8Weight):
        return Int8Weight(values, scales)
    groups = [weight for weight in weights if isinstance(weight, Int4Weight)]
    if all(weight.zeros is None for weight in groups):
        return Int4Weight(values, scales, None, first.group_size, first.order)
    is_whole = all(weight.zeros is None or weight.zeros.dtype == torch.uint8 for weight in groups)
    dtype = torch.uint8 if is_whole else torch.float16
    zeros = [
        torch.full_like(weight.scales, INT4_ZERO, dtype=dtype) if weight.zeros is None else weight.zeros.to(dtype)
        for weight in groups
    ]
    return Int4Weight(values, scales, torch.cat(zeros), first.group_size, first.order)


def have_one_order(weights: Sequence[QuantizedWeight]) -> bool:
    """Return True if int4 weights share one column order."""
    orders = [weight.order for weight in weights if isinstance(weight, Int4Weight)]
    first = orders[0] if orders else None
    return all(each is None if first is None else each is not None and each.equal(first) for each in orders)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return whole numbers -127 .. 127 as float32, and float32 scales [rows].

    A row with a NaN or infinity gets zeros and the scale NaN.
    """
    scaled, scales = _scale_rows(x, _INT8_MAX)
    return scaled.round(), scales


def _scale_rows(x: Tensor, most: float) -> tuple[Tensor, Tensor]:
    wide = x.float()
    magnitude = wide.abs().amax(dim=1) if x.shape[1] else wide.new_zeros(x.shape[0])
    is_finite, largest = (
        magnitude.isfinite(),
        torch.full_like(magnitude, most),
    )  # a tensor: torch may multiply by a number's inverse
    scales = torch.where(is_finite, magnitude / largest, torch.nan)
    inverse = torch.where(is_finite & (magnitude >= _LEAST_MAGNITUDE), largest / magnitude, 0.0)
    inverse = inverse.unsqueeze(1)
    return torch.where(inverse > 0.0, wide * inverse, 0.0), scales


def round_to_e4m3(x: Tensor) -> Tensor:
    """Round float32 `x` to the nearest E4M3, ties to even, clamped to -448 .. 448; NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def round_kv_rows(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return int8 or float8_e4m3fn values, and float32 scales. NaN: see `quantize_rows`."""
    if dtype == torch.int8:
        values, scales = quantize_rows(rows)
        return values.to(torch.int8), scales
    scaled, scales = _scale_rows(rows, E4M3_MAX)
    return round_to_e4m3(scaled), scales


def kv_scales(cache: Tensor) -> Tensor:
    """View the scales after each head's rows: float32 [num_blocks, num_kv_heads, block_size]."""
    num_blocks, num_heads, block_size, head_dim = cache.shape
    end = cache.storage_offset() + block_size * head_dim
    size = (num_blocks, num_heads, block_size * KV_SCALE_BYTES)
    return cache.as_strided(size, (*cache.stride()[:2], 1), end).view(torch.float32)


def linear_int8(x: Tensor, weight: Int8Weight, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Rotate and quantize x. Return float(integer sum) * (row's scale * column's scale) + bias."""
    values, scales = quantize_rows(rotate(x))
    values = values.double()
    out = torch.empty(x.shape[0], weight.shape[0], dtype=out_dtype, device=x.device)
    for part in _parts(weight.shape):
        # Exact below 2^53. Adding 0.0 turns -0.0 into 0.0.
        sums = (values @ weight.values[part].double().T).float() + 0.0
        scaled = sums * (scales.unsqueeze(1) * weight.scales[part])
        out[:, part] = (scaled if bias is None else scaled + bias[part].float()).to(out_dtype)
    return out


def linear_int4(x: Tensor, weight: Int4Weight, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Like `linear_int8` without rotation. A column's scale is its unit."""
    values, row_scales = quantize_rows(x if weight.order is None else x[:, weight.order])
    values = values.double()
    out = torch.empty(x.shape[0], weight.shape[0], dtype=out_dtype, device=x.device)
    for part in _parts(weight.shape):
        whole, units = weight.rows(part).whole_values()
        scaled = ((values @ whole.T).float() + 0.0) * (row_scales.unsqueeze(1) * units)
        out[:, part] = (scaled if bias is None else scaled + bias[part].float()).to(out_dtype)
    return out


def linear_fp8(x: Tensor, weight: Fp8Weight, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Return x @ weight.T + bias. The weight is rounded to x's dtype. Sums are float32."""
    wide = x.float()
    out = torch.empty(x.shape[0], weight.shape[0], dtype=out_dtype, device=x.device)
    for part in _parts(weight.shape):
        sums = wide @ weight.rows(part).dequantize().to(x.dtype).float().T
        out[:, part] = (sums if bias is None else sums + bias[part].float()).to(out_dtype)
    return out


def linear_blocks(x: Tensor, weight: BlockWeight) -> Tensor:
    """Return float32 x @ weight.T, with x rounded to int8 in groups of 32.

    The sum over groups, in order, of (float(sum of x * values) * scale + float(sum of x) * minimum) * (scale of x's
    group). Each operation is rounded once. In Q6_K, 32 values have two scales and terms.
    """
    rounded, scales = quantize_rows(x.reshape(-1, GROUP_VALUES))
    row_scales = scales.view(x.shape[0], -1, 1)
    total = torch.zeros(x.shape[0], weight.shape[0], device=x.device)
    for part in _parts(weight.shape):
        numbers = weight.select_rows(part).numbers()
        num_groups, size = numbers.values.shape[1:]
        whole = rounded.view(x.shape[0], num_groups, size)
        for group in range(num_groups):
            # Exact below 2^24; see `linear_int8`.
            term = (whole[:, group] @ numbers.values[:, group].T + 0.0) * numbers.scales[:, group]
            if numbers.minima is not None:
                term = term + (whole[:, group].sum(dim=1, keepdim=True) + 0.0) * numbers.minima[:, group]
            total[:, part] += term * row_scales[:, group * size // GROUP_VALUES]
    return total


def _parts(shape: torch.Size) -> Iterator[slice]:
    rows = max(1, _VALUES_AT_ONCE // max(shape[1], 1))
    for first in range(0, shape[0], rows):
        yield slice(first, first + rows)
