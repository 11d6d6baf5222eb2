"""Log probabilities of a prompt can be read as the list of dicts that they were made from."""

from __future__ import annotations

import copy
import pickle

import pytest

from octavo.data.model_output import TokenLogprobs
from octavo.outputs import Logprob, PromptLogprobs

TEXTS = {1: "a", 2: "b", 3: None}
ENTRIES = [TokenLogprobs([1, 2, 1], [-2.0, -1.0, -2.0], 2), TokenLogprobs([3], [-0.5], 1)]
POSITIONS = [None, {1: Logprob(-2.0, 2, "a"), 2: Logprob(-1.0, 1, "b")}, {3: Logprob(-0.5, 1, None)}]


@pytest.fixture
def logprobs() -> PromptLogprobs:
    made = PromptLogprobs(TEXTS)
    assert made == [None]
    made.entries += ENTRIES
    return made


def test_prompt_logprobs_read_as_list(logprobs: PromptLogprobs) -> None:
    assert (len(logprobs), list(logprobs), repr(logprobs)) == (3, POSITIONS, repr(POSITIONS))
    assert [logprobs[index] for index in range(-3, 3)] == POSITIONS * 2
    assert (logprobs[1:], logprobs[::-1]) == (POSITIONS[1:], POSITIONS[::-1])
    for index in (3, -4):
        with pytest.raises(IndexError):
            logprobs[index]


def test_prompt_logprobs_equal_list(logprobs: PromptLogprobs) -> None:
    other = PromptLogprobs(TEXTS)
    assert logprobs == POSITIONS
    assert [*POSITIONS] == logprobs
    assert logprobs != POSITIONS[1:]
    assert logprobs != other
    other.entries += ENTRIES
    assert logprobs == other
    assert logprobs != 7


def test_copied_prompt_logprobs_are_plain_list(logprobs: PromptLogprobs) -> None:
    for copied in (copy.deepcopy(logprobs), pickle.loads(pickle.dumps(logprobs))):
        assert type(copied) is list
        assert copied == POSITIONS
