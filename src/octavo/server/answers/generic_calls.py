"""Tool calls for chat templates that do not render tools.

As in llama.cpp, a system message describes the tools, and a grammar makes every answer a JSON object.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING, Any

from octavo.server.answers.call_parser import MalformedError, ToolParser
from octavo.server.answers.parts import Part, joined
from octavo.server.answers.tool_format import ToolFormat, json_text, object_rules
from octavo.structured_output.lark import lark_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.server.answers.call_parser import Wait
    from octavo.server.answers.tool_format import Function

_CALL, _CALLS, _RESPONSE, _RESULT = "tool_call", "tool_calls", "response", "tool_response"
_STOPS = re.compile(r'["\\]')
_ESCAPE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[^u]")
_MAX_ESCAPE_CHARS = 12  # length of an escaped surrogate pair
_SYSTEM_ROLES = {"system", "developer"}


class _GenericParser(ToolParser):
    _is_content = False

    def _read(self) -> Wait[None]:
        try:
            is_read = yield from self._object()
        except MalformedError:
            is_read = self._is_at_cut()
        if not is_read:
            yield from self._rest_is_content()
        while True:
            self._drop_rest()
            if self._is_over:
                return
            yield

    def _object(self) -> Wait[bool]:
        match (yield from self._key()):
            case "response":
                yield from self._response()
                return True
            case "tool_call":
                return (yield from self._call())
            case "tool_calls":
                return (yield from self._list())
            case _:
                return False

    def _key(self) -> Wait[str]:
        if (yield from self._skip_space()) != "{":
            raise MalformedError
        self._position += 1
        yield from self._skip_space()
        key = yield from self._string()
        yield from self._expect(":")
        yield from self._skip_space()
        return key

    def _list(self) -> Wait[bool]:
        yield from self._expect("[")
        while True:
            yield from self._skip_space()
            if not (yield from self._call()):
                return False
            if not (yield from self._takes_next(",")):
                return True

    def _response(self) -> Wait[None]:
        if (yield from self._peek()) == '"':
            self._position += 1
            self._drop()
            yield from self._string_content()
            return
        self._drop()
        self._is_content = True
        with contextlib.suppress(MalformedError):
            yield from self._value()
        self._report_content()
        self._is_content = False

    def _advance(self) -> list[Part]:
        parts = super()._advance()
        if self._is_content:
            self._report_content()
            parts, self._parts = joined([*parts, *self._parts]), []
        return parts

    def _string_content(self) -> Wait[None]:
        while True:
            stop = _STOPS.search(self._text)
            self._position = len(self._text) if stop is None else stop.start()
            self._report_content()
            if stop is not None and stop.group() == '"':
                return
            if stop is not None:
                found = _ESCAPE.match(self._text)
                may_go_on = len(self._text) < _MAX_ESCAPE_CHARS and (self._is_cut or not self._is_over)
                if found is not None and not (may_go_on and _is_half(found[0])):
                    self._report_escape(found[0])
                    continue
            if self._is_over:
                return
            yield

    def _report_escape(self, escape: str) -> None:
        char = json.loads(f'"{escape}"').encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        self._parts.append(Part("content", char, start=self._num_reported))
        self._position = len(escape)
        self._drop()


class GenericFormat(ToolFormat):
    """An answer is `{"tool_call": {...}}`, `{"tool_calls": [...]}` or `{"response": "..."}`.

    `tool_calls` is allowed only if the client allows several calls.
    """

    name = "generic"
    markers = ()
    takes_one = True
    needs_grammar = True
    describes_tools = True
    parser_class = _GenericParser

    def write(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
        """See `ToolFormat`."""
        written = [{"name": name, "arguments": arguments} for name, arguments in calls]
        return json_text({_CALL: written[0]} if len(written) == 1 else {_CALLS: written})

    def forced(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """See `ToolFormat`."""
        return f"start: {_calls(only_one)}\n{object_rules(functions, 'name', 'arguments')}"

    def optional(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """See `ToolFormat`."""
        return self.or_content(functions, '{"type": "string"}', only_one=only_one)

    def or_content(self, functions: Sequence[Function], schema: str, *, only_one: bool) -> str:
        """See `ToolFormat`."""
        start = f"start: {_calls(only_one)} | {_member(_RESPONSE, 'content')}\ncontent: {lark_json(schema)}"
        return f"{start}\n{object_rules(functions, 'name', 'arguments')}"

    def messages_with_tools(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], *, is_required: bool, only_one: bool
    ) -> list[dict[str, Any]]:
        """Write calls and results as text, and describe the tools in a system message."""
        names: dict[str, str] = {}
        history = [_as_text(message, names) for message in messages]
        if not tools:
            return history
        about = _description(tools, is_required=is_required, only_one=only_one)
        if history[0]["role"] in _SYSTEM_ROLES:
            first, *rest = history
            return [{**first, "content": _with_text(first.get("content"), about)}, *rest]
        return [{"role": "system", "content": about}, *history]


def _calls(only_one: bool) -> str:
    one, several = _member(_CALL, "call"), _member(_CALLS, '"[" call (COMMA call)* "]"')
    return one if only_one else f"({one} | {several})"


def _member(key: str, rule: str) -> str:
    return f'"{{" {json.dumps(json.dumps(key))} COLON {rule} "}}"'


def _description(tools: Sequence[dict[str, Any]], *, is_required: bool, only_one: bool) -> str:
    listed = "\n".join(json_text(tool["function"]) for tool in tools)
    call = '{"name": "the name of a tool", "arguments": {...}}'
    forms = [f'{{"{_CALL}": {call}}} to call a tool']
    if not only_one:
        forms.append(f'{{"{_CALLS}": [{call}, ...]}} to call several')
    if not is_required:
        forms.append(f'{{"{_RESPONSE}": "your reply"}} to reply to the user without a tool')
    return (
        f"You can call these tools, each described by a JSON schema of its arguments:\n{listed}\n\n"
        f"Answer with one JSON object and nothing else: {', or '.join(forms)}."
    )


def _as_text(message: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    if message["role"] == "tool":
        name = message.get("name") or names.get(str(message.get("tool_call_id")))
        result = {**({"name": name} if name else {}), "content": _text(message.get("content"))}
        return {"role": "user", "content": json_text({_RESULT: result})}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = []
    for call in calls:
        function = call["function"]
        names[str(call.get("id"))] = function["name"]
        written.append((function["name"], function["arguments"]))
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": _with_text(message.get("content"), GenericFormat().write(written))}


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def _with_text(content: Any, text: str) -> str:
    return "\n\n".join(filter(None, (_text(content), text)))


def _is_half(escape: str) -> bool:
    return len(escape) == 6 and escape[2:4].lower() in {"d8", "d9", "da", "db"}
