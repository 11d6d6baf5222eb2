"""Calls that are JSON objects: their marks, the blanks between them, and when they are emitted."""

from __future__ import annotations

import json

import pytest

from octavo.server.answers.known_formats import FORMATS
from octavo.server.answers.object_calls import ApertusFormat, GigaChat3Format, OldGigaChat3Format
from octavo.server.answers.parts import Part, joined
from octavo.server.answers.tool_format import Function, ToolFormat
from octavo.server.answers.tool_formats import HermesFormat

FUNCTIONS = [Function("bash", {"type": "object", "properties": {"cmd": {"type": "string"}}})]
CALL = ("bash", {"cmd": "ls"})
CALL_PARTS = [Part("call", "bash"), Part("arguments", '{"cmd": "ls"}')]
# Formats in which a call ends only when the next one begins or the answer ends.
WITHOUT_END = {"NamedMistralFormat", "RecipientsFormat"}


def read(form: ToolFormat, *pieces: str, is_cut: bool = False) -> list[list[Part]]:
    """Return the parts after each piece of text, and those at the end."""
    parser = form.parser(FUNCTIONS)
    return [*(joined(parser.feed(piece)) for piece in pieces), joined(parser.finish(is_cut=is_cut))]


@pytest.mark.parametrize("family", [GigaChat3Format, OldGigaChat3Format])
def test_gigachat3_calls_have_separate_markers(family: type[ToolFormat]) -> None:
    written = family().write([CALL, CALL])
    assert written.count(family().markers[0]) == 2
    calls = [part.text for part in read(family(), written)[0] if part.kind == "call"]
    assert calls == ["bash", "bash"]


@pytest.mark.parametrize("blank", [" ", "\n", "\t\r\n  "])
def test_apertus_call_accepts_blanks_between_parts(blank: str) -> None:
    parts = ["<|tools_prefix|>", "[", "{", '"bash"', ":", '{"cmd": "ls"}', "}", "]", "<|tools_suffix|>"]
    assert read(ApertusFormat(), blank.join(parts))[0] == CALL_PARTS


@pytest.mark.parametrize(
    "family", [each for each in FORMATS if each.__name__ not in WITHOUT_END], ids=lambda family: family.__name__
)
def test_call_is_emitted_at_closing_marker(family: type[ToolFormat]) -> None:
    ended, last = read(family(), family().write([CALL]))
    assert [part.text for part in ended if part.kind == "call"] == ["bash"]
    arguments = "".join(part.text for part in ended if part.kind == "arguments")
    assert json.loads(arguments) == {"cmd": "ls"}
    assert last == []


def test_text_after_broken_gigachat3_call_is_streamed() -> None:
    broken = '<|function_call|>{"name": "bash", "arguments": nothing} and'
    first, second, last = read(GigaChat3Format(), broken, f" more {GigaChat3Format().write([CALL])}")
    assert first == [Part("content", broken)]
    assert [part.text for part in second if part.kind == "content"] == [" more"]
    assert [part.kind for part in second] == ["content", "call", "arguments"]
    assert last == []


def test_partial_marker_is_dropped_only_from_cut_answer() -> None:
    begun = '<tool_call>{"name": "bash", "arguments": {"cmd": "ls"}}</tool'
    assert read(HermesFormat(), begun) == [CALL_PARTS, [Part("content", "</tool")]]
    assert read(HermesFormat(), begun, is_cut=True) == [CALL_PARTS, []]


def test_replacement_character_in_marker_releases_text() -> None:
    text = "a <tool_cal\ufffd and more"
    assert read(HermesFormat(), text)[0] == [Part("content", text)]
    assert read(HermesFormat(), "a <tool_cal\ufffd", is_cut=True) == [[Part("content", "a")], []]
