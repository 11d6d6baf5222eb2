"""Ollama's API with the real `ollama` package: the streamed answer equals the whole one."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from fakes import FakeChatTemplate, FakeExecutor, answer_text
from running import DEADLINE_S, run_server, wait_until
from sdks import ollama

from octavo.outputs import RequestMetrics
from octavo.sampling_params import SamplingParams
from octavo.server.api.extra_fields import ExtraFields
from octavo.server.api.ollama.answers import durations
from octavo.server.api.ollama.messages import read_conversation
from octavo.server.api.ollama.requests import ChatRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx
    from running import Running

ANSWER = (
    "<think>Rome, 狐.</think>\n\nI look.\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Röme", "total_duration": 7}}\n'
    '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "What the weather is like.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
MESSAGES: list[Any] = [{"role": "user", "content": "How is Rome?"}]
CHAT: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "stream": False}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    template = FakeChatTemplate("<tool_call> </think>")
    info = {"quantization_level": "Q4_K_M", "file_type": 15, "weight_bytes": 98_000_000}
    options = {"chat_template": template, "model_info": info}
    with run_server(FakeExecutor(answer=ANSWER), engine_options=options) as running:
        yield running


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[ollama.Client]:
    with ollama.Client(running.url, timeout=DEADLINE_S) as client:
        yield client


@pytest.fixture
def plain(shared: Running) -> Iterator[ollama.Client]:
    """Return a client of a server without tools and reasoning."""
    with ollama.Client(shared.url, timeout=DEADLINE_S) as client:
        yield client


def joined(lines: list[ollama.ChatResponse]) -> dict[str, Any]:
    """Join a stream's lines."""
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    return {
        "content": "".join(line.message.content or "" for line in lines),
        "thinking": "".join(line.message.thinking or "" for line in lines) or None,
        "calls": [call.model_dump() for line in lines for call in line.message.tool_calls or []],
        "logprobs": [each.model_dump() for line in lines for each in line.logprobs or []],
        "ends": (lines[-1].done_reason, lines[-1].prompt_eval_count, lines[-1].eval_count),
    }


@pytest.mark.parametrize(
    "options",
    [
        {"tools": [WEATHER, NOW]},
        {"tools": [WEATHER, NOW], "logprobs": True, "top_logprobs": 2},
        {},
        {"options": {"stop": ["look"], "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 7}},
        {"think": True, "options": {"num_predict": 20}},
        {"think": "high", "options": {"num_predict": -1, "repeat_penalty": 1.1, "presence_penalty": 0.5}},
    ],
)
def test_ollama_stream_equals_unstreamed_chat(client: ollama.Client, options: dict[str, Any]) -> None:
    whole = client.chat("fake", MESSAGES, **options)
    streamed = [*client.chat("fake", MESSAGES, stream=True, **options)]
    assert len(streamed) > 2
    assert joined(streamed) == joined([whole])
    assert streamed[-1].message == ollama.Message(role="assistant", content=""), "the last line has the counts alone"


def test_chat_returns_thinking_content_and_tool_calls(client: ollama.Client) -> None:
    answer = client.chat("fake:latest", MESSAGES, tools=[WEATHER, NOW])
    assert (answer.model, answer.message.role, answer.done_reason) == ("fake:latest", "assistant", "stop")
    assert (answer.message.thinking, answer.message.content) == ("Rome, 狐.", "I look.")
    assert [(call.function.name, call.function.arguments) for call in answer.message.tool_calls or []] == [
        ("get_weather", {"city": "Röme", "total_duration": 7}),
        ("now", {}),
    ]
    assert client.chat("fake", MESSAGES, options={"num_predict": 3}).done_reason == "length"


@pytest.mark.turn(8)
def test_calls_truncated_by_num_predict_stream_equally(client: ollama.Client) -> None:
    for limit in range(1, len(ANSWER.encode()), 13):
        asked: dict[str, Any] = {"tools": [WEATHER, NOW], "options": {"num_predict": limit}}
        whole = joined([client.chat("fake", MESSAGES, **asked)])
        assert whole == joined([*client.chat("fake", MESSAGES, stream=True, **asked)])
        assert whole["ends"][0] == "length"


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "Ro\nme",}', {"city": "Ro\nme"}),
        ('{"city": "say "hi" now"}', {"city": 'say "hi" now'}),
        ('{"city": "C:\\path\\new"}', None),
        ('{"city": oops}', None),
        ('{"city": "' + "long " * 300 + '", "day": oops}', None),
    ],
)
def test_malformed_tool_call_is_repaired_or_becomes_text(arguments: str, expected: dict[str, Any] | None) -> None:
    """A malformed call with two possible readings becomes text, even if it was long enough to be streamed."""
    answer = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    options = {"chat_template": FakeChatTemplate("<tool_call>")}
    with (
        run_server(FakeExecutor(answer=answer), engine_options=options) as running,
        ollama.Client(running.url, timeout=DEADLINE_S) as client,
    ):
        whole = client.chat("fake", MESSAGES, tools=[WEATHER])
        lines = list(client.chat("fake", MESSAGES, tools=[WEATHER], stream=True))
    assert joined(lines) == joined([whole])
    calls = [call.function.arguments for call in whole.message.tool_calls or []]
    assert calls == ([] if expected is None else [expected])
    assert expected is not None or arguments.removesuffix("}") in (whole.message.content or "")


