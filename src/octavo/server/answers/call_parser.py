"""Base of the parsers that read tool calls in an answer's text while it arrives.

A call is held back until it has ended; in a stream, only until its arguments have `HELD_CHARS` characters. A text that
begins like a call and is none is content: its arguments cannot be read in exactly one way, no tool has its name, or a
tag is not closed. Slips with one meaning are repaired, see `octavo.engine.json_recovery`. If an answer was cut off
within a call with a known name, the part of the call that arrived is emitted as a call, not as content.

In a stream a call with long arguments is emitted while it arrives. If it breaks then, its arguments stay broken JSON:
they are never completed to a value that the model did not write. In a whole answer every call is held back until it has
ended.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeAlias, TypeVar

from octavo.engine.json_recovery import END, SearchBudget, StrictObject, recover_object
from octavo.engine.stop_strings import num_held_back_chars
from octavo.server.answers.argument_values import known_keys
from octavo.server.answers.parts import MAX_BLANKS, Heads, Part, joined, without_space

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from octavo.server.answers.tool_format import Function

    T = TypeVar("T")
    Wait: TypeAlias = Generator[None, None, T]
    """A step of parsing that yields whenever it needs more text."""

_SPACE = " \t\r\n"
HELD_CHARS = 1024  # of a call's arguments: in a stream, longer arguments are emitted before the call has ended
_END_OF_TEXT = r"\Z"
_MAX_CLOSERS = 8  # surplus brackets after a call
HALF = "\ufffd"  # decoded from a part of a character's bytes
_BEHIND_VALUE = "}]," + _SPACE
BLANKS_WITHIN = f"[ \\t\\r\\n]{{0,{MAX_BLANKS}}}"  # for grammars
_AFTER_ARGUMENTS = "}],;{[<>`"  # first characters of marks
_STRING_STOPS = re.compile(r'["\\]')
_PLAIN = re.compile(r'[^"{}\[\], \t\r\n]+|[ \t\r\n,]+')


def ending(*marks: str, is_wrapped: bool = False) -> re.Pattern[str]:
    """Return a pattern of the text that may follow arguments: one of these marks, with any white space, or the end.

    is_wrapped: the arguments are a member of an object, whose closing bracket comes first.
    """
    either = [r"\s*".join(map(re.escape, mark.split())) for mark in marks if mark.strip()]
    either = [rf"{each}\s*{_END_OF_TEXT}" if each == r"\]" else each for each in either]  # a bracket alone is no mark
    bracket = r"(?:\}\s*+)?" if is_wrapped else ""
    return re.compile(rf"\s*+{bracket}(?:{'|'.join([*either, _END_OF_TEXT])})")


class MalformedError(Exception):
    """The text is not a call."""


@dataclass(slots=True)
class Call:
    """The known parts of a call. index: its index in the answer; None until its name is emitted."""

    name: str | None = None
    arguments: str | None = None
    index: int | None = None


class ToolParser:
    """Separates tool calls from other text.

    functions: the available tools. only_one: drop all calls but the first. name_key, arguments_keys: the keys of the
    name and of the arguments in an object that is a call. _ends: matches the text that may follow broken arguments.
    _call_openers, _call_closers: the marks that begin a call, and those that end one. num_held_chars: the number of
    characters of arguments that are held back until a call has ended; None for all.
    """

    num_held_chars: int | None = HELD_CHARS

    name_key: str = "name"
    arguments_keys: tuple[str, ...] = ("arguments", "parameters")
    _ends: re.Pattern[str] = END
    _call_openers: tuple[str, ...] = ()
    _call_closers: tuple[str, ...] = ()

    def __init__(self, functions: Sequence[Function], *, only_one: bool = False) -> None:
        self._names = frozenset(each.name for each in functions)
        self._keys = {each.name: known_keys(each.parameters) for each in functions}
        self._only_one = only_one
        self._num_calls = 0
        self._text = ""  # not yet emitted
        self._num_told = 0  # characters of the answer before `_text`
        self._position = 0  # in `_text`: the end of the text that was read
        self._is_over = False
        self._is_cut = False  # the answer is over, but the model did not end it
        self._parts: list[Part] = []
        self._held: list[Part] | None = None  # parts of a call that may turn out to be text
        self._held_text: list[str] = []  # the text of these parts
        self._num_held_chars = 0  # of the held call's arguments
        self._broken = ""  # the text of the last call that became content, as far as it was read
        self._budget = SearchBudget()
        self._steps = self._read()

    def feed(self, text: str) -> list[Part]:
        """Add text; return the parts that are certain now."""
        self._text += text
        return self._advance()

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Flush the buffered text. If the answer was cut off, drop an incomplete opener or head of a call."""
        self._is_over, self._is_cut = True, is_cut
        return self._advance()

    def _advance(self) -> list[Part]:
        next(self._steps, None)
        parts, self._parts = self._parts, []
        return joined(parts)

    def _read(self) -> Wait[None]:
        """Read a whole answer."""
        raise NotImplementedError

    # --- steps that families share

    def _content(self, *openers: str) -> Wait[str]:
        """Emit content up to the opener of a call, skip the opener and return it; "" at the end of the text.

        White space before the opener is held back, because it is content only if no call follows.
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
        """Return how many characters at the end of the text may begin an opener; the last may be a part of one."""
        if self._is_over and not self._is_cut:
            return 0
        end = self._text.rstrip(HALF)
        num_begun = max(num_held_back_chars(end, each) for each in openers)
        return num_begun + len(self._text) - len(end) if num_begun else 0

    def _begins_with(self, start: int, heads: Heads) -> Wait[bool]:
        """Return whether one of the heads begins at an index. If the answer was cut off within one, drop it."""
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
        """Read a call that is an object. Returns False if there is none; the text that was read is content then."""
        call = Call()
        return (yield from self._attempt(call, self._members(call)))

    def _attempt(self, call: Call, steps: Wait[None]) -> Wait[bool]:
        """Read a call by these steps. Returns False if there is none; the text that was read is content then."""
        self._held, self._held_text, self._num_held_chars = [], [], 0
        start = self._position
        try:
            yield from steps
        except MalformedError:
            if not self._tell_cut(call) and self._held is not None:
                self._roll_back(call)
                self._broken = self._text[start : self._position]
                self._tell_content()
                return False
        self._commit()
        self._drop()
        return True

    def _roll_back(self, call: Call) -> None:
        """Forget a call: its text up to here is content, in which no other call is looked for."""
        before = "".join(self._held_text)
        self._text, self._num_told = before + self._text, self._num_told - len(before)
        self._position += len(before)
        self._held, self._held_text = None, []
        if call.index is not None:
            self._num_calls, call.index = call.index, None

    def _commit(self) -> None:
        """Emit the call that is held back: it can no longer become text."""
        if self._held is not None:
            self._parts += self._held
            self._held, self._held_text = None, []

    def _tell_cut(self, call: Call) -> bool:
        """Emit the known part of a call if the answer was cut off within it. Returns whether it was."""
        if not (self._is_cut_here() if call.index is None else self._is_at_cut()):
            return False
        if call.index is None and call.name in self._names:
            self._begin(call)
            if call.arguments is not None and call.arguments.lstrip().startswith("{"):
                self._tell("arguments", call.arguments, call)
        self._commit()
        self._position = len(self._text)
        return True

    def _is_cut_here(self) -> bool:
        """Return whether the answer was cut off while the call at the beginning of `_text` was read."""
        return self._is_at_cut()

    def _is_at_cut(self) -> bool:
        return self._is_cut and self._position == len(self._text)

    def _drop_cut(self, expected: str) -> None:
        """Drop the beginning of a text with which the answer was cut off."""
        if self._is_cut and expected.startswith(self._text[self._position :].rstrip(HALF)):
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
        """Emit arguments that came before the name, or in a string."""
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
        self._tell("arguments", arguments, call)

    def _tell_arguments(self, call: Call) -> Wait[None]:
        """Read arguments that are a JSON object, and emit them. Raises `MalformedError` if they cannot be read."""
        self._begin(call)
        self._drop()
        scanner, told = StrictObject(), list[str]()
        while True:
            self._position = scanner.scan(self._text, self._position)
            num_told = self._position if scanner.is_over else scanner.num_safe
            told.append(self._text[:num_told])
            self._tell("arguments", told[-1], call)
            self._position -= num_told
            self._drop_first(num_told)
            scanner.num_safe -= num_told
            if scanner.is_over:
                yield from self._check_end(call, "".join(told))
                break
            if scanner.is_broken:
                yield from self._recover(call, "".join(told))
                break
            if self._is_over:
                self._position = len(self._text)  # the answer ended within a value: no call is looked for there
                self._give_up(call)
            yield
        self._commit()

    def _check_end(self, call: Call, told: str) -> Wait[None]:
        """Repair arguments if the quote and the bracket that ended them may be text of their last string."""
        char = yield from self._skip_space()
        if char == '"':
            self._position += 1
            yield from self._recover(call, told)
        # at the end of the answer the character is "", which every text contains
        elif char not in _AFTER_ARGUMENTS and not any(each.startswith(char) for each in self._call_openers):
            while not self._is_over:
                yield
            found = None
            if not self._is_cut:
                known = self._known_keys(call)
                text, opener = told + self._text, self._other_call()
                found = recover_object(text, self._ends, known, opener=opener, budget=self._budget)
            if found is not None:
                yield from self._recover(call, told)
            elif not self._is_cut and self._has_second_end():
                self._position += 1
                self._give_up(call)

    def _has_second_end(self) -> bool:
        """Return whether another quote and bracket come before the mark that ends the call."""
        closers = [place for each in self._call_closers if (place := self._text.find(each, self._position)) >= 0]
        return bool(closers) and '"}' in self._text[self._position : min(closers)]

    def _recover(self, call: Call, told: str) -> Wait[None]:
        """Repair arguments whose beginning was emitted, with the whole rest of the answer."""
        while not self._is_over:
            yield
        text, known = told + self._text, self._known_keys(call)
        found = recover_object(text, self._ends, known, opener=self._other_call(), budget=self._budget)
        if found is None or (self._held is None and not found[0].startswith(told)):
            if self._held is not None:
                self._position = self._broken_end(text, len(told) + self._position) - len(told)
            self._give_up(call)
        arguments, end = found
        if self._held is None:
            arguments = arguments.removeprefix(told)
        else:
            self._held, self._num_held_chars = [part for part in self._held if part.kind != "arguments"], 0
        self._tell("arguments", arguments, call)
        self._position = end - len(told)
        self._drop()

    def _other_call(self) -> re.Pattern[str]:
        """Return a pattern of the beginning of a call: a mark, or an object with the name of a tool."""
        names = "|".join(map(re.escape, sorted(self._names)))
        head = rf'"{re.escape(self.name_key)}"\s*:\s*"(?:{names})"|\{{\s*"(?:{names})"\s*:'
        return re.compile("|".join([*map(re.escape, self._call_openers), head]))

    def _broken_end(self, text: str, position: int) -> int:
        """Return where the text of a broken call ends. position: where it broke.

        After its closing mark another call may follow. A call that begins before that mark may be part of a string,
        so it is never run: it is text up to its own closing mark.
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

    def _give_up(self, call: Call) -> NoReturn:
        """Emit the rest of arguments that were cut off or are broken, for a call that was emitted already."""
        if self._is_cut or self._held is None:
            self._position = len(self._text) if self._is_cut else self._position
            self._tell("arguments", self._text[: self._position], call)
            self._drop()
        raise MalformedError

    def _known_keys(self, call: Call) -> frozenset[str] | None:
        """Return the names that a call's arguments may have; None if any name is allowed."""
        return self._keys.get(call.name or "")

    def _begin(self, call: Call) -> None:
        """Decide that this is a call, and emit its name. Raises `MalformedError` if no tool has it."""
        if call.name not in self._names:
            raise MalformedError
        call.index, self._num_calls = self._num_calls, self._num_calls + 1
        self._tell("call", call.name or "", call)

    def _value(self) -> Wait[str]:
        """Skip a JSON value of any kind; return its text."""
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
                assert run is not None
                self._position = run.end()
                continue  # a number may continue in the next piece
            elif depth:
                raise MalformedError
            if depth == 0:
                break
        if start == self._position:
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
                self._position += 1  # the escaped character

    def _expect(self, text: str) -> Wait[None]:
        if not (yield from self._takes(text)):
            rest = self._text[self._position :].rstrip(HALF)
            if self._is_cut and rest and text.startswith(rest):
                self._position = len(self._text)
            raise MalformedError

    def _takes(self, expected: str) -> Wait[bool]:
        """Skip a text if it is next. Returns whether it was."""
        while True:
            seen = self._text[self._position : self._position + len(expected)]
            if seen == expected:
                self._position += len(expected)
                return True
            begun = seen.rstrip(HALF) if len(seen) < len(expected) else seen
            if self._is_over or not expected.startswith(begun):
                return False
            yield

    def _takes_closer(self, closer: str) -> Wait[None]:
        """Skip the mark that closes a call, and surplus brackets before it, if it comes."""
        yield from self._skip_space()
        self._drop()
        for _ in range(_MAX_CLOSERS):
            yield from self._skip_space()
            if (yield from self._takes(closer)):
                break
            if (yield from self._peek()) not in {"}", "]"}:
                self._drop_cut(closer)
                self._position = 0
                break
            self._position += 1
        yield from self._skip_space()
        self._drop()

    def _skip_space(self) -> Wait[str]:
        """Skip white space; return the next character, "" at the end."""
        while (char := (yield from self._peek())) and char in _SPACE:
            self._position += 1
        return char

    def _peek(self) -> Wait[str]:
        """Return the next character, "" at the end."""
        while self._position == len(self._text):
            if self._is_over:
                return ""
            yield
        return self._text[self._position]

    # --- emitting parts

    def _tell(self, kind: str, text: str, call: Call) -> None:
        if call.index is None:
            return
        if not (self._only_one and call.index):
            part = Part("call" if kind == "call" else "arguments", text, call.index, self._num_told)
            (self._parts if self._held is None else self._held).append(part)
        if kind == "arguments":
            self._num_held_chars += len(text)
            if self.num_held_chars is not None and self._num_held_chars > self.num_held_chars:
                self._commit()

    def _tell_content(self) -> None:
        self._parts.append(Part("content", self._text[: self._position], start=self._num_told))
        self._drop()

    def _drop(self) -> None:
        self._drop_first(self._position)
        self._position = 0

    def _drop_first(self, num_chars: int) -> None:
        if self._held is not None:
            self._held_text.append(self._text[:num_chars])
        self._num_told += num_chars
        self._text = self._text[num_chars:]
