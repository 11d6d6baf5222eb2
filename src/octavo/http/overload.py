"""Refuses requests early."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.errors import OctavoError
from octavo.http.errors import to_http

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Receive, Scope, Send

    from octavo.http.routes import Routes
    from octavo.http.tenants import Tenant


class OverloadMiddleware:
    """Checks a tenant's limits before a request's body is read."""

    def __init__(self, app: ASGIApp, begin: Callable[[Tenant], None], routes: Routes) -> None:
        self.app = app
        self._begin, self._routes = begin, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        if is_post and (route := self._routes.find(scope["path"])) is not None:
            try:
                self._begin(scope["state"]["tenant"])
            except OctavoError as error:
                await route.api.response(to_http(error))(scope, receive, send)
                return
        await self.app(scope, receive, send)
