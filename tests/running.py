"""A real server on a loopback port, in a thread, with the real engine and a fake executor."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import httpx
import uvicorn.server
from fakes import FakeExecutor, make_engine

from octavo.config import ServerConfig
from octavo.engine.async_llm import AsyncEngine
from octavo.http.listening import MAX_CONNECTIONS, bind
from octavo.server.serving import GracefulServer, make_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from octavo.engine.llm_engine import Engine

DEADLINE_S = 20
# For a client that threads share. httpcore's pool otherwise closes idle connections that are already assigned to a
# request (github.com/encode/httpcore/issues/1110): surplus ones, ones in the way of another request, and expired ones.
ALL_KEPT = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None)
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # otherwise a client reads all certificates of the system, in 15 ms
_PAUSE_S = 0.005


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Poll until a condition holds; fail with its name after the deadline."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        if result := condition():
            return result
        time.sleep(0.005)
    raise TimeoutError(f"waited {DEADLINE_S} s in vain until {what}")


def ask_as_written(http: httpx.Client, path: str, method: str = "GET", **request: Any) -> httpx.Response:
    """Request a path exactly as written: httpx itself would resolve `..`, `//` and other odd parts first."""
    return http.request(method, "/", extensions={"target": path.encode()}, **request)


def connect(running: Running, *, receive_bytes: int | None = None) -> socket.socket:
    """Open a connection without sending anything; receive_bytes: size of its receive buffer."""
    host, _, port = running.url.removeprefix("http://").partition(":")
    sock = socket.socket()
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.settimeout(DEADLINE_S)
    sock.connect((host, int(port)))
    return sock


@contextlib.contextmanager
def asking(running: Any, path: str, body: Any, **headers: str) -> Iterator[None]:
    """Post to a server with a `url`, on a new connection; the answer is not read when the block ends."""
    data = json.dumps(body).encode()
    told = {"Host": "127.0.0.1", "Content-Type": "application/json", "Content-Length": str(len(data)), **headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in told.items())
    with connect(running) as sock:
        sock.sendall(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + data)
        yield


def read_all(sock: socket.socket) -> bytes:
    """Read until the connection ends."""
    data = b""
    try:
        while piece := sock.recv(1 << 16):
            data += piece
    except ConnectionResetError:
        return data
    return data


@dataclass
class Running:
    """A running server."""

    url: str
    server: GracefulServer
    thread: threading.Thread
    engine: Engine
    executor: FakeExecutor

    @property
    def num_blocks_in_use(self) -> int:
        pool = self.engine.core.scheduler.kv_cache_manager.pool
        return pool.num_blocks - pool.num_free_blocks

    @property
    def num_unfinished(self) -> int:
        return self.engine.core.scheduler.get_num_unfinished_requests()

    def http(self) -> httpx.Client:
        headers = {"Content-Type": "application/json"}
        return httpx.Client(
            base_url=self.url, timeout=DEADLINE_S, trust_env=False, limits=ALL_KEPT, headers=headers, verify=NO_TLS
        )


def let_time_pass(running: Running, seconds: float) -> None:
    """Advance the clock of the engine's scheduler, so that its requests time out."""
    scheduler = running.engine.core.scheduler
    clock = scheduler._clock
    scheduler._clock = lambda: clock() + seconds


class ShortPauses:
    """asyncio as uvicorn sees it in tests: uvicorn pauses for 0.1 s between checks for its end, and before it exits."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(delay: float) -> None:
        await asyncio.sleep(min(delay, _PAUSE_S))


def short_pauses() -> contextlib.AbstractContextManager[object]:
    """Shorten the pauses of uvicorn's servers that start and end in the block."""
    return patch.object(uvicorn.server, "asyncio", ShortPauses())


@contextlib.contextmanager
def run_server(
    executor: FakeExecutor | None = None,
    *,
    engine_options: dict[str, Any] | None = None,
    send_bytes: int | None = None,
    max_connections: int = MAX_CONNECTIONS,
    **options: Any,
) -> Iterator[Running]:
    """Serve until the block ends; send_bytes: size of the send buffer for answers that the client does not read."""
    executor = executor or FakeExecutor()
    engine = make_engine(executor, **(engine_options or {}))
    settings: dict[str, Any] = {
        "max_body_bytes": 1 << 20,
        "grace_s": 0.0,
        "log_level": "critical",
        "served_model_names": ("fake", "alias/of-fake"),
    }
    config = ServerConfig(**{**settings, **options})
    llm = AsyncEngine(engine, max_unread_outputs=config.max_unread_outputs)
    server = make_server(llm, config, max_connections=max_connections)
    sock = bind("127.0.0.1", 0)
    if send_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
    port = sock.getsockname()[1]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="test-server")
    with short_pauses():
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive(), "the server listens")
            yield Running(f"http://127.0.0.1:{port}", server, thread, engine, executor)
        finally:
            executor.gate.set()
            server.should_exit = True
            thread.join(DEADLINE_S)
            llm.shutdown()
            if thread.is_alive():
                raise RuntimeError("the server did not end")
