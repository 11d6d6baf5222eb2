"""All routes of the server through the router give the same answers as an engine."""

from __future__ import annotations

import json

import pytest
from fakes import answer_text
from router.routing import run_router
from running import DEADLINE_S, run_server
from sdks import anthropic, ollama, openai

from octavo.config import RouterConfig
from octavo.errors import ConfigError
from octavo.router.app import _cards
from octavo.router.usage import read_usage

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}


@pytest.fixture(scope="module")
def routed():
    with run_server() as first, run_server() as second, run_router(first.url, second.url) as routing:
        yield routing, (first, second)


@pytest.fixture
def http(routed):
    with routed[0].http() as client:
        yield client


def test_router_returns_engine_answer_and_headers(routed, http):
    _, (first, _) = routed
    summary = {"X-Request-Id": "mine"}
    with first.http() as direct:
        expected = direct.post("/v1/chat/completions", json=CHAT, headers=summary)
    got = http.post("/v1/chat/completions", json=CHAT, headers=summary)
    assert got.json()["choices"] == expected.json()["choices"]
    differing = {"date", "content-length"}
    assert {n: v for n, v in got.headers.items() if n not in differing} == {
        n: v for n, v in expected.headers.items() if n not in differing
    }
    assert got.headers.get_list("x-request-id") == ["mine"]


def test_stream_is_forwarded_to_its_end(routed, http):
    body = {"prompt": "x" * 10, "max_tokens": 20, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    text = "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])
    assert text == answer_text(10, num_tokens=20)


@pytest.mark.turn(12)
def test_openai_client_works_through_router(routed):
    with openai.OpenAI(base_url=f"{routed[0].url}/v1", api_key="none", max_retries=0) as client:
        assert {model.id for model in client.models.list()} == {"fake", "alias/of-fake"}
        whole = client.chat.completions.create(**CHAT)
        streamed = client.chat.completions.create(**CHAT, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices) == (
            whole.choices[0].message.content
        )
        assert client.responses.create(model="fake", input="Hello", max_output_tokens=9).output_text
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**{**CHAT, "model": "other"})


@pytest.mark.turn(12)
def test_anthropic_client_works_through_router(routed):
    with anthropic.Anthropic(base_url=routed[0].url, api_key="none", max_retries=0) as client:
        summary = {"model": "fake", "max_tokens": 12, "messages": CHAT["messages"]}
        whole = client.messages.create(**summary).content[0].text
        with client.messages.stream(**summary) as stream:
            assert "".join(stream.text_stream) == whole
        with pytest.raises(anthropic.BadRequestError):
            client.messages.create(**{**summary, "messages": []})


def test_ollama_client_works_through_router(routed, http):
    """The models are those of all engines, under the names that Ollama's clients use."""
    url = routed[0].url
    with ollama.Client(url, timeout=DEADLINE_S) as client:
        whole = client.chat("fake:latest", CHAT["messages"], options={"num_predict": 12})
        lines = [*client.chat("fake", CHAT["messages"], stream=True, options={"num_predict": 12})]
        assert whole.message.content == answer_text(len("<user>Hello\n<assistant>"), num_tokens=12)
        assert "".join(line.message.content for line in lines) == whole.message.content
        assert [line.done for line in lines] == [False] * 12 + [True]
        assert [model.model for model in client.list().models] == ["fake:latest", "alias/of-fake:latest"]
        assert [model.name for model in client.ps().models] == ["fake:latest", "alias/of-fake:latest"]
        assert client.show("fake").capabilities == ["completion", "tools"]
        with pytest.raises(ollama.ResponseError, match="not found, try pulling it first"):
            client.chat("other", CHAT["messages"])
        with pytest.raises(ollama.ResponseError, match="cannot change models"):
            client.pull("other")
    assert [http.head(path).status_code for path in ("/", "/api/tags", "/api/version")] == [200] * 3


def test_tgi_routes_work_and_unknown_routes_give_404(http):
    whole = http.post("/generate", json={"inputs": "Hello", "parameters": {"max_new_tokens": 8}}).json()
    with http.stream("POST", "/generate_stream", json={"inputs": "Hello", "parameters": {"max_new_tokens": 8}}) as got:
        events = [json.loads(line.removeprefix("data:")) for line in got.iter_lines() if line]
    assert events[-1]["generated_text"] == whole["generated_text"]
    assert http.get("/info").json()["model_id"] == "fake"
    assert http.get("/no/such?a=%20b").status_code == 404
    assert "no such route: GET /no/such" in http.get("/no/such").json()["error"]["message"]
    assert http.post("/tokenize", json={"prompt": "abc"}).json()["tokens"] == [97, 98, 99]


