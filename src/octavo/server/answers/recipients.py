"""Functionary 3.2's answers. Each part begins with a marker and a recipient: `all` or a function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.server.answers.call_parser import Call, ToolParser, ending
from octavo.server.answers.tool_format import ToolFormat, choice_of, json_text
from octavo.structured_output.lark import FEW_BLANKS, lark_json, pattern

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.server.answers.call_parser import Wait
    from octavo.server.answers.tool_format import Function

_MARK, _USER = ">>>", "all"


class RecipientsParser(ToolParser):
    """Reads Functionary 3.2's answers. A marker without a known recipient is content."""

    _ends = ending(_MARK)
    _call_openers = (_MARK,)

    def _read(self) -> Wait[None]:
        yield from self._part()
        while (yield from self._content(_MARK)):
            yield from self._part()

    def _part(self) -> Wait[None]:
        recipient = yield from self._recipient()
        if recipient == _USER:
            self._drop()
        elif recipient and (yield from self._attempt(call := Call(recipient), self._call_steps(call))):
            yield from self._drop_space()
        else:
            self._report_content()

    def _recipient(self) -> Wait[str]:
        found = yield from self._follows([f"{name}\n" for name in (_USER, *self._names)])
        self._position += len(found)
        return found.strip()

    def _call_steps(self, call: Call) -> Wait[None]:
        yield from self._object_arguments(call)


class RecipientsFormat(ToolFormat):
    """A call is `>>>`, a line with the function's name, and JSON.

    The prompt usually ends with the answer's first `>>>`, so the answer itself may begin with the function's name.
    """

    name = "functionary_v3_2"
    markers = ()
    frames_content = True
    reserved_names = frozenset({_USER})
    parser_class = RecipientsParser

    def write(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
        """See `ToolFormat`."""
        return "".join(f"{_MARK}{name}\n{json_text(arguments)}" for name, arguments in calls)

    def forced(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """See `ToolFormat`."""
        more = "" if only_one else f' ("{_MARK}" call)*'
        return f'start: "{_MARK}"? call{more}\n{self._calls(functions)}'

    def optional(self, functions: Sequence[Function], *, only_one: bool) -> str:
        """See `ToolFormat`."""
        names = "|".join(pattern(each.name) for each in functions)
        text = f"/(.|\\n)*/ {FEW_BLANKS} & ~/({names})\\n(.|\\n)*/"
        rules = [f"TEXT: {text}", f"BEFORE: {text}", self._calls(functions)]
        for index, function in enumerate(functions):
            rules.append(f"later{index}[lazy]: BEFORE {_head(function.name, _MARK)}")
        later = " | ".join(f"later{index} json{index}" for index in range(len(functions)))
        start = "TEXT | call | later" if only_one else "call? later* TEXT"
        return "\n".join([f"start: {start}", f"later: {later}", *rules])

    def or_content(self, functions: Sequence[Function], schema: str, *, only_one: bool) -> str:
        """See `ToolFormat`."""
        grammar = super().or_content(functions, schema, only_one=only_one)
        return grammar.replace("start: calls | content", "start: calls | head? content", 1) + f"\n{_HEAD_RULE}"

    def content(self, schema: str) -> str:
        """See `ToolFormat`."""
        return f"start: head? content\ncontent: {lark_json(schema)}\n{_HEAD_RULE}"

    def _calls(self, functions: Sequence[Function]) -> str:
        rules = [choice_of(len(functions))]
        for index, function in enumerate(functions):
            rules.append(f"call{index}: {_head(function.name)} json{index}")
            rules.append(f"json{index}: {lark_json(function.parameters)}")
        return "\n".join(rules)


def _head(recipient: str, mark: str = "") -> str:
    return json_text(f"{mark}{recipient}\n")


_HEAD_RULE = f'head: "{_MARK}"? {_head(_USER)}'
