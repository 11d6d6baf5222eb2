"""OpenAI's Responses API with the real `openai` package: the streamed answer equals the whole one."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from fakes import FakeChatTemplate, FakeExecutor
from running import DEADLINE_S, run_server
from sdks import openai

from octavo.sampling_params import SamplingParams
from octavo.server.answers import answering
from octavo.server.api.openai.requests import SamplingControls
from octavo.server.api.openai.response_items import read_items
from octavo.server.api.openai.responses import ResponsesRequest, _params

if TYPE_CHECKING:
    from collections.abc import Iterator

    from running import Running

ANSWER = (
    '<think>Rome, 狐.</think>\n\nI look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Röme"}}\n'
    '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": None,
}
NOW: Any = {"type": "function", "name": "now", "parameters": None, "strict": None}
ASKED: dict[str, Any] = {"model": "fake", "input": "How is Rome?"}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    template = FakeChatTemplate("<tool_call> </think>")
    with run_server(FakeExecutor(answer=ANSWER), engine_options={"chat_template": template}) as running:
        yield running


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with make_client(running) as client:
        yield client


def make_client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)


def comparable(response: Any) -> dict[str, Any]:
    """Return the fields that are equal for two answers to the same request."""
    fields = response.to_dict()
    fields.pop("id")
    fields.pop("created_at")
    for cost in ("input_tokens_details", "receipt"):
        fields["usage"].pop(cost)  # the second request hits the first one's prompt
    for item in fields["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return fields  # type: ignore[no-any-return]


def allowed(*names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": name} for name in names]}


def rebuild(events: list[Any]) -> list[dict[str, Any]]:
    """Rebuild the items from a stream's deltas only."""
    items: list[dict[str, Any]] = []
    for number, event in enumerate(events):
        assert event.sequence_number == number
        if event.type == "response.output_item.added":
            assert event.output_index == len(items)
            items.append({"type": event.item.type, "text": ""})
        elif event.type.endswith(".delta"):
            items[event.output_index]["text"] += event.delta
        elif event.type == "response.function_call_arguments.done":
            assert items[event.output_index]["text"] == event.arguments
        elif event.type in {"response.output_text.done", "response.reasoning_text.done"}:
            assert items[event.output_index]["text"] == event.text
    return items


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    "options",
    [
        {"tools": [WEATHER, NOW]},
        {"tools": [WEATHER, NOW], "parallel_tool_calls": False, "tool_choice": "auto"},
        {"tools": [WEATHER, NOW], "max_output_tokens": 90},
        {"tools": [NOW], "tool_choice": "none"},
        {"max_output_tokens": 16},
        {"instructions": "Be brief.", "temperature": 0.5, "top_p": 0.9, "metadata": {"a": "b"}, "store": True},
    ],
)
def test_response_stream_equals_unstreamed_response(client: openai.OpenAI, options: dict[str, Any]) -> None:
    whole = client.responses.create(**ASKED, **options)
    events = list(client.responses.create(**ASKED, **options, stream=True))
    last = events[-1]
    assert last.type == f"response.{whole.status}"
    assert comparable(last.response) == comparable(whole)
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert len([event for event in events if event.type == last.type]) == 1
    texts = [
        item.arguments if item.type == "function_call" else item.content[0].text  # type: ignore[union-attr, index]
        for item in whole.output
    ]
    assert [item["text"] for item in rebuild(events)] == texts


