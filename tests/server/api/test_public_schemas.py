"""Every API serves the schemas of public projects, or refuses them with the field and the place in the schema."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from call_grammars import Grammars
from fakes import FakeChatTemplate, FakeExecutor
from public_schemas import PUBLIC_SCHEMAS, SERVED
from running import Running, run_server

from octavo.sampling_params import StructuredOutputsParams
from octavo.structured_output.lark import lark_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from octavo.sampling_params import SamplingParams

MESSAGES = [{"role": "user", "content": "Hello"}]
Ways = dict[str, "tuple[str, Callable[[dict[str, Any]], dict[str, Any]], str]"]


class _Compiling(FakeExecutor):
    """Compiles the grammars of requests as a worker does, but recites its fixed text."""

    def __init__(self) -> None:
        super().__init__(answer="ok")
        grammars = Grammars("plain", [])
        self._compiler = grammars.compiler(grammars.size)

    def prepare(self, params: SamplingParams, tenant: str) -> Future[None] | None:  # type: ignore[override]
        wanted = params.structured_outputs
        return None if wanted is None else self._compiler.prepare(wanted, tenant)


def _chat_tools(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": "now"}},
        {"type": "function", "function": {"name": "save", "parameters": schema}},
    ]


# path, the other fields of the body, and the field that an error names
WAYS: Ways = {
    "chat": (
        "/v1/chat/completions",
        lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
        "response_format",
    ),
    "chat, structured_outputs": (
        "/v1/chat/completions",
        lambda schema: {"structured_outputs": {"json": schema}},
        "structured_outputs",
    ),
    "chat, guided_json": ("/v1/chat/completions", lambda schema: {"guided_json": schema}, "guided_json"),
    "chat, forced tools": (
        "/v1/chat/completions",
        lambda schema: {"tools": _chat_tools(schema), "tool_choice": "required"},
        "tools[1].function.parameters",
    ),
    "chat, structured_outputs beside tools": (
        "/v1/chat/completions",
        lambda schema: {"tools": _chat_tools({}), "structured_outputs": {"json": schema}},
        "structured_outputs",
    ),
    "chat, the format beside tools": (
        "/v1/chat/completions",
        lambda schema: {
            "tools": _chat_tools({}),
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        },
        "response_format",
    ),
    "completions": ("/v1/completions", lambda schema: {"prompt": "Hello", "guided_json": schema}, "guided_json"),
    "responses": (
        "/v1/responses",
        lambda schema: {"input": "Hello", "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}},
        "text.format",
    ),
    "responses, forced tools": (
        "/v1/responses",
        lambda schema: {
            "input": "Hello",
            "text": {"format": {"type": "text"}},
            "tools": [{"type": "function", "name": "save", "parameters": schema}],
            "tool_choice": {"type": "function", "name": "save"},
        },
        "tools[0].parameters",
    ),
    "messages": (
        "/v1/messages",
        lambda schema: {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        "output_config.format",
    ),
    "messages, forced tools": (
        "/v1/messages",
        lambda schema: {"tools": [{"name": "save", "input_schema": schema}], "tool_choice": {"type": "any"}},
        "tools[0].input_schema",
    ),
    "ollama": ("/api/chat", lambda schema: {"format": schema, "stream": False}, "format"),
    "TGI": (
        "/generate",
        lambda schema: {"inputs": "Hello", "parameters": {"grammar": {"type": "json", "value": schema}}},
        "grammar",
    ),
}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    options = {"chat_template": FakeChatTemplate("<tool_call>")}
    with run_server(_Compiling(), engine_options=options) as server:
        yield server


@pytest.mark.sweep(16)
@pytest.mark.parametrize("way", WAYS)
def test_public_schemas_are_served_or_refused_with_field_path(running: Running, way: str) -> None:
    path, body_of, field = WAYS[way]
    with running.http() as http:
        for name, each in PUBLIC_SCHEMAS.items():
            body = {"model": "fake", "max_tokens": 4, **body_of(each.schema)}
            if path == "/generate":
                body = body_of(each.schema)
            elif path == "/api/chat":
                body = {"model": "fake", "messages": MESSAGES, **body_of(each.schema)}
            elif path not in {"/v1/responses", "/v1/completions"}:
                body["messages"] = MESSAGES
            elif path == "/v1/responses":
                del body["max_tokens"]
            response = http.post(path, json=body)
            if not each.refusal:
                assert response.status_code == 200, f"{name}: {response.text}"
                continue
            told = response.json()
            error = told["error"] if isinstance(told["error"], dict) else {"message": told["error"]}
            assert response.status_code in {400, 422}, name
            assert error["message"].endswith(each.refusal), name
            if field.startswith("tools"):
                assert error["message"].startswith(f"{field}: "), name
            assert error.get("param", field) == field, name


def test_schema_grammars_accept_valid_values_only() -> None:
    grammars = Grammars("plain", [])
    for name, each in SERVED.items():
        text = json.dumps(each.value)
        surplus = json.dumps({**each.value, "surplus": 1})
        for structure in (
            StructuredOutputsParams(json=each.schema),
            StructuredOutputsParams(grammar=f"start: {lark_json(each.schema)}"),
        ):
            assert grammars.accepts(structure, text), name
            assert not grammars.accepts(structure, surplus), name


def test_optional_tools_accept_any_schema(running: Running) -> None:
    with running.http() as http:
        for each in PUBLIC_SCHEMAS.values():
            body = {"messages": MESSAGES, "tools": _chat_tools(each.schema), "max_tokens": 4}
            assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_lookahead_refusal_names_field_and_schema_path() -> None:
    """Qwen3-Coder writes strings without quotes, which limits lookaheads.

    The email's three expressions can be expressed together; other patterns with lookaheads are refused.
    """
    options = {"chat_template": FakeChatTemplate("<tool_call><function=<parameter=")}
    with run_server(_Compiling(), engine_options=options) as server, server.http() as http:
        email = _chat_tools(PUBLIC_SCHEMAS["zod 4: an email"].schema)
        body = {"messages": MESSAGES, "tools": email, "tool_choice": "required"}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        schema = {"type": "object", "properties": {"code": {"type": "string", "pattern": "^(?!a.*b.*c)x"}}}
        response = http.post("/v1/chat/completions", json={**body, "tools": _chat_tools(schema)})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "tools[1].function.parameters"
        assert error["message"].startswith("tools[1].function.parameters: #/properties/code: the pattern `^(?!")


def test_template_without_tools_serves_inexpressible_schema_unless_strict() -> None:
    """The server adds a grammar for tools if the template has none.

    If the client did not require calls and the grammar cannot express the schema, the request is served.
    """
    schema = PUBLIC_SCHEMAS["pydantic: a set"].schema
    with (
        run_server(_Compiling(), engine_options={"chat_template": FakeChatTemplate()}) as server,
        server.http() as http,
    ):
        body = {"messages": MESSAGES, "tools": _chat_tools(schema)}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in _chat_tools(schema)]
        for stricter in ({"tools": strict}, {"tool_choice": "required"}):
            response = http.post("/v1/chat/completions", json={**body, **stricter})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "tools[1].function.parameters"
