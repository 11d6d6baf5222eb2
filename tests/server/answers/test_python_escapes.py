"""Escapes in the strings of calls that are written in Python."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.server.answers.python_calls import PythonicFormat
from octavo.server.answers.tool_format import Function

FUNCTIONS = [Function("say", {"type": "object", "properties": {"a": {}}})]


def called(text: str, pieces: list[str] | None = None) -> Any:
    """Return the arguments of the only call, None if it is none."""
    parser = PythonicFormat().parser(FUNCTIONS)
    parts = [part for piece in pieces or [text] for part in parser.feed(piece)] + parser.finish()
    if "call" not in {part.kind for part in parts}:
        return None
    return "".join(part.text for part in parts if part.kind == "arguments")


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (r"\n\t\r\b\f\a\v\0", "\n\t\r\b\f\a\v\0"),
        (r"\'\"\\\/", "'\"\\\\/"),  # Python has no escape of a slash
        (r"\d", r"\d"),
        (r"\x41\u00fc\U0001f99c", "Aü🦜"),
        (r"\ud83e\udd9c", "🦜"),
        (r"\ud800\udc00", "\U00010000"),
        (r"\udbff\udfff", "\U0010ffff"),
        (r"\U0010ffff\ud7ff\ue000", "\U0010ffff\ud7ff\ue000"),
    ],
)
def test_an_escape_is_its_character_however_it_is_cut(written: str, value: str) -> None:
    text = f"[say(a='{written}')]"
    for pieces in ([text], [*text]):
        assert json.loads(called(text, pieces)) == {"a": value}


@pytest.mark.parametrize(
    "written",
    [r"\ud83e", r"\ud83ex", r"\ud83eA", r"\udc00", r"\ud800\ue000", r"\ud800\udbff"],
)
def test_no_half_of_a_character_is_told(written: str) -> None:
    arguments = called(f"[say(a='{written}')]")
    if arguments is not None:
        arguments.encode()  # raises for half of a surrogate pair
        assert "\\ud" not in arguments
