"""Read calls in tags."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from octavo.server.answers.argument_values import is_text, property_names, property_of, types_of
from octavo.server.answers.call_parser import Call, MalformedError
from octavo.server.answers.call_sections import NAME
from octavo.server.answers.value_ends import TagEnd
from octavo.server.answers.value_parser import ValueParser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.server.answers.call_parser import Wait
    from octavo.server.answers.tagged_calls import TaggedFormat
    from octavo.server.answers.tool_format import Function


_NO_STRING = {"type": ["array", "boolean", "null", "number", "object"]}


class TaggedParser(ValueParser):
    """Emits strings piece by piece, and other values when they are complete.

    If a call's closing tag is missing, the section's closing tag ends the call. But if the call has no argument and the
    function has parameters, the text is content.
    """

    _form: TaggedFormat
    _given: set[str]  # names of the call's arguments so far; empty after a complete call

    def __init__(self, form: TaggedFormat, functions: Sequence[Function], *, only_one: bool) -> None:
        super().__init__(form, functions, only_one=only_one)
        self.is_padded = form.is_padded
        closes = form.closes if form.one_each else ""
        opens = form.opener if closes else form.call_opens or form.opener
        self._pair = opens.strip(), (closes or form.call_closes).strip()  # markers around a call

    def _attempt(self, call: Call, steps: Wait[None]) -> Wait[bool]:
        self._given = set()
        is_call = yield from super()._attempt(call, steps)
        if self._given:
            yield from self._rest_of_call()
        return is_call

    def _rest_of_call(self) -> Wait[None]:
        opens, closes = self._pair
        num_open = 1
        while num_open and (mark := (yield from self._content(opens, closes))):
            num_open += 1 if mark == opens else -1
            self._report_content()

    def _call_steps(self, call: Call) -> Wait[None]:
        form = self._form
        yield from self._skip_space()
        name = yield from self._name()
        if not (yield from self._peek()):
            raise MalformedError  # the name may be incomplete
        call.name = name
        if not (yield from self._takes_named()):
            raise MalformedError
        self._begin(call)
        self._drop()
        reported = ""
        while (yield from self._takes_all(form.argument_opens)):
            reported = yield from self._argument(call, ", " if reported else "{")
            yield from self._takes_all(form.argument_closes)
        if not (yield from self._takes_end(call)):
            raise MalformedError
        self._given = set()
        self._report("arguments", "}" if reported else "{}", call)

    def _takes_named(self) -> Wait[bool]:
        form = self._form
        if not (yield from self._takes_all(form.named)):
            return False
        return (yield from self._sees(form.argument_opens, form.call_closes, form.closes))

    def _takes_end(self, call: Call) -> Wait[bool]:
        closes = self._form.call_closes.strip()
        if closes and (yield from self._takes_all(closes)):
            return True
        if closes.startswith("</") and (yield from self._takes_all(closes[:-1])):
            for char in "/>":  # a misspelled tag
                yield from self._takes(char)
            return True
        # If no argument was read, the text may be a sentence about the tags.
        parameters = self._parameters.get(call.name or "", {})
        may_end = self._given or not closes or not property_names(parameters, parameters)
        return bool(may_end) and (yield from self._sees(self._closes))

    def _sees(self, *marks: str) -> Wait[bool]:
        for mark in marks:
            position = self._position
            if mark.strip() and (yield from self._takes_all(mark)):
                self._position = position
                return True
        return False

    def _name(self) -> Wait[str]:
        return (yield from self._run(NAME))

    def _argument(self, call: Call, separator: str) -> Wait[str]:
        """Emit `separator` and an argument. Return "" if the call has no emitted argument yet."""
        parameters = self._parameters[call.name or ""]
        key, is_marked_text = yield from self._key(parameters)
        is_named = key in property_names(parameters, parameters)
        if key in self._given or (not is_named and ("<" in key or "\n" in key)):
            raise MalformedError
        self._given.add(key)
        is_padded = self.is_padded and (yield from self._peek()) == "\n"
        self._position += is_padded
        self._drop()
        closes = yield from self._value_end()
        schema = property_of(parameters, key, parameters)
        is_string = is_text(schema, parameters) if is_marked_text is None else is_marked_text
        may_be_string = is_string or (is_marked_text is None and "string" in types_of(schema, parameters))
        ends = self._ends_of(closes, parameters, is_text=may_be_string, is_padded=is_padded)
        head = f"{separator}{json.dumps(key, ensure_ascii=False)}: "
        if may_be_string:
            yield from self._refuse_doubled(key)
        if is_string:
            self._report("arguments", f'{head}"', call)
            yield from self._text_value(call, ends, is_padded=is_padded)
            yield from self._takes_tag_end(closes)
            return head
        text = yield from self._whole_value(ends, is_padded=is_padded)
        yield from self._takes_tag_end(closes)
        written = self._read_value(text, schema if is_marked_text is None else _NO_STRING, parameters)
        if written is None:
            return "" if separator == "{" else separator
        self._report("arguments", head + written, call)
        return head

    def _ends_of(self, closes: str, parameters: dict[str, Any], *, is_text: bool, is_padded: bool) -> TagEnd:
        left = [key for key in property_names(parameters, parameters) if key not in self._given]
        call_starts = self._form.argument_starts(left)
        return TagEnd(self._form, closes, call_starts, is_text=is_text, is_padded=is_padded)

    def _refuse_doubled(self, key: str) -> Wait[None]:
        """Raise `MalformedError` if the argument's opening markers are repeated."""
        *_, mark = self._form.argument_named.split("\n")
        for each in (mark if mark.startswith("<") else "", *self._form.argument_starts([key])):
            if each and (yield from self._takes(each)):
                raise MalformedError

    def _value_end(self) -> Wait[str]:
        marks = self._form.raw_marks
        if marks is None or not (yield from self._takes(marks[0])):
            self._drop_cut("" if marks is None else marks[0])
            return self._form.value_closes
        self._drop()
        return marks[1]

    def _takes_tag_end(self, closes: str) -> Wait[None]:
        if closes != self._form.value_closes:
            yield from self._takes_all(self._form.value_closes)

    def _key(self, parameters: dict[str, Any]) -> Wait[tuple[str, bool | None]]:
        """Return (argument's name, True if the tag declares a string, False for another type, None for no type)."""
        ends, *more = self._form.argument_named.split("\n")
        known = parameters.get("properties")
        head = yield from self._head(ends)
        while isinstance(known, dict) and head not in known and any(key.startswith(head + ends) for key in known):
            head += ends + (yield from self._head(ends))
        for mark, is_marked_text in ((self._form.text_mark, True), (self._form.json_mark, False)):
            if mark and head.endswith(mark):
                return head.removesuffix(mark), is_marked_text
        if self._form.text_mark or not (yield from self._takes_all(*more)):
            raise MalformedError
        return head.strip(), None
