"""Calls with slips: examples with their right values, and thousands of random ones, never read as another call."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import call_slips
import pytest

from octavo.engine.json_recovery import SearchBudget, recover_object
from octavo.server.answers.gemma_calls import GemmaFormat
from octavo.server.answers.known_formats import FORMATS
from octavo.server.answers.named_calls import KimiK2Format
from octavo.server.answers.parts import Part, joined
from octavo.server.answers.tagged_calls import (
    DeepSeekV4Format,
    DeepSeekV32Format,
    GLM47Format,
    GLMFormat,
    Hy3Format,
    Qwen3CoderFormat,
    SeedOSSFormat,
    TaggedFormat,
)
from octavo.server.answers.tool_format import Function, ToolFormat
from octavo.server.answers.tool_formats import HermesFormat, NamedMistralFormat

logger = logging.getLogger(__name__)
OUTCOMES = Path(__file__).parent / "slip_outcomes.txt"
NUM_CASES = int(os.environ.get("OCTAVO_SLIP_CASES", "5000"))
STRING = {"type": "string"}
FUNCTIONS = [
    Function("bash", {"type": "object", "properties": {"cmd": STRING, "why": STRING}, "required": ["cmd"]}),
    Function("read", {"type": "object", "properties": {"path": STRING, "lines": {"type": "integer"}}}),
    Function("save", {"type": "object", "properties": {"deep": {"type": "object"}, "flag": {"type": "boolean"}}}),
    Function("write", {"type": "object", "properties": {"path": STRING, "content": STRING}}),
]


def read(form: ToolFormat, text: str) -> list[Part]:
    """Read a text whole, in two pieces with every cut, and in characters. All readings must be equal."""
    answers = []
    for pieces in ([text], list(text), *([text[:cut], text[cut:]] for cut in range(1, len(text)))):
        parser = form.parser(FUNCTIONS)
        answers.append(joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish()))
    assert all(each == answers[0] for each in answers)
    return answers[0]


def read_whole(form: ToolFormat, text: str) -> list[Part]:
    parser = form.parser(FUNCTIONS)
    return joined(parser.feed(text) + parser.finish())


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
def test_prose_about_tool_is_content(family: type[ToolFormat], text: str) -> None:
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


@pytest.mark.sweep(12)
@pytest.mark.parametrize(("family", "text", "call"), TAGS)
def test_tag_calls_with_slips_are_repaired(
    family: type[ToolFormat], text: str, call: tuple[str, dict[str, Any]]
) -> None:
    assert told(read(family(), text)) == ("", [call])


EXAMPLE = "Such as:\n<tool_call>\n<function=bash>\n<parameter=cmd>\nls\n</parameter>\n</function>\n</tool_call>\nEnd."
GLM_EXAMPLE = "Such as:\n<tool_call>bash<arg_key>cmd</arg_key><arg_value>ls</arg_value></tool_call>\nEnd."


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("family", "value"),
    [
        (Qwen3CoderFormat, EXAMPLE),
        (Qwen3CoderFormat, f"{EXAMPLE}\n{EXAMPLE}"),
        (Qwen3CoderFormat, "A call opens with <function=bash>."),
        (GLM47Format, GLM_EXAMPLE),
        (GLMFormat, GLM_EXAMPLE),
        (GLMFormat, "A call opens with <tool_call>."),
    ],
)
def test_tool_call_inside_argument_stays_text(family: type[ToolFormat], value: str) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [
        ("write", {"path": "a.md", "content": value}),
        ("bash", {"cmd": "ls", "why": "to see"}),
    ]
    for some in (calls[:1], calls):
        assert told(read(family(), family().write(some))) == ("", some)


@pytest.mark.parametrize("family", [Qwen3CoderFormat, SeedOSSFormat, GLMFormat, GLM47Format])
def test_property_named_like_marker_is_parsed(family: type[ToolFormat]) -> None:
    properties = {"<think>": STRING, "b": {"type": "boolean"}}
    functions = [Function("mark", {"type": "object", "properties": properties, "required": ["<think>", "b"]})]
    for arguments in ({"<think>": "</s>", "b": True}, {"<other>": "x", "b": True}):
        text = family().write([("mark", arguments)])
        parser = family().parser(functions)
        expected = ("", [("mark", arguments)]) if "<think>" in arguments else (text, [])
        assert told(joined(parser.feed(text) + parser.finish())) == expected


def test_markers_inside_two_values_keep_arguments_separate() -> None:
    arguments = {"path": "a <tool_call:opensource> b", "content": "c </tool_call:opensource> d"}
    written = Hy3Format().write([("write", arguments)])
    assert told(read(Hy3Format(), written)) == ("", [("write", arguments)])
    slip = "</arg_value:opensource/>".join(written.rsplit("</arg_value:opensource>", 1))
    assert told(read(Hy3Format(), slip)) == ("", [("write", arguments)])


def test_unterminated_nested_name_does_not_block_streaming() -> None:
    begun = Hy3Format().write([("write", {"path": "a", "content": "b"})]).rpartition("b")[0]
    parser = Hy3Format().parser(FUNCTIONS)
    parts = joined(parser.feed(begun + "<tool_call:opensource>" + "n" * 4000))
    assert parts[-1].text.endswith("n" * 3000)


@pytest.mark.parametrize("name", ["read", "n" * 600])
def test_nested_call_head_in_pieces_stays_text(name: str) -> None:
    example = f"<tool_call:opensource>{name}<tool_sep:opensource>\n</tool_call:opensource>"
    for value in (example, f"<tool_call:opensource>{name}", f"<tool_call:opensource>{name}<tool_sep:opensource> x"):
        calls: list[tuple[str, dict[str, Any]]] = [("write", {"path": value, "content": "c"})]
        text = Hy3Format().write(calls)
        answers = []
        for size in (1, 7, len(text)):
            parser = Hy3Format().parser(FUNCTIONS)
            pieces = [text[start : start + size] for start in range(0, len(text), size)]
            answers.append(told(joined([part for each in pieces for part in parser.feed(each)] + parser.finish())))
        assert answers == [("", calls)] * 3


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    "body",
    [
        "<parameter=path>\nx\n</parameter>\n</parameter>\n",  # doubled, or the end of the value
        "<parameter=path>\n<parameter=path>\nx\n</parameter>\n",
        "<parameter=path>\nx\n\n",  # which line feed belongs to the value?
        "<parameter=path>\nx\n/parameter>\n",
        "<parameter=pa<th>\nx\n</parameter>\n",
        "<parameter=path\nx>\n/tmp/a\n</parameter>\n",
        "<parameter=path>\nx\n</parameter>\n<parameter=path>\ny\n</parameter>\n",
        "<parameter=path>\n\n</function>\n</tool_call>\n\n",  # the first end may be text of the value
        "<parameter=path>\nx\n</function>\n</tool_call>\n",
    ],
)
def test_ambiguous_tag_slip_stays_text(body: str) -> None:
    content, calls = told(read(Qwen3CoderFormat(), qwen("read", body)))
    assert (content, calls) == (qwen("read", body), [])


@pytest.mark.sweep(16)
@pytest.mark.parametrize("family", [each for each in FORMATS if issubclass(each, TaggedFormat)])
@pytest.mark.parametrize("key", ["content", "other", ""])
def test_closing_tag_that_lost_a_part_never_changes_arguments(family: type[TaggedFormat], key: str) -> None:
    """The next argument is known, unknown or missing. Before an unknown argument, one character may be the value's."""
    form, arguments = family(), {"path": "a word", **({key: "b"} if key else {})}
    before, tag, after = form.write([("write", arguments)]).partition(form.value_closes)
    for start in range(len(tag)):
        for end in range(start + 1, len(tag) + 1):
            part = tag[:start] + tag[end:]
            if key != "other" or len(part) > 1:
                parts = read_whole(form, before + part + after)
                assert told(parts)[1] in ([], [("write", arguments)]), part


