"""Middlewares, error handlers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from octavo.errors import OctavoError, RequestFailedError
from octavo.http.apis import error_response
from octavo.http.audit import AuditMiddleware
from octavo.http.auth import ApiKeyMiddleware
from octavo.http.connection import PacedAnswers
from octavo.http.errors import CLIENT_DISCONNECTED, HttpError, to_http
from octavo.http.origins import OriginMiddleware
from octavo.http.overload import OverloadMiddleware

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.applications import Starlette
    from starlette.requests import Request

    from octavo.http.routes import Routes
    from octavo.http.service import HttpService

logger = logging.getLogger(__name__)


def add_guards(app: Starlette, service: HttpService, routes: Routes) -> None:
    """Add middlewares and error handlers."""
    _add_error_handlers(app)
    config = service.config
    # The middleware added last is outermost.
    app.add_middleware(OverloadMiddleware, begin=service.begin, routes=routes)
    app.add_middleware(ApiKeyMiddleware, keyring=lambda: service.keyring)
    app.add_middleware(OriginMiddleware, hosts=config.allowed_hosts, origins=config.allowed_origins)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(PacedAnswers)
    app.add_middleware(AuditMiddleware, metrics=service.metrics, tracing=service.tracing)


def _add_error_handlers(app: Starlette) -> None:
    async def octavo_error(request: Request, error: Exception) -> Response:
        http_error = to_http(error)
        if http_error.status == 500 and not isinstance(error, RequestFailedError):  # logged already
            logger.error("a request failed: %s", error, exc_info=error)
        format_error: Callable[[HttpError], Response] | None = getattr(request.state, "format_error", None)
        return error_response(http_error, request.url.path) if format_error is None else format_error(http_error)

    async def routing_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        where = f"{request.method} {request.url.path}"
        messages = {404: f"there is no such route: {where}", 405: f"this route does not support the method: {where}"}
        message = messages.get(error.status_code, str(error.detail))
        response = error_response(HttpError(error.status_code, message), request.url.path)
        response.headers.update(error.headers or {})
        return response

    async def client_disconnected(request: Request, _: Exception) -> Response:
        noted_error: HttpError | None = getattr(request.state, "error", None)
        return Response(status_code=CLIENT_DISCONNECTED if noted_error is None else noted_error.status)

    async def internal_error(request: Request, error: Exception) -> Response:
        return error_response(to_http(error), request.url.path)

    app.add_exception_handler(OctavoError, octavo_error)
    app.add_exception_handler(HTTPException, routing_error)
    app.add_exception_handler(ClientDisconnect, client_disconnected)
    app.add_exception_handler(Exception, internal_error)
