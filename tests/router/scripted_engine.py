"""A fake engine with a role and scripted answers, for a router that pairs prefill with decode engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from typing import TYPE_CHECKING

import uvicorn
from running import DEADLINE_S, short_pauses
from starlette.datastructures import Headers

from octavo.http.kv_transfer import read_kv_transfer
from octavo.http.listening import bind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from octavo.data.kv_transfer_params import KVTransferParams

NUM_PROMPT_TOKENS = 300


class Scripted:
    """A fake engine with a role. does: its action for a POST. release: event that lets waiting POSTs continue.

    follows: if `does` is "follow", the engine that must be asked before this one answers. num_cached: cached tokens
    that its answers report, of num_prompt prompt tokens; None: no usage. kv_format: the KV format that it reports.
    figures: returns its metrics; None: JSON.
    """

    def __init__(self, role: str | None, does: str, port: int | None) -> None:
        self.release = threading.Event()
        self.follows: Scripted | None = None
        self.begin(role, does, port)

    def begin(self, role: str | None, does: str, port: int | None) -> None:
        self.role, self.does, self.port = role, does, port
        self.is_ready = True
        self.retry_after = b"7"
        self.release.clear()
        self.num_cached: int | None = 30
        self.num_prompt = NUM_PROMPT_TOKENS
        self.kv_format: dict[str, str] | None = None
        self.request_timeout: object = None
        self.figures: Callable[[], bytes] | None = None
        self.summary: list[tuple[str, Headers, bytes]] = []
        self.params: list[KVTransferParams | None] = []
        self.num_left = 0

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return
        if scope["method"] == "GET":
            told = {
                "data": [{"id": "m"}],
                "role": self.role,
                "kv_transfer_port": self.port,
                "kv_format": self.kv_format,
                "request_timeout": self.request_timeout,
            }
            told = {name: value for name, value in told.items() if value is not None}
            text = json.dumps(told).encode() if scope["path"] != "/metrics" or self.figures is None else self.figures()
            await _send(send, 200 if scope["path"] != "/ready" or self.is_ready else 503, text)
            return
        body = b""
        while True:
            message = await receive()
            body += message["body"]
            if not message.get("more_body"):
                break
        headers = Headers(scope=scope)
        self.summary.append((scope["path"], headers, body))
        self.params.append(read_kv_transfer(headers, self.role or "both"))
        try:
            await self._answer(receive, send)
        except asyncio.CancelledError:
            self.num_left += 1
            raise

    def _told(self) -> bytes:
        told: dict[str, object] = {"from": self.role or "both"}
        if self.num_cached is not None:
            told["usage"] = {
                "prompt_tokens": self.num_prompt,
                "total_tokens": self.num_prompt + 2,
                "prompt_tokens_details": {"cached_tokens": self.num_cached},
            }
        return json.dumps(told, separators=(",", ":")).encode()

    async def _answer(self, receive, send) -> None:
        match self.does:
            case "answer":
                await _send(send, 200, self._told())
            case "refuse" | "full" | "fail" | "closing":
                status = {"refuse": 400, "full": 429, "fail": 500, "closing": 503}[self.does]
                await _send(send, status, b'{"error":{}}', [(b"retry-after", self.retry_after)])
            case "die":
                receive.__self__.transport.abort()
            case "die in its answer":
                head = [(b"content-type", b"application/json"), (b"content-length", b"99")]
                await send({"type": "http.response.start", "status": 200, "headers": head})
                await send({"type": "http.response.body", "body": b'{"usage":', "more_body": True})
                await asyncio.sleep(0.01)
                receive.__self__.transport.abort()
            case "wait" | "follow":
                await self._wait(receive, send)
            case "hang":
                while (await receive())["type"] != "http.disconnect":
                    pass
                self.num_left += 1

    async def _wait(self, receive, send) -> None:
        gone = asyncio.create_task(receive())
        while not (self.release.is_set() or (self.does == "follow" and self.follows.summary)):
            if gone.done():
                self.num_left += 1
                return
            await asyncio.sleep(0.002)
        gone.cancel()
        await _send(send, 200, self._told())


async def _send(send, status, body, headers=()) -> None:
    headers = [(b"content-type", b"application/json"), *headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.contextmanager
def scripted(role: str | None, does: str = "answer", port: int | None = None) -> Iterator[tuple[str, Scripted]]:
    """Run one on a free port. Yield its address and the engine."""
    app = Scripted(role, does, port)
    sock = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    with short_pauses():
        thread.start()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}", app
        finally:
            app.release.set()
            server.should_exit = True
            thread.join(DEADLINE_S)
