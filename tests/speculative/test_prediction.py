"""Drafts from a prediction, and that they are preferred to other drafts that are not longer."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.speculative.interface import DraftTask, EndedRequest
from octavo.speculative.none import NoProposer
from octavo.speculative.prediction import MAX_MATCH, NGRAM, PredictionProposer, find_following

CYCLE = [1, 2, 3, 4, 10, 1, 2, 3, 4, 11, 1, 2, 3, 4, 12]


def follow(predicted: list[int], answer: list[int], most: int = 4) -> list[int]:
    return find_following(np.array(predicted, dtype=np.int32), np.array(answer, dtype=np.int32), most)


@pytest.mark.parametrize(
    ("predicted", "answer", "expected"),
    [
        ([1, 2, 3, 4, 5], [1], [2, 3, 4, 5]),  # its beginning
        ([1, 2, 3, 4, 5, 6], [1, 2, 3], [4, 5, 6]),
        ([1, 2, 3], [1, 2, 3], []),  # its end
        ([1, 2], [1, 2, 3], []),
        ([1, 2, 3], [2], []),  # too few tokens match
        ([1, 2, 3, 4, 5, 6, 7], [9, 2, 3], []),
        ([1, 2, 3, 4, 5, 6, 7], [9, 2, 3, 4], [5, 6, 7]),
        ([1, 2, 3, 4, 5, 6, 7], [9, 5, 6, 7], []),  # nothing follows
        (CYCLE, [9, 1, 2, 3, 4], [10, 1, 2, 3]),  # equally long matches: the place nearest to that in the answer
        (CYCLE, [9] * 6 + [1, 2, 3, 4], [11, 1, 2, 3]),
        (CYCLE, [9] * 90 + [1, 2, 3, 4], [12]),
        (CYCLE, [9, 10, 1, 2, 3, 4], [11, 1, 2, 3]),  # the longest
        (CYCLE, [9] * 90 + [10, 1, 2, 3], [4, 11, 1, 2]),
    ],
)
def test_tokens_after_match_in_prediction_are_drafted(predicted, answer, expected):
    assert follow(predicted, answer) == expected


def test_longer_prediction_match_drafts_more_tokens():
    predicted = list(range(100))
    assert follow(predicted, [-1, 5, 6, 7], 16) == list(range(8, 14))
    assert follow(predicted, [-1, 4, 5, 6, 7], 16) == list(range(8, 16))
    assert follow(predicted, [-1, *range(50)], 90) == list(range(50, 100))
    assert follow(predicted, [-1, *range(10, 50)], 90) == list(range(50, 100))


def test_matches_of_max_length_tie_and_nearest_wins():
    same = list(range(MAX_MATCH))
    predicted = [7, *same, 40, 8, *same, 41]
    assert follow(predicted, [9, 8, *same]) == [40, 8, 0, 1], "both count as equal, and the first is nearer"
    shorter = same[1:]
    assert follow([7, *shorter, 40, 8, *shorter, 41], [9, 8, *shorter]) == [41]


class Fixed(NoProposer):
    """Finds a fixed number of tokens for every request."""

    num_bytes, num_speculative_tokens = 7, 8

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts, self.heard = num_drafts, []

    def propose(self, tasks):
        return [[99] * min(self.num_drafts, task.max_drafts) for task in tasks]

    def forget(self, request_ids):
        self.heard += request_ids

    def finish(self, ended):
        self.heard += [each.request_id for each in ended]


@pytest.mark.parametrize(("num_found", "is_taken"), [(0, True), (4, True), (5, False)])
def test_predicted_draft_wins_unless_lookup_draft_is_longer(num_found, is_taken):
    tokens = np.array([7, 7, 1, 2], dtype=np.int32)
    proposer = PredictionProposer(Fixed(num_found))
    tasks = [
        DraftTask("a", tokens, 8, None, 2, np.array([1, 2, 3, 4, 5, 6], dtype=np.int32)),
        DraftTask("b", tokens, 8, None, 2),
        DraftTask("c", tokens, 8, None, 2, np.array([8, 8], dtype=np.int32)),
    ]
    found = [99] * num_found
    assert proposer.propose(tasks) == [[3, 4, 5, 6] if is_taken else found, found, found]


def test_prompt_tokens_are_not_matched_with_prediction():
    tokens = np.array([1, 2, 3], dtype=np.int32)
    predicted = np.array([1, 2, 3, 4, 5], dtype=np.int32)
    assert len(tokens) == NGRAM
    assert PredictionProposer(Fixed(0)).propose([DraftTask("a", tokens, 8, None, 2, predicted)]) == [[]]


def test_prediction_proposer_forwards_finish_forget_and_sizes():
    other = Fixed(3)
    proposer = PredictionProposer(other)
    assert (proposer.num_bytes, proposer.num_speculative_tokens, proposer.num_passes) == (7, 8, 0)
    proposer.forget(["a"])
    proposer.finish([EndedRequest("b", np.array([1], dtype=np.int32), 1, None)])
    assert other.heard == ["a", "b"]
