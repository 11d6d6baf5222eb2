"""How the API of a path ends a stream, and spells errors: as a whole answer, or at the end of a stream."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.http.routes import TGI_ROUTES

if TYPE_CHECKING:
    from starlette.responses import Response

    from octavo.http.errors import HttpError

# How the last event of a stream that is whole begins.
_LAST_EVENTS = {
    "/v1/messages": re.compile(rb"event: (?:message_stop|error)\r?\n"),
    "/v1/responses": re.compile(rb"event: (?:response\.(?:completed|incomplete|failed)|error)\r?\n"),
}
_LAST_EVENT = re.compile(rb"data: \[DONE\]")


class _Token(msgspec.Struct):
    """What tells the last of TGI's events, and of Ollama's lines, from the others, which are of tokens like it."""

    error: Any = None
    details: Any = None
    done: Any = None


def error_response(error: HttpError, path: str) -> Response:
    """Return a whole answer."""
    return error.tgi_response() if path in TGI_ROUTES else error.response(path)


def error_event(error: HttpError, path: str) -> bytes:
    """Return the last event of a stream that others have begun."""
    if path in TGI_ROUTES:
        return _event(error.tgi_body)
    if path.startswith("/api/"):
        return msgspec.json.encode(error.ollama_body) + b"\n"
    if path == "/v1/messages":
        return b"event: error\n" + _event(error.anthropic_body)
    if path == "/v1/responses":
        fields = {"code": error.code or error.type, "message": error.message, "param": error.param}
        return b"event: error\n" + _event({"type": "error", **fields, "sequence_number": 0})
    return _event(error.body) + b"data: [DONE]\n\n"


def is_last_event(event: bytes, path: str) -> bool:
    """Whether a stream is over with an event, which is whole."""
    if path in TGI_ROUTES or path.startswith("/api/"):
        try:
            token = msgspec.json.decode(event.removeprefix(b"data:"), type=_Token)
        except msgspec.MsgspecError:
            return False
        return any((token.error, token.details, token.done))
    return _LAST_EVENTS.get(path, _LAST_EVENT).match(event) is not None


def _event(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
