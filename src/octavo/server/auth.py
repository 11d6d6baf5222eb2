"""Who asks: the API key, asked for on every route but the health checks, and the tenant that it stands for."""

from __future__ import annotations

import base64
import binascii
import contextlib
from typing import TYPE_CHECKING

from octavo.server.errors import AuthenticationError, to_http
from octavo.server.tenants import EVERYBODY

if TYPE_CHECKING:
    from collections.abc import Collection

    from starlette.types import ASGIApp, Receive, Scope, Send

    from octavo.server.service import Service
    from octavo.server.tenants import Tenant

OPEN_PATHS = frozenset({"/health", "/ready"})


class ApiKeyMiddleware:
    """Outside of all routes: without a key no route is reached, known or unknown. Sets `request.state.tenant`."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what is allowed, answer 401 to the rest."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        tenant = self._tenant(scope)
        if tenant is None:
            error = AuthenticationError(
                "a valid API key is needed: send the header 'Authorization: Bearer KEY', or 'x-api-key: KEY'"
            )
            await to_http(error).response(scope["path"])(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = tenant
        await self.app(scope, receive, send)

    def _tenant(self, scope: Scope) -> Tenant | None:
        keyring = self._service.keyring
        if keyring is None or scope["path"] in OPEN_PATHS:
            return EVERYBODY
        key = _key(scope["headers"])
        return None if key is None else keyring.find(key)


def _key(headers: Collection[tuple[bytes, bytes]]) -> bytes | None:
    """Return the one key that is sent, as OpenAI's clients send it, as Anthropic's do, or as a browser does.

    Where several headers have a key it must be the same. A browser sends its password with whatever any page makes it
    ask for: it counts only where the browser says that no other site's page asks.
    """
    keys: dict[bytes, bytes | None] = {}
    asks_itself = True
    for name, value in headers:
        if name == b"sec-fetch-site":
            asks_itself = asks_itself and value in {b"same-origin", b"none"}
        elif name in {b"authorization", b"x-api-key"}:
            keys[name] = None if name in keys else _read_key(name, value)
    if any(name == b"authorization" and _scheme(value) == b"basic" for name, value in headers) and not asks_itself:
        return None
    return keys.popitem()[1] if len({*keys.values()}) == 1 else None


def _scheme(value: bytes) -> bytes:
    return value.partition(b" ")[0].lower()


def _read_key(name: bytes, value: bytes) -> bytes | None:
    """Return the key in a header's value; None where there is none."""
    if name == b"x-api-key":
        return value.strip()
    rest = value.partition(b" ")[2].strip()
    match _scheme(value):
        case b"bearer":
            return rest
        case b"basic":  # of any user, with the key as password
            with contextlib.suppress(binascii.Error):
                return base64.b64decode(rest, validate=True).partition(b":")[2] or None
    return None
