"""A first request with tools to the built-in model, through each API's own package."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import running
from kernels_available import COMPILED
from running import DEADLINE_S, run_server
from sdks import anthropic, ollama, openai

from octavo import LLMEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not COMPILED, reason="octavo was installed without its compiled kernels")
PARAMETERS = {
    "type": "object",
    "properties": {
        "location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["location"],
}
FUNCTION = {
    "name": "get_current_weather",
    "description": "Get the current weather in a given location",
    "parameters": PARAMETERS,
}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
BOSTON = "What's the weather like in Boston today?"
RESULT = "22 degrees, sunny"
ANSWER = "In Boston it is 22 degrees, sunny."
GREEDY: dict[str, Any] = {"model": "octavo-demo", "temperature": 0.0}


@pytest.fixture(scope="module")
def server() -> Iterator[running.Running]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "make_engine", lambda executor: LLMEngine())
        with run_server(served_model_names=["octavo-demo"]) as server:
            yield server


@pytest.fixture(scope="module")
def client(server: running.Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        yield client


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.sweep(16)
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": FUNCTION["name"]}}])
@pytest.mark.parametrize(
    ("question", "arguments"),
    [
        (BOSTON, {"location": "Boston"}),
        ("What is the weather like in Paris today?", {"location": "Paris"}),
        (
            "What's the weather like in San Francisco, CA in celsius?",
            {"location": "San Francisco, CA", "unit": "celsius"},
        ),
    ],
)
def test_built_in_model_calls_tool_through_chat_completions(
    client: openai.OpenAI, choice: Any, question: str, arguments: dict[str, str]
) -> None:
    asked: dict[str, Any] = {"messages": [user(question)], "tools": TOOLS, "tool_choice": choice, **GREEDY}
    message = client.chat.completions.create(**asked).choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == (FUNCTION["name"], arguments)
    chunks = [chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **asked) if chunk.choices]
    parts = [part.function for delta in chunks for part in delta.tool_calls or () if part.function]
    assert [part.name for part in parts if part.name] == [FUNCTION["name"]]
    assert "".join(part.arguments or "" for part in parts) == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    asked["messages"] += [message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(**{**asked, "tool_choice": "auto"}).choices[0].message.content
    assert answer == ANSWER.replace("Boston", arguments["location"])


@pytest.mark.parametrize(
    ("question", "answer"), [("What is 12 + 30?", "12 + 30 = 42"), ("Hello!", "Hello! How can I help you?")]
)
def test_question_without_tool_need_is_answered_as_text(client: openai.OpenAI, question: str, answer: str) -> None:
    choice = client.chat.completions.create(messages=[user(question)], tools=TOOLS, **GREEDY).choices[0]
    assert (choice.message.tool_calls, choice.message.content, choice.finish_reason) == (None, answer, "stop")


def test_question_about_two_cities_produces_two_calls(client: openai.OpenAI) -> None:
    asked = [user("What is the weather in Paris and London?")]
    calls = client.chat.completions.create(messages=asked, tools=TOOLS, **GREEDY).choices[0].message.tool_calls or []
    arguments = [json.loads(call.function.arguments) for call in calls if call.type == "function"]
    assert arguments == [{"location": "Paris"}, {"location": "London"}]


def test_built_in_model_calls_tool_through_responses(client: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "function", **FUNCTION}]
    response = client.responses.create(input=BOSTON, tools=tools, **GREEDY)
    (call,) = response.output
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"location": "Boston"}
    turns: list[Any] = [user(BOSTON), call, {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}]
    assert client.responses.create(input=turns, tools=tools, **GREEDY).output_text == ANSWER


def test_built_in_model_calls_tool_through_messages(server: running.Running) -> None:
    tool = {"name": "get_weather", "description": "Get the weather", "input_schema": PARAMETERS}
    asked: dict[str, Any] = {
        "model": "octavo-demo",
        "max_tokens": 128,
        "tools": [tool],
        "extra_body": {"temperature": 0.0},
    }
    turns: list[Any] = [user(BOSTON)]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        message = client.messages.create(messages=turns, **asked)
        with client.messages.stream(messages=turns, **asked) as stream:
            streamed = stream.get_final_message()
        (call,), (again,) = message.content, streamed.content
        assert call.type == again.type == "tool_use"
        assert (call.name, call.input, message.stop_reason) == ("get_weather", {"location": "Boston"}, "tool_use")
        assert (again.name, again.input) == (call.name, call.input)
        turns += [{"role": "assistant", "content": message.content}, user_result(call.id)]
        (text,) = client.messages.create(messages=turns, **asked).content
    assert text.type == "text"
    assert text.text == ANSWER


def user_result(call_id: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": RESULT}]}


def test_built_in_model_calls_tool_through_ollama(server: running.Running) -> None:
    options = {"temperature": 0.0}
    turns: list[Any] = [user(BOSTON)]
    with ollama.Client(server.url, timeout=DEADLINE_S) as client:
        message = client.chat("octavo-demo", turns, tools=TOOLS, options=options).message
        (call,) = message.tool_calls or []
        assert (call.function.name, call.function.arguments) == (FUNCTION["name"], {"location": "Boston"})
        lines = [*client.chat("octavo-demo", turns, tools=TOOLS, options=options, stream=True)]
        assert [each for line in lines for each in line.message.tool_calls or ()] == [call]
        turns += [message, {"role": "tool", "tool_name": call.function.name, "content": RESULT}]
        assert client.chat("octavo-demo", turns, tools=TOOLS, options=options).message.content == ANSWER