def test_unstreamed_response_is_encoded_once(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[Any] = []

    def encode(data: Any) -> bytes:
        encoded.append(data)
        return msgspec.json.encode(data)

    monkeypatch.setattr(answering, "encoder", SimpleNamespace(encode=encode))
    whole = client.responses.create(**ASKED, tools=[WEATHER, NOW])
    (answer,) = encoded  # no events of a stream are encoded
    assert answer.id == whole.id


def test_allowed_tools_limit_function_calls(client: openai.OpenAI) -> None:
    choice: Any = allowed("now")
    response = client.responses.create(**ASKED, tools=[WEATHER, NOW], tool_choice=choice)  # type: ignore[call-overload]
    assert [item.name for item in response.output if item.type == "function_call"] == ["now"]
    assert response.tool_choice.to_dict() == choice


def test_input_token_count_equals_response_usage(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {**ASKED, "tools": [NOW], "instructions": "Be brief."}
    usage = client.responses.create(**options).usage
    count = client.responses.input_tokens.count(**options)
    assert usage is not None
    assert (count.object, count.input_tokens) == ("response.input_tokens", usage.input_tokens)
    assert client.responses.input_tokens.count(**ASKED).input_tokens < count.input_tokens
    for refused in ({"personality": "friendly"}, {"previous_response_id": "resp_1"}, {"input": None}):
        with pytest.raises(openai.BadRequestError, match=next(iter(refused))):
            client.responses.input_tokens.count(**{**options, **refused})


def test_response_items_have_reasoning_message_and_calls(client: openai.OpenAI) -> None:
    response = client.responses.create(**ASKED, tools=[WEATHER, NOW])
    reasoning, message, weather, now = response.output
    assert reasoning.content[0].text == "Rome, 狐."  # type: ignore[union-attr, index]
    assert response.output_text == message.content[0].text == "I look."  # type: ignore[union-attr, index]
    assert (weather.name, json.loads(weather.arguments)) == ("get_weather", {"city": "Röme"})  # type: ignore[union-attr]
    assert (now.name, now.arguments) == ("now", "{}")  # type: ignore[union-attr]
    assert response.status == "completed"
    cut = client.responses.create(**ASKED, max_output_tokens=16)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output[-1].status == "incomplete"  # type: ignore[union-attr]


def test_input_items_reach_chat_template() -> None:
    template = FakeChatTemplate("<tool_call> </think>")
    with run_server(engine_options={"chat_template": template}) as running, running.http() as http:
        items = [
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "input_text", "text": "How is Rome?"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "now", "arguments": '{"zone": "UTC"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "noon"},
        ]
        body = {"instructions": "Be brief.", "input": items, "tools": [NOW], "max_output_tokens": 1}
        usage = http.post("/v1/responses", json=body).json()["usage"]
        call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
        text = (
            f"<tools>{json.dumps(template.tools)}\n<system>Be brief.\n\nBe kind.\n<user>How is Rome?\n"
            f"<assistant>I look.{json.dumps([call])}\n<tool>noon\n<assistant>"
        )
        assert usage["input_tokens"] == len(text.encode())


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [7]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "web_search_call", "id": "x", "status": "completed"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "refusal", "refusal": "No."}]}]}, "input[0].content[0]"),
        (
            {"input": [{"type": "function_call", "name": "a", "arguments": "{}", "namespace": "b"}]},
            "input[0].namespace",
        ),
        ({"input": [{"type": "reasoning", "content": [{"type": "image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "bot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": ["user"], "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "name": "a", "arguments": 7}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": -1}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [NOW], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": ["auto"]}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "now"}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": allowed("then")}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 1000.0}, "temperature"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format"),
        ({"text": {"format": "json_object"}}, "text.format"),
        ({"text": {"format": []}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"reasoning": {"effort": 7}}, "reasoning.effort"),
        ({"input": "a" * 5000}, "input"),
    ],
)
def test_invalid_response_fields_are_refused_by_parameter(
    running: Running, body: dict[str, Any], parameter: str
) -> None:
    with running.http() as http:
        response = http.post("/v1/responses", json={**ASKED, **body})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == parameter


def test_failed_stream_ends_with_response_failed_event() -> None:
    executor = FakeExecutor(step_s=0.01)
    with run_server(executor) as running, make_client(running) as client:
        kinds = []
        for event in client.responses.create(**ASKED, stream=True):
            kinds.append(event.type)
            executor.fail_next = executor.fail_next or len(kinds) == 6
        assert kinds[-1] == "response.failed"
        assert event.response.status == "failed"  # type: ignore[union-attr]
        assert event.response.error.message  # type: ignore[union-attr]


