"""Parse JSON objects that a model wrote, and repair syntax errors if only one repair is plausible."""

from __future__ import annotations

import heapq
import json
import re
from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from octavo.engine.python_literals import NotALiteralError, ValueScanner, literal_json

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAX_STEPS = 1_000
_MAX_DEPTH = 128
_SPACE = " \t\r\n"
_BLANKS = re.compile(r"[ \t\r\n]*")
_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null", re.ASCII)
_WORD = re.compile(r"[\w.+-]+", re.ASCII)
_MAX_WORD_CHARS = 400
_WORDS = {"True": "true", "False": "false", "None": "null"}
_MEMBER = re.compile(r'[ \t\r\n]*(?:\}|"(?P<key>[^"\\\x00-\x1f]{0,256})"[ \t\r\n]*:)')
_NEXT_KEY = re.compile(r'[ \t\r\n]+"[^"\\\x00-\x1f]{1,256}"[ \t\r\n]*:')
_ITEM = re.compile(r'[ \t\r\n]*["{\[\]\-0-9tfnTFN]')
_CLOSERS = {"{": "}", "[": "]"}
_OBJECT = ("object", "{")
_KEY = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})){0,256}"')
_LAST_COMMA = re.compile(r",[ \t\r\n]*[}\]]")
_PYTHON_OBJECT = re.compile(r"\{[ \t\r\n]*'")
END = re.compile(r"\s*\Z")
"""Matches if only white space follows."""


class StrictObject:
    """Checks the syntax of a JSON object that arrives in pieces.

    num_safe: Number of leading characters that a repair would not change.
    """

    def __init__(self) -> None:
        self.num_safe = 0
        self.is_over = self.is_broken = False
        self._stack: list[str] = []
        self._expects = "object"
        self._is_in_string = False

    def scan(self, text: str, position: int) -> int:
        """Scan from `position` until the object ends, is invalid or needs more text. Return the new position."""
        while not self.is_over and not self.is_broken and position < len(text):
            before = position
            if self._is_in_string:
                position = self._scan_string(text, position)
            elif text[position] in _SPACE:
                position += 1
            else:
                position = self._scan_token(text, position)
            if position == before:
                break
        return position

    def drop(self, num_chars: int) -> None:
        """Adjust `num_safe` after the text's first characters were removed."""
        self.num_safe -= num_chars

    def _scan_string(self, text: str, position: int) -> int:
        if run := _RUN.match(text, position):
            self.num_safe = run.end()
            return run.end()
        if text[position] == '"':
            self._is_in_string = False
            self._expects = "colon" if self._expects == "key" else "comma"
            return position + 1
        if escape := _ESCAPE.match(text, position):
            return escape.end()
        self.is_broken = _BEGUN_ESCAPE.match(text, position) is None
        return position

    def _scan_token(self, text: str, position: int) -> int:
        char = text[position]
        if char in "}]" and self._stack and _CLOSERS[self._stack[-1]] == char and self._may_end():
            self._stack.pop()
            self._expects, self.is_over = "comma", not self._stack
        elif char == "," and self._expects == "comma":
            self._expects = "key" if self._stack[-1] == "{" else "value"
            return position + 1  # not safe, because a repair may remove the comma
        elif char == ":" and self._expects == "colon":
            self._expects = "value"
        elif char == '"' and self._expects in {"key", "first key", "value", "first value"}:
            self._expects = "key" if "key" in self._expects else "value"
            self._is_in_string = True
        elif char in _CLOSERS and (self._expects in {"value", "first value"} or (self._expects, char) == _OBJECT):
            self._stack.append(char)
            self._expects = "first key" if char == "{" else "first value"
            self.is_broken = len(self._stack) > _MAX_DEPTH
        elif self._expects in {"value", "first value"}:
            return self._scan_scalar(text, position)
        else:
            self.is_broken = True
            return position
        self.num_safe = position + 1
        return position + 1

    def _may_end(self) -> bool:
        return self._expects in {"comma", "first key", "first value"}

    def _scan_scalar(self, text: str, position: int) -> int:
        word = _WORD.match(text, position)
        if word is None or word.end() - position > _MAX_WORD_CHARS:
            self.is_broken = True
        elif word.end() < len(text):
            if _SCALAR.fullmatch(text, position, word.end()):
                self._expects = "comma"
                return word.end()
            self.is_broken = True
        return position


class SearchBudget:
    """Remaining search steps."""

    def __init__(self, num_steps: int = _MAX_STEPS) -> None:
        self.num_steps = num_steps


