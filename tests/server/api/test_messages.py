"""Anthropic's API with the real `anthropic` package: the streamed answer equals the whole one."""

from __future__ import annotations

import json
import logging
import re
from typing import TYPE_CHECKING, Any

import pytest
from fakes import FakeChatTemplate, FakeExecutor
from running import DEADLINE_S, run_server
from sdks import anthropic

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx
    from running import Running

ANSWER = (
    '<think>Rome, 狐.</think>\n\nI look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Röme"}}\n'
    '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
WEATHER: Any = {
    "name": "get_weather",
    "description": "What the weather is like.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
USE: Any = {"type": "tool_use", "id": "c1", "name": "now", "input": {}}
NOW: Any = {"name": "now", "input_schema": {"type": "object"}}
MESSAGES: list[Any] = [{"role": "user", "content": "How is Rome?"}]
ASKED: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "max_tokens": 1000}
LONG: dict[str, Any] = {**ASKED, "messages": [{"role": "user", "content": "How is Rome? " * 20}], "max_tokens": 1}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    template = FakeChatTemplate("<tool_call> </think>")
    with run_server(FakeExecutor(answer=ANSWER), engine_options={"chat_template": template}) as running:
        yield running


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(running) as client:
        yield client


def anthropic_client(server: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=DEADLINE_S)


def without_ids(message: anthropic.types.Message) -> dict[str, Any]:
    fields = message.model_dump()
    for block in fields["content"]:
        block.pop("id", None)
    return {name: fields[name] for name in ("role", "model", "content", "stop_reason", "stop_sequence", "usage")}


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    "options",
    [
        {"tools": [WEATHER, NOW]},
        {"tools": [WEATHER, NOW], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {},
        {"stop_sequences": ["look"]},
        {"system": [{"type": "text", "text": "Be brief."}], "extra_body": {"temperature": 0.5, "top_k": 5}},
    ],
)
def test_message_stream_equals_unstreamed_message(client: anthropic.Anthropic, options: dict[str, Any]) -> None:
    whole = client.messages.create(**ASKED, **options)
    with client.messages.stream(**ASKED, **options) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    first, second = without_ids(whole), without_ids(streamed)
    for usage in (first["usage"], second["usage"]):  # the second request hits the first one's prompt
        usage["input_tokens"] += usage.pop("cache_read_input_tokens")
        usage.pop("receipt", None)  # the package keeps this field only in whole answers
    assert first == second
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole.content)


