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
    """The rows and slots of one sequence."""

    rows: slice
    read_slot: int
    write_slot: int
    saved: tuple[tuple[int, int], ...]  # rows of the sequence, and slots

    @classmethod
    def of(cls, batch: StateBatch) -> Iterator[StateSteps]:
        """Yield the sequences that have rows."""
        bounds = pairwise(batch.query_start.tolist())
        saved = list(zip(batch.saved_rows.tolist(), batch.saved_slots.tolist(), strict=True))
        slots = zip(batch.read_slots.tolist(), batch.write_slots.tolist(), strict=True)
        for (first, end), (read_slot, write_slot) in zip(bounds, slots, strict=True):
            if first < end:
                own = tuple((row - first, slot) for row, slot in saved if first <= row < end)
                yield cls(slice(first, end), read_slot, write_slot, own)

    def read(self, state: Tensor) -> Tensor:
        """Return a copy of the state before the first row."""
        return torch.zeros_like(state[0]) if self.read_slot < 0 else state[self.read_slot].clone()

    def slots(self) -> list[tuple[int, int]]:
        """Return the rows of the sequence after which the state is written, and the slots."""
        last = self.rows.stop - self.rows.start - 1
        return [*self.saved, (last, self.write_slot)] if self.write_slot >= 0 else list(self.saved)

    def write(self, state: Tensor, row: int, values: Tensor) -> None:
        """Write the state after a row of the sequence to its slots."""
        for at, slot in self.slots():
            if at == row:
                state[slot] = values
