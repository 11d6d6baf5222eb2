"""What stands before all routes of an application, in one order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.middleware.cors import CORSMiddleware

from octavo.http.audit import AuditMiddleware
from octavo.http.auth import ApiKeyMiddleware
from octavo.http.connection import PacedAnswers
from octavo.http.origins import OriginMiddleware
from octavo.http.overload import OverloadMiddleware

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.applications import Starlette
    from starlette.responses import Response

    from octavo.http.errors import HttpError
    from octavo.http.service import HttpService


def add_guards(app: Starlette, service: HttpService, refusals: Mapping[str, Callable[[HttpError], Response]]) -> None:
    """Add the middlewares that a request passes on its way to a route. refusals: see `OverloadMiddleware`."""
    config = service.config
    # The last one is the outermost.
    app.add_middleware(OverloadMiddleware, begin=service.begin, refusals=refusals)
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
