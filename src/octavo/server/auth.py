"""Who asks: the API key, asked for on every route but the health checks, and the tenant that it stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.server.errors import AuthenticationError, to_http
from octavo.server.tenants import EVERYBODY

if TYPE_CHECKING:
    from collections.abc import Iterable

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


def _key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the one key that is sent, as OpenAI's clients send it or as Anthropic's do; both may say the same."""
    keys: dict[bytes, bytes | None] = {}
    for name, value in headers:
        if name in {b"authorization", b"x-api-key"}:
            scheme, _, key = value.partition(b" ") if name == b"authorization" else (b"bearer", b"", value)
            keys[name] = None if name in keys or scheme.lower() != b"bearer" else key.strip()
    return keys.popitem()[1] if len({*keys.values()}) == 1 else None
