"""The syntax tree of a GBNF grammar, and regular expressions for its nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # of code points, including both ends
MAX_CODE = 0x10FFFF
_FIRST_SURROGATE, _LAST_SURROGATE = 0xD800, 0xDFFF


@dataclass(frozen=True, slots=True)
class Chars:
    """A character set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Sequence:
    """Consecutive nodes."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Alternative nodes."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A repeated item. most: None for no limit."""

    item: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Rule:
    """A named rule."""

    name: str


@dataclass(frozen=True, slots=True)
class Lexeme:
    """A node that is one lexeme."""

    regex: str


Node: TypeAlias = Chars | Sequence | Choice | Repeat | Rule | Lexeme
Rules: TypeAlias = dict[str, Node]


def negated(ranges: Ranges) -> Ranges:
    """Return the complement of `ranges`, without surrogates."""
    rest, begin = [], 0
    for first, last in sorted(ranges):
        if begin < first:
            rest.append((begin, first - 1))
        begin = max(begin, last + 1)
    if begin <= MAX_CODE:
        rest.append((begin, MAX_CODE))
    ends = [
        (
            _LAST_SURROGATE + 1 if _FIRST_SURROGATE <= first <= _LAST_SURROGATE else first,
            _FIRST_SURROGATE - 1 if _FIRST_SURROGATE <= last <= _LAST_SURROGATE else last,
        )
        for first, last in rest
    ]
    return tuple((first, last) for first, last in ends if first <= last)


def chars_regex(ranges: Ranges) -> str:
    """Regular expression for `ranges`."""
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return f"\\u{{{ranges[0][0]:X}}}"
    return "[" + "".join(f"\\u{{{first:X}}}-\\u{{{last:X}}}" for first, last in ranges) + "]"


def regex(node: Node, rules: Rules) -> str:
    """Return a regular expression for a node without recursive rules."""
    match node:
        case Chars(ranges):
            return chars_regex(ranges)
        case Sequence(items):
            return f"(?:{''.join(regex(item, rules) for item in items)})"
        case Choice(options):
            return f"(?:{'|'.join(regex(option, rules) for option in options)})"
        case Repeat(item, least, most):
            return f"(?:{regex(item, rules)}){{{least},{'' if most is None else most}}}"
        case Rule(name):
            return regex(rules[name], rules)
        case Lexeme(text):
            return text