def test_consecutive_items_of_one_turn_become_one_message() -> None:
    template = FakeChatTemplate("<tool_call> </think>")
    with run_server(engine_options={"chat_template": template}) as running, running.http() as http:
        call = {
            "type": "function_call",
            "call_id": "c",
            "name": "now",
            "arguments": '{"zone": "U',
        }  # a limit cut it off
        thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
        items = [{"role": "user", "content": "a"}, thought, call, thought, call, {"type": "reasoning", "content": 5}]
        items += [{"type": "function_call_output", "call_id": "c", "output": "noon"}] * 2
        usage = http.post("/v1/responses", json={"input": items, "max_output_tokens": 1}).json()["usage"]
        function = {"id": "c", "type": "function", "function": {"name": "now", "arguments": {"zone": "U"}}}
        text = f"<user>a\n<assistant>{json.dumps([function] * 2)}\n<tool>noon\n<tool>noon\n<assistant>"
        assert usage["input_tokens"] == len(text.encode())


def test_reasoning_summary_is_read_if_content_is_absent() -> None:
    thoughts = {"type": "reasoning", "id": "rs_1", "encrypted_content": "x"}
    summary = [{"type": "summary_text", "text": "Hm."}, {"type": "summary_text", "text": "So."}]
    own = [{"type": "reasoning_text", "text": "I think."}]
    for fields, told in (({"summary": summary}, "Hm.\nSo."), ({"summary": summary, "content": own}, "I think.")):
        answer = {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
        (message,) = read_items(None, [{**thoughts, **fields}, answer])
        assert message == {"role": "assistant", "content": "a", "reasoning_content": told}


def test_input_item_parts_become_text_parts() -> None:
    parts = [{"type": "input_text", "text": text, "prompt_cache_breakpoint": {}} for text in ("a", "b")]
    items = [{"role": "user", "content": parts}, {"type": "function_call_output", "call_id": "c", "output": parts}]
    texts = [{"type": "text", "text": text} for text in ("a", "b")]
    assert [message["content"] for message in read_items("Be brief.", items)] == ["Be brief.", texts, texts]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": ""}
    (message,) = read_items(None, [call])
    assert message["content"] is None


def test_stream_that_fails_before_first_token_sends_created_and_failed() -> None:
    executor = FakeExecutor()
    with run_server(executor, stream_keep_alive_s=0.05) as running, make_client(running) as client:
        executor.gate.clear()
        executor.fail_next = True
        kinds = []
        with client.responses.create(**ASKED, stream=True) as stream:
            executor.gate.set()
            kinds += [event.type for event in stream]
        assert kinds == ["response.created", "response.failed"]


def test_responses_accept_stop_seed_and_sampling_fields(client):
    whole = client.responses.create(**ASKED)
    assert "I look." in whole.output_text
    cut = client.responses.create(**ASKED, extra_body={"stop": ["look"], "ignore_eos": True, "seed": 3, "top_k": 5})
    assert cut.output_text.strip() == "I"
    assert cut.status == "completed"


def test_every_sampling_control_reaches_sampling_params():
    given = {
        "seed": 3, "stop": ["x"], "temperature": 0.5, "top_p": 0.5, "presence_penalty": 0.5, "frequency_penalty": 0.5,
        "top_k": 5, "min_p": 0.5, "repetition_penalty": 1.5, "min_tokens": 1, "ignore_eos": True,
        "stop_token_ids": [7], "include_stop_str_in_output": True, "skip_special_tokens": False,
        "allowed_token_ids": [1, 2], "logit_bias": {"5": 1.5}, "typical_p": 0.5,
            "num_speculative_tokens": 2,
    }  # fmt: skip
    assert given.keys() == SamplingControls.model_fields.keys()
    params = _params(ResponsesRequest(input="a", **given), SamplingParams(), 9)
    for name, value in given.items():
        assert getattr(params, name) == ({5: 1.5} if name == "logit_bias" else value), name


@pytest.mark.parametrize(
    ("field", "value"), [("n", 2), ("max_tokens", 5), ("top_k", -7), ("bad_words", ["x"]), ("logit_bias", {"x": 1.0})]
)
def test_unsupported_response_fields_are_refused_by_name(client, field, value):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASKED, extra_body={field: value})
    assert caught.value.param == field
    assert client.responses.create(**ASKED, extra_body={"n": 1, "max_tokens": None}).status == "completed"