def recover_object(
    text: str,
    ends: re.Pattern[str] = END,
    known: frozenset[str] | None = None,
    *,
    opener: re.Pattern[str] | None = None,
    budget: SearchBudget | None = None,
) -> tuple[str, int] | None:
    """Return the repaired JSON of the object at a text's beginning, and the object's length in the text.

    Repairs unescaped quotes and control characters in strings, invalid escapes, trailing commas, and Python literals.
    Returns None unless exactly one repair is plausible.

    ends: Pattern of the text that must follow the object.
    known: Expected keys, or None for any.
    opener: Pattern of a tool call's start. A string with unescaped quotes is ambiguous if it contains a match.
    """
    if _PYTHON_OBJECT.match(text):
        return _python_object(text, ends)
    budget = SearchBudget() if budget is None else budget
    if not budget.num_steps:
        return None
    breaks = _breaks(text, ends, opener)
    found = _Search(text, ends, known, breaks).run(budget)
    if found is not None and known is not None and found.num_strays:
        # Unknown keys are more likely than unescaped quotes.
        other = _Search(text, ends, None, breaks).run(budget)
        found = other if other is not None and other.num_strays < found.num_strays else found
        found = found if budget.num_steps else None  # the second search may have run out of steps
    if found is None:
        return None
    written = found.text()
    try:
        json.dumps(json.loads(written), ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return written, found.position


def _breaks(text: str, ends: re.Pattern[str], opener: re.Pattern[str] | None) -> list[int]:
    places = [] if opener is None else [found.start() for found in opener.finditer(text)]
    for bracket in re.finditer("}", text):
        found = ends.match(text, bracket.end())
        if found is not None and found.end() < len(text):
            places.append(bracket.start())
    return sorted(places)


def _python_object(text: str, ends: re.Pattern[str]) -> tuple[str, int] | None:
    try:
        scanner = ValueScanner(0, ends="")
        end = scanner.end(text, is_over=True)
        return None if end is None or not ends.match(text, end) else (literal_json(scanner.value(text, end)), end)
    except NotALiteralError:
        return None


@dataclass(frozen=True, slots=True)
class _Reading:
    """One interpretation of a text up to a position.

    is_clear: True if no other repair explains the text.
    is_paired: True if each string with unescaped quotes has an even number of inner quotes (escaped or not).
    """

    position: int = 0
    num_strays: int = 0
    stack: tuple[str, ...] = ()
    expects: str = "object"
    written: tuple[Any, str] | None = None
    keys: frozenset[str] = frozenset()
    is_clear: bool = True
    is_paired: bool = True

    def text(self) -> str:
        pieces, left = list[str](), self.written
        while left is not None:
            left, piece = left
            pieces.append(piece)
        return "".join(reversed(pieces))

    def advanced(self, end: int, piece: str, expects: str, **changes: Any) -> _Reading:
        return replace(self, position=end, expects=expects, written=(self.written, piece), **changes)


class _Search:
    """Finds the interpretation with the fewest unescaped quotes, by Dijkstra's algorithm.

    At most one string may have unescaped quotes. If the number of its inner quotes (escaped or not) is even, the text
    is ambiguous if another interpretation has equally few unescaped quotes. If this number is odd, any other
    interpretation makes the text ambiguous, even one with more unescaped quotes.
    """

    def __init__(self, text: str, ends: re.Pattern[str], known: frozenset[str] | None, breaks: list[int]) -> None:
        self._text, self._ends, self._known, self._breaks = text, ends, known, breaks
        self._serial = count()
        self._heap: list[tuple[int, int, _Reading, Iterator[_Reading] | None]] = []

    def run(self, budget: SearchBudget) -> _Reading | None:
        best: _Reading | None = None
        self._push(0, _Reading())
        while budget.num_steps > 0:
            budget.num_steps -= 1
            is_only = best is not None and best.is_paired and bool(self._heap) and self._heap[0][0] > best.num_strays
            if not self._heap or is_only or (best is not None and not best.is_clear):
                return best if best is not None and best.is_clear else None
            _, _, reading, strings = heapq.heappop(self._heap)
            if strings is not None:
                if (read := next(strings, None)) is not None:
                    self._push(read.num_strays, read)
                    self._push(read.num_strays + 1, reading, strings)
            elif (on := self._advanced(reading)) is None:
                continue
            elif on.expects == "string":
                self._push(on.num_strays, on, self._strings(on))
            elif best is not None:
                return None
            else:
                best = on
        return None

    def _push(self, cost: int, reading: _Reading, strings: Iterator[_Reading] | None = None) -> None:
        heapq.heappush(self._heap, (cost, next(self._serial), reading, strings))

    def _advanced(self, reading: _Reading) -> _Reading | None:
        on: _Reading | None = reading
        while on is not None and on.expects not in {"string", "end"}:
            blanks = _BLANKS.match(self._text, on.position)
            start = on.position if blanks is None else blanks.end()
            if start == len(self._text):
                return None
            on = self._after_token(on, self._text[on.position : start], start)
        if on is not None and on.expects == "end" and not self._ends.match(self._text, on.position):
            return None
        return on

    def _after_token(self, on: _Reading, blanks: str, start: int) -> _Reading | None:
        char, top = self._text[start], on.stack[-1] if on.stack else ""
        if top and char == _CLOSERS[top] and on.expects in {"comma", "first key", "first value", "key", "item"}:
            rest = on.stack[:-1]
            return on.advanced(start + 1, blanks + char, "comma" if rest else "end", stack=rest)
        if char == "," and on.expects == "comma":
            comma = "" if _LAST_COMMA.match(self._text, start) else ","
            return on.advanced(start + 1, blanks + comma, "key" if top == "{" else "item")
        if on.expects == "colon":
            return on.advanced(start + 1, blanks + char, "value") if char == ":" else None
        if on.expects in {"key", "first key"}:
            return self._after_key(on, blanks, start)
        is_value = on.expects in {"value", "first value", "item"}
        if char in _CLOSERS and len(on.stack) < _MAX_DEPTH and (is_value or (on.expects, char) == _OBJECT):
            first = "first key" if char == "{" else "first value"
            return on.advanced(start + 1, blanks + char, first, stack=(*on.stack, char))
        return self._after_word(on, blanks, start) if is_value else None

    def _after_word(self, on: _Reading, blanks: str, start: int) -> _Reading | None:
        if self._text[start] == '"':
            return on.advanced(start + 1, blanks, "string")
        word = _WORD.match(self._text, start)
        if word is None or not (word.group() in _WORDS or _SCALAR.fullmatch(word.group())):
            return None
        return on.advanced(word.end(), blanks + _WORDS.get(word.group(), word.group()), "comma")

    def _after_key(self, on: _Reading, blanks: str, start: int) -> _Reading | None:
        found = _KEY.match(self._text, start)
        if found is None:
            return None
        if len(on.stack) > 1:
            return on.advanced(found.end(), blanks + found.group(), "colon")
        key = str(json.loads(found.group()))
        if key in on.keys or (self._known is not None and key not in self._known):
            return None
        return on.advanced(found.end(), blanks + found.group(), "colon", keys=on.keys | {key})

    def _strings(self, before: _Reading) -> Iterator[_Reading]:
        text, start = self._text, before.position
        pieces, position = ['"'], start
        strays: list[int] = []
        has_member = False  # an unescaped quote precedes text that looks like a value or key
        may_have_ended = False  # an unescaped quote follows a backslash, which may end a path
        escapes = _Escapes()
        while position < len(text):
            if run := _RUN.match(text, position):
                pieces.append(run.group())
                position = run.end()
            elif text[position] == '"':
                may_end = self._may_end_string(position + 1, before)
                if may_end:
                    is_clear = before.is_clear and not has_member and escapes.are_clear(has_strays=bool(strays))
                    if strays:
                        is_clear = is_clear and not may_have_ended and not self._has_break(start, position)
                    if len(strays) == 1:  # perhaps an enclosing quote was written twice
                        is_clear = is_clear and strays[0] not in {start, position - 1}
                    if strays and before.num_strays:
                        is_clear = False
                    yield before.advanced(
                        position + 1,
                        "".join([*pieces, '"']),
                        "comma",
                        num_strays=before.num_strays + len(strays),
                        is_clear=is_clear,
                        is_paired=before.is_paired and not (strays and (len(strays) + escapes.num_quotes) % 2),
                    )
                has_member = has_member or may_end == "," or _NEXT_KEY.match(text, position + 1) is not None
                may_have_ended = may_have_ended or text[position - 1] == "\\"
                strays.append(position)
                pieces.append('\\"')
                position += 1
            elif text[position] == "\\":
                escape = _ESCAPE.match(text, position)
                end = position + 1 if escape is None else escape.end()
                escapes.add(text[position : end + (escape is None)], is_valid=escape is not None)
                if text[position:end] == '\\"' and self._may_end_string(end, before):
                    escapes.has_end = True
                pieces.append("\\\\" if escape is None else escape.group())
                position = end
            else:
                pieces.append(json.dumps(text[position])[1:-1])
                position += 1

    def _has_break(self, start: int, end: int) -> bool:
        first = bisect_left(self._breaks, start)
        return first < len(self._breaks) and self._breaks[first] < end

    def _may_end_string(self, position: int, before: _Reading) -> str:
        top = before.stack[-1]
        blanks = _BLANKS.match(self._text, position)
        position = position if blanks is None else blanks.end()
        char = self._text[position : position + 1]
        if char != ",":
            return char if char == _CLOSERS[top] else ""
        if top == "[":
            return char if _ITEM.match(self._text, position + 1) else ""
        member = _MEMBER.match(self._text, position + 1)
        if member is None or (member.group("key") is not None and not self._is_known(member.group("key"), before)):
            return ""
        return char

    def _is_known(self, key: str, before: _Reading) -> bool:
        if len(before.stack) > 1:
            return True
        return key not in before.keys and (self._known is None or key in self._known)


@dataclass(slots=True)
class _Escapes:
    """The backslashes in one string.

    After an invalid escape, valid escapes are ambiguous, because the model probably does not escape backslashes.
    """

    has_invalid: bool = False
    has_other: bool = False
    has_end: bool = False
    num_quotes: int = 0

    def add(self, written: str, *, is_valid: bool) -> None:
        if is_valid and written == '\\"':
            self.num_quotes += 1
        elif is_valid:
            self.has_other = True
        else:
            self.has_invalid = True
            self.has_other = self.has_other or written[1:] in {"'", "\n", "\r", ""}

    def are_clear(self, *, has_strays: bool) -> bool:
        """Return True if every backslash has only one interpretation."""
        if self.has_end and (self.has_invalid or has_strays):
            return False
        return not (self.has_invalid and self.has_other)
