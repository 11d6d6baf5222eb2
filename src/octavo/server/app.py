"""The routes, joined to one engine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, FastAPI
from fastapi.responses import JSONResponse
from starlette.requests import Request  # noqa: TC002 - fastapi reads the types of a route
from starlette.responses import Response

from octavo import __version__
from octavo.server.auth import ApiKeyMiddleware
from octavo.server.body import body_of
from octavo.server.chat import create_chat_completion
from octavo.server.completions import create_completion
from octavo.server.errors import add_error_handlers
from octavo.server.openai_requests import ChatCompletionRequest, CompletionRequest

if TYPE_CHECKING:
    from octavo.server.service import Service

DEFAULT_MAX_BODY_BYTES = 32 * 1024 * 1024

ChatBody = Annotated[ChatCompletionRequest, Depends(body_of(ChatCompletionRequest))]
CompletionBody = Annotated[CompletionRequest, Depends(body_of(CompletionRequest))]


def create_app(
    service: Service, *, api_key: str | None = None, max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
) -> FastAPI:
    """Make the ASGI application. With an API key every route but /health and /ready asks for it."""
    app = FastAPI(title="octavo", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.max_body_bytes = max_body_bytes
    add_error_handlers(app)
    _add_routes(app, service)
    if api_key is not None:
        app.add_middleware(ApiKeyMiddleware, api_key=api_key)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    started = int(time.time())

    def card(name: str) -> dict[str, Any]:
        length = service.model_info.max_model_len
        fields = {"id": name, "object": "model", "created": started, "owned_by": "octavo"}
        return {**fields, "root": name, "parent": None, "max_model_len": length, "permission": []}

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        return await create_chat_completion(service, request, body)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionBody) -> Response:
        return await create_completion(service, request, body)

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [card(name) for name in service.model_names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        return JSONResponse(card(service.check_model(name)))

    @app.get("/health")
    async def health() -> Response:
        service.check_alive()
        return Response()

    @app.get("/ready")
    async def ready() -> Response:
        service.check_ready()
        return Response()

    @app.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": __version__})