def test_python_functions_are_accepted_as_tools(client: ollama.Client, running: Running) -> None:
    """The package describes Python functions as tools, and returns their results under `tool_name`."""

    def now() -> str:
        """Tell the time."""
        return "noon"

    answer = client.chat("fake", MESSAGES, tools=[now])
    ((call,),) = (answer.message.tool_calls or [],)
    assert call.function.name == "now"
    result = {"role": "tool", "content": now(), "tool_name": "now"}
    client.chat("fake", [*MESSAGES, answer.message, result], tools=[now], options={"num_predict": 1})
    (shown,) = running.engine.input_processor._chat_template.tools  # type: ignore[union-attr]
    assert (shown["function"]["name"], shown["function"]["description"]) == ("now", "Tell the time.")


def test_ollama_messages_become_template_messages_with_call_ids() -> None:
    call = {"function": {"name": "now", "arguments": {"zone": "UTC"}}}
    messages: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "thinking": "Hm.", "content": "", "tool_calls": [call, {**call, "id": None}]},
        {"role": "tool", "content": "noon", "tool_name": "now"},
        {"role": "tool", "content": None},
        {"role": "user", "content": "And?", "images": []},
    ]
    first, second = "call00100", "call00101"
    called = {"type": "function", **call}
    assert read_conversation(messages) == [
        *MESSAGES,
        {
            "role": "assistant",
            "thinking": "Hm.",
            "content": "",
            "tool_calls": [{**called, "id": first}, {**called, "id": second}],
        },
        {"role": "tool", "content": "noon", "name": "now", "tool_call_id": first},
        {"role": "tool", "content": "", "name": None, "tool_call_id": second},
        {"role": "user", "content": "And?"},
    ]
    messages[1]["tool_calls"][1]["function"] = {"name": "other", "arguments": {}}
    messages[2]["tool_name"] = "other"
    results = [message["tool_call_id"] for message in read_conversation(messages) if message["role"] == "tool"]
    assert results == [second, first], "a result is that of a call of its tool"
    messages[1]["tool_calls"][1]["id"] = "own"
    messages[2]["tool_call_id"] = "own"
    results = [message["tool_call_id"] for message in read_conversation(messages) if message["role"] == "tool"]
    assert results == ["own", first], "who names a call leaves the others theirs"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"think": ""}, {}),
        ({"think": True}, {"enable_thinking": True}),
        ({"think": False}, {"enable_thinking": False}),
        ({"think": "low"}, {"enable_thinking": True, "reasoning_effort": "low"}),
    ],
)
def test_think_sets_enable_thinking_and_reasoning_effort(
    running: Running, client: ollama.Client, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    template: Any = running.engine.input_processor._chat_template
    for ask in (
        lambda: client.chat("fake", MESSAGES, options={"num_predict": 1}, **options),
        lambda: client.generate("fake", "Hm?", options={"num_predict": 1}, **options),
    ):
        ask()
        assert template.options.items() >= expected.items()
        assert not {"enable_thinking", "reasoning_effort"} & (template.options.keys() - expected.keys())


def test_final_assistant_message_sets_continue_final_message(running: Running, client: ollama.Client) -> None:
    client.chat("fake", [*MESSAGES, {"role": "assistant", "content": "It is"}], options={"num_predict": 1})
    options = running.engine.input_processor._chat_template.options  # type: ignore[union-attr]
    assert (options["add_generation_prompt"], options["continue_final_message"]) == (False, True)


def test_generate_wraps_prompt_in_user_turn_unless_raw(plain: ollama.Client) -> None:
    """A prompt becomes a user's turn unless it is raw. Both are streamed as well."""
    turn, with_system = len("<user>Hello\n<assistant>"), len("<system>Be brief.\n<user>Hello\n<assistant>")
    limit = {"num_predict": 9}
    whole = plain.generate("fake", "Hello", options=limit)
    assert (whole.response, whole.prompt_eval_count, whole.eval_count) == (answer_text(turn, 0, 9), turn, 9)
    assert whole.thinking is None
    assert plain.generate("fake", "Hello", system="Be brief.", options=limit).prompt_eval_count == with_system
    raw = plain.generate("fake", "Hello", raw=True, options=limit)
    assert (raw.response, raw.prompt_eval_count) == (answer_text(5, 0, 9), 5)
    for options in ({}, {"raw": True}):
        lines = [*plain.generate("fake", "Hello", stream=True, options=limit, **options)]
        expected = plain.generate("fake", "Hello", options=limit, **options).response
        assert "".join(line.response or "" for line in lines) == expected
        assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]


