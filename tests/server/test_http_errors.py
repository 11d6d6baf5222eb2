"""Every error is an OpenAI error object with the right status, and the engine serves the next request."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import uvicorn
from fakes import FakeExecutor, answer_text
from running import ask_as_written, run_server, wait_until

from octavo import outputs
from octavo.config import ServerConfig
from octavo.engine.local_core import LocalCore
from octavo.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    ExecutionError,
    ModelError,
    OctavoError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
)
from octavo.http.errors import to_http
from octavo.http.listening import bind, check_binding, open_door
from octavo.outputs import ErrorCode
from octavo.server.service import MAX_FAILED_STARTS
from octavo.server.serving import GracefulServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from running import Running

    from octavo.data.model_output import ModelOutput

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def http(shared: Running) -> Iterator[httpx.Client]:
    with shared.http() as client:
        yield client


def check_error(response: httpx.Response, status: int, param: str | None, code: str | None = None) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["param"] == param
    assert error["code"] == code
    assert isinstance(error["message"], str)
    assert error["message"]
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return error["message"]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("bad", parameter="seed"), 400, None),
        (PromptTooLongError("long", parameter="prompt"), 400, "context_length_exceeded"),
        (QueueFullError("full"), 429, "queue_full"),
        (EngineDeadError("/secret"), 503, "engine_dead"),
        (ExecutionError("/secret"), 500, None),
        (EngineError("/secret"), 500, None),
        (ModelError("/secret"), 500, None),
        (ConfigError("/secret"), 500, None),
        (OctavoError("/secret"), 500, None),
        (ValueError("/secret"), 500, None),
    ],
)
def test_errors_map_to_http_status_and_code(error: Exception, status: int, code: str | None) -> None:
    http_error = to_http(error)
    assert (http_error.status, http_error.code) == (status, code)
    assert "/secret" not in http_error.message
    assert http_error.headers == ({"Retry-After": "1"} if status in {429, 503} else {})


@pytest.mark.sweep(16)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"typical_p": 0}, "typical_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": True}, "n"),
        ({"n": "1"}, "n"),
        ({"seed": 2**64 - 1 + 1}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"max_tokens": 2**70}, "max_tokens"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"min_tokens": 2**63}, "min_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 1000}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [257]}, "stop_token_ids"),
        ({"stop_token_ids": ["a"] * 1000}, "stop_token_ids[0]"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"logit_bias": {"5": 10**400}}, "logit_bias"),
        ({"logit_bias": {"257": 1}}, "logit_bias"),
        ({"logit_bias": [[5, 1]]}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-5]}, "allowed_token_ids"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"priority": 2**63}, "priority"),
        ({"model": 5}, "model"),
        ({"response_format": {"type": "json"}}, "response_format"),
        ({"response_format": "json_object"}, "response_format"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_whitespace_pattern": "a"}, "guided_whitespace_pattern"),
    ],
)
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_s11_invalid_sampling_field_is_refused_by_name(
    http: httpx.Client, route: str, fields: dict[str, Any], param: str
) -> None:
    body = {**({"prompt": "hello"} if route == COMPLETIONS else HELLO), **fields}
    message = check_error(http.post(route, json=body), 400, param)
    assert param in message
    assert len(message) < 600


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [HELLO["messages"][0], 5]}, "messages[1]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0]"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"modalities": ["audio"]}, "modalities"),
    ],
)
def test_s11_invalid_chat_field_is_refused_by_name(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    check_error(http.post(CHAT, json={**HELLO, **fields}), 400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, 2.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [257]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**63]}, "prompt"),
        ({"prompt": {"prompt_token_ids": [1]}}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": ["a"] * 600, "n": 2}, "n"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "logprobs": -1}, "logprobs"),
        ({"prompt": "a", "echo": 1}, "echo"),
    ],
)
def test_s11_invalid_completion_field_is_refused_by_name(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    check_error(http.post(COMPLETIONS, json=fields), 400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}},
        {"user": "someone", "metadata": {"a": "b"}, "store": False, "nobody_knows": 1, "verbosity": "medium"},
        {"model": None, "temperature": None, "stop": None, "logit_bias": None, "seed": None, "stream_options": None},
        {"logit_bias": {"65": -100, "66": 100.0}, "seed": -(2**63), "priority": -5, "cache_salt": "x"},
        {"logprobs": False, "best_of": 5, "suffix": "", "n": 1},
        {"chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": True},
    ],
)
def test_chat_fields_without_effect_are_accepted(http: httpx.Client, fields: dict[str, Any]) -> None:
    response = http.post(CHAT, json={**HELLO, **fields, "max_tokens": 3})
    assert response.status_code == 200, response.text
    prompt = "<user>hello\n<assistant>"
    assert response.json()["choices"][0]["message"]["content"] == answer_text(len(prompt), 0, 3)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "a", "x": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    ],
)
def test_invalid_json_body_answers_400(http: httpx.Client, body: bytes) -> None:
    check_error(http.post(COMPLETIONS, content=body), 400, None)


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"[0, [NaN]]", b'{"65": -Infinity}'])
@pytest.mark.parametrize("name", ["temperature", "top_p", "n", "logit_bias", "stop", "nobody_knows"])
def test_s11_non_finite_number_error_names_field(http: httpx.Client, name: str, value: bytes) -> None:
    """JSON has no such numbers, but Python's json module writes and reads them."""
    body = b'{"prompt": "a", "seed": 1.5, "%s": %s, "min_p": NaN}' % (name.encode(), value)
    message = check_error(http.post(COMPLETIONS, content=body), 400, name)
    assert message.startswith(f"{name}: the body is not valid JSON")


