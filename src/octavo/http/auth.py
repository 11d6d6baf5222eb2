"""Checks API keys."""

from __future__ import annotations

import base64
import binascii
import contextlib
from typing import TYPE_CHECKING

from octavo.http.apis import error_response
from octavo.http.errors import PAGES, AuthenticationError, NotAllowedError, to_http
from octavo.http.tenants import EVERYBODY

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Receive, Scope, Send

    from octavo.http.tenants import Keyring, Tenant

OPEN_PATHS = frozenset({"/health", "/live", "/ready"})


class ApiKeyMiddleware:
    """Requires an API key, except for health checks. Sets `request.state.tenant`.

    keyring: Returns the current keys, or None if no key is required.
    """

    def __init__(self, app: ASGIApp, keyring: Callable[[], Keyring | None]) -> None:
        self.app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] == "http":
            tenant = self._tenant(scope)
            if tenant is None:
                error = AuthenticationError(
                    "a valid API key is needed: send the header 'Authorization: Bearer KEY', or 'x-api-key: KEY'"
                )
                await error_response(to_http(error), scope["path"])(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self.app(scope, receive, send)

    def _tenant(self, scope: Scope) -> Tenant | None:
        keyring = self._keyring()
        if keyring is None or scope["path"] in OPEN_PATHS:
            return EVERYBODY
        key = _key(scope)
        return None if key is None else keyring.find(key)


def check_operator(tenant: Tenant, action: str) -> None:
    """Raise `NotAllowedError` if the tenant lacks the permission `read_metrics`."""
    if not tenant.read_metrics:
        raise NotAllowedError(f"this key may not {action}")


def _key(scope: Scope) -> bytes | None:
    """Return the request's key, or None for no key or different keys.

    Browsers add a saved password even to requests of other sites' pages. So a password is accepted only from the
    server's own pages.
    """
    keys: dict[bytes, bytes | None] = {}
    is_password = False
    for name, value in scope["headers"]:
        if name in {b"authorization", b"x-api-key"}:
            keys[name] = None if name in keys else _read_key(name, value)
            is_password = is_password or (name == b"authorization" and _scheme(value) == b"basic")
    if is_password and not _is_same_origin(scope):
        return None
    return keys.popitem()[1] if len({*keys.values()}) == 1 else None


def _is_same_origin(scope: Scope) -> bool:
    """Return True if the user or the server's own pages made the request, or if it opens one of `PAGES`.

    Browsers send `Sec-Fetch-Site` only over TLS and on loopback. Without this header, Origin must not name
    another site.
    """
    said: dict[bytes, bytes] = dict(scope["headers"])
    site = said.get(b"sec-fetch-site")
    if site is None:
        own_origins = {scheme + said.get(b"host", b"") for scheme in (b"http://", b"https://")}
        return said.get(b"origin") in {None, *own_origins}
    opens_page = (said.get(b"sec-fetch-mode"), said.get(b"sec-fetch-dest")) == (b"navigate", b"document")
    return site in {b"same-origin", b"none"} or (opens_page and scope["method"] == "GET" and scope["path"] in PAGES)


def _scheme(value: bytes) -> bytes:
    return value.partition(b" ")[0].lower()


def _read_key(name: bytes, value: bytes) -> bytes | None:
    if name == b"x-api-key":
        return value.strip()
    rest = value.partition(b" ")[2].strip()
    match _scheme(value):
        case b"bearer":
            return rest
        case b"basic":  # the key is the password
            with contextlib.suppress(binascii.Error):
                return base64.b64decode(rest, validate=True).partition(b":")[2] or None
    return None
