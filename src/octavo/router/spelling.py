"""Errors as the API of a path spells them, as a whole answer or at the end of a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from octavo.server.access.routes import TGI_ROUTES

if TYPE_CHECKING:
    from starlette.responses import Response

    from octavo.server.errors import HttpError


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


def _event(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
