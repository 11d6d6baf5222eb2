"""HTTP errors."""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from octavo.errors import (
    DeadlineError,
    EngineDeadError,
    EngineError,
    EngineRestartingError,
    OctavoError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    RequestFailedError,
    SlowReaderError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from starlette.types import Receive, Scope, Send

CLIENT_DISCONNECTED = 499
PAGES = ("/dashboard", "/router")


class RateLimitError(QueueFullError):
    """Key limit reached."""


class SlowBodyError(RequestError):
    """Body timed out."""


class AuthenticationError(RequestError):
    """No valid key."""


class NotAllowedError(RequestError):
    """Action not permitted."""


class ModelNotFoundError(RequestError):
    """No such model."""


class NotFoundError(RequestError):
    """No such object."""


class BodyTooLargeError(RequestError):
    """Body too large."""


class MediaTypeError(RequestError):
    """Content-Type not JSON."""


class ServerClosingError(EngineError):
    """Server shutting down."""


class NoEngineError(EngineError):
    """No engine ready."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("no engine is ready")
        self.retry_after_s = retry_after_s


class EngineLostError(EngineError):
    """The engine that served a request is gone."""

    def __init__(self) -> None:
        super().__init__("the engine is lost")


class EngineTimeoutError(EngineLostError):
    """An engine did not begin or continue its answer in time."""


class EngineAnswerError(EngineLostError):
    """An engine's answer is invalid or too large."""


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error in OpenAI's format, with its HTTP status."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after_s: float = 1.0
    details: Mapping[str, Any] | None = None

    @property
    def reason(self) -> str:
        """The metrics label."""
        return self.code or reason_of(self.status)

    @property
    def headers(self) -> dict[str, str]:
        """The response headers."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        if self.status in {408, 413}:
            return {"Connection": "close"}  # the body is not read
        if self.status == 504:
            return {"x-should-retry": "false"}  # OpenAI's clients would retry immediately
        return {"Retry-After": str(math.ceil(self.retry_after_s))} if self.status in {429, 503} else {}


class ErrorResponse(Response):
    """A response that stores its error in the request's state."""

    media_type = "application/json"

    def __init__(self, error: HttpError, content: bytes, status: int, headers: dict[str, str]) -> None:
        super().__init__(content, status, headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        note_error(scope.setdefault("state", {}), self._error)
        await super().__call__(scope, receive, send)


def note_error(state: dict[str, Any], error: HttpError) -> HttpError:
    """Store a request's first error in `state`. Return the stored error."""
    noted: HttpError = state.setdefault("error", error)
    return noted


def reason_of(status: int) -> str:
    """Return a name like bad_request."""
    try:
        return HTTPStatus(status).phrase.lower().replace(" ", "_")
    except ValueError:  # engines may answer with any status
        return f"status_{status}"


# Rows: exception, status, type, code, message. The first match is used. A message replaces the exception's text, which
# may contain paths or addresses.
_INVALID, _SERVER = "invalid_request_error", "server_error"
_TABLE: tuple[tuple[type[OctavoError], int, str, str | None, str | None], ...] = (
    (PromptTooLongError, 400, _INVALID, "context_length_exceeded", None),
    (RateLimitError, 429, "rate_limit_error", "rate_limit_exceeded", None),
    (QueueFullError, 429, "rate_limit_error", "queue_full", None),
    (AuthenticationError, 401, _INVALID, "invalid_api_key", None),
    (NotAllowedError, 403, _INVALID, "not_allowed", None),
    (ModelNotFoundError, 404, _INVALID, "model_not_found", None),
    (NotFoundError, 404, _INVALID, "not_found", None),
    (BodyTooLargeError, 413, _INVALID, "request_too_large", None),
    (MediaTypeError, 415, _INVALID, "unsupported_media_type", None),
    (SlowBodyError, 408, _INVALID, "request_too_slow", None),
    (SlowReaderError, 400, _INVALID, "read_too_slowly", None),
    (RequestError, 400, _INVALID, None, None),
    (ServerClosingError, 503, _SERVER, "server_closing", "the server is shutting down; try again in a moment"),
    (EngineRestartingError, 503, _SERVER, "engine_restarting", "the engine hangs or restarts; try again in a moment"),
    (NoEngineError, 503, _SERVER, "no_engine", "no engine can accept this request now; try again in a moment"),
    (EngineTimeoutError, 504, _SERVER, "engine_timeout", "the engine did not answer this request in time"),
    (EngineAnswerError, 502, _SERVER, "bad_engine_answer", "the engine's answer cannot be read; see the router's log"),
    (EngineLostError, 503, _SERVER, "engine_lost", "the engine that served this request was lost; try again"),
    (DeadlineError, 504, _SERVER, "request_timeout", None),
    (RequestFailedError, 500, _SERVER, "request_failed", None),
    (EngineDeadError, 503, _SERVER, "engine_dead", "the engine has stopped; restart the server"),
)


def to_http(error: Exception) -> HttpError:
    """Return the HTTP error for any exception."""
    for kind, status, type_, code, message in _TABLE:
        if isinstance(error, kind):
            parameter, retry = getattr(error, "parameter", None), getattr(error, "retry_after_s", 1.0)
            details: Mapping[str, Any] | None = getattr(error, "details", None)
            return HttpError(status, message or str(error), type_, parameter, code, retry, details)
    return HttpError(500, "the server failed to serve this request; see its log", _SERVER)


@contextlib.contextmanager
def client_field_names(names: Mapping[str, str], *, in_text: bool = False) -> Iterator[None]:
    """Rename the field of a `RequestError` that the block raises.

    names: Maps octavo's field names to the client's.
    in_text: True to also rename this field and all fields with an underscore in the message.
    """
    try:
        yield
    except RequestError as error:
        engine_field, text = error.parameter or "", str(error)
        if engine_field in names:
            error.parameter = name = names[engine_field]
            text = text.replace(engine_field, name, 1) if engine_field in text else f"{name}: {text}"
        for other, name in names.items():
            if other != engine_field and "_" in other:
                text = re.sub(rf"\b{other}\b", name, text)
        if in_text:
            error.args = (text,)
        raise
