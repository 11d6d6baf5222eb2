"""Packed weights in panels (csrc/arguments.h)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from octavo.kernels.block_weight import BlockKind
from octavo.kernels.interface import KeptLinear, PackedLinear
from octavo.kernels.quantization import GROUP_MULTIPLE, MAX_IN_FEATURES, Int4Weight, Int8Weight

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from octavo.kernels.cpu import CpuKernels
    from octavo.kernels.quantization import QuantizedWeight

DTYPE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.uint8: 4}  # csrc/types.h
KIND_NUMBERS = {kind: number for number, kind in enumerate(BlockKind, start=5)}
PANEL_COLUMNS = 32


@dataclass(frozen=True, slots=True)
class PanelWeight:
    """A weight in panels of 32 columns. Zeros pad weight and float32 bias.

    dtype_number: from `DTYPE_NUMBERS` or `KIND_NUMBERS`. data: panels, then the int32 column order, if any.
    """

    data: Tensor
    dtype_number: int
    int4: Int4Format
    bias: Tensor | None
    out_features: int
    in_features: int

    @classmethod
    def pack(
        cls, kernels: CpuKernels, weight: Tensor | Sequence[Tensor] | QuantizedWeight, bias: Tensor | None
    ) -> PanelWeight:
        """Pack a weight or its parts. Raises `ValueError` if integer sums could overflow 32 bits."""
        parts: Sequence[Tensor]
        if not isinstance(weight, (torch.Tensor, Sequence)) and weight.shape[1] > MAX_IN_FEATURES:
            raise ValueError(
                f"{weight.shape[1]} input features of integers: sums could overflow; the maximum is {MAX_IN_FEATURES}"
            )
        if isinstance(weight, Sequence):
            is_whole = all(part.shape[0] % PANEL_COLUMNS == 0 for part in weight[:-1])
            parts = weight if is_whole else [torch.cat(list(weight))]
        else:
            parts = [weight if isinstance(weight, torch.Tensor) else weight.values]
        scales = multiples = offsets = order = None
        int4 = NO_INT4
        if isinstance(weight, Int8Weight):
            scales = weight.scales.contiguous()
        elif isinstance(weight, Int4Weight):
            int4, order = Int4Format.of(weight), weight.order
            multiples, scales = weight.whole_scales()
            offsets = weight.whole_offsets(multiples)
        out_features, in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
        number = DTYPE_NUMBERS[parts[0].dtype]
        data = kernels.allocate(packed_bytes(number, out_features, in_features, int4))
        if order is not None:
            data[-4 * in_features :].view(torch.int32).copy_(order)
        first, panels = 0, int4._replace(has_order=False)
        for part in parts:
            values = part.detach() if part.stride(1) == 1 else part.detach().contiguous()
            assert (values.dtype, values.shape[1]) == (parts[0].dtype, in_features)
            kernels.kernel_set.pack_weight(
                values.data_ptr(), number, values.shape[0], in_features, values.stride(0),
                *(0 if tensor is None else tensor.data_ptr() for tensor in (scales, multiples, offsets)),
                int4.group_size, data.data_ptr() + packed_bytes(number, first, in_features, panels),
            )  # fmt: skip
            first += values.shape[0]
        return cls(data, number, int4, cls.pad_bias(bias, out_features), out_features, in_features)

    def keep(self) -> KeptLinear:
        """Return the argument of `restore`, without a copy. The dtype is stored by name."""
        numbers: dict[str, int | str] = {
            "out_features": self.out_features,
            "in_features": self.in_features,
            "type": _TYPE_NAMES[self.dtype_number],
            "group_size": self.int4.group_size,
            "has_zeros": int(self.int4.has_zeros),
            "has_order": int(self.int4.has_order),
        }
        return KeptLinear(self.data, self.bias, numbers)

    @classmethod
    def restore(cls, kept: KeptLinear) -> PanelWeight:
        """Invert `keep`. Raises `ValueError` or `KeyError` for data that kernels could read out of bounds."""
        shape, number, int4 = _check_numbers(kept.numbers)
        if kept.data.nbytes != packed_bytes(number, *shape, int4):
            raise ValueError(f"{kept.data.nbytes} bytes are not a packed weight of {shape[0]} x {shape[1]}")
        if kept.bias is not None and len(kept.bias) != -(-shape[0] // PANEL_COLUMNS) * PANEL_COLUMNS:
            raise ValueError(f"{len(kept.bias)} values are not a packed bias of {shape[0]}")
        if int4.has_order:
            order = kept.data[-4 * shape[1] :].view(torch.int32)
            if order.min() < 0 or order.max() >= shape[1]:
                raise ValueError(f"the column order of a packed weight has an index outside 0 .. {shape[1] - 1}")
        return cls(kept.data, number, int4, kept.bias, *shape)

    @staticmethod
    def pad_bias(bias: Tensor | None, out_features: int) -> Tensor | None:
        """Pad to panels."""
        if bias is None:
            return None
        padded = torch.zeros(-(-out_features // PANEL_COLUMNS) * PANEL_COLUMNS)
        padded[:out_features] = bias.detach()
        return padded

    def as_linear(self) -> PackedLinear:
        """See `PackedLinear`."""
        num_bytes = self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)
        return PackedLinear(self.out_features, self.in_features, self, self.bias, num_bytes)

    @property
    def is_of_blocks(self) -> bool:
        """True for GGUF's blocks."""
        return self.dtype_number in _KINDS

    @property
    def order_address(self) -> int:
        """Column order's address."""
        return self.data.data_ptr() + self.data.nbytes - 4 * self.in_features


