"""Tool calls and reasoning, read with the real `openai` package: streams equal whole answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from fakes import FakeChatTemplate, FakeExecutor, make_engine
from running import DEADLINE_S, run_server, wait_until
from sdks import openai

from octavo.config.server import REASONING_PARSERS, TOOL_CALL_PARSERS
from octavo.server.answers.answer_form import AnswerStyle
from octavo.server.answers.generic_calls import GenericFormat
from octavo.server.answers.known_formats import FORMATS
from octavo.server.answers.parts import PlainParser
from octavo.server.answers.reasoning_forms import REASONING_FORMS
from octavo.server.answers.tagged_calls import Qwen3CoderFormat
from octavo.server.answers.tool_formats import HermesFormat, LlamaFormat, NamedMistralFormat
from octavo.server.answers.tools import read_chat_tools

if TYPE_CHECKING:
    from collections.abc import Iterator

    from running import Running

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "What the weather is like.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALLS = (
    '<think>Rome, 狐.</think>\n\nI look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Röme"}}\n'
    '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
NAMED = {"type": "function", "function": {"name": "now"}}
MESSAGES: list[Any] = [{"role": "user", "content": "How is Rome?"}]


def allowed(*names: str, mode: Any = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    template = FakeChatTemplate("<tool_call> </think>")
    with run_server(FakeExecutor(answer=CALLS), engine_options={"chat_template": template}) as running:
        yield running


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        yield client


def assemble(stream: Any, field: str = "reasoning_content") -> dict[str, Any]:
    """Join the chunks of a stream, as a client has to."""
    result: dict[str, Any] = {"content": None, "reasoning": None, "calls": [], "finish_reason": None, "chunks": 0}
    for chunk in stream:
        (choice,) = chunk.choices
        assert result["finish_reason"] is None
        result["chunks"] += 1
        result["finish_reason"] = choice.finish_reason
        if choice.delta.content:
            result["content"] = (result["content"] or "") + choice.delta.content
        reasoning = getattr(choice.delta, field, None)
        if reasoning:
            result["reasoning"] = (result["reasoning"] or "") + reasoning
        for call in choice.delta.tool_calls or []:
            if call.index == len(result["calls"]):
                assert call.type == "function"
                result["calls"].append([call.id, call.function.name, ""])
            assert call.index == len(result["calls"]) - 1
            result["calls"][-1][2] += call.function.arguments
    return result


def test_streamed_tool_calls_equal_unstreamed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "tools": [WEATHER, NOW]}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content == "I look."
    assert whole.message.reasoning_content == "Rome, 狐."  # type: ignore[attr-defined]  # not OpenAI's own
    assert not hasattr(whole.message, "reasoning"), "some clients show both"
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in whole.message.tool_calls or []]
    assert calls == [("get_weather", {"city": "Röme"}), ("now", {})]
    ids = [call.id for call in whole.message.tool_calls or []]
    assert len({*ids}) == 2
    assert all(call_id.startswith("call_") for call_id in ids)
    streamed = assemble(client.chat.completions.create(**asked, stream=True))
    assert streamed["finish_reason"] == "tool_calls"
    assert (streamed["content"], streamed["reasoning"]) == ("I look.", "Rome, 狐.")
    assert [call[1:] for call in streamed["calls"]] == [["get_weather", '{"city": "Röme"}'], ["now", "{}"]]


def test_long_call_arguments_are_streamed_incrementally() -> None:
    """A short call is held back until it has ended, a long one is not."""
    text = "long " * 300
    answer = f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{text}"}}}}\n</tool_call>'
    options = {"chat_template": FakeChatTemplate("<tool_call>")}
    with (
        run_server(FakeExecutor(answer=answer), engine_options=options, max_unread_outputs=10_000) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client,
    ):
        asked: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "tools": [WEATHER], "stream": True}
        streamed = assemble(client.chat.completions.create(**asked))
    assert [json.loads(arguments) for _, _, arguments in streamed["calls"]] == [{"city": text}]
    assert streamed["chunks"] > 20


def test_include_reasoning_false_omits_reasoning(client: openai.OpenAI) -> None:
    """With `include_reasoning` set to false, as in vLLM; the rest of the answer is unchanged."""
    asked: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "tools": [WEATHER, NOW]}
    body = {"include_reasoning": False}
    message = client.chat.completions.create(**asked, extra_body=body).choices[0].message
    assert not getattr(message, "reasoning_content", None)
    assert message.content == "I look."
    assert len(message.tool_calls or []) == 2
    streamed = assemble(client.chat.completions.create(**asked, stream=True, extra_body=body))
    assert (streamed["content"], streamed["reasoning"], len(streamed["calls"])) == ("I look.", None, 2)


def test_reasoning_field_option_renames_reasoning_content() -> None:
    template = FakeChatTemplate("<tool_call> </think>")
    executor, options = FakeExecutor(answer=CALLS), {"chat_template": template}
    with run_server(executor, engine_options=options, reasoning_field="reasoning") as running, running.http() as http:
        whole = http.post("/v1/chat/completions", json={"messages": MESSAGES}).json()["choices"][0]["message"]
        assert (whole["reasoning"], "reasoning_content" in whole) == ("Rome, 狐.", False)
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
            stream = client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
            assert assemble(stream, "reasoning")["reasoning"] == "Rome, 狐."


def test_call_text_without_tools_is_content(client: openai.OpenAI) -> None:
    for options in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = client.chat.completions.create(model="fake", messages=MESSAGES, **options).choices[0]  # type: ignore[call-overload]
        assert choice.finish_reason == "stop"
        assert choice.message.tool_calls is None
        assert choice.message.content == CALLS.partition("</think>")[2].lstrip()


def test_parallel_tool_calls_false_returns_one_call(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "tools": [WEATHER, NOW]}
    whole = client.chat.completions.create(**asked, parallel_tool_calls=False).choices[0]
    assert [call.function.name for call in whole.message.tool_calls or []] == ["get_weather"]


@pytest.mark.turn(12)
def test_calls_truncated_by_max_tokens_stream_equally(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "tools": [WEATHER, NOW]}
    for limit in range(1, len(CALLS.encode()) + 1, 3):
        whole = client.chat.completions.create(**asked, max_tokens=limit).choices[0]
        streamed = assemble(client.chat.completions.create(**asked, max_tokens=limit, stream=True))
        assert streamed["finish_reason"] == whole.finish_reason == "length"
        assert (streamed["content"] or "") == (whole.message.content or "")
        calls = [[call.function.name, call.function.arguments] for call in whole.message.tool_calls or []]
        assert [call[1:] for call in streamed["calls"]] == calls
        assert "I look.\n".startswith(whole.message.content or "")


def test_calls_truncated_by_stop_string_stay_out_of_content(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "tools": [WEATHER, NOW]}
    for stop, calls in (("_call>\n", []), (', "arg', ["get_weather"]), ('"now"', ["get_weather"])):
        choice = client.chat.completions.create(**asked, stop=stop).choices[0]
        assert choice.message.content == "I look.", stop
        assert [call.function.name for call in choice.message.tool_calls or []] == calls


def test_allowed_tools_limit_calls_but_template_gets_all_tools() -> None:
    """The template gets all tools, so the beginning of the prompt stays equal and its prefix hits."""
    template, executor = FakeChatTemplate("<tool_call> </think>"), FakeExecutor(answer=CALLS)
    wanted: list[Any] = []
    executor.prepare = lambda params, _: wanted.append(params.structured_outputs)  # type: ignore[method-assign]
    with (
        run_server(executor, engine_options={"chat_template": template}) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client,
    ):
        for names, mode in ((["now"], "auto"), (["now"], "required"), (["get_weather", "now"], "auto")):
            asked: dict[str, Any] = {"tools": [WEATHER, NOW], "tool_choice": allowed(*names, mode=mode)}
            choice = client.chat.completions.create(model="fake", messages=MESSAGES, **asked).choices[0]
            assert [call.function.name for call in choice.message.tool_calls or []] == names
            assert [each["function"]["name"] for each in template.tools or []] == ["get_weather", "now"]
    limited, required, free = wanted
    assert free is None, "all of them are allowed"
    for structure in (limited, required):
        assert ("now" in structure.grammar, "get_weather" in structure.grammar) == (True, False)
    assert ("TEXT" in limited.grammar, "TEXT" in required.grammar) == (True, False)


def test_empty_tools_and_null_or_none_tool_choice_are_accepted(running: Running) -> None:
    with running.http() as http:
        for body in ({"tool_choice": "none"}, {"tools": [], "tool_choice": "auto"}, {"tool_choice": None}):
            assert http.post("/v1/chat/completions", json={**GOOD, **body}).status_code == 200


def test_chat_template_receives_tools_and_tool_results() -> None:
    template = FakeChatTemplate("<tool_call>")
    with run_server(engine_options={"chat_template": template}) as running, running.http() as http:
        call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
        messages = [
            {"role": "developer", "content": "Be brief."},
            *MESSAGES,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "noon"}]},
        ]
        body = {"messages": messages, "tools": [NOW], "max_tokens": 1}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        assert template.tools == [
            {
                "type": "function",
                "function": {
                    "name": "now",
                    "description": "",
                    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
                },
            }
        ]
        shown = http.post("/tokenize", json={"messages": messages, "tools": [NOW]}).json()["tokens"]
        text = bytes(shown).decode()
        assert '"arguments": {"zone": "UTC"}' in text
        assert "<system>Be brief." in text
        assert "<tool>noon" in text
        assert text.startswith("<tools>")


GOOD = {"messages": MESSAGES, "max_tokens": 1}


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", "messages/count_tokens", "api/chat"])
@pytest.mark.parametrize("kind", ["web_search_20250305", "code_interpreter", "x" * 500, 7])
def test_refusal_names_unsupported_tool_type(running: Running, path: str, kind: Any) -> None:
    body = {"model": "fake", "messages": MESSAGES[-1:], "input": "Hi", "tools": [{"type": kind, "name": "now"}]}
    if path.startswith("messages"):
        body |= {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    with running.http() as http:
        refused = http.post(f"/{path}" if path.startswith("api") else f"/v1/{path}", json=body)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert "tools[0].type" in message
    assert (f"{kind!r:.80}" if isinstance(kind, str) else "must be a string") in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [7]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}, "tools[0].function.parameters"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "description": 1}}]},
            "tools[0].function.description",
        ),
        ({"tools": [NOW, NOW]}, "tools"),
        ({"tools": [NOW] * 1025}, "tools"),
        ({"tools": [NOW], "structured_outputs": {"json": "not json"}}, "tools"),
        ({"tools": [NOW], "structured_outputs": {"json": "[1]"}}, "tools"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
        ),
        ({"tools": {"a": 1}}, "tools"),
        ({"tools": [NOW], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": ["auto"]}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "function"}}, "tool_choice"),
        *[({"tool_choice": choice}, "tool_choice") for choice in ("auto", "required", NAMED, allowed("now"))],
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": allowed("now")}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": allowed("now", "then")}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": allowed()}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": allowed("now", mode="none")}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": allowed("now", mode=["auto"])}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "allowed_tools", "allowed_tools": ["now"]}}, "tool_choice"),
        (
            {
                "tools": [NOW],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "custom", "function": {"name": "now"}}],
                },
            },
            "tool_choice",
        ),
        (
            {"tools": [NOW], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
            "tool_choice",
        ),
        ({"tools": [NOW], "tool_choice": "auto", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"tools": [NOW], "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": 7}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": 7}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": [1]}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_invalid_tool_fields_are_refused_by_parameter(running: Running, body: dict[str, Any], parameter: str) -> None:
    with running.http() as http:
        response = http.post("/v1/chat/completions", json={**GOOD, **body})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == parameter


def test_tools_are_refused_without_tool_call_parser() -> None:
    with run_server(tool_call_parser="none") as running, running.http() as http:
        response = http.post("/v1/chat/completions", json={**GOOD, "tools": [NOW]})
        assert response.status_code == 400
        assert "--tool-call-parser" in response.json()["error"]["message"]


def test_tool_and_reasoning_formats_are_detected_from_template() -> None:
    def find(template: str, tools: str = "auto", reasoning: str = "auto") -> AnswerStyle:
        engine = make_engine(chat_template=FakeChatTemplate(template))
        return AnswerStyle.find(tools, reasoning, engine.input_processor)

    assert isinstance(find("a <tool_call> b").tools, HermesFormat)
    assert isinstance(find("<|python_tag|>").tools, LlamaFormat)
    shown = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    assert isinstance(find(shown).tools, LlamaFormat), "Llama 3.2"
    assert isinstance(find("[TOOL_CALLS] [ARGS]").tools, NamedMistralFormat)
    assert isinstance(find("<tool_call> <function= <parameter=").tools, Qwen3CoderFormat)
    assert isinstance(find("<tool_call> <function=", "hermes").tools, HermesFormat)
    assert find("<tool_call>", "none").tools is None
    assert isinstance(find("").tools, GenericFormat)
    assert isinstance(find("", "llama3_json").tools, LlamaFormat)
    assert find("</think>").has_reasoning
    assert not find("</think>", reasoning="none").has_reasoning
    assert find("", reasoning="think").has_reasoning
    assert isinstance(read_chat_tools([NOW], "none", None, find("<tool_call>").tools).parser(), PlainParser)


def test_reasoning_opened_by_prompt_is_parsed() -> None:
    template = FakeChatTemplate("</think>", behind="<think>\n")
    executor = FakeExecutor(answer="So it is.\n</think>\n\nYes.")
    with run_server(executor, engine_options={"chat_template": template}) as running, running.http() as http:
        message = http.post("/v1/chat/completions", json={"messages": MESSAGES}).json()["choices"][0]["message"]
        assert message["reasoning_content"] == "So it is."
        assert message["content"] == "Yes."


def test_idle_stream_sends_keep_alive_comments() -> None:
    executor = FakeExecutor(answer="ab")
    with run_server(executor, stream_keep_alive_s=0.05) as running, running.http() as http:
        executor.gate.clear()
        with http.stream("POST", "/v1/chat/completions", json={"messages": MESSAGES, "stream": True}) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            comments = [next(lines) for _ in range(4)]
            assert comments == [": still at work", ""] * 2
            executor.gate.set()
            data = [line for line in lines if line.startswith("data: ")]
        text = "".join(
            choice["delta"].get("content") or "" for line in data[:-1] for choice in json.loads(line[6:])["choices"]
        )
        assert text == "ab"
        assert data[-1] == "data: [DONE]"


def test_disconnect_during_idle_stream_frees_blocks() -> None:
    executor = FakeExecutor(answer="ab")
    with run_server(executor, stream_keep_alive_s=0.05) as running, running.http() as http:
        executor.gate.clear()
        with http.stream("POST", "/v1/chat/completions", json={"messages": MESSAGES, "stream": True}) as response:
            lines = response.iter_lines()
            assert next(lines) == ": still at work"
        executor.gate.set()
        wait_until(lambda: running.num_unfinished == 0 and running.num_blocks_in_use == 0, "its blocks are free")


def test_deeply_nested_tool_schema_never_answers_500(running: Running) -> None:
    with running.http() as http:
        for depth in (50, 450, 470, 490, 498, 5000):
            schema = '{"type": "object", "properties": {"a": ' * depth + '{"type": "object"}' + "}}" * depth
            tool = f'{{"type": "function", "function": {{"name": "a", "parameters": {schema}}}}}'
            body = (
                f'{{"messages": {json.dumps(MESSAGES)}, "tools": [{tool}], "tool_choice": "required", "max_tokens": 1}}'
            )
            assert http.post("/v1/chat/completions", content=body).status_code in {200, 400}


def test_truncated_call_arguments_are_accepted_in_history(running: Running) -> None:
    with running.http() as http:
        for arguments in ('{"city": "Ro', '{"a":tru}', "", "[", "nonsense", "[" * 299):
            call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": arguments}}
            messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "?"}]
            assert http.post("/v1/chat/completions", json={**GOOD, "messages": messages}).status_code == 200


def test_stream_chunk_has_each_tool_call_index_once(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "tools": [WEATHER, NOW], "stream": True}
    for chunk in client.chat.completions.create(**asked):
        calls = chunk.choices[0].delta.tool_calls or []
        assert len({call.index for call in calls}) == len(calls)


@pytest.mark.parametrize("between", ["; ", " ; ", "\n;\n"])
def test_llama_returns_one_call_unless_parallel_tool_calls(between: str) -> None:
    call = '{"name": "now", "parameters": {}}'
    answer = f"{call}{between}{call}"
    engine = {"chat_template": FakeChatTemplate("<|python_tag|>")}
    with run_server(FakeExecutor(answer=answer), engine_options=engine) as running, running.http() as http:
        for options, count in (({}, 1), ({"parallel_tool_calls": True}, 2)):
            body = {"messages": MESSAGES, "tools": [NOW], **options}
            choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
            assert len(choice["message"]["tool_calls"]) == count


def test_parser_options_list_all_registered_formats() -> None:
    assert ("auto", "none", "generic", *dict.fromkeys(each.name for each in FORMATS)) == TOOL_CALL_PARSERS
    assert ("auto", "none", *(each.name for each in REASONING_FORMS)) == REASONING_PARSERS
