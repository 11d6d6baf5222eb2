"""A call ends reasoning, a mention of a call does not: private reasoning never becomes content."""

from __future__ import annotations

from itertools import pairwise

import pytest

from octavo.server.answers.known_formats import FORMATS
from octavo.server.answers.parts import Part, ReasoningParser, joined
from octavo.server.answers.reasoning_forms import find_reasoning_form
from octavo.server.answers.tool_format import Function

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS = [Function("get_time", CITY), Function("now", {"type": "object", "properties": {}})]
FAMILIES = {each.name: each for each in FORMATS}
MARKS = {
    "glm45": ["<tool_call>", "<tool_call>get_time", "<tool_call>get_times\n<arg_key>", "<tool_call>rm</tool_call>"],
    "glm47": ["<tool_call>", "<tool_call>now", "<tool_call><tool_call>rm</tool_call>"],
    "kimi_k2": [
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.rm:0<|tool_call_argument_begin|>{}",
        "<|tool_call_begin|>functions.get_time",
    ],
    "kimi_k3": ["<|open|>tools<|sep|>", "<|open|>", "<|open|>tools<|sep|><|close|>tools<|sep|>"],
}
MENTIONS = [(name, mark) for name, marks in MARKS.items() for mark in marks]


def read(name: str, text: str, cuts: list[int], *, is_cut: bool = False) -> list[Part]:
    form, reasoning = FAMILIES[name](), find_reasoning_form(name, []) or find_reasoning_form("think", [])
    assert reasoning is not None
    ends = form.reasoning_ends(FUNCTIONS)
    parser = ReasoningParser(form.parser(FUNCTIONS), is_open=True, form=reasoning, interrupts=ends)
    pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    return joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish(is_cut=is_cut))


def read_alike(name: str, text: str) -> list[Part]:
    """Return the parts of a text, which must be the same for every cut."""
    whole = read(name, text, [])
    for cuts in ([*range(1, len(text))], *([cut] for cut in range(1, len(text)))):
        assert read(name, text, cuts) == whole, f"cut at {cuts[:1]}"
    return whole


@pytest.mark.parametrize(("name", "mark"), MENTIONS)
def test_marker_mention_stays_reasoning(name: str, mark: str) -> None:
    thought = f"I could write {mark} tags, but no."
    close = "<|close|>think<|sep|>" if name == "kimi_k3" else "</think>"
    assert read_alike(name, f"{thought}{close}Hello") == [Part("reasoning", thought), Part("content", "Hello")]
    assert read_alike(name, thought) == [Part("reasoning", thought)]


@pytest.mark.sweep(16)
@pytest.mark.parametrize(("name", "mark"), MENTIONS)
def test_tool_call_after_marker_mention_ends_reasoning(name: str, mark: str) -> None:
    call = FAMILIES[name]().write([("get_time", {"city": "Rome"}), ("now", {})])
    thought = f"I know {mark} tags."
    calls = [("call", "get_time"), ("arguments", '{"city": "Rome"}'), ("call", "now"), ("arguments", "{}")]
    parts = read_alike(name, f"{thought}\n{call}")
    assert [(part.kind, part.text) for part in parts] == [("reasoning", thought), *calls]


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", MARKS)
def test_cut_tool_call_is_not_reasoning(name: str) -> None:
    text = "Hm.\n" + FAMILIES[name]().write([("get_time", {"city": "Rome"})])
    for cut in range(len(text)):
        parts = read(name, text[:cut], [], is_cut=True)
        assert parts == read(name, text[:cut], [*range(1, cut)], is_cut=True), f"cut at {cut}"
        assert "".join(part.text for part in parts if part.kind in {"reasoning", "content"}) == "Hm."[:cut]