LOGPROBS: Any = ["message.output_text.logprobs"]


@pytest.mark.parametrize(
    "options", [{}, {"max_output_tokens": 100}, {"max_output_tokens": 60}, {"tool_choice": "none"}]
)
def test_response_logprobs_cover_message_text_only(client: openai.OpenAI, options: dict[str, Any]) -> None:
    """They exclude reasoning, calls and their markers, and are equal in streams and whole answers."""
    asked = {**ASKED, "tools": [WEATHER, NOW], "include": LOGPROBS, "top_logprobs": 2, **options}
    whole = client.responses.create(**asked)
    assert whole.top_logprobs == 2
    texts = [part for item in whole.output if item.type == "message" for part in item.content]
    assert len(texts) == 1
    for part in texts:
        assert len(part.logprobs) == len(part.text.encode())  # a token is a byte
        assert part.text.startswith("".join(entry.token for entry in part.logprobs[:7]))
        for entry in part.logprobs:
            assert entry.top_logprobs[0].token == entry.token
            assert (len(entry.top_logprobs), entry.logprob) == (2, -0.25)

    events = list(client.responses.create(stream=True, **asked))
    assert comparable(events[-1].response) == comparable(whole)
    told = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    expected = [entry for part in texts for entry in part.logprobs]
    assert [entry.token for entry in told] == [entry.token for entry in expected]
    done = [entry for event in events if event.type == "response.output_text.done" for entry in event.logprobs]
    assert [entry.to_dict() for entry in done] == [entry.to_dict() for entry in expected]


def test_response_logprobs_follow_include_and_top_logprobs() -> None:
    with run_server(FakeExecutor(answer="Rome, over there.")) as running, make_client(running) as client:
        for asked, num_top in (
            ({"include": LOGPROBS}, 0),
            ({"top_logprobs": 3}, 3),
            ({"include": LOGPROBS, "top_logprobs": 20}, 20),
        ):
            part = client.responses.create(**ASKED, **asked).output[0].content[0]
            assert "".join(entry.token for entry in part.logprobs) == part.text == "Rome, over there."
            assert [len(entry.top_logprobs) for entry in part.logprobs] == [num_top] * len(part.text)
        for asked in ({}, {"top_logprobs": 0}, {"include": ["reasoning.encrypted_content"]}):
            assert client.responses.create(**ASKED, **asked).output[0].content[0].logprobs == []
        part = (
            client.responses.create(**ASKED, include=LOGPROBS, extra_body={"stop_token_ids": [ord("v")]})
            .output[0]
            .content[0]
        )
        assert "".join(entry.token for entry in part.logprobs) == part.text
        with pytest.raises(openai.BadRequestError) as error:
            client.responses.create(**ASKED, top_logprobs=21)
        assert error.value.param == "top_logprobs"


def test_each_message_around_calls_has_matching_logprobs() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    answer = f"One.{call}Two, 狐.{call}{call}Three."
    options = {"chat_template": FakeChatTemplate("<tool_call>")}
    with run_server(FakeExecutor(answer=answer), engine_options=options) as running, make_client(running) as client:
        asked = {**ASKED, "tools": [NOW], "include": LOGPROBS}
        whole = client.responses.create(**asked)
        texts = [item.content[0] for item in whole.output if item.type == "message"]
        assert [part.text for part in texts] == ["One.", "Two, 狐.", "Three."]
        for part in texts:
            assert len(part.logprobs) == len(part.text.encode())
            assert part.logprobs[0].token == part.text[0]
        *_, last = client.responses.create(stream=True, **asked)
        assert comparable(last.response) == comparable(whole)