@pytest.mark.sweep(12)
@pytest.mark.parametrize("family", [DeepSeekV32Format, DeepSeekV4Format])
@pytest.mark.parametrize("attribute", ["", ' string="true', ' string=true"', " string=", ' string="yes"'])
def test_argument_without_its_type_is_text(family: type[ToolFormat], attribute: str) -> None:
    text = family().write([("read", {"path": "a"})]).replace(' string="true"', attribute)
    assert told(read(family(), text)) == (text, [])


def test_parameterless_call_may_be_closed_by_section_end() -> None:
    functions = [Function("now", {"type": "object", "properties": {}})]
    text = "<tool_call>\n<function=now>\n\n</tool_call>"
    parser = Qwen3CoderFormat().parser(functions)
    assert told(joined(parser.feed(text) + parser.finish())) == ("", [("now", {})])
    assert told(read(Qwen3CoderFormat(), text.replace("now", "read"))) == (text.replace("now", "read"), [])


@pytest.mark.turn(12)
def test_parsing_nested_calls_takes_linear_time() -> None:
    """Time is counted in executed lines of code, which do not depend on the load of the machine."""
    lines = []
    for count in (80, 160):
        calls: list[tuple[str, dict[str, Any]]] = [("write", {"path": "a", "content": EXAMPLE * count})]
        text, parser, total = Qwen3CoderFormat().write(calls), Qwen3CoderFormat().parser(FUNCTIONS), [0]

        def watch(_frame: Any, event: str, _argument: Any, total: list[int] = total) -> Any:
            total[0] += event == "line"
            return watch

        sys.settrace(watch)
        try:
            parts = [part for start in range(0, len(text), 8) for part in parser.feed(text[start : start + 8])]
        finally:
            sys.settrace(None)
        assert told(joined(parts + parser.finish())) == ("", calls)
        lines.append(total[0])
    assert lines[1] < 2.2 * lines[0], lines


