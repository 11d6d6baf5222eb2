"""GBNF, the notation of llama.cpp's grammars, in the Lark notation that llguidance reads.

Every character becomes a lexeme of its own. llguidance's lexer takes the longest lexeme and never looks back: with
longer ones it would forbid what a grammar allows, "ba" by `root ::= word "a"` and `word ::= [a-z]+`, say.
The notation: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\r\n]*)+)
    |(?P<rule>[A-Za-z0-9_-]+)[ \t]*::=
    |(?P<name>[A-Za-z0-9_-]+)
    |"(?P<text>(?:[^"\\]|\\.)*)"
    |\[(?P<negated>\^?)(?P<set>(?:[^\]\\]|\\.)*)\]
    |(?P<repeat>[*+?])
    |\{\s*(?P<least>\d{1,9})\s*(?P<more>,\s*(?P<most>\d{1,9})?\s*)?\}
    |(?P<mark>[|().])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([nrt\\\"\[\]]))|([^\\])", re.DOTALL)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t"}
_ANY = "/[\\u{0}-\\u{10FFFF}]/"


def is_gbnf(grammar: str) -> bool:
    """Tell whether a grammar defines its rules by `::=`, as those in Lark's notation do not."""
    return _RULE.search(grammar) is not None


def to_lark(grammar: str) -> str:
    """Spell a grammar in Lark's notation. Raises `ValueError`."""
    writer = _Writer()
    place = 0
    while place < len(grammar):
        token = _TOKEN.match(grammar, place)
        if token is None:
            line = grammar.count("\n", 0, place) + 1
            raise ValueError(f"line {line} cannot be read at {grammar[place : place + 20]!r}")
        writer.add(token)
        place = token.end()
    return writer.finish()


class _Writer:
    """Writes the tokens of a grammar one after another. Rules are numbered: Lark has its own idea of names."""

    def __init__(self) -> None:
        self._out: list[str] = []
        self._names: dict[str, str] = {"root": "start"}
        self._defined: set[str] = set()
        self._depth = 0
        self._is_empty = False  # the alternative has nothing yet
        self._can_repeat = False

    def add(self, token: re.Match[str]) -> None:
        """Write one token."""
        kind = token.lastgroup
        if kind == "space":
            return
        if kind == "rule":
            self._begin(token["rule"])
        elif not self._defined:
            raise ValueError(f"a grammar begins with a rule, not with {token[0][:20]!r}")
        elif token["repeat"]:
            self._repeat(token["repeat"])
        elif token["least"]:
            self._repeat_between(token)
        elif token["mark"] in {"|", "(", ")"}:
            self._mark(token["mark"])
        else:
            self._item(self._spelled(token))

    def finish(self) -> str:
        """Return the grammar."""
        self._end()
        if missing := self._names.keys() - self._defined:
            raise ValueError(f"rule {min(missing)!r} is not defined")
        return " ".join(self._out)

    def _begin(self, name: str) -> None:
        self._end()
        if name in self._defined:
            raise ValueError(f"rule {name!r} is defined twice")
        self._defined.add(name)
        self._out.append(f"\n{self._number(name)}:")
        self._is_empty, self._can_repeat = True, False

    def _end(self) -> None:
        """End a rule, if there is one."""
        if self._depth:
            raise ValueError("a parenthesis is not closed")
        self._fill()

    def _fill(self) -> None:
        if self._is_empty:
            self._out.append('""')
        self._is_empty = False

    def _mark(self, mark: str) -> None:
        if mark == "(":
            self._depth += 1
        else:
            self._fill()
        if mark == ")":
            self._depth -= 1
            if self._depth < 0:
                raise ValueError("a parenthesis is closed that was not opened")
        self._out.append(mark)
        self._is_empty, self._can_repeat = mark != ")", mark == ")"

    def _item(self, text: str) -> None:
        self._out.append(text)
        self._is_empty, self._can_repeat = False, True

    def _repeat(self, how: str) -> None:
        if not self._can_repeat:
            raise ValueError(f"there is nothing that {how} repeats")
        self._out[-1] += how
        self._can_repeat = False

    def _repeat_between(self, token: re.Match[str]) -> None:
        least = int(token["least"])
        most = least if token["more"] is None else int(token["most"]) if token["most"] else ""
        if most == 0:
            raise ValueError(f"{token[0]} repeats nothing")
        self._repeat(f"{{{least},{most}}}")

    def _spelled(self, token: re.Match[str]) -> str:
        if token["name"]:
            return self._number(token["name"])
        if token["mark"] == ".":
            return _ANY
        if token["set"] is not None:
            return _set(token["set"], is_negated=bool(token["negated"]))
        characters = [f"/\\u{{{ord(char):X}}}/" for char, _ in _characters(token["text"])]
        return f"({' '.join(characters)})" if characters else '""'

    def _number(self, name: str) -> str:
        return self._names.setdefault(name, f"r{len(self._names)}")


def _set(text: str, *, is_negated: bool) -> str:
    """Spell a set of characters as a regular expression."""
    characters = list(_characters(text))
    if not characters:
        if is_negated:
            return _ANY
        raise ValueError("a set of characters is empty")
    ranges, place = [], 0
    while place < len(characters):
        first = last = characters[place][0]
        place += 1
        if place + 1 < len(characters) and characters[place] == ("-", False):
            last = characters[place + 1][0]
            place += 2
        if first > last:
            raise ValueError(f"the range {first!r}-{last!r} runs backwards")
        ranges.append(f"\\u{{{ord(first):X}}}-\\u{{{ord(last):X}}}")
    return f"/[{'^' * is_negated}{''.join(ranges)}]/"


def _characters(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the characters of a literal or a set, each with whether it is escaped."""
    place = 0
    while place < len(text):
        found = _ESCAPE.match(text, place)
        if found is None:
            raise ValueError(f"{text[place : place + 10]!r} is no escape")
        place = found.end()
        *codes, letter, plain = found.groups()
        if plain is not None:
            yield plain, False
        elif letter is not None:
            yield _LETTERS.get(letter, letter), True
        else:
            code = int(next(filter(None, codes)), 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise ValueError(f"{found[0]} is no character")
            yield chr(code), True
