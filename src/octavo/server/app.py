"""The ASGI application."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.routing import Match
from starlette.routing import Route as AppRoute

from octavo.http.auth import check_operator
from octavo.http.guards import add_guards
from octavo.http.routes import ROUTES
from octavo.server.bodies import read_body
from octavo.server.endpoints import find_endpoint
from octavo.server.telemetry.dashboard.routes import dashboard_routes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Scope

    from octavo.http.routes import Route, Routes
    from octavo.server.endpoints import Endpoint
    from octavo.server.service import Service


def create_app(service: Service, routes: Routes = ROUTES) -> Starlette:
    """Return the ASGI application.

    If API keys are configured, every route except /health, /live and /ready requires a key.

    Raises `ImportError` or `AttributeError` if a route has no endpoint.
    """
    table = [
        _AppRoute(path, partial(_serve, service, route, find_endpoint(route)), route.methods, route.is_described)
        for route in routes
        for path in route.paths
    ]
    pages = dashboard_routes(service) if service.config.dashboard else {}
    app = Starlette(routes=[*table, *(_AppRoute(path, serve, ("GET",), False) for path, serve in pages.items())])
    app.state.service, app.state.routes, app.state.started = service, routes, datetime.now(UTC)
    add_guards(app, service, routes)
    return app


class _AppRoute(AppRoute):
    """A route that serves only its declared methods. Starlette's own class would add HEAD to GET."""

    def __init__(self, path: str, serve: Callable[..., object], methods: Sequence[str], is_described: bool) -> None:
        super().__init__(path, serve, include_in_schema=is_described)
        self.methods = set(methods)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return match, {**child, "route": self} if match is not Match.NONE else child


async def _serve(service: Service, route: Route, endpoint: Endpoint, request: Request) -> Response:
    if route.operators:
        check_operator(request.state.tenant, route.operators)
    if endpoint.body is None:
        return await endpoint.handler(service, request)
    request.state.format_error = route.api.response
    body = await read_body(request, endpoint.body, is_count=route.work == "count", any_type=route.api.any_type)
    return await endpoint.handler(service, request, body)
