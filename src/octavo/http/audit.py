"""The audit log."""

from __future__ import annotations

import logging
import re
import time
from typing import TYPE_CHECKING, Any, Protocol

from octavo.http.apis import error_response
from octavo.http.auth import OPEN_PATHS
from octavo.http.errors import CLIENT_DISCONNECTED, reason_of, to_http
from octavo.runtime import logs
from octavo.runtime.faults import log_fault
from octavo.runtime.ids import new_id

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from octavo.http.errors import HttpError
    from octavo.http.metrics import Metrics

logger = logging.getLogger(logs.AUDIT)
_faults = logging.getLogger(__name__)
_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})
_QUIET = OPEN_PATHS | {"/metrics", "/model_info", "/load", "/v1/loads"}  # polled every second; only failures are logged


class Spans(Protocol):
    """Sends tracing spans."""

    def record_span(
        self, scope: Scope, request_id: str, status: int, seconds: float, reason: str | None, details: dict[str, Any]
    ) -> None:
        """Record a span."""
        ...

    def close(self) -> None:
        """Send remaining spans."""
        ...


class AuditMiddleware:
    """The outermost middleware. Logs and counts every request, without its content.

    A valid X-Request-Id of the client is kept. Routes add fields to the log line through `request.state.audit`.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, tracing: Spans | None = None) -> None:
        self.app = app
        self._metrics, self._tracing = metrics, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.monotonic(), 0
        request_id = _request_id(scope)
        about = logs.request_id.set(request_id.decode())
        state = scope.setdefault("state", {})
        state["audit"] = {}

        async def record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            await self.app(scope, receive, record_status)
        except Exception as error:
            if status:
                raise
            _faults.exception("a request failed")
            await error_response(to_http(error), scope["path"])(scope, receive, record_status)
        finally:
            handler = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.count_answer(method, handler, status)
            is_its_answer = scope["path"] in OPEN_PATHS and status == 503
            reason = None if is_its_answer else _reason(state.get("error"), status)
            if reason is not None:
                self._metrics.count_refusal(reason)
            seconds = time.monotonic() - start
            try:
                if scope["path"] not in _QUIET or reason is not None:
                    _log(scope, state, request_id.decode(), status, reason, seconds)
                if self._tracing is not None:
                    self._tracing.record_span(scope, request_id.decode(), status, seconds, reason, state["audit"])
            except Exception as error:  # noqa: BLE001 - the answer is complete
                log_fault(request_id.decode(), "its log line and its trace were written", error)
            logs.request_id.reset(about)


def _request_id(scope: Scope) -> bytes:
    given = [value for name, value in scope["headers"] if name == b"x-request-id"]
    return given[0] if len(given) == 1 and _ID.fullmatch(given[0]) else new_id().encode()


def audit_bad_input(metrics: Metrics, client: tuple[str, int] | None, error: HttpError) -> None:
    """Count and log input that is not HTTP."""
    metrics.count_answer("other", "none", error.status)
    metrics.count_refusal(error.reason)
    scope = {"client": client, "method": None, "path": ""}
    _log(scope, {"audit": {}}, new_id(), error.status, error.reason, 0.0)


def _reason(error: HttpError | None, status: int) -> str | None:
    if error is not None:
        return error.reason
    return reason_of(status) if status >= 400 and status != CLIENT_DISCONNECTED else None


def _log(scope: Scope, state: dict[str, Any], request_id: str, status: int, reason: str | None, seconds: float) -> None:
    if not logger.isEnabledFor(logging.INFO):
        return
    client, tenant, details = scope.get("client"), state.get("tenant"), dict(state["audit"])
    if reason is not None:
        details["error"] = reason
    if (usage := details.pop("usage", None)) is not None:
        details |= usage.summary()
    line = logs.Fields(
        {
            "request_id": request_id,
            "client": client[0] if client else None,
            "key": tenant.name if tenant else None,
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": status,
            "seconds": round(seconds, 4),
            **details,
        }
    )
    logger.info(line)