def test_generate_with_think_returns_thinking(client: ollama.Client) -> None:
    whole = client.generate("fake", "Hello", think=True)
    lines = [*client.generate("fake", "Hello", think=True, stream=True)]
    for name in ("response", "thinking"):
        assert "".join(getattr(line, name) or "" for line in lines) == getattr(whole, name)
    assert whole.thinking == "Rome, 狐."


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {"city": {"type": "string"}}}])
def test_format_becomes_structured_output(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, seen = FakeExecutor(), []
    monkeypatch.setattr(executor, "prepare", lambda params, _: seen.append(params.structured_outputs))
    with run_server(executor) as running, ollama.Client(running.url, timeout=DEADLINE_S) as client:
        client.chat("fake", MESSAGES, format=form, options={"num_predict": 1})
        client.generate("fake", "Hello", format=form, options={"num_predict": 1})
    assert len(seen) == 2
    for structure in seen:
        assert (structure.json_object, structure.json and json.loads(structure.json)) == (
            (True, None) if form == "json" else (None, form)
        )


def test_ollama_chat_returns_logprobs(plain: ollama.Client) -> None:
    answer = plain.chat("fake", MESSAGES, logprobs=True, top_logprobs=2, options={"num_predict": 4})
    assert answer.logprobs is not None
    assert "".join(each.token for each in answer.logprobs) == answer.message.content
    assert [(each.logprob, len(each.top_logprobs or [])) for each in answer.logprobs] == [(-0.25, 2)] * 4


def test_empty_request_answers_load(client: ollama.Client) -> None:
    chat, prompt = client.chat("fake"), client.generate("fake", "", keep_alive="5m")
    assert (chat.done, chat.done_reason, chat.message.content) == (True, "load", "")
    assert (prompt.done, prompt.done_reason, prompt.response) == (True, "load", "")
    assert [line.done_reason for line in client.chat("fake", [], stream=True)] == ["load"]
    assert client.embed("fake", []).embeddings == []
    assert client.embeddings("fake", "").embedding == []


@pytest.mark.parametrize(
    ("keep_alive", "reason"),
    [
        *((zero, "unload") for zero in (0, 0.0, "0", "0s", "0.0s", "0h0m0s", "-0ms")),
        *((kept, "load") for kept in (None, -1, 1, 0.5, "5m", "-1", "0h1s", "0.5s", "", "zero", "00:00", True)),
    ],
    ids=repr,
)
def test_empty_request_with_zero_keep_alive_answers_unload(
    running: Running, client: ollama.Client, keep_alive: Any, reason: str
) -> None:
    with running.http() as http:
        for path, fields in (("/api/chat", {"messages": []}), ("/api/generate", {"prompt": ""})):
            body = {"model": "fake", "keep_alive": keep_alive, **fields}
            told = http.post(path, json=body).json()
            assert (told["done"], told["done_reason"]) == (True, reason)
    if reason == "unload":
        answer = client.chat("fake", MESSAGES, keep_alive=keep_alive, options={"num_predict": 1})
        assert answer.done_reason == "length", "with messages it is a request like any other"


def test_ollama_client_lists_and_shows_models(client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == ["fake:latest", "alias/of-fake:latest"]
    loaded = client.ps().models
    assert [(model.name, model.context_length) for model in loaded] == [
        ("fake:latest", 2048),
        ("alias/of-fake:latest", 2048),
    ]
    shown = client.show("alias/of-fake:latest")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.basename"] == "alias/of-fake"
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == 2048
    assert not shown.template, "it is the operator's"


def test_ollama_probe_paths_answer(running: Running) -> None:
    """Clients probe these paths to find an Ollama server."""
    with running.http() as http:
        assert "Ollama is running" in http.get("/").text
        assert [http.head(path).status_code for path in ("/", "/api/version", "/api/tags")] == [200] * 3
        version = http.get("/api/version").json()["version"]
        assert tuple(map(int, version.split("."))) >= (0, 6, 4), "some ask for that"


@pytest.mark.parametrize(
    "change",
    [
        lambda client: client.pull("other"),
        lambda client: list(client.pull("other", stream=True)),
        lambda client: client.push("fake"),
        lambda client: client.create("mine", from_="fake"),
        lambda client: client.copy("fake", "mine"),
        lambda client: client.delete("fake"),
    ],
    ids=["pull", "pull as a stream", "push", "create", "copy", "delete"],
)
def test_model_management_answers_403(client: ollama.Client, change: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="cannot change models") as refused:
        change(client)
    assert refused.value.status_code == 403


def test_blob_upload_answers_403(running: Running) -> None:
    with running.http() as http:
        answer = http.post("/api/blobs/sha256:00", content=b"x")
        assert (answer.status_code, list(answer.json())) == (403, ["error"])


def test_async_ollama_stream_equals_unstreamed_chat(running: Running) -> None:
    async def ask() -> tuple[ollama.ChatResponse, list[ollama.ChatResponse]]:
        async with ollama.AsyncClient(running.url, timeout=DEADLINE_S) as client:
            whole = await client.chat("fake", MESSAGES)
            return whole, [line async for line in await client.chat("fake", MESSAGES, stream=True)]

    whole, lines = asyncio.run(ask())
    assert joined(lines) == joined([whole])


def test_unknown_model_and_unsupported_thinking_raise_response_error(
    client: ollama.Client, plain: ollama.Client
) -> None:
    asking = [
        lambda name: client.chat(name, MESSAGES),
        lambda name: list(client.generate(name, "Hello", stream=True)),
        lambda name: client.embed(name, "Hello"),
        lambda name: client.embeddings(name, "Hello"),
        client.show,
    ]
    for ask in asking:  # clients match these words, and then pull the model
        with pytest.raises(ollama.ResponseError, match=r"^model 'other:7b' not found, try pulling it first") as unknown:
            ask("other:7b")
        assert unknown.value.status_code == 404
        assert "fake, alias/of-fake" in str(unknown.value)
    for refused in (
        lambda: plain.chat("fake", MESSAGES, think=True),
        lambda: list(plain.generate("fake", "Hello", think="low", stream=True)),
    ):
        with pytest.raises(ollama.ResponseError, match="'fake' does not support thinking") as error:
            refused()
        assert error.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="prompt is too long"):
        plain.generate("fake", "x" * 3000)


@pytest.mark.parametrize("said", ["application/x-www-form-urlencoded", "text/plain", None])
def test_json_content_type_is_optional_without_origin_header(running: Running, said: str | None) -> None:
    """Ollama's documents use `curl -d` without a JSON type. A browser page, which sends its origin, must send it."""
    with running.http() as http:

        def post(path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> httpx.Response:
            request = http.build_request("POST", path, content=json.dumps(body), headers=headers)
            request.headers.pop("content-type", None)
            request.headers.update({} if said is None else {"Content-Type": said})
            return http.send(request)

        for path, body in (
            ("chat", CHAT),
            ("generate", {"model": "fake", "prompt": "Hi"}),
            ("show", {"model": "fake"}),
        ):
            taken = post(f"/api/{path}", body)
            assert taken.status_code == 200, taken.text
        page = post("/api/chat", CHAT, {"Origin": running.url})
        assert (page.status_code, list(page.json())) == (415, ["error"])
        assert post("/v1/chat/completions", CHAT).status_code == 415


def test_failed_ollama_stream_ends_with_error_line() -> None:
    executor = FakeExecutor(step_s=0.01)
    with run_server(executor) as running, ollama.Client(running.url, timeout=DEADLINE_S) as client:
        lines = client.chat("fake", MESSAGES, stream=True)
        next(lines)
        executor.fail_next = True
        with pytest.raises(ollama.ResponseError, match="failed"):
            list(lines)


def test_disconnect_aborts_ollama_stream() -> None:
    with run_server(FakeExecutor(step_s=0.01)) as running, running.http() as http:
        with http.stream("POST", "/api/chat", json={**CHAT, "stream": True}) as answer:
            assert answer.headers["content-type"] == "application/x-ndjson"
            next(answer.iter_lines())
        wait_until(lambda: not running.num_unfinished, "its request has ended")
        assert running.num_blocks_in_use == 0


def test_idle_stream_sends_blanks_between_valid_json_lines() -> None:
    executor = FakeExecutor()
    executor.gate.clear()
    with run_server(executor, stream_keep_alive_s=0.02) as running, running.http() as http:
        with http.stream("POST", "/api/generate", json={"model": "fake", "prompt": "Hello"}) as answer:
            pieces = answer.iter_bytes()
            text = next(pieces)
            assert text.strip(b" ") == b""
            executor.gate.set()
            text += b"".join(pieces)
        told = [json.loads(line) for line in text.splitlines()]
        turn = len("<user>Hello\n<assistant>")
        assert "".join(line["response"] for line in told) == answer_text(turn)
        assert told[-1]["done"]


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"model": None}, "model"),
        ({"model": 7}, "model"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": ["Hello"]}, r"messages\[0\]"),
        ({"messages": [{"content": "Hello"}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "user", "content": 7}]}, r"messages\[0\].content"),
        ({"messages": [{"role": "user", "content": "Hello", "images": ["aGk="]}]}, r"messages\[0\].images"),
        ({"messages": [{"role": "assistant", "tool_calls": [7]}]}, r"messages\[0\].tool_calls\[0\]"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": 7}}]}]},
            "arguments",
        ),
        ({"tools": [7]}, r"tools\[0\]"),
        ({"tools": {"now": 1}}, "tools"),
        ({"format": "xml"}, "format"),
        ({"format": ["json"]}, "format"),
        ({"think": 7}, "think"),
        ({"stream": "yes"}, "stream"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"options": 7}, "options"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"temperature": -1}}, "temperature"),
        ({"options": {"num_predict": -3}}, "num_predict"),
        ({"options": {"repeat_penalty": 0}}, "repeat_penalty"),
        ({"options": {"repeat_penalty": 1.1, "repeat_last_n": 32}}, "repeat_last_n"),
        ({"options": {"top_k": 40.5}}, "top_k"),
        ({"options": {"top_k": "40"}}, "top_k"),
        ({"options": {"mirostat": 1}}, "mirostat"),
        ({"options": {"tfs_z": 0.5}}, "tfs_z"),
        ({"options": {"penalize_newline": False}}, "penalize_newline"),
        ({"temperature": 0.5}, "temperature must be in options"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"system": "Be brief."}, "system"),
        ({"truncate": 2}, "truncate"),
        ({"shift": "yes"}, "shift"),
    ],
)
def test_chat_error_names_invalid_field(running: Running, fields: dict[str, Any], what: str) -> None:
    _refused(running, "/api/chat", {**CHAT, **fields}, what)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"prompt": 7}, "prompt"),
        ({"prompt": "a", "context": [1, 2]}, "context"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "images": ["aGk="]}, "images"),
        ({"prompt": "a", "template": "x"}, "template"),
        ({"prompt": "a", "width": 64}, "width"),
        ({"prompt": "a", "raw": 1}, "raw"),
        ({"prompt": "a", "raw": True, "system": "Be brief."}, "leave system"),
        ({"prompt": "a", "raw": True, "think": True}, "leave system and think out"),
        ({"messages": MESSAGES}, "messages"),
    ],
)
def test_generate_error_names_invalid_field(running: Running, fields: dict[str, Any], what: str) -> None:
    _refused(running, "/api/generate", {"model": "fake", "stream": False, **fields}, what)