@pytest.mark.sweep(8)
@pytest.mark.parametrize("cut", ["<", "</", "</paramete", "</parameter"])
def test_partial_closing_tag_does_not_shorten_value(cut: str) -> None:
    """The end of a call within the value is part of its text if the closing tag begins after it."""
    text = qwen("read", "<parameter=path>\n\n") + "\n" + cut
    assert told(read(Qwen3CoderFormat(), text)) == (text, [])
    for rest in ("", "\n", "\n</b>"):
        assert told(read(Qwen3CoderFormat(), qwen("read", "<parameter=path>\nx\n") + rest))[1] == [
            ("read", {"path": "x"})
        ]


def test_call_without_arguments_requires_closing_marker() -> None:
    """Without that mark, the end of the section may belong to a sentence about the marks."""
    whole = Hy3Format().write([("read", {})])
    assert told(read(Hy3Format(), whole)) == ("", [("read", {})])
    text = whole.replace("</tool_call:opensource>", "")
    assert told(read(Hy3Format(), text)) == (text, [])
    with_path = Hy3Format().write([("read", {"path": "a"})]).replace("</tool_call:opensource>", "")
    assert told(read(Hy3Format(), with_path)) == ("", [("read", {"path": "a"})])


# Arguments as they are written, and their values.
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


@pytest.mark.sweep(16)
@pytest.mark.parametrize("family", JSON_FORMATS)
@pytest.mark.parametrize(("arguments", "value"), JSON)
def test_malformed_json_arguments_are_repaired(family: type[ToolFormat], arguments: str, value: dict[str, Any]) -> None:
    text = family().write([("bash", {})]).replace("{}", arguments)
    assert told(read(family(), text)) == ("", [("bash", value)])


