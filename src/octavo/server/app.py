"""The routes, joined to one engine."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, FastAPI
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.requests import Request  # noqa: TC002 - fastapi reads the types of a route
from starlette.responses import Response

from octavo import __version__
from octavo.http.errors import NotAllowedError, add_error_handlers
from octavo.http.guards import add_guards
from octavo.http.routes import REFUSALS
from octavo.server.answers.jobs import json_response
from octavo.server.api import describing, tgi
from octavo.server.api.anthropic import messages
from octavo.server.api.ollama import answers as ollama
from octavo.server.api.ollama import embeddings as ollama_embeddings
from octavo.server.api.ollama import models as ollama_models
from octavo.server.api.ollama import requests as ollama_requests
from octavo.server.api.openai.chat import create_chat_completion
from octavo.server.api.openai.completions import create_completion
from octavo.server.api.openai.embeddings import EmbeddingRequest, create_embeddings
from octavo.server.api.openai.requests import ChatCompletionRequest, CompletionRequest
from octavo.server.api.openai.responses import ResponsesRequest, count_input_tokens, create_response
from octavo.server.api.openapi import describe
from octavo.server.api.tokenizing import DetokenizeRequest, TokenizeRequest, detokenize, tokenize
from octavo.server.bodies import body_of
from octavo.server.telemetry.dashboard.routes import add_dashboard

if TYPE_CHECKING:
    from octavo.server.service import Service

ChatBody = Annotated[ChatCompletionRequest, Depends(body_of(ChatCompletionRequest))]
TokenizeBody = Annotated[TokenizeRequest, Depends(body_of(TokenizeRequest, is_count=True))]
ResponsesBody = Annotated[ResponsesRequest, Depends(body_of(ResponsesRequest))]
InputTokensBody = Annotated[ResponsesRequest, Depends(body_of(ResponsesRequest, is_count=True))]
EmbeddingBody = Annotated[EmbeddingRequest, Depends(body_of(EmbeddingRequest))]
MessagesBody = Annotated[messages.MessagesRequest, Depends(body_of(messages.MessagesRequest))]
CountTokensBody = Annotated[messages.CountTokensRequest, Depends(body_of(messages.CountTokensRequest, is_count=True))]
TgiBody = Annotated[tgi.GenerateRequest, Depends(tgi.read_body)]
_ollama_body = partial(body_of, any_type=True)  # as `curl -d` sends it
OllamaChatBody = Annotated[ollama_requests.ChatRequest, Depends(_ollama_body(ollama_requests.ChatRequest))]
OllamaPromptBody = Annotated[ollama_requests.PromptRequest, Depends(_ollama_body(ollama_requests.PromptRequest))]
OllamaEmbedBody = Annotated[ollama_requests.EmbedRequest, Depends(_ollama_body(ollama_requests.EmbedRequest))]
OllamaVectorBody = Annotated[
    ollama_requests.EmbeddingsRequest, Depends(_ollama_body(ollama_requests.EmbeddingsRequest))
]
OllamaShowBody = Annotated[
    ollama_requests.ShowRequest, Depends(_ollama_body(ollama_requests.ShowRequest, is_count=True))
]
DetokenizeBody = Annotated[DetokenizeRequest, Depends(body_of(DetokenizeRequest, is_count=True))]
CompletionBody = Annotated[CompletionRequest, Depends(body_of(CompletionRequest))]


def create_app(service: Service) -> FastAPI:
    """Make the ASGI application. Where keys are asked for, every route but /health and /ready asks for one."""
    config = service.config
    app = FastAPI(title="octavo", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.config = config
    app.state.limiter = service.limiter
    app.state.timeouts = service.timeouts
    app.state.text = service.engine.text
    app.state.role = service.engine.capacity.role
    add_error_handlers(app)
    _add_routes(app, service)
    _add_model_routes(app, service)
    _add_tgi_routes(app, service)
    _add_ollama_routes(app, service)
    _add_operator_routes(app, service)
    if config.dashboard:
        add_dashboard(app, service)
    add_guards(app, service, REFUSALS)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        return await create_chat_completion(service, request, body)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionBody) -> Response:
        return await create_completion(service, request, body)

    @app.post("/v1/responses")
    async def responses(request: Request, body: ResponsesBody) -> Response:
        return await create_response(service, request, body)

    @app.post("/v1/responses/input_tokens")
    async def input_tokens(request: Request, body: InputTokensBody) -> Response:
        return await count_input_tokens(service, request, body)

    @app.post("/v1/embeddings")
    async def embeddings(request: Request, body: EmbeddingBody) -> Response:
        return await create_embeddings(service, request, body)

    @app.post("/v1/messages")
    async def create_message(request: Request, body: MessagesBody) -> Response:
        return await messages.create_message(service, request, body)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request, body: CountTokensBody) -> Response:
        return await messages.count_tokens(service, request, body)

    @app.post("/tokenize")
    async def tokenize_text(request: Request, body: TokenizeBody) -> Response:
        return await tokenize(service, request, body)

    @app.post("/detokenize")
    async def detokenize_ids(request: Request, body: DetokenizeBody) -> Response:
        return await detokenize(service, request, body)


def _add_model_routes(app: FastAPI, service: Service) -> None:
    started = int(time.time())

    def card(name: str) -> dict[str, Any]:
        length = service.model_info.max_model_len
        fields = {"id": name, "object": "model", "created": started, "owned_by": "octavo"}
        return {**fields, "root": name, "parent": None, "max_model_len": length, "permission": []}

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [card(name) for name in service.model_names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        return JSONResponse(card(service.check_model(name, aliases=())))


def _add_tgi_routes(app: FastAPI, service: Service) -> None:
    @app.post("/generate")
    async def generate(request: Request, body: TgiBody) -> Response:
        return await tgi.generate(service, request, body, stream=False)

    @app.post("/generate_stream")
    async def generate_stream(request: Request, body: TgiBody) -> Response:
        return await tgi.generate(service, request, body, stream=True)

    @app.post("/")
    async def either(request: Request, body: TgiBody) -> Response:
        return await tgi.generate(service, request, body, stream=bool(body.stream), in_list=True)

    @app.get("/", include_in_schema=False)
    @app.head("/", include_in_schema=False)  # as Ollama's clients look whether it is there
    async def front_page() -> HTMLResponse:
        return HTMLResponse(describing.front_page(service), headers=describing.PAGE_HEADERS)

    @app.get("/info")
    async def info() -> JSONResponse:
        return JSONResponse(tgi.info(service))


def _add_ollama_routes(app: FastAPI, service: Service) -> None:
    started = datetime.now(UTC)

    @app.post("/api/chat")
    async def chat(request: Request, body: OllamaChatBody) -> Response:
        return await ollama.chat(service, request, body)

    @app.post("/api/generate")
    async def continue_prompt(request: Request, body: OllamaPromptBody) -> Response:
        return await ollama.generate(service, request, body)

    @app.post("/api/embed")
    async def embed(request: Request, body: OllamaEmbedBody) -> Response:
        return await ollama_embeddings.embed(service, request, body)

    @app.post("/api/embeddings")
    async def embed_one(request: Request, body: OllamaVectorBody) -> Response:
        return await ollama_embeddings.embed_one(service, request, body)

    @app.post("/api/show")
    async def show(body: OllamaShowBody) -> Response:
        return json_response(ollama_models.show(service, body, started))

    @app.get("/api/tags")
    @app.head("/api/tags", include_in_schema=False)
    async def tags() -> Response:
        return json_response(ollama_models.tags(service, started))

    @app.get("/api/ps")
    async def loaded() -> Response:
        return json_response(ollama_models.loaded(service))

    @app.get("/api/version")
    @app.head("/api/version", include_in_schema=False)
    async def ollama_version() -> Response:
        return json_response(ollama_models.version())

    for path, method in ollama_models.REFUSED.items():
        app.add_api_route(path, ollama_models.refuse, methods=[method], include_in_schema=False)


def _add_operator_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    @app.head("/health", include_in_schema=False)  # as `wget --spider` and some balancers ask
    async def health() -> Response:
        service.check_alive()
        return Response()

    @app.get("/ready")
    @app.head("/ready", include_in_schema=False)
    async def ready() -> Response:
        service.check_ready()
        return Response()

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> JSONResponse:
        return JSONResponse(describing.model_info(service))

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info(request: Request) -> JSONResponse:
        if not request.state.tenant.read_metrics:
            raise NotAllowedError("this key may not read the server's settings: that takes read_metrics")
        return JSONResponse(describing.server_info(service))

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        if not request.state.tenant.read_metrics:
            raise NotAllowedError("this key may not read the metrics, which tell of all keys")
        content, content_type = service.metrics.text(request.headers.get("accept", ""))
        return Response(content, media_type=content_type)

    @app.get("/openapi.json")
    async def openapi() -> JSONResponse:
        return JSONResponse(describe(service))

    @app.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": __version__})
