"""Ollama's routes that describe models."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from octavo.errors import RequestError
from octavo.http.apis import OLLAMA_TAG
from octavo.http.errors import NotAllowedError
from octavo.server.answers.jobs import json_response
from octavo.server.api.ollama.requests import ShowRequest, served_name
from octavo.server.api.request_types import OllamaModels, Version
from octavo.server.endpoints import endpoint

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from octavo.server.service import Service

API_VERSION = "0.12.11"  # clients require a minimum version
_NEVER = datetime(2318, 1, 1, tzinfo=UTC)  # Ollama's date for "never"
_SUFFIXES = {10**9: "B", 10**6: "M", 10**3: "K"}


@endpoint()
async def refuse(_service: Service, _http_request: Request) -> Response:
    """Raise `NotAllowedError`, because only the operator may change models."""
    raise NotAllowedError("this server cannot change models: it serves the one that it was started with")


@endpoint(answer=Version)
async def version(_service: Service, _http_request: Request) -> Response:
    """Return the implemented version of Ollama's API."""
    return json_response({"version": API_VERSION})


@endpoint(answer=OllamaModels)
async def tags(service: Service, http_request: Request) -> Response:
    """List served models."""
    started = http_request.app.state.started
    return json_response({"models": [{**_card(service, name), "modified_at": started} for name in service.model_names]})


@endpoint(answer=OllamaModels)
async def loaded(service: Service, _http_request: Request) -> Response:
    """List loaded models."""
    memory = {"size_vram": 0, "context_length": service.model_info.max_model_len, "expires_at": _NEVER}
    return json_response({"models": [{**_card(service, name), **memory} for name in service.model_names]})


@endpoint(body=ShowRequest, answer=dict[str, Any])
async def show(service: Service, http_request: Request, request: ShowRequest) -> Response:
    """Describe a model."""
    name = request.model or request.name
    if not name:
        raise RequestError("model is required", parameter="model")
    name, info, style = served_name(service, name), service.model_info, service.answer_style
    family = info.model_type or "unknown"
    able = {
        "completion": info.has_head,
        "embedding": not info.has_head,
        "tools": style.tools is not None,
        "thinking": style.has_reasoning,
    }
    return json_response(
        {
            **dict.fromkeys(("license", "modelfile", "parameters", "template"), ""),
            "details": _details(service),
            "model_info": {
                "general.architecture": family,
                "general.basename": name,
                "general.parameter_count": info.num_parameters,
                f"{family}.context_length": info.max_model_len,
                f"{family}.embedding_length": info.hidden_size,
                f"{family}.vocab_size": info.vocab_size,
                **({} if info.file_type is None else {"general.file_type": info.file_type}),
            },
            "capabilities": [capability for capability, is_there in able.items() if is_there],
            "modified_at": http_request.app.state.started,
        }
    )


def _card(service: Service, name: str) -> dict[str, Any]:
    tagged = name if ":" in name.rpartition("/")[2] else name + OLLAMA_TAG
    digest = hashlib.sha256(name.encode()).hexdigest()
    size = service.model_info.weight_bytes
    return {"name": tagged, "model": tagged, "size": size, "digest": digest, "details": _details(service)}


def _details(service: Service) -> dict[str, Any]:
    family, level = service.model_info.model_type, service.model_info.quantization_level
    return {
        "parent_model": "",
        "format": "gguf" if level else "",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _rounded(service.model_info.num_parameters),
        "quantization_level": level,
    }


def _rounded(number: int) -> str:
    for unit, suffix in _SUFFIXES.items():
        if number >= unit:
            return f"{number / unit:.1f}{suffix}"
    return str(number or "")  # 0 means unknown
