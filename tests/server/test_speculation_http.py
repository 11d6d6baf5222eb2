"""A server's answers do not depend on speculation, whole or streamed: tested with random requests, some unusual."""

from __future__ import annotations

import contextlib
import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from alone_and_crowd import needs_kernels
from scripted_drafts import verify_all
from test_http_fuzz import VALUES
from test_real_engine import served_engine

from octavo import CacheConfig, LLMEngine, ModelConfig, SchedulerConfig
from octavo.config import SpeculativeConfig
from octavo.server.api.anthropic.messages import MessagesRequest
from octavo.server.api.openai.requests import ChatCompletionRequest, CompletionRequest
from octavo.server.api.openai.responses import ResponsesRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx
    from running import Running

pytestmark = needs_kernels

NUM_REQUESTS, PER_CASE = 500, 5
CONFIGS = {
    "none": None,
    "suffix": SpeculativeConfig(method="suffix", num_speculative_tokens=8),
    "ngram": SpeculativeConfig(method="ngram", num_speculative_tokens=4),
    "draft_model": SpeculativeConfig(method="draft_model", model="octavo-demo-draft", num_speculative_tokens=3),
    "quantized": SpeculativeConfig(method="quantized", num_speculative_tokens=3),
}
TEXTS = [
    "Repeat after me: the fox and the hen and the fox and the hen",
    "Once upon a time there was a little fox who",
    "What is 12 + 30?",
    "one two three one two three one two three one",
]
CHOICES: dict[str, list[Any]] = {  # the same for the OpenAI API's completions and chat completions
    "temperature": [0.0, 0.0, 0.5, 1.0, 1.5],
    "top_p": [0.5, 0.9],
    "top_k": [1, 20],
    "min_p": [0.05],
    "typical_p": [0.8],
    "presence_penalty": [1.0, -1.0],
    "frequency_penalty": [0.7],
    "repetition_penalty": [1.2],
    "logit_bias": [{"67": 4.0, "68": 3.0}],
    "min_tokens": [4, 20],
    "stop": ["e", ["the", ". "]],
    "n": [2, 3],
    "return_token_ids": [True],
    "include_stop_str_in_output": [True],
}
GRAMMARS: list[dict[str, Any]] = [
    {"structured_outputs": {"regex": "([a-f]{2,3} ){3,9}"}},
    {"structured_outputs": {"choice": ["the fox and the hen", "the fox and the cat"]}},
    {"response_format": {"type": "json_object"}},
]
LOGPROBS: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [{"logprobs": 2}, {"logprobs": 0}],
    "/v1/chat/completions": [{"logprobs": True, "top_logprobs": 2}, {"logprobs": True}],
    "/v1/responses": [{"include": ["message.output_text.logprobs"], "top_logprobs": 2}],
    "/v1/messages": [{}],
}
SCHEMAS = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
}
# Ids and times of one answer, and a figure that depends on the schedule: the cached part of a prompt.
OF_THIS_ANSWER = {"id", "item_id", "created", "created_at", "completed_at", "sequence_number", "request_id"}
USAGE = {"completion_tokens", "output_tokens"}
APPENDED = {"content", "text", "delta", "reasoning", "reasoning_content", "arguments", "partial_json", "thinking"}


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Running]]:
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(served_engine(make_engine(config))) for name, config in CONFIGS.items()}


def make_engine(config: SpeculativeConfig | None) -> LLMEngine:
    engine = LLMEngine(
        ModelConfig(max_model_len=192),
        cache_config=CacheConfig(num_gpu_blocks=20),  # too few for all requests at the same time
        scheduler_config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=96),
        speculative_config=config,
    )
    verify_all(engine)
    return engine


