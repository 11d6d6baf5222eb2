"""The dashboard's routes: the page, its feed, and the explanation of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import Request  # noqa: TC002 - fastapi reads the types of a route
from starlette.responses import Response

from octavo.http.errors import NotAllowedError, NotFoundError
from octavo.http.page_headers import PAGE_HEADERS
from octavo.server.telemetry.dashboard.feed import Dashboard, read_static

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import Receive, Scope, Send

    from octavo.http.tenants import Tenant
    from octavo.server.service import Service


class _Frames(StreamingResponse):
    """However it ends, its watcher is gone then. Raises `QueueFullError` where there is no place for one."""

    def __init__(self, dashboard: Dashboard, tenant: Tenant) -> None:
        dashboard.enter()
        frames = dashboard.frames(tenant)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Content-Type-Options": "nosniff"}
        super().__init__(frames, media_type="text/event-stream", headers=headers)
        self._dashboard, self._frames = dashboard, frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send frames until either side leaves."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._frames.aclose()
            self._dashboard.leave()


def add_dashboard(app: FastAPI, service: Service) -> None:
    """Add the page. It tells of the requests of all keys, so it asks for one that may read the metrics."""
    dashboard = Dashboard(service)
    files = read_static()

    def check_allowed(request: Request) -> None:
        if not request.state.tenant.read_metrics:
            raise NotAllowedError("this key may not see the dashboard, which tells of all keys")

    def page(name: str) -> Response:
        if name not in files:
            raise NotFoundError("the dashboard has no such file")
        content, media_type = files[name]
        return Response(content, media_type=media_type, headers=PAGE_HEADERS)

    @app.get("/dashboard", include_in_schema=False)
    async def index() -> Response:
        return page("index.html")

    @app.get("/dashboard/events", include_in_schema=False)
    async def frames(request: Request) -> Response:
        check_allowed(request)
        return _Frames(dashboard, request.state.tenant)

    @app.get("/dashboard/requests/{request_id:path}", include_in_schema=False)
    async def explain(request: Request, request_id: str) -> Response:
        check_allowed(request)
        return JSONResponse(await dashboard.explain(request_id))

    @app.get("/dashboard/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        return page(name)
