"""A prefill engine computes prompts and returns no answer in any API; a decode engine answers as usual."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fakes import answer_text
from running import asking, run_server, wait_until

from octavo.data.kv_transfer_params import KVTransferParams
from octavo.http.kv_transfer import kv_transfer_headers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from running import Running

    from octavo.data.request import Request

TURNS = [{"role": "user", "content": "What is an octavo?"}]
TOOL = {"name": "look", "parameters": {"type": "object", "properties": {}}}
SHAPED = {"stop": ["x"], "temperature": 1.0, "seed": 3}
# A request of each API with options of the answer, its number of prompts, and its number of choices.
ROUTES: list[tuple[str, dict[str, Any], int, int]] = [
    ("/v1/chat/completions", {"messages": TURNS, "n": 3, "logprobs": True, "top_logprobs": 2, **SHAPED}, 1, 3),
    ("/v1/chat/completions", {"messages": TURNS, "response_format": {"type": "json_object"}}, 1, 1),
    ("/v1/completions", {"prompt": "Once upon", "max_tokens": 50, "echo": True, "logprobs": 3, **SHAPED}, 1, 1),
    ("/v1/completions", {"prompt": ["one", "two", "three"], "n": 2, "max_tokens": 9}, 3, 2),
    ("/v1/completions", {"prompt": [[1, 2, 3], [4, 5]], "prompt_logprobs": 1, "min_tokens": 5}, 2, 1),
    ("/v1/responses", {"input": "What is an octavo?", "max_output_tokens": 30}, 1, 1),
    ("/v1/messages", {"model": "fake", "messages": TURNS, "max_tokens": 30, "stop_sequences": ["x"]}, 1, 1),
    ("/generate", {"inputs": "Once", "parameters": {"details": True, "top_n_tokens": 2, "do_sample": True}}, 1, 1),
    ("/generate_stream", {"inputs": "Once", "parameters": {"max_new_tokens": 9}}, 1, 1),
    ("/", {"inputs": "Once", "parameters": {"decoder_input_details": True}}, 1, 1),
    ("/api/chat", {"model": "fake", "messages": TURNS, "stream": False, "options": {"num_predict": 9, **SHAPED}}, 1, 1),
    ("/api/generate", {"model": "fake", "prompt": "Once", "stream": False, "logprobs": True}, 1, 1),
]
every_route = pytest.mark.parametrize(("path", "body", "num_prompts", "num_choices"), ROUTES)
REFUSED_IN_A_STREAM = {"decoder_input_details", "prompt_logprobs"}
STREAMED = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/",
    "/api/chat",
    "/api/generate",
}


@pytest.fixture(scope="module", params=["prefill", "decode"])
def engine(request: pytest.FixtureRequest) -> Iterator[Running]:
    with run_server(
        engine_options={"role": request.param, "kv_transfer_port": 4711, "kv_format": {"kv": "int8"}}
    ) as running:
        yield running


@pytest.fixture
def taken(engine: Running, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that the core gets during the test."""
    scheduler, requests = engine.engine.core.scheduler, []
    add = scheduler.add_request

    def note(request: Request) -> None:
        requests.append(request)
        add(request)

    monkeypatch.setattr(scheduler, "add_request", note)
    return requests


def prompt_of(request: Request) -> list[int]:
    return request.sequence.token_ids[: request.num_prompt_tokens]


def role_of(engine: Running) -> str:
    return engine.engine.capacity.role


def headers_for(engine: Running) -> dict[str, str]:
    return kv_transfer_headers(KVTransferParams("t-1", is_prefill=role_of(engine) == "prefill"))


