"""Weights in GGUF's blocks as a GPU reads them: values in planes of bits, scales as they are, nothing rounded again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from octavo.kernels.block_weight import (
    GROUP_VALUES,
    MXFP4_VALUES,
    BlockKind,
    BlockValues,
    BlockWeight,
    StoredScales,
    group_by_kind,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

PAIR = 2 * GROUP_VALUES  # values whose lower halves stand in the same bytes
_VALUES_AT_ONCE = 1 << 24  # that are widened to be packed
_LARGEST = max(MXFP4_VALUES)
_MXFP4_CODES = [MXFP4_VALUES.index(each) if each in MXFP4_VALUES else 0 for each in range(-_LARGEST, _LARGEST + 1)]


class BlockLayout(NamedTuple):
    """How values stand: bits in the first plane and in the second, and what is subtracted from them.

    subgroups: scales of 32 values.
    """

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
    """A weight in blocks of one kind.

    low: int8 [out_features, padded], padded the next multiple of 64 of in_features; or uint8 [out_features,
    padded / 2], byte 32 i + j having column 64 i + j in its low four bits and column 64 i + 32 + j in its high ones.
    high: further bits of values, uint8 [out_features, bytes]: of each 8 groups of 32 columns (of two bits: of each 4)
    32 bytes, byte j having those of column j of each group, the first group's lowest.
    scales: see `StoredScales`. What is padded is zeros.
    """

    kind: BlockKind
    low: Tensor
    high: Tensor | None
    scales: StoredScales
    in_features: int

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self.low.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return sum(part.nbytes for part in (self.low, self.high, *self.scales) if part is not None)

    @property
    def layout(self) -> BlockLayout:
        """How values stand."""
        return LAYOUTS[self.kind]

    def rows(self, index: Tensor) -> Tensor:
        """Return some rows of the weight, float32 [n, in_features], as `BlockWeight.dequantize` does."""
        values = self._values(index)
        stored = StoredScales(*(None if part is None else part[index] for part in self.scales))  # type: ignore[arg-type]
        scales, minima = stored.scales.float(), None if stored.minima is None else stored.minima.float()
        if self.kind is BlockKind.MXFP4:
            exponents = stored.scales.int()
            tiny = torch.full_like(exponents, 0x00200000) << exponents.clamp(max=1)
            scales = torch.where(exponents < 2, tiny, (exponents - 1) << 23).view(torch.float32)
        if stored.scales_of_blocks is not None:
            scales = _times_blocks(stored.scales_of_blocks, scales)
        if stored.minima_of_blocks is not None and minima is not None:
            minima = _times_blocks(stored.minima_of_blocks, -minima + 0.0)
        size = GROUP_VALUES // self.layout.subgroups
        return BlockValues(values.view(len(index), -1, size), scales, minima).dequantize()

    def _values(self, index: Tensor) -> Tensor:
        """Return float32 [n, in_features] of whole numbers."""
        low_bits, high_bits, center, _ = self.layout
        low = self.low[index]
        if low_bits == 4:
            pairs = low.view(len(index), -1, 1, GROUP_VALUES)
            low = torch.cat([pairs & 15, pairs >> 4], dim=2)
        values = low.reshape(len(index), -1)[:, : self.in_features].int()
        if self.high is not None:
            places = torch.arange(0, 8, high_bits, device=low.device, dtype=torch.uint8).unsqueeze(1)
            high = self.high[index].view(len(index), -1, 1, GROUP_VALUES) >> places & (1 << high_bits) - 1
            values |= high.reshape(len(index), -1)[:, : self.in_features].int() << low_bits
        if self.kind is BlockKind.MXFP4:
            size = values & 7
            size = torch.where(size < 2, size, 2 + (size & 1) << ((size >> 1).clamp(min=1) - 1))
            values = torch.where(values < 8, size, -size)
        return (values - center).float()


def pack_blocks(weights: Sequence[BlockWeight]) -> tuple[PackedBlocks, ...]:
    """Pack weights that stand one below the other, neighbours of one kind together."""
    return tuple(_pack_kind(group) for group in group_by_kind(weights))


def _pack_kind(weights: Sequence[BlockWeight]) -> PackedBlocks:
    kind, in_features = weights[0].kind, weights[0].in_features
    num_rows = max(1, _VALUES_AT_ONCE // in_features)
    parts = [
        weight.select_rows(slice(first, first + num_rows))
        for weight in weights
        for first in range(0, weight.shape[0], num_rows)
    ]
    low, high = zip(*(_planes(part) for part in parts), strict=True)
    scales = zip(*(part.stored_scales() for part in parts), strict=True)
    return PackedBlocks(kind, torch.cat(low), _whole(high), StoredScales(*map(_whole, scales)), in_features)  # type: ignore[arg-type]


def _whole(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return parts that stand one below the other, or None where there are none."""
    given = [part for part in parts if part is not None]
    return torch.cat(given) if given else None


def _planes(weight: BlockWeight) -> tuple[Tensor, Tensor | None]:
    """Return the bits of a weight's values: see `PackedBlocks`."""
    low_bits, high_bits, center, _ = LAYOUTS[weight.kind]
    values = weight.numbers().values.flatten(1).int() + center
    if weight.kind is BlockKind.MXFP4:
        values = torch.tensor(_MXFP4_CODES, dtype=torch.int32, device=values.device)[values + _LARGEST]
    low = values if low_bits == 8 else values & 15
    low = torch.nn.functional.pad(low, (0, -weight.in_features % PAIR))
    if low_bits == 8:
        return low.to(torch.int8), None
    pairs = low.view(len(low), -1, 2, GROUP_VALUES)
    low = (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1).to(torch.uint8)
    return low, _high_plane(values >> low_bits, high_bits)


def _high_plane(values: Tensor, bits: int) -> Tensor | None:
    """Return the second plane of values [rows, in_features] of so many bits."""
    if bits == 0:
        return None
    groups = 8 // bits
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % (groups * GROUP_VALUES)))
    places = torch.arange(0, 8, bits, device=values.device, dtype=torch.int32).view(groups, 1)
    return (padded.view(len(values), -1, groups, GROUP_VALUES) << places).sum(dim=2).flatten(1).to(torch.uint8)


def _times_blocks(of_blocks: Tensor, whole: Tensor) -> Tensor:
    """Return whole numbers [rows, groups] times the float16 of their blocks [rows, blocks]."""
    per_block = whole.shape[1] // of_blocks.shape[1]
    return of_blocks.float().repeat_interleave(per_block, dim=1) * whole