@pytest.mark.parametrize(
    ("path", "fields", "what"),
    [
        ("/api/embed", {"input": 7}, "input"),
        ("/api/embed", {"input": "a", "dimensions": -1}, "dimensions"),
        ("/api/embed", {"input": "a", "dimensions": 9}, "dimensions"),
        ("/api/embed", {"input": "a" * 4000, "truncate": False}, "too long"),
        ("/api/embeddings", {"prompt": ["a"]}, "prompt"),
        ("/api/show", {"model": ""}, "model is required"),
    ],
)
def test_embed_and_show_errors_name_invalid_field(
    running: Running, path: str, fields: dict[str, Any], what: str
) -> None:
    _refused(running, path, {"model": "fake", **fields}, what)


def _refused(running: Running, path: str, body: dict[str, Any], what: str) -> None:
    with running.http() as http:
        answer = http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        (message,) = answer.json().values()
        assert re.search(what, message), message
    assert not running.num_unfinished


def test_model_loading_options_and_disabled_features_are_accepted(plain: ollama.Client) -> None:
    """Options for loading a model, features that are off, and values that disable a field."""
    expected = plain.chat("fake", MESSAGES).message
    options = {"num_gpu": 1, "num_thread": 8, "use_mmap": True, "num_keep": 5, "mirostat": 0, "tfs_z": 1.0}
    more = {"num_batch": 512, "repeat_last_n": 64, "repeat_penalty": 1.0, "num_ctx": 512, "numa": False}
    assert plain.chat("fake", MESSAGES, options={**options, **more}, keep_alive="5m", format="").message == expected


