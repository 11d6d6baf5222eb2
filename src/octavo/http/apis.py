"""The client APIs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.http.errors import PAGES, ErrorResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from octavo.http.errors import HttpError


class _LastToken(msgspec.Struct):
    error: Any = None
    details: Any = None
    done: Any = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Api:
    """Formats of a client API.

    below: Path prefix. Errors for unknown paths with this prefix have this API's format.
    event: Returns the last event of a stream that fails.
    last_event: Matches the event that ends a stream. If None, this event has a true field of `_LastToken`.
    statuses: Maps an HTTP status to this API's status.
    any_type: True if any Content-Type is accepted.
    lines: True if each event is a line of JSON.

    Only the router reads these fields:

    limits: Request fields that limit the output tokens. "a.b" means field b of object a.
    counted: Answer field that contains or precedes the token counts.
    """

    name: str
    below: str = ""
    error: Callable[[HttpError], Mapping[str, Any]]
    event: Callable[[HttpError], bytes]
    last_event: re.Pattern[bytes] | None = None
    statuses: Mapping[int, int] = field(default_factory=dict)
    any_type: bool = False
    lines: bool = False
    prompt: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    counted: str = "usage"
    prompt_counts: tuple[str, ...] = ()
    answer_counts: tuple[str, ...] = ()

    def response(self, error: HttpError) -> ErrorResponse:
        """Make a response."""
        status = self.statuses.get(error.status, error.status)
        return ErrorResponse(error, msgspec.json.encode(self.error(error)), status, error.headers)

    def is_last(self, event: bytes) -> bool:
        """Return True if an event ends a stream."""
        if self.last_event is not None:
            return self.last_event.match(event) is not None
        try:
            token = msgspec.json.decode(event.removeprefix(b"data:"), type=_LastToken)
        except msgspec.MsgspecError:
            return False
        return any((token.error, token.details, token.done))


def _event(body: object, kind: str = "") -> bytes:
    return (f"event: {kind}\n".encode() if kind else b"") + b"data: " + msgspec.json.encode(body) + b"\n\n"


def _openai_error(error: HttpError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def _responses_event(error: HttpError) -> bytes:
    fields = {"code": error.code or error.type, "message": error.message, "param": error.param}
    return _event({"type": "error", **fields, "sequence_number": 0}, "error")


_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _anthropic_error(error: HttpError) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": _ANTHROPIC_TYPES.get(error.status, "api_error"), "message": error.message}
    if error.details is not None:
        fields["details"] = error.details
    return {"type": "error", "error": fields}


_TGI_TYPES = {400: "validation", 413: "validation", 429: "overloaded"}


def _tgi_error(error: HttpError) -> dict[str, str]:
    return {"error": error.message, "error_type": _TGI_TYPES.get(error.status, "generation")}


def _ollama_error(error: HttpError) -> dict[str, str]:
    return {"error": error.message}


OPENAI = Api(
    name="OpenAI",
    error=_openai_error,
    event=lambda error: _event(_openai_error(error)) + b"data: [DONE]\n\n",
    last_event=re.compile(rb"data: \[DONE\]"),
    prompt=("tools", "messages", "prompt"),
    limits=("max_tokens", "max_completion_tokens"),
    prompt_counts=("prompt_tokens",),
    answer_counts=("completion_tokens",),
)
RESPONSES = replace(
    OPENAI,
    event=_responses_event,
    last_event=re.compile(rb"event: (?:response\.(?:completed|incomplete|failed)|error)\r?\n"),
    prompt=("tools", "instructions", "input"),
    limits=("max_output_tokens",),
    prompt_counts=("input_tokens",),
    answer_counts=("output_tokens",),
)
ANTHROPIC = Api(
    name="Anthropic",
    below="/v1/messages",
    error=_anthropic_error,
    event=lambda error: _event(_anthropic_error(error), "error"),
    last_event=re.compile(rb"event: (?:message_stop|error)\r?\n"),
    prompt=("tools", "system", "messages"),
    limits=("max_tokens",),
    prompt_counts=("input_tokens",),
    answer_counts=("output_tokens",),
)
TGI = Api(
    name="TGI",
    error=_tgi_error,
    event=lambda error: _event(_tgi_error(error)),
    statuses={400: 422},
    prompt=("inputs",),
    limits=("parameters.max_new_tokens",),
    counted="details",
    prompt_counts=("prefill_tokens", "input_length"),
    answer_counts=("generated_tokens",),
)
OLLAMA = Api(
    name="Ollama",
    below="/api/",
    error=_ollama_error,
    event=lambda error: msgspec.json.encode(_ollama_error(error)) + b"\n",
    any_type=True,  # `curl -d` sends the Content-Type of a form
    lines=True,
    prompt=("tools", "system", "messages", "prompt"),
    limits=("num_predict", "options.num_predict"),
    counted="total_duration",
    prompt_counts=("prompt_eval_count",),
    answer_counts=("eval_count",),
)
SGLANG, OPERATOR = replace(OPENAI, name="SGLang"), replace(OPENAI, name="operator")
# The router joins a request's prompt fields in the order of this list.
APIS = (RESPONSES, ANTHROPIC, OPENAI, OLLAMA, TGI)
OLLAMA_TAG = ":latest"  # Ollama's clients append it to model names


def api_below(path: str) -> Api:
    """Return the API of a path by its prefix, or `OPENAI`."""
    return next((api for api in APIS if api.below and path.startswith(api.below)), OPENAI)


def error_response(error: HttpError, path: str) -> ErrorResponse:
    """Return an error response in the format of the path's API."""
    response = api_below(path).response(error)
    if error.status == 401 and path.startswith(PAGES):
        response.headers["WWW-Authenticate"] = (
            'Basic realm="octavo: any name, and an API key as password", charset="UTF-8"'
        )
    return response