def test_router_serves_health_metrics_and_dashboard(routed, http):
    _, (first, second) = routed
    for path in ("/health", "/live", "/ready"):
        assert http.get(path).status_code == 200
        assert http.head(path).status_code == 200
    http.post("/v1/chat/completions", json=CHAT)
    text = http.get("/metrics").text
    for engine in (first, second):
        assert f'octavo:router_engine_ready{{engine="{engine.url}"}} 1.0' in text
    assert "octavo:router_prompt_tokens_total" in text
    assert "/router/main.js" in http.get("/router").text
    assert http.get("/router/main.js").headers["content-security-policy"].startswith("default-src 'none'")
    told = http.get("/router/engines").json()
    assert [each["url"] for each in told["engines"]] == [first.url, second.url]
    assert told["engines"][0]["models"] == ["alias/of-fake", "fake"]


def test_router_paths_refuse_post_and_require_key(routed):
    """A request without a key reaches no engine, with any method."""
    with run_router(*(each.url for each in routed[1]), api_key="secret") as routing, routing.http() as http:
        for path in ("/health", "/live", "/ready", "/metrics", "/v1/models", "/router"):
            answer = http.post(path, content=b"x" * 1000, headers={"Authorization": "Bearer secret"})
            assert answer.status_code == 405, path
        assert http.post("/health", content=b"x" * 1000).status_code == 405
        assert http.get("/router").headers["www-authenticate"].startswith("Basic ")
        opened = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
        assert http.get("/router", auth=("any", "secret"), headers=opened).status_code == 200
        assert http.get("/v1/models", auth=("any", "secret"), headers=opened).status_code == 401


@pytest.mark.parametrize(
    ("text", "usage"),
    [
        (b'{"usage":{"prompt_tokens":700,"completion_tokens":9}}', (700, None, 709)),
        (b'{"details":{"generated_tokens":5,"input_length":7}}', (7, None, 12)),
        (
            b'{"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0}}}',
            (9, 0, 10),
        ),
        (b'{"usage":{"input_tokens":4,"cache_read_input_tokens":16,"output_tokens":2}}', (20, 16, 22)),
        (b'{"usage":{"prompt_tokens":8},"choices":[{"logprobs":[%s]}]}' % (b"-1.5," * 4000), (8, None, 8)),
        (b'{"response":"","total_duration":5,"prompt_eval_count":8,"eval_count":2}\n', (8, None, 10)),
        (b'{"usage":{"prompt_tokens":8},"choices":[{"text":"say \\"usage\\": 3"}]}', (8, None, 8)),
        (b'{"usage":{"prompt_tokens":8},"choices":[{"text":"\\"usage":{\\"prompt_tokens":9"}]}', (8, None, 8)),
        (b'{"text":"\\"prompt_tokens\\":7"}', (None, None, 0)),
        (b'"usage":{"prompt_tokens":8}', (8, None, 8)),
        (b'\\"usage":{"prompt_tokens":8}', (None, None, 0)),
        (b'{"usage":%s{"prompt_tokens":8}}' % (b" " * (2048 - 26)), (8, None, 8)),
        (b'{"usage":%s{"prompt_tokens":8}}' % (b" " * (2048 - 25)), (None, None, 0)),
        (
            b'{"usage":{"input_tokens":3},"text":"%s","total_duration":5,"prompt_eval_count":8,"cached_tokens":4}\n'
            % (b"x" * 4000),
            (8, 4, 8),
        ),
    ],
)
def test_usage_is_read_from_answers_of_every_api(text, usage):
    assert read_usage(b"", text) == usage


def test_last_usage_of_stream_wins():
    first, last = b'{"input_tokens":5,"output_tokens":1}', b'{"usage":{"input_tokens":9,"output_tokens":2}}'
    assert read_usage(first, last) == (9, None, 11)
    assert read_usage(first, b"") == (5, None, 6)


@pytest.mark.parametrize("text", [b"", b"[]", b'{"data": 3}', b"\x1f\x8b", b'{"data": [{"name": "x"}]}'])
def test_invalid_model_list_yields_no_models(text):
    assert _cards(text, "data", "id") == []
    assert _cards(text, "models", "name") == []


@pytest.mark.parametrize("name", ["a..b:8000", "x" * 64 + ".local:8000", "localhost:99999", "localhost:0", "localhost"])
def test_invalid_engines_dns_is_refused(name):
    with pytest.raises(ConfigError, match="engines_dns"):
        RouterConfig(engines_dns=name)


def test_invalid_requests_get_engine_error(http):
    assert http.post("/v1/chat/completions", content=b"{no json").status_code == 400
    assert http.post("/v1/chat/completions", json={"messages": 3}).json()["error"]["param"] == "messages"
    assert http.post("/v1/messages", json={"messages": 3}).json()["type"] == "error"
    assert http.post("/generate", json={"inputs": 3}).status_code == 422
