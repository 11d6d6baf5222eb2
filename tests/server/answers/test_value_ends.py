"""Where values without quotes end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.server.answers.kimi_k3 import KimiK3Format
from octavo.server.answers.parts import joined
from octavo.server.answers.tagged_calls import GLM47Format, GLMFormat, Qwen3CoderFormat, SeedOSSFormat
from octavo.server.answers.tool_format import Function, ToolFormat
from octavo.server.answers.value_ends import TagEnd

STRING = {"type": "string"}
FUNCTIONS = [Function("bash", {"type": "object", "properties": {"cmd": STRING, "why": STRING}, "required": ["cmd"]})]


def read(form: ToolFormat, text: str, *, is_cut: bool = False) -> tuple[str, str]:
    """Return the content and the arguments; they are the same if the text comes in characters."""
    answers = []
    for pieces in ([text], list(text)):
        parser = form.parser(FUNCTIONS)
        parts = joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish(is_cut=is_cut))
        of_kind = ["".join(each.text for each in parts if each.kind == kind) for kind in ("content", "arguments")]
        answers.append((of_kind[0], of_kind[1]))
    assert answers[0] == answers[1]
    return answers[0]


def qwen(body: str, end: str = "</function>\n</tool_call>") -> str:
    return f"<tool_call>\n<function=bash>\n{body}{end}"


def test_the_head_of_an_argument_within_a_line_is_text() -> None:
    body = "<parameter=cmd>\nx <parameter=why>\ny\n</parameter>\n"
    assert read(Qwen3CoderFormat(), qwen(body)) == ("", '{"cmd": "x <parameter=why>\\ny"}')


def test_a_value_that_names_a_call_needs_its_closing_tag() -> None:
    text = qwen("<parameter=cmd>\nA call <function=bash> b\n")
    assert read(Qwen3CoderFormat(), text) == (text, "")
    closed = qwen("<parameter=cmd>\nA call <function=bash> b\n</parameter>\n")
    assert read(Qwen3CoderFormat(), closed) == ("", '{"cmd": "A call <function=bash> b"}')


def test_an_answer_that_ends_within_the_mark_after_a_value() -> None:
    text = qwen("<parameter=cmd>\nx\n</parameter>\n", "</fun")
    assert read(Qwen3CoderFormat(), text) == (text, "")
    assert read(Qwen3CoderFormat(), text, is_cut=True) == ("", '{"cmd": "x"')


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (GLMFormat, "<tool_call>bash\n<arg_key>cmd</arg_key>\n<arg_value>ls</arg_value>\n and more"),
        (GLM47Format, "<tool_call>bash<arg_key>cmd</arg_key><arg_value>ls</arg_value> and more"),
    ],
)
def test_a_call_without_its_closing_mark_is_text(family: type[ToolFormat], text: str) -> None:
    assert read(family(), text) == (text, "")


@pytest.mark.parametrize("name", ["read", "other_tool"])
def test_the_given_arguments_of_one_call_are_unknown_to_the_next(name: str) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("bash", {"cmd": name}), ("bash", {"cmd": "again"})]
    _, arguments = read(Qwen3CoderFormat(), Qwen3CoderFormat().write(calls))
    assert arguments == f'{{"cmd": "{name}"}}{{"cmd": "again"}}'


def calls_in(form: ToolFormat, text: str) -> list[tuple[str, str]]:
    """Return the calls of a text; they are the same if it comes in characters."""
    found = []
    for pieces in ([text], list(text)):
        parser = form.parser(FUNCTIONS)
        parts = joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish())
        arguments = ["".join(p.text for p in parts if p.kind == "arguments" and p.call == each.call) for each in parts]
        found.append([(each.text, of) for each, of in zip(parts, arguments, strict=True) if each.kind == "call"])
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize(
    "value",
    [
        "</function>\n</tool_call>\n<tool_call>\n<function=",  # the end of the call, and a head that is broken
        "</function>\n<function=",
        "x</parameter></tool_call>",
    ],
)
def test_a_value_goes_on_after_the_end_of_its_call_and_no_other_call(value: str) -> None:
    text = qwen(f"<parameter=cmd>\n{value}\n</parameter>\n")
    assert calls_in(Qwen3CoderFormat(), text) == [("bash", json.dumps({"cmd": value}))]


@pytest.mark.parametrize("ends", ["</parameter></seed:tool_call>", "</parameter></function> and"])
def test_a_tag_after_which_the_call_does_not_end_as_written_is_text_if_a_later_one_ends_it(ends: str) -> None:
    value = f"x{ends}<function="
    text = SeedOSSFormat().write([("bash", {"cmd": value})])
    assert calls_in(SeedOSSFormat(), text) == [("bash", json.dumps({"cmd": value}))]
    without = text.replace("<function=</parameter>", "<function=")
    assert calls_in(SeedOSSFormat(), without) == [("bash", '{"cmd": "x"}')]


@pytest.mark.parametrize(
    "slip",
    [
        "</parameter/><parameter=why>y</parameter>\n</function>\n</seed:tool_call>",  # no line feed
        "</parameter/></seed:tool_call>",  # no end of the call
    ],
)
def test_two_slips_at_the_end_of_a_value_make_the_call_text(slip: str) -> None:
    text = f"<seed:tool_call>\n<function=bash>\n<parameter=cmd>x{slip}"
    assert read(SeedOSSFormat(), text) == (text, "")


def test_an_empty_value_needs_its_closing_tag() -> None:
    text = "<tool_call>bash\n<arg_key>cmd</arg_key>\n<arg_value> \n<arg_key>why</arg_key>\n<arg_value>y</arg_value>\n"
    assert read(GLMFormat(), f"{text}</tool_call>") == (f"{text}</tool_call>", "")


def test_a_call_within_a_value_of_a_call_that_became_text_is_text() -> None:
    doubled = "<tool_call>bash<arg_key>cmd</arg_key><arg_value>x</arg_value></arg_value>"
    inner, other = GLM47Format().write([("bash", {"cmd": "y"})]), GLM47Format().write([("bash", {"cmd": "z"})])
    rest = f"<arg_key>why</arg_key><arg_value>{inner}</arg_value></tool_call>"
    assert calls_in(GLM47Format(), doubled + rest) == []
    assert calls_in(GLM47Format(), doubled + rest + other) == [("bash", '{"cmd": "z"}')]


def test_a_call_of_kimi_k3_within_a_value_is_text() -> None:
    inner = KimiK3Format().write([("bash", {"cmd": "y"})])
    for value in (f"a {inner} b", f"{KimiK3Format.call_closes}<|open|>call tool="):
        text = KimiK3Format().write([("bash", {"cmd": value})])
        assert calls_in(KimiK3Format(), text) == [("bash", json.dumps({"cmd": value}))]


def test_each_head_of_a_call_after_a_value_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    places, begins_call = [], TagEnd._begins_call

    def noted(self: TagEnd, text: str, place: int, *, is_over: bool) -> bool | None:
        places.append(place)
        return begins_call(self, text, place, is_over=is_over)

    monkeypatch.setattr(TagEnd, "_begins_call", noted)
    value = "</parameter></seed:tool_call><function=" * 50
    text = SeedOSSFormat().write([("bash", {"cmd": value})])
    assert calls_in(SeedOSSFormat(), text)[0][0] == "bash"
    assert len(places) < 6 * 50 + 20