@pytest.mark.sweep(8)
@pytest.mark.parametrize("limit", [0, 0.0, -1, -2])
def test_zero_or_negative_num_predict_is_unlimited(plain: ollama.Client, running: Running, limit: float) -> None:
    assert plain.chat("fake", MESSAGES, options={"num_predict": limit}).done_reason == "stop"
    with running.http() as http:
        assert _webui_chat(http, num_predict=0)[-1]["done_reason"] == "stop"


@pytest.mark.parametrize("stop", ["", [""], ["", ""]], ids=repr)
def test_empty_stop_strings_are_ignored(plain: ollama.Client, stop: Any) -> None:
    whole = plain.chat("fake", MESSAGES).message.content
    assert plain.chat("fake", MESSAGES, options={"stop": stop}).message.content == whole
    stopped = plain.chat("fake", MESSAGES, options={"stop": ["", "fox"]}).message.content
    assert stopped == whole[: whole.index("fox")]


def test_unknown_ollama_options_are_ignored_with_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Options of other routes are ignored as well, whether served or refused there. Ollama also warns of each."""
    unknown = {"num_beams": 4, "max_tokens": 1, "grammar": "x", "rope_frequency_base": 1e4, "guided_json": {}}
    with run_server() as server, server.http() as http, caplog.at_level(logging.INFO):
        answers = [
            http.post("/api/chat", json={**CHAT, "options": options}).json()["message"]
            for options in ({}, unknown, unknown)
        ]
        refused = http.post("/api/chat", json={**CHAT, "options": {"mirostat": 2}})
    assert answers == answers[:1] * 3
    told = [record for record in caplog.records if "unknown fields" in record.message]
    assert [record.levelname for record in told] == ["WARNING"]
    assert all(name in told[0].message for name in unknown)
    assert refused.status_code == 400, "Ollama knows this one"


OLLAMAS_DEFAULTS = {
    "temperature": 0.8, "top_k": 40.0, "top_p": 0.9, "min_p": 0, "typical_p": 1, "tfs_z": 1.0, "repeat_last_n": 64,
    "repeat_penalty": 1.1, "presence_penalty": 0, "frequency_penalty": 0.0, "mirostat": 0, "mirostat_tau": 5.0,
    "mirostat_eta": 0.1, "penalize_newline": True, "seed": -1, "num_predict": -1, "num_keep": 4, "num_ctx": 2048.0,
    "numa": False, "num_batch": 512, "num_gpu": -1, "main_gpu": 0, "low_vram": False, "f16_kv": True, "stop": [],
    "logits_all": False, "vocab_only": False, "use_mmap": True, "use_mlock": False, "embedding_only": False,
    "num_thread": 0,
}  # fmt: skip


def test_ollama_default_options_are_accepted(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Clients that send all options send most of them with defaults. The table has all options of the package."""
    assert ollama.Options.model_fields.keys() <= OLLAMAS_DEFAULTS.keys()
    for_both = {
        "truncate": True,
        "shift": True,
        "logprobs": False,
        "top_logprobs": 0,
        "keep_alive": "5m",
        "format": "",
    }
    prompt = {"prompt": "Hi", "suffix": "", "system": "", "template": "", "raw": False, "context": [], "images": []}
    with caplog.at_level(logging.WARNING, "octavo.server.api.extra_fields"), running.http() as http:
        for path, fields in (("/api/chat", {"messages": MESSAGES, "tools": []}), ("/api/generate", prompt)):
            body = {"model": "fake", "stream": False, "options": OLLAMAS_DEFAULTS, **for_both, **fields}
            assert http.post(path, json=body).status_code == 200, http.post(path, json=body).text
    assert "penalties cover all tokens" in caplog.text


