"""Packed weights in blocks (csrc/block_formats.h)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from octavo.kernels.block_weight import BlockWeight, group_by_kind
from octavo.kernels.interface import PackedLinear
from octavo.kernels.panels import KIND_NUMBERS, NO_INT4, PANEL_COLUMNS, PanelWeight, packed_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from octavo.kernels.cpu import CpuKernels

_BYTES_AT_ONCE = 32 << 20


@dataclass(frozen=True, slots=True)
class BlockPanels:
    """A weight in parts along out_features. Each part has one kind of blocks."""

    panels: tuple[PanelWeight, ...]

    @classmethod
    def pack(cls, kernels: CpuKernels, weights: Sequence[BlockWeight], bias: Tensor | None) -> BlockPanels:
        """Pack weights."""
        panels, first = [], 0
        for group in group_by_kind(weights):
            last = first + sum(weight.shape[0] for weight in group)
            panels.append(_pack_kind(kernels, group, None if bias is None else bias[first:last]))
            first = last
        return cls(tuple(panels))

    def parts(self) -> Iterator[tuple[PanelWeight, slice]]:
        """Yield (part, columns)."""
        first = 0
        for part in self.panels:
            yield part, slice(first, first + part.out_features)
            first += part.out_features

    def vocabulary(self) -> PanelWeight:
        """Return the single part."""
        (part,) = self.panels
        return part

    def as_linear(self) -> PackedLinear:
        """See `PackedLinear`."""
        linears = [part.as_linear() for part in self.panels]
        out_features = sum(linear.out_features for linear in linears)
        num_bytes = sum(linear.num_bytes for linear in linears)
        return PackedLinear(out_features, linears[0].in_features, self, None, num_bytes)


def _pack_kind(kernels: CpuKernels, weights: Sequence[BlockWeight], bias: Tensor | None) -> PanelWeight:
    kind, in_features = weights[0].kind, weights[0].in_features
    if any(weight.shape[0] % PANEL_COLUMNS != 0 for weight in weights[:-1]):  # two weights would share a panel
        weights = [BlockWeight(kind, torch.cat([weight.rows for weight in weights]), in_features)]
    out_features = sum(weight.shape[0] for weight in weights)
    panel_bytes = kind.packed_bytes(PANEL_COLUMNS, in_features)
    number = KIND_NUMBERS[kind]
    data = kernels.allocate(packed_bytes(number, out_features, in_features, NO_INT4))
    place = data.data_ptr()
    rows_at_once = max(1, _BYTES_AT_ONCE // kind.row_bytes(in_features) // PANEL_COLUMNS) * PANEL_COLUMNS
    for weight in weights:
        for first in range(0, weight.shape[0], rows_at_once):
            part = weight.rows[first : first + rows_at_once]
            rows = part if part.stride(1) == 1 else part.contiguous()
            assert rows.shape[1] == kind.row_bytes(in_features)
            kernels.kernel_set.pack_weight(
                rows.data_ptr(), number, len(rows), in_features, rows.stride(0), 0, 0, 0, NO_INT4.group_size, place
            )
            if rows_at_once < weight.shape[0]:
                weight.forget(part)
            place += len(rows) // PANEL_COLUMNS * panel_bytes
    return PanelWeight(data, number, NO_INT4, PanelWeight.pad_bias(bias, out_features), out_features, in_features)
