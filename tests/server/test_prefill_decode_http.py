"""Prefill on one engine and decode on another, with a router: clients get the answers of a single engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from alone_and_crowd import needs_kernels
from router.routing import Routing, run_router
from running import DEADLINE_S, wait_until
from sdks import anthropic, openai
from test_real_engine import TEMPLATE, served_engine, write_byte_checkpoint

from octavo import CacheConfig, LLMEngine, ModelConfig, SchedulerConfig
from octavo.config import KVTransferConfig
from octavo.kv_transfer import connector

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx
    from running import Running

pytestmark = needs_kernels
BLOCK = 16
DRAWN: dict[str, Any] = {"temperature": 0.8, "seed": 11}
# Requests of clients. Each test replaces {} by a new prompt.
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "{}"}], "n": 2, "max_tokens": 12, **DRAWN}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "{}"}], "max_tokens": 12, "stream": True, **DRAWN},
    ),
    ("/v1/completions", {"prompt": "{}", "max_tokens": 12, "logprobs": 2, "stop": ["e"], **DRAWN}),
    ("/v1/completions", {"prompt": ["{}", "{} and more"], "n": 2, "max_tokens": 8, "logprobs": 1, **DRAWN}),
    ("/v1/completions", {"prompt": "{}", "max_tokens": 24, "structured_outputs": {"choice": ["aye", "no"]}, **DRAWN}),
    ("/v1/responses", {"input": "{}", "max_output_tokens": 12, "temperature": 0.0}),
    (
        "/v1/messages",
        {"model": "tiny", "messages": [{"role": "user", "content": "{}"}], "max_tokens": 12, "temperature": 0.0},
    ),
    (
        "/generate",
        {"inputs": "{}", "parameters": {"max_new_tokens": 12, "details": True, "do_sample": True, "seed": 3}},
    ),
    ("/generate_stream", {"inputs": "{}", "parameters": {"max_new_tokens": 12}}),
    ("/", {"inputs": "{}", "parameters": {"max_new_tokens": 12}}),
]
_OWN = {"created", "created_at", "usage", "receipt", "item_id"}  # differ between two equal answers


@dataclass
class Pair:
    """A router with a prefill and a decode engine, and one engine alone."""

    routing: Routing
    alone: Running
    prefill: Running
    decode: Running


def engine(checkpoint: Path, stores: KVTransferConfig | None) -> LLMEngine:
    return LLMEngine(
        ModelConfig(model=str(checkpoint)),
        cache_config=CacheConfig(num_gpu_blocks=600, block_size=BLOCK),
        scheduler_config=SchedulerConfig(  # long times, because lookups and loads may be slow on a busy machine
            max_num_seqs=8, max_num_batched_tokens=128, kv_lookup_timeout_s=10.0, kv_transfer_timeout_s=20.0
        ),
        kv_transfer_config=stores,
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("pair")
    checkpoint = write_byte_checkpoint(directory / "tiny", TEMPLATE)
    roles = [
        KVTransferConfig(role=role, disk_dir=directory / "kv", disk_bytes=1 << 28) for role in ("prefill", "decode")
    ]
    with (
        pytest.MonkeyPatch.context() as patch,
        served_engine(engine(checkpoint, None)) as alone,
        served_engine(engine(checkpoint, roles[0])) as prefill,
        served_engine(engine(checkpoint, roles[1])) as decode,
        run_router(prefill.url, decode.url, min_prefill_tokens=64, health_timeout_s=DEADLINE_S) as routing,
    ):
        patch.setattr(connector, "_EXPECTED_S", DEADLINE_S)  # saves arrive even if this process is stopped for a while
        yield Pair(routing, alone, prefill, decode)


def prompt_of(name: str) -> str:
    return f"{name}: " + "an octavo is a book whose sheets are folded three times. " * 8


def filled(body: Any, prompt: str) -> Any:
    match body:
        case dict():
            return {name: filled(each, prompt) for name, each in body.items()}
        case list():
            return [filled(each, prompt) for each in body]
        case str():
            return body.replace("{}", prompt)
    return body


def told(response: httpx.Response) -> Any:
    """Return an answer without the fields that differ between equal answers; of a stream, its events."""
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        return common(response.json())
    lines = [line.partition(":")[2].strip() for line in response.text.splitlines() if line.startswith("data:")]
    return [common(json.loads(line)) for line in lines if line != "[DONE]"]


def common(value: Any) -> Any:
    match value:
        case dict():
            own = _OWN if isinstance(value.get("id"), int) else {*_OWN, "id"}  # TGI's ids are token ids
            return {name: common(each) for name, each in value.items() if name not in own}
        case list():
            return [common(each) for each in value]
    return value


def text_of(events: Any) -> Any:
    """Return a stream's joined text and tokens, because their division into events may differ."""
    if not isinstance(events, list) or not {"token", "choices"} & events[0].keys():
        return events
    if "token" in events[0]:
        tokens = [(each["token"]["id"], each["token"]["logprob"]) for each in events]
        return tokens, events[-1]["generated_text"]
    return "".join(choice["delta"].get("content") or "" for each in events for choice in each["choices"])


