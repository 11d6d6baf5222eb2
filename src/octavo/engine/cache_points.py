"""Find the points in a chat's prompt after which later prompts probably differ."""

from __future__ import annotations

import contextlib
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from octavo.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Message = Mapping[str, Any]

_MARK = "\ue0c7"  # for private use, so other texts probably do not begin with it
_QUESTION, _ANSWER = ({"role": role, "content": _MARK} for role in ("user", "assistant"))
_SYSTEM_ROLES = {"system", "developer"}
_LONGEST_GENERATION_PROMPT = 1024  # characters


def shared_offsets(render: Callable[[list[Message]], str], messages: Sequence[Message], text: str) -> list[int]:
    """Return up to three offsets in a prompt's text, in ascending order.

    They are the lengths of the prefixes that the prompt shares with another conversation that has the same system
    messages, and with the next turn. After a tool's result, the template may drop this turn's reasoning in the next
    turn, so the third offset is about the end of the last message.

    render: Renders a prompt for an answer. messages, text: The conversation, and its prompt. If the template refuses a
    conversation to compare with, its offsets are missing.
    """
    offsets: set[int] = set()
    with contextlib.suppress(RequestError):
        begun = takewhile(lambda message: message["role"] in _SYSTEM_ROLES, messages)
        offsets.add(_num_shared(text, render([*begun, _QUESTION])))
    with contextlib.suppress(RequestError):
        answer = [] if messages[-1]["role"] == "assistant" else [_ANSWER]
        next_turn = render([*messages, *answer, _QUESTION])
        ends = (each[: -_LONGEST_GENERATION_PROMPT - 1 : -1] for each in (text, next_turn))
        num_shared, end = _num_shared(text, next_turn), len(text) - _num_shared(*ends)
        offsets |= {num_shared} if end < num_shared < len(text) else {num_shared, end}
    return sorted(offsets)


def _num_shared(text: str, other: str) -> int:
    """Return the length of the longest common prefix."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if text[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def token_position(text: str, offset: int, num_tokens: int, encode: Callable[[str], list[int]]) -> int:
    """Return how many of a text's tokens end before an offset, or a few tokens less.

    num_tokens: Of the text. encode: Tokenizes the shorter side of the offset.
    """
    # The text after the offset may change the last token before it.
    if 2 * offset <= len(text):
        return max(len(encode(text[:offset])) - 1, 0)
    return max(num_tokens - len(encode(text[offset:])) - 1, 0)
