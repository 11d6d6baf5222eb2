"""Every field that the SDKs of OpenAI and Anthropic send is served, refused, or known as harmless; none is dropped."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fakes import FakeChatTemplate
from running import run_server
from sdks import anthropic, openai

from octavo.server.api.anthropic import messages
from octavo.server.api.anthropic.messages import CountTokensRequest, MessagesRequest
from octavo.server.api.extra_fields import ANTHROPIC_HARMLESS, HARMLESS
from octavo.server.api.openai import embeddings, responses
from octavo.server.api.openai.embeddings import EmbeddingRequest
from octavo.server.api.openai.requests import ChatCompletionRequest, CompletionRequest
from octavo.server.api.openai.responses import ResponsesRequest

if TYPE_CHECKING:
    from pydantic import BaseModel

API = Path(__file__).parents[3] / "docs" / "api.md"
USER = {"role": "user", "content": "hello"}
OF_ANTHROPIC = (messages._UNSUPPORTED, ANTHROPIC_HARMLESS)
ROUTES: dict[str, tuple[Any, type[BaseModel], dict[str, Any], dict[str, str]]] = {  # by the SDK's parameter class
    "chat.completion_create_params.CompletionCreateParamsStreaming": (
        openai,
        ChatCompletionRequest,
        ChatCompletionRequest.unsupported,
        HARMLESS,
    ),
    "completion_create_params.CompletionCreateParamsStreaming": (
        openai,
        CompletionRequest,
        CompletionRequest.unsupported,
        HARMLESS,
    ),
    "embedding_create_params.EmbeddingCreateParams": (openai, EmbeddingRequest, embeddings._UNSUPPORTED, HARMLESS),
    "responses.response_create_params.ResponseCreateParamsStreaming": (
        openai,
        ResponsesRequest,
        responses._UNSUPPORTED,
        HARMLESS,
    ),
    "message_create_params.MessageCreateParamsStreaming": (anthropic, MessagesRequest, *OF_ANTHROPIC),
    "beta.message_create_params.MessageCreateParamsStreaming": (anthropic, MessagesRequest, *OF_ANTHROPIC),
    "message_count_tokens_params.MessageCountTokensParams": (anthropic, CountTokensRequest, *OF_ANTHROPIC),
}


@pytest.mark.parametrize("name", ROUTES)
def test_every_sdk_request_field_is_handled(name: str) -> None:
    sdk, schema, refused, harmless = ROUTES[name]
    sent = operator.attrgetter(name)(sdk.types)
    names = {*sent.__required_keys__, *sent.__optional_keys__}  # a TypedDict
    assert "model" in names
    assert names - schema.model_fields.keys() - refused.keys() - harmless.keys() == set()
    assert not (schema.model_fields.keys() | refused.keys()) & harmless.keys() - {"metadata"}  # /v1/responses keeps it


def test_harmless_fields_are_documented() -> None:
    text = API.read_text(encoding="utf-8")
    assert [name for name in {**HARMLESS, **ANTHROPIC_HARMLESS} if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/v1/messages", {"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ("/v1/messages", {"output_format": {"type": "json_schema"}}, "output_format"),
        ("/v1/messages", {"output_config": {"format": {"type": "text"}}}, "output_config.format"),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": 1}}}, "output_config.format"),
        ("/v1/messages", {"output_config": {"effort": 3}}, "output_config.effort"),
        ("/v1/messages", {"output_config": {"style": "x"}}, "output_config.style"),
        ("/v1/messages/count_tokens", {"thread": {"type": "create"}}, "thread"),
        ("/v1/chat/completions", {"verbosity": "low"}, "verbosity"),
        ("/v1/chat/completions", {"thinking_token_budget": 8}, "thinking_token_budget"),
        ("/v1/chat/completions", {"return_prompt_text": True}, "return_prompt_text"),
        ("/v1/completions", {"repetition_detection": {"min_count": 3}}, "repetition_detection"),
        ("/v1/completions", {"watermarking": True}, "watermarking"),
        ("/v1/responses", {"include_reasoning": False}, "include_reasoning"),
        ("/v1/responses", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ("/v1/chat/completions", {"reasoning_effort": 1}, "reasoning_effort"),
        ("/v1/responses", {"text": {"verbosity": "high"}}, "text.verbosity"),
        ("/v1/responses", {"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        ("/v1/responses", {"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ("/v1/responses", {"image": {"context_compression": "enabled"}}, "image"),
        ("/v1/responses", {"context_management": [{"type": "compaction"}]}, "context_management"),
        ("/v1/embeddings", {"add_special_tokens": False}, "add_special_tokens"),
        ("/v1/embeddings", {"messages": [USER]}, "messages"),  # of vLLM
        ("/v1/embeddings", {"content": "hello"}, "content"),  # of llama.cpp
        ("/v1/embeddings", {"embd_normalize": -1}, "embd_normalize"),
        ("/v1/embeddings", {"truncate": True}, "truncate"),  # of TEI
        ("/v1/embeddings", {"lora_path": "a"}, "lora_path"),  # of SGLang
        ("/v1/embeddings", {"input_type": "query"}, "input_type"),  # of gateways
    ],
)
def test_unsupported_sdk_fields_are_refused_by_name(shared: Any, route: str, body: dict[str, Any], param: str) -> None:
    sound = {"model": "fake", "max_tokens": 3, "messages": [USER]}
    if route in {"/v1/embeddings", "/v1/responses"}:
        sound = {"input": "hello"}
    if route == "/v1/completions":
        sound = {"prompt": "hello"}
    with shared.http() as http:
        response = http.post(route, json={**sound, **body})
    assert response.status_code == 400, response.text
    assert param in response.json()["error"]["message"]
    if not route.startswith("/v1/messages"):
        assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        {"max_tool_calls": 0},
        {"image": {"context_compression": "auto"}},
        {"reasoning": {"mode": "standard", "summary": "auto"}},
        {"prompt_cache_options": {"mode": "implicit", "prewarm": False}},
    ],
)
def test_response_fields_without_effect_are_accepted(shared: Any, body: dict[str, Any]) -> None:
    with shared.http() as http:
        response = http.post("/v1/responses", json={"input": "hello", "max_output_tokens": 3, **body})
    assert response.status_code == 200, response.text


class _Template(FakeChatTemplate):
    """Keeps the options of the last call."""

    def render(self, messages: Any, **options: Any) -> str:
        self.options = options
        return super().render(messages, **options)


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("route", "body", "told"),
    [
        ("/v1/chat/completions", {"reasoning_effort": "low"}, ("low", True)),
        ("/v1/chat/completions", {"reasoning_effort": "none"}, ("none", False)),
        (
            "/v1/chat/completions",
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            ("none", True),
        ),
        ("/v1/messages", {"output_config": {"effort": "high"}}, ("high", True)),
        (
            "/v1/messages",
            {"output_config": {"effort": "high"}, "thinking": {"type": "disabled"}},
            ("high", False),
        ),
        ("/v1/messages/count_tokens", {"output_config": {"effort": "low"}}, ("low", True)),
    ],
)
def test_reasoning_effort_reaches_chat_template(route: str, body: dict[str, Any], told: tuple[str, bool]) -> None:
    template = _Template()
    with run_server(engine_options={"chat_template": template}) as running, running.http() as http:
        sound = {"model": "fake", "messages": [USER], "max_tokens": 3}
        assert http.post(route, json={**sound, **body}).status_code == 200
    assert (template.options["reasoning_effort"], template.options["enable_thinking"]) == told
