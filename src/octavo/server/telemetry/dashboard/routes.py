"""The dashboard's routes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import JSONResponse, Response, StreamingResponse

from octavo.http.auth import check_operator
from octavo.http.errors import NotFoundError
from octavo.http.page_headers import PAGE_HEADERS
from octavo.http.routes import DASHBOARD
from octavo.server.telemetry.dashboard.feed import Dashboard, read_static

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from octavo.http.tenants import Tenant
    from octavo.server.endpoints import Handler
    from octavo.server.service import Service


class _Frames(StreamingResponse):
    def __init__(self, dashboard: Dashboard, tenant: Tenant) -> None:
        dashboard.enter()
        frames = dashboard.frames(tenant)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Content-Type-Options": "nosniff"}
        super().__init__(frames, media_type="text/event-stream", headers=headers)
        self._dashboard, self._frames = dashboard, frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._frames.aclose()
            self._dashboard.exit()


def dashboard_routes(service: Service) -> dict[str, Handler]:
    """Return GET handlers by path.

    The page shows requests of all API keys, so a viewer's key needs `read_metrics`.
    """
    dashboard = Dashboard(service)
    files = read_static()

    async def page(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            raise NotFoundError("the dashboard has no such file")
        content, media_type = files[name]
        return Response(content, media_type=media_type, headers=PAGE_HEADERS)

    async def frames(request: Request) -> Response:
        check_operator(request.state.tenant, DASHBOARD)
        return _Frames(dashboard, request.state.tenant)

    async def explain(request: Request) -> Response:
        check_operator(request.state.tenant, DASHBOARD)
        return JSONResponse(await dashboard.explain(request.path_params["request_id"]))

    return {
        "/dashboard": page,
        "/dashboard/events": frames,
        "/dashboard/requests/{request_id:path}": explain,
        "/dashboard/{name}": page,
    }
