"""Checks of Host and Origin.

Any web page can make a browser send a POST to a local server. So the header Origin must be allowed. Also, a page's host
name can resolve to 127.0.0.1 (DNS rebinding). So on loopback, the header Host must be allowed, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from octavo.http.apis import OPENAI
from octavo.http.auth import OPEN_PATHS
from octavo.http.errors import HttpError

if TYPE_CHECKING:
    from collections.abc import Collection

    from starlette.types import ASGIApp, Receive, Scope, Send


class OriginMiddleware:
    """Answers 403 for an unknown Origin, 421 for an unknown Host, 400 for a missing or repeated Host.

    Health checks may use any Host.

    hosts: Allowed names without ports, or None for any.
    origins: Allowed origins, in addition to the server's own. "*" allows any.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None, origins: Collection[str]) -> None:
        self.app = app
        self._hosts, self._origins = hosts, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        error = self._error(scope) if scope["type"] == "http" else None
        app = self.app if error is None else OPENAI.response(error)
        await app(scope, receive, send)

    def _error(self, scope: Scope) -> HttpError | None:
        hosts, origins = _values(scope, b"host"), _values(scope, b"origin")
        if len(hosts) > 1 or (not hosts and scope["http_version"] == "1.1"):  # RFC 9112, section 3.2
            return HttpError(400, f"a request must have one Host header, but this one has {len(hosts)}")
        host = hosts[0] if hosts else ""
        if self._hosts is not None and scope["path"] not in OPEN_PATHS and _name(host) not in self._hosts:
            return HttpError(421, "this Host is not allowed; the option --allowed-host NAME allows one")
        own_origins = {f"http://{host}", f"https://{host}"} if host else set()
        if "*" not in self._origins and not own_origins.union(self._origins).issuperset(origins):
            return HttpError(403, "pages of this Origin are not allowed; the option --allowed-origin URL allows one")
        return None


def _values(scope: Scope, wanted: bytes) -> list[str]:
    return [value.decode("latin-1").lower() for name, value in scope["headers"] if name == wanted]


def _name(host: str) -> str | None:
    if set(host) & set("/\\@?#, \t"):
        return None
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
