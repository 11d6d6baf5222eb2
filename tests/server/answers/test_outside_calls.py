"""Calls from llama.cpp's tests of its chat parsers (MIT) are read to the same values, for every cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from octavo.server.answers.known_formats import FORMATS
from octavo.server.answers.parts import ReasoningParser, joined
from octavo.server.answers.tool_format import Function

ARG = {"arg1": {"type": "integer"}}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS = [
    Function("special_function", {"type": "object", "properties": ARG, "required": ["arg1"]}),
    Function("special_function_with_opt", {"type": "object", "properties": {**ARG, "arg2": {"type": "integer"}}}),
    Function("python", {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}),
    Function("get_time", CITY),
    Function("get_weather", CITY),
]
CALLS: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]] = [
    (
        "qwen3_coder",
        ("<tool_call>\n<function=special_function>\n<parameter=arg1>\n1\n</parameter>\n</function>\n</tool_call>"),
        [("special_function", {"arg1": 1})],
    ),
    (
        "qwen3_coder",
        (
            "<tool_call>\n<function=special_function>\n<parameter=arg1>\n1\n</parameter>\n</function>\n"
            "</tool_call>\n<tool_call>\n<function=special_function_with_opt>\n<parameter=arg1>\n1\n</parameter>\n"
            "<parameter=arg2>\n2\n</parameter>\n</function>\n</tool_call>"
        ),
        [("special_function", {"arg1": 1}), ("special_function_with_opt", {"arg1": 1, "arg2": 2})],
    ),
    (
        "qwen3_coder",
        (
            '<tool_call>\n<function=python>\n<parameter=code>\ndef hello():\n    print("Hello, world!")\n\n'
            "hello()\n</parameter>\n</function>\n</tool_call>"
        ),
        [("python", {"code": 'def hello():\n    print("Hello, world!")\n\nhello()'})],
    ),
    ("mistral", ('[TOOL_CALLS]special_function[ARGS]{"arg1":1}'), [("special_function", {"arg1": 1})]),
    (
        "mistral",
        (
            '[TOOL_CALLS]special_function[ARGS]{"arg1": 1}[TOOL_CALLS]special_function_with_opt[ARGS]{"arg1": 1, '
            '"arg2": 2}'
        ),
        [("special_function", {"arg1": 1}), ("special_function_with_opt", {"arg1": 1, "arg2": 2})],
    ),
    (
        "cohere_command3",
        (
            "<|START_ACTION|>[\n"
            '    {"tool_call_id": "0", "tool_name": "special_function", "parameters": {"arg1": 1}}\n'
            "]<|END_ACTION|>"
        ),
        [("special_function", {"arg1": 1})],
    ),
    (
        "cohere_command3",
        (
            "<|START_ACTION|>[\n"
            '    {"tool_call_id": "0", "tool_name": "special_function", "parameters": {"arg1": 1}},\n'
            '    {"tool_call_id": "1", "tool_name": "python", "parameters": {"code": "print(\'hey\')"}}\n'
            "]<|END_ACTION|>"
        ),
        [("special_function", {"arg1": 1}), ("python", {"code": "print('hey')"})],
    ),
    ("gemma4", ('<|tool_call>call:get_time{city:<|"|>London<|"|>}<tool_call|>'), [("get_time", {"city": "London"})]),
    (
        "gemma4",
        (
            '<|tool_call>call:get_time{city:<|"|>London<|"|>}<tool_call|><|tool_call>call:get_weather{city:<|"|>P'
            'aris<|"|>}<tool_call|>'
        ),
        [("get_time", {"city": "London"}), ("get_weather", {"city": "Paris"})],
    ),
    (
        "seed_oss",
        (
            "<seed:tool_call>\n<function=special_function>\n<parameter=arg1>1</parameter>\n</function>\n"
            "</seed:tool_call>"
        ),
        [("special_function", {"arg1": 1})],
    ),
    (
        "seed_oss",
        (
            "<seed:tool_call>\n<function=special_function>\n<parameter=arg1>1</parameter>\n</function>\n"
            "</seed:tool_call>\n<seed:tool_call>\n<function=special_function_with_opt>\n"
            "<parameter=arg1>1</parameter>\n<parameter=arg2>2</parameter>\n</function>\n</seed:tool_call>"
        ),
        [("special_function", {"arg1": 1}), ("special_function_with_opt", {"arg1": 1, "arg2": 2})],
    ),
    (
        "deepseek_v31",
        (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{"city": "XYZCITY"}'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        [("get_time", {"city": "XYZCITY"})],
    ),
    (
        "deepseek_v32",
        (
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="special_function">\n'
            '<｜DSML｜parameter name="arg1" string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            "</｜DSML｜function_calls>"
        ),
        [("special_function", {"arg1": 1})],
    ),
    (
        "deepseek_v32",
        (
            'Let me call the function.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="special_function">\n'
            '<｜DSML｜parameter name="arg1" string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            "</｜DSML｜function_calls>"
        ),
        [("special_function", {"arg1": 1})],
    ),
    (
        "deepseek_v4",
        (
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="special_function">\n'
            '<｜DSML｜parameter name="arg1" string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            "</｜DSML｜tool_calls>"
        ),
        [("special_function", {"arg1": 1})],
    ),
    (
        "deepseek_v4",
        (
            'Let me call the function.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="special_function">\n'
            '<｜DSML｜parameter name="arg1" string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            "</｜DSML｜tool_calls>"
        ),
        [("special_function", {"arg1": 1})],
    ),
    (
        "glm45",
        ("<tool_call>special_function\n<arg_key>arg1</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
        [("special_function", {"arg1": 1})],
    ),
    (
        "glm47",
        ("<tool_call>special_function<arg_key>arg1</arg_key><arg_value>1</arg_value></tool_call>"),
        [("special_function", {"arg1": 1})],
    ),
    (
        "glm47",
        (
            "<tool_call>special_function<arg_key>arg1</arg_key><arg_value>1</arg_value></tool_call><tool_call>spe"
            "cial_function_with_opt<arg_key>arg1</arg_key><arg_value>1</arg_value><arg_key>arg2</arg_key><arg_val"
            "ue>2</arg_value></tool_call>"
        ),
        [("special_function", {"arg1": 1}), ("special_function_with_opt", {"arg1": 1, "arg2": 2})],
    ),
    (
        "kimi_k2",
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.special_function:0<|tool_call_argument_begi"
            'n|>{"arg1": 1}<|tool_call_end|><|tool_call_begin|>functions.special_function_with_opt:1<|tool_call_a'
            'rgument_begin|>{"arg1": 1, "arg2": 2}<|tool_call_end|><|tool_calls_section_end|>'
        ),
        [("special_function", {"arg1": 1}), ("special_function_with_opt", {"arg1": 1, "arg2": 2})],
    ),
    (
        "kimi_k2",
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.special_function:0<|tool_call_argument_begi"
            'n|>{"arg1": 1}<|tool_call_end|><|tool_call_begin|>functions.python:1<|tool_call_argument_begin|>{"co'
            'de": "print(\'hey\')"}<|tool_call_end|><|tool_calls_section_end|>'
        ),
        [("special_function", {"arg1": 1}), ("python", {"code": "print('hey')"})],
    ),
    (
        "kimi_k2",
        (
            '<|tool_calls_section_begin|><|tool_call_begin|>functions.python:0<|tool_call_argument_begin|>{"code"'
            ': "def hello():\\n    print(\\"Hello, world!\\")\\n\\nhello()"}<|tool_call_end|><|tool_calls_section_end|'
            ">"
        ),
        [("python", {"code": 'def hello():\n    print("Hello, world!")\n\nhello()'})],
    ),
    ("lfm2", ("<|tool_call_start|>[special_function(arg1=1)]<|tool_call_end|>"), [("special_function", {"arg1": 1})]),
    (
        "apertus",
        ('<|tools_prefix|>[{"special_function": {"arg1": 1}}]<|tools_suffix|>'),
        [("special_function", {"arg1": 1})],
    ),
    (
        "minimax_m2",
        (
            '<minimax:tool_call>\n<invoke name="special_function">\n<parameter name="arg1">1</parameter>\n'
            "</invoke>\n</minimax:tool_call>"
        ),
        [("special_function", {"arg1": 1})],
    ),
    (
        "nemotron_json",
        ('<TOOLCALL>[{"name": "special_function", "arguments": {"arg1": 1}}]</TOOLCALL>'),
        [("special_function", {"arg1": 1})],
    ),
    (
        "command_r",
        ('Action:\n```json\n[{"tool_name": "special_function", "parameters": {"arg1": 1}}]\n```'),
        [("special_function", {"arg1": 1})],
    ),
    ("functionary_v3_1", ('<function=special_function>{"arg1": 1}</function>'), [("special_function", {"arg1": 1})]),
    (
        "functools",
        (' functools[{"name": "special_function", "arguments": {"arg1": 1}}]'),
        [("special_function", {"arg1": 1})],
    ),
    (
        "deepseek_v3",
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>special_function\n```json\n"
            '{"arg1": 1}```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
        ),
        [("special_function", {"arg1": 1})],
    ),
    (
        "jamba",
        ('<tool_calls>[{"name": "special_function", "arguments": {"arg1": 1}}]</tool_calls>'),
        [("special_function", {"arg1": 1})],
    ),
    (
        "mistral",
        ('Hello, world!\nWhat\'s up?[TOOL_CALLS]special_function[ARGS]{"arg1": 1}'),
        [("special_function", {"arg1": 1})],
    ),
    (
        "openai",
        (' to=functions.special_function<|channel|>analysis<|message|>{"arg1": 1}'),
        [("special_function", {"arg1": 1})],
    ),
    (
        "gigachat3",
        ('<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "special_function", "arguments": {"arg1": 1}}'),
        [("special_function", {"arg1": 1})],
    ),
    (
        "gigachat3",
        (
            "Hello, world!\nWhat's up?<|message_sep|>\n\nfunction call<|role_sep|>\n"
            '{"name": "special_function", "arguments": {"arg1": 1}}'
        ),
        [("special_function", {"arg1": 1})],
    ),
]


@pytest.mark.parametrize(("name", "text", "expected"), CALLS)
def test_llama_cpp_calls_parse_to_expected_arguments(
    name: str, text: str, expected: list[tuple[str, dict[str, Any]]]
) -> None:
    for family in (each for each in FORMATS if each.name == name):
        form = family()
        whole = [part for piece in ([text], text) for part in [read(form.parser(FUNCTIONS), piece)]]
        assert whole[0] == whole[1]
        if whole[0] == expected:
            return
    pytest.fail(f"{whole[0]}")


def read(parser: Any, pieces: Any) -> list[tuple[str, dict[str, Any]]]:
    parts = joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish())
    calls = [part for part in parts if part.kind == "call"]
    arguments = ["".join(p.text for p in parts if p.kind == "arguments" and p.call == call.call) for call in calls]
    return [(call.text, json.loads(text)) for call, text in zip(calls, arguments, strict=True)]


TIME = "<tool_call>get_time\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"
TIME_CALL = ("get_time", {"city": "Paris"})
SPECIAL, CODE = ("special_function", {"arg1": 1}), ("python", {"code": "print('hey')"})
# family, answer, whether the prompt opens the reasoning, reasoning, content, calls
REASONED: list[tuple[str, str, bool, str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("glm45", f"I need to check the time first.\n{TIME}", True, "I need to check the time first.", "", [TIME_CALL]),
    ("glm45", f"Let me check.\n</think>\nChecking it now.\n{TIME}", True, "Let me check.", "Checking it now.",
     [TIME_CALL]),
    ("glm45", f"{TIME}\nThe time has been checked.", True, "", "The time has been checked.", [TIME_CALL]),
    ("glm45", f"</think>\n{TIME}\n{TIME}", True, "", "", [TIME_CALL, TIME_CALL]),
    (
        "kimi_k2",
        ("<think>I need to call two functions<|tool_calls_section_begin|><|tool_call_begin|>"
        'functions.special_function:0<|tool_call_argument_begin|>{"arg1": 1}<|tool_call_end|><|tool_call_begin|>'
        'functions.python:1'
        '<|tool_call_argument_begin|>{"code": "print(\'hey\')"}<|tool_call_end|><|tool_calls_section_end|>'),
        False, "I need to call two functions", "", [SPECIAL, CODE],
    ),
    (
        "kimi_k2",
        ("<think>I need to call two functions<|tool_call_begin|>functions.special_function:0"
        '<|tool_call_argument_begin|>{"arg1": 1}<|tool_call_begin|>functions.python:1<|tool_call_argument_begin|>'
        '{"code": "print(\'hey\')"}'),
        False, "I need to call two functions", "", [SPECIAL, CODE],
    ),
    (
        "minimax_m2",
        ("Let's call a tool:\n</think>\n\n<minimax:tool_call>\n<invoke name=\"special_function\">\n</invoke>\n"
        "</minimax:tool_call>"),
        True, "Let's call a tool:", "", [("special_function", {})],
    ),
    (
        "minicpm5",
        "I'm thinking</think><function name=\"python\"><param name=\"code\">print('hey')</param></function>",
        True, "I'm thinking", "", [CODE],
    ),
    (
        "minicpm5",
        ('<function name="python"><param name="code"><![CDATA[<a href="/x">hi</a> </param>]]></param></function>\n'
        '<function name="special_function"><param name="arg1"><![CDATA[1]]></param></function>'),
        False, "", "", [("python", {"code": '<a href="/x">hi</a> </param>'}), SPECIAL],
    ),
]  # fmt: skip
# Difference to llama.cpp, and its reason:
# - Ling: llama.cpp drops the letters of "<|role_end|>" at the end of an answer. Here the letters of a token that ends a
#   turn are text, because an answer may explain these tokens.


@pytest.mark.sweep(12)
@pytest.mark.parametrize(("name", "text", "is_open", "reasoning", "content", "calls"), REASONED)
def test_llama_cpp_answers_with_reasoning_parse_equally_at_every_cut(
    name: str, text: str, is_open: bool, reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    family = next(each for each in FORMATS if each.name == name)
    whole = None
    for cuts in ([], [*range(1, len(text))], *([cut] for cut in range(1, len(text)))):
        form = family()
        ends = form.reasoning_ends(FUNCTIONS)
        parser = ReasoningParser(form.parser(FUNCTIONS), is_open=is_open, interrupts=ends)
        pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
        parts = joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish())
        whole = whole or parts
        assert parts == whole, f"cut at {cuts[:1]}"
    assert whole is not None
    told = {kind: "".join(part.text for part in whole if part.kind == kind) for kind in ("reasoning", "content")}
    assert (told["reasoning"], told["content"].strip()) == (reasoning, content)
    called = [part for part in whole if part.kind == "call"]
    arguments = ["".join(p.text for p in whole if p.kind == "arguments" and p.call == each.call) for each in called]
    assert [(each.text, json.loads(value)) for each, value in zip(called, arguments, strict=True)] == calls
