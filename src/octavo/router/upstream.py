"""The client's side: a request is sent to an engine, and its answer read as it comes."""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING, Self

import aiohttp
from multidict import CIMultiDict
from yarl import URL

if TYPE_CHECKING:
    from starlette.types import Scope

    from octavo.router.engines import Engine

FAILURES = (aiohttp.ClientError, OSError, asyncio.TimeoutError)  # of an engine, or of the way to it
_CONNECT_S = 3.0
_OWN_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})
_IDLE_S = 30.0  # octavo's servers keep connections for longer
# RFC 9110, section 7.6.1, and what is this connection's own: who asks was let in here, under this server's name.
_NOT_PASSED = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade", b"host", b"origin", b"content-length", b"expect"),
        *(b"x-request-id", b"x-forwarded-for"),
    }
)
_NOT_PASSED_BACK = _NOT_PASSED - {b"content-length"} | {b"date", b"server"}


def is_refusal(error: BaseException) -> bool:
    """Whether nobody is there: connections are refused, or ended at once."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return isinstance(cause, ConnectionRefusedError | ConnectionResetError | aiohttp.ServerDisconnectedError)


def is_own_failure(error: BaseException) -> bool:
    """Whether it is this process's trouble, and says nothing of an engine: too many open files, no answer of DNS."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return True
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return isinstance(cause, OSError) and cause.errno in _OWN_ERRNOS


class Upstream:
    """Connections to all engines. Used on one event loop only, and closed in the end."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S, ttl_dns_cache=10),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def ask(self, engine: Engine, scope: Scope, body: bytes, request_id: str) -> Answer:
        """Send a client's request; return its answer when the headers are there. Raises `FAILURES`."""
        path, query = scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1")
        url = URL(f"{engine.url}{path}{'?' if query else ''}{query}", encoded=True)
        response = await self._session.request(
            scope["method"], url, headers=_headers(scope, request_id), data=body or None, allow_redirects=False
        )
        return Answer(response)

    async def get(self, engine: Engine, path: str, key: str | None, timeout_s: float) -> tuple[int, bytes]:
        """Ask an engine something of the router's own; return status and body. Raises `FAILURES`."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.get(URL(engine.url + path), headers=headers, timeout=timeout) as response:
            return response.status, await response.read()

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()


class Answer:
    """An engine's answer, whose body has not been read."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        kind = response.headers.get("Content-Type", "")
        self.is_stream = kind.startswith("text/event-stream")
        self.is_json = kind.startswith("application/json")
        self.retry_after = response.headers.get("Retry-After", "")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Give the connection back; close it where the body was not read to its end, so that the engine hears of it."""
        self._response.close() if not self._response.content.at_eof() else self._response.release()

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """What a client is told, in the form of ASGI."""
        named = (each.strip().encode().lower() for each in self._response.headers.get("Connection", "").split(","))
        dropped = _NOT_PASSED_BACK.union(named)
        return [(lower, value) for name, value in self._response.raw_headers if (lower := name.lower()) not in dropped]

    async def next(self) -> bytes:
        """Return what has come, as soon as anything has; b"" at the end. Raises `FAILURES`."""
        return await self._response.content.readany()

    async def read(self) -> bytes:
        """Return the whole body. Raises `FAILURES`."""
        return await self._response.read()


def _headers(scope: Scope, request_id: str) -> CIMultiDict[str]:
    """Return a client's headers for an engine, which hears whose they are."""
    named = {
        each.strip().lower() for name, value in scope["headers"] if name == b"connection" for each in value.split(b",")
    }
    headers = CIMultiDict(
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in scope["headers"]
        if name not in _NOT_PASSED and name not in named
    )
    headers["X-Request-Id"] = request_id
    if client := scope.get("client"):
        headers["X-Forwarded-For"] = client[0]
    return headers
