"""How calls of tools are read in an answer's text while it comes: what the parsers of all families share.

Calls are JSON objects with a name and arguments. What looks like a call and is none (broken JSON, a name that no tool
has) is content. A call whose arguments have begun to be told stays one, whatever follows. Where an answer was cut off
within a call, the call is told if its name is known; nothing of it is content.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from octavo.engine.stop_strings import num_held_back_chars
from octavo.server.answers.parts import MAX_BLANKS, Heads, Part, joined, without_space

if TYPE_CHECKING:
    from collections.abc import Generator

    T = TypeVar("T")
    Wait: TypeAlias = Generator[None, None, T]
    """Reads on, and waits where it needs more text."""

_SPACE = " \t\r\n"
_HALF = "\ufffd"  # what a character becomes that was cut in two
_BEHIND_VALUE = "}]," + _SPACE
BLANKS_WITHIN = f"[ \\t\\r\\n]{{0,{MAX_BLANKS}}}"  # as grammars have them
_STRING_STOPS = re.compile(r'["\\]')
_PLAIN = re.compile(r'[^"{}\[\], \t\r\n]+|[ \t\r\n,]+')


class MalformedError(Exception):
    """The text is no call."""


@dataclass(slots=True)
class Call:
    """What is known of a call. index: set when it began to be told."""

    name: str | None = None
    arguments: str | None = None
    index: int | None = None


class ToolParser:
    """Tells calls of tools from other text.

    names: of the tools there are. only_one: further calls are left out. name_key, arguments_keys: what an object that
    is a call has its name and its arguments under.
    """

    name_key: str = "name"
    arguments_keys: tuple[str, ...] = ("arguments", "parameters")

    def __init__(self, names: frozenset[str], *, only_one: bool = False) -> None:
        self._names = names
        self._only_one = only_one
        self._num_calls = 0
        self._text = ""  # what has not been told yet
        self._num_told = 0  # characters in front of it
        self._position = 0  # in it: what was looked at
        self._is_over = False
        self._is_cut = False  # nor did the model end it
        self._told: Call | None = None  # the call whose arguments are being told
        self._parts: list[Part] = []
        self._steps = self._read()

    def feed(self, text: str) -> list[Part]:
        """Take some more text."""
        self._text += text
        return self._advance()

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Return what was held back; of an answer that was cut off not what only begins a call."""
        self._is_over, self._is_cut = True, is_cut
        return self._advance()

    def _advance(self) -> list[Part]:
        next(self._steps, None)
        parts, self._parts = self._parts, []
        return joined(parts)

    def _read(self) -> Wait[None]:
        """Read a whole answer."""
        raise NotImplementedError

    # --- what families share

    def _content(self, *openers: str) -> Wait[str]:
        """Tell content up to what opens a call, go behind that and return it; "" at the end of the text.

        White space before it is held back: it is content only if no call follows.
        """
        while True:
            found = [(start, each) for each in openers if (start := self._text.find(each)) >= 0]
            if found:
                start, opener = min(found)
            else:
                start, opener = len(self._text) - self._num_begun(openers), ""
            is_last = self._is_over and start == len(self._text)
            shown = start if is_last else without_space(self._text[:start])
            self._position = shown
            self._tell_content()
            if opener:
                self._position = start - shown + len(opener)
                return opener
            if self._is_over:
                return ""
            yield

    def _num_begun(self, openers: tuple[str, ...]) -> int:
        """Return how many characters at the end of the text may begin an opener; the last may be half a one."""
        if self._is_over and not self._is_cut:
            return 0
        end = self._text.rstrip(_HALF)
        num_begun = max(num_held_back_chars(end, each) for each in openers)
        return num_begun + len(self._text) - len(end) if num_begun else 0

    def _begins_with(self, start: int, heads: Heads) -> Wait[bool]:
        """Whether one of these stands at some place. Where the answer was cut off within one it is dropped."""
        while (found := heads.stand_at(self._text, start)) is None and not self._is_over:
            yield
        if found is None and self._is_cut:
            self._position = len(self._text)
            self._drop()
        return bool(found)

    def _rest_is_content(self) -> Wait[None]:
        while True:
            self._position = len(self._text)
            self._tell_content()
            if self._is_over:
                return
            yield

    def _call(self) -> Wait[bool]:
        """Read a call that is an object; False where there was none, and what was looked at is content."""
        call = Call()
        return (yield from self._attempt(call, self._members(call)))

    def _attempt(self, call: Call, steps: Wait[None]) -> Wait[bool]:
        """Read a call by these steps; False where there was none, and what was looked at is content."""
        try:
            yield from steps
        except MalformedError:
            if call.index is None and not self._tell_cut(call):
                self._tell_content()
                return False
        self._drop()
        return True

    def _tell_cut(self, call: Call) -> bool:
        """Tell what is known of a call within which the answer was cut off; whether that is what happened."""
        if not self._is_cut_here():
            return False
        if call.name in self._names:
            self._begin(call)
            if call.arguments is not None and call.arguments.lstrip().startswith("{"):
                self._tell("arguments", call.arguments, call)
        self._position = len(self._text)
        return True

    def _is_cut_here(self) -> bool:
        """Whether the answer was cut off while the call at the beginning of `_text` was read."""
        return self._is_cut and self._position == len(self._text)

    def _drop_cut(self, expected: str) -> None:
        """Drop the beginning of a text with which the answer was cut off."""
        if self._is_cut and expected.startswith(self._text[self._position :].rstrip(_HALF)):
            self._position = len(self._text)
            self._drop()

    def _members(self, call: Call) -> Wait[None]:
        yield from self._expect("{")
        while (yield from self._skip_space()) != "}":
            key = yield from self._string()
            yield from self._skip_space()
            yield from self._expect(":")
            char = yield from self._skip_space()
            if key == self.name_key:
                call.name = yield from self._string()
            elif key not in self.arguments_keys or call.index is not None:
                yield from self._value()
            elif char == "{" and call.name is not None:
                yield from self._tell_arguments(call)
            else:
                call.arguments = (yield from self._string()) if char == '"' else (yield from self._value())
            if (yield from self._skip_space()) != ",":
                break
            self._position += 1
        yield from self._expect("}")
        if call.index is None:
            self._tell_whole(call)

    def _tell_whole(self, call: Call) -> None:
        arguments = "{}" if call.arguments in {None, "", "null"} else str(call.arguments)
        if not arguments.lstrip().startswith("{"):
            raise MalformedError
        self._begin(call)
        self._tell("arguments", arguments, call)

    def _tell_arguments(self, call: Call) -> Wait[None]:
        """Read a call's arguments, and tell them as they come."""
        self._begin(call)
        self._drop()
        self._told = call
        try:
            yield from self._value()
        finally:
            self._flush()
            self._told = None

    def _begin(self, call: Call) -> None:
        """Decide that this is a call."""
        if call.name not in self._names:
            raise MalformedError
        call.index, self._num_calls = self._num_calls, self._num_calls + 1
        self._tell("call", call.name or "", call)

    def _value(self) -> Wait[str]:
        """Go behind a JSON value of any kind; return its text, unless it was told as it came."""
        start, depth = self._position, 0
        while True:
            char = yield from self._peek()
            if char == '"':
                yield from self._skip_string()
            elif char and char in "{[":
                depth += 1
                self._position += 1
            elif char and char in "}]" and depth:
                depth -= 1
                self._position += 1
            elif char and (depth or char not in _BEHIND_VALUE):
                run = _PLAIN.match(self._text, self._position)
                self._position = self._position + 1 if run is None else run.end()
                continue  # a number may go on in the next piece
            elif depth:
                raise MalformedError
            if depth == 0:
                break
        if self._told is None and start == self._position:
            raise MalformedError
        return self._text[start : self._position]

    def _string(self) -> Wait[str]:
        """Read a JSON string."""
        start = self._position
        if (yield from self._peek()) != '"':
            raise MalformedError
        yield from self._skip_string()
        try:
            value = json.loads(self._text[start : self._position], strict=False)
            value.encode()
        except ValueError:
            raise MalformedError from None
        return str(value)

    def _skip_string(self) -> Wait[None]:
        self._position += 1
        while True:
            stop = _STRING_STOPS.search(self._text, self._position)
            self._position = len(self._text) if stop is None else stop.end()
            if stop is not None and stop.group() == '"':
                return
            if not (yield from self._peek()):
                raise MalformedError
            if stop is not None:
                self._position += 1  # whatever was escaped

    def _expect(self, text: str) -> Wait[None]:
        if not (yield from self._takes(text)):
            raise MalformedError

    def _takes(self, expected: str) -> Wait[bool]:
        """Go behind a text if that is what comes."""
        while True:
            seen = self._text[self._position : self._position + len(expected)]
            if seen == expected:
                self._position += len(expected)
                return True
            begun = seen.rstrip(_HALF) if len(seen) < len(expected) else seen
            if self._is_over or not expected.startswith(begun):
                return False
            yield

    def _skip_space(self) -> Wait[str]:
        """Go behind white space; return the character that follows, "" at the end."""
        while (char := (yield from self._peek())) and char in _SPACE:
            self._position += 1
        return char

    def _peek(self) -> Wait[str]:
        """Return the next character, "" at the end."""
        while self._position == len(self._text):
            if self._is_over:
                return ""
            self._flush()
            yield
        return self._text[self._position]

    # --- what is told

    def _flush(self) -> None:
        """Tell what was looked at of the arguments that are being told."""
        if self._told is not None:
            self._tell("arguments", self._text[: self._position], self._told)
            self._drop()

    def _tell(self, kind: str, text: str, call: Call) -> None:
        if call.index is not None and not (self._only_one and call.index):
            self._parts.append(Part("call" if kind == "call" else "arguments", text, call.index, self._num_told))

    def _tell_content(self) -> None:
        self._parts.append(Part("content", self._text[: self._position], start=self._num_told))
        self._drop()

    def _drop(self) -> None:
        self._num_told += self._position
        self._text, self._position = self._text[self._position :], 0
