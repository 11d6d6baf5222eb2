"""Every family's calls are written, accepted by its grammar, and read back, for every cut of the text."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from call_grammars import Grammars
from fakes import FakeChatTemplate, FakeExecutor
from running import run_server

from octavo.sampling_params import StructuredOutputsParams
from octavo.server.answers import template_probe
from octavo.server.answers.gemma_calls import GemmaFormat
from octavo.server.answers.generic_calls import GenericFormat
from octavo.server.answers.harmony import HarmonyFormat
from octavo.server.answers.known_formats import FORMATS, find_tool_format
from octavo.server.answers.object_calls import GigaChat3Format
from octavo.server.answers.parts import Part, joined
from octavo.server.answers.python_calls import LFM2Format, PythonicFormat
from octavo.server.answers.reasoning_forms import REASONING_FORMS
from octavo.server.answers.tagged_calls import Qwen3CoderFormat, TaggedFormat
from octavo.server.answers.tool_format import Function
from octavo.server.answers.tool_formats import HermesFormat, LlamaFormat

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.server.answers.parts import ReasoningForm
    from octavo.server.answers.tool_format import ToolFormat

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "deep": {"type": "object"},
        "is_long": {"type": "boolean"},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = [Function("get_weather", WEATHER), Function("now", NOTHING)]
DEEP = {"a": ["x", {"b": None}, 1.5], "ü": '狐"\\'}
WHOLE: dict[str, Any] = {"city": 'Rö"me\n\n {[, \\n <b>', "days": -2, "deep": DEEP, "is_long": True, "unit": "F"}
CALLS: list[tuple[str, dict[str, Any]]] = [("get_weather", WHOLE), ("now", {}), ("get_weather", {"city": ""})]
ALONE = {"openai", "muse_glimmer"}  # calls are the whole answer
each_format = pytest.mark.parametrize("family", FORMATS, ids=lambda family: family.__name__)


def read(form: ToolFormat, pieces: list[str], *, is_cut: bool = False, only_one: bool = False) -> list[Part]:
    parser = form.parser(FUNCTIONS, only_one=only_one)
    return joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish(is_cut=is_cut))


def told(parts: list[Part]) -> tuple[str, list[tuple[str, str]]]:
    """Return the content, and the calls with their arguments."""
    calls = [(part.text, "".join(p.text for p in parts if p.kind == "arguments" and p.call == part.call))
             for part in parts if part.kind == "call"]  # fmt: skip
    return "".join(part.text for part in parts if part.kind == "content"), calls


def valued(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.sweep(16)
@each_format
def test_written_calls_are_parsed_whole_and_by_character(family: type[ToolFormat]) -> None:
    form = family()
    for before in ("", "I look.\n"):
        if before and form.name in ALONE:
            continue
        text = before + form.write(CALLS)
        whole = read(form, [text])
        content, calls = told(whole)
        assert content.rstrip() == before.rstrip()
        assert valued(calls) == CALLS
        assert read(form, list(text)) == whole
        assert valued(told(read(form, [text], only_one=True))[1]) == CALLS[:1]


@pytest.mark.sweep(24)
@each_format
def test_written_calls_are_parsed_at_every_cut(family: type[ToolFormat]) -> None:
    form = family()
    text = form.write(CALLS)
    whole = read(form, [text])
    for cut in range(1, len(text)):
        assert read(form, [text[:cut], text[cut:]]) == whole, f"cut at {cut}"


@pytest.mark.sweep(48)
@each_format
def test_cut_tool_call_is_not_content(family: type[ToolFormat]) -> None:
    form = family()
    before = "" if form.name in ALONE else "I look.\n"
    text = before + form.write(CALLS)
    expected = told(read(form, [text]))[1]
    seen = set()
    for cut in range(len(text) + 1):
        parts = read(form, [text[:cut]], is_cut=True)
        if cut % 8 == 0 or cut == len(text):  # character by character takes most of the time
            assert read(form, list(text[:cut]), is_cut=True) == parts, f"cut at {cut}"
        content, calls = told(parts)
        assert before.startswith(content), f"cut at {cut}"
        for (name, arguments), (whole_name, whole_arguments) in zip(calls, expected, strict=False):
            assert name == whole_name
            assert whole_arguments.startswith(arguments), f"cut at {cut}"
        seen.add(len(calls))
    assert seen == {0, 1, 2, 3}


@each_format
def test_invalid_calls_are_content(family: type[ToolFormat]) -> None:
    form = family()
    unknown = form.write([("rm", {"city": "Rome"})])
    begun = form.write([("get_weather", {})]).partition("get_weather")[0]
    if form.reads_reasoning:  # messages to unknown functions are emitted without their heads
        content, calls = told(read(form, [unknown]))
        assert ("Rome" in content, "<|message|>" in content, calls) == (True, False, [])
        unknown = ""
    for text in (unknown, f"{begun}get_weather?", f"{begun}!", f"a {begun}", "a < b [c] {d} (e)", ""):
        assert read(form, [text]) == ([Part("content", text)] if text else []), text
        assert read(form, list(text)) == read(form, [text])


@pytest.mark.sweep(48)
@each_format
def test_garbage_is_parsed_equally_whole_and_by_character(family: type[ToolFormat]) -> None:
    form, rng = family(), random.Random(7)
    text = form.write(CALLS)
    words = [
        *"\"'\\{}[]()<>=:,; \n",
        *form.markers,
        "get_weather",
        "now",
        "city",
        "x",
        '"name"',
        form.write(CALLS[1:2]),
    ]
    for _ in range(100):
        pieces = [rng.choice(words) for _ in range(rng.randrange(1, 8))]
        start, end = sorted(rng.sample(range(len(text)), 2))
        garbage = "".join([text[:start], *pieces, text[end:]] if rng.random() < 0.7 else pieces)
        for is_cut in (False, True):
            assert read(form, list(garbage), is_cut=is_cut) == read(form, [garbage], is_cut=is_cut), garbage


@pytest.fixture(scope="module", params=["plain", "special"])
def grammars_of(request: pytest.FixtureRequest) -> Callable[[type[ToolFormat]], Grammars]:
    return cache(lambda family: Grammars(request.param, [*family.markers]))


PLAIN = {"city": 'Rö"me <b>', "days": 3, "deep": {"a": [1, "x"]}, "is_long": False, "unit": "F"}


@pytest.mark.sweep(32)
@each_format
def test_grammars_accept_written_calls_and_enforce_schema(
    grammars_of: Callable[[type[ToolFormat]], Grammars], family: type[ToolFormat]
) -> None:
    grammars = grammars_of(family)
    form = family(grammars.token_name)
    one, two = form.write([("get_weather", PLAIN)]), form.write([("get_weather", {"city": "Rome"}), ("now", {})])
    wrongs = [{"city": "Rome", "days": "two"}, {"days": 2}, {"city": "Rome", "unit": "K"}, {"city": "R", "other": "x"}]
    wrong = [form.write([("get_weather", arguments)]) for arguments in wrongs]
    for only_one in (False, True):
        forced = StructuredOutputsParams(grammar=form.forced(FUNCTIONS, only_one=only_one))
        optional = StructuredOutputsParams(grammar=form.optional(FUNCTIONS, only_one=only_one))
        for structure in (forced, optional):
            assert grammars.accepts(structure, one)
            assert grammars.accepts(structure, two) is not only_one
            for text in wrong:
                assert not grammars.accepts(structure, text), text
        assert grammars.accepts(optional, "Hello.")
        assert not grammars.accepts(forced, "Hello.")
        if form.name not in ALONE:
            assert grammars.accepts(optional, "I look.\n" + one)
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    either = StructuredOutputsParams(grammar=form.or_content(FUNCTIONS, schema, only_one=False))
    assert grammars.accepts(either, one)
    assert grammars.accepts(either, '{"a": 1}')
    assert not grammars.accepts(either, '{"a": "b"}')


@pytest.mark.sweep(16)
@each_format
def test_open_parameter_schema_accepts_any_arguments(
    grammars_of: Callable[[type[ToolFormat]], Grammars], family: type[ToolFormat]
) -> None:
    grammars = grammars_of(family)
    form = family(grammars.token_name)
    free = [Function("get_weather", {"type": "object"}), Function("now", {"type": "object"})]
    structure = StructuredOutputsParams(grammar=form.optional(free, only_one=False))
    for arguments in (PLAIN, {}, {"other": [1, 2], "x": "y"}):
        assert grammars.accepts(structure, form.write([("now", arguments)])), arguments


@pytest.mark.sweep(16)
@pytest.mark.parametrize("form", REASONING_FORMS, ids=lambda form: form.name)
def test_forced_call_follows_every_reasoning_form(form: ReasoningForm) -> None:
    family = HarmonyFormat if form.name == "openai_gptoss" else HermesFormat
    marks = [*family.markers, *(mark for mark in re.findall(r"[<\[]\S+?[>\]]", form.opens + form.closes))]
    grammars = Grammars("special", [*dict.fromkeys(marks)])
    tools = family(grammars.token_name)
    grammar = tools.forced(FUNCTIONS, only_one=True)
    behind = StructuredOutputsParams(grammar=grammar, starts_after=form.closes, free_from=form.opens)
    call = tools.write([("get_weather", {"city": "Rome"})])
    turn = "<|start|>assistant" if tools.frames_content else ""
    assert grammars.accepts(behind, call)
    assert grammars.accepts(behind, f"{form.opens}Hm.{form.closes}{turn}{call}")
    for wrong in (f"{form.opens}Hm.{call}", f"{form.opens}Hm.{form.closes}{turn}No.", "No."):
        assert not grammars.accepts(behind, wrong), wrong


def test_gigachat3_section_contains_one_call() -> None:
    call = GigaChat3Format().write([("now", {})])
    text = call + '{"name": "now", "arguments": {}}'
    expected = [Part("call", "now"), Part("arguments", "{}"), Part("content", text.removeprefix(call))]
    assert read(GigaChat3Format(), [text]) == expected
    assert read(GigaChat3Format(), list(text)) == expected


HARMONY = [
    ("<|channel|>final<|message|>Hello.", [Part("content", "Hello.")]),
    ("<|channel|>commentary<|message|>Hello.<|end|>", [Part("content", "Hello.")]),
    (
        "<|channel|>analysis<|message|>I\nthink<|end|><|start|>assistant<|channel|>final<|message|>Yes <b>.<|return|>",
        [Part("reasoning", "I\nthink"), Part("content", "Yes <b>.")],
    ),
    (" to=functions.now<|channel|>analysis<|message|>{}", [Part("call", "now"), Part("arguments", "{}")]),
    (
        "<|channel|>analysis to=functions.now <|constrain|>json<|message|>{}<|call|>",
        [Part("call", "now"), Part("arguments", "{}")],
    ),
    ("Hello, no head.", [Part("content", "Hello, no head.")]),
    (
        "<|channel|>commentary to=python<|message|>print(1)<|call|>",
        [Part("content", "print(1)")],
    ),
    (
        (
            '<|channel|>analysis to=browser.search <|constrain|>json<|message|>{"a": 1}<|call|><|start|>assistant'
            "<|channel|>final<|message|>Yes."
        ),
        [Part("reasoning", '{"a": 1}'), Part("content", "Yes.")],
    ),
    (
        ' to=functions.rm<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>',
        [Part("content", '{"a": 1}')],
    ),
    ("<|channel|>commentary to=functions.now<|message|> now!<|call|>", [Part("content", " now!")]),
    (
        (
            "commentary?<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
            "<|channel|>final<|message|>Yes.<|return|>"
        ),
        [Part("content", "commentary?"), Part("reasoning", "Hm."), Part("content", "Yes.")],
    ),
    (
        "<|channel|>analysis<|message|>Hm<|end|>assistant<|channel|>final<|message|>Hello<|return|>",
        [Part("reasoning", "Hm"), Part("content", "Hello")],
    ),
    (
        "<|channel|>analysis<|message|>Hm<|start|>assistant<|channel|>final<|message|>Hi",
        [Part("reasoning", "Hm"), Part("content", "Hi")],
    ),
    ("final Hello<|return|>", [Part("content", "final Hello")]),
    ("final<|message|>Hello<|return|>", [Part("content", "Hello")]),
    ("commentary to=functions.now<|message|>{}<|call|>", [Part("call", "now"), Part("arguments", "{}")]),
    ("commentary to=functions.rm<|message|>{}<|call|>", [Part("content", "{}")]),
    ("commentary to=the point", [Part("content", "commentary to=the point")]),
    ("<|channel|>final Hello<|return|>", [Part("content", "Hello")]),
    (
        "<|channel|>analysis Hm.<|end|><|start|>assistant<|channel|>final Hello<|return|>",
        [Part("reasoning", "Hm."), Part("content", "Hello")],
    ),
    (
        "<|channel|>analysis Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.now<|message|>{}<|call|>",
        [Part("reasoning", "Hm."), Part("call", "now"), Part("arguments", "{}")],
    ),
]


@pytest.mark.parametrize(("text", "expected"), HARMONY)
def test_gpt_oss_messages_are_parsed_at_every_cut(text: str, expected: list[Part]) -> None:
    assert read(HarmonyFormat(), [text]) == expected
    assert read(HarmonyFormat(), list(text)) == expected
    for cut in range(1, len(text)):
        assert read(HarmonyFormat(), [text[:cut], text[cut:]]) == expected, f"cut at {cut}"


def test_gpt_oss_reasoning_is_separated_without_tools() -> None:
    template = FakeChatTemplate("<|channel|>analysis<|message|>")
    answer = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    options = {"chat_template": template}
    running = run_server(FakeExecutor(answer=answer), engine_options=options, tool_call_parser="openai")
    with running as server, server.http() as http:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hm?"}]}
        message = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm.")
        refused = http.post("/v1/chat/completions", json={**body, "structured_outputs": {"regex": "a"}})
        assert refused.status_code == 400


SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {"town": {"type": "string"}},
    "properties": {
        "text": {"$ref": "#/$defs/town"},
        "count": {"type": "integer"},
        "share": {"type": ["number", "null"]},
        "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "flag": {"type": "boolean"},
        "amount": {"type": ["number", "string"]},
        "list": {"type": "array"},
        "code": {"enum": ["1", "2"]},
        "free": {},
    },
}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "12", "12"),
        ("text", " {} ", " {} "),
        ("count", " 12 ", 12),
        ("count", "a dozen", "a dozen"),
        ("share", "null", None),
        ("share", "None", None),
        ("share", "2", 2),
        ("either", "12", 12),
        ("either", "12 or so", "12 or so"),
        ("either", "true", "true"),
        ("flag", "True", True),
        ("amount", "2", 2),
        ("amount", "true", "true"),
        ("list", "['a', None, True]", ["a", None, True]),
        ("free", "{'a': True}", {"a": True}),
        ("list", '["a"]', ["a"]),
        ("code", "1", "1"),
        ("free", "1.5", 1.5),
        ("free", "<b>", "<b>"),
        ("other", "[]", []),
    ],
)
def test_bare_arguments_get_schema_types(key: str, text: str, value: Any) -> None:
    form, function = Qwen3CoderFormat(), Function("now", SCHEMA)
    written = f"<tool_call>\n<function=now>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    parser = form.parser([function])
    ((_, arguments),) = told(joined(parser.feed(written) + parser.finish()))[1]
    assert json.loads(arguments) == {key: value}


@pytest.mark.parametrize("text", ["[1, NaN]", "[" * 100_000, '["a', "['a' + 'b']", "<b>"])
def test_malformed_list_argument_makes_call_content(text: str) -> None:
    written = f"<tool_call>\n<function=now>\n<parameter=list>\n{text}\n</parameter>\n</function>\n</tool_call>"
    parser = Qwen3CoderFormat().parser([Function("now", SCHEMA)])
    assert told(joined(parser.feed(written) + parser.finish())) == (written, [])


PYTHON = [
    ("[now(a='it\\'s', b=\"\\u72d0 \\ud83d\\ude00\", c=None)]", {"a": "it's", "b": "狐 😀", "c": None}),
    ("[now(a=[1, -2.5e3, 0x10, 1_000], b=(True, False), c={'d': {}, \"e\": true,},)]",
     {"a": [1, -2500.0, 16, 1000], "b": [True, False], "c": {"d": {}, "e": True}}),
    (" [ now ( ) ] ", {}),
    ("I look: <b> [1] [ now(a=[1]) ]", {"a": [1]}),
    ("It [is](x). <|python_start|>[now(a=1)]<|python_end|>", {"a": 1}),
    ("[now(a='''it's\na''', b='a' 'b', c=r'\\d+', d=\"\"\"a\"b\"\"\")]",
     {"a": "it's\na", "b": "ab", "c": "\\d+", "d": 'a"b'}),
    ("[now(a=-1, b='\\d', c=u'x', d=('a'\n'b'), e='', f=\"\\/\")]",
     {"a": -1, "b": "\\d", "c": "x", "d": "ab", "e": "", "f": "/"}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), PYTHON)
def test_python_values_are_parsed(text: str, value: Any) -> None:
    whole = read(PythonicFormat(), [text])
    assert read(PythonicFormat(), list(text)) == whole
    assert valued(told(whole)[1]) == [("now", value)]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (PythonicFormat, "<|python_start|>[now(1)]"),
        (PythonicFormat, "[now(a=1, b=__import__('os'))]"),
        (PythonicFormat, "[now(a=" + "[" * 199 + "]" * 199 + ")]"),
        (PythonicFormat, "[now(a=1 + 1)]"),
        (PythonicFormat, "[now(a=1\u0662)]"),
        (PythonicFormat, "[now(a='it is"),
        (PythonicFormat, "[now(a='it\nis)]"),
        (PythonicFormat, "[now(a=f'{x}')]"),
        (PythonicFormat, "[now(a=b'x')]"),
        (PythonicFormat, "[now(a='\\ud83d')]"),
        (PythonicFormat, "[now(a=1, a=2)]"),
        (PythonicFormat, "[now(a={'b': [1, (2, x)], 'c': 3})]"),
        (PythonicFormat, "[now(a={'b': 1, 'c"),
        (PythonicFormat, "[now(a={'b': 1, 2: 3})]"),
        (GemmaFormat, '<|tool_call>call:now{a:1,b:{<|"|>c<|"|>:<|"|>d'),
        (GemmaFormat, "<|tool_call>call:now{a:1,b:c}<tool_call|>"),
        (GemmaFormat, '<|tool_call>call:now{a:"it " is"}<tool_call|>'),
    ],
)
def test_broken_call_is_content(family: type[ToolFormat], text: str) -> None:
    """So no tool runs with a part of its arguments."""
    whole = read(family(), [text])
    assert read(family(), list(text)) == whole
    assert told(whole) == (text, [])


@pytest.mark.parametrize("family", [each for each in FORMATS if issubclass(each, TaggedFormat)])
def test_overlong_function_name_is_content(family: type[ToolFormat]) -> None:
    """A longer name is content, so a parser does not read it again from its beginning with every token."""
    form = family()
    before, _, _ = form.write([("get_weather", {})]).partition("get_weather")
    parser = form.parser(FUNCTIONS)
    parts = parser.feed(before + "get_weather" * 60)
    assert parts, "it is told before its end is known"
    assert {part.kind for part in parts + parser.finish()} == {"content"}


SEARCH = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"], "additionalProperties": False}
SEARCHES = [Function("search", SEARCH), Function("f", SEARCH)]
# Python code that names a tool and is no call
CODE = [
    "Use:\nhits = [search(q) for q in queries]",
    "for r in results[search(q=1)]:",
    "y = table[f(3)]",
    "y = table()[f(q=1)] + rows[0][f(q=1)]",
    "x = [f(q==3), f( q == 3)]",
    "z = [f() for _ in range(3)]",
    'Write `[f(q="a")]`, ``a` [f(q="a")]`` or\n```python\na = [f(q="a")]\n```\nto search.',
    "[search(q) for q in queries]",
]


@pytest.mark.parametrize("text", CODE)
def test_code_naming_tool_is_content(text: str) -> None:
    form = PythonicFormat()
    for pieces in ([text], list(text), *([text[:cut], text[cut:]] for cut in range(1, len(text)))):
        parser = form.parser(SEARCHES)
        parts = joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish())
        assert parts == [Part("content", text)], pieces


def test_pythonic_grammar_allows_code_naming_tool() -> None:
    grammars = Grammars("plain", [])
    grammar = PythonicFormat(grammars.token_name).optional(SEARCHES, only_one=False)
    structure = StructuredOutputsParams(grammar=grammar)
    for text in CODE[:4] + CODE[5:7]:
        assert grammars.accepts(structure, text), text
    for good in ('I look: [search(q="a")]', 'It`s\nso: [search(q="a"), f(q="b")]', 'See `x` [1].\n[ f( q="a")]'):
        assert grammars.accepts(structure, good), good
    for wrong in ("I look: [search(q=1)]", "I look: [search()]", 'I look: [search(r="a")]', "a [f(\n          q=1)]",
                  "I look: [search(), f()]", 'a [f(r=1), ] [f(q="a")]'):  # fmt: skip
        assert not grammars.accepts(structure, wrong), wrong
    nothing = StructuredOutputsParams(grammar=PythonicFormat(grammars.token_name).optional(FUNCTIONS, only_one=False))
    for good in ("I look: [now()]", 'I look: [now(), get_weather(city="a", days=2)]'):
        assert grammars.accepts(nothing, good), good
    for wrong in ("I look: [now(a=1)]", "I look: [now(), get_weather(city=2)]", "I look: [get_weather(days=2)]"):
        assert not grammars.accepts(nothing, wrong), wrong


PROBE = json.dumps(template_probe.ARGUMENTS)
CITY = template_probe.ARGUMENTS["city"]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (f'<tool_call>{{"arguments": {PROBE}, "name": "{template_probe.NAME}"}}</tool_call>', HermesFormat),
        (f'<tool_call>{{"arguments": {{"town": "{CITY}"}}, "name": "{template_probe.NAME}"}}</tool_call>', None),
        (f'{{"arguments": {PROBE}, "name": "{template_probe.NAME}"}}', LlamaFormat),
    ],
)
def test_unusual_template_call_selects_format_that_parses_it(written: str, expected: type[ToolFormat] | None) -> None:
    """The format is the one that reads the call with its arguments and has its marks in the text."""
    found = find_tool_format("auto", [written], written, lambda _: None)
    assert type(found) is (expected or GenericFormat)


def test_python_grammars_require_capitalized_booleans() -> None:
    function = Function("f", {"properties": {"a": {"type": "boolean"}}, "required": ["a"]})
    for family in (LFM2Format, PythonicFormat):
        grammars = Grammars("plain", [*family.markers])
        forced = StructuredOutputsParams(grammar=family(grammars.token_name).forced([function], only_one=True))
        assert grammars.accepts(forced, family().write([("f", {"a": True})]))
        assert not grammars.accepts(forced, family().write([("f", {"a": True})]).replace("True", "true"))


def test_pythonic_call_in_text_may_omit_optional_arguments() -> None:
    properties = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    grammars = Grammars("plain", [*PythonicFormat.markers])
    form = PythonicFormat(grammars.token_name)
    optional = StructuredOutputsParams(
        grammar=form.optional([Function("f", {"properties": properties})], only_one=True)
    )
    for call in ("[f(a=1, b=2)]", "[f(a=1)]", "[f(b=2)]", "[f()]"):
        assert grammars.accepts(optional, f"It is {call}"), call
    assert not grammars.accepts(optional, "It is [f(b=2, a=1)]")


def test_tag_grammar_allows_only_declared_arguments() -> None:
    schema = {"properties": {"a": {"type": "string"}}, "additionalProperties": True}
    grammars = Grammars("plain", [*Qwen3CoderFormat.markers])
    form = Qwen3CoderFormat(grammars.token_name)
    forced = StructuredOutputsParams(grammar=form.forced([Function("f", schema)], only_one=True))
    assert grammars.accepts(forced, form.write([("f", {"a": "x"})]))
    assert not grammars.accepts(forced, form.write([("f", {"a": "x", "b": "y"})]))