@pytest.mark.parametrize("digits", [20, 400, 10_000])
@pytest.mark.parametrize("name", ["seed", "max_tokens", "temperature", "unknown"])
def test_huge_integers_answer_400(http: httpx.Client, name: str, digits: int) -> None:
    body = b'{"prompt": "a", "%s": %s}' % (name.encode(), b"9" * digits)
    response = http.post(COMPLETIONS, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] in {name, None}


def test_nul_and_line_separator_are_accepted_in_prompt(http: httpx.Client) -> None:
    response = http.post(COMPLETIONS, json={"prompt": "a\0b\u2028", "max_tokens": 2, "echo": True})
    assert response.json()["choices"][0]["text"].startswith("a\0b\u2028")


def test_unknown_route_model_or_method_answers_404_or_405(http: httpx.Client) -> None:
    check_error(http.get("/v1/nothing"), 404, None)
    check_error(http.post("/v2", json={}), 404, None)
    response = http.get(CHAT)
    check_error(response, 405, None)
    assert response.headers["allow"] == "POST"
    check_error(http.post("/v1/models"), 405, None)
    check_error(http.get("/v1/models/nope"), 404, "model", "model_not_found")
    check_error(http.post(CHAT, json={**HELLO, "model": "nope"}), 404, "model", "model_not_found")
    assert http.get("/docs").status_code == http.get("/redoc").status_code == 404


