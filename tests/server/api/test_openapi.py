"""The OpenAPI document is true: it has every route, and requests and answers match its schemas."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from fakes import FakeChatTemplate, FakeExecutor
from running import connect, read_all, run_server
from starlette.routing import Route

from octavo.http.auth import OPEN_PATHS
from octavo.http.connection import MAX_HEADER_BYTES
from octavo.http.tenants import Tenant, add_key
from octavo.sampling_params import LIMITS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from running import Running

USER = {"role": "user", "content": "How is Rome?"}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
# Valid bodies by route. Each is sent, and body and answer must match their schemas.
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": [USER]},
        {"messages": [USER], "n": 2, "logprobs": True, "top_logprobs": 2, "max_tokens": 4, "prompt_logprobs": 1},
        {
            "messages": [USER],
            "max_tokens": -1,
            "top_p": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        },
        {"messages": [USER], "tools": [TOOL], "tool_choice": "auto", "stop": ["a", "b"], "temperature": 0.5},
        {
            "messages": [USER],
            "tools": [TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]},
            },
        },
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
                USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "a", "content": "noon"},
            ],
            "tools": [TOOL],
            "logit_bias": {"65": 1.5},
        },
    ],
    "/v1/completions": [
        {"prompt": "a", "max_tokens": 3, "logprobs": 2, "echo": True},
        {"prompt": [[1, 2], [3]], "max_tokens": 3, "n": 2},
        {"prompt": "abc", "n_predict": -1, "n_probs": 2, "return_token_ids": True, "truncate_prompt_tokens": 2},
    ],
    "/v1/responses": [
        {"input": "Hello."},
        {
            "input": "Hello.",
            "tools": [{"type": "function", "name": "now", "parameters": {"type": "object"}}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]},
        },
        {"input": "Hello.", "include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"input": [USER, {"type": "function_call_output", "call_id": "a", "output": "noon"}], "max_output_tokens": 5},
    ],
    "/v1/responses/input_tokens": [{"input": [USER], "instructions": "Be brief."}],
    "/v1/embeddings": [],  # this engine has no hidden states; tests/server/test_real_engine.py tests embeddings
    "/v1/messages": [{"model": "fake", "max_tokens": 9, "messages": [USER], "system": "Be brief.", "top_k": 3}],
    "/v1/messages/count_tokens": [{"model": "fake", "messages": [USER]}],
    "/generate": [{"inputs": "a", "parameters": {"max_new_tokens": 3, "details": True, "decoder_input_details": True}}],
    "/": [{"inputs": "a", "parameters": {"max_new_tokens": 3}}],
    "/generate_stream": [{"inputs": "a", "parameters": {"max_new_tokens": 3}}],
    "/api/chat": [
        {"model": "fake"},
        {
            "model": "fake",
            "messages": [USER],
            "stream": False,
            "options": {"num_predict": -2, "top_k": 3},
            "think": True,
        },
        {
            "model": "fake:latest",
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": {}}}]},
                {"role": "tool", "content": "noon", "tool_name": "now"},
            ],
            "stream": False,
            "tools": [TOOL],
            "logprobs": True,
            "top_logprobs": 2,
        },
    ],
    "/api/generate": [{"model": "fake", "prompt": "a", "stream": False}, {"model": "fake", "prompt": "a", "raw": True}],
    "/api/embed": [{"model": "fake", "input": []}],
    "/api/embeddings": [{"model": "fake", "prompt": ""}],
    "/api/show": [{"model": "fake"}, {"name": "alias/of-fake:latest"}],
    "/tokenize": [{"prompt": "a", "return_token_strs": True}, {"messages": [USER], "tools": [TOOL]}],
    "/detokenize": [{"tokens": [65, 66]}],
}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    template = FakeChatTemplate("<tool_call> </think>")
    answer = '<think>Hm.</think>So.<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    with run_server(FakeExecutor(answer=answer), engine_options={"chat_template": template}) as running:
        yield running


@pytest.fixture(scope="module")
def document(running: Running) -> dict[str, Any]:
    with running.http() as http:
        return http.get("/openapi.json").json()  # type: ignore[no-any-return]


def check(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(value)


def test_openapi_describes_every_route(running: Running, document: dict[str, Any]) -> None:
    routes = {
        (route.path.replace(":path}", "}"), method.lower())
        for route in running.server.config.app.routes  # type: ignore[union-attr]
        if isinstance(route, Route) and route.include_in_schema  # the dashboard is a page, not an API
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert routes == {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert {path for path, methods in document["paths"].items() if "post" in methods} == BODIES.keys()


@pytest.mark.turn(8)
def test_openapi_references_resolve(document: dict[str, Any]) -> None:
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(document)
    names = {part.partition('"')[0] for part in text.split('"$ref": "#/components/schemas/')[1:]}
    assert names <= document["components"]["schemas"].keys()


@pytest.mark.sweep(16)
@pytest.mark.parametrize("path", BODIES)
def test_post_requests_and_answers_match_openapi_schemas(running: Running, document: dict[str, Any], path: str) -> None:
    operation = document["paths"][path]["post"]
    asked = operation["requestBody"]["content"]["application/json"]["schema"]
    answers = operation["responses"]
    with running.http() as http:
        for body in BODIES[path]:
            check(document, asked, body)
            response = http.post(path, json=body)
            assert response.status_code == 200, response.text
            kind = response.headers["content-type"].partition(";")[0]
            if kind == "application/json":
                check(document, answers["200"]["content"][kind]["schema"], response.json())
            else:
                assert kind in answers["200"]["content"]
            if len(answers["200"]["content"]) == 2:
                streamed = http.post(path, json={**body, "stream": True, "prompt_logprobs": None})
                assert streamed.headers["content-type"].partition(";")[0] in answers["200"]["content"], streamed.text
        for wrong in (b"{", b"[]", b'{"model": 7, "inputs": 7, "tokens": 7, "max_tokens": "a"}'):
            refused = http.post(path, content=wrong)
            schema = answers[str(refused.status_code)]["content"]["application/json"]["schema"]
            check(document, schema, refused.json())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_out_of_range_values_fail_schema_and_server(running: Running, document: dict[str, Any], path: str) -> None:
    asked = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = document["components"]["schemas"][asked["$ref"].rpartition("/")[2]]["properties"]
    with running.http() as http:
        for name in LIMITS.keys() & fields:
            limits = LIMITS[name]
            more = 3 if limits.is_whole else 0.5  # 3, because -1 has a special meaning
            for value in (limits.low - more, limits.high + more):
                body = {**BODIES[path][0], name: value}
                with pytest.raises(jsonschema.ValidationError):
                    check(document, asked, body)
                assert http.post(path, json=body).status_code == 400, (name, value)


def test_get_answers_match_openapi_schemas(running: Running, document: dict[str, Any]) -> None:
    with running.http() as http:
        for path, methods in document["paths"].items():
            if "get" not in methods:
                continue
            response = http.get(path.replace("{model}", "alias/of-fake"))
            assert response.status_code == 200
            content = methods["get"]["responses"]["200"].get("content", {})
            if "application/json" in content:
                check(document, content["application/json"]["schema"], response.json())
        missing = http.get("/v1/models/other")
        schema = document["paths"]["/v1/models/{model}"]["get"]["responses"]["404"]["content"]["application/json"]
        check(document, schema["schema"], missing.json())


def test_refusals_before_routing_match_openapi_schemas(document: dict[str, Any]) -> None:
    """A page of another origin, a method that the route lacks, another Host, and headers without end."""
    with run_server(allowed_hosts=("127.0.0.1",)) as running, running.http() as http:
        for path, methods in document["paths"].items():
            ((method, operation),) = methods.items()
            asked = path.replace("{model}", "fake")
            answers = [
                http.request(method, asked, headers={"Origin": "http://evil.example"}),
                http.request("PUT", asked),
            ]
            if path not in OPEN_PATHS:
                answers.append(http.request(method, asked, headers={"Host": "evil.example"}))
            refused = [(answer.status_code, answer.json()) for answer in answers]
            with connect(running) as sock:
                flood = f"{method.upper()} {asked} HTTP/1.1\r\nX-Flood: ".encode()
                sock.sendall(flood + b"a" * (MAX_HEADER_BYTES + 1 - len(flood)))  # no unread byte, so no reset
                head, _, body = read_all(sock).partition(b"\r\n\r\n")
                refused.append((int(head.split()[1]), json.loads(body)))
            assert [status for status, _ in refused] == [403, 405, *([421] * (path not in OPEN_PATHS)), 431], path
            assert ("421" in operation["responses"]) == (path not in OPEN_PATHS)
            for status, told in refused:
                check(document, operation["responses"][str(status)]["content"]["application/json"]["schema"], told)


def test_metrics_403_matches_openapi_schema(document: dict[str, Any], tmp_path: Path) -> None:
    key = add_key(path := tmp_path / "keys.toml", Tenant(name="bob"))
    with run_server(api_keys_file=path) as running, running.http() as http:
        refused = http.get("/metrics", headers={"x-api-key": key})
    assert refused.status_code == 403
    schema = document["paths"]["/metrics"]["get"]["responses"]["403"]["content"]["application/json"]["schema"]
    check(document, schema, refused.json())


def test_openapi_security_is_present_only_with_api_key(document: dict[str, Any]) -> None:
    assert "security" not in document
    with run_server(api_key="key") as running, running.http() as http:
        assert http.get("/openapi.json").status_code == 401
        keyed = http.get("/openapi.json", headers={"x-api-key": "key"}).json()
        assert keyed["security"] == [{"bearer": []}, {"x-api-key": []}]
        assert keyed["paths"]["/health"]["get"]["security"] == []
