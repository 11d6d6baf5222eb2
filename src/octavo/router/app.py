"""The router's routes."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from octavo.http.auth import check_operator
from octavo.http.errors import NoEngineError
from octavo.http.graceful import GracefulServer, http_server
from octavo.http.guards import add_guards
from octavo.http.listening import MAX_CONNECTIONS
from octavo.http.routes import METRICS, ROUTES, Routes
from octavo.router.page import page_routes
from octavo.router.proxy import Proxy
from octavo.router.upstream import FAILURES

if TYPE_CHECKING:
    from starlette.requests import Request

    from octavo.router.engines import EngineHandle
    from octavo.router.service import RouterService


class _ModelList(msgspec.Struct):
    data: list[dict[str, Any]] = []
    models: list[dict[str, Any]] = []


def create_app(service: RouterService, routes: Routes = ROUTES) -> Starlette:
    """Make the application."""
    local_routes = [
        Route("/health", partial(_health, service)),
        Route("/live", _live),
        Route("/ready", partial(_ready, service)),
        Route("/metrics", partial(_metrics, service)),
        Route("/v1/models", partial(_models, service, "data", "id", {"object": "list"})),
        Route("/api/tags", partial(_models, service, "models", "name", {})),
        Route("/api/ps", partial(_models, service, "models", "name", {})),
        *page_routes(service),
    ]
    proxy = Proxy(service, [route.path for route in local_routes], routes)
    app = Starlette(routes=[*local_routes, Route("/{path:path}", proxy)])
    add_guards(app, service, routes)
    return app


def make_router(service: RouterService, *, max_connections: int = MAX_CONNECTIONS) -> GracefulServer:
    """See `http_server`."""
    return http_server(create_app(service), service, max_connections=max_connections)


async def _health(service: RouterService, _request: Request) -> Response:
    service.check_engine()
    return Response()


async def _live(_request: Request) -> Response:
    return Response()


async def _ready(service: RouterService, _request: Request) -> Response:
    service.check_ready()
    return Response()


async def _metrics(service: RouterService, request: Request) -> Response:
    check_operator(request.state.tenant, METRICS)
    content, content_type = service.metrics.text(request.headers.get("accept", ""))
    return Response(content, media_type=content_type)


async def _models(service: RouterService, field: str, key: str, more: dict[str, str], request: Request) -> Response:
    service.check_ready()
    ready = service.pool.ready()
    answers = await asyncio.gather(*(_models_of(service, engine, request) for engine in ready))
    given = [answer for answer in answers if answer is not None]
    card_lists = [_cards(text, field, key) for status, text in given if status == 200]
    if not given:
        raise NoEngineError(service.config.health_interval_s)
    if not card_lists:
        status, refusal = given[0]
        return Response(refusal, status, media_type="application/json")
    cards: dict[str, Any] = {}
    for card in itertools.chain.from_iterable(card_lists):
        cards.setdefault(card[key], card)
    return JSONResponse({**more, field: list(cards.values())})


def _cards(text: bytes, field: str, key: str) -> list[dict[str, Any]]:
    try:
        card_lists = getattr(msgspec.json.decode(text, type=_ModelList), field)
    except msgspec.MsgspecError:
        return []
    return [card for card in card_lists if isinstance(card.get(key), str)]


async def _models_of(service: RouterService, engine: EngineHandle, request: Request) -> tuple[int, bytes] | None:
    try:
        async with asyncio.timeout(service.config.health_timeout_s):
            async with await service.upstream.ask(engine, request.scope, b"", "") as answer:
                return answer.status, await answer.read()
    except FAILURES:
        service.suspect(engine)
        return None
