"""Translate llama.cpp's GBNF into llguidance's Lark.

Each character becomes a lexeme, except in the parts that `gbnf_lexemes` finds. Longer lexemes elsewhere could forbid
allowed texts.
Notation: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

from octavo.structured_output.gbnf_lexemes import with_lexemes
from octavo.structured_output.gbnf_nodes import (
    MAX_CODE,
    Chars,
    Choice,
    Lexeme,
    Node,
    Ranges,
    Repeat,
    Rule,
    Rules,
    Sequence,
    chars_regex,
    negated,
)

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
_REPEATS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_ANY: Ranges = ((0, MAX_CODE),)


def is_gbnf(grammar: str) -> bool:
    """Return True if the grammar has `::=`, which Lark lacks."""
    return _RULE.search(grammar) is not None


@functools.lru_cache(maxsize=128)
def to_lark(grammar: str) -> str:
    """Translate a GBNF grammar. Raises `ValueError`."""
    rules = with_lexemes(read_rules(grammar))
    names = {"root": "start"}
    for name in rules:
        names.setdefault(name, f"r{len(names)}")
    terminals: dict[str, str] = {}
    lines = [f"{names[name]}: {_written(node, names, terminals)}" for name, node in rules.items()]
    return "\n".join([*lines, *(f"{name}: /{text}/" for text, name in terminals.items())])


def read_rules(grammar: str) -> Rules:
    """Parse a GBNF grammar. Raises `ValueError`."""
    reader = _Reader()
    place = 0
    while place < len(grammar):
        token = _TOKEN.match(grammar, place)
        if token is None:
            line = grammar.count("\n", 0, place) + 1
            raise ValueError(f"line {line} cannot be read at {grammar[place : place + 20]!r}")
        reader.add(token)
        place = token.end()
    return reader.finish()


class _Reader:
    def __init__(self) -> None:
        self._rules: Rules = {}
        self._used = {"root"}
        self._name: str | None = None
        self._levels: list[list[list[Node]]] = []
        self._can_repeat = False

    def add(self, token: re.Match[str]) -> None:
        kind = token.lastgroup
        if kind == "space":
            return
        if kind == "rule":
            self._begin(token["rule"])
        elif self._name is None:
            raise ValueError(f"a grammar must begin with a rule, not with {token[0][:20]!r}")
        elif token["repeat"]:
            self._repeat(token["repeat"], *_REPEATS[token["repeat"]])
        elif token["least"]:
            self._repeat_between(token)
        elif token["mark"] in {"|", "(", ")"}:
            self._mark(token["mark"])
        else:
            self._levels[-1][-1].append(self._item(token))
            self._can_repeat = True

    def finish(self) -> Rules:
        self._end()
        if missing := self._used - self._rules.keys():
            raise ValueError(f"rule {min(missing)!r} is not defined")
        return self._rules

    def _begin(self, name: str) -> None:
        self._end()
        if name in self._rules:
            raise ValueError(f"rule {name!r} is defined twice")
        self._name, self._levels, self._can_repeat = name, [[[]]], False

    def _end(self) -> None:
        if len(self._levels) > 1:
            raise ValueError("a parenthesis is not closed")
        if self._name is not None:
            self._rules[self._name] = _joined(self._levels[0])

    def _mark(self, mark: str) -> None:
        if mark == "|":
            self._levels[-1].append([])
        elif mark == "(":
            self._levels.append([[]])
        elif len(self._levels) == 1:
            raise ValueError("a closing parenthesis has no opening one")
        else:
            node = _joined(self._levels.pop())
            self._levels[-1][-1].append(node)
        self._can_repeat = mark == ")"

    def _repeat(self, how: str, least: int, most: int | None) -> None:
        if not self._can_repeat:
            raise ValueError(f"{how} has nothing to repeat")
        items = self._levels[-1][-1]
        items[-1] = Repeat(items[-1], least, most)
        self._can_repeat = False

    def _repeat_between(self, token: re.Match[str]) -> None:
        least = int(token["least"])
        most = least if token["more"] is None else int(token["most"]) if token["most"] else None
        if most == 0:
            raise ValueError(f"{token[0]} repeats zero times")
        self._repeat(token[0], least, most)

    def _item(self, token: re.Match[str]) -> Node:
        if token["name"]:
            self._used.add(token["name"])
            return Rule(token["name"])
        if token["mark"] == ".":
            return Chars(_ANY)
        if token["set"] is not None:
            return Chars(_set(token["set"], is_negated=bool(token["negated"])))
        characters = [Chars(((ord(char), ord(char)),)) for char, _ in _characters(token["text"])]
        return characters[0] if len(characters) == 1 else Sequence(tuple(characters))


def _joined(alternatives: list[list[Node]]) -> Node:
    options = tuple(items[0] if len(items) == 1 else Sequence(tuple(items)) for items in alternatives)
    return options[0] if len(options) == 1 else Choice(options)


def _written(root: Node, names: dict[str, str], terminals: dict[str, str]) -> str:
    written: list[str] = []
    left: list[Node | str] = [root]
    while left:
        match left.pop():
            case str(text):
                written.append(text)
            case Chars(ranges):
                written.append(f"/{chars_regex(ranges)}/")
            case Lexeme(text):
                written.append(terminals.setdefault(text, f"T{len(terminals)}"))
            case Rule(name):
                written.append(names[name])
            case Sequence(()):
                written.append('""')
            case Sequence(items):
                left += _between("(", items, " ", ")")
            case Choice(options):
                left += _between("(", options, " | ", ")")
            case Repeat(item, least, most):
                left += [f"){{{least},{'' if most is None else most}}}", item, "("]
    return "".join(written)


def _between(opens: str, nodes: tuple[Node, ...], mark: str, closes: str) -> list[Node | str]:
    parts: list[Node | str] = [closes]
    for node in reversed(nodes):
        parts += [node, mark]
    parts[-1] = opens
    return parts


def _set(text: str, *, is_negated: bool) -> Ranges:
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
            raise ValueError(f"the range {first!r}-{last!r} is in reverse order")
        ranges.append((ord(first), ord(last)))
    return negated(tuple(ranges)) if is_negated else tuple(ranges)


def _characters(text: str) -> Iterator[tuple[str, bool]]:
    place = 0
    while place < len(text):
        found = _ESCAPE.match(text, place)
        if found is None:
            raise ValueError(f"{text[place : place + 10]!r} is not a valid escape")
        place = found.end()
        *codes, letter, plain = found.groups()
        if plain is not None:
            yield plain, False
        elif letter is not None:
            yield _LETTERS.get(letter, letter), True
        else:
            code = int(next(filter(None, codes)), 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise ValueError(f"{found[0]} is not a character")
            yield chr(code), True
