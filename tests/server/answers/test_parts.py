"""An answer's reasoning, content and tool calls do not depend on the cuts of its text, in any family."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

from octavo.server.answers.parts import Part, PlainParser, ReasoningParser, joined
from octavo.server.answers.reasoning_forms import REASONING_FORMS
from octavo.server.answers.tool_format import Function
from octavo.server.answers.tool_formats import HermesFormat, LlamaFormat, MistralFormat

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.server.answers.parts import AnswerParser, ReasoningForm
    from octavo.server.answers.tool_format import ToolFormat

NAMES = [Function(name, {"type": "object"}) for name in ("get_weather", "add", "nothing")]
ARGUMENTS = '{"city": "Ro\\"me </tool_call> {[", "days": [1, {"a": null}], "ü": "狐"}'
WEATHER = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
ADD = '{"name": "add", "arguments": {"a": 1, "b": -2.5e3}}'

RM = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
BROKEN = '<tool_call>{"name": "add", "arguments": {"a": [1, "x'
UNCLOSED = '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"b\\""}</tool_call>'
LONE = '<tool_call>{"name": "add", "arguments": "\\ud800"}'


def call(index: int, name: str, arguments: str) -> list[Part]:
    return [Part("call", name, index), Part("arguments", arguments, index)]


def content(text: str) -> list[Part]:
    return [Part("content", text)]


def read(make: Callable[[], AnswerParser], pieces: list[str], *, is_cut: bool = False) -> list[Part]:
    parser = make()
    return joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish(is_cut=is_cut))


def check_every_cut(make: Callable[[], AnswerParser], text: str, expected: list[Part]) -> None:
    assert read(make, [text]) == expected
    assert read(make, list(text)) == expected
    for cut in range(1, len(text)):
        assert read(make, [text[:cut], text[cut:]]) == expected, f"cut at {cut}"
    rng = random.Random(text)
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(text) + 1), min(5, len(text))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(make, pieces) == expected


HERMES = [
    ("", []),
    ("Just text, a < b.\n\n", content("Just text, a < b.\n\n")),
    (f"<tool_call>\n{WEATHER}\n</tool_call>", call(0, "get_weather", ARGUMENTS)),
    (f"<tool_call>{WEATHER}</tool_call>\n", call(0, "get_weather", ARGUMENTS)),
    (
        f"I look.\n<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{ADD}\n</tool_call>",
        [*content("I look."), *call(0, "get_weather", ARGUMENTS), *call(1, "add", '{"a": 1, "b": -2.5e3}')],
    ),
    (f"<tool_call>{ADD}</tool_call> Done. ", [*call(0, "add", '{"a": 1, "b": -2.5e3}'), *content("Done. ")]),
    ('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', call(0, "add", '{"a": 1}')),
    ('<tool_call>{"id": [1, {"x": "}"}], "name": "add", "arguments": {}}</tool_call>', call(0, "add", "{}")),
    ('<tool_call>{"name": "nothing"}</tool_call>', call(0, "nothing", "{}")),
    ('<tool_call>{"name": "nothing", "arguments": null}</tool_call>', call(0, "nothing", "{}")),
    ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', call(0, "add", '{"a": 1}')),
    ('<tool_call>{"name": "add", "arguments": {"a": 1}, "arguments": {}}</tool_call>', call(0, "add", '{"a": 1}')),
    ("a" + " " * 300 + f"<tool_call>{ADD}", [*content("a" + " " * 44), *call(0, "add", '{"a": 1, "b": -2.5e3}')]),
    # None of these is a call: the model's text is kept.
    ("<tool_call>", content("<tool_call>")),
    ("a <tool_cal", content("a <tool_cal")),
    ("<tool_call>hello</tool_call>", content("<tool_call>hello</tool_call>")),
    ('x\n<tool_call>\n{"name": "add"', content('x\n<tool_call>\n{"name": "add"')),
    (RM, content(RM)),
    ('<tool_call>{"name": "add", "arguments": [1]}', content('<tool_call>{"name": "add", "arguments": [1]}')),
    ('<tool_call>{"name": "add", "arguments": 12}', content('<tool_call>{"name": "add", "arguments": 12}')),
    ('<tool_call>{"name": "add", "arguments": }', content('<tool_call>{"name": "add", "arguments": }')),
    ('<tool_call>{"name": 3}', content('<tool_call>{"name": 3}')),
    ('<tool_call>{"name": "a\\ud800dd"}', content('<tool_call>{"name": "a\\ud800dd"}')),
    (LONE, content(LONE)),
    (UNCLOSED, content(UNCLOSED)),
    (f"<tool_call>{{<tool_call>{ADD}", [*content("<tool_call>{"), *call(0, "add", '{"a": 1, "b": -2.5e3}')]),
    # The model ended within its arguments, so the intended call is not known.
    (BROKEN, content(BROKEN)),
    ('<tool_call>{"name": "add", "arguments": {"a": 1}', call(0, "add", '{"a": 1}')),
    ('<tool_call>{"name": "add", "arguments": {"a": 1}, oops', [*call(0, "add", '{"a": 1}'), *content("oops")]),
]  # fmt: skip


@pytest.mark.sweep(16)
@pytest.mark.parametrize(("text", "expected"), HERMES)
def test_hermes_parser_splits_content_and_calls(text: str, expected: list[Part]) -> None:
    check_every_cut(lambda: HermesFormat().parser(NAMES), text, expected)


LLAMA = [
    ("Just text { with braces }", content("Just text { with braces }")),
    (WEATHER.replace("arguments", "parameters"), call(0, "get_weather", ARGUMENTS)),
    (f"\n<|python_tag|>{ADD}", call(0, "add", '{"a": 1, "b": -2.5e3}')),
    (f"{ADD}; {ADD}", [*call(0, "add", '{"a": 1, "b": -2.5e3}'), *call(1, "add", '{"a": 1, "b": -2.5e3}')]),
    (f"{ADD}\n{ADD}\n", [*call(0, "add", '{"a": 1, "b": -2.5e3}'), *call(1, "add", '{"a": 1, "b": -2.5e3}')]),
    (f"{ADD};\nand so on", [*call(0, "add", '{"a": 1, "b": -2.5e3}'), *content("and so on")]),
    ('{"name": "Bob", "age": 3}', content('{"name": "Bob", "age": 3}')),
    ('{"age": 3} ', content('{"age": 3} ')),
    (f"Text first {ADD}", [*content("Text first"), *call(0, "add", '{"a": 1, "b": -2.5e3}')]),
    (f"```json\n{ADD}\n```", [*content("```json"), *call(0, "add", '{"a": 1, "b": -2.5e3}'), *content("```")]),
    (
        f"{ADD}\nThen:\n {{ 'x' }} {ADD};{ADD} Yes.",
        [
            *call(0, "add", '{"a": 1, "b": -2.5e3}'),
            *content("Then:\n { 'x' }"),
            *call(1, "add", '{"a": 1, "b": -2.5e3}'),
            *call(2, "add", '{"a": 1, "b": -2.5e3}'),
            *content("Yes."),
        ],
    ),
    (f"So: <|python_tag|>{ADD}", [*content("So:"), *call(0, "add", '{"a": 1, "b": -2.5e3}')]),
    ('So: {"type": "function", "name" : "add", "parameters": {}}', [*content("So:"), *call(0, "add", "{}")]),
    ('So: {"name"        : "add", "parameters": {}}', [*content("So:"), *call(0, "add", "{}")]),
    ('So: {"name"         : "add", "parameters": {}}', content('So: {"name"         : "add", "parameters": {}}')),
    ('As {"name": "Bob"}, {"name": "addition"}', content('As {"name": "Bob"}, {"name": "addition"}')),
    ('int add() { return {"name", 1}; }', content('int add() { return {"name", 1}; }')),
    ('See {"parameters": {}, "name": "add"}', content('See {"parameters": {}, "name": "add"}')),
    ("<|python_tag|>print(1)", content("<|python_tag|>print(1)")),
    # An object within a text that names a tool without arguments directly after the name describes the tool.
    *(
        (text, content(text))
        for text in (
            'The tools are: {"tools": [{"name": "add", "cost": 1}, {"name": "nothing"}]}',
            'See {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}',
            '```json\n{"name": "get_weather", "tags": []}\n```',
            'As {"name": "add", "parameters": "a"}, {"name": "add", "arguments": null}',
        )
    ),
    (
        f'So: {ADD}; {{"name": "add", "cost": 1}}',
        [*content("So:"), *call(0, "add", '{"a": 1, "b": -2.5e3}'), *content('{"name": "add", "cost": 1}')],
    ),
]


@pytest.mark.sweep(16)
@pytest.mark.parametrize(("text", "expected"), LLAMA)
def test_llama_parser_splits_content_and_calls(text: str, expected: list[Part]) -> None:
    check_every_cut(lambda: LlamaFormat().parser(NAMES), text, expected)


MISTRAL = [
    ("Just [text]", content("Just [text]")),
    (f"[TOOL_CALLS] [{WEATHER}]", call(0, "get_weather", ARGUMENTS)),
    (
        f"Well:[TOOL_CALLS][{ADD}, {WEATHER}]\n",
        [*content("Well:"), *call(0, "add", '{"a": 1, "b": -2.5e3}'), *call(1, "get_weather", ARGUMENTS)],
    ),
    (f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}", call(0, "get_weather", ARGUMENTS)),
    (f"[TOOL_CALLS]get_weather{ARGUMENTS}", call(0, "get_weather", ARGUMENTS)),
    (
        f'[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{{"a": 1}}[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}',
        [*call(0, "add", '{"a": 1}'), *call(1, "get_weather", ARGUMENTS)],
    ),
    ('[TOOL_CALLS]add[ARGS]{"a": [', content('[TOOL_CALLS]add[ARGS]{"a": [')),
    ('[TOOL_CALLS]rm[ARGS]{"a": 1}', content('[TOOL_CALLS]rm[ARGS]{"a": 1}')),
    ("[TOOL_CALLS]add", content("[TOOL_CALLS]add")),
    ("[TOOL_CALLS]" + "a" * 300 + "{}", content("[TOOL_CALLS]" + "a" * 300 + "{}")),
    ("[TOOL_CALLS][1]", content("[TOOL_CALLS][1]")),
    (f"[TOOL_CALLS] {ADD}", call(0, "add", '{"a": 1, "b": -2.5e3}')),
    (f"[TOOL_CALLS][{ADD}, 7]", [*call(0, "add", '{"a": 1, "b": -2.5e3}'), *content(", 7]")]),
]


@pytest.mark.parametrize(("text", "expected"), MISTRAL)
def test_mistral_parser_splits_content_and_calls(text: str, expected: list[Part]) -> None:
    check_every_cut(lambda: MistralFormat().parser(NAMES), text, expected)


def test_only_one_returns_first_call_only() -> None:
    text = f"<tool_call>{ADD}</tool_call><tool_call>{WEATHER}</tool_call>"
    check_every_cut(lambda: HermesFormat().parser(NAMES, only_one=True), text, call(0, "add", '{"a": 1, "b": -2.5e3}'))


REASONING = [
    ("Just text", False, content("Just text")),
    ("<think>\nHm, </thin\n</think>\n\nYes. ", False, [Part("reasoning", "Hm, </thin"), *content("Yes. ")]),
    ("Hm.\n\nSo.\n</think>\nYes.", True, [Part("reasoning", "Hm.\n\nSo."), *content("Yes.")]),
    ("\n<think>\n\n</think>\n\nYes.", False, content("Yes.")),
    ("<think>cut off  ", False, [Part("reasoning", "cut off")]),
    ("cut off </thi", True, [Part("reasoning", "cut off </thi")]),
    ("a <think>b</think>", False, content("a <think>b</think>")),
    ("  <thin", False, content("  <thin")),
    ("<think>a</think>", False, [Part("reasoning", "a")]),
    ("", True, []),
    (" " * 256 + "<think>a</think>b", False, [Part("reasoning", "a"), *content("b")]),
    (" " * 257 + "<think>a</think>b", False, content(" " * 257 + "<think>a</think>b")),
    ("<think>a" + " " * 300 + "</think>b", False, [Part("reasoning", "a" + " " * 44), *content("b")]),
]


@pytest.mark.parametrize(("text", "is_open", "expected"), REASONING)
def test_reasoning_parser_splits_reasoning_and_content(text: str, is_open: bool, expected: list[Part]) -> None:
    check_every_cut(lambda: ReasoningParser(PlainParser(), is_open=is_open), text, expected)


@pytest.mark.sweep(16)
@pytest.mark.parametrize("form", REASONING_FORMS, ids=lambda form: form.name)
def test_every_reasoning_form_splits_reasoning_content_and_call(form: ReasoningForm) -> None:
    def make(*, is_open: bool) -> AnswerParser:
        return ReasoningParser(HermesFormat().parser(NAMES), is_open=is_open, form=form)

    thought = f"Hm, {form.closes[:-1]}\n{form.opens}."
    text = f"{form.opens}\n{thought}\n{form.closes}\n\nYes. <tool_call>\n{ADD}\n</tool_call>"
    expected = [Part("reasoning", thought), *content("Yes."), *call(0, "add", '{"a": 1, "b": -2.5e3}')]
    check_every_cut(lambda: make(is_open=False), text, expected)
    check_every_cut(lambda: make(is_open=True), text.removeprefix(form.opens), expected)
    check_every_cut(lambda: make(is_open=False), f"No. {text}"[: 4 + len(form.opens)], content(f"No. {form.opens}"))


def test_tool_call_marker_inside_reasoning_is_text() -> None:
    text = f"<think>I call <tool_call>.</think>\n\n<tool_call>\n{ADD}\n</tool_call>"
    expected = [Part("reasoning", "I call <tool_call>."), *call(0, "add", '{"a": 1, "b": -2.5e3}')]
    check_every_cut(lambda: ReasoningParser(HermesFormat().parser(NAMES), is_open=False), text, expected)


def test_random_arguments_are_returned_verbatim() -> None:
    rng = random.Random(5)

    def value(depth: int) -> object:
        kind = rng.randrange(7 if depth else 5)
        if kind < 2:
            return "".join(rng.choice('ab"\\\n{}[],:</tool_call>狐 ') for _ in range(rng.randrange(8)))
        if kind < 5:
            return rng.choice([None, True, 3, -1.5e-7, 0])
        values = [value(depth - 1) for _ in range(rng.randrange(4))]
        return values if kind == 5 else {str(index): each for index, each in enumerate(values)}

    for _ in range(200):
        arguments = json.dumps({"a": value(3), "b": value(2)}, ensure_ascii=rng.random() < 0.5)
        text = f'Hm. <tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
        expected = [*content("Hm."), *call(0, "add", arguments)]
        assert read(lambda: HermesFormat().parser(NAMES), [text]) == expected
        cuts = sorted(rng.sample(range(len(text)), 9))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(lambda: HermesFormat().parser(NAMES), pieces) == expected


LLAMA_CALLS = f"{WEATHER}; {ADD}".replace('"arguments"', '"parameters"')
HERMES_CALLS = f"<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{ADD}\n</tool_call>"
# Parser, answer, and its content; the rest of the answer is two calls.
CALLS: dict[str, tuple[type[ToolFormat], str, str]] = {
    "hermes": (HermesFormat, f"I look.\n{HERMES_CALLS}", "I look.\n"),
    "hermes, calls alone": (HermesFormat, HERMES_CALLS, ""),
    "llama": (LlamaFormat, LLAMA_CALLS, ""),
    "llama with its tag": (LlamaFormat, f"<|python_tag|>{LLAMA_CALLS}", ""),
    "mistral": (MistralFormat, f"Well:[TOOL_CALLS][{WEATHER}, {ADD}]", "Well:"),
    "mistral with names": (
        MistralFormat,
        f'[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{{"a": 1, "b": -2.5e3}}',
        "",
    ),
}


@pytest.mark.sweep(8)
@pytest.mark.parametrize("family", CALLS)
def test_truncated_call_never_appears_in_content(family: str) -> None:
    """Every cut is tried: in the opener, in the name, before the arguments, within them, and after them."""
    make, text, before = CALLS[family]
    whole = [("get_weather", ARGUMENTS), ("add", '{"a": 1, "b": -2.5e3}')]
    num_calls = set()
    for cut in range(len(text) + 1):
        parts = read(lambda: make().parser(NAMES), [text[:cut]], is_cut=True)
        assert read(lambda: make().parser(NAMES), list(text[:cut]), is_cut=True) == parts, f"cut at {cut}"
        told = "".join(part.text for part in parts if part.kind == "content")
        assert before.startswith(told), f"cut at {cut}"
        names = [part.text for part in parts if part.kind == "call"]
        assert names == [name for name, _ in whole[: len(names)]]
        for index, (_, arguments) in enumerate(whole[: len(names)]):
            begun = "".join(part.text for part in parts if part.kind == "arguments" and part.call == index)
            assert arguments.startswith(begun)
            assert begun == arguments or index == len(names) - 1
        num_calls.add(len(names))
    assert num_calls == {0, 1, 2}


CUT_OFF = [
    # The name is known: the client gets the call without arguments.
    (HermesFormat, 'x\n<tool_call>\n{"name": "add"', [*content("x"), Part("call", "add", 0)]),
    (HermesFormat, '<tool_call>{"name": "add", "arguments": ', [Part("call", "add", 0)]),
    (HermesFormat, '<tool_call>{"arguments": {"a": 1}, "name": "add"', call(0, "add", '{"a": 1}')),
    (MistralFormat, "[TOOL_CALLS]add[ARGS]", [Part("call", "add", 0)]),
    (LlamaFormat, '{"type": "function", "name": "add", "para', [Part("call", "add", 0)]),
    (HermesFormat, '<tool_call>{"name": "rm', []),
    (MistralFormat, "[TOOL_CALLS]ad", []),
    # A text that cannot be a call is content, as without a cut.
    (HermesFormat, "<tool_call>hello", content("<tool_call>hello")),
    (HermesFormat, '<tool_call>{"name": "rm", "arguments": {"a', content('<tool_call>{"name": "rm", "arguments": {"a')),
    (HermesFormat, "a < b", content("a < b")),
    (MistralFormat, "[TOOL_CALLS] is what opens a call", content("[TOOL_CALLS] is what opens a call")),
    (LlamaFormat, '{"name": "Bob', content('{"name": "Bob')),
    (LlamaFormat, '{"age": 3, "name"', content('{"age": 3, "name"')),
    (LlamaFormat, "<|python_tag|>print(", content("<|python_tag|>print(")),
    (LlamaFormat, "<b>bold", content("<b>bold")),
    (LlamaFormat, "<|python_tag|> ", []),
]


@pytest.mark.parametrize(("make", "text", "expected"), CUT_OFF)
def test_truncated_answer_yields_expected_parts(make: type[ToolFormat], text: str, expected: list[Part]) -> None:
    assert read(lambda: make().parser(NAMES), [text], is_cut=True) == expected
    assert read(lambda: make().parser(NAMES), list(text), is_cut=True) == expected


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("  <thin", False, content("  ")),
        ("<think>Hm.</thi", False, [Part("reasoning", "Hm.")]),
        ("Hm.\n</", True, [Part("reasoning", "Hm.")]),
        ("<think>Hm.</think>\n\n<tool", False, [Part("reasoning", "Hm.")]),
        ("a <", False, content("a")),
    ],
)
def test_truncated_reasoning_drops_incomplete_marker(text: str, is_open: bool, expected: list[Part]) -> None:
    def make() -> AnswerParser:
        return ReasoningParser(HermesFormat().parser(NAMES), is_open=is_open)

    assert read(make, [text], is_cut=True) == expected
    assert read(make, list(text), is_cut=True) == expected


@pytest.mark.sweep(36)
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("make", [HermesFormat, LlamaFormat, MistralFormat])
def test_random_garbage_parses_equally_whole_and_by_character(make: type[ToolFormat], part: int) -> None:
    rng = random.Random(f"7 {part}")
    words = [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        '"name"',
        '"add"',
        '"arguments"',
    ]
    words += [":", ",", "{", "}", "[", "]", '"', "\\", " ", "\n", "x", "1", ";", "add", WEATHER, ADD]
    for _ in range(500):
        text = "".join(rng.choice(words) for _ in range(rng.randrange(1, 14)))
        for is_cut in (False, True):
            whole = read(lambda: make().parser(NAMES), [text], is_cut=is_cut)
            assert read(lambda: make().parser(NAMES), list(text), is_cut=is_cut) == whole, text