def test_health_ready_and_version_answer(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    assert [http.head(path).status_code for path in ("/health", "/live", "/ready", "/version")] == [200, 200, 200, 405]
    assert list(http.get("/version").json()) == ["version"]


def test_s9_body_above_max_body_bytes_answers_413() -> None:
    with run_server(max_body_bytes=10_000) as running, running.http() as http:
        fits = json.dumps({"prompt": "a", "max_tokens": 1, "user": ""}).encode()
        fits = fits.replace(b'""', b'"' + b"x" * (10_000 - len(fits)) + b'"')
        assert len(fits) == 10_000
        assert http.post(COMPLETIONS, content=fits).status_code == 200
        check_error(http.post(COMPLETIONS, content=fits + b" "), 413, None, "request_too_large")
        # If the length is not announced, the body is cut off while it arrives.
        chunks = iter([b'{"prompt": "'] + [b"x" * 1000] * 20)
        check_error(http.post(COMPLETIONS, content=chunks), 413, None, "request_too_large")
        assert http.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer key "[:-2]},
        {"Authorization": "Basic key"},
        {"Authorization": "key"},
        {"X-Api-Key": "wrong"},
        {"X-Api-Key": "Bearer key"},
        {"X-Api-Key": ""},
        {"X-Api-Key": "key", "Authorization": "Bearer wrong"},
        {"X-Api-Key": "key", "Authorization": "Basic key"},
    ],
)
def test_every_route_except_health_requires_api_key(keyed: Running, headers: dict[str, str]) -> None:
    with keyed.http() as http:
        for method, path in [
            ("GET", "/v1/models"),
            ("GET", "/version"),
            ("POST", CHAT),
            ("GET", "/nothing"),
            ("GET", "/health/"),
            ("GET", "//health"),
            ("GET", "/Health"),
            ("GET", "/v1/../v1/models"),
            ("OPTIONS", "/v1/models"),
        ]:
            response = ask_as_written(http, path, method, headers=headers)
            check_error(response, 401, None, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
        assert http.get("/health", headers=headers).status_code == 200


def test_duplicate_authorization_headers_answer_401(keyed: Running) -> None:
    with keyed.http() as http:
        twice = [("Authorization", "Bearer key"), ("Authorization", "Bearer wrong")]
        assert http.get("/version", headers=twice).status_code == 401
        assert http.get("/version", headers={"authorization": "bearer key"}).status_code == 200


@pytest.fixture(scope="module")
def keyed() -> Iterator[Running]:
    with run_server(api_key="key") as running:
        yield running


def test_failed_step_answers_500_and_next_request_succeeds() -> None:
    executor = FakeExecutor()
    with run_server(executor) as running, running.http() as http:
        executor.fail_next = True
        message = check_error(http.post(COMPLETIONS, json={"prompt": "a"}), 500, None)
        assert "secret" not in message
        executor.fail_next = True
        check_error(http.post(COMPLETIONS, json={"prompt": "a", "stream": True}), 500, None)
        assert http.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200


def test_failure_during_stream_sends_one_error_event() -> None:
    executor = FakeExecutor(step_s=0.02)
    body = {"prompt": "a", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    with run_server(executor) as running, running.http() as http, http.stream("POST", COMPLETIONS, json=body) as stream:
        lines = stream.iter_lines()
        for _ in range(6):
            next(lines)
        executor.fail_next = True
        events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    error = json.loads(events[-2])["error"]
    assert error["type"] == "server_error"
    assert "secret" not in error["message"]
    assert all("choices" in json.loads(event) for event in events[:-2])
    assert all(json.loads(event)["choices"][0]["finish_reason"] is None for event in events[:-2])


def test_server_exits_after_engine_dies() -> None:
    """A supervisor may not poll /health: systemd does not."""
    executor = FakeExecutor()
    with run_server(executor) as running, running.http() as http:
        executor.die = True
        check_error(http.post(COMPLETIONS, json={"prompt": "a"}), 503, None, "engine_dead")
        wait_until(lambda: not running.thread.is_alive(), "it has left")


def test_dead_engine_answers_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GracefulServer, "on_tick", uvicorn.Server.on_tick)  # otherwise the server would exit
    executor = FakeExecutor()
    with run_server(executor) as running, running.http() as http:
        executor.die = True
        message = check_error(http.post(COMPLETIONS, json={"prompt": "a"}), 503, None, "engine_dead")
        assert "secret" not in message
        wait_until(lambda: http.get("/live").status_code == 503, "the health check knows")
        assert http.get("/health").status_code == 503
        for route, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {**HELLO, "stream": True})):
            response = http.post(route, json=body)
            check_error(response, 503, None, "engine_dead")
            assert response.headers["retry-after"] == "1"


def test_engine_failing_to_restart_answers_503_with_retry_after() -> None:
    with run_server() as running, running.http() as http:
        engine = running.engine.client
        engine.retry_after_s, engine.num_failed_starts = 17.2, MAX_FAILED_STARTS - 1
        assert http.get("/live").status_code == 200
        assert http.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200
        engine.num_failed_starts += 1
        probes = [http.get(path) for path in ("/health", "/live", "/ready")]
        for response in (*probes, http.post(COMPLETIONS, json={"prompt": "a"})):
            check_error(response, 503, None, "engine_dead")
            assert response.headers["retry-after"] == "18"
        engine.num_failed_starts = 0
        assert [http.get(path).status_code for path in ("/health", "/live", "/ready")] == [200] * 3


def test_restarting_engine_answers_503_with_retry_after(monkeypatch: pytest.MonkeyPatch) -> None:
    with run_server() as running, running.http() as http:
        monkeypatch.setattr(LocalCore, "is_ready", False)
        running.engine.client.retry_after_s = 4.5
        assert http.get("/live").status_code == 200
        for response in (http.get("/health"), http.get("/ready"), http.post(COMPLETIONS, json={"prompt": "a"})):
            check_error(response, 503, None, "engine_restarting")
            assert response.headers["retry-after"] == "5"


def test_full_queue_answers_429() -> None:
    executor = FakeExecutor()
    options = {"max_num_seqs": 1, "max_num_waiting": 0}
    with run_server(executor, engine_options=options) as running, running.http() as http:
        response = http.post(COMPLETIONS, json={"prompt": "a"})
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "queue_full"
        assert response.headers["retry-after"] == "1"


