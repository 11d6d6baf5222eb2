"""Models with a chat template that does not support tools call them through a system message and a grammar."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from call_grammars import Grammars
from fakes import FakeExecutor
from running import run_server

from octavo.engine.chat_template import ChatTemplate
from octavo.sampling_params import StructuredOutputsParams
from octavo.server.answers.generic_calls import GenericFormat
from octavo.server.answers.known_formats import find_tool_format
from octavo.server.answers.parts import Part, joined
from octavo.server.answers.tool_format import Function

if TYPE_CHECKING:
    from collections.abc import Sequence

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS = [Function("weather", CITY), Function("now", {"type": "object", "properties": {}})]
TOOLS = [
    {"type": "function", "function": {"name": each.name, "description": "Tells it.", "parameters": each.parameters}}
    for each in FUNCTIONS
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALL = '{"tool_call": {"name": "weather", "arguments": {"city": "Röme"}}}'
CALLED = [Part("call", "weather"), Part("arguments", '{"city": "Röme"}')]
SEVERAL = '{"tool_calls": [{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]}'


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars("plain", [])


def read(pieces: Sequence[str], *, is_cut: bool = False) -> list[Part]:
    parser = GenericFormat().parser(FUNCTIONS)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return joined([*parts, *parser.finish(is_cut=is_cut)])


def content_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if part.kind == "content")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, "", CALLED),
        (f"\n {CALL} ", "", CALLED),
        (SEVERAL, "", [part for n in (0, 1) for part in (Part("call", "now", n), Part("arguments", "{}", n))]),
        ('{"response": "Hello, \\"you\\"\\n\\u00fc \\ud83d\\ude42 \\ud83d!"}', 'Hello, "you"\nü 🙂 \ufffd!', []),
        ('{"response": ""}', "", []),
        ('{"response": {"a": [1, "}"]}}', '{"a": [1, "}"]}', []),
        ('{"response": 12}', "12", []),
        ("Hello.", "Hello.", []),
        ('{"other": 1}', '{"other": 1}', []),
        ('{"tool_call": {"name": "rm", "arguments": {}}}', '{"tool_call": {"name": "rm", "arguments": {}}}', []),
        ('{"tool_call": 5} no', '{"tool_call": 5} no', []),
    ],
)
def test_generic_answers_are_parsed_at_every_cut(text: str, content: str, calls: list[Part]) -> None:
    for pieces in ([text], list(text), *([text[:cut], text[cut:]] for cut in range(1, len(text)))):
        parts = read(pieces)
        assert content_of(parts) == content
        assert [part for part in parts if part.kind != "content"] == calls
        for before, after in pairwise(parts):
            assert before.start <= after.start <= len(text)


@pytest.mark.parametrize("text", [CALL, SEVERAL, '{"response": "Hello \\ud83d\\ude42."}', '{"response": [1, "a"]}'])
def test_cut_generic_answer_emits_only_certain_parts(text: str) -> None:
    whole = read([text])
    for cut in range(len(text)):
        parts = read([text[:cut]], is_cut=True)
        assert read(list(text[:cut]), is_cut=True) == parts
        assert content_of(whole).startswith(content_of(parts)), text[:cut]
        assert all(part.kind in {"content", "call", "arguments"} for part in parts)
        for part, known in zip(parts, whole, strict=False):
            assert known.text.startswith(part.text)


def test_generic_response_text_is_streamed() -> None:
    parser = GenericFormat().parser(FUNCTIONS)
    assert parser.feed('{"response": "Hel') == [Part("content", "Hel")]
    assert parser.feed("lo\\") == [Part("content", "lo")]
    assert parser.feed('n"') == [Part("content", "\n")]
    assert parser.feed("}") == []


def test_generic_grammars_enforce_tool_calls_and_responses(grammars: Grammars) -> None:
    form = GenericFormat()
    reply = '{"response": "Hello."}'
    for only_one in (True, False):
        forced = StructuredOutputsParams(grammar=form.forced(FUNCTIONS, only_one=only_one))
        optional = StructuredOutputsParams(grammar=form.optional(FUNCTIONS, only_one=only_one))
        either = StructuredOutputsParams(grammar=form.or_content(FUNCTIONS, json.dumps(CITY), only_one=only_one))
        for structure in (forced, optional, either):
            assert grammars.accepts(structure, CALL)
            assert grammars.accepts(structure, SEVERAL) is not only_one
            for wrong in ("Hello.", '{"tool_call": {"name": "rm", "arguments": {}}}', CALL + " ", "{}"):
                assert not grammars.accepts(structure, wrong), wrong
        assert not grammars.accepts(forced, reply)
        assert grammars.accepts(optional, reply)
        assert not grammars.accepts(either, reply)
        assert grammars.accepts(either, '{"response": {"city": "Rome"}}')
    for calls in ([("now", {})], [("now", {}), ("weather", {"city": "Rome"})]):
        assert grammars.accepts(forced, form.write(calls))


def test_template_without_tools_gets_generic_format() -> None:
    def found(wanted: str, *templates: str) -> str | None:
        form = find_tool_format(wanted, templates, None, lambda _: None)
        return None if form is None else form.name

    assert found("auto", CHATML) == "generic"
    assert found("auto", CHATML + "<tool_call>") == "hermes"
    assert found("auto") is None
    assert found("none", CHATML) is None
    assert found("generic", CHATML + "<tool_call>") == "generic"


def test_generic_format_writes_tool_history_as_text() -> None:
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sun"}]},
        {"role": "assistant", "content": "I look again.", "tool_calls": [*calls, *calls]},
        {"role": "tool", "tool_call_id": "unknown", "content": "rain"},
    ]
    told = GenericFormat().messages_with_tools(messages, TOOLS, is_required=False, only_one=False)
    assert [each["role"] for each in told] == ["developer", "user", "assistant", "user", "assistant", "user"]
    assert told[0]["content"].startswith("Be brief.\n\nYou can call these tools")
    assert '{"name": "now", "description": "Tells it."' in told[0]["content"]
    written = json.dumps(function)
    assert told[2] == {"role": "assistant", "content": f'{{"tool_call": {written}}}'}
    assert told[3]["content"] == '{"tool_response": {"name": "weather", "content": "sun"}}'
    assert told[4]["content"] == f'I look again.\n\n{{"tool_calls": [{written}, {written}]}}'
    assert told[5]["content"] == '{"tool_response": {"content": "rain"}}'
    assert messages[2]["tool_calls"] == calls
    unsent = GenericFormat().messages_with_tools(messages[1:], [], is_required=False, only_one=True)
    assert unsent == told[1:]  # without tools in the request the history is written in the same way
    odd = {"role": "tool", "tool_call_id": ["call_1"], "content": "x"}
    assert GenericFormat().messages_with_tools([odd], [], is_required=False, only_one=True)[0]["role"] == "user"
    assert (
        GenericFormat().messages_with_tools(messages[1:], TOOLS, is_required=True, only_one=True)[0]["role"] == "system"
    )


@pytest.mark.parametrize("only_one", [False, True])
@pytest.mark.parametrize("is_required", [False, True])
def test_system_message_names_allowed_forms(only_one: bool, is_required: bool) -> None:
    options = {"is_required": is_required, "only_one": only_one}
    (about, _) = GenericFormat().messages_with_tools([{"role": "user", "content": "x"}], TOOLS, **options)
    call = '{"name": "the name of a tool", "arguments": {...}}'
    several, reply = (
        f'{{"tool_calls": [{call}, ...]}} to call several',
        '{"response": "your reply"} to reply to the user',
    )
    lines = about["content"].split("\n")
    assert lines[0] == "You can call these tools, each described by a JSON schema of its arguments:"
    assert [json.loads(line) for line in lines[1:3]] == [tool["function"] for tool in TOOLS]
    assert lines[3] == ""
    assert len(lines) == 5
    forms = [f'{{"tool_call": {call}}} to call a tool']
    forms += [] if only_one else [several]
    forms += [] if is_required else [f"{reply} without a tool"]
    assert lines[4] == f"Answer with one JSON object and nothing else: {', or '.join(forms)}."


def test_json_content_is_streamed() -> None:
    parser = GenericFormat().parser(FUNCTIONS)
    text = ' { "response" : {"a": [1, "}\\n"], "b": null} } '
    told = ["".join(part.text for part in parser.feed(char)) for char in text]
    start, end = text.index('{"a"'), text.index("} }") + 1
    assert told == [char if start <= index < end else "" for index, char in enumerate(text)]
    assert parser.finish() == []


@pytest.mark.parametrize("num_chars", [1, 5, 6, 7, 11, 12])
def test_incomplete_escape_is_held_back(num_chars: int) -> None:
    """A pair of surrogates has twelve characters; the first half alone waits for the second."""
    parser = GenericFormat().parser(FUNCTIONS)
    escape = "\\ud83d\\ude42"
    told = content_of(parser.feed('{"response": "a' + escape[:num_chars]))
    assert told == ("a🙂" if num_chars == len(escape) else "a")
    assert told + content_of(parser.feed(escape[num_chars:] + 'b"}')) == "a🙂b"


def test_lone_half_of_pair_holds_no_text_back() -> None:
    assert content_of(read(['{"response": "\\ud83dabcdef'], is_cut=True)) == "\ufffdabcdef"


MESSAGES = [{"role": "user", "content": "Weather?"}]
ANTHROPIC_TOOLS = [{"name": each.name, "input_schema": each.parameters} for each in FUNCTIONS]
RESPONSES_TOOLS = [{"type": "function", "name": each.name, "parameters": each.parameters} for each in FUNCTIONS]
RIGHT = {"city": "Röme"}


def test_every_api_returns_generic_tool_calls() -> None:
    options = {"chat_template": ChatTemplate(CHATML)}
    with run_server(FakeExecutor(answer=CALL), engine_options=options) as server, server.http() as http:

        def ask(path: str, **body: Any) -> Any:
            response = http.post(path, json={"model": "fake", **body})
            assert response.status_code == 200, response.text
            return response.json()

        forced = {"type": "function", "function": {"name": "weather"}}
        for choice in ("auto", "required", forced, None):
            body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
            (chosen,) = ask("/v1/chat/completions", **body)["choices"]
            (call,) = chosen["message"]["tool_calls"]
            assert chosen["message"]["content"] is None
            assert json.loads(call["function"]["arguments"]) == RIGHT
            assert chosen["finish_reason"] == ("stop" if choice == forced else "tool_calls")
        (chosen,) = ask("/v1/chat/completions", messages=MESSAGES, tools=TOOLS, tool_choice="none")["choices"]
        assert chosen["message"]["content"] == CALL  # the fake recites it; a real model would see no tools
        (item,) = ask("/v1/responses", input="Weather?", tools=RESPONSES_TOOLS)["output"]
        assert json.loads(item["arguments"]) == RIGHT
        (block,) = ask("/v1/messages", messages=MESSAGES, tools=ANTHROPIC_TOOLS, max_tokens=200)["content"]
        assert block["input"] == RIGHT
        message = ask("/api/chat", messages=MESSAGES, tools=TOOLS, stream=False)["message"]
        assert message["tool_calls"][0]["function"]["arguments"] == RIGHT


def test_generic_reply_is_streamed_as_content() -> None:
    options = {"chat_template": ChatTemplate(CHATML)}
    executor = FakeExecutor(answer='{"response": "Hello,\\n\\"you\\"."}')
    with run_server(executor, engine_options=options) as server, server.http() as http:
        body = {"messages": MESSAGES, "tools": TOOLS, "stream": True}
        lines = http.post("/v1/chat/completions", json=body).text.split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        texts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
        assert "".join(texts) == 'Hello,\n"you".'
        assert len(list(filter(None, texts))) > 3
        counted = http.post("/tokenize", json={"messages": MESSAGES, "tools": TOOLS}).json()["count"]
        assert counted > http.post("/tokenize", json={"messages": MESSAGES}).json()["count"] + 50
