"""Rewrite conversations that a chat template would refuse or show incompletely. The given messages are not modified."""

from __future__ import annotations

import hashlib
import re
import string
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Message = dict[str, Any]
    Calls = list[dict[str, Any]]

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_ID_CHARS = 9
_DIGITS = string.ascii_letters + string.digits


def with_short_ids(chat: Sequence[Message]) -> list[Message]:
    """Replace the ids of tool calls and results by ids of nine letters and digits.

    Ids of this form are kept. A new id depends only on the old id, or on the position if no id is given. So ids stay
    the same in the next turn, and the prompt's prefix stays cached.
    """
    ids = _ShortIds(chat)
    found: list[Message] = []
    for index, (message, results) in enumerate(_rounds(chat)):
        calls = _calls(message)
        if not calls:
            found += [message, *(ids.renamed_result(result, None, index) for result in results)]
            continue
        named = [{**call, "id": ids.of(call.get("id"), f"{index}-{place}")} for place, call in enumerate(calls)]
        found.append({**message, "tool_calls": named})
        for result, place in zip(results, _matched(calls, results), strict=True):
            found.append(ids.renamed_result(result, None if place is None else named[place]["id"], index))
    return found


class _ShortIds:
    def __init__(self, chat: Sequence[Message]) -> None:
        given = [call.get("id") for message in chat for call in _calls(message)]
        given += [message.get("tool_call_id") for message in chat]
        self._new = {each: each for each in given if isinstance(each, str) and _SHORT_ID.fullmatch(each)}
        self._taken = {*self._new}

    def of(self, old: Any, place: str) -> str:
        key = str(old) if old not in (None, "") else f"\0{place}"
        if key not in self._new:
            attempt = 0
            while (new := _hashed(f"{key}\0{attempt}" if attempt else key)) in self._taken:
                attempt += 1
            self._taken.add(new)
            self._new[key] = new
        return self._new[key]

    def renamed_result(self, result: Message, call_id: str | None, index: int) -> Message:
        return {**result, "tool_call_id": call_id or self.of(result.get("tool_call_id"), f"{index}-result")}


def _hashed(text: str) -> str:
    number = int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest(), "big")
    chars = []
    for _ in range(_ID_CHARS):
        number, digit = divmod(number, len(_DIGITS))
        chars.append(_DIGITS[digit])
    return "".join(chars)


def with_single_calls(chat: Sequence[Message]) -> list[Message]:
    """Split a message with several tool calls into messages with one call. Each call is followed by its results.

    The first of these messages keeps text and reasoning. Results that match no call come last.
    """
    found: list[Message] = []
    for message, results in _rounds(chat):
        calls = _calls(message)
        if len(calls) < 2:
            found += [message, *results]
            continue
        of_calls: dict[int | None, list[Message]] = {}
        for result, place in zip(results, _matched(calls, results), strict=True):
            of_calls.setdefault(place, []).append(result)
        for place, call in enumerate(calls):
            said = message if not place else {"role": message["role"], "content": None}
            found += [{**said, "tool_calls": [call]}, *of_calls.get(place, ())]
        found += of_calls.get(None, ())
    return found


def with_one_system_message(chat: Sequence[Message], join: Callable[[list[Message]], Message]) -> list[Message]:
    """Join the leading system messages into one message."""
    count = next((index for index, message in enumerate(chat) if message["role"] != "system"), len(chat))
    return [join([*chat[:count]]), *chat[count:]] if count > 1 else [*chat]


def with_systems_as_users(chat: Sequence[Message], *, keeps_first: bool) -> list[Message]:
    """Turn system messages into user messages. If `keeps_first`, the first message does not change."""
    return [
        {**message, "role": "user"} if message["role"] == "system" and (index or not keeps_first) else message
        for index, message in enumerate(chat)
    ]


def begun_by_user(chat: Sequence[Message]) -> list[Message]:
    """Insert an empty user message if an assistant message comes first, or after a first system message."""
    start = 1 if chat[0]["role"] == "system" else 0
    if len(chat) > start and chat[start]["role"] == "assistant":
        return [*chat[:start], {"role": "user", "content": ""}, *chat[start:]]
    return [*chat]


def _rounds(chat: Sequence[Message]) -> list[tuple[Message, list[Message]]]:
    rounds: list[tuple[Message, list[Message]]] = []
    for message in chat:
        if message["role"] == "tool" and rounds:
            rounds[-1][1].append(message)
        else:
            rounds.append((message, []))
    return rounds


def _calls(message: Message) -> Calls:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) and all(isinstance(call, dict) for call in calls) else []


def _matched(calls: Calls, results: Sequence[Message]) -> list[int | None]:
    # A result without an id belongs to the first call without a result.
    of_ids: dict[str, deque[int]] = {}
    for place, call in enumerate(calls):
        of_ids.setdefault(str(call.get("id")), deque()).append(place)
    in_order, taken, places = deque(range(len(calls))), set[int](), list[int | None]()
    for result in results:
        wanted = result.get("tool_call_id")
        left = in_order if wanted is None else of_ids.get(str(wanted), deque())
        while left and left[0] in taken:
            left.popleft()
        match = left.popleft() if left else None
        if match is not None:
            taken.add(match)
        places.append(match)
    return places