def test_prompt_larger_than_kv_cache_answers_400() -> None:
    with run_server(engine_options={"num_blocks": 4, "block_size": 16}) as running, running.http() as http:
        response = http.post(COMPLETIONS, json={"prompt": "x" * 64})
        check_error(response, 400, "prompt", "context_length_exceeded")
        assert http.post(COMPLETIONS, json={"prompt": "x" * 63}).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_address_requires_no_api_key(host: str) -> None:
    check_binding(host, ServerConfig(), insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.0.1", "example.org", "127.0.0.1.example.org"])
def test_non_loopback_address_requires_api_key_or_insecure(host: str) -> None:
    with pytest.raises(ConfigError, match="API key"):
        check_binding(host, ServerConfig(), insecure=False)
    check_binding(host, ServerConfig(api_key="key"), insecure=False)
    check_binding(host, ServerConfig(api_keys_file=Path("keys.toml")), insecure=False)
    check_binding(host, ServerConfig(), insecure=True)


def test_bind_refuses_address_in_use() -> None:
    """The address is taken before the model is loaded. Otherwise a second server would load its model in vain."""
    with bind("127.0.0.1", 0) as sock:
        for _ in range(2):
            with pytest.raises(ConfigError, match="cannot listen"):
                bind("127.0.0.1", sock.getsockname()[1])
            open_door(sock)


def test_connections_are_refused_until_open_door() -> None:
    """A refused proxy tries another server. An accepted connection would wait as long as an answer may take."""
    with bind("127.0.0.1", 0) as sock:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(sock.getsockname())
        open_door(sock)
        socket.create_connection(sock.getsockname()).close()


def test_bind_succeeds_with_connections_in_time_wait() -> None:
    with bind("127.0.0.1", 0) as sock:
        open_door(sock)
        address = sock.getsockname()
        with socket.create_connection(address) as client:
            sock.accept()[0].close()  # the side that closes first keeps TIME_WAIT
            assert client.recv(1) == b""
    for _ in range(2):  # the first restarted server causes TIME_WAIT connections too
        with bind(*address) as sock:
            with pytest.raises(ConfigError, match="cannot listen"):
                bind(*address)
            open_door(sock)
            with socket.create_connection(address) as client:
                sock.accept()[0].close()
                assert client.recv(1) == b""


@pytest.mark.parametrize(
    ("path", "fields", "sent"),
    [
        (CHAT, {**HELLO, "max_tokens": 3}, "max_tokens"),
        (CHAT, {**HELLO, "max_completion_tokens": 3}, "max_completion_tokens"),
        (CHAT, {**HELLO, "max_tokens": 7, "max_completion_tokens": 3}, "max_completion_tokens"),
        (CHAT, {**HELLO, "n_predict": 3}, "n_predict"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 3}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "n_predict": 3}, "n_predict"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 3}, "max_output_tokens"),
    ],
)
def test_min_tokens_error_names_limit_field_that_client_sent(
    http: httpx.Client, path: str, fields: dict[str, Any], sent: str
) -> None:
    message = check_error(http.post(path, json={**fields, "min_tokens": 5}), 400, "min_tokens")
    assert message == f"min_tokens must be at most {sent} (3), got 5"


@pytest.mark.parametrize(
    ("code", "status", "param", "told"),
    [
        (ErrorCode.DEADLINE_PASSED, 504, None, "request_timeout"),
        (ErrorCode.GRAMMAR_EXCEEDED, 400, "structured_outputs", None),
        (ErrorCode.NOTHING_ALLOWED, 400, "allowed_token_ids", None),
        (ErrorCode.REQUEST_FAILED, 500, None, "request_failed"),
        (ErrorCode.STEP_FAILED, 500, None, None),
    ],
)
def test_worker_error_code_determines_http_error(
    monkeypatch: pytest.MonkeyPatch, code: ErrorCode, status: int, param: str | None, told: str | None
) -> None:
    """The code decides, not the error's text."""
    monkeypatch.setitem(outputs._TEXTS, code, "other words")
    executor = FakeExecutor()
    collect = executor.collect

    def fail() -> ModelOutput:
        result = collect()
        errors = dict.fromkeys(result.sampled_token_ids, code.value)
        return replace(result, sampled_token_ids={}, errors=errors)

    monkeypatch.setattr(executor, "collect", fail)
    with run_server(executor) as running, running.http() as http:
        message = check_error(http.post(COMPLETIONS, json={"prompt": "a"}), status, param, told)
    assert code in (ErrorCode.STEP_FAILED, ErrorCode.REQUEST_FAILED) or message == "other words"
