"""Strings of calls in Python's syntax: their escapes, line feeds in them, and strings that are cut off."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.server.answers.parts import joined
from octavo.server.answers.python_calls import LFM2Format, OLMo3Format, PythonFormat, PythonicFormat
from octavo.server.answers.tool_format import Function

FUNCTIONS = [Function("say", {"type": "object", "properties": {"a": {}}})]


def called(text: str, pieces: list[str] | None = None) -> Any:
    """Return the arguments of the only call; None if the text is not a call."""
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
def test_escapes_decode_equally_whole_and_by_character(written: str, value: str) -> None:
    text = f"[say(a='{written}')]"
    for pieces in ([text], [*text]):
        assert json.loads(called(text, pieces)) == {"a": value}


@pytest.mark.parametrize(
    "written",
    [r"\ud83e", r"\ud83ex", r"\ud83eA", r"\udc00", r"\ud800\ue000", r"\ud800\udbff"],
)
def test_lone_surrogate_never_reaches_arguments(written: str) -> None:
    arguments = called(f"[say(a='{written}')]")
    if arguments is not None:
        arguments.encode()  # raises for half of a surrogate pair
        assert "\\ud" not in arguments


FORMATS = [
    (PythonicFormat, "[", "]"),
    (LFM2Format, "<|tool_call_start|>[", "]<|tool_call_end|>"),
    (OLMo3Format, "<function_calls>", "</function_calls>"),
]


@pytest.mark.parametrize(("family", "opens", "closes"), FORMATS)
@pytest.mark.parametrize("quote", ["'", '"'])
def test_raw_line_feed_in_quoted_string_is_escaped(
    family: type[PythonFormat], opens: str, closes: str, quote: str
) -> None:
    text = f"{opens}say(a={quote}x\n\\n\r\ny{quote}, b=['c\nd']){closes}"
    for pieces in ([text], [*text]):
        parser = family().parser(FUNCTIONS)
        parts = joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish())
        assert [part.kind for part in parts] == ["call", "arguments"]
        assert json.loads(parts[1].text) == {"a": "x\n\n\r\ny", "b": ["c\nd"]}


@pytest.mark.parametrize("inner", ["say(a='x\n, b='y')", "say(a='x)\n", "say(a='x\nsay(a='y')"])
def test_unterminated_string_is_no_call(inner: str) -> None:
    text = f"<function_calls>{inner}</function_calls>\n<function_calls>say(a='z')</function_calls>"
    parser = OLMo3Format().parser(FUNCTIONS)
    parts = joined(parser.feed(text) + parser.finish())
    assert not any("x" in part.text for part in parts if part.kind == "arguments")


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("a='" + "x" * 3000, '{"a": "' + "x" * 3000),
        ("a='x', b='y z", '{"a": "x", "b": "y z'),
        ("a='x\ny", '{"a": "x\\ny'),
        ("a='x\\x4", '{"a": "x'),
        ("a='x\\", '{"a": "x'),
        ('a="""x"', '{"a": "x'),
        ("a='x', b=['y", '{"a": "x", "b": ['),
        ("a=", "{"),
    ],
)
def test_truncated_string_argument_is_reported_up_to_cut(written: str, arguments: str) -> None:
    text = f"[say({written}"
    for pieces in ([text], [*text]):
        parser = PythonicFormat().parser(FUNCTIONS)
        parts = joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish(is_cut=True))
        assert [(part.kind, part.text) for part in parts] == [("call", "say"), ("arguments", arguments)]
