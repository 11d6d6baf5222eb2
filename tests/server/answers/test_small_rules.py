"""Single rules of reading answers and choosing formats that only a direct call can test."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams, StructuredOutputsParams
from octavo.server.answers import argument_values, generic_calls, template_probe
from octavo.server.answers.answer_form import AnswerForm, AnswerReader, AnswerStyle
from octavo.server.answers.argument_values import UnreadableError, property_of, value_text
from octavo.server.answers.harmony import HarmonyFormat
from octavo.server.answers.job_outputs import MergedOutputs
from octavo.server.answers.kimi_k3 import KimiK3Format
from octavo.server.answers.known_formats import FORMATS
from octavo.server.answers.muse_glimmer import MuseGlimmerFormat
from octavo.server.answers.parts import CallStarts, Part, PlainParser, ReasoningParser, joined
from octavo.server.answers.reasoning_forms import REASONING_FORMS, find_reasoning_form
from octavo.server.answers.tagged_calls import Qwen3CoderFormat
from octavo.server.answers.tool_format import Function
from octavo.server.answers.tool_formats import HermesFormat, MistralFormat
from octavo.server.answers.tools import MAX_TOOLS, NO_TOOLS, Choice, Toolbox, read_chat_tools, read_choice
from octavo.structured_output.schema_faults import LENIENT

STRING = {"type": "string"}
SAVE = Function("save", {"type": "object", "properties": {"path": STRING}})
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SAVE.parameters}} for name in ("save", "load")]


# --- arguments that are bare text -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "text", "expected"),
    [
        (["string"], "5", '"5"'),
        (["integer"], "5", "5"),
        (["number"], "5", "5"),
        (["integer", "string"], "5", "5"),
        (["boolean", "string"], "5", '"5"'),
        (["boolean"], "True", "true"),
        (["integer"], "five", '"five"'),
        (["integer"], "true", "true"),
        (["integer", "string"], "x {", '"x {"'),
        (["integer"], " ", None),
        (["object"], "{'a': 1}", '{"a": 1}'),
        (["array"], "(1, 2)", "[1, 2]"),
        (["object", "string"], "{'a': 1}", '{"a": 1}'),
        (["string", "integer"], "{'a': 1}", "\"{'a': 1}\""),
    ],
)
def test_argument_text_is_converted_by_schema_types(kinds: list[str], text: str, expected: str | None) -> None:
    schema = {"type": kinds}
    assert value_text(text, schema, schema) == expected


@pytest.mark.parametrize(
    ("kinds", "text"), [(["integer"], "x {"), (["array"], "[1, 2"), (["object"], "{a"), (["null"], "<b>")]
)
def test_malformed_argument_value_raises_unreadable_error(kinds: list[str], text: str) -> None:
    with pytest.raises(UnreadableError):
        value_text(text, {"type": kinds}, {})


def test_equal_any_of_alternatives_merge_to_one_property_schema() -> None:
    options = {"anyOf": [{"properties": {"a": STRING}}, {"properties": {"a": dict(STRING)}}]}
    assert property_of(options, "a", options) == STRING
    others = {"anyOf": [{"properties": {"a": STRING}}, {"properties": {"a": {"type": "null"}}}]}
    assert property_of(others, "a", others) == {"anyOf": [STRING, {"type": "null"}]}
    assert property_of(others, "b", others) == {}


def test_schema_longer_than_max_grammar_chars_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"type": "string", "description": "x" * 50}
    length = len(argument_values.json_of(schema, schema))
    monkeypatch.setattr(argument_values, "MAX_GRAMMAR_CHARS", length)
    argument_values.json_of(schema, schema)
    monkeypatch.setattr(argument_values, "MAX_GRAMMAR_CHARS", length - 1)
    with pytest.raises(RequestError, match=f"has {length} characters"):
        argument_values.json_of(schema, schema)


def test_external_schema_reference_is_kept_verbatim() -> None:
    schema = {"$ref": "other.json#/a"}
    written = argument_values.json_of(schema, {"other.json#": {"a": STRING}, **schema})
    assert '"$ref": "other.json#/a"' in written


# --- parts of an answer -----------------------------------------------------------------------------------------------


def test_adjacent_parts_are_joined_and_empty_parts_dropped() -> None:
    one = [Part("content", "a", start=3)]
    assert joined(one) == one
    assert joined(one) is not one
    assert joined([Part("content", "", start=0)]) == []
    assert joined([*one, Part("content", "b", start=4)]) == [Part("content", "ab", start=3)]
    assert joined([*one, Part("content", "b", start=5)]) == [*one, Part("content", "b", start=5)]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_parts_record_start_offset_in_text(size: int) -> None:
    text = "  <think>\nab c</think>\n\nxyz"
    parser = ReasoningParser(PlainParser(), is_open=False)
    parts = [part for start in range(0, len(text), size) for part in parser.feed(text[start : start + size])]
    parts = joined(parts + parser.finish())
    assert [(part.kind, part.text, part.start) for part in parts] == [("reasoning", "ab c", 10), ("content", "xyz", 24)]
    assert all(text[part.start :].startswith(part.text) for part in parts)


def test_truncated_reasoning_records_start_offset() -> None:
    parser = ReasoningParser(PlainParser(), is_open=True)
    assert parser.feed("\n ab </thi") == [Part("reasoning", "ab", start=2)]
    assert parser.finish(is_cut=True) == []
    parser = ReasoningParser(PlainParser(), is_open=False)
    assert joined(parser.feed("  <thi") + parser.finish()) == [Part("content", "  <thi", start=0)]
    parser = ReasoningParser(PlainParser(), is_open=False)
    assert joined(parser.feed(" " * 600 + "<think>a") + parser.finish())[0].kind == "content"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[{", True),
        ("[ {", True),
        (" [{", True),
        ("[", None),
        ("", None),
        ("[x", False),
        ("x[{", False),
        *(
            (" " * before + "[" + " " * inside + "{", max(before, inside) < 9)
            for before, inside in [(8, 8), (9, 0), (0, 9)]
        ),
    ],
)
def test_heads_match_with_few_inner_blanks(text: str, expected: bool | None) -> None:
    assert CallStarts(["[{", "<a>"]).starts_at("12" + text, 2) is expected


def test_auto_reasoning_form_is_detected_by_its_marker() -> None:
    assert find_reasoning_form("auto", ["no marks at all"]) is None
    assert find_reasoning_form("auto", []) is None
    for form in REASONING_FORMS:
        mark = form.opens if form.is_found_by_opens else form.closes
        found = find_reasoning_form("auto", ["nothing", f"a {mark} b"])
        assert found is not None
        assert mark in (found.opens, found.closes)


# --- which tools may be called ----------------------------------------------------------------------------------------


def allowed(tools: Any, mode: Any = "auto") -> Toolbox:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
    return read_chat_tools(TOOLS, choice, None, HermesFormat())


def test_allowed_tools_require_function_names_and_valid_mode() -> None:
    named = {"type": "function", "function": {"name": "save"}}
    assert [each.name for each in allowed([named]).functions] == ["save"]
    unnamed = {"type": "function", "function": {"name": 5}}
    custom = {"type": "custom", "function": {"name": "load"}}
    for wrong in ([], [unnamed], [named, unnamed], None, "save", [named, custom], [named, "load"], {"save": named}):
        with pytest.raises(RequestError, match="must be a list of"):
            allowed(wrong)
    for mode in ("none", None, 5):
        with pytest.raises(RequestError, match="must be auto or required"):
            allowed([named], mode)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([*map(str, range(MAX_TOOLS))], None),
        ([*map(str, range(MAX_TOOLS + 1))], f"{MAX_TOOLS + 1} tools are given; the limit is {MAX_TOOLS}"),
        (["save", "load", "save"], "two tools have the same name"),
    ],
)
def test_tools_are_refused_above_limit_or_with_equal_names(names: list[str], message: str | None) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    with contextlib.nullcontext() if message is None else pytest.raises(RequestError, match=message):
        assert len(read_chat_tools(tools, None, None, HermesFormat()).functions) == len(names)


def nested(depth: int) -> dict[str, Any]:
    return {"properties": {"a": nested(depth - 1)}} if depth else {}


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        ({"a": nested(400)}, "is no JSON schema, or is nested too deep"),
        ({f"a{index}": STRING for index in range(2001)}, "an object of the schema has 2001 properties"),
    ],
)
def test_refusal_names_field_of_schema_that_no_grammar_can_hold(properties: Any, message: str) -> None:
    tool = {"name": "deep", "parameters": {"type": "object", "properties": properties}, "strict": True}
    toolbox = read_chat_tools([TOOLS[0], {"type": "function", "function": tool}], None, None, HermesFormat())
    with pytest.raises(RequestError, match=message) as refused:
        toolbox.structure(None)
    assert refused.value.parameter == "tools[1].function.parameters"


@pytest.mark.parametrize("mode", [None, "none", "auto", "required"])
def test_missing_tool_choice_is_auto(mode: str | None) -> None:
    assert read_choice(mode, lambda _: None, has_tools=True) == Choice(mode or "auto")


def test_structure_of_calls_or_content_has_both() -> None:
    wanted = StructuredOutputsParams(json={"const": "said"}, starts_after="</other>")
    structure = read_chat_tools(TOOLS, "auto", None, HermesFormat()).structure(wanted)
    assert structure is not None
    assert structure.starts_after == "</other>"
    assert all(f'"{each}' in str(structure.grammar) for each in ("const", "save", "load"))


def test_format_that_needs_grammar_enforces_only_strict_schemas_fully() -> None:
    described = [(replace(SAVE, name=name, strict=name == "strict"), "") for name in ("strict", "free")]
    structure = Toolbox.make(described, generic_calls.GenericFormat()).structure(None)
    assert structure is not None
    rules = [line for line in str(structure.grammar).splitlines() if line.startswith("call")][1:]
    assert [LENIENT in rule for rule in rules] == [False, True]


@pytest.mark.parametrize(
    ("choice", "parallel", "is_one"),
    [
        ("required", True, False),
        ("required", False, True),
        ({"type": "function", "function": {"name": "save"}}, True, True),
    ],
)
def test_named_tool_choice_permits_one_call(choice: Any, parallel: bool, is_one: bool) -> None:
    toolbox = read_chat_tools(TOOLS, choice, parallel, HermesFormat())
    structure = toolbox.structure(None)
    assert structure is not None
    functions = [each for each in toolbox.functions if toolbox.named in {None, each.name}]
    starts = [HermesFormat().forced(functions, only_one=each).splitlines()[:2] for each in (is_one, not is_one)]
    assert str(structure.grammar).splitlines()[:2] == starts[0] != starts[1]


def test_template_input_without_tools_copies_messages() -> None:
    messages = [{"role": "user", "content": "x"}]
    shown, tools = Toolbox.make([], None, Choice("none"), parallel=None).template_input(messages, None)
    assert (shown, tools) == (messages, None)
    assert shown is not messages


def test_tools_are_passed_to_templates_that_show_tools() -> None:
    messages = [{"role": "user", "content": "x"}]
    toolbox = read_chat_tools(TOOLS, "auto", None, HermesFormat())
    given = [{"type": "function", "function": {"description": "", **tool["function"]}} for tool in TOOLS]
    assert toolbox.template_input(messages, HermesFormat()) == (messages, given)
    shown, tools = toolbox.template_input(messages, generic_calls.GenericFormat())
    assert [each["role"] for each in shown] == ["system", "user"]
    assert tools is None
    assert NO_TOOLS.template_input(messages, HermesFormat()) == (messages, None)


def test_error_names_first_reserved_name() -> None:
    reserved = sorted(MuseGlimmerFormat.reserved_names)
    assert len(reserved) > 1
    tools = [{"type": "function", "function": {"name": name}} for name in reversed(reserved)]
    with pytest.raises(RequestError, match=f"cannot be named '{reserved[0]}'"):
        read_chat_tools(tools, "auto", None, MuseGlimmerFormat())


def test_call_ids_have_expected_length() -> None:
    ids = [HermesFormat().new_call_id() for _ in range(9)]
    assert {len(each) for each in ids} == {29}
    assert all(each.startswith("call_") and each[5:].isalnum() for each in ids)
    assert len({*ids}) == 9
    short = [MistralFormat().new_call_id() for _ in range(9)]
    assert {len(each) for each in short} == {9}
    assert all(each.isalnum() for each in short)


# --- which parser reads an answer -------------------------------------------------------------------------------------


def form(tool_format: Any = None, reasoning: Any = None, frame: Any = None) -> AnswerForm:
    toolbox = NO_TOOLS if tool_format is None else read_chat_tools(TOOLS, "auto", None, tool_format)
    return AnswerForm(toolbox, reasoning, frame=frame)


def test_answer_form_without_tools_reasoning_or_frame_is_plain() -> None:
    reasoning = REASONING_FORMS[0]
    assert form().is_plain
    assert not form(reasoning=reasoning).is_plain
    assert not form(HermesFormat()).is_plain
    assert not form(frame=HarmonyFormat()).is_plain


def test_every_format_parses_several_calls_unless_only_one() -> None:
    assert HarmonyFormat.takes_one
    for family in FORMATS:
        calls: list[tuple[str, dict[str, Any]]] = [("save", {"path": "a"}), ("save", {"path": "b"})]
        text = family().write(calls)
        counts = []
        for options in ({}, {"only_one": False}, {"only_one": True}):
            parser = family().parser([SAVE], **options)
            counts.append(sum(part.kind == "call" for part in parser.feed(text) + parser.finish()))
        assert counts == [2, 2, 1], family.name


@pytest.mark.parametrize("has_template", [False, True])
def test_answer_style_is_detected_only_with_chat_template(has_template: bool) -> None:
    inputs = SimpleNamespace(
        has_chat_template=has_template,
        chat_templates=["<tool_call> </think>"],
        chat_text=lambda *_args, **_options: template_probe.NAME,
        tokenizer=SimpleNamespace(token_id={"</think>": 7}.get, is_special=lambda _id: False),
        model_info=SimpleNamespace(vocab_size=10),
    )
    style = AnswerStyle.find("auto", "auto", inputs)  # type: ignore[arg-type]
    assert (style.tools is not None, style.has_reasoning, style.reasoning_end_id) == (
        (True, True, 7) if has_template else (False, False, None)
    )
    assert style.shows_tools is has_template


def test_long_answer_is_returned_complete_without_duplicates() -> None:
    text = "".join(map(str, range(2500)))
    assert len(text) > 2 * 4096
    for each in (form(), form(HermesFormat())):
        completion = SimpleNamespace(text=text, token_ids=[1], finished=True, finish_reason="stop", stop_reason=None)
        assert "".join(part.text for part in AnswerReader(each).read(completion)) == text  # type: ignore[arg-type]


def test_formats_that_frame_content_are_listed() -> None:
    framing = {each.name for each in FORMATS if each.frames_content}
    assert framing == {"functionary_v3_2", "kimi_k3", "muse_glimmer", "openai", "solar_open"}


def test_frames_or_own_flag_make_format_frame_content() -> None:
    class Flagged(Qwen3CoderFormat):
        frames_content = True

    class Framed(Qwen3CoderFormat):
        frames = ("<a>",)

    assert [each.frames_content for each in (Flagged, Framed, Qwen3CoderFormat)] == [True, True, False]


def test_takes_one_is_set_for_formats_whose_templates_refuse_several_calls() -> None:
    assert {each.name for each in FORMATS if each.takes_one} == {"llama3_json", "openai"}
    assert generic_calls.GenericFormat.takes_one


# --- outputs of several prompts ---------------------------------------------------------------------------------------


async def numbers(count: int) -> Any:
    for number in range(count):
        yield number


async def collect(at_once: int, num_streams: int) -> list[Any]:
    merged = MergedOutputs([numbers(2) for _ in range(num_streams)], at_once=at_once)
    found = [each async for each in merged]
    assert len(merged._tasks) == min(at_once, num_streams)
    return found


@pytest.mark.parametrize(("at_once", "num_streams"), [(2, 3), (5, 3), (1, 4)])
def test_merged_outputs_run_at_most_at_once_streams(at_once: int, num_streams: int) -> None:
    assert sorted(asyncio.run(collect(at_once, num_streams))) == sorted([0, 1] * num_streams)


# --- JSON of models with a template that does not support tools -------------------------------------------------------


@pytest.mark.parametrize(
    ("escape", "is_half"),
    [("\\ud83d", True), ("\\uDBff", True), ("\\udc00", False), ("\\u0041", False), ("\\ud8", False), ("\\n", False)],
)
def test_high_surrogate_escape_is_incomplete(escape: str, is_half: bool) -> None:
    assert generic_calls._is_half(escape) is is_half


# --- grammars ---------------------------------------------------------------------------------------------------------


def test_kimi_k3_numbers_calls_from_one() -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("save", {"path": "a"}), ("save", {"path": "b"})]
    written = KimiK3Format().write(calls)
    assert [written.count(f'index="{index}"') for index in range(4)] == [0, 1, 1, 0]


def test_kimi_k3_grammar_fixes_argument_type() -> None:
    for kind, types in (("string", ["string"]), ("integer", ["number"]), ("boolean", ["boolean"])):
        function = Function("f", {"type": "object", "properties": {"a": {"type": kind}}, "required": ["a"]})
        grammar = KimiK3Format().forced([function], only_one=True)
        head = next(line for line in grammar.splitlines() if ' type=\\"" (' in line)
        assert head.partition('type=\\"" (')[2].partition(")")[0] == " | ".join(f'"{each}"' for each in types)


def test_schema_comment_is_written_only_for_patterns() -> None:
    plain = Function("f", {"type": "object", "properties": {"a": STRING}})
    assert argument_values.schema_comment(plain) == ""
    told = Function("f", {"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}})
    assert argument_values.schema_comment(told).startswith("// ")


def test_lookahead_error_quotes_pattern() -> None:
    error = argument_values.LookaheadError("(?=a)b")
    assert str(error) == (
        "the pattern `(?=a)b` looks ahead, and this model's form of calls cannot check that: write it without"
    )
    assert str(argument_values.LookaheadError("x" * 999)).count("x") == 200


def test_any_of_alternative_without_arguments_is_empty_grammar_rule() -> None:
    options = {"anyOf": [{"type": "object", "properties": {"a": STRING}}, {"type": "object", "properties": {}}]}
    function = Function("f", {**options, "additionalProperties": False})
    grammar = Qwen3CoderFormat().forced([function], only_one=True)
    [call] = [line for line in grammar.splitlines() if line.startswith("call0: ")]
    assert call == r'call0: "<function=" "f>\n" (argument0_o0_0? | "") "</function>" "\n"'


@pytest.mark.parametrize("starts_after", [None, "</other>"])
def test_structure_starts_after_reasoning_unless_starts_after_is_set(starts_after: str | None) -> None:
    structure = StructuredOutputsParams(regex="a+", starts_after=starts_after)
    reasoning = REASONING_FORMS[0]
    applied = form(reasoning=reasoning).applied_to(SamplingParams(structured_outputs=structure)).structured_outputs
    assert applied is not None
    assert applied.starts_after == (starts_after or reasoning.closes)
    assert applied.free_from == (None if starts_after else reasoning.opens)
    assert not NO_TOOLS.is_limited


@pytest.mark.parametrize(("recipient", "kind"), [("self", "reasoning"), ("user", "content")])
def test_messages_to_self_or_user_are_not_calls(recipient: str, kind: str) -> None:
    parser = MuseGlimmerFormat().parser([Function(recipient, {})])
    text = f"<|start|>assistant to={recipient}<|message|>hello<|eom|>"
    assert [(part.kind, part.text) for part in joined(parser.feed(text) + parser.finish())] == [(kind, "hello")]
