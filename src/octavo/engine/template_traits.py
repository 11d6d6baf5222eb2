"""Detect traits of a chat template by rendering small conversations."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from octavo.engine.history import (
    begun_by_user,
    with_one_system_message,
    with_short_ids,
    with_single_calls,
    with_systems_as_users,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Message = dict[str, Any]
    Render = Callable[[list[Message]], str | None]

EmptyContent = Literal["null", "empty", "absent"]
SystemPlaces = Literal["anywhere", "first", "never"]

_SEPARATOR = "\n\n"
_FIRST, _SECOND, _EXTRA = "octavo-first", "octavo-second", "octavo-extra"
_USER = {"role": "user", "content": "Question"}
_ARGUMENTS = {_FIRST: 1}
_CALL_ID = "call00001"  # some templates require nine letters and digits
_OTHER_ID = "call00002"
_LONG_ID = "call_octavo_of_another_server"
_TOOL_NAME = "lookup"
TOOL = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "Look it up",
        "parameters": {"type": "object", "properties": {_FIRST: {"type": "integer"}}, "required": [_FIRST]},
    },
}


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """The form of messages that one chat template needs.

    - part_roles: Roles that allow a list of parts as content. For other roles, parts are joined by line feeds.
    - only_part_roles: Roles that require a list of parts as content.
    - null_content, empty_content: Content that replaces null or "" in a message with calls.
    - takes_text_arguments: True if arguments must be JSON text.
    - joins_turns: True if consecutive messages of a role must be joined.
    - joins_results: True if a user message must be joined with the tool result before it.
    - wants_short_ids: True if call ids must be nine letters and digits.
    - wants_single_calls: True if the template refuses or drops several calls in one message.
    - system: Positions at which the template shows system messages.
    """

    part_roles: frozenset[str] = frozenset()
    only_part_roles: frozenset[str] = frozenset()
    null_content: EmptyContent = "empty"
    empty_content: EmptyContent = "empty"
    takes_text_arguments: bool = False
    joins_turns: bool = False
    joins_results: bool = False
    wants_short_ids: bool = False
    wants_single_calls: bool = False
    system: SystemPlaces = "anywhere"

    @classmethod
    def find(cls, render: Render) -> TemplateTraits:
        """Detect a template's traits. render: Renders messages, or returns None if the template refuses them.

        Has no time limit of its own: with one, a slow machine could detect other traits and render other prompts.
        """
        null_content, takes_text = _find_call_form(render, ("null", "empty", "absent"), (False, True))
        empty_content, _ = _find_call_form(render, ("empty", "null", "absent"), (takes_text,))
        head = [_USER, _calling(null_content, as_text=takes_text)]
        around: dict[str, tuple[list[Message], list[Message]]] = {
            "system": ([], [_USER]),
            "user": ([], []),
            "assistant": ([_USER], [_USER]),
            "tool": (head, []),
        }

        def reads(role: str, content: str | list[Message], *marks: str) -> bool:
            before, after = around[role]
            return _shows(render([*before, _message(role, content), *after]), *marks)

        parts = [{"type": "text", "text": text, "mark": _EXTRA} for text in (_FIRST, _SECOND)]
        part_roles = frozenset(role for role in around if reads(role, parts, _FIRST, _SECOND))
        only_part_roles = frozenset(role for role in part_roles if not reads(role, _FIRST, _FIRST))
        further = _message("user", _SECOND)

        def wants_joined(before: list[Message], last: Message) -> bool:
            joined = {**last, "content": last["content"] + _SEPARATOR + _SECOND}
            return not _shows(render([*before, last, further]), _SECOND) and _shows(render([*before, joined]), _SECOND)

        return cls(
            part_roles,
            only_part_roles,
            null_content,
            empty_content,
            takes_text,
            joins_turns=wants_joined([], _USER),
            joins_results=wants_joined(head, _message("tool", "Result")),
            wants_short_ids=_wants_short_ids(render, null_content, as_text=takes_text),
            wants_single_calls=_wants_single_calls(render, null_content, as_text=takes_text),
            system=_find_system_places(render),
        )

    def shapes(self, chat: Sequence[Message]) -> Iterator[list[Message]]:
        """Yield the conversation in the form that the traits demand, and then in forms for stricter templates.

        In `chat`, content is text, text parts, null or absent. Arguments are objects.
        """
        for variant, _ in groupby(self._variants(self._without_losses(chat))):
            yield [self._adapted(message) for message in variant]

    def _variants(self, chat: list[Message]) -> Iterator[list[Message]]:
        yield chat
        yield self._joined(chat)
        strict = begun_by_user(_with_calls_joined(chat))
        yield self._joined(strict)
        yield self._joined(with_systems_as_users(strict, keeps_first=self.system != "never"))

    def _without_losses(self, chat: Sequence[Message]) -> list[Message]:
        history = [*chat]
        if self.system != "anywhere":
            history = with_one_system_message(history, _join)
            history = with_systems_as_users(history, keeps_first=self.system == "first")
        if self.wants_short_ids:
            history = with_short_ids(history)
        return with_single_calls(history) if self.wants_single_calls else history

    def _joined(self, chat: Sequence[Message]) -> list[Message]:
        runs: list[list[Message]] = []
        for message in chat:
            if runs and self._goes_on(runs[-1], message):
                runs[-1].append(message)
            else:
                runs.append([message])
        return [_join(run) for run in runs]

    def _goes_on(self, run: list[Message], message: Message) -> bool:
        role = run[0]["role"]
        if role == "tool" and message["role"] == "user":
            return self.joins_results
        has_calls = "tool_calls" in run[-1] or "tool_calls" in message
        return self.joins_turns and role == message["role"] and role in {"user", "assistant"} and not has_calls

    def _adapted(self, message: Message) -> Message:
        role, content, calls = message["role"], message.get("content"), message.get("tool_calls")
        result = dict(message)
        if isinstance(content, list) and (role not in self.part_roles or not content):
            content = result["content"] = text_of(content)
        if role == "assistant" and not content:
            has_none = "content" not in result or content is None
            form = (self.null_content if has_none else self.empty_content) if calls else "empty"
            _set_empty(result, form)
        elif isinstance(content, str) and role in self.only_part_roles:
            result["content"] = [{"type": "text", "text": content}]
        if calls and self.takes_text_arguments:
            result["tool_calls"] = [_with_text_arguments(call) for call in calls]
        return result


def _find_call_form(
    render: Render, contents: Sequence[EmptyContent], forms: Sequence[bool]
) -> tuple[EmptyContent, bool]:
    """Return how to write the empty content of a message with a call, and whether the arguments must be text."""
    faults: dict[tuple[EmptyContent, bool], tuple[bool, int]] = {}
    for as_text in forms:
        for content in contents:
            text = render([_USER, _calling(content, as_text=as_text), _message("tool", "Result")])
            if text is not None:
                num_printed = sum(text.count(fault) for fault in ("None", "null", "{'"))
                faults[content, as_text] = (_FIRST not in text, num_printed)
    return min(faults, key=faults.__getitem__, default=("empty", False))


def _wants_short_ids(render: Render, content: EmptyContent, *, as_text: bool) -> bool:
    def shows(call_id: str) -> bool:
        calling = _calling(content, as_text=as_text)
        calling["tool_calls"] = [{**calling["tool_calls"][0], "id": call_id}]
        result = {**_message("tool", _SECOND), "tool_call_id": call_id}
        return _shows(render([_USER, calling, result]), _SECOND)

    return not shows(_LONG_ID) and shows(_CALL_ID)


def _wants_single_calls(render: Render, content: EmptyContent, *, as_text: bool) -> bool:
    calling = _calling(content, as_text=as_text)
    other = _calling(content, as_text=as_text, arguments={_SECOND: 2})
    other["tool_calls"][0]["id"] = _OTHER_ID
    both = {**calling, "tool_calls": [*calling["tool_calls"], *other["tool_calls"]]}
    results = _message("tool", "Result"), {**_message("tool", "Result"), "tool_call_id": _OTHER_ID}
    if _shows(render([_USER, both, *results]), _FIRST, _SECOND):
        return False
    return _shows(render([_USER, calling, results[0], other, results[1]]), _FIRST, _SECOND)


def _find_system_places(render: Render) -> SystemPlaces:
    answer = {"role": "assistant", "content": "Answer"}
    first, second = _message("system", _FIRST), _message("system", _SECOND)
    text = render([first, _USER, answer, second, _USER])
    if _shows(text, _FIRST) and _shows(text, _SECOND):
        return "anywhere"
    if _shows(render([first, _USER]), _FIRST):
        as_user = _message("user", f"{_SECOND}{_SEPARATOR}Question")
        return "first" if _shows(render([first, _USER, answer, as_user]), _FIRST, _SECOND) else "anywhere"
    is_refused = render([first, _USER]) is None and render([_USER]) is not None
    return "never" if is_refused else "anywhere"


def _shows(text: str | None, *marks: str) -> bool:
    if text is None or _EXTRA in text:
        return False
    place = 0
    for mark in marks:
        place = text.find(mark, place)
        if place < 0:
            return False
        place += len(mark)
    return True


def _message(role: str, content: str | list[Message]) -> Message:
    message: Message = {"role": role, "content": content}
    return {**message, "tool_call_id": _CALL_ID, "name": _TOOL_NAME} if role == "tool" else message


def _calling(content: EmptyContent, *, as_text: bool, arguments: dict[str, Any] = _ARGUMENTS) -> Message:
    call = {"id": _CALL_ID, "type": "function", "function": {"name": _TOOL_NAME, "arguments": dict(arguments)}}
    message = {"role": "assistant", "content": "", "tool_calls": [_with_text_arguments(call) if as_text else call]}
    _set_empty(message, content)
    return message


def _set_empty(message: Message, form: EmptyContent) -> None:
    if form == "absent":
        message.pop("content", None)
    else:
        message["content"] = None if form == "null" else ""


def _with_text_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _with_calls_joined(chat: Sequence[Message]) -> list[Message]:
    found: list[Message] = []
    for message in chat:
        before = found[-1] if found else {"role": ""}
        if "tool_calls" in message and before["role"] == message["role"] and "tool_calls" not in before:
            found[-1] = {**_join([before, message]), "tool_calls": message["tool_calls"]}
        else:
            found.append(message)
    return found


def _join(run: list[Message]) -> Message:
    joined = dict(run[0])
    for name in ("content", "reasoning_content", "thinking") if len(run) > 1 else ():
        texts = [message[name] for message in run if message.get(name)]
        if texts and all(isinstance(text, list) for text in texts):
            joined[name] = [part for parts in texts for part in parts]
        elif texts:
            joined[name] = _SEPARATOR.join(map(text_of, texts))
    return joined


def text_of(content: str | list[Message]) -> str:
    """Return a message's text, one part per line."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
