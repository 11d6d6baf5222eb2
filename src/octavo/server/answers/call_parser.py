"""Base class of parsers that read tool calls while an answer arrives.

A parser emits a call when the call is complete. But a stream gets the beginning of a call as soon as the arguments
exceed `HELD_CHARS` characters. If the rest of such a call is malformed, the client gets broken JSON. Text that looks
like a call is content if the arguments are ambiguous, the tool is unknown, or a tag is not closed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeAlias, TypeVar

from octavo.engine.json_recovery import END, SearchBudget, StrictObject, recover_object
from octavo.engine.stop_strings import num_held_back_chars
from octavo.server.answers.argument_values import known_keys
from octavo.server.answers.parts import MAX_BLANKS, CallStarts, Part, joined, without_space

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from octavo.server.answers.tool_format import Function, ToolFormat

    T = TypeVar("T")
    Wait: TypeAlias = Generator[None, None, T]
    """A generator that yields whenever it needs more text."""

_SPACE = " \t\r\n"
HELD_CHARS = 1024
_END_OF_TEXT = r"\Z"
_MAX_CLOSERS = 8  # the closing marker, and surplus brackets before it
HALF = "\ufffd"  # replaces an incomplete UTF-8 character
_AFTER_VALUE = "}]," + _SPACE
BLANKS_WITHIN = f"[ \\t\\r\\n]{{0,{MAX_BLANKS}}}"
_AFTER_ARGUMENTS = "}],;{[<>`"
_STRING_STOPS = re.compile(r'["\\]')
_PLAIN = re.compile(r'[^"{}\[\], \t\r\n]+|[ \t\r\n,]+')


def ending(*marks: str, is_wrapped: bool = False) -> re.Pattern[str]:
    """Return a pattern that matches one of `marks`, or the end of the answer, after a call's arguments.

    is_wrapped: True if the closing brace of an enclosing object may precede the marker.
    """
    either = [r"\s*".join(map(re.escape, mark.split())) for mark in marks if mark.strip()]
    # "]" counts only at the end of the answer.
    either = [rf"{each}\s*{_END_OF_TEXT}" if each == r"\]" else each for each in either]
    bracket = r"(?:\}\s*+)?" if is_wrapped else ""
    return re.compile(rf"\s*+{bracket}(?:{'|'.join([*either, _END_OF_TEXT])})")


class MalformedError(Exception):
    """The text is not a valid call."""


@dataclass(slots=True)
class Call:
    """A call that is being read.

    arguments: Arguments to emit at the end of the call. None if the parser emits arguments while reading them.
    index: Index of the call in the answer, or None until the name is emitted.
    """

    name: str | None = None
    arguments: str | None = None
    index: int | None = None


class ToolParser:
    """Separates tool calls from other text.

    num_held_chars: Number of argument characters above which an incomplete call is emitted, or None for no limit.
    _ends: Pattern of the text that must follow repaired arguments.
    """

    num_held_chars: int | None = HELD_CHARS

    name_key: str = "name"
    arguments_keys: tuple[str, ...] = ("arguments", "parameters")
    _ends: re.Pattern[str] = END
    _call_openers: tuple[str, ...] = ()
    _call_closers: tuple[str, ...] = ()

    def __init__(self, form: ToolFormat, functions: Sequence[Function], *, only_one: bool) -> None:
        self._form = form
        self._names = frozenset(each.name for each in functions)
        self._parameters = {each.name: each.parameters for each in functions}
        self._only_one = only_one
        self._num_calls = 0
        self._text = ""
        self._num_reported = 0  # characters of the answer before `_text`
        self._position = 0
        self._is_over = False
        self._is_cut = False
        self._parts: list[Part] = []
        self._held: list[Part] | None = None  # parts of a possible call
        self._held_text: list[str] = []
        self._num_held_chars = 0
        self._broken = ""
        self._budget = SearchBudget()
        self._steps = self._read()

    def feed(self, text: str) -> list[Part]:
        """See `AnswerParser`."""
        self._text += text
        return self._advance()

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """See `AnswerParser`."""
        self._is_over, self._is_cut = True, is_cut
        return self._advance()

    def _advance(self) -> list[Part]:
        next(self._steps, None)
        parts, self._parts = self._parts, []
        return joined(parts)

    def _read(self) -> Wait[None]:
        raise NotImplementedError

    def _content(self, *openers: str) -> Wait[str]:
        """Emit the content before the next opener. Return the opener, or "" at the end of the answer."""
        while True:
            found = [(start, each) for each in openers if (start := self._text.find(each)) >= 0]
            if found:
                start, opener = min(found)
            else:
                start, opener = len(self._text) - self._num_begun(openers), ""
            is_last = self._is_over and start == len(self._text)
            shown = start if is_last else without_space(self._text[:start])
            self._position = shown
            self._report_content()
            if opener:
                self._position = start - shown + len(opener)
                return opener
            if self._is_over:
                return ""
            yield

    def _num_begun(self, openers: tuple[str, ...]) -> int:
        if self._is_over and not self._is_cut:
            return 0
        end = self._text.rstrip(HALF)
        num_begun = max(num_held_back_chars(end, each) for each in openers)
        return num_begun + len(self._text) - len(end) if num_begun else 0

    def _begins_with(self, start: int, call_starts: CallStarts) -> Wait[bool]:
        """Return True if a text of `call_starts` begins at `start`."""
        while (found := call_starts.starts_at(self._text, start)) is None and not self._is_over:
            yield
        if found is None and self._is_cut:
            self._drop_rest()
        return bool(found)

    def _rest_is_content(self) -> Wait[None]:
        while True:
            self._position = len(self._text)
            self._report_content()
            if self._is_over:
                return
            yield

    def _call(self) -> Wait[bool]:
        call = Call()
        return (yield from self._attempt(call, self._members(call)))

    def _attempt(self, call: Call, steps: Wait[None]) -> Wait[bool]:
        """Read a call and return True. If the text is not a call, emit the text as content and return False."""
        self._held, self._held_text, self._num_held_chars = [], [], 0
        start = self._position
        try:
            yield from steps
        except MalformedError:
            if not self._report_cut(call) and self._held is not None:
                self._roll_back(call)
                self._broken = self._text[start : self._position]
                self._report_content()
                return False
        self._commit()
        self._drop()
        return True

    def _roll_back(self, call: Call) -> None:
        before = "".join(self._held_text)
        self._text, self._num_reported = before + self._text, self._num_reported - len(before)
        self._position += len(before)
        self._held, self._held_text = None, []
        if call.index is not None:
            self._num_calls, call.index = call.index, None

    def _commit(self) -> None:
        if self._held is not None:
            self._parts += self._held
            self._held, self._held_text = None, []

    def _report_cut(self, call: Call) -> bool:
        if not (self._is_cut_here() if call.index is None else self._is_at_cut()):
            return False
        if call.index is None and call.name in self._names:
            self._begin(call)
            if call.arguments is not None and call.arguments.lstrip().startswith("{"):
                self._report("arguments", call.arguments, call)
        self._commit()
        self._position = len(self._text)
        return True

    def _is_cut_here(self) -> bool:
        return self._is_at_cut()

    def _is_at_cut(self) -> bool:
        return self._is_cut and self._position == len(self._text)

    def _drop_cut(self, expected: str) -> None:
        if self._is_cut and expected.startswith(self._text[self._position :].rstrip(HALF)):
            self._drop_rest()

    def _members(self, call: Call) -> Wait[None]:
        yield from self._expect("{")
        while (yield from self._skip_space()) != "}":
            key = yield from self._string()
            yield from self._expect(":")
            char = yield from self._skip_space()
            if key == self.name_key:
                call.name = yield from self._string()
            elif key not in self.arguments_keys or call.index is not None:
                yield from self._value()
            elif char == "{" and call.name is not None:
                yield from self._report_arguments(call)
            else:
                call.arguments = (yield from self._string()) if char == '"' else (yield from self._value())
            if not (yield from self._takes_next(",")):
                break
        yield from self._expect("}")
        if call.index is None:
            self._report_whole(call)

    def _report_whole(self, call: Call) -> None:
        arguments = "{}" if call.arguments in {None, "", "null"} else str(call.arguments).strip()
        scanner = StrictObject()
        if scanner.scan(arguments, 0) != len(arguments) or not scanner.is_over:
            known = self._known_keys(call)
            found = None
            if arguments.startswith("{"):
                found = recover_object(arguments, known=known, opener=self._other_call(), budget=self._budget)
            if found is None:
                raise MalformedError
            arguments, _ = found
        self._begin(call)
        self._report("arguments", arguments, call)

    def _object_arguments(self, call: Call) -> Wait[None]:
        if (yield from self._skip_space()) != "{":
            raise MalformedError
        yield from self._report_arguments(call)

    def _report_arguments(self, call: Call) -> Wait[None]:
        self._begin(call)
        self._drop()
        scanner, reported = StrictObject(), list[str]()
        while True:
            self._position = scanner.scan(self._text, self._position)
            num_reported = self._position if scanner.is_over else scanner.num_safe
            reported.append(self._text[:num_reported])
            self._report("arguments", reported[-1], call)
            self._position -= num_reported
            self._drop_first(num_reported)
            scanner.num_safe -= num_reported
            if scanner.is_over:
                yield from self._check_end(call, "".join(reported))
                break
            if scanner.is_broken:
                yield from self._recover(call, "".join(reported))
                break
            if self._is_over:
                self._position = len(self._text)
                self._reject(call)
            yield
        self._commit()

    def _check_end(self, call: Call, reported: str) -> Wait[None]:
        """Repair arguments that end too early because a string has an unescaped quote and a bracket."""
        char = yield from self._skip_space()
        if char == '"':
            self._position += 1
            yield from self._recover(call, reported)
        # False at the end of the answer: `char` is "", and every string contains "".
        elif char not in _AFTER_ARGUMENTS and not any(each.startswith(char) for each in self._call_openers):
            while not self._is_over:
                yield
            found = None
            if not self._is_cut:
                known = self._known_keys(call)
                text, opener = reported + self._text, self._other_call()
                found = recover_object(text, self._ends, known, opener=opener, budget=self._budget)
            if found is not None:
                yield from self._recover(call, reported)
            elif not self._is_cut and self._has_second_end():
                self._position += 1
                self._reject(call)

    def _has_second_end(self) -> bool:
        closers = [place for each in self._call_closers if (place := self._text.find(each, self._position)) >= 0]
        return bool(closers) and '"}' in self._text[self._position : min(closers)]

    def _recover(self, call: Call, reported: str) -> Wait[None]:
        while not self._is_over:
            yield
        text, known = reported + self._text, self._known_keys(call)
        found = recover_object(text, self._ends, known, opener=self._other_call(), budget=self._budget)
        if found is None or (self._held is None and not found[0].startswith(reported)):
            if self._held is not None:
                self._position = self._broken_end(text, len(reported) + self._position) - len(reported)
            self._reject(call)
        arguments, end = found
        if self._held is None:
            arguments = arguments.removeprefix(reported)
        else:
            self._held, self._num_held_chars = [part for part in self._held if part.kind != "arguments"], 0
        self._report("arguments", arguments, call)
        self._position = end - len(reported)
        self._drop()

    def _other_call(self) -> re.Pattern[str]:
        names = "|".join(map(re.escape, sorted(self._names)))
        head = rf'"{re.escape(self.name_key)}"\s*:\s*"(?:{names})"|\{{\s*"(?:{names})"\s*:'
        return re.compile("|".join([*map(re.escape, self._call_openers), head]))

    def _broken_end(self, text: str, position: int) -> int:
        """Return the index at which a malformed call ends.

        If another call begins before any closing marker, the malformed call includes it, and ends no earlier than the
        first closing marker.
        """
        openers = [place for each in self._call_openers if (place := text.find(each)) >= 0]
        if not openers or not self._call_closers:
            return position
        opener = min(openers)
        closers = [place for each in self._call_closers if (place := text.find(each)) >= 0]
        if closers and min(closers) < opener:
            return min(position, opener)
        ends = [place + len(each) for each in self._call_closers if (place := text.find(each, opener)) >= 0]
        return max(position, min(ends, default=position))

    def _reject(self, call: Call) -> NoReturn:
        """Raise `MalformedError`.

        First emit the remaining arguments if the answer was cut off, or if a part of the call was emitted.
        """
        if self._is_cut or self._held is None:
            self._position = len(self._text) if self._is_cut else self._position
            self._report("arguments", self._text[: self._position], call)
            self._drop()
        raise MalformedError

    def _known_keys(self, call: Call) -> frozenset[str] | None:
        return known_keys(self._parameters.get(call.name or "", {}))

    def _begin(self, call: Call) -> None:
        if call.name not in self._names:
            raise MalformedError
        call.index, self._num_calls = self._num_calls, self._num_calls + 1
        self._report("call", call.name or "", call)

    def _value(self) -> Wait[str]:
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
            elif char and (depth or char not in _AFTER_VALUE):
                run = _PLAIN.match(self._text, self._position)
                assert run is not None
                self._position = run.end()
                continue
            elif depth:
                raise MalformedError
            if depth == 0:
                break
        if start == self._position:
            raise MalformedError
        return self._text[start : self._position]

    def _string(self) -> Wait[str]:
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
                self._position += 1

    def _expect(self, text: str) -> Wait[None]:
        if not (yield from self._takes_next(text)):
            rest = self._text[self._position :].rstrip(HALF)
            if self._is_cut and rest and text.startswith(rest):
                self._position = len(self._text)
            raise MalformedError

    def _takes_next(self, expected: str) -> Wait[bool]:
        yield from self._skip_space()
        return (yield from self._takes(expected))

    def _takes(self, expected: str) -> Wait[bool]:
        while True:
            seen = self._text[self._position : self._position + len(expected)]
            if seen == expected:
                self._position += len(expected)
                return True
            begun = seen.rstrip(HALF) if len(seen) < len(expected) else seen
            if self._is_over or not expected.startswith(begun):
                return False
            yield

    def _follows(self, texts: Sequence[str]) -> Wait[str]:
        """Return the element of `texts` that comes next, or ""."""
        while True:
            seen = self._text[self._position :]
            if found := next((each for each in texts if seen.startswith(each)), ""):
                return found
            may_come = any(each.startswith(seen) for each in texts)
            if self._is_over or not may_come:
                if self._is_cut and may_come:
                    self._drop_rest()
                return ""
            yield

    def _takes_closer(self, closer: str) -> Wait[None]:
        yield from self._drop_space()
        for _ in range(_MAX_CLOSERS):
            if (yield from self._takes_next(closer)):
                break
            if (yield from self._peek()) not in {"}", "]"}:
                self._drop_cut(closer)
                self._position = 0
                break
            self._position += 1
        else:
            self._position = 0  # keep the brackets as text
        yield from self._drop_space()

    def _drop_space(self) -> Wait[None]:
        yield from self._skip_space()
        self._drop()

    def _skip_space(self) -> Wait[str]:
        while (char := (yield from self._peek())) and char in _SPACE:
            self._position += 1
        return char

    def _peek(self) -> Wait[str]:
        while self._position == len(self._text):
            if self._is_over:
                return ""
            yield
        return self._text[self._position]

    def _report(self, kind: str, text: str, call: Call) -> None:
        if call.index is None:
            return
        if not (self._only_one and call.index):
            part = Part("call" if kind == "call" else "arguments", text, call.index, self._num_reported)
            (self._parts if self._held is None else self._held).append(part)
        if kind == "arguments":
            self._num_held_chars += len(text)
            if self.num_held_chars is not None and self._num_held_chars > self.num_held_chars:
                self._commit()

    def _report_content(self) -> None:
        self._parts.append(Part("content", self._text[: self._position], start=self._num_reported))
        self._drop()

    def _drop_rest(self) -> None:
        self._position = len(self._text)
        self._drop()

    def _drop(self) -> None:
        self._drop_first(self._position)
        self._position = 0

    def _drop_first(self, num_chars: int) -> None:
        if self._held is not None:
            self._held_text.append(self._text[:num_chars])
        self._num_reported += num_chars
        self._text = self._text[num_chars:]