def test_message_has_thinking_text_and_tool_use_blocks(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**ASKED, tools=[WEATHER, NOW])
    thinking, text, weather, now = message.content
    assert (thinking.type, text.type, weather.type, now.type) == ("thinking", "text", "tool_use", "tool_use")
    assert thinking.thinking == "Rome, 狐."
    assert thinking.signature, "clients send no thoughts back without one"
    assert text.text == "I look."
    assert (weather.name, weather.input) == ("get_weather", {"city": "Röme"})
    assert (now.name, now.input) == ("now", {})
    assert weather.id != now.id
    assert message.stop_reason == "tool_use"
    assert client.messages.create(**{**ASKED, "max_tokens": 3}).stop_reason == "max_tokens"
    stopped = client.messages.create(**ASKED, stop_sequences=["zzz", "look"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "look")
    assert client.messages.create(**ASKED).stop_reason == "end_turn"


@pytest.mark.turn(12)
def test_truncated_tool_use_streams_equally(client: anthropic.Anthropic) -> None:
    for limit in range(1, len(ANSWER.encode()), 5):
        asked = {**ASKED, "max_tokens": limit, "tools": [WEATHER, NOW]}
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        assert without_ids(whole)["content"] == without_ids(streamed)["content"]
        assert streamed.stop_reason == whole.stop_reason == "max_tokens"


def test_conversation_blocks_reach_chat_template(client: anthropic.Anthropic) -> None:
    template = FakeChatTemplate("<tool_call> </think>")
    with run_server(engine_options={"chat_template": template}) as running, running.http() as http:
        messages = [
            *MESSAGES,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "c1", "name": "now", "input": {"zone": "UTC"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "noon"}]},
                    {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}},
                ],
            },
        ]
        body = {"model": "fake", "system": "Be brief.", "messages": messages, "tools": [NOW]}
        num_tokens = http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
        answer = http.post("/v1/messages", json={**body, "max_tokens": 1}).json()
        assert answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"] == num_tokens
        call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
        tools = json.dumps(
            [{"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}}]
        )
        text = (
            f"<tools>{tools}\n<system>Be brief.\n<user>How is Rome?\n<assistant>I look.{json.dumps([call])}\n"
            "<tool>noon\n<user>And?\n<assistant>"
        )
        assert num_tokens == len(text.encode())


def test_claude_code_billing_note_is_removed_from_prompt(running: Running) -> None:
    """Claude Code's note for billing is removed: it differs in every request, so no prefix would hit."""
    note = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1f3;"}
    rules = {"type": "text", "text": "Say x-anthropic-billing-header as it is."}
    edits = {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}

    def count(http: httpx.Client, **fields: Any) -> int:
        answer = http.post("/v1/messages/count_tokens", json={"model": "fake", "messages": MESSAGES, **fields})
        return answer.json()["input_tokens"]

    with running.http() as http:
        assert count(http, system=[note, rules]) == count(http, system=[rules]) > count(http)
        assert count(http, system=[note]) == count(http)
        assert http.post("/v1/messages", json={**ASKED, **edits, "system": [note, rules]}).status_code == 200


def test_chat_template_kwargs_and_cache_salt_are_applied() -> None:
    template = FakeChatTemplate()
    with run_server(engine_options={"chat_template": template}) as running, running.http() as http:
        fields = {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False, "tone": "dry"}}
        for route in ("/v1/messages", "/v1/messages/count_tokens"):
            assert http.post(route, json={**ASKED, **fields}).status_code == 200
            assert (template.options["enable_thinking"], template.options["tone"]) == (False, "dry")
            template.options = {}
        for salt, is_found in (("a", False), ("b", False), ("a", True)):
            usage = http.post("/v1/messages", json={**LONG, "cache_salt": salt}).json()["usage"]
            assert (usage["cache_read_input_tokens"] > 0) == is_found
        for name in ("tools", "chat_template", "add_generation_prompt"):
            response = http.post("/v1/messages", json={**ASKED, "chat_template_kwargs": {name: None}})
            assert response.status_code == 400
            assert f"chat_template_kwargs must not set {name}" in response.json()["error"]["message"]


def test_thinking_field_sets_enable_thinking(caplog: pytest.LogCaptureFixture) -> None:
    """The `thinking` field is read. Clients must send a budget, but only max_tokens bounds an answer here."""
    caplog.set_level(logging.INFO, "octavo")
    template = FakeChatTemplate()
    kinds: list[Any] = [
        ({"type": "enabled", "budget_tokens": 1024, "display": "omitted"}, True),
        ({"type": "disabled"}, False),
        ({"type": "adaptive", "display": "summarized"}, None),
    ]
    with (
        run_server(engine_options={"chat_template": template}) as running,
        anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0, timeout=DEADLINE_S) as client,
    ):
        for config, wanted in kinds:
            assert client.messages.create(**{**ASKED, "max_tokens": 3}, thinking=config).content
            assert template.options.get("enable_thinking") is wanted
            client.messages.count_tokens(model="fake", messages=MESSAGES, thinking=config)
    assert not [message for message in caplog.messages if "unknown fields" in message]


def test_overlong_prompt_error_has_anthropic_and_openai_wording(running: Running) -> None:
    """Claude Code shortens a conversation on Anthropic's words. litellm switches to another model on OpenAI's."""
    asked = {**ASKED, "messages": [{"role": "user", "content": "x" * 3000}]}
    with running.http() as http:
        response = http.post("/v1/messages", json=asked)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert re.search(r"prompt is too long: (\d+) tokens > (\d+) maximum", message)
    assert "this model's maximum context length is" in message


def test_final_assistant_message_is_continued(client: anthropic.Anthropic) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    more = client.messages.count_tokens(model="fake", messages=begun).input_tokens  # type: ignore[arg-type]
    assert more == len(b"<user>How is Rome?\n<assistant>It is\n")


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": {}, "content": "a"}]}, "messages[0].role"),
        ({"tools": [{"type": [], "name": "a"}]}, "tools[0]"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0]"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": [USE]}]}, "tool_result"),
        ({"thinking": {"type": "between_tools"}}, "between_tools"),
        ({"thinking": {"type": "often"}}, "thinking"),
        ({"system": 7}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"name": "a", "input_schema": 7}]}, "tools[0].input_schema"),
        ({"tools": [NOW], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": ["auto"]}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop"),
        ({"temperature": -1.0}, "temperature"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
        ({"watermarking": True}, "watermarking"),
    ],
)
def test_invalid_message_fields_are_refused_by_name(running: Running, body: dict[str, Any], parameter: str) -> None:
    with running.http() as http:
        response = http.post("/v1/messages", json={**ASKED, **body})
        assert response.status_code == 400, response.text
        error = response.json()
        assert error["type"] == "error"
        assert error["error"]["type"] == "invalid_request_error"
        assert parameter in error["error"]["message"]


