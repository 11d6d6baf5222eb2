"""Rows of sequences with recurrent states."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

STATE_COLUMNS = 16  # columns of a matrix state that are neighbours in memory (csrc/states.h)


@dataclass(frozen=True, slots=True)
class StateBatch:
    """A ragged batch of sequences with recurrent states.

    A row that may be rejected does not advance the written state. Its inputs are kept instead (`keep_rows`). A later
    step replays the kept rows that were accepted: they advance the state, but have no result. The *state rows* of a
    sequence are its replayed rows, then its rows of this step, in order of position.

    query_start  int32 [num_seqs + 1]      first state row of each sequence, then the number of state rows
    sources      int32 [num_state_rows]    row of the step, or -1 - k for kept row k
    read_slots   int32 [num_seqs]          slot of the state before the first state row; -1: the state is zero
    write_slots  int32 [num_seqs]          slot for the written state; -1: the state is dropped
    write_rows   int32 [num_seqs]          number of a sequence's state rows that advance the written state
    saved_rows   int32 [num_saved]         state rows, ascending
    saved_slots  int32 [num_saved]         the state after state row saved_rows[i] is also written to saved_slots[i]
    keep_from    int32 [num_keep]          rows of the step whose inputs are kept
    keep_to      int32 [num_keep]          the kept rows that they become, all different

    No slot is written twice, or read by one sequence and written by another. A sequence may write the slot that it
    reads, and several sequences may read the same slot. If write_rows[i] is 0, the state that was read is written.
    """

    query_start: Tensor
    sources: Tensor
    read_slots: Tensor
    write_slots: Tensor
    write_rows: Tensor
    saved_rows: Tensor
    saved_slots: Tensor
    keep_from: Tensor
    keep_to: Tensor

    def __post_init__(self) -> None:
        arrays = (getattr(self, field.name) for field in fields(self))
        assert all(each.dtype == torch.int32 and each.is_contiguous() for each in arrays)
        num_seqs = len(self.query_start) - 1
        assert len(self.read_slots) == len(self.write_slots) == len(self.write_rows) == num_seqs
        assert len(self.saved_rows) == len(self.saved_slots)
        assert len(self.keep_from) == len(self.keep_to)

    @classmethod
    def plain(cls, query_start: Tensor, read_slots: Tensor, write_slots: Tensor) -> StateBatch:
        """Return a batch whose state rows are the rows of the step. All of them advance the written states."""
        sources = torch.arange(int(query_start[-1]), dtype=torch.int32, device=query_start.device)
        return cls(query_start, sources, read_slots, write_slots, query_start.diff(), *[sources[:0]] * 4)


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
        return (0,) * 13
    return (
        batch.query_start.data_ptr(),
        len(batch.read_slots),
        batch.sources.data_ptr(),
        len(batch.sources),
        batch.read_slots.data_ptr(),
        batch.write_slots.data_ptr(),
        batch.write_rows.data_ptr(),
        batch.saved_rows.data_ptr(),
        batch.saved_slots.data_ptr(),
        len(batch.saved_rows),
        batch.keep_from.data_ptr(),
        batch.keep_to.data_ptr(),
        len(batch.keep_from),
    )
