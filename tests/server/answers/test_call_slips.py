"""Calls with slips: each input once with its right value, and thousands made by chance, never read as another call."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

import call_slips
import pytest

from octavo.server.answers.gemma_calls import GemmaFormat
from octavo.server.answers.named_calls import KimiK2Format
from octavo.server.answers.parts import Part, joined
from octavo.server.answers.tagged_calls import GLM47Format, GLMFormat, Qwen3CoderFormat, SeedOSSFormat
from octavo.server.answers.tool_format import Function, ToolFormat
from octavo.server.answers.tool_formats import HermesFormat, NamedMistralFormat

logger = logging.getLogger(__name__)
NUM_CASES = int(os.environ.get("OCTAVO_SLIP_CASES", "5000"))
STRING = {"type": "string"}
FUNCTIONS = [
    Function("bash", {"type": "object", "properties": {"cmd": STRING, "why": STRING}, "required": ["cmd"]}),
    Function("read", {"type": "object", "properties": {"path": STRING, "lines": {"type": "integer"}}}),
    Function("save", {"type": "object", "properties": {"deep": {"type": "object"}, "flag": {"type": "boolean"}}}),
]


def read(form: ToolFormat, text: str) -> list[Part]:
    """Read a text whole, in two pieces wherever it is cut, and in characters; it is the same."""
    answers = []
    for pieces in ([text], list(text), *([text[:cut], text[cut:]] for cut in range(1, len(text)))):
        parser = form.parser(FUNCTIONS)
        answers.append(joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish()))
    assert all(each == answers[0] for each in answers)
    return answers[0]


def told(parts: list[Part]) -> tuple[str, list[tuple[str, Any]]]:
    calls = [(name, json.loads(arguments)) for name, arguments in call_slips.calls_of(parts)]
    return "".join(part.text for part in parts if part.kind == "content"), calls


def qwen(name: str, body: str) -> str:
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


PROSE = [
    (Qwen3CoderFormat, "Qwen3-Coder opens a call with <function=bash> and gives arguments as <parameter=cmd>."),
    (Qwen3CoderFormat, "A call begins with `<function=read>`."),
    (Qwen3CoderFormat, "Such as <function=read>\n<parameter=path>\nx"),
    (Qwen3CoderFormat, "It is <tool_call>\n<function=read>\n<parameter=path\nx>\n</parameter>\n</function>"),
    (HermesFormat, 'It is <tool_call>{"name": "read", "arguments": {"path": ...}}</tool_call>.'),
    (GLMFormat, "It is <tool_call>read, then its arguments."),
    (SeedOSSFormat, "<function=bash> is followed by <parameter=cmd>"),
]


@pytest.mark.parametrize(("family", "text"), PROSE)
def test_prose_about_a_tool_is_no_call(family: type[ToolFormat], text: str) -> None:
    assert told(read(family(), text)) == (text, [])


TAGS: list[tuple[type[ToolFormat], str, tuple[str, dict[str, Any]]]] = [
    (Qwen3CoderFormat, qwen("read", "<parameter=path>\n/tmp/a\n"), ("read", {"path": "/tmp/a"})),
    (
        Qwen3CoderFormat,
        qwen("bash", "<parameter=cmd>\nls\n<parameter=why>\nto see\n</parameter>\n"),
        ("bash", {"cmd": "ls", "why": "to see"}),
    ),
    (Qwen3CoderFormat, qwen("read", "<parameter=path>\n/tmp/a\n</parameter/>\n"), ("read", {"path": "/tmp/a"})),
    (Qwen3CoderFormat, qwen("read", "<parameter=path>\n/tmp/a\n</parameter\n"), ("read", {"path": "/tmp/a"})),
    (
        Qwen3CoderFormat,
        qwen("bash", "<parameter=cmd>\necho '</parameter>' x\n</parameter>\n"),
        ("bash", {"cmd": "echo '</parameter>' x"}),
    ),
    (
        GLM47Format,
        "<tool_call>bash<arg_key>cmd</arg_key><arg_value>x </arg_value> y</arg_value></tool_call>",
        ("bash", {"cmd": "x </arg_value> y"}),
    ),
    (Qwen3CoderFormat, qwen("bash", "<parameter=why>\nx\n</parameter>\n"), ("bash", {"why": "x"})),
    (Qwen3CoderFormat, qwen("read", "<parameter=lines>\n</parameter>\n"), ("read", {})),
    (
        Qwen3CoderFormat,
        qwen("read", "<parameter=lines>\n\n</parameter>\n<parameter=path>\n\n</parameter>\n"),
        ("read", {"path": ""}),
    ),
    (
        Qwen3CoderFormat,
        qwen("save", "<parameter=deep>\n{'a': True, 'b': [None]}\n</parameter>\n"),
        ("save", {"deep": {"a": True, "b": [None]}}),
    ),
    (
        Qwen3CoderFormat,
        qwen("save", '<parameter=deep>\n{"a": "x\ny",}\n</parameter>\n'),
        ("save", {"deep": {"a": "x\ny"}}),
    ),
]


@pytest.mark.parametrize(("family", "text", "call"), TAGS)
def test_a_slip_in_a_closing_tag_ends_the_value(
    family: type[ToolFormat], text: str, call: tuple[str, dict[str, Any]]
) -> None:
    assert told(read(family(), text)) == ("", [call])


@pytest.mark.parametrize(
    "body",
    [
        "<parameter=path>\nx\n</parameter>\n</parameter>\n",  # doubled, or the end of the value
        "<parameter=path>\n<parameter=path>\nx\n</parameter>\n",
        "<parameter=path>\nx\n\n",  # which line feed is the value's?
        "<parameter=path>\nx\n/parameter>\n",
        "<parameter=pa<th>\nx\n</parameter>\n",
        "<parameter=path\nx>\n/tmp/a\n</parameter>\n",
        "<parameter=path>\nx\n</parameter>\n<parameter=path>\ny\n</parameter>\n",
    ],
)
def test_a_slip_with_two_readings_stays_text(body: str) -> None:
    content, calls = told(read(Qwen3CoderFormat(), qwen("read", body)))
    assert (content, calls) == (qwen("read", body), [])


# Arguments as they are written, and what they are.
JSON: list[tuple[str, dict[str, Any]]] = [
    ('{"cmd": "echo a\necho b"}', {"cmd": "echo a\necho b"}),
    ('{"cmd": "a\tb\x07"}', {"cmd": "a\tb\x07"}),
    ('{"cmd": "type C:\\path"}', {"cmd": "type C:\\path"}),
    ('{"cmd": "grep \\d+ \\"x\\""}', {"cmd": 'grep \\d+ "x"'}),
    ('{"cmd": "ls", "why": "a",}', {"cmd": "ls", "why": "a"}),
    ('{"cmd": "echo "hi" there"}', {"cmd": 'echo "hi" there'}),
    ('{"cmd": "echo "hi"", "why": "to greet"}', {"cmd": 'echo "hi"', "why": "to greet"}),
    ('{"cmd": "print("hi", x)", "why": "w"}', {"cmd": 'print("hi", x)', "why": "w"}),
    ('{"cmd": "{"a": {"b": "c"}}"}', {"cmd": '{"a": {"b": "c"}}'}),
    ('{"cmd": True, "why": None}', {"cmd": True, "why": None}),
    ("{'cmd': 'it\\'s', 'why': None}", {"cmd": "it's", "why": None}),
]
JSON_FORMATS = (HermesFormat, NamedMistralFormat, KimiK2Format)


@pytest.mark.parametrize("family", JSON_FORMATS)
@pytest.mark.parametrize(("arguments", "value"), JSON)
def test_a_slip_in_json_is_repaired(family: type[ToolFormat], arguments: str, value: dict[str, Any]) -> None:
    text = family().write([("bash", {})]).replace("{}", arguments)
    assert told(read(family(), text)) == ("", [("bash", value)])


@pytest.mark.parametrize("family", JSON_FORMATS)
@pytest.mark.parametrize(
    "arguments",
    [
        '{"cmd": "type C:\\path\\new"}',  # a line feed, or a letter?
        '{"cmd": "C:\\dir\\", "why": "r"}',
        '{"cmd": "it\\\'s"}',
        '{"cmd": "x""}',  # a quote of the text, or one too many?
        '{"cmd": "5" pipe", "why": "x"}',
        '{"cmd": "a "b" c", "why": "d "e" f"}',
        '{"cmd": "x", "why": ["a", "b"}',
        '{"cmd": nothing}',
        '{"cmd": "x" "why": "y"}',
        '{"cmd": "a "b" c", "other": "y"}}',
        '{"cmd": NaN}',
    ],
)
def test_json_with_two_readings_stays_text(family: type[ToolFormat], arguments: str) -> None:
    text = family().write([("bash", {})]).replace("{}", arguments)
    assert told(read(family(), text)) == (text, [])


def test_arguments_in_a_string_are_repaired() -> None:
    arguments = json.dumps('{"cmd": "a\nb",}')
    text = f'<tool_call>{{"name": "bash", "arguments": {arguments}}}</tool_call>'
    assert told(read(HermesFormat(), text)) == ("", [("bash", {"cmd": "a\nb"})])


@pytest.mark.parametrize("ending", ["</tool_call>", "}}\n</tool_call>", "}}}\n</tool_call>", "}"])
def test_brackets_around_a_call_may_be_missing_or_too_many(ending: str) -> None:
    text = f'<tool_call>{{"name": "bash", "arguments": {{"cmd": "ls"}}{ending}'
    assert told(read(HermesFormat(), text)) == ("", [("bash", {"cmd": "ls"})])


def test_gemma_reads_ordinary_quotes() -> None:
    text = '<|tool_call>call:bash{cmd:"How } are you?"}<tool_call|>'
    assert told(read(GemmaFormat(), text)) == ("", [("bash", {"cmd": "How } are you?"})])


def test_a_long_call_that_breaks_is_never_closed() -> None:
    """Its beginning was sent, so its arguments stay what no client can read as other ones."""
    begun = '<tool_call>{"name": "bash", "arguments": {"cmd": "' + "long " * 400
    for text in (begun, f'{begun}", "why": oops}}}}</tool_call>'):
        for pieces in ([text], list(text)):
            parser = HermesFormat().parser(FUNCTIONS)
            parts = joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish())
            ((name, arguments),) = call_slips.calls_of(parts)
            assert (name, arguments[:16]) == ("bash", '{"cmd": "long lo')
            with pytest.raises(ValueError, match="line 1"):
                json.loads(arguments)


def test_no_slip_gives_another_call() -> None:
    counts, wrong = call_slips.run(NUM_CASES)
    logger.info("\n%s", call_slips.table(counts))
    assert not wrong, "\n\n".join("\n".join(each) for each in wrong[:3])
    for slip in call_slips.REPAIRABLE:
        found = counts[slip]
        assert found["call"] >= 0.95 * found.total(), f"{slip}: {found}"
