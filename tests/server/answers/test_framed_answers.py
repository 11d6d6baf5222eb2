"""Answers with marks around their content: those of Kimi K3, Solar Open, Muse Glimmer and Functionary 3.2."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from call_grammars import Grammars
from fakes import FakeChatTemplate, FakeExecutor
from running import run_server

from octavo.sampling_params import StructuredOutputsParams
from octavo.server.answers.answer_form import AnswerForm, AnswerStyle
from octavo.server.answers.kimi_k3 import KimiK3Format
from octavo.server.answers.known_formats import FORMATS
from octavo.server.answers.muse_glimmer import MuseGlimmerFormat
from octavo.server.answers.named_calls import SolarFormat
from octavo.server.answers.parts import Part, ReasoningParser, joined
from octavo.server.answers.reasoning_forms import find_reasoning_form
from octavo.server.answers.recipients import RecipientsFormat
from octavo.server.answers.tool_format import Function
from octavo.server.answers.tools import NO_TOOLS

if TYPE_CHECKING:
    import httpx

ARGUMENTS = {"type": "object", "properties": {"arg1": {"type": "integer"}}, "required": ["arg1"]}
FUNCTIONS = [Function("special", ARGUMENTS), Function("python", {"properties": {"code": {"type": "string"}}})]
RESPONSE, END = "<|open|>response<|sep|>", "<|close|>response<|sep|>"
CALL = (
    '<|open|>call tool="special" index="1"<|sep|><|open|>argument key="arg1" type="number"<|sep|>1'
    "<|close|>argument<|sep|><|close|>call<|sep|>"
)
CODE = (
    '<|open|>call tool="python" index="2"<|sep|><|open|>argument key="code" type="string"<|sep|>1 < 2'
    "<|close|>argument<|sep|><|close|>call<|sep|>"
)
TOOLS, TOOLS_END, OVER = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>", "<|close|>message<|sep|>"
ATEM = (
    '<atem:function_calls>\n<atem:invoke name="special">\n<atem:parameter name="arg1">1</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>"
)
SPECIAL = [Part("call", "special"), Part("arguments", '{"arg1": 1}')]
THOUGHT = Part("reasoning", "I think")


def content(text: str) -> Part:
    return Part("content", text)


ANSWERS = [
    ("kimi_k3", f"{RESPONSE}Hello.\nYes{END}{OVER}", [content("Hello.\nYes")]),
    ("kimi_k3", f"Hello.{END}{OVER}", [content("Hello.")]),  # the prompt opened the response
    ("kimi_k3", f"I think<|close|>think<|sep|>{RESPONSE}Yes{END}{OVER}", [THOUGHT, content("Yes")]),
    ("kimi_k3", f"I think<|close|>think<|sep|>{RESPONSE}On it.{END}{TOOLS}{CALL}{TOOLS_END}{OVER}",
     [THOUGHT, content("On it."), *SPECIAL]),
    ("kimi_k3", f"{RESPONSE}{END}{TOOLS}{CALL}{CODE}{TOOLS_END}{OVER}",
     [*SPECIAL, Part("call", "python", 1), Part("arguments", '{"code": "1 < 2"}', 1)]),
    ("kimi_k3", f"{TOOLS}{CALL.replace('special', 'other')}{TOOLS_END}",
     [content(f"{TOOLS}{CALL.replace('special', 'other')}{TOOLS_END}")]),
    ("kimi_k3", ('<|open|>tools<|sep|><|open|>call tool="python" index="1"<|sep|><|open|>argument '
     'key="a&amp;b&quot;" type="array"<|sep|>[1]<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'),
     [Part("call", "python"), Part("arguments", '{"a&b\\"": [1]}')]),
    ("kimi_k3", ('<|open|>tools<|sep|><|open|>call index="1" id="a" tool="special"<|sep|><|open|>argument type="number"'
     ' note="x" key="arg1"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'), SPECIAL),
    ("kimi_k3", f"I think{TOOLS}{CALL}{TOOLS_END}{OVER}", [THOUGHT, *SPECIAL]),
    ("kimi_k3", f"I think of {TOOLS}<|close|>think<|sep|>{RESPONSE}Yes{END}{OVER}",
     [Part("reasoning", f"I think of {TOOLS}"), content("Yes")]),
    ("solar_open", "<|content|>Hello.<|end|>", [content("Hello.")]),
    ("solar_open", "<|think|>I think<|end|><|begin|>assistant<|content|>Yes.<|end|>", [THOUGHT, content("Yes.")]),
    ("solar_open", ("<|think|>I think<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>"
     'special<|tool_call:args|>{"arg1": 1}<|tool_call:end|><|calls|>'), [THOUGHT, *SPECIAL]),
    ("muse_glimmer", " to=user<|message|>Hello.<|eot|>", [content("Hello.")]),
    ("muse_glimmer", f" to=special<|message|>{ATEM}", SPECIAL),
    ("muse_glimmer", (" to=self<|message|>I think<|eom|><|start|>assistant to=user<|message|>Yes.<|eom|>"
     f"<|start|>assistant to=special<|message|>{ATEM}<|eot|>"), [THOUGHT, content("Yes."), *SPECIAL]),
    ("muse_glimmer", f" to=user<|message|>Like this:\n{ATEM}<|eot|>", [content(f"Like this:\n{ATEM}")]),
    ("muse_glimmer", f" to=self<|message|>I think {ATEM} so<|eom|><|start|>assistant to=user<|message|>Yes.<|eot|>",
     [Part("reasoning", f"I think {ATEM} so"), content("Yes.")]),
    ("muse_glimmer", f" to=other<|message|>{ATEM}<|eot|>", [content(ATEM)]),
    ("functionary_v3_2", "all\nHello, world!\nWhat's up?", [content("Hello, world!\nWhat's up?")]),
    ("functionary_v3_2", 'special\n{"arg1": 1}', SPECIAL),
    ("functionary_v3_2", 'all\nI look.\n>>>special\n{"arg1": 1}', [content("I look."), *SPECIAL]),
    ("functionary_v3_2", 'special\n{"arg1": 1}>>>python\n{}>>>all\nDone.',
     [*SPECIAL, Part("call", "python", 1), Part("arguments", "{}", 1), content("Done.")]),
    ("functionary_v3_2", "all\n>>> 1 + 2\n3\n>>>other\n{}", [content(">>> 1 + 2\n3\n>>>other\n{}")]),
    ("functionary_v3_2", "special, I say", [content("special, I say")]),
    ("functionary_v3_2", "allowed\n", [content("allowed\n")]),
]  # fmt: skip


def read(name: str, text: str, cuts: list[int], *, is_cut: bool = False) -> list[Part]:
    form = next(each for each in FORMATS if each.name == name)()
    parser: Any = form.parser(FUNCTIONS)
    if not form.reads_reasoning and (reasoning := find_reasoning_form(name, [])) is not None:
        ends = form.reasoning_ends(FUNCTIONS)
        parser = ReasoningParser(parser, is_open=text.startswith("I think"), form=reasoning, interrupts=ends)
    pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    return joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish(is_cut=is_cut))


@pytest.mark.sweep(20)
@pytest.mark.parametrize(("name", "text", "expected"), ANSWERS)
def test_framed_answers_are_parsed_at_every_cut(name: str, text: str, expected: list[Part]) -> None:
    assert read(name, text, []) == expected
    assert read(name, text, list(range(1, len(text)))) == expected
    for cut in range(1, len(text)):
        assert read(name, text, [cut]) == expected, f"cut at {cut}"


HARMONY = [
    ("openai", "<|channel|>analysis<|message|>I think<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>",
     [THOUGHT, content("Yes")]),
    ("openai", '<|channel|>commentary to=functions.special <|constrain|>json<|message|>{"arg1": 1}<|call|>', SPECIAL),
    ("openai", "<|channel|>analysis<|message|>I think<|end|>", [THOUGHT]),
]  # fmt: skip


@pytest.mark.sweep(16)
@pytest.mark.parametrize("blanks", ["\n", " \r\n\t\n"])
@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [each for each in (*ANSWERS, *HARMONY) if each[1].endswith("|>") and not each[2][-1].text.endswith("|>")],
)
def test_blanks_after_last_mark_are_not_content(name: str, text: str, expected: list[Part], blanks: str) -> None:
    for cuts in ([], [len(text)], [len(text) + 1], list(range(1, len(text + blanks)))):
        for is_cut in (False, True):
            assert read(name, text + blanks, cuts, is_cut=is_cut) == expected
    assert read(name, f"{text}{blanks}x", [len(text) + 1])[-1].text.lstrip() == "x"


@pytest.mark.sweep(20)
@pytest.mark.parametrize(("name", "text", "expected"), ANSWERS)
def test_cut_framed_answer_emits_no_markers(name: str, text: str, expected: list[Part]) -> None:
    whole = "".join(part.text for part in expected)
    for cut in range(len(text)):
        parts = read(name, text[:cut], [], is_cut=True)
        assert parts == read(name, text[:cut], list(range(1, cut)), is_cut=True), f"cut at {cut}"
        assert whole.startswith("".join(part.text for part in parts).rstrip()), f"cut at {cut}"


@pytest.mark.parametrize(
    ("family", "answer", "wrong"),
    [
        (KimiK3Format, f'{RESPONSE}{{"a": 1}}{END}{OVER}', f"{RESPONSE}Hello{END}"),
        (SolarFormat, '<|content|>{"a": 1}<|end|>', "<|content|>Hello<|end|>"),
        (RecipientsFormat, 'all\n{"a": 1}', "all\nHello"),
        (MuseGlimmerFormat, ' to=user<|message|>{"a": 1}<|eot|>', " to=user<|message|>Hello<|eot|>"),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "special"])
def test_framed_json_grammar_accepts_only_schema_content(family: Any, answer: str, wrong: str, kind: str) -> None:
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    grammars = Grammars(kind, [*family.markers])
    form = family(grammars.token_name)
    grammar_of_calls = form.or_content(FUNCTIONS, schema, only_one=False)
    for grammar in (form.content(schema), grammar_of_calls):
        structure = StructuredOutputsParams(grammar=grammar)
        assert grammars.accepts(structure, answer)
        assert grammars.accepts(structure, '{"a": 1}')
        assert not grammars.accepts(structure, wrong)
    optional = StructuredOutputsParams(grammar=form.optional(FUNCTIONS, only_one=False))
    if kind == "special":  # the marks are special tokens in every vocabulary of these families
        assert grammars.accepts(optional, wrong)
    assert grammars.accepts(StructuredOutputsParams(grammar=grammar_of_calls), form.write([("special", {"arg1": 2})]))


@pytest.mark.parametrize("kind", ["plain", "special"])
def test_framed_text_grammar_enforces_strict_tools(kind: str) -> None:
    grammars = Grammars(kind, [*KimiK3Format.markers])
    form = KimiK3Format(grammars.token_name)
    optional = StructuredOutputsParams(grammar=form.optional(FUNCTIONS, only_one=False))
    for good in (f"{RESPONSE}Yes{END}{OVER}", f"{RESPONSE}Yes{END}{TOOLS}{CALL}{TOOLS_END}{OVER}", "Yes"):
        assert grammars.accepts(optional, good), good
    assert not grammars.accepts(optional, f"{RESPONSE}{END}{TOOLS}{CALL.replace('>1<', '>x<')}{TOOLS_END}{OVER}")
    recipients = StructuredOutputsParams(grammar=RecipientsFormat().optional(FUNCTIONS, only_one=False))
    for good in ("all\n>>> 1", 'special\n{"arg1": 1}', 'all\nHm.>>>special\n{"arg1": 1}', 'special\n{"arg1": 1}Yes'):
        assert grammars.accepts(recipients, good), good
    for wrong in ('special\n{"arg1": "x"}', 'all\n>>>special\n{"arg1": "x"}'):
        assert not grammars.accepts(recipients, wrong), wrong


@pytest.mark.parametrize("kind", ["plain", "special"])
def test_grammar_starts_after_multi_token_reasoning_end(kind: str) -> None:
    grammars = Grammars(kind, [*KimiK3Format.markers])
    closes = "<|close|>think<|sep|>"
    structure = StructuredOutputsParams(regex="a", starts_after=closes)
    assert grammars.accepts(structure, f"Hm. think<|sep|>{closes}a")
    for wrong in (f"Hm.{closes}b", "Hm.", f"a<|close|>think{closes}a" if kind == "special" else "a"):
        assert not grammars.accepts(structure, wrong)


def test_kimi_k3_markers_are_removed_without_tools() -> None:
    """Reasoning has none either."""
    template = FakeChatTemplate("<|open|>think<|sep|>")
    executor = FakeExecutor(answer=f"<|open|>think<|sep|>Hm.<|close|>think<|sep|>{RESPONSE}Yes.{END}{OVER}")
    options = {"chat_template": template}
    running = run_server(executor, engine_options=options, tool_call_parser="kimi_k3", reasoning_parser="kimi_k3")
    with running as server:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hm?"}]}
        with server.http() as http:
            message = http.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]
            assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm.")


def test_muse_glimmer_markers_are_removed_without_tools() -> None:
    parser = AnswerForm.of(AnswerStyle(MuseGlimmerFormat()), NO_TOOLS, "").parser()
    parts = parser.feed(" to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Hello.<|eot|>")
    assert joined(parts + parser.finish()) == [Part("reasoning", "Hm."), content("Hello.")]


@pytest.mark.parametrize(("name", "reserved"), [("functionary_v3_2", "all"), ("muse_glimmer", "user"),
                                                ("muse_glimmer", "self")])  # fmt: skip
def test_tool_with_reserved_recipient_name_is_refused(name: str, reserved: str) -> None:
    options = {"chat_template": FakeChatTemplate("")}
    with run_server(FakeExecutor(), engine_options=options, tool_call_parser=name) as server, server.http() as http:

        def post(tool: str, **fields: Any) -> httpx.Response:
            tools = [{"type": "function", "function": {"name": tool}}]
            body = {"messages": [{"role": "user", "content": "Hm?"}], "tools": tools, "max_tokens": 1, **fields}
            return http.post("/v1/chat/completions", json=body)

        refused = post(reserved)
        assert refused.status_code == 400
        assert repr(reserved) in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] == "tools"
        assert post("every").status_code == 200
        assert post(reserved, tool_choice="none").status_code == 200, "nothing can be called"