@pytest.mark.parametrize(("last_n", "told"), [(0, (1.0, 0.0, 0.0)), (-1, (1.5, 1.0, 0.5)), (64, (1.5, 1.0, 0.5))])
def test_zero_repeat_last_n_disables_penalties(last_n: int, told: tuple[float, ...]) -> None:
    info = SimpleNamespace(generation_defaults={})
    service: Any = SimpleNamespace(default_params=SamplingParams(), model_info=info, extra_fields=ExtraFields())
    penalties = {"repeat_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5}
    options = {**penalties, "repeat_last_n": last_n, "seed": -1, "top_k": 7.0}
    params = ChatRequest.model_validate({**CHAT, "options": options}).params(service)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == told
    assert (params.seed, params.top_k) == (None, 7)


def test_large_num_ctx_and_unknown_fields_are_logged_once(shared: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "octavo.server.api.extra_fields"), shared.http() as http:
        for _ in range(2):
            body = {**CHAT, "options": {"num_ctx": 32768, "num_predict": 1, "new_option": 1}, "new_field": 2}
            assert http.post("/api/chat", json=body).status_code == 200
    told = ("num_ctx 32768 is more than max_model_len 2048", "new_field", "new_option")
    assert [caplog.text.count(each) for each in told] == [1, 1, 1]


def test_unsupported_field_error_lists_accepted_values(running: Running) -> None:
    with running.http() as http:
        told = [
            http.post("/api/chat", json={**CHAT, **fields}).json()["error"]
            for fields in ({"options": {"repeat_penalty": 1.1, "repeat_last_n": 32}}, {"context": [1]}, {"task": "x"})
        ]
    assert told == [
        "repeat_last_n is not supported by this server: leave it out, or give -1 or 0 or 64",
        "context is not supported by this server: leave it out, or give []",
        "task is not supported by this server: leave it out",
    ]


def test_durations_are_engine_clock_nanoseconds() -> None:
    one = RequestMetrics(1.0, 1.5, 2.0, 4.0)
    assert durations([one]) == (3_000_000_000, 500_000_000, 2_000_000_000)
    assert durations([one, RequestMetrics(0.5, 1.25, 3.0, 5.0)]) == (4_500_000_000, 750_000_000, 3_000_000_000)
    assert durations([RequestMetrics(1.0, 1.5, None, 4.0)]) == (3_000_000_000, 2_500_000_000, 0)
    assert durations([RequestMetrics(1.0)]) == (0, 0, 0)


# --- Open WebUI: the requests that its backend sends to Ollama, as in `backend/open_webui/routers/ollama.py`.

WEBUI_HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer key"}


def _webui_chat(http: httpx.Client, **more: Any) -> list[dict[str, Any]]:
    """Chat as Open WebUI does: a body converted from OpenAI's, and every line parsed separately."""
    payload = {
        "model": "fake:latest",
        "messages": [{"role": "system", "content": "Be brief."}, *MESSAGES],
        "stream": True,
        "options": {"temperature": 0.7, "num_ctx": 4096, "stop": ["zzz"], "num_gpu": 1},
        "keep_alive": "5m",
        "metadata": {"chat_id": "1", "features": {}},
        **more,
    }
    with http.stream("POST", "/api/chat", content=json.dumps(payload), headers=WEBUI_HEADERS) as answer:
        assert answer.status_code == 200, answer.read()
        return [json.loads(line) for line in answer.iter_lines()]


def test_show_and_list_report_gguf_quantization(client: ollama.Client, plain: ollama.Client) -> None:
    shown = client.show("fake")
    assert shown.details is not None
    assert (shown.details.format, shown.details.quantization_level) == ("gguf", "Q4_K_M")
    assert (shown.modelinfo or {})["general.file_type"] == 15
    assert {each.details.quantization_level for each in client.list().models if each.details} == {"Q4_K_M"}
    assert {each.size for each in client.list().models} == {each.size for each in client.ps().models} == {98_000_000}
    other = plain.show("fake")
    assert other.details is not None
    assert (other.details.format, other.details.quantization_level) == ("", "")
    assert "general.file_type" not in (other.modelinfo or {})


def test_open_webui_lists_models(running: Running) -> None:
    with running.http() as http:
        assert http.get("/api/version", headers=WEBUI_HEADERS).json()["version"]
        models = http.get("/api/tags", headers=WEBUI_HEADERS).json()["models"]
        loaded = {each["name"]: each["expires_at"] for each in http.get("/api/ps").json()["models"]}
        known = {model["model"]: model for model in models}
        assert "fake:latest" in known, "it writes :latest behind a name without a tag, and looks for that"
        for model in models:
            assert loaded[model["name"]]
            assert {"name", "model", "digest", "size", "details", "modified_at"} <= model.keys()
            assert len(model["digest"]) == 64
        shown = http.post("/api/show", json={"name": "fake:latest", "model": "fake:latest"}).json()
        assert {"details", "model_info", "capabilities"} <= shown.keys()


def test_open_webui_chat_has_counts_and_durations(running: Running) -> None:
    with running.http() as http:
        lines = _webui_chat(http)
        assert all(line["model"] == "fake:latest" and line["message"]["role"] == "assistant" for line in lines)
        assert "".join(line["message"].get("thinking", "") for line in lines) == "Rome, 狐."
        last = lines[-1]
        assert (last["done"], last["done_reason"]) == (True, "stop")
        for name in ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration"):
            assert isinstance(last[name], int)
        assert last["eval_duration"] > 0
        assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"]
        assert (last["prompt_eval_count"] > 0, last["eval_count"] > 0) == (True, True)
        assert _webui_chat(http, num_predict=3)[-1]["eval_count"] == 3, "where its own body has max_tokens"
        assert _webui_chat(http, stream=False)[-1]["message"]["content"]


def test_open_webui_tool_calls_are_accepted_and_returned(running: Running) -> None:
    """Open WebUI sends calls with an index and a null id, and their results with an id only."""
    call = {"index": 0, "id": None, "function": {"name": "now", "arguments": {}}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call], "content": ""},
        {"role": "tool", "content": "noon", "tool_call_id": "call_1"},
    ]
    with running.http() as http:
        lines = _webui_chat(http, messages=messages, tools=[NOW], format=None, think=False)
        calls = [call for line in lines for call in line["message"].get("tool_calls", [])]
        assert [(call["function"]["name"], call["function"]["index"]) for call in calls] == [("now", 0)]
        assert calls[0]["id"]


