"""Rows of sequences with recurrent states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

STATE_COLUMNS = 16  # columns of a matrix state that are neighbours in memory (csrc/states.h)


@dataclass(frozen=True, slots=True)
class StateBatch:
    """A ragged batch of sequences with recurrent states. A sequence's rows are adjacent, in order of position.

    query_start  int32 [num_seqs + 1]   first row of each sequence, then the number of rows
    read_slots   int32 [num_seqs]       slot of the state before the first row; -1: the state is zero
    write_slots  int32 [num_seqs]       slot for the state after the last row; -1: the state is dropped
    saved_rows   int32 [num_saved]      ascending
    saved_slots  int32 [num_saved]      the state after row saved_rows[i] is also written to slot saved_slots[i]

    No slot is written twice, or read by one sequence and written by another. A sequence may write the slot that it
    reads, and several sequences may read the same slot. A sequence without rows writes no slot.
    """

    query_start: Tensor
    read_slots: Tensor
    write_slots: Tensor
    saved_rows: Tensor
    saved_slots: Tensor

    def __post_init__(self) -> None:
        arrays = (self.query_start, self.read_slots, self.write_slots, self.saved_rows, self.saved_slots)
        assert all(each.dtype == torch.int32 and each.is_contiguous() for each in arrays)
        assert len(self.read_slots) == len(self.write_slots) == len(self.query_start) - 1
        assert len(self.saved_rows) == len(self.saved_slots)


def matrix_states(num_slots: int, num_heads: int, depth: int, columns: int) -> Tensor:
    """Return zeros for matrix states: float32 [num_slots, num_heads, columns / 16, depth, 16].

    Column j of a head's state [depth, columns] is [..., j // 16, :, j % 16]. `columns` must be a multiple of 16.
    """
    if columns % STATE_COLUMNS:
        raise ValueError(f"{columns} columns are not a multiple of {STATE_COLUMNS}")
    return torch.zeros(num_slots, num_heads, columns // STATE_COLUMNS, depth, STATE_COLUMNS)


def state_arrays(batch: StateBatch | None) -> tuple[int, ...]:
    """See csrc/arguments.h's StateBatchArgs."""
    if batch is None:
        return (0,) * 7
    return (
        batch.query_start.data_ptr(),
        len(batch.read_slots),
        batch.read_slots.data_ptr(),
        batch.write_slots.data_ptr(),
        batch.saved_rows.data_ptr(),
        batch.saved_slots.data_ptr(),
        len(batch.saved_rows),
    )
