"""A router's service in this process. Its engines answer with a test's bytes: no socket, no thread."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from router.asking_engine import Transport

from octavo.config import RouterConfig
from octavo.http.tenants import EVERYBODY, Tenant
from octavo.router.answer import AnswerLimits
from octavo.router.connection import EngineConnection
from octavo.router.proxy import Proxy
from octavo.router.service import RouterService

if TYPE_CHECKING:
    from octavo.router.answer import Answer
    from octavo.router.engines import EngineHandle

URLS = ("http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://10.0.0.3:8000")
USAGE = {"prompt_tokens": 300, "total_tokens": 302, "prompt_tokens_details": {"cached_tokens": 30}}


def answer(body: object = None, status: int = 200, *, kind: str = "application/json", more: str = "") -> bytes:
    """Return a complete answer. body: an object (for JSON) or bytes. more: lines of further headers."""
    content = body if isinstance(body, bytes) else json.dumps(body or {}, separators=(",", ":")).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(content)}\r\n{more}\r\n"
    return head.encode() + content


class MadeUpUpstream:
    """Gives each engine's answers in turn, and repeats the last one.

    An answer is one of: bytes, which the connection's end follows if `ends`; an exception; a coroutine function that
    feeds a connection. summary: engine, scope and body of each request.
    """

    def __init__(self, max_answer_bytes: int) -> None:
        self._limits = AnswerLimits(first_byte_s=60.0, idle_s=60.0, max_bytes=max_answer_bytes)
        self.answers: dict[str, list[Any]] = {}
        self.summary: list[tuple[EngineHandle, Any, bytes]] = []
        self.transports: list[Transport] = []
        self.feeding: set[asyncio.Task[None]] = set()
        self.ends = False

    async def ask(self, engine: EngineHandle, scope: Any, body: bytes, _request_id: str) -> Answer:
        self.summary.append((engine, scope, body))
        given = self.answers[engine.url]
        script = given.pop(0) if len(given) > 1 else given[0]
        if isinstance(script, Exception):
            raise script
        connection = EngineConnection(engine.url, lambda _: None, lambda _: None)
        transport: Any = Transport()
        self.transports.append(transport)
        connection.connection_made(transport)
        asking = asyncio.ensure_future(connection.ask(b"", b"", self._limits, is_head=False))
        await asyncio.sleep(0)
        if isinstance(script, bytes):
            connection.data_received(script)
            if self.ends:
                connection.connection_lost(None)
        else:
            task = asyncio.ensure_future(script(connection))
            self.feeding.add(task)
            task.add_done_callback(self.feeding.discard)
        return await asking

    async def close(self) -> None:
        """Do nothing."""


class Client:
    """A client of a router with engines that are all ready. sent: ASGI's messages. state: of the last request."""

    def __init__(self, num_engines: int = 2, **options: Any) -> None:
        self.service = RouterService(RouterConfig(engines=URLS[:num_engines], policy="round_robin", **options))
        self.upstream = MadeUpUpstream(self.service.config.max_answer_bytes)
        self.service.upstream = self.upstream  # type: ignore[assignment]
        self.service.pool.change(URLS[:num_engines])
        self.engines = list(self.service.pool.engines.values())
        for engine in self.engines:
            engine.is_ready = True
            self.upstream.answers[engine.url] = [answer({"usage": USAGE})]
        self.sent: list[Any] = []
        self.state: dict[str, Any] = {}
        self.leaves = asyncio.Event()

    def answers(self, *given: Any, of: int = 0) -> None:
        """Set the answers of engine number `of`."""
        self.upstream.answers[self.engines[of].url] = list(given)

    async def ask(
        self,
        path: str = "/v1/completions",
        *,
        method: str = "POST",
        tenant: Tenant = EVERYBODY,
        headers: Any = (),
        **body: Any,
    ) -> tuple[int, bytes]:
        """Send a request. Return the answer's status (0 if there is none) and its body."""
        content = json.dumps(body or {"prompt": "a", "max_tokens": 4}).encode()
        messages = [{"type": "http.request", "body": content, "more_body": False}]
        self.sent, self.state = [], {"tenant": tenant, "audit": {}}
        self.state["write_body"] = lambda piece: self.sent.append({"type": "piece", "body": piece}) or True

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await self.leaves.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self.sent.append(message)

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), *headers],
            "state": self.state,
        }
        await Proxy(self.service, ["/metrics"])(scope, receive, send)
        statuses = [message["status"] for message in self.sent if message["type"] == "http.response.start"]
        return (*statuses, 0)[0], b"".join(message.get("body", b"") for message in self.sent)