def make_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a route and a body. The answer does not depend on the schedule: it is greedy, or has a seed."""
    route = rng.choice([*LOGPROBS, "/v1/completions", "/v1/chat/completions"])
    text, most = rng.choice(TEXTS) * rng.choice([1, 1, 2]), rng.choice([5, 40, 80])
    schema = SCHEMAS[route]
    fields = sorted(schema.model_fields)
    body: dict[str, Any] = {name: rng.choice(CHOICES[name]) for name in rng.sample(sorted(CHOICES), rng.randint(0, 4))}
    body = {name: value for name, value in body.items() if name in fields}
    if rng.random() < 0.5:
        body |= rng.choice(LOGPROBS[route])
    if "structured_outputs" in fields and rng.random() < 0.3:
        body |= rng.choice(GRAMMARS)
    elif "ignore_eos" in fields and rng.random() < 0.5:
        body["ignore_eos"] = True
    if rng.random() < 0.25:
        body[rng.choice(fields)] = rng.choice(VALUES)
    if route == "/v1/completions":
        sound: dict[str, Any] = {"prompt": text, "max_tokens": most}
    elif route == "/v1/responses":
        sound = {"input": text, "max_output_tokens": most}
    else:
        sound = {"messages": [{"role": "user", "content": text}], "max_tokens": most}
    body = {**sound, **body, "seed": rng.randrange(1000)}
    if route == "/v1/messages":
        del body["seed"]
        body = {"model": "tiny", **body, "temperature": 0.0}
    return route, body


def answers(running: Running, requests: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Send all requests concurrently, each whole and streamed. Return the answers."""
    asked = [(route, {**body, "stream": stream}) for route, body in requests for stream in (False, True)]
    with running.http() as http, ThreadPoolExecutor(6) as pool:
        return list(pool.map(lambda request: answer(http.post(request[0], content=json.dumps(request[1]))), asked))


def answer(response: httpx.Response) -> tuple[int, Any]:
    """Return the status and the content. The events of a stream are joined."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return response.status_code, told(response.json())
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    folded: dict[tuple[Any, ...], Any] = {}
    for event in map(json.loads, filter("[DONE]".__ne__, events)):
        place = tuple(event.get(name) for name in ("type", "index", "output_index", "content_index"))
        folded[place] = joined(folded.get(place), told(event), "")
    return response.status_code, folded


def told(value: Any) -> Any:
    """Drop empty fields and those that differ between equal answers. Name choices by their index."""
    if isinstance(value, list):
        items = [told(each) for each in value]
        is_choices = bool(items) and all(isinstance(each, dict) and "index" in each for each in items)
        return {each["index"]: each for each in items} if is_choices else items
    if not isinstance(value, dict):
        return value
    found = {name: told(each) for name, each in value.items() if name not in OF_THIS_ANSWER}
    if found.get("usage"):
        found["usage"] = {name: each for name, each in found["usage"].items() if name in USAGE}
    return {name: each for name, each in found.items() if each not in (None, "", [], {})}


def joined(before: Any, after: Any, name: str) -> Any:
    """Join two pieces of a stream that are values of the field `name`."""
    if isinstance(before, dict) and isinstance(after, dict):
        return before | {key: joined(before.get(key), each, key) for key, each in after.items()}
    is_appended = isinstance(before, list) or (isinstance(before, str) and name in APPENDED)
    return before + after if is_appended and type(before) is type(after) else after


@pytest.mark.turn(8)
@pytest.mark.sweep(400)
@pytest.mark.parametrize("seed", range(NUM_REQUESTS // PER_CASE))
def test_answers_are_equal_with_and_without_speculation(servers: dict[str, Running], seed: int) -> None:
    rng = random.Random(seed)
    requests = [make_request(rng) for _ in range(PER_CASE)]
    expected, *others = (answers(running, requests) for running in servers.values())
    assert sum(status == 200 for status, _ in expected) >= PER_CASE // 2
    for name, found in zip(list(CONFIGS)[1:], others, strict=True):
        for number, (got, wanted) in enumerate(zip(found, expected, strict=True)):
            assert got == wanted, (name, requests[number // 2])
        assert servers[name].engine.core.metrics.stats.drafts.num_drafts > 0
    assert all(running.num_unfinished == 0 for running in servers.values())
