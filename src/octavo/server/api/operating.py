"""Routes for operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import JSONResponse, Response

from octavo import __version__
from octavo.server.api.request_types import Version
from octavo.server.endpoints import endpoint

if TYPE_CHECKING:
    from starlette.requests import Request

    from octavo.server.service import Service


@endpoint()
async def health(service: Service, _http_request: Request) -> Response:
    """Return status 200 while the engine can serve requests."""
    service.check_engine()
    return Response()


@endpoint()
async def live(service: Service, _http_request: Request) -> Response:
    """Return status 200 unless this process must be restarted."""
    service.check_alive()
    return Response()


@endpoint()
async def ready(service: Service, _http_request: Request) -> Response:
    """Return status 200 if the server accepts requests."""
    service.check_ready()
    return Response()


@endpoint(answer=str)
async def metrics(service: Service, http_request: Request) -> Response:
    """Return Prometheus metrics."""
    content, content_type = service.metrics.text(http_request.headers.get("accept", ""))
    return Response(content, media_type=content_type)


@endpoint(answer=Version)
async def version(_service: Service, _http_request: Request) -> Response:
    """Return octavo's version."""
    return JSONResponse({"version": __version__})
