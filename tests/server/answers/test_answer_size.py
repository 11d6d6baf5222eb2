"""Large work runs outside of the event loop's thread, and one limit covers all log probabilities of a request."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from fakes import FakeExecutor
from running import run_server

from octavo.engine.output_processor import OutputProcessor
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.server import bodies
from octavo.server.answers.answer_size import num_entries
from octavo.server.api.anthropic import messages
from octavo.server.api.openai import chat, completions, embeddings, responses
from octavo.server.api.openai.embeddings import EmbeddingReply

if TYPE_CHECKING:
    from collections.abc import Callable

    from running import Running

LOOP = "test-server"  # the name of the event loop's thread
USER = [{"role": "user", "content": "hello"}]
IDS = [65] * 1600  # much of the context
BULK = {"metadata": {str(i): "x" * 20 for i in range(12_000)}}
# Requests, and the functions that do the work in proportion to their size.
WORK: list[tuple[str, dict[str, Any], list[tuple[Any, str]]]] = [
    (
        "/v1/completions",
        {"prompt": "a", "n": 16, "logprobs": 20, "max_tokens": 20},
        [(completions, "completion_logprobs")],
    ),
    (
        "/v1/completions",
        {"prompt": [IDS, IDS], "prompt_logprobs": 5, "max_tokens": 1},
        [(completions, "prompt_logprobs")],
    ),
    (
        "/v1/completions",
        {"prompt": [IDS, IDS], "echo": True, "max_tokens": 300},
        [(OutputProcessor, "decode")],
    ),
    (
        "/v1/completions",
        {"prompt": [IDS, IDS], "echo": True, "stream": True, "max_tokens": 300, "logprobs": 3},
        [(OutputProcessor, "decode"), (completions, "completion_logprobs")],
    ),
    (
        "/v1/chat/completions",
        {"messages": USER, "n": 16, "logprobs": True, "top_logprobs": 20, "max_tokens": 20},
        [(chat, "chat_logprobs")],
    ),
    (
        "/v1/chat/completions",
        {"messages": USER, "max_tokens": 1, **BULK},
        [(bodies, "parse"), (chat, "read_messages")],
    ),
    ("/v1/completions", {"prompt": [65, 66], "max_tokens": 1, **BULK}, [(completions, "read_prompts")]),
    ("/v1/embeddings", {"input": "a", "dimensions": 1, **BULK}, [(embeddings, "read_prompts")]),
    ("/v1/responses", {"input": "a", "max_output_tokens": 1, **BULK}, [(responses, "_read_conversation")]),
    ("/v1/responses/input_tokens", {"input": "a", **BULK}, [(responses, "_read_conversation")]),
    ("/v1/messages", {"model": "fake", "messages": USER, "max_tokens": 1, **BULK}, [(messages, "_read_conversation")]),
    (
        "/v1/messages/count_tokens",
        {"model": "fake", "messages": USER, **BULK},
        [(messages, "_read_conversation")],
    ),
]


@pytest.mark.sweep(12)
@pytest.mark.parametrize(("route", "body", "functions"), WORK)
def test_large_work_runs_outside_event_loop_thread(
    shared: Running, monkeypatch: pytest.MonkeyPatch, route: str, body: dict[str, Any], functions: list[Any]
) -> None:
    places: dict[str, set[str]] = {name: set() for _, name in functions}

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            places[name].add(threading.current_thread().name)
            return function(*args, **options)

        return call

    for owner, name in functions:
        monkeypatch.setattr(owner, name, watched(name, getattr(owner, name)))
    monkeypatch.setattr(EmbeddingReply, "_encode", lambda *_: "")  # this engine has no hidden states
    with shared.http() as http:
        response = http.post(route, json=body)
    assert response.status_code == 200, response.text
    for name, threads in places.items():
        assert threads, f"{name} was not called"
        # In a stream only large pieces leave the event loop's thread; the first piece of each prompt is the large one.
        assert LOOP not in threads or (body.get("stream") and threads - {LOOP}), name


@pytest.mark.parametrize(
    ("with_prompt", "expected"), [(True, 2 * (2 + 2 * 2) + (3 + 3 * 2) + 1 + 16), (False, (3 + 3 * 2) + 1 + 16)]
)
def test_answer_size_counts_tokens_logprobs_and_pooled_numbers(with_prompt: bool, expected: int) -> None:
    pair: Any = {1: None, 2: None}
    whole = CompletionOutput(0, "", [1, 2, 3], logprobs=[pair] * 3)
    bare = CompletionOutput(1, "", [1], logprobs=[])
    output = RequestOutput("r", None, [1, 2], [whole, bare], finished=True)
    output = replace(output, prompt_logprobs=[None, pair], pooled=b"\0" * 1024)
    assert num_entries(output, [whole, bare], with_prompt=with_prompt) == expected
    assert num_entries(replace(output, prompt_logprobs=[None]), [bare], with_prompt=True) == 2 + 1 + 16


def test_small_work_runs_on_event_loop_thread(shared: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[str] = []
    token_name = completions.completion_logprobs

    def watched(*args: Any, **options: Any) -> Any:
        places.append(threading.current_thread().name)
        return token_name(*args, **options)

    monkeypatch.setattr(completions, "completion_logprobs", watched)
    with shared.http() as http:
        http.post("/v1/completions", json={"prompt": "a", "logprobs": 2, "max_tokens": 5})
    assert places == [LOOP]


def test_echoed_prompt_is_decoded_once_for_all_choices(shared: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, decoded = OutputProcessor.decode, []

    def counting(self: OutputProcessor, token_ids: list[int], **options: Any) -> str:
        decoded.append(len(token_ids))
        return decode(self, token_ids, **options)

    monkeypatch.setattr(OutputProcessor, "decode", counting)
    with shared.http() as http:
        body = {"prompt": [[65] * 50, [66] * 60], "echo": True, "n": 8, "max_tokens": 2}
        choices = http.post("/v1/completions", json=body).json()["choices"]
    assert sorted(decoded) == [50, 60]
    assert [choice["text"][:50] for choice in choices] == ["A" * 50] * 8 + ["B" * 50] * 8


LIMIT = 1000
EXCEEDING = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 100, "logprobs": 10}, "logprobs"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 10, "n": 10, "logprobs": 10}, "logprobs"),
    ("/v1/completions", {"prompt": ["a"] * 10, "max_tokens": 10, "logprobs": 10}, "logprobs"),
    ("/v1/completions", {"prompt": "a" * 100, "max_tokens": 1, "prompt_logprobs": 10}, "prompt_logprobs"),
    ("/v1/completions", {"prompt": "a" * 50, "max_tokens": 1, "n": 2, "prompt_logprobs": 10}, "prompt_logprobs"),
    ("/v1/completions", {"prompt": "a" * 100, "max_tokens": 0, "echo": True, "logprobs": 10}, "logprobs"),
    ("/v1/chat/completions", {"messages": USER, "logprobs": True, "max_tokens": 1001}, "top_logprobs"),
    ("/v1/chat/completions", {"messages": USER, "logprobs": True}, "top_logprobs"),  # the rest of the context
]


@pytest.mark.sweep(8)
@pytest.mark.parametrize(("route", "body", "parameter"), EXCEEDING)
def test_max_request_logprobs_bounds_total_of_request(route: str, body: dict[str, Any], parameter: str) -> None:
    executor = FakeExecutor()
    with run_server(executor, max_request_logprobs=LIMIT) as running, running.http() as http:
        for stream in (False, True):
            if stream and parameter == "prompt_logprobs":
                continue  # a stream with `prompt_logprobs` is refused for another reason
            response = http.post(route, json={**body, "stream": stream})
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["param"] == parameter
            assert f"the limit is {LIMIT}" in error["message"]
        fits = {"prompt": "a", "max_tokens": 100, "logprobs": 9}
        assert http.post("/v1/completions", json=fits).status_code == 200
    assert running.num_unfinished == 0
