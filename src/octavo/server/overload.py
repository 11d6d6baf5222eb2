"""The door: each request is counted as its headers come, and who cannot be let in hears so before its body is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.errors import OctavoError
from octavo.server.errors import to_http
from octavo.server.tgi import error_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from octavo.server.service import Service

# What takes a place (`octavo.server.admission.Place`).
_OPENAI = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"})
_TGI = frozenset({"/generate", "/generate_stream", "/"})
_TOKENIZING = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens"})
_COUNTED = _OPENAI | _TGI | _TOKENIZING | {"/v1/messages"}


class OverloadMiddleware:
    """Counts requests, also those whose bodies never come, and refuses those that would not even get one place.

    That costs a fraction of a route, which asks again, for as many places as the request has streams.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may have room."""
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in _COUNTED:
            try:
                self._service.begin(scope["state"]["tenant"])
            except OctavoError as error:
                refusal, path = to_http(error), scope["path"]
                response = error_response(refusal) if path in _TGI else refusal.response(path)
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)
