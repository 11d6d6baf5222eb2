"""Refuses requests to a full server before their bodies are read.

Each POST to a route of the model is counted when its headers arrive.
"""

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
    """Counts requests, also those whose bodies never come, and refuses those that would not even get one place.

    That costs a fraction of a route, which asks again, for as many places as the request has streams.
    begin: counts a request of a tenant, or raises why it cannot be taken. routes: those that `Routes.find` finds take a
    place (`octavo.http.limiter.Permit`), and their APIs spell a refusal.
    """

    def __init__(self, app: ASGIApp, begin: Callable[[Tenant], None], routes: Routes) -> None:
        self.app = app
        self._begin, self._routes = begin, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may have room."""
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        if is_post and (route := self._routes.find(scope["path"])) is not None:
            try:
                self._begin(scope["state"]["tenant"])
            except OctavoError as error:
                await route.api.response(to_http(error))(scope, receive, send)
                return
        await self.app(scope, receive, send)
