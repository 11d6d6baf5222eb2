"""Requests to engines over reused connections."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from octavo.router.answer import AnswerLimits, NoAnswerError
from octavo.router.answer_headers import of_connection
from octavo.router.connection import EngineConnection

if TYPE_CHECKING:
    from starlette.types import Scope

    from octavo.config import RouterConfig
    from octavo.router.answer import Answer
    from octavo.router.engines import EngineHandle

FAILURES = (OSError,)
_MAX_OWN_BYTES = 16 << 20  # of answers to the router's own requests
_LOCAL_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})
_IDLE_S = 30.0  # octavo's servers keep idle connections longer
# The router checks or sets these headers.
_NOT_PASSED = frozenset(
    (b"proxy-authorization", b"host", b"origin", b"content-length", b"expect", b"x-request-id", b"x-forwarded-for")
)
_KEYS = frozenset((b"authorization", b"x-api-key"))
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_MAY_BE_REPEATED = frozenset({"GET", "HEAD"})


def is_refusal(error: BaseException) -> bool:
    """Return True if an error means that no server listens."""
    return isinstance(error, ConnectionRefusedError | ConnectionResetError)


def is_local_failure(error: BaseException) -> bool:
    """Return True for a failure of this host, such as too many open files."""
    return isinstance(error, socket.gaierror) or (isinstance(error, OSError) and error.errno in _LOCAL_ERRNOS)


def _bearer(key: str) -> tuple[bytes, bytes]:
    return b"authorization", b"Bearer " + key.encode()


class Upstream:
    """Connections to all engines. Must be closed. Used on one event loop only."""

    def __init__(self, config: RouterConfig) -> None:
        self._connect_s = config.engine_connect_timeout_s
        self._first_byte_s = config.engine_first_byte_timeout_s
        self._idle_s, self._max_answer_bytes = config.engine_idle_timeout_s, config.max_answer_bytes
        self._client_key = config.client_key
        self._open: set[EngineConnection] = set()
        self._idle: dict[str, dict[EngineConnection, float]] = {}  # by address, the newest last
        self._tls: ssl.SSLContext | None = None

    async def ask(self, engine: EngineHandle, scope: Scope, body: bytes, request_id: str) -> Answer:
        """Send a client's request to an engine. Raises `FAILURES`."""
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        first_byte_s = engine.ends_within_s if self._first_byte_s is None else self._first_byte_s
        limits = AnswerLimits(first_byte_s, self._idle_s, self._max_answer_bytes)
        return await self._ask(
            engine.url, scope["method"], target, _headers(scope, request_id, self._client_key), body, limits
        )

    async def get(self, engine: EngineHandle, path: str, key: str | None, timeout_s: float) -> tuple[int, bytes]:
        """Send the router's own GET. Raises `FAILURES`."""
        headers = [] if key is None else [_bearer(key)]
        limits = AnswerLimits(timeout_s, timeout_s, _MAX_OWN_BYTES)
        async with asyncio.timeout(timeout_s):
            async with await self._ask(engine.url, "GET", path.encode(), headers, b"", limits) as answer:
                return answer.status, await answer.read()

    async def close(self) -> None:
        """Close all connections."""
        for connection in list(self._open):
            connection.close()

    def close_idle(self, url: str) -> None:
        """Close idle connections to an engine."""
        for connection in self._idle.pop(url, {}):
            connection.close()

    async def _ask(
        self,
        url: str,
        method: str,
        target: bytes,
        headers: list[tuple[bytes, bytes]],
        body: bytes,
        limits: AnswerLimits,
    ) -> Answer:
        lines = [b"%b %b HTTP/1.1" % (method.encode(), target), b"host: " + urlsplit(url).netloc.encode()]
        lines += [name + b": " + value for name, value in headers]
        if body or method in _WITH_BODY:
            lines.append(b"content-length: %d" % len(body))
        head = b"\r\n".join([*lines, b"", b""])
        while True:
            idle = self._take_idle(url)
            connection = idle or await self._connect(url)
            try:
                return await connection.ask(head, body, limits, is_head=method == "HEAD")
            except NoAnswerError:  # the engine may have closed the idle connection
                if idle is None or method not in _MAY_BE_REPEATED:
                    raise

    async def _connect(self, url: str) -> EngineConnection:
        parts = urlsplit(url)
        is_tls = parts.scheme == "https"
        if is_tls and self._tls is None:
            self._tls = ssl.create_default_context()
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._connect_s
        async with asyncio.timeout_at(ends_at):
            port = parts.port or (443 if is_tls else 80)
            found = await loop.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        connection = EngineConnection(url, self._now_idle, self._lost)
        for index, (*_, address) in enumerate(found):
            num_left = len(found) - index
            try:
                async with asyncio.timeout((ends_at - loop.time()) / num_left):
                    await loop.create_connection(
                        lambda: connection,
                        *address[:2],
                        ssl=self._tls if is_tls else None,
                        server_hostname=parts.hostname if is_tls else None,
                    )
                break
            except OSError:
                if num_left == 1:
                    raise
        self._open.add(connection)
        return connection

    def _take_idle(self, url: str) -> EngineConnection | None:
        idle, oldest = self._idle.get(url, {}), asyncio.get_running_loop().time() - _IDLE_S
        while idle:
            connection, since = idle.popitem()
            if since >= oldest and not connection.is_closing:
                return connection
            connection.close()
        return None

    def _now_idle(self, connection: EngineConnection) -> None:
        now = asyncio.get_running_loop().time()
        idle = self._idle.setdefault(connection.url, {})
        idle[connection] = now
        while (first := next(iter(idle))) is not connection and idle[first] < now - _IDLE_S:
            del idle[first]
            first.close()

    def _lost(self, connection: EngineConnection) -> None:
        self._open.discard(connection)
        idle = self._idle.get(connection.url, {})
        idle.pop(connection, None)
        if not idle:
            self._idle.pop(connection.url, None)


def _headers(scope: Scope, request_id: str, client_key: str | None = None) -> list[tuple[bytes, bytes]]:
    dropped = of_connection(scope["headers"]) | _NOT_PASSED
    if client_key is not None:
        dropped |= _KEYS
    headers = [(name, value) for name, value in scope["headers"] if name not in dropped]
    if client_key is not None:
        headers.append(_bearer(client_key))
    headers.append((b"x-request-id", request_id.encode()))
    if client := scope.get("client"):
        headers.append((b"x-forwarded-for", client[0].encode("latin-1")))
    return headers
