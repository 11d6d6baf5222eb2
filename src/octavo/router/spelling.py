"""How the API of a path ends a stream, and spells errors: as a whole answer, or at the end of a stream."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from octavo.server.access.routes import TGI_ROUTES

if TYPE_CHECKING:
    from starlette.responses import Response

    from octavo.server.errors import HttpError

_END = b"\n\n"
# How the last event of a stream that is whole begins; TGI's is one token's like others, but tells of the whole text.
_LAST_EVENTS = {
    "/v1/messages": re.compile(rb"event: (?:message_stop|error)\n"),
    "/v1/responses": re.compile(rb"event: (?:response\.(?:completed|incomplete|failed)|error)\n"),
}
_LAST_OF_TGI = re.compile(rb'data: ?(?:\{"error"|.*(?<!\\)"details":\s*\{)')
_LAST = re.compile(rb"data: \[DONE\]")


class _Line(msgspec.Struct):
    """One of Ollama's."""

    done: bool = False
    error: str | None = None


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


def is_last_event(events: bytes, path: str) -> bool:
    """Whether a stream is over with the last of these events, each of them whole."""
    if path.startswith("/api/"):
        return _is_last_line(events.rstrip(b"\n").rpartition(b"\n")[2])
    last = events.removesuffix(_END).rpartition(_END)[2]
    return (_LAST_OF_TGI if path in TGI_ROUTES else _LAST_EVENTS.get(path, _LAST)).match(last) is not None


def _is_last_line(text: bytes) -> bool:
    try:
        line = msgspec.json.decode(text, type=_Line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return line.done or line.error is not None


def _event(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
