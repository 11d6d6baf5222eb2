"""Predicted outputs: what the client of a request expects as its answer is drafted in it (OpenAI's `prediction`).

A prediction is its request's own: it is no other's draft, and nothing is kept of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from octavo.speculative.interface import DraftTask, EndedRequest, Proposer

NGRAM = 3  # tokens that have to match
MAX_MATCH = 32  # tokens of a match that count
DRAFTS_PER_TOKEN = 2  # of a match


class PredictionProposer:
    """Takes what is predicted where it is at least as much as another proposer finds, which is asked in any case.

    A draft adds at most one token to a step, so as many drafts that were predicted are at least as good.
    """

    num_passes, computed, computes = 0, frozenset[str](), False

    def __init__(self, proposer: Proposer) -> None:
        self.num_speculative_tokens = proposer.num_speculative_tokens
        self.num_bytes = proposer.num_bytes
        self._proposer = proposer

    def propose(self, tasks: Sequence[DraftTask]) -> list[list[int]]:
        """Return the drafts of each task."""
        drafts = self._proposer.propose(tasks)
        for index, task in enumerate(tasks):
            if task.predicted_token_ids is not None:
                answer = task.token_ids[task.num_prompt_tokens :]
                found = find_following(task.predicted_token_ids, answer, task.max_drafts)
                if len(found) >= len(drafts[index]):
                    drafts[index] = found
        return drafts

    def forget(self, request_ids: Iterable[str]) -> None:
        """Predictions come back with their requests."""
        self._proposer.forget(request_ids)

    def finish(self, ended: Sequence[EndedRequest]) -> None:
        """Predictions go with their requests."""
        self._proposer.finish(ended)


def find_following(predicted: NDArray[np.int32], answer: NDArray[np.int32], most: int) -> list[int]:
    """Return what follows in the prediction behind the newest tokens of the answer, at most so many tokens.

    As long as the answer is the beginning of the prediction, that is what comes next in it. Else it is what stands
    behind the longest match and, of those as long, behind the one whose place is most like that in the answer.
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
    """Return where the answer's newest tokens ended in the prediction, and how many match there.

    One match is followed no further than most drafts need.
    """
    num_places = len(predicted) - NGRAM  # something has to follow
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
