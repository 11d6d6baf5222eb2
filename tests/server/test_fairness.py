"""Processing a request's texts is charged to its key, ends at its deadline, and delays no other request."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from running import asking, run_server, wait_until

from octavo.engine.input_processor import InputProcessor
from octavo.http.tenants import Tenant, add_key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from running import Running

TOO_LONG = "word " * 1000  # 5000 tokens, of which 2048 fit
MORE_THAN_A_FEW_WORDS = "word " * 120  # too long to be processed without waiting for a turn


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path: Path = tmp_path_factory.mktemp("keys") / "keys.toml"
    key = add_key(path, Tenant(name="counted", tokens_per_minute=10_000_000))
    with run_server(api_keys_file=path) as running:
        running.key = key  # type: ignore[attr-defined]
        yield running


@pytest.fixture
def http(running: Running) -> Iterator[httpx.Client]:
    with running.http() as http:
        http.headers["Authorization"] = f"Bearer {running.key}"  # type: ignore[attr-defined]
        yield http


@pytest.fixture
def charged(running: Running, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    limiter = running.server._service.limiter
    charge = limiter.charge

    def note(tenant: Tenant, num_tokens: int) -> None:
        counts.append(num_tokens)
        charge(tenant, num_tokens)

    monkeypatch.setattr(limiter, "charge", note)
    return counts


@pytest.mark.parametrize(
    ("path", "body", "status", "num_tokens"),
    [
        ("/v1/completions", {"prompt": "hello", "max_tokens": 3}, 200, 5 + 3),
        ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 3}, 200, 3 + 3),
        ("/v1/completions", {"prompt": TOO_LONG}, 400, 5000),
        ("/v1/completions", {"prompt": TOO_LONG, "truncate_prompt_tokens": 10, "max_tokens": 3}, 200, 5000 + 3),
        ("/generate", {"inputs": TOO_LONG, "parameters": {"truncate": 10, "max_new_tokens": 3}}, 200, 5000 + 3),
        ("/generate", {"inputs": TOO_LONG, "parameters": {"max_new_tokens": 3}}, 422, 5000),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TOO_LONG}]}, 400, 5018),
        ("/v1/responses", {"input": TOO_LONG}, 400, 5018),
        (
            "/v1/messages",
            {"model": "fake", "max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]},
            200,
            26,
        ),
        ("/v1/messages/count_tokens", {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}, 200, 23),
        ("/v1/responses/input_tokens", {"input": "hello"}, 200, 23),
        ("/v1/embeddings", {"input": TOO_LONG}, 400, 5000),
        ("/tokenize", {"prompt": "hello"}, 200, 5),
        ("/detokenize", {"tokens": [1, 2, 3]}, 200, 3),
    ],
)
def test_every_processed_token_is_charged_to_key(
    http: httpx.Client, charged: list[int], path: str, body: dict[str, Any], status: int, num_tokens: int
) -> None:
    response = http.post(path, json=body)
    assert response.status_code == status, response.text
    assert sum(charged) == num_tokens


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": MORE_THAN_A_FEW_WORDS}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": MORE_THAN_A_FEW_WORDS}]}),
        ("/v1/messages/count_tokens", {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}),
        ("/generate", {"inputs": MORE_THAN_A_FEW_WORDS, "parameters": {"truncate": 2}}),
        ("/tokenize", {"prompt": "hello"}),
    ],
)
def test_request_waiting_for_text_thread_times_out_with_504(
    running: Running, http: httpx.Client, charged: list[int], path: str, body: dict[str, Any]
) -> None:
    """The threads for short texts are busy, as with other requests."""
    gate, text = threading.Event(), running.server._service.engine.text
    held = [turns["short"].submit("another", lambda: gate.wait(30)) for turns in (text._turns, text._count_turns)]
    wait_until(lambda: all(each.running() for each in held), "the threads are held")
    try:
        start = time.monotonic()
        response = http.post(path, json=body, headers={"X-Request-Timeout": "0.2"})
        assert response.status_code == 504, response.text
        assert time.monotonic() - start < 10
    finally:
        gate.set()
    for each in held:
        each.result(30)
    assert http.post("/tokenize", json={"prompt": "hello"}).status_code == 200
    assert sum(charged) == 5  # of the last request only: the earlier ones never began
    assert running.server._service.limiter.streams.num_held == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": MORE_THAN_A_FEW_WORDS}),
        ("/detokenize", {"tokens": [1, 2, 3]}),
        ("/v1/messages/count_tokens", {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/responses/input_tokens", {"input": MORE_THAN_A_FEW_WORDS}),
    ],
)
def test_token_counting_uses_separate_threads(
    running: Running, http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    gate, text = threading.Event(), running.server._service.engine.text
    held = text._turns["short"].submit("another", lambda: gate.wait(30))
    try:
        wait_until(held.running, "the thread for answers is held")
        assert http.post(path, json=body, timeout=20).status_code == 200
    finally:
        gate.set()
    held.result(30)


def test_disconnect_cancels_queued_tokenization(
    running: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, read = threading.Event(), list[str]()
    encode = InputProcessor.encode

    def watched(inputs: InputProcessor, text: str, **options: Any) -> list[int]:
        read.append(text)
        return encode(inputs, text, **options)

    monkeypatch.setattr(InputProcessor, "encode", watched)
    limiter = running.server._service.limiter
    held = running.server._service.engine.text._count_turns["short"].submit("another", lambda: gate.wait(30))
    try:
        with asking(running, "/tokenize", {"prompt": "who is gone"}, Authorization=http.headers["Authorization"]):
            wait_until(lambda: limiter.streams.num_held == 1, "it has a place")
        wait_until(lambda: limiter.streams.num_held == 0, "its place is given back")
    finally:
        gate.set()
    held.result(30)
    assert read == []
