"""Packed weights of groups (csrc/linear_args.h)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from octavo.kernels.block_panels import BlockPanels
from octavo.kernels.interface import PackedGroups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from octavo.kernels.interface import PackedLinear
    from octavo.kernels.panels import PanelWeight


@dataclass(frozen=True, slots=True)
class GroupedPanels:
    """The weights of all groups, in parts along out_features.

    parts: each part's columns, and int64 [num_groups, 6]: addresses of weight, bias and column order, then dtype, group
    size and has_zeros. weights: keep the memory alive.
    """

    parts: tuple[tuple[slice, Tensor], ...]
    weights: tuple[PackedLinear, ...]

    @classmethod
    def pack(cls, weights: Sequence[PackedLinear]) -> PackedGroups | None:
        """Group packed weights. Return None if their parts have different columns."""
        of_groups = [
            list(each.storage.parts())
            if isinstance(each.storage, BlockPanels)
            else [(each.storage, slice(0, each.out_features))]
            for each in weights
        ]
        columns = [[part for _, part in parts] for parts in of_groups]
        if any(each != columns[0] for each in columns):
            return None
        parts = tuple(
            (part, torch.tensor([_fields(panels[index][0]) for panels in of_groups], dtype=torch.int64))
            for index, part in enumerate(columns[0])
        )
        first, num_bytes = weights[0], sum(each.num_bytes for each in weights)
        kept = cls(parts, tuple(weights))
        return PackedGroups(len(weights), first.out_features, first.in_features, kept, num_bytes)


def _fields(weight: PanelWeight) -> tuple[int, ...]:
    return (
        weight.data.data_ptr(),
        0 if weight.bias is None else weight.bias.data_ptr(),
        weight.order_address if weight.int4.has_order else 0,
        weight.dtype_number,
        weight.int4.group_size,
        weight.int4.has_zeros,
    )
