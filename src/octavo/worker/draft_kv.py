"""Tracks which tokens have KV of the draft model. Mistakes only lower acceptance rates."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Protocol

import numpy as np

from octavo.data.scheduler_output import TransferDirection

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo.data.scheduler_output import NewRequestData, SchedulerOutput
    from octavo.worker.input_batch import InputBatch
    from octavo.worker.kv_cache import PagedKVCache


class DraftKV(Protocol):
    """The draft model's KV."""

    cache: PagedKVCache

    def update(self, scheduled: SchedulerOutput) -> None:
        """Apply a step, after `InputBatch.update`."""
        ...

    def begin(self, rows: NDArray[np.int64], num_known: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many leading known tokens of each row have KV. The newest token is never included."""
        ...

    def note_known(self, rows: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Record that the known tokens before position `ends` have KV."""
        ...

    def note_guesses(
        self, rows: NDArray[np.int64], num_known: NDArray[np.int64], num_computed: NDArray[np.int64]
    ) -> None:
        """Record that the drafts before position `num_computed` have KV."""
        ...


class SharedDraftKV:
    """The target's KV cache. When drafting begins, all tokens except the newest have KV.

    The draft model writes drafts' KV to slots that the target overwrites before it reads them.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache = cache

    def update(self, scheduled: SchedulerOutput) -> None:
        """Do nothing."""

    def begin(self, rows: NDArray[np.int64], num_known: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `DraftKV`."""
        del rows
        return num_known - 1

    def note_known(self, rows: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Do nothing."""

    def note_guesses(
        self, rows: NDArray[np.int64], num_known: NDArray[np.int64], num_computed: NDArray[np.int64]
    ) -> None:
        """Do nothing."""


class OwnDraftKV:
    """The draft model's own cache. It uses the block ids of the target's first KV group.

    In a shared or swapped block, only positions computed for drafting have KV.
    """

    def __init__(self, cache: PagedKVCache, batch: InputBatch, num_speculative_tokens: int) -> None:
        self.cache = cache
        self._batch = batch
        num_rows = len(batch.num_tokens)
        # Leading positions with final KV, by block.
        self._filled = np.zeros(cache.num_blocks, dtype=np.int64)
        self._filled_on_host = np.zeros(cache.num_host_blocks, dtype=np.int64)
        # By row: number of tokens with recorded KV, and the drafts after them that have KV.
        self._num_noted = np.zeros(num_rows, dtype=np.int64)
        self._guesses = np.full((num_rows, num_speculative_tokens), -1, dtype=np.int64)

    def update(self, scheduled: SchedulerOutput) -> None:
        """Repeat the target's block copies. New blocks have no KV."""
        copies, filled = scheduled.copies, self._filled
        if copies:
            copies = copies.of_group(0)
            self.cache.copy(copies)
            for _, block, host in copies.swap_out:
                self._filled_on_host[host] = filled[block]
            for _, source, target in copies.block_copies:
                filled[target] = filled[source]
            for _, host, block in copies.swap_in:
                filled[block] = self._filled_on_host[host]
        for transfer in scheduled.kv_transfers:
            if transfer.direction is TransferDirection.LOAD:  # loads only the target's KV
                filled[transfer.block_ids[0]] = 0
        for new in scheduled.scheduled_new_reqs:
            self._start(new)
        for block_ids in chain.from_iterable(scheduled.scheduled_cached_reqs.new_block_ids[:1]):
            if block_ids:
                filled[block_ids] = 0

    def _start(self, new: NewRequestData) -> None:
        num_blocks, num_in_last = divmod(new.num_computed_tokens, self.cache.block_size)
        if num_in_last:  # later positions may have another request's KV
            block = new.block_ids[0][num_blocks]
            self._filled[block] = min(self._filled[block], num_in_last)
            num_blocks += 1
        self._filled[new.block_ids[0][num_blocks:]] = 0
        row = self._batch.requests[new.request_id].row
        self._num_noted[row] = 0
        self._guesses[row] = -1

    def begin(self, rows: NDArray[np.int64], num_known: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `DraftKV`. Includes accepted guesses and shared blocks."""
        noted = self._num_noted[rows]
        positions = noted[:, None] + np.arange(self._guesses.shape[1])
        known = self._batch.token_ids[rows[:, None], np.minimum(positions, num_known[:, None] - 1)]
        is_accepted = (known == self._guesses[rows]) & (positions < num_known[:, None] - 1)
        ends: NDArray[np.int64] = noted + is_accepted.cumprod(axis=1).sum(axis=1)
        self.note_known(rows, ends)
        for index in np.flatnonzero(num_known - 1 - ends >= self.cache.block_size).tolist():
            ends[index] = self._find(int(rows[index]), int(ends[index]), int(num_known[index]) - 1)
        self._num_noted[rows] = ends
        return ends

    def _find(self, row: int, end: int, most: int) -> int:
        """Return the first position without KV, from `end` to `most`."""
        size = self.cache.block_size
        first = end // size
        filled = self._filled[self._batch.block_tables[0][row, first : -(-most // size)]]
        num_full = int(np.append(filled < size, True).argmax())
        in_next = int(filled[num_full]) if num_full < len(filled) else 0
        return max(end, min((first + num_full) * size + in_next, most))

    def note_known(self, rows: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """See `DraftKV`. Ignores scratch blocks."""
        size, tables = self.cache.block_size, self._batch.block_tables[0]
        self._guesses[rows] = -1
        first, ends = self._num_noted[rows], np.minimum(ends, self._batch.num_blocks[0, rows] * size)
        grown = ends > first
        rows, first, ends = rows[grown], first[grown], ends[grown]
        self._num_noted[rows] = ends
        last = (ends - 1) // size
        blocks = tables[rows, last]
        self._filled[blocks] = np.maximum(self._filled[blocks], ends - last * size)
        several = first // size < last
        for row, start, stop in zip(rows[several], first[several] // size, last[several], strict=True):
            self._filled[tables[row, start:stop]] = size

    def note_guesses(
        self, rows: NDArray[np.int64], num_known: NDArray[np.int64], num_computed: NDArray[np.int64]
    ) -> None:
        """See `DraftKV`. Ignores scratch blocks."""
        ends = np.minimum(num_computed, self._batch.num_blocks[0, rows] * self.cache.block_size)[:, None]
        positions = num_known[:, None] + np.arange(self._guesses.shape[1])
        tokens = self._batch.token_ids[rows[:, None], np.minimum(positions, num_computed[:, None] - 1)]
        self._guesses[rows] = np.where(positions < ends, tokens, -1)
