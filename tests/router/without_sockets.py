"""A whole router in this process, from the client's bytes to the engine's and back, without sockets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from octavo.config import RouterConfig
from octavo.http.connection import BoundedHttpProtocol
from octavo.http.timeouts import TimeoutQueue
from octavo.router.app import create_app
from octavo.router.connection import EngineConnection
from octavo.router.service import RouterService
from octavo.router.upstream import Upstream

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"delta":{"content":" word"}}]}\n\n'
USAGE = b'{"choices":[],"usage":{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":90}}}'
LAST = b"data: " + USAGE + b"\n\ndata: [DONE]\n\n"
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(USAGE), USAGE)
SYSTEM = {"role": "system", "content": "You are a helpful assistant, and know everything about octavos. " * 8}
END = b"0\r\n\r\n"


def chunk(piece: bytes) -> bytes:
    """Return a chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)


class Transport:
    """A fake transport that keeps the written bytes, and passes them to `on_write`."""

    def __init__(self, on_write: Any = None) -> None:
        self.written, self._on_write, self._is_closing = b"", on_write, False

    def write(self, data: bytes) -> None:
        self.written += data
        if self._on_write is not None:
            self._on_write()

    def writelines(self, pieces: Any) -> None:
        self.write(b"".join(pieces))

    def get_extra_info(self, _name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    abort = close

    def set_write_buffer_limits(self, **_: Any) -> None:
        """Do nothing."""

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """Do nothing."""

    resume_reading = pause_reading


class NullEngine:
    """An engine's end of a connection. A request with `"stream": true` gets only the first event of a stream."""

    def __init__(self, upstream: Upstream, url: str) -> None:
        self.is_streaming = False
        self._transport = Transport(self._answer)
        self.connection = EngineConnection(url, upstream._now_idle, upstream._lost)
        self.connection.connection_made(self._transport)  # type: ignore[arg-type]
        upstream._open.add(self.connection)
        upstream._now_idle(self.connection)

    def send(self, data: bytes) -> None:
        """Send bytes to the router."""
        self.connection.data_received(data)

    def _answer(self) -> None:
        request = self._transport.written
        head, _, body = request.partition(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if len(body) == length:
            self._transport.written = b""
            self.is_streaming = b'"stream": true' in body
            answer = STREAM + chunk(EVENT) if self.is_streaming else WHOLE
            asyncio.get_running_loop().call_soon(self.connection.data_received, answer)


class WholeRouter:
    """A router with null engines that are all ready, one connection each, and a client's connection.

    Used in a running event loop.
    """

    def __init__(self, num_engines: int, **options: Any) -> None:
        urls = tuple(f"http://10.0.{number // 100}.{number % 100}:8000" for number in range(num_engines))
        config = RouterConfig(engines=urls, log_level="critical", **options)
        self.service = RouterService(config)
        self.service.upstream = Upstream(config)
        self.service.pool.change(urls)
        for engine in self.service.pool.engines.values():
            engine.is_ready, engine.models = True, frozenset({"m"})
        self.engines = [NullEngine(self.service.upstream, url) for url in urls]
        app = uvicorn.Config(create_app(self.service), log_config=None, access_log=False, ws="none", interface="asgi3")
        app.load()
        self._state = ServerState()
        self._client = BoundedHttpProtocol(
            config=app,
            server_state=self._state,
            app_state={},
            header_timeout_s=60.0,
            keep_alive_timeout_s=60.0,
            idle_timeout_s=60.0,
            max_connections=10,
            timeouts=TimeoutQueue(),
            on_refused=lambda *_: None,
        )
        self.transport: Any = Transport()
        self._client.connection_made(self.transport)

    def begin(self, number: int, *, stream: bool = False, num_words: int = 200) -> None:
        """Send a request with a prompt that depends on `number`."""
        messages = [SYSTEM, {"role": "user", "content": f"{number} " * num_words}]
        body = json.dumps({"model": "m", "max_tokens": 64, "stream": stream, "messages": messages}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        self.transport.written = b""
        self._client.data_received(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))

    async def until(self, end: bytes) -> bytes:
        """Wait until the answer ends with `end`. Return the answer."""
        while not self.transport.written.endswith(end):  # noqa: ASYNC110 - the loop has nothing else to wait for
            await asyncio.sleep(0)
        return self.transport.written

    async def done(self) -> bytes:
        """Wait until the request has ended. Return the answer."""
        while self._state.tasks:  # noqa: ASYNC110 - the loop has nothing else to wait for
            await asyncio.sleep(0)
        return self.transport.written

    async def ask(self, number: int) -> bytes:
        """Send a request and return the answer."""
        self.begin(number)
        return await self.done()
