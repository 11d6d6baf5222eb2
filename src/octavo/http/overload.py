"""Each request is counted as its headers come, and who cannot be let in hears so before its body is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.errors import OctavoError
from octavo.http.errors import to_http

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

    from octavo.http.errors import HttpError
    from octavo.http.tenants import Tenant


class OverloadMiddleware:
    """Counts requests, also those whose bodies never come, and refuses those that would not even get one place.

    That costs a fraction of a route, which asks again, for as many places as the request has streams.
    begin: counts a request of a tenant, or raises why it cannot be taken. refusals: the paths whose requests take a
    place (`octavo.http.limiter.Permit`), and how each spells a refusal.
    """

    def __init__(
        self, app: ASGIApp, begin: Callable[[Tenant], None], refusals: Mapping[str, Callable[[HttpError], Response]]
    ) -> None:
        self.app = app
        self._begin, self._refusals = begin, refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may have room."""
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._refusals:
            try:
                self._begin(scope["state"]["tenant"])
            except OctavoError as error:
                await self._refusals[scope["path"]](to_http(error))(scope, receive, send)
                return
        await self.app(scope, receive, send)
