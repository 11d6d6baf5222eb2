"""Relays HTTP requests."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from octavo.errors import OctavoError
from octavo.http.auth import check_operator
from octavo.http.body import read_timeout, received
from octavo.http.errors import (
    CLIENT_DISCONNECTED,
    EngineAnswerError,
    EngineLostError,
    EngineTimeoutError,
    NoEngineError,
    note_error,
    to_http,
)
from octavo.http.routes import ROUTES, Routes
from octavo.router.answer import AnswerError, MalformedAnswerError, SilentEngineError
from octavo.router.event_stream import EventStream
from octavo.router.pairing import pair, without_kv_transfer
from octavo.router.request_summary import read_request_summary
from octavo.router.routed_request import RoutedRequest, Share
from octavo.router.upstream import FAILURES
from octavo.router.usage import COUNTS_BYTES, ReportedUsage, read_usage
from octavo.runtime import logs

if TYPE_CHECKING:
    from collections.abc import Collection

    from starlette.types import Receive, Scope, Send

    from octavo.http.apis import Api
    from octavo.router.answer import Answer
    from octavo.router.engines import EngineHandle
    from octavo.router.service import RouterService

logger = logging.getLogger(__name__)
_OK, _FULL, _NOT_SERVING = 200, 429, 503  # after a restart, an engine answers 503 to open requests
_REFUSED = frozenset({_FULL, _NOT_SERVING})
_MAX_FAILURES = 2
_END_BYTES = 2 * COUNTS_BYTES
_UNLIMITED = frozenset({"GET", "HEAD"})  # a dashboard's feed has no end


class Proxy:
    """Passes requests to engines."""

    def __init__(self, service: RouterService, local_paths: Collection[str] = (), routes: Routes = ROUTES) -> None:
        """local_paths: Paths that the router serves itself. Other methods on these paths get 405."""
        self._service, self._routes = service, routes
        self._local_paths = frozenset(local_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request. After an answer has begun, an error ends the connection."""
        if scope["path"] in self._local_paths:
            raise HTTPException(405)
        request = Request(scope, receive)
        request.state.is_begun = False
        try:
            await self._serve(request, send)
        except ClientDisconnect:
            if not request.state.is_begun:
                await Response(status_code=CLIENT_DISCONNECTED)(scope, receive, send)
        except OctavoError as error:
            http_error = note_error(scope["state"], to_http(error))
            if not request.state.is_begun:
                await self._routes.api(scope["path"]).response(http_error)(scope, receive, send)

    async def _serve(self, request: Request, send: Send) -> None:
        service, tenant, path = self._service, request.state.tenant, request.url.path
        route = self._routes.find(path)
        if self._routes.is_for_operators(path):
            check_operator(tenant, "see figures of all keys; it needs read_metrics")
        async with received(request, service.config, service.limiter.body_bytes, service.timeouts) as chunks:
            body = b"".join(chunks)
            chunks.clear()
            summary = read_request_summary(
                body,
                tenant=tenant.name,
                headers=request.headers,
                session_header=service.config.session_header,
                is_answered=route is not None and route.work == "answer",
            )
            routed = RoutedRequest(summary, tenant)
            timeout_s = _timeout_s(request, service.request_timeout_s)
            with (
                service.entering(routed, takes_place=request.method == "POST" and route is not None),
                routed.limited(service.timeouts, timeout_s),
            ):
                exchange = _Exchange(service, routed, request, body, send, self._routes.api(path))
                async with routed.watching(request.receive):
                    await exchange.run()


@dataclass(frozen=True, slots=True)
class _Refusal:
    answer: Answer
    body: bytes

    @property
    def retry_after_s(self) -> float:
        reported_s = self.answer.retry_after_s
        return math.inf if reported_s is None else reported_s


