"""The rows of a step that advance recurrent states.

The stored state of a request excludes rows that may be rejected or computed again: drafts, and the last known token's
row, which is computed again if a grammar postpones the next token. The inputs of these rows are kept. The next step
replays the rows that were accepted. So a state never has to go back.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from octavo.kernels.state_batch import StateBatch
from octavo.worker.ragged import ranges, starts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch
    from numpy.typing import NDArray

_ZERO_STATE = _NO_SLOT = -1  # see `StateBatch`


class StateRows:
    """What the slots of requests have, by row of `InputBatch`.

    most_kept: Maximum number of kept rows of a request.
    """

    def __init__(self, max_num_seqs: int, most_kept: int) -> None:
        self._most_kept = most_kept
        self._num_stored = np.zeros(max_num_seqs, dtype=np.int64)  # tokens in the stored state
        self._num_kept = np.zeros(max_num_seqs, dtype=np.int64)  # kept rows after these tokens

    def start(self, row: int, num_tokens: int) -> None:
        """Record that a request's slot has the state after `num_tokens` tokens."""
        self._num_stored[row], self._num_kept[row] = num_tokens, 0

    def arrays(
        self,
        rows: NDArray[np.int64],
        first: NDArray[np.int64],
        counts: NDArray[np.int64],
        num_known: NDArray[np.int64],
        slots: NDArray[np.int32],
        saves: Sequence[Sequence[tuple[int, int]]],
    ) -> list[NDArray[np.generic]]:
        """Return the arrays of a `StateBatch`, and record the step.

        The step computes `counts` tokens of each request from `first` on. num_known: each request's tokens without
        drafts. slots: each request's slot. saves: each request's states to save, see `SchedulerOutput.state_saves`.
        """
        stored = self._num_stored[rows]
        num_replayed = first - stored
        assert ((num_replayed >= 0) & (num_replayed <= self._num_kept[rows])).all(), "a state would get a token twice"
        now_stored = np.minimum(first + counts, num_known - 1)
        num_kept = first + counts - now_stored
        assert (num_kept <= self._most_kept).all(), "more rows may be rejected than can be kept"
        self._num_stored[rows], self._num_kept[rows] = now_stored, num_kept
        query_start, first_row = starts(num_replayed + counts), starts(counts)[:-1]
        first_kept = rows * self._most_kept
        keep_from = ranges(first_row + counts - num_kept, num_kept)
        saved = [
            (start + num_tokens - before - 1, slot)
            for start, before, of_request in zip(query_start.tolist(), stored.tolist(), saves, strict=False)
            for num_tokens, slot in of_request
        ]
        saved_rows, saved_slots = zip(*saved, strict=True) if saved else ((), ())
        arrays = [
            query_start,
            _sources(num_replayed, counts, first_row, first_kept),
            np.where(stored > 0, slots, _ZERO_STATE),
            np.where(now_stored > stored, slots, _NO_SLOT),
            now_stored - stored,
            saved_rows,
            saved_slots,
            keep_from,
            ranges(first_kept, num_kept),
        ]
        return [np.asarray(each, dtype=np.int32) for each in arrays]

    def draft_arrays(
        self,
        rows: NDArray[np.int64],
        first: NDArray[np.int64],
        slots: NDArray[np.int32],
        scratch_slots: NDArray[np.int32],
        num_known: NDArray[np.int64],
    ) -> list[NDArray[np.generic]]:
        """Return the arrays of a `StateBatch` for drafting after position `first`, which change no request's state.

        The first pass begins with the last known token. It replays the kept rows and writes to scratch slots. Later
        passes continue from there.
        """
        is_first, ones = first == num_known - 1, np.ones(len(rows), dtype=np.int64)
        stored = np.where(is_first, self._num_stored[rows], first)
        num_replayed = first - stored
        assert ((num_replayed >= 0) & (num_replayed <= self._num_kept[rows])).all(), "a kept row is missing"
        sources = _sources(num_replayed, ones, np.arange(len(rows)), rows * self._most_kept)
        read_slots = np.where(is_first, np.where(stored > 0, slots, _ZERO_STATE), scratch_slots)
        arrays = [starts(num_replayed + ones), sources, read_slots, scratch_slots, num_replayed + ones, *[ones[:0]] * 4]
        return [np.asarray(each, dtype=np.int32) for each in arrays]

    @staticmethod
    def batch(tensors: Iterator[torch.Tensor]) -> StateBatch:
        """Return the batch of the next tensors, which are copies of `arrays`."""
        return StateBatch(*islice(tensors, 9))


def saves_of(request_ids: Sequence[str], saves: Mapping[str, list[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
    """Return each request's saves."""
    return [saves.get(request_id, []) for request_id in request_ids] if saves else []


def _sources(
    num_replayed: NDArray[np.int64],
    counts: NDArray[np.int64],
    first_row: NDArray[np.int64],
    first_kept: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return `StateBatch.sources`: each request's kept rows from `first_kept`, then its rows from `first_row`."""
    if not num_replayed.any():
        return np.arange(counts.sum())
    totals = num_replayed + counts
    places = ranges(np.zeros_like(totals), totals)
    kept, computed = (np.repeat(first, totals) + places for first in (first_kept, first_row - num_replayed))
    return np.where(places < np.repeat(num_replayed, totals), -1 - kept, computed)
