"""GGUF blocks for GPUs, with values in bit planes and unchanged scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from octavo.kernels.block_weight import (
    GROUP_VALUES,
    BlockKind,
    BlockValues,
    BlockWeight,
    StoredScales,
    exponent_scales,
    group_by_kind,
    mxfp4_codes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

_PAIR = 2 * GROUP_VALUES  # values that share 32 bytes
_VALUES_AT_ONCE = 1 << 20


class BlockLayout(NamedTuple):
    """Bits per value in each plane, and the center, which is subtracted. subgroups: scales per 32 values."""

    low_bits: int
    high_bits: int
    center: int
    subgroups: int = 1


LAYOUTS = {
    BlockKind.Q8_0: BlockLayout(8, 0, 0),
    BlockKind.Q4_0: BlockLayout(4, 0, 8),
    BlockKind.Q4_1: BlockLayout(4, 0, 0),
    BlockKind.Q5_0: BlockLayout(4, 1, 16),
    BlockKind.Q5_1: BlockLayout(4, 1, 0),
    BlockKind.Q4_K: BlockLayout(4, 0, 0),
    BlockKind.Q5_K: BlockLayout(4, 1, 0),
    BlockKind.Q6_K: BlockLayout(4, 2, 32, subgroups=2),
    BlockKind.MXFP4: BlockLayout(4, 0, 0),
}


@dataclass(frozen=True, slots=True)
class PackedBlocks:
    """A weight in blocks of one kind, padded with zeros.

    low: int8 [out_features, in_features] for 8 bits. Otherwise uint8 [out_features, padded / 2], with padded a multiple
    of 64: the low half of byte 32 i + j is column 64 i + j, the high half column 64 i + 32 + j.
    high: the remaining bits, if any. 8 groups of 32 columns (4 with two remaining bits) take 32 bytes. Byte j has
    column j of each group, the first group in the lowest bits.
    """

    kind: BlockKind
    low: Tensor
    high: Tensor | None
    scales: StoredScales
    in_features: int

    @classmethod
    def pack(cls, weights: Sequence[BlockWeight]) -> PackedBlocks:
        """Pack and concatenate weights of one kind. Calls their `forget`."""
        kind, in_features = weights[0].kind, weights[0].in_features
        out_features = sum(weight.shape[0] for weight in weights)
        like = _parts(weights[0].select_rows(slice(0, 1)))
        parts = [None if part is None else part.new_empty(out_features, part.shape[1]) for part in like]
        step, first = max(1, _VALUES_AT_ONCE // in_features), 0
        for weight in weights:
            for begin in range(0, weight.shape[0], step):
                some = weight.select_rows(slice(begin, begin + step))
                for whole, part in zip(parts, _parts(some), strict=True):
                    if whole is not None and part is not None:
                        whole[first : first + len(part)] = part
                first += some.shape[0]
            weight.forget(weight.rows)
        low, high, *scales = parts
        assert low is not None
        return cls(kind, low, high, StoredScales(*scales), in_features)  # type: ignore[arg-type]

    @property
    def out_features(self) -> int:
        """Rows."""
        return self.low.shape[0]

    @property
    def nbytes(self) -> int:
        """Packed bytes."""
        return sum(part.nbytes for part in (self.low, self.high, *self.scales) if part is not None)

    @property
    def layout(self) -> BlockLayout:
        """See `BlockLayout`."""
        return LAYOUTS[self.kind]

    def rows(self, index: Tensor) -> Tensor:
        """Dequantize rows. Graphs can capture this."""
        stored = self.scales.map(lambda part: part[index])
        if self.kind is BlockKind.MXFP4:
            scales, minima = exponent_scales(stored.scales), None
        else:
            scales, minima = stored.scales.float(), None if stored.minima is None else stored.minima.float()
        if stored.scales_of_blocks is not None:
            scales = _times_blocks(stored.scales_of_blocks, scales)
        if stored.minima_of_blocks is not None and minima is not None:
            minima = _times_blocks(stored.minima_of_blocks, 0.0 - minima)
        size = GROUP_VALUES // self.layout.subgroups
        values = self._values(index).view(len(index), self.in_features // size, size)
        return BlockValues(values, scales, minima).dequantize()

    def _values(self, index: Tensor) -> Tensor:
        """Decode whole numbers."""
        low_bits, high_bits, center, _ = self.layout
        low = self.low[index]
        if low_bits == 4:
            pairs = low.view(len(index), low.shape[1] // GROUP_VALUES, 1, GROUP_VALUES)
            low = torch.cat([pairs & 15, pairs >> 4], dim=2).flatten(1)
        values = low[:, : self.in_features].int()
        if self.high is not None:
            places = torch.arange(0, 8, high_bits, device=low.device, dtype=torch.uint8).unsqueeze(1)
            high = self.high[index].view(len(index), self.high.shape[1] // GROUP_VALUES, 1, GROUP_VALUES)
            high = (high >> places & (1 << high_bits) - 1).flatten(1)
            values |= high[:, : self.in_features].int() << low_bits
        if self.kind is BlockKind.MXFP4:  # a table would need a copy from the host
            size = values & 7
            size = torch.where(size < 2, size, 2 + (size & 1) << ((size >> 1).clamp(min=1) - 1))
            values = torch.where(values < 8, size, -size)
        return (values - center).float()


@dataclass(frozen=True, slots=True)
class BlockParts:
    """A weight's parts along out_features. Neighbouring parts differ in kind."""

    parts: tuple[PackedBlocks, ...]

    @classmethod
    def pack(cls, weights: Sequence[BlockWeight]) -> BlockParts:
        """Pack and concatenate."""
        return cls(tuple(PackedBlocks.pack(group) for group in group_by_kind(weights)))

    @property
    def nbytes(self) -> int:
        """Packed bytes."""
        return sum(part.nbytes for part in self.parts)

    def columns(self) -> Iterator[tuple[PackedBlocks, slice]]:
        """Yield (part, columns)."""
        first = 0
        for part in self.parts:
            yield part, slice(first, first + part.out_features)
            first += part.out_features

    def vocabulary(self) -> PackedBlocks:
        """Return the single part."""
        (part,) = self.parts
        return part


def _parts(weight: BlockWeight) -> tuple[Tensor | None, ...]:
    low_bits, high_bits, center, _ = LAYOUTS[weight.kind]
    if weight.kind is BlockKind.MXFP4:
        values = mxfp4_codes(weight).int()
    else:
        values = weight.numbers().values.flatten(1).int() + center
    if low_bits == 8:
        return values.to(torch.int8), None, *weight.stored_scales()
    low = torch.nn.functional.pad(values & 15, (0, -weight.in_features % _PAIR))
    pairs = low.view(len(low), low.shape[1] // _PAIR, 2, GROUP_VALUES)
    low = (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1).to(torch.uint8)
    return low, _high_plane(values >> low_bits, high_bits), *weight.stored_scales()


def _high_plane(values: Tensor, bits: int) -> Tensor | None:
    if bits == 0:
        return None
    groups = 8 // bits
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % (groups * GROUP_VALUES)))
    places = torch.arange(0, 8, bits, device=values.device, dtype=torch.int32).view(groups, 1)
    parts = padded.view(len(values), padded.shape[1] // (groups * GROUP_VALUES), groups, GROUP_VALUES)
    return (parts << places).sum(dim=2).flatten(1).to(torch.uint8)


def _times_blocks(of_blocks: Tensor, whole: Tensor) -> Tensor:
    per_block = whole.shape[1] // of_blocks.shape[1]
    return of_blocks.float().repeat_interleave(per_block, dim=1) * whole
