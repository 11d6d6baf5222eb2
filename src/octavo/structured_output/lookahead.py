"""Replace a regular expression that has lookahead. A text must then match several expressions without lookahead.

llguidance has no lookahead. A positive assertion at the beginning becomes a separate pattern. A negative assertion
becomes a pattern for the texts that the assertion allows. Functions return None for unknown forms.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_CLASS = r"\[(?P<negated>\^?)(?P<set>(?:[^\]\\]|\\.)+)\]"
_ATOM = re.compile(rf"{_CLASS}|\\(?P<escaped>[^A-Za-z0-9])|\\(?P<kind>[dwsDWS])|(?P<plain>[^\\^$.|?*+()\[\]{{}}])")
_ANY, _SOME = r"[\s\S]*", r"[\s\S]+"
_GROUP = re.compile(r"\((?:\?:)?(?P<inner>(?:[^()\[\]\\]|\\.|\[(?:[^\]\\]|\\.)+\])*)\)")
_END = re.compile(r"(?<!\\)(?:\\\\)*\$$")
_MAX_LITERAL_CHARS = 64
# pydantic's pattern for a Decimal with limited digits
_PLACES = r"\\d\{0,(?P<places>\d+)\}"
_DECIMAL = re.compile(
    rf"\(\?:\\d\{{0,(?P<whole>\d+)\}}\|\(\?=\[\\d\.\]\{{1,(?P<most>\d+)\}}0\*\$\)"
    rf"(?:\\d\{{0,(?P=whole)\}}\\\.{_PLACES}|\\d\*\\\.\\d\*)0\*\$\)$"
)
_MAX_DIGITS = 100


def without_lookahead(pattern: str) -> list[str] | None:
    """Return patterns without lookahead. A text that matches all these patterns also matches `pattern`.

    As in JSON Schema, a pattern may match any part of a text.
    """
    if not _LOOK_AROUND.search(pattern):
        return [pattern]
    rest = _DECIMAL.sub(_decimal, pattern)
    patterns = []
    if rest.startswith("^"):
        while (assertion := re.match(r"\^\(\?([=!])", rest)) is not None:
            end = _group_end(rest, 1)
            if end is None:
                return None
            inner, rest = rest[assertion.end() : end - 1], "^" + rest[end:]
            inner = inner.removeprefix("^")
            found = [f"^(?:{inner})"] if assertion[1] == "=" else _complements(inner)
            if found is None:
                return None
            patterns += found
    return None if any(map(_LOOK_AROUND.search, [rest, *patterns])) else [rest, *patterns]


def _decimal(found: re.Match[str]) -> str:
    whole, most, places = int(found["whole"]), int(found["most"]), found["places"]
    if places is not None and whole + int(places) < most:
        return rf"(?:\d{{0,{whole}}}|\d{{0,{whole}}}\.\d{{0,{places}}}0*)$"
    if places is not None or most > _MAX_DIGITS:
        return found[0]
    split = "|".join(rf"\d{{{count}}}\.\d{{0,{most - 1 - count}}}" for count in range(most))
    return rf"(?:\d{{0,{whole}}}|(?:{split})0*)$"


def _group_end(pattern: str, start: int) -> int | None:
    depth, place, is_in_class = 0, start, False
    while place < len(pattern):
        char = pattern[place]
        if char == "\\":
            place += 1
        elif is_in_class:
            is_in_class = char != "]"
        elif char == "[":
            is_in_class = True
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
            if not depth:
                return place + 1
        place += 1
    return None


def _complements(inner: str) -> list[str] | None:
    found = []
    for option in _alternatives(inner):
        complement = _complement(option)
        if complement is None:
            return None
        found.append(complement)
    return found


def _ends_whole(pattern: str) -> bool:
    return _END.search(pattern) is not None


def _alternatives(inner: str) -> Iterator[str]:
    ending = "$" if _ends_whole(inner) else ""
    group = _GROUP.fullmatch(inner.removesuffix(ending))
    if group is None:
        yield from _split(inner)
    else:
        yield from (option + ending for option in _split(group["inner"]))


def _split(pattern: str) -> Iterator[str]:
    start, place = 0, 0
    while place < len(pattern):
        if pattern[place] in "([":
            found = re.compile(_CLASS).match(pattern, place)
            end = found.end() if found is not None else _group_end(pattern, place)
            place = len(pattern) if end is None else end
            continue
        if pattern[place] == "|":
            yield pattern[start:place]
            start = place + 1
        place += 2 if pattern[place] == "\\" else 1
    yield pattern[start:]


def _complement(option: str) -> str | None:
    is_whole = _ends_whole(option)
    option = option[:-1] if is_whole else option
    if is_whole and option.endswith(("*", "+")) and (atoms := _atoms(option[:-1])) and len(atoms) == 1:
        excluded = f"{_ANY}{_negated(atoms[0])}{_ANY}"
        return f"^{excluded}$" if option.endswith("*") else f"^(?:{excluded})?$"
    atoms = _atoms(option.removeprefix(".*"))
    if not atoms:
        return None
    if option.startswith(".*"):
        return None if is_whole else _without(atoms)
    other = [f"{''.join(atoms[:count])}(?:{_negated(atom)}{_ANY})?" for count, atom in enumerate(atoms)]
    return f"^(?:{'|'.join([*other, *([''.join(atoms) + _SOME] if is_whole else [])])})$"


def _without(atoms: list[str]) -> str | None:
    first = _negated(atoms[0])
    if len(atoms) == 1:
        return f"^{first}*$"
    if len(atoms) > 2 or any(atom.startswith("[") or (atom[-1].isalpha() and len(atom) > 1) for atom in atoms):
        return None
    if atoms[0] == atoms[1]:
        return f"^(?:{first}|{atoms[0]}{first})*{atoms[0]}?$"
    return f"^(?:{first}|{atoms[0]}+[^{_in_class(atoms[0])}{_in_class(atoms[1])}])*{atoms[0]}*$"


def _atoms(text: str) -> list[str] | None:
    found, place = list[str](), 0
    while place < len(text):
        atom = _ATOM.match(text, place)
        if atom is None or len(found) == _MAX_LITERAL_CHARS:
            return None
        found.append(atom.group())
        place = atom.end()
    return found


def _negated(atom: str) -> str:
    if atom.startswith("["):
        return f"[{atom[2:]}" if atom.startswith("[^") else f"[^{atom[1:]}"
    return f"[^{_in_class(atom)}]"


def _in_class(atom: str) -> str:
    return f"\\{atom}" if atom in "-^]&~" else atom
