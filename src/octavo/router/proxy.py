"""One request's way: to an engine, to another one where the first fails in time, and its answer back."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from octavo.errors import OctavoError
from octavo.router.asked import read_asked
from octavo.router.event_stream import EventStream
from octavo.router.flight import Flight, Share
from octavo.router.pairing import pair, without_kv_transfer
from octavo.router.spelling import error_event, error_response, is_last_event
from octavo.router.upstream import FAILURES
from octavo.router.usage import Usage, read_usage
from octavo.runtime import logs
from octavo.server.access.body import received
from octavo.server.access.routes import GENERATING, REFUSALS, tells_of_all
from octavo.server.errors import CLIENT_LEFT, EngineLostError, NoEngineError, NotAllowedError, note_error, to_http

if TYPE_CHECKING:
    from collections.abc import Collection

    from starlette.types import Receive, Scope, Send

    from octavo.router.connection import Answer
    from octavo.router.engines import Engine
    from octavo.router.service import RouterService

logger = logging.getLogger(__name__)
_FULL, _NOT_SERVING = 429, 503  # the second also of requests that were under way when an engine began anew
_REFUSED = frozenset({_FULL, _NOT_SERVING})  # another engine may take it
_MAX_FAILURES = 2  # so many engines may fail a request: it goes elsewhere once


class Proxy:
    """The route of all that the router does not answer itself."""

    def __init__(self, service: RouterService, own_paths: Collection[str] = ()) -> None:
        """own_paths: what the router answers itself, by the methods that it knows."""
        self._service = service
        self._own_paths = frozenset(own_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request. An error is told as its API tells it; behind an answer's beginning the connection ends."""
        if scope["path"] in self._own_paths:
            raise HTTPException(405)
        request = Request(scope, receive)
        request.state.is_begun = False
        try:
            await self._serve(request, send)
        except ClientDisconnect:
            if not request.state.is_begun:
                await Response(status_code=CLIENT_LEFT)(scope, receive, send)  # nobody reads it
        except OctavoError as error:
            if not request.state.is_begun:
                await error_response(to_http(error), scope["path"])(scope, receive, send)

    async def _serve(self, request: Request, send: Send) -> None:
        service, tenant, path = self._service, request.state.tenant, request.url.path
        if tells_of_all(path) and not tenant.read_metrics:
            raise NotAllowedError("this key may not see what tells of all keys: that takes read_metrics")
        async with received(request, service.config, service.limiter.body_bytes, service.timeouts) as chunks:
            body = b"".join(chunks)
            chunks.clear()
            asked = read_asked(
                body,
                tenant=tenant.name,
                headers=request.headers,
                session_header=service.config.session_header,
                is_answered=path in GENERATING,
            )
            flight = Flight(asked, tenant)
            with service.entering(flight, takes_place=request.method == "POST" and path in REFUSALS):
                exchange = _Exchange(service, flight, request, body, send)
                async with flight.watching(request.receive):
                    await exchange.run()


