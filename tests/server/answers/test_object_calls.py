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
def test_each_call_has_marks_of_its_own(family: type[ToolFormat]) -> None:
    written = family().write([CALL, CALL])
    assert written.count(family().markers[0]) == 2
    calls = [part.text for part in read(family(), written)[0] if part.kind == "call"]
    assert calls == ["bash", "bash"]


@pytest.mark.parametrize("blank", [" ", "\n", "\t\r\n  "])
def test_blanks_may_stand_between_the_parts_of_a_keyed_object(blank: str) -> None:
    parts = ["<|tools_prefix|>", "[", "{", '"bash"', ":", '{"cmd": "ls"}', "}", "]", "<|tools_suffix|>"]
    assert read(ApertusFormat(), blank.join(parts))[0] == CALL_PARTS


@pytest.mark.parametrize(
    "family", [each for each in FORMATS if each.__name__ not in WITHOUT_END], ids=lambda family: family.__name__
)
def test_a_call_is_emitted_as_soon_as_its_closing_mark_is_there(family: type[ToolFormat]) -> None:
    ended, last = read(family(), family().write([CALL]))
    assert [part.text for part in ended if part.kind == "call"] == ["bash"]
    arguments = "".join(part.text for part in ended if part.kind == "arguments")
    assert json.loads(arguments) == {"cmd": "ls"}
    assert last == []


def test_text_after_a_broken_call_with_marks_of_its_own_is_not_held_back() -> None:
    broken = '<|function_call|>{"name": "bash", "arguments": nothing} and'
    first, second, last = read(GigaChat3Format(), broken, f" more {GigaChat3Format().write([CALL])}")
    assert first == [Part("content", broken)]
    assert [part.text for part in second if part.kind == "content"] == [" more"]
    assert [part.kind for part in second] == ["content", "call", "arguments"]
    assert last == []


def test_the_beginning_of_a_mark_is_dropped_only_from_an_answer_that_was_cut_off() -> None:
    begun = '<tool_call>{"name": "bash", "arguments": {"cmd": "ls"}}</tool'
    assert read(HermesFormat(), begun) == [CALL_PARTS, [Part("content", "</tool")]]
    assert read(HermesFormat(), begun, is_cut=True) == [CALL_PARTS, []]


def test_a_replacement_character_within_a_mark_does_not_hold_text_back() -> None:
    text = "a <tool_cal\ufffd and more"
    assert read(HermesFormat(), text)[0] == [Part("content", text)]
    assert read(HermesFormat(), "a <tool_cal\ufffd", is_cut=True) == [[Part("content", "a")], []]