class Int4Format(NamedTuple):
    """An int4 weight's format (csrc/arguments.h).

    group_size: 0 if not int4. has_order: True if a column order is stored.
    """

    group_size: int
    has_zeros: bool
    has_order: bool = False

    @classmethod
    def of(cls, weight: Int4Weight) -> Int4Format:
        """Return a weight's format. A group is at most one row."""
        group_size = min(weight.group_size, weight.shape[1])
        assert group_size % GROUP_MULTIPLE == 0 or group_size == weight.shape[1]
        return cls(group_size, weight.zeros is not None, weight.order is not None)


NO_INT4 = Int4Format(0, has_zeros=False)


def packed_bytes(number: int, out_features: int, in_features: int, int4: Int4Format) -> int:
    """Return a packed weight's bytes, with padding and column order."""
    columns = -(-out_features // PANEL_COLUMNS) * PANEL_COLUMNS
    if number in _KINDS:
        return _KINDS[number].packed_bytes(columns, in_features)
    dtype = _DTYPES[number]
    if dtype == torch.uint8:
        groups = -(-in_features // int4.group_size)
        of_column = -(-in_features // 8) * 4 + groups * (4 if int4.has_zeros else 2) + 4  # and a unit
        return columns * of_column + (4 * in_features if int4.has_order else 0)
    if dtype == torch.int8:
        return columns * (-(-in_features // 4) * 4 + 8)  # a scale, an int32 sum
    together = 2 if dtype == torch.bfloat16 else 1
    return columns * -(-in_features // together) * together * dtype.itemsize


def _check_numbers(numbers: Mapping[str, int | str]) -> tuple[tuple[int, int], int, Int4Format]:
    found: list[int] = []
    for name in ("out_features", "in_features", "group_size", "has_zeros", "has_order"):
        value = numbers[name]
        if type(value) is not int or not 0 <= value < _TOO_LARGE:
            raise ValueError(f"{dict(numbers)} does not describe a packed weight")
        found.append(value)
    out_features, in_features, group_size, *flags = found
    number = next((each for each, name in _TYPE_NAMES.items() if name == numbers["type"]), -1)
    kind = _KINDS.get(number)
    is_int4 = _DTYPES.get(number) == torch.uint8
    is_right = (
        out_features > 0
        and in_features > 0
        and (kind is not None or number in _DTYPES)
        and (kind is None or in_features % kind.block_values == 0)
        and (group_size % GROUP_MULTIPLE == 0 or group_size == in_features)
        and (0 < group_size <= in_features if is_int4 else group_size == 0)
        and max(flags) <= int(is_int4)
    )
    if not is_right:
        raise ValueError(f"{dict(numbers)} does not describe a packed weight")
    return (out_features, in_features), number, Int4Format(group_size, *map(bool, flags))


_DTYPES = {number: dtype for dtype, number in DTYPE_NUMBERS.items()}
_KINDS = {number: kind for kind, number in KIND_NUMBERS.items()}
_TYPE_NAMES = {number: str(dtype).removeprefix("torch.") for number, dtype in _DTYPES.items()} | {
    number: kind.name for number, kind in _KINDS.items()
}
_TOO_LARGE = 1 << 31
