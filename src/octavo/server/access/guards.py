"""What stands before all routes of an application, in one order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.middleware.cors import CORSMiddleware

from octavo.server.access.audit import AuditMiddleware
from octavo.server.access.auth import ApiKeyMiddleware
from octavo.server.access.connection import PacedAnswers
from octavo.server.access.origins import OriginMiddleware
from octavo.server.access.overload import OverloadMiddleware

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.applications import Starlette
    from starlette.responses import Response

    from octavo.config import AccessConfig
    from octavo.server.access.audit import AnswerCounts, Spans
    from octavo.server.access.tenants import Keyring, Tenant
    from octavo.server.errors import HttpError


def add_guards(
    app: Starlette,
    config: AccessConfig,
    *,
    begin: Callable[[Tenant], None],
    refusals: Mapping[str, Callable[[HttpError], Response]],
    keyring: Callable[[], Keyring | None],
    counts: AnswerCounts,
    tracing: Spans | None = None,
) -> None:
    """Add all that a request passes on its way to a route; for what each is given, see its class."""
    # The last one is the outermost.
    app.add_middleware(OverloadMiddleware, begin=begin, refusals=refusals)
    app.add_middleware(ApiKeyMiddleware, keyring=keyring)
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
    app.add_middleware(AuditMiddleware, metrics=counts, tracing=tracing)