def loaded_tokens(server: Running) -> int:
    return server.engine.client.stats.kv_load_tokens


@pytest.mark.sweep(16)
@pytest.mark.parametrize("number", range(len(ROUTES)))
def test_every_route_equals_single_engine_answer(pair: Pair, number: int) -> None:
    path, body = ROUTES[number]
    asked = filled(body, prompt_of(f"route {number}"))
    with pair.alone.http() as http:
        expected = told(http.post(path, json=asked))
    before = loaded_tokens(pair.decode)
    with pair.routing.http() as http:
        got = told(http.post(path, json=asked))
    assert text_of(got) == text_of(expected)
    wait_until(lambda: loaded_tokens(pair.decode) - before >= 400, "KV came from the other engine")
    assert not pair.prefill.num_unfinished


def test_openai_client_gets_single_engine_answers_through_router(pair: Pair) -> None:
    answers = []
    for url in (pair.alone.url, pair.routing.url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            asked = {"model": "tiny", "max_tokens": 12, **DRAWN}
            turns = [{"role": "user", "content": prompt_of("openai")}]
            whole = client.chat.completions.create(messages=turns, **asked).choices[0].message.content
            stream = client.chat.completions.create(messages=turns, stream=True, **asked)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == whole
            answers.append((whole, client.completions.create(prompt=prompt_of("text"), **asked).choices[0].text))
    assert answers[0] == answers[1]


def test_anthropic_client_gets_single_engine_answers_through_router(pair: Pair) -> None:
    answers = []
    for url in (pair.alone.url, pair.routing.url):
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
            turns = [{"role": "user", "content": prompt_of("anthropic")}]
            asked = {"model": "tiny", "max_tokens": 12, "messages": turns}
            whole = client.messages.create(extra_body={"temperature": 0.0}, **asked).content[0].text
            with client.messages.stream(extra_body={"temperature": 0.0}, **asked) as stream:
                assert "".join(stream.text_stream) == whole
            answers.append(whole)
    assert answers[0] == answers[1]


def test_cache_salt_prevents_prefix_hit_on_prefill_engine(pair: Pair) -> None:
    """The same request with another salt gets an equal answer, and no prefix hit."""
    asked = {"prompt": prompt_of("salt"), "max_tokens": 8, **DRAWN}
    texts = set()
    with pair.routing.http() as http:
        for salt in ("pepper", "sugar"):
            before = pair.prefill.engine.client.stats.prefix_cache_hits
            answer = http.post("/v1/completions", json={**asked, "cache_salt": salt}).json()
            texts.add(answer["choices"][0]["text"])
            assert pair.prefill.engine.client.stats.prefix_cache_hits == before
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 400, "of its own prefill"
    assert len(texts) == 1