def test_open_webui_unload_keeps_model_loaded(running: Running) -> None:
    with running.http() as http:
        told = http.post("/api/generate", json={"model": "fake:latest", "keep_alive": 0, "prompt": ""}).json()
        assert (told["done"], told["done_reason"]) == (True, "unload")
        assert http.get("/api/ps").json()["models"], "it stays loaded"


def test_ollama_routes_require_api_key() -> None:
    with run_server(api_key="secret") as running:
        with ollama.Client(running.url, timeout=DEADLINE_S) as stranger:
            for ask in (stranger.list, lambda: stranger.chat("fake", MESSAGES), lambda: stranger.pull("fake")):
                with pytest.raises(ollama.ResponseError, match="a valid API key is needed") as refused:
                    ask()
                assert refused.value.status_code == 401
        with ollama.Client(running.url, timeout=DEADLINE_S, headers={"Authorization": "Bearer secret"}) as client:
            assert client.chat("fake", MESSAGES).message.content


def test_full_server_answers_429_with_retry_after(caplog: pytest.LogCaptureFixture) -> None:
    """Each accepted request also has a line in the audit log, with the served model name."""
    executor = FakeExecutor(step_s=0.005)
    with (
        caplog.at_level(logging.INFO, "octavo.audit"),
        run_server(executor, max_open_requests=1) as running,
        running.http() as http,
    ):
        endless = {**CHAT, "model": "fake:latest", "stream": True, "options": {"num_predict": 2000, "ignore_eos": True}}
        with http.stream("POST", "/api/chat", json=endless) as stream:
            lines = stream.iter_lines()
            next(lines)
            refused = http.post("/api/chat", json=CHAT)
            assert (refused.status_code, list(refused.json())) == (429, ["error"])
            assert int(refused.headers["retry-after"]) >= 1
        wait_until(lambda: "/api/chat" in caplog.text and '"model": "fake"' in caplog.text, "it is written down")
