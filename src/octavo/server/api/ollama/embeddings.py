"""Ollama's embedding routes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.engine.embedding import embedding
from octavo.server.answers.jobs import json_response
from octavo.server.api.ollama.answers import durations
from octavo.server.api.ollama.replies import Vector, Vectors
from octavo.server.api.ollama.requests import EmbeddingsRequest, EmbedRequest
from octavo.server.api.openai.completions import read_prompts
from octavo.server.api.openai.embeddings import MAX_INPUTS, embed_prompts
from octavo.server.api.truncation import WHOLE, Truncation
from octavo.server.bodies import look_at
from octavo.server.endpoints import endpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msgspec import Struct
    from starlette.requests import Request
    from starlette.responses import Response

    from octavo.outputs import RequestOutput
    from octavo.server.answers.jobs import Job
    from octavo.server.answers.usage import Usage
    from octavo.server.service import Service


@endpoint(body=EmbedRequest, answer=Vectors)
async def embed(service: Service, http_request: Request, request: EmbedRequest) -> Response:
    """Compute text embeddings."""
    model = request.settle(service)
    if request.input in (None, "", []):
        return _none(service, Vectors(request.model, []))
    prompts = await look_at(http_request, lambda: read_prompts(request.input, "input", MAX_INPUTS))
    beginning = Truncation(service.model_info.max_model_len, from_left=False)
    return await embed_prompts(
        service,
        http_request,
        prompts,
        partial(EmbedReply, request),
        truncation=WHOLE if request.truncate is False else beginning,
        dimensions=request.dimensions or None,
        model=model,
        client_names={"prompt": "input"},
    )


@endpoint(body=EmbeddingsRequest, answer=Vector)
async def embed_one(service: Service, http_request: Request, request: EmbeddingsRequest) -> Response:
    """Compute an embedding."""
    model = request.settle(service)
    if not request.prompt:
        return _none(service, Vector([]))
    return await embed_prompts(service, http_request, [request.prompt], lambda _: EmbeddingReply(), model=model)


def _none(service: Service, reply: Struct) -> Response:
    service.check_ready()
    return json_response(reply)


class EmbedReply:
    """Formats /api/embed answers."""

    def __init__(self, request: EmbedRequest, _job: Job) -> None:
        self._request = request

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Vectors:
        """Return all vectors."""
        vectors: list[Any] = [
            embedding(each, num_dimensions=self._request.dimensions or None).tolist() for each in outputs
        ]
        total, _, _ = durations([each.metrics for each in outputs if each.metrics is not None])
        cached = usage.prompt_tokens_details.cached_tokens
        return Vectors(self._request.model, vectors, total, 0, usage.prompt_tokens, cached, usage.receipt)


class EmbeddingReply:
    """Formats /api/embeddings answers."""

    def whole(self, outputs: Sequence[RequestOutput], _usage: Usage) -> Vector:
        """Return the vector."""
        (output,) = outputs
        return Vector(embedding(output).tolist())
