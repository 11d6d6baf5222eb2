"""The API key: asked for on every route but the health checks, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

from octavo.server.errors import AuthenticationError, to_http

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = frozenset({"/health", "/ready"})


class ApiKeyMiddleware:
    """Outermost of all: a request without the key reaches no route, known or unknown."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app = app
        self._digest = _digest(api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what is allowed, answer 401 to the rest."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._is_allowed(scope):
            error = AuthenticationError("a valid API key is needed: send the header 'Authorization: Bearer KEY'")
            await to_http(error).response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(sent) != 1:
            return False
        scheme, _, key = sent[0].partition(b" ")
        # Digests have one length, so that the comparison tells nothing about the key's.
        return bool(scheme.lower() == b"bearer") & hmac.compare_digest(_digest(key.strip()), self._digest)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
