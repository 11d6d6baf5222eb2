"""HTTP/1.1 on bare sockets: for clients that are too many, too slow or too broken for a library."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, headers with lower-case names, and the body that arrived."""

    status: int
    headers: dict[str, str]
    body: bytes = b""


def request(path: str, body: Any, method: str = "POST", **headers: str) -> bytes:
    """Return the bytes of a request. A given header that is also a default one is sent twice."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    ]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


class NarrowConnection:
    """A connection that reads on demand only, with very small buffers for unread data.

    A `Connection` reads ahead, and the system buffers megabytes of a loopback connection, so it cannot act as a slow
    reader. The packets are as small as those of a network, which keeps the server's buffer small too.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._socket = socket.socket()
        self._socket.setblocking(False)

    async def __aenter__(self) -> Self:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1400)
        await asyncio.get_running_loop().sock_connect(self._socket, self._address)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._socket.close()

    async def send(self, path: str, body: Any, **headers: str) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, request(path, body, **headers))

    async def read(self, max_bytes: int) -> bytes:
        """Read at most `max_bytes` bytes. Returns b"" at the connection's end."""
        return await asyncio.get_running_loop().sock_recv(self._socket, max_bytes)


class Connection:
    """One connection. Its requests are sent one after the other."""

    def __init__(self, address: tuple[str, int], key: str | None = None) -> None:
        self._address = address
        self._key = key
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection(*self._address)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    def vanish(self) -> None:
        """Reset the connection."""
        self.writer.transport.abort()

    async def send(self, path: str, body: Any, method: str = "POST", **headers: str) -> None:
        if self._key is not None:
            headers = {"Authorization": f"Bearer {self._key}", **headers}
        self.writer.write(request(path, body, method, **headers))
        await self.writer.drain()

    async def head(self) -> Answer:
        """Read a status line and headers."""
        first = await self.reader.readline()
        if not first:
            raise ConnectionResetError("the server closed the connection")
        headers = {}
        while line := (await self.reader.readline()).rstrip(b"\r\n"):
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        return Answer(int(first.split()[1]), headers)

    async def pieces(self, head: Answer) -> AsyncIterator[bytes]:
        """Yield the pieces of a body as they arrive."""
        if head.headers.get("transfer-encoding") != "chunked":
            yield await self.reader.readexactly(int(head.headers.get("content-length", 0)))
            return
        while size := int(await self.reader.readline(), 16):
            piece = await self.reader.readexactly(size + 2)
            yield piece[:-2]
        await self.reader.readline()

    async def answer(self) -> Answer:
        """Read an answer, chunked or not."""
        head = await self.head()
        body = b"".join([piece async for piece in self.pieces(head)])
        return Answer(head.status, head.headers, body)

    async def ask(self, path: str, body: Any = b"", method: str = "POST", **headers: str) -> Answer:
        """Send a request and read its answer."""
        await self.send(path, body, method, **headers)
        return await self.answer()


def events(body: bytes) -> list[str]:
    """Return the data of a stream's events."""
    lines = body.decode().split("\n")
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def text_of(body: bytes) -> str:
    """Return the text of a stream of completions."""
    chunks = [json.loads(event) for event in events(body) if event != "[DONE]"]
    return "".join(choice.get("text", "") for chunk in chunks for choice in chunk.get("choices", []))