class _Exchange:
    def __init__(
        self, service: RouterService, routed: RoutedRequest, request: Request, body: bytes, send: Send, api: Api
    ) -> None:
        self._service, self._routed, self._body, self._send = service, routed, body, send
        self._scope = without_kv_transfer(request.scope)
        self._api = api
        self._audit = request.state.audit
        self._tried: list[EngineHandle] = []
        self._failed: set[EngineHandle] = set()
        self._is_complete = False

    async def run(self) -> None:
        pool, summary = self._service.pool, self._routed.summary
        num_failures = 0
        refusals: list[_Refusal] = []
        failure: EngineLostError | None = None
        while num_failures < _MAX_FAILURES and (engine := pool.choose(summary, self._tried, self._failed)) is not None:
            self._tried.append(engine)
            self._audit["engine"] = engine.url
            try:
                refusal = await self._try(engine)
            except EngineLostError as error:
                engine.num_failures += 1
                self._failed.add(engine)
                num_failures += 1
                failure = error
                if self._routed.is_begun or num_failures == _MAX_FAILURES:
                    raise
                logger.warning("%s failed a request before its answer began: another engine gets it", engine.url)
                continue
            if refusal is None:
                return
            refusals.append(refusal)
            if refusal.answer.status == _NOT_SERVING:
                self._failed.add(engine)
                num_failures += 1
        if refusals:
            soonest = min(refusals, key=lambda refusal: refusal.retry_after_s)
            await self._send_whole(soonest.answer.status, soonest.answer.headers, soonest.body)
        else:
            raise failure or NoEngineError(self._service.config.health_interval_s)

    async def _try(self, engine: EngineHandle) -> _Refusal | None:
        """Send the request. Return the engine's refusal, or None if the client got an answer."""
        pool, summary = self._service.pool, self._routed.summary
        usage = ReportedUsage()
        with Share(self._routed, engine) as share:
            known = pool.sent(summary, engine)
            pairing = pair(self._service, self._routed, engine, self._scope, self._body, known)
            try:
                async with self._routed.guarded():
                    scope = self._scope if pairing is None else await pairing.scope()
                    answer = await self._service.upstream.ask(engine, scope, self._body, logs.request_id.get() or "")
                async with answer:
                    if answer.status in _REFUSED:
                        async with self._routed.guarded():
                            return _Refusal(answer, await answer.read())
                    if answer.is_stream:
                        usage = await self._relay_stream(answer, share)
                    elif answer.is_json:
                        usage = await self._relay_json(answer)
                    else:
                        async with self._routed.guarded():
                            await self._relay(answer)
                        self._is_complete = answer.status == _OK
            except FAILURES as error:
                self._service.suspect(engine)
                logger.info("%s failed a request: %s: %s", engine.url, type(error).__name__, error)
                if self._routed.is_begun:
                    raise  # the server then closes the client's connection
                raise _failure_of(error) from error
            finally:
                pool.note_usage(summary, engine, usage.num_prompt_tokens, usage.num_cached_tokens)
                self._service.charge(self._routed, usage.num_tokens)
                if pairing is not None:
                    pairing.close(usage if self._is_complete else None)
        return None

    async def _relay_json(self, answer: Answer) -> ReportedUsage:
        # A too large answer is sent as it arrives.
        async with self._routed.guarded():
            body, is_whole = await answer.read_held()
            if not is_whole:
                usage = read_usage(body, await self._relay(answer, body))
                self._is_complete = answer.status == _OK
                return usage
            if answer.ends_with_connection and answer.is_plain and not _is_json(body):
                raise AnswerError("its answer was cut off: it is not complete JSON")
        self._is_complete = answer.status == _OK
        await self._send_whole(answer.status, answer.headers, body)  # not guarded, because the engine is done
        return read_usage(b"", body)

    async def _relay(self, answer: Answer, first: bytes = b"") -> bytes:
        await self._start(answer.status, answer.headers)
        end, piece = b"", first or await answer.next()
        while piece:
            await self._send_more(piece)
            end = (end + piece)[-_END_BYTES:]
            piece = await answer.next()
        await self._send({"type": "http.response.body"})
        return end

    async def _relay_stream(self, answer: Answer, share: Share) -> ReportedUsage:
        events = EventStream(share, is_of_lines=answer.is_of_lines, max_bytes=self._service.config.max_answer_bytes)
        try:
            async with self._routed.guarded():
                while not (whole := events.whole(await answer.next())) and not answer.is_over:
                    pass
                if not whole:
                    self._check_end(answer, events)
                await self._start(answer.status, answer.headers)
                await self._send_more(whole)
                write = self._scope["state"]["write_body"]
                await answer.relay(lambda chunk: not (whole := events.whole(chunk)) or write(whole), self._send_more)
                self._check_end(answer, events)
        except (*FAILURES, OctavoError) as error:
            if not self._routed.is_begun:
                raise
            answer.give_up()
            await self._end_stream(error, events, share.engine)
        else:
            self._is_complete = answer.status == _OK
            await self._send({"type": "http.response.body", "body": events.rest})
        return read_usage(events.first, events.last)

    def _check_end(self, answer: Answer, events: EventStream) -> None:
        if not answer.ends_with_connection or not self._routed.summary.is_answered:
            return
        if not self._api.is_last(events.rest or events.last_event):
            raise AnswerError("its stream was cut off: the connection ended before the last event")

    async def _end_stream(self, error: Exception, events: EventStream, engine: EngineHandle) -> None:
        if self._api.is_last(events.last_event):
            await self._send({"type": "http.response.body"})
            return
        public_error = error if isinstance(error, OctavoError) else _failure_of(error)
        if public_error is not error:
            self._service.suspect(engine)
            logger.info("%s failed a stream: %s: %s", engine.url, type(error).__name__, error)
        if isinstance(public_error, EngineLostError):
            engine.num_failures += 1
        http_error = note_error(self._scope["state"], to_http(public_error))
        await self._send({"type": "http.response.body", "body": self._api.event(http_error)})

    async def _send_more(self, body: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._routed.is_begun = self._scope["state"]["is_begun"] = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send_whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        await self._start(status, headers)
        await self._send({"type": "http.response.body", "body": body})


def _failure_of(error: Exception) -> EngineLostError:
    if isinstance(error, SilentEngineError):
        return EngineTimeoutError()
    return EngineAnswerError() if isinstance(error, MalformedAnswerError) else EngineLostError()


def _timeout_s(request: Request, limit_s: float) -> float | None:
    is_unlimited = request.method in _UNLIMITED and "x-request-timeout" not in request.headers
    return None if is_unlimited else read_timeout(request, limit_s)


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except msgspec.DecodeError:
        return False
    return True
