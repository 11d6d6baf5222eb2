"""Random bodies of known fields with unlikely values: never a 5xx, and the engine still answers afterwards."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from fakes import answer_text

from octavo.server.api.anthropic.messages import CountTokensRequest, MessagesRequest
from octavo.server.api.ollama.requests import ChatRequest, EmbedRequest, Options, PromptRequest, ShowRequest
from octavo.server.api.openai.embeddings import EmbeddingRequest
from octavo.server.api.openai.requests import ChatCompletionRequest, CompletionRequest
from octavo.server.api.openai.responses import ResponsesRequest
from octavo.server.api.tokenizing import DetokenizeRequest, TokenizeRequest

if TYPE_CHECKING:
    from running import Running

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 16, 256, 257, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30),
    *(0.0, -0.0, 0.5, 1.0, 1e-320, 1e308, -1e308),
    *("", "a", "\0", "\U0001f984", "x" * 3000, "default", "fake", "1"),
    *([], [0], [1, 2], [-1], [257], [2**63], ["a"], ["a", "b"], [[1], [2]], [[]], [None], [1.5], [{}], ["a", 1]),
    *({}, {"a": 1}, {"65": 1.0}, {"65": None}, {"-1": 1}, {"type": "text"}, {"include_usage": True}),
    [{"role": "user", "content": "hello"}],
    [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    [{"role": "user", "content": None}],
    [{"role": 5, "content": "hello"}],
]


def make_body(rng: random.Random, fields: list[str], sound: dict[str, Any]) -> dict[str, Any]:
    body = dict(sound)
    for name in rng.sample(fields, rng.randint(1, 4)):
        body[name] = rng.choice(VALUES)
    return body


@pytest.mark.sweep(8)
@pytest.mark.parametrize("seed", range(4))
def test_random_bodies_never_answer_5xx(shared: Running, seed: int) -> None:
    routes = [
        ("/v1/completions", CompletionRequest, {"prompt": "hello", "max_tokens": 3}),
        ("/v1/chat/completions", ChatCompletionRequest, {"messages": VALUES[-4], "max_tokens": 3}),
        ("/v1/responses", ResponsesRequest, {"input": "hello", "max_output_tokens": 3}),
        ("/v1/responses/input_tokens", ResponsesRequest, {"input": "hello"}),
        ("/v1/messages", MessagesRequest, {"model": "fake", "messages": VALUES[-4], "max_tokens": 3}),
        ("/v1/messages/count_tokens", CountTokensRequest, {"model": "fake", "messages": VALUES[-4]}),
        ("/v1/embeddings", EmbeddingRequest, {"input": "hello", "dimensions": -1}),
        ("/api/chat", ChatRequest, {"model": "fake", "messages": VALUES[-4], "num_predict": 3}),
        ("/api/chat", Options, {"model": "fake", "messages": VALUES[-4]}),
        ("/api/generate", PromptRequest, {"model": "fake", "prompt": "hello", "num_predict": 3}),
        ("/api/embed", EmbedRequest, {"model": "fake", "input": "hello", "dimensions": -1}),
        ("/api/show", ShowRequest, {"model": "fake"}),
        ("/tokenize", TokenizeRequest, {"prompt": "hello"}),
        ("/detokenize", DetokenizeRequest, {"tokens": [65]}),
    ]
    rng = random.Random(seed)
    seen = set()
    with shared.http() as http:
        for _ in range(300):
            route, schema, sound = rng.choice(routes)
            fields = sorted({*schema.model_fields, *getattr(schema, "unsupported", ()), "best_of", "include"})
            body = make_body(rng, fields, sound)
            if schema is Options:
                body = {**sound, "options": make_body(rng, fields, {"num_predict": 3})}
            if schema in {EmbeddingRequest, EmbedRequest}:
                body["dimensions"] = -1  # always refused: the fake executor makes no vectors
            content = json.dumps(body)
            response = http.post(route, content=content)
            seen.add(response.status_code)
            assert response.status_code in {200, 400, 404}, (content[:500], response.text)
            if response.status_code != 200:
                error = response.json()["error"]
                assert isinstance(error, str) if route.startswith("/api/") else error["message"]
            elif response.headers["content-type"].startswith("text/event-stream"):
                last = response.text.strip().rpartition("\n\n")[2]
                assert last == "data: [DONE]" or '"response.' in last or '"message_stop"' in last
                assert '"error":{' not in response.text, content[:500]
            elif response.headers["content-type"] == "application/x-ndjson":
                assert json.loads(response.text.splitlines()[-1])["done"], content[:500]
        answer = http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 20})
    assert answer.json()["choices"][0]["text"] == answer_text(5, 0, 20)
    assert {200, 400} <= seen
    assert shared.num_unfinished == 0
