"""Drafts from a smaller model with the same vocabulary, or from the quantized target model.

Source: Leviathan et al., arXiv 2211.17192. With exact verification, both models sample with the same random noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from collections.abc import Set as AbstractSet

    from numpy.typing import NDArray

    from octavo.speculative.interface import DraftTask, EndedRequest, Proposer


class DraftingModel(Protocol):
    """Drafts tokens for requests of the latest step. max_model_len: limit on a sequence, in tokens."""

    max_model_len: int

    def begin(self, request_ids: Sequence[str]) -> None:
        """Start drafting. Later calls name these requests by index."""
        ...

    def choose_next(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Append one token to each of these requests, in one forward pass.

        Return tokens (-1 if a request needs another pass first), and a mask of requests that can continue.
        """
        ...

    def end(self) -> None:
        """Discard the tokens since `begin`."""
        ...


class ModelProposer:
    """Drafts with a model if the lookup proposer `first` finds nothing."""

    def __init__(self, model: DraftingModel, num_speculative_tokens: int, first: Proposer) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.num_bytes = first.num_bytes
        self.num_passes, self.computes = 0, True
        self.computed: AbstractSet[str] = frozenset()
        self._model = model
        self._first = first

    def propose(self, tasks: Sequence[DraftTask]) -> list[list[int]]:
        """See `Proposer`."""
        self.num_passes, self.computed = 0, frozenset()
        drafts = self._first.propose(tasks)
        max_length = self._model.max_model_len + 1
        most = [
            0 if found else min(_num_worthwhile(task), self.num_speculative_tokens, max_length - len(task.token_ids))
            for task, found in zip(tasks, drafts, strict=True)
        ]
        drafted = [index for index, count in enumerate(most) if count > 0]
        if not drafted:
            return drafts
        try:
            self._model.begin([tasks[index].request_id for index in drafted])
            chosen = self._choose(np.array([most[index] for index in drafted]))
        finally:
            self._model.end()
        self.computed = {tasks[index].request_id for index in drafted}
        for index, found in zip(drafted, chosen, strict=True):
            drafts[index] = found
        return drafts

    def _choose(self, most: NDArray[np.int64]) -> list[list[int]]:
        longest = int(most.max())
        chosen = np.full((len(most), longest), -1, dtype=np.int64)
        indices = np.arange(len(most))
        for place in range(longest):
            self.num_passes += 1
            chosen[indices, place], can_continue = self._model.choose_next(indices)
            indices = indices[can_continue & (most[indices] > place + 1)]
            if not len(indices):
                break
        counts = (chosen >= 0).sum(axis=1).tolist()
        return [row[:count] for row, count in zip(chosen.tolist(), counts, strict=True)]

    def forget(self, request_ids: Iterable[str]) -> None:
        """See `Proposer`."""
        self._first.forget(request_ids)

    def finish(self, ended: Sequence[EndedRequest]) -> None:
        """See `Proposer`."""
        self._first.finish(ended)


def _num_worthwhile(task: DraftTask) -> int:
    return task.max_drafts if task.max_computed is None else min(task.max_computed, task.max_drafts)