@pytest.mark.sweep(16)
@pytest.mark.parametrize("family", JSON_FORMATS)
@pytest.mark.parametrize(
    "arguments",
    [
        '{"cmd": "type C:\\path\\new"}',  # a line feed, or a letter?
        '{"cmd": "C:\\dir\\", "why": "r"}',
        '{"cmd": "it\\\'s"}',
        '{"cmd": "dir \\"C:\\temp\\\\" /s"}',  # the end of a path, or an escaped quote?
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
def test_ambiguous_json_arguments_stay_text(family: type[ToolFormat], arguments: str) -> None:
    text = family().write([("bash", {})]).replace("{}", arguments)
    assert told(read(family(), text)) == (text, [])


CUT = '{"cmd": "CUT"}'
OBJECTS = [family for family in FORMATS if CUT in family().write([("bash", {"cmd": "CUT"})])]


def calls_with(family: type[ToolFormat], arguments: str, *others: str) -> str:
    """Return a call with these arguments unchanged, and a call of each of the other commands."""
    calls: list[tuple[str, dict[str, Any]]] = [("bash", {"cmd": each}) for each in ("CUT", *others)]
    return family().write(calls).replace(CUT, arguments, 1)


@pytest.mark.sweep(16)
@pytest.mark.parametrize("family", OBJECTS, ids=lambda family: family.name)
def test_quote_and_bracket_in_value_do_not_end_call(family: type[ToolFormat]) -> None:
    for command in ('grep "}" f', 'grep "}x" f', 'grep "} "'):
        text = calls_with(family, f'{{"cmd": "{command}"}}')
        assert told(read(family(), text))[1] in ([("bash", {"cmd": command})], [])
    text = calls_with(family, '{"cmd": "grep "}" f"}')
    assert told(read(family(), text)) == ("", [("bash", {"cmd": 'grep "}" f'})])


@pytest.mark.sweep(20)
@pytest.mark.parametrize(
    "arguments", ['{"cmd": "ls}', '{"cmd": "ls"', '{"cmd": "ls', '{"cmd": ls"}', '{"cmd": "a "b" c}']
)
@pytest.mark.parametrize("family", OBJECTS, ids=lambda family: family.name)
def test_broken_call_never_swallows_next_call(family: type[ToolFormat], arguments: str) -> None:
    text = calls_with(family, arguments, "pwd")
    _, calls = told(read(family(), text))
    assert set(map(str, calls)) <= {str(("bash", {"cmd": each})) for each in ("ls", "pwd")}


def test_quote_and_bracket_before_text_do_not_end_call() -> None:
    for family in (HermesFormat, KimiK2Format):
        text = calls_with(family, '{"cmd": "a"}é"}')
        assert told(read(family(), text)) == ("", [("bash", {"cmd": 'a"}é'})])
        text = calls_with(family, '{"cmd": ""}é"}')  # one quote of the text, or a string that began with two
        assert told(read(family(), text)) == (text, [])
    call = '<tool_call>{"name": "bash", "arguments": {"cmd": "ls"}} I said "hi".'
    assert told(read(HermesFormat(), call))[1] == [("bash", {"cmd": "ls"})]


@pytest.mark.parametrize("arguments", ['{"cmd": "ls}', '{"cmd": "ls"', '{"cmd": "ls'])
@pytest.mark.parametrize("between", ["\n", ""])
def test_call_after_broken_call_is_parsed(arguments: str, between: str) -> None:
    begun = f'<tool_call>{{"name": "bash", "arguments": {arguments}{between}</tool_call>'
    second = f'{between}<tool_call>{{"name": "bash", "arguments": {{"cmd": "pwd"}}}}</tool_call>'
    assert told(read(HermesFormat(), begun + second)) == (begun, [("bash", {"cmd": "pwd"})])


def test_example_inside_broken_call_stays_text() -> None:
    example = '<tool_call>{"name": "bash", "arguments": {"cmd": "rm"}}</tool_call>'
    call = f'{{"name": "write", "arguments": {{"path": "a", "content": "Such as\n{example}"}}}}'
    text = f"<tool_call>{call}</tool_call>"
    assert told(read(HermesFormat(), text)) == (text, [])


@pytest.mark.parametrize("family", JSON_FORMATS)
def test_repair_keeps_arguments_missing_in_schema(family: type[ToolFormat]) -> None:
    arguments = '{"path":"a","content":"C:\\d","mode":"w"}'
    text = family().write([("write", {})]).replace("{}", arguments)
    assert told(read(family(), text)) == ("", [("write", {"path": "a", "content": "C:\\d", "mode": "w"})])


def test_json_repairs_share_search_budget() -> None:
    budget = SearchBudget()
    text = '{"todos": ["' + 'a", "b" c, ' * 1000 + '"]}'
    assert recover_object(text, budget=budget) is None
    assert budget.num_steps == 0
    slip = '{"a": "say "x" now"}'
    assert recover_object(slip, budget=budget) is None
    assert recover_object(slip) == ('{"a": "say \\"x\\" now"}', len(slip))


def test_parser_repairs_all_calls_with_one_budget() -> None:
    hard = '<tool_call>{"name": "save", "arguments": {"deep": {"a": ["' + 'a", "b" c, ' * 1000 + '"]}}}</tool_call>\n'
    easy = '<tool_call>{"name": "bash", "arguments": {"cmd": "say "x" now"}}</tool_call>'
    for text, num_calls in ((easy, 1), (hard + easy, 0)):
        parser = HermesFormat().parser(FUNCTIONS)
        assert len(call_slips.calls_of(parser.feed(text) + parser.finish())) == num_calls


def test_stringified_arguments_are_repaired() -> None:
    arguments = json.dumps('{"cmd": "a\nb",}')
    text = f'<tool_call>{{"name": "bash", "arguments": {arguments}}}</tool_call>'
    assert told(read(HermesFormat(), text)) == ("", [("bash", {"cmd": "a\nb"})])


@pytest.mark.parametrize("ending", ["</tool_call>", "}}\n</tool_call>", "}}}\n</tool_call>", "}"])
def test_missing_or_extra_brackets_around_call_are_accepted(ending: str) -> None:
    text = f'<tool_call>{{"name": "bash", "arguments": {{"cmd": "ls"}}{ending}'
    assert told(read(HermesFormat(), text)) == ("", [("bash", {"cmd": "ls"})])


def test_gemma_call_accepts_ordinary_quotes() -> None:
    text = '<|tool_call>call:bash{cmd:"How } are you?"}<tool_call|>'
    assert told(read(GemmaFormat(), text)) == ("", [("bash", {"cmd": "How } are you?"})])


@pytest.mark.parametrize("value", ['"x"', '<|"|>x<|"|>'])
def test_gemma_call_accepts_keys_in_ordinary_quotes(value: str) -> None:
    text = f'<|tool_call>call:bash{{"cmd":{value}}}<tool_call|>'
    assert told(read(GemmaFormat(), text)) == ("", [("bash", {"cmd": "x"})])


def test_streamed_broken_call_stays_invalid_json() -> None:
    """Its beginning was sent, so its arguments stay broken JSON, which no client can read as other arguments."""
    begun = '<tool_call>{"name": "bash", "arguments": {"cmd": "' + "long " * 400
    for text in (begun, f'{begun}", "why": oops}}}}</tool_call>'):
        for pieces in ([text], list(text)):
            parser = HermesFormat().parser(FUNCTIONS)
            parts = joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish())
            ((name, arguments),) = call_slips.calls_of(parts)
            assert (name, arguments[:16]) == ("bash", '{"cmd": "long lo')
            with pytest.raises(ValueError, match="line 1"):
                json.loads(arguments)


@pytest.mark.sweep(20)
@pytest.mark.parametrize("slip", call_slips.SLIPS)
def test_repair_outcomes_match_recorded_outcomes(slip: str) -> None:
    """To record intended changes: cd tests; python -m call_slips outcomes > server/answers/slip_outcomes.txt."""
    recorded = dict(line.split(": ") for line in OUTCOMES.read_text().splitlines())
    assert call_slips.outcomes(slip) == recorded[slip]


@pytest.mark.sweep(5)
@pytest.mark.parametrize("part", range(5))
def test_random_slips_never_yield_wrong_call(part: int) -> None:
    counts, wrong = call_slips.run(NUM_CASES // 5, first=part * (NUM_CASES // 5))
    logger.info("\n%s", call_slips.table(counts))
    assert not wrong, "\n\n".join("\n".join(each) for each in wrong[:3])
    for slip in call_slips.REPAIRABLE:
        found = counts[slip]
        least = 0.95 if found.total() >= 200 else 0.9  # the share of few cases varies
        assert found["call"] >= least * found.total(), f"{slip}: {found}"