@pytest.mark.sweep(16)
@every_route
@pytest.mark.parametrize("stream", [False, True])
def test_every_route_prefills_or_decodes_by_engine_role(
    engine: Running,
    taken: list[Request],
    path: str,
    body: dict[str, Any],
    num_prompts: int,
    num_choices: int,
    stream: bool,
) -> None:
    is_streamed = path == "/generate_stream" or (stream and path in STREAMED)
    if is_streamed and REFUSED_IN_A_STREAM & {*body, *body.get("parameters", {})}:
        return  # such a stream is refused
    body = {**body, "stream": True} if is_streamed else body
    with engine.http() as http:
        plain = http.post(path, json=body)
        assert plain.status_code == 200, plain.text
        num_plain = len(taken)
        answer = http.post(path, json=body, headers=headers_for(engine))
        assert answer.status_code == 200, answer.text
    before, of_transfer = taken[:num_plain], taken[num_plain:]
    assert len(before) == num_prompts * num_choices
    assert {request.kv_transfer_params for request in before} == {None}
    assert [prompt_of(request) for request in of_transfer] == [
        prompt_of(request) for request in before[:: num_choices if role_of(engine) == "prefill" else 1]
    ]
    if role_of(engine) == "decode":
        assert {request.kv_transfer_params for request in of_transfer} == {KVTransferParams("t-1")}
        assert answer.headers["content-type"] == plain.headers["content-type"]
        assert len(answer.text) == pytest.approx(len(plain.text), rel=0.05)
        return
    assert {request.kv_transfer_params for request in of_transfer} == {KVTransferParams("t-1", is_prefill=True)}
    for request in of_transfer:
        params = request.sampling_params
        assert (params.max_tokens, params.n, params.stop, params.logprobs, params.prompt_logprobs) == (
            1,
            1,
            [],
            None,
            None,
        )
        assert params.structured_outputs is None
        assert (params.temperature, params.ignore_eos, params.detokenize) == (0.0, True, False)
        assert len(request.sequence.token_ids) == request.num_prompt_tokens + 1
    told, num_tokens = answer.json(), sum(request.num_prompt_tokens for request in of_transfer)
    assert told["object"] == "prefill"
    usage = told["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (num_tokens, 0, num_tokens)


def test_kv_transfer_request_keeps_salt_priority_and_deadline(engine: Running, taken: list[Request]) -> None:
    body = {"prompt": "abc", "max_tokens": 2, "cache_salt": "pepper", "priority": 3}
    with engine.http() as http:
        http.post("/v1/completions", json=body, headers={**headers_for(engine), "X-Request-Timeout": "9"})
    (request,) = taken
    assert (request.cache_salt, request.priority) == ("pepper", 3)
    assert request.deadline is not None
    assert request.deadline - request.arrival_time < 9.1


def test_kv_source_reaches_decode_engine_and_is_refused_by_prefill_engine(
    engine: Running, taken: list[Request]
) -> None:
    params = KVTransferParams("t-2", source="10.0.0.1:9000")
    with engine.http() as http:
        answer = http.post(
            "/v1/completions", json={"prompt": "abc", "max_tokens": 4}, headers=kv_transfer_headers(params)
        )
    if role_of(engine) == "prefill":
        assert answer.status_code == 400
        assert not taken
    else:
        assert answer.json()["choices"][0]["text"] == answer_text(3, num_tokens=4)
        assert [request.kv_transfer_params for request in taken] == [params]


def test_model_info_reports_role_and_kv_transfer_port(engine: Running) -> None:
    with engine.http() as http:
        told = http.get("/model_info").json()
    assert (told["role"], told["kv_transfer_port"]) == (role_of(engine), 4711)
    assert told["kv_format"] == {"kv": "int8"}
    assert told["request_timeout"] == 1800.0


def test_disconnect_aborts_prefill() -> None:
    headers = kv_transfer_headers(KVTransferParams("t", is_prefill=True))
    with run_server(engine_options={"role": "prefill"}) as running:
        running.executor.gate.clear()
        with asking(running, "/v1/completions", {"prompt": "abc"}, **headers):
            wait_until(lambda: running.num_unfinished, "it is computed")
        running.executor.gate.set()
        wait_until(lambda: not running.num_unfinished, "it is aborted")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/generate", "/tokenize"])
def test_engine_with_role_both_refuses_kv_transfer(shared: Running, path: str) -> None:
    with shared.http() as http:
        answer = http.post(path, json={}, headers=kv_transfer_headers(KVTransferParams("t")))
        assert answer.status_code == (422 if path == "/generate" else 400)
        assert "X-KV-Transfer-Role is decode, but this engine was started with --role both" in answer.text
        told = http.get("/model_info").json()
    assert (told["role"], told["kv_transfer_port"], told["kv_format"]) == ("both", None, None)
