"""The sequences of a state batch, for plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from octavo.kernels.state_batch import StateBatch


@dataclass(frozen=True, slots=True)
class StateSteps:
    """The state rows and slots of one sequence."""

    rows: slice
    read_slot: int
    slots: tuple[tuple[int, int], ...]  # a number of the sequence's state rows, and a slot for the state after them

    @classmethod
    def of(cls, batch: StateBatch) -> Iterator[StateSteps]:
        """Yield the sequences."""
        bounds = pairwise(batch.query_start.tolist())
        saved = list(zip(batch.saved_rows.tolist(), batch.saved_slots.tolist(), strict=True))
        reads, written = (
            batch.read_slots.tolist(),
            zip(batch.write_rows.tolist(), batch.write_slots.tolist(), strict=True),
        )
        for (first, end), read_slot, (count, write_slot) in zip(bounds, reads, written, strict=True):
            slots = [(row + 1 - first, slot) for row, slot in saved if first <= row < end]
            slots += [(count, write_slot)] if write_slot >= 0 else []
            yield cls(slice(first, end), read_slot, tuple(slots))

    def read(self, state: Tensor) -> Tensor:
        """Return a copy of the state before the first row."""
        return torch.zeros_like(state[0]) if self.read_slot < 0 else state[self.read_slot].clone()

    def write(self, state: Tensor, num_rows: int, values: Tensor) -> None:
        """Write the state after `num_rows` of the sequence's state rows to its slots."""
        for count, slot in self.slots:
            if count == num_rows:
                state[slot] = values


def gather_rows(batch: StateBatch, x: Tensor, kept: Tensor) -> Tensor:
    """Return the inputs of the state rows [num_state_rows, ...] from those of the step and the kept ones."""
    sources = batch.sources.long()
    return torch.cat([x, kept])[torch.where(sources < 0, len(x) - 1 - sources, sources)]


def scatter_rows(batch: StateBatch, results: Tensor, out: Tensor) -> None:
    """Write the results [num_state_rows, ...] to rows of the step. Replayed rows have no result."""
    is_new = batch.sources >= 0
    out[batch.sources[is_new].long()] = results[is_new].to(out.dtype)