@pytest.mark.turn(12)
def test_beta_tool_runner_works_without_thread() -> None:
    called = []

    def now() -> str:
        """Tell the time."""
        called.append("now")
        return "noon"

    recited = FakeExecutor(answer='<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    options = {"chat_template": FakeChatTemplate("<tool_call>")}
    with run_server(recited, engine_options=options) as server, anthropic_client(server) as client:
        runner = client.beta.messages.tool_runner(**ASKED, tools=[anthropic.beta_tool(now)], max_iterations=2)
        answers = [[block.type for block in message.content] for message in runner]
    assert answers == [["tool_use"], ["tool_use"]]
    assert called == ["now", "now"]


def test_thread_refusal_has_sdk_error_details(running: Running) -> None:
    with running.http() as http:
        for route in ("messages", "messages/count_tokens"):
            refused = http.post(f"/v1/{route}", json={**ASKED, "thread": {"type": "create"}})
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        other = http.post("/v1/messages", json={**ASKED, "watermarking": True})
        assert "details" not in other.json()["error"]
        assert http.post("/v1/messages", json={**ASKED, "thread": None}).status_code == 200


def test_all_errors_have_anthropic_format(running: Running) -> None:
    with running.http() as http:
        replies = [http.post("/v1/messages/nothing"), http.get("/v1/messages"), http.post("/v1/messages", content=b"{")]
        replies.append(http.post("/v1/messages", json={**ASKED, "thinking": {"type": []}}))
    with run_server(api_key="key") as keyed, keyed.http() as http:
        replies.append(http.post("/v1/messages", json=ASKED))
    executor = FakeExecutor()
    with run_server(executor) as failing, failing.http() as http:
        executor.fail_next = True
        replies.append(http.post("/v1/messages", json=ASKED))
    assert [reply.status_code for reply in replies] == [404, 405, 400, 400, 401, 500]
    invalid = ["invalid_request_error"] * 2
    kinds = ["not_found_error", "api_error", *invalid, "authentication_error", "api_error"]
    assert [reply.json()["error"]["type"] for reply in replies] == kinds
    assert {reply.json()["type"] for reply in replies} == {"error"}


def test_errors_raise_anthropic_exceptions(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**ASKED, "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="tokens"):
        client.messages.create(**{**ASKED, "messages": [{"role": "user", "content": "a" * 5000}]})


def test_x_api_key_header_authenticates() -> None:
    with run_server(api_key="right") as running:
        for key, error in (("right", None), ("wrong", anthropic.AuthenticationError)):
            with anthropic.Anthropic(base_url=running.url, api_key=key, max_retries=0, timeout=DEADLINE_S) as client:
                if error is None:
                    assert client.messages.create(**ASKED).content
                else:
                    with pytest.raises(error):
                        client.messages.create(**ASKED)
        with running.http() as http:
            right, wrong = {"x-api-key": "right"}, {"Authorization": "Bearer wrong"}
            assert http.get("/version", headers=right).status_code == 200
            assert http.get("/version", headers={**right, **wrong}).status_code == 401
            assert http.get("/version", headers={**right, "Authorization": "Bearer right"}).status_code == 200
            assert http.get("/version", headers=[("x-api-key", "right")] * 2).status_code == 401


def test_failed_message_stream_ends_with_error_event() -> None:
    executor = FakeExecutor(step_s=0.01)
    with run_server(executor) as running, running.http() as http:
        events = []
        with http.stream("POST", "/v1/messages", json={**ASKED, "stream": True}) as response:
            lines = response.iter_lines()
            for line in lines:
                if line.startswith("event: "):
                    events.append(line.removeprefix("event: "))
                if len(events) == 5:
                    executor.fail_next = True
        assert events[-1] == "error"
        assert "message_stop" not in events