class _Exchange:
    """A request and its answer, whichever engine gives it."""

    def __init__(self, service: RouterService, flight: Flight, request: Request, body: bytes, send: Send) -> None:
        self._service, self._flight, self._body, self._send = service, flight, body, send
        self._scope = without_kv_transfer(request.scope)
        self._path: str = request.scope["path"]
        self._audit = request.state.audit
        self._tried: list[Engine] = []
        self._failed: set[Engine] = set()

    async def run(self) -> None:
        """Try engines until one has answered. Raises `NoEngineError` or `EngineLostError` where none does."""
        pool, asked = self._service.pool, self._flight.asked
        num_failures, refusal = 0, None
        while (engine := pool.choose(asked, self._tried, self._failed)) is not None:
            self._tried.append(engine)
            self._audit["engine"] = engine.url
            try:
                refused = await self._try(engine)
            except EngineLostError:
                engine.num_failures += 1
                self._failed.add(engine)
                if self._flight.is_begun:
                    raise
                num_failures += 1
                if num_failures == _MAX_FAILURES:
                    raise
                logger.warning(
                    "%s lost a request of which its client has heard nothing: another engine gets it", engine.url
                )
                continue
            if refused is None:
                return
            refusal = refused if refusal is None else min(refusal, refused)
            if refused[1] == _NOT_SERVING:
                self._failed.add(engine)
                num_failures += 1
            if num_failures == _MAX_FAILURES:
                break
        if refusal is None and num_failures:
            raise EngineLostError
        if refusal is None:
            raise NoEngineError(self._service.config.health_interval_s)
        await self._send_whole(*refusal[1:])

    async def _try(self, engine: Engine) -> tuple[int, int, list[tuple[bytes, bytes]], bytes] | None:
        """Have one engine answer.

        Return None where the client has its answer, whatever that is; else how an engine said that it takes nothing
        now: seconds to wait, status, headers, body. Raises `EngineLostError` while the client has heard nothing.
        """
        pool, asked = self._service.pool, self._flight.asked
        usage = Usage(None, None, 0)
        with Share(self._flight, engine) as share:
            known = pool.sent(asked, engine)
            pairing = pair(self._service, self._flight, engine, self._scope, self._body, known)
            try:
                async with self._flight.guarded():
                    scope = await pairing.scope()
                    answer = await self._service.upstream.ask(engine, scope, self._body, _request_id())
                async with answer:
                    if answer.is_stream:
                        usage = await self._relay_stream(answer, share)
                        return None
                    async with self._flight.guarded():
                        if answer.status in _REFUSED:
                            return _seconds(answer), answer.status, answer.headers, await answer.read()
                        # JSON as a whole, so that it can still come from elsewhere until it is there
                        body = await answer.read() if answer.is_json else None
                    if body is not None:  # its engine is done, whatever becomes of it
                        usage = read_usage(b"", body)
                        await self._send_whole(answer.status, answer.headers, body)
                        return None
                    async with self._flight.guarded():
                        await self._relay(answer)
            except FAILURES as error:
                self._service.suspect(engine)
                logger.info("%s failed a request: %s: %s", engine.url, type(error).__name__, error)
                if self._flight.is_begun:
                    raise  # an answer that is no stream, cut in the middle: its connection is ended
                raise EngineLostError from error
            finally:
                pool.told(asked, engine, usage.num_prompt_tokens, usage.num_cached_tokens)
                self._service.charge(self._flight, usage.num_tokens)
                pairing.close()
        return None

    async def _relay(self, answer: Answer) -> None:
        """Pass an answer on as it comes."""
        await self._start(answer.status, answer.headers)
        while chunk := await answer.next():
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        await self._send({"type": "http.response.body"})

    async def _relay_stream(self, answer: Answer, share: Share) -> Usage:
        """Pass events on as they come, each whole; one that fails ends with an event that says so."""
        events = EventStream(share, answer.event_end)
        try:
            async with self._flight.guarded():
                while not (whole := events.whole(await answer.next())) and not answer.is_over:
                    pass
                await self._start(answer.status, answer.headers)
                await self._send_more(whole)
                write = self._scope["state"]["write_body"]
                await answer.relay(lambda chunk: not (whole := events.whole(chunk)) or write(whole), self._send_more)
        except (*FAILURES, OctavoError) as error:
            if not self._flight.is_begun:
                raise
            own = error if isinstance(error, OctavoError) else EngineLostError()
            if own is not error:
                self._service.suspect(share.engine)
            if isinstance(own, EngineLostError):
                if is_last_event(events.last_event, self._path):  # it was lost behind that: the answer is whole
                    await self._send({"type": "http.response.body"})
                    return read_usage(events.first, events.last)
                share.engine.num_failures += 1
            http_error = note_error(self._scope["state"], to_http(own))
            await self._send({"type": "http.response.body", "body": error_event(http_error, self._path)})
        else:
            await self._send({"type": "http.response.body", "body": events.rest})
        return read_usage(events.first, events.last)

    async def _send_more(self, body: bytes = b"") -> None:
        """Send a piece of an answer as soon as its client takes more."""
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._flight.is_begun = self._scope["state"]["is_begun"] = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send_whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        await self._start(status, headers)
        await self._send({"type": "http.response.body", "body": body})


def _request_id() -> str:
    return logs.request_id.get() or ""


def _seconds(answer: Answer) -> int:
    return int(answer.retry_after) if answer.retry_after.isdecimal() else 1
