"""Which names the server answers to, and which pages may use it from a browser.

A page of any origin can make a browser send a POST to a server on the same machine, and a name of its own choice can be
made to mean 127.0.0.1 (DNS rebinding): so a browser's Origin must be known, and so must, on loopback, the Host. Probes
ask for a server's health by its address: that is told under any Host.
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
    """Answers 403 to a page of an unknown origin, 421 under a name that is not the server's, and 400 under none or two.

    hosts: the names to answer to, without ports; None for any. origins: those that may ask, like "https://example.org",
    beside the server's own; "*" for any.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None, origins: Collection[str]) -> None:
        self.app = app
        self._hosts, self._origins = hosts, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what is allowed."""
        error = self._error(scope) if scope["type"] == "http" else None
        app = self.app if error is None else OPENAI.response(error)
        await app(scope, receive, send)

    def _error(self, scope: Scope) -> HttpError | None:
        hosts, origins = _values(scope, b"host"), _values(scope, b"origin")
        if len(hosts) > 1 or (not hosts and scope["http_version"] == "1.1"):  # RFC 9112, section 3.2
            return HttpError(400, f"a request has one header Host, and this one has {len(hosts)}")
        host = hosts[0] if hosts else ""
        if self._hosts is not None and scope["path"] not in OPEN_PATHS and _name(host) not in self._hosts:
            return HttpError(421, "this server does not answer to this Host; --allowed-host NAME adds one")
        own = {f"http://{host}", f"https://{host}"} if host else set()
        if "*" not in self._origins and not own.union(self._origins).issuperset(origins):
            return HttpError(403, "this server does not answer pages of this Origin; --allowed-origin URL adds one")
        return None


def _values(scope: Scope, wanted: bytes) -> list[str]:
    return [value.decode("latin-1").lower() for name, value in scope["headers"] if name == wanted]


def _name(host: str) -> str | None:
    """Return the name without its port; None where anything in it could be read as more than these two."""
    if set(host) & set("/\\@?#, \t"):
        return None
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
