"""Drafts from the answer that the client expects (OpenAI's `prediction`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from octavo.speculative.interface import DraftTask, EndedRequest, Proposer

NGRAM = 3  # shortest match
MAX_MATCH = 32  # longest match
DRAFTS_PER_TOKEN = 2


class PredictionProposer:
    """Drafts from the prediction, or from `proposer` if that finds more."""

    num_passes, computed, computes = 0, frozenset[str](), False

    def __init__(self, proposer: Proposer) -> None:
        self.num_speculative_tokens = proposer.num_speculative_tokens
        self.num_bytes = proposer.num_bytes
        self._proposer = proposer

    def propose(self, tasks: Sequence[DraftTask]) -> list[list[int]]:
        """See `Proposer`."""
        drafts = self._proposer.propose(tasks)
        for index, task in enumerate(tasks):
            if task.predicted_token_ids is not None:
                answer = task.token_ids[task.num_prompt_tokens :]
                found = find_following(task.predicted_token_ids, answer, task.max_drafts)
                if len(found) >= len(drafts[index]):
                    drafts[index] = found
        return drafts

    def forget(self, request_ids: Iterable[str]) -> None:
        """See `Proposer`."""
        self._proposer.forget(request_ids)

    def finish(self, ended: Sequence[EndedRequest]) -> None:
        """See `Proposer`."""
        self._proposer.finish(ended)


def find_following(predicted: NDArray[np.int32], answer: NDArray[np.int32], most: int) -> list[int]:
    """Return up to `most` tokens with which the prediction continues the answer.

    If the prediction does not begin with the answer, the tokens follow the longest match of the answer's end, at most
    `DRAFTS_PER_TOKEN` per matched token. On a tie, the match that ends closest to len(answer) wins.
    """
    start = len(answer)
    if not np.array_equal(predicted[:start], answer):
        ends, length = _longest_matches(predicted, answer, most)
        if not len(ends):
            return []
        start, most = int(ends[np.abs(ends - start).argmin()]), min(most, DRAFTS_PER_TOKEN * length)
    found: list[int] = predicted[start : start + most].tolist()
    return found


def _longest_matches(
    predicted: NDArray[np.int32], answer: NDArray[np.int32], most: int
) -> tuple[NDArray[np.int64], int]:
    num_places = len(predicted) - NGRAM
    if len(answer) < NGRAM or num_places <= 0:
        return np.empty(0, dtype=np.int64), 0
    matches = np.ones(num_places, dtype=bool)
    for offset in range(NGRAM):
        matches &= predicted[offset : offset + num_places] == answer[offset - NGRAM]
    ends, length = np.flatnonzero(matches) + NGRAM, NGRAM
    while length < min(MAX_MATCH, len(answer)) and (len(ends) > 1 or DRAFTS_PER_TOKEN * length < most):
        longer = ends[ends > length]
        longer = longer[predicted[longer - length - 1] == answer[-length - 1]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return ends, length
