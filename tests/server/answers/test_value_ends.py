"""Where values without quotes end."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.server.answers.parts import joined
from octavo.server.answers.tagged_calls import GLM47Format, GLMFormat, Qwen3CoderFormat
from octavo.server.answers.tool_format import Function, ToolFormat

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
