"""The number of reasoning tokens of an answer."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.outputs import CompletionOutput
from octavo.server.answers.answer_form import AnswerForm, AnswerReader
from octavo.server.answers.reasoning_forms import REASONING_FORMS

END = 99


def read(*pieces: tuple[str, list[int]], end_id: int | None = END) -> AnswerReader:
    """Read an answer given as pieces of text and tokens."""
    reader = AnswerReader(
        AnswerForm(reasoning=next(each for each in REASONING_FORMS if each.opens == "<think>"), reasoning_end_id=end_id)
    )
    for index, (text, token_ids) in enumerate(pieces):
        reason = "stop" if index == len(pieces) - 1 else None
        reader.read(CompletionOutput(0, text, token_ids, finish_reason=reason))
    return reader


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([("<think>Hm.</think>Yes.", [1, 2, 3, END, 4, 5])], 4),
        ([("<think>Hm", [1, 2]), (".</think>", [3, END]), ("Yes.", [4, 5])], 4),
        ([("<think>Hm", [1, 2]), (".", [3])], 3),
        ([("Yes.", [4, 5])], 0),
        ([("<think>Hm.</think>", [1, END]), ("Yes", [4]), (".", [END, 5])], 2),
    ],
)
def test_reasoning_tokens_count_up_to_end_token(pieces: Any, expected: int) -> None:
    assert read(*pieces).num_reasoning_tokens == expected


def test_no_reasoning_tokens_are_counted_without_end_token() -> None:
    assert read(("<think>Hm.</think>Yes.", [1, 2, 3, 4]), end_id=None).num_reasoning_tokens == 0
