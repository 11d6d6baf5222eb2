"""The page /router."""

from __future__ import annotations

from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from octavo.http.auth import check_operator
from octavo.http.page_headers import PAGE_HEADERS

if TYPE_CHECKING:
    from starlette.requests import Request

    from octavo.router.engines import EngineHandle
    from octavo.router.service import RouterService

_FILES = {
    "/router": ("index.html", "text/html"),
    "/router/main.js": ("main.js", "text/javascript"),
    "/router/style.css": ("style.css", "text/css"),
}


def page_routes(service: RouterService) -> list[Route]:
    """Return the page's routes. Its data need the permission `read_metrics`."""
    static = files(__package__) / "static"
    pages = [
        Route(path, partial(_file, static.joinpath(name).read_bytes(), kind)) for path, (name, kind) in _FILES.items()
    ]
    return [*pages, Route("/router/engines", partial(_engines, service))]


async def _file(content: bytes, kind: str, _request: Request) -> Response:
    return Response(content, media_type=kind, headers=PAGE_HEADERS)


async def _engines(service: RouterService, request: Request) -> Response:
    check_operator(request.state.tenant, "see the engines' figures; it needs read_metrics")
    engines = sorted(service.pool.engines.values(), key=lambda engine: engine.number)
    state = {"policy": service.config.policy, "engines": [_engine_row(engine) for engine in engines]}
    return JSONResponse(state, headers={"Cache-Control": "no-store"})


def _engine_row(engine: EngineHandle) -> dict[str, Any]:
    return {
        "url": engine.url,
        "role": engine.role,
        "ready": engine.is_ready,
        "models": None if engine.models is None else sorted(engine.models),
        "open_requests": len(engine.routed_requests),
        "open_tokens": engine.open_tokens,
        "other_tokens": engine.other_tokens,
        "requests": engine.num_requests,
        "prompt_tokens": engine.num_prompt_tokens,
        "cached_tokens": engine.num_cached_tokens,
        "paired_requests": engine.num_paired,
        "paired_in_vain": engine.num_paired_in_vain,
        "prefills": engine.num_prefills,
        "failed_prefills": engine.num_failed_prefills,
        "failures": engine.num_failures,
        "restarts": engine.num_restarts,
    }
