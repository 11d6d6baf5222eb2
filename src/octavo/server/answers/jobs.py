"""Jobs, and protocols of replies."""

from __future__ import annotations

import time
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from starlette.responses import Response

from octavo.data.request_options import NO_OPTIONS
from octavo.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo.data.request_options import RequestOptions
    from octavo.engine.input_processor import ProcessedInput
    from octavo.http.errors import HttpError
    from octavo.http.limiter import Permit
    from octavo.outputs import CompletionOutput, RequestOutput
    from octavo.sampling_params import SamplingParams
    from octavo.server.answers.usage import Usage

encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class StreamForm:
    """How a stream is sent. keep_alive: Bytes that an idle stream sends. Clients ignore these bytes."""

    media_type: str
    keep_alive: bytes


EVENTS = StreamForm("text/event-stream", b": still at work\n\n")
LINES = StreamForm("application/x-ndjson", b" ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A client's request that the server answers.

    place: Permit that the job holds until the answer ends.
    deadline: Time in seconds on the event loop's clock.
    counts_completions: False to omit generated tokens from the usage.
    client_names: Maps the engine's field names to the client's field names.
    check: Called with each tokenized prompt. May raise `RequestError`.
    """

    request_id: str
    model: str
    prompts: list[Any]
    params: SamplingParams
    place: Permit
    deadline: float
    stream: bool = False
    form: StreamForm = EVENTS
    include_usage: bool = False
    continuous_usage: bool = False
    counts_completions: bool = True
    options: RequestOptions = NO_OPTIONS
    created: int = field(default_factory=lambda: int(time.time()))
    client_names: dict[str, str] = field(default_factory=dict)
    check: Callable[[ProcessedInput], None] | None = None

    def __post_init__(self) -> None:
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        params = copy(self.params)  # `replace` would repeat the checks
        params.output_kind = kind
        object.__setattr__(self, "params", params)

    @property
    def request_ids(self) -> list[str]:
        """One id per prompt."""
        count = len(self.prompts)
        return [self.request_id] if count == 1 else [f"{self.request_id}-{index}" for index in range(count)]


@dataclass(slots=True)  # `frozen` would double the creation time
class ChoiceUpdate:
    """New output of one choice. choice: Index among the choices of all prompts."""

    choice: int
    is_first: bool
    completion: CompletionOutput
    output: RequestOutput


class WholeReply(Protocol):
    """Writes complete responses."""

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> msgspec.Struct | Sequence[msgspec.Struct]:
        """Return the response. outputs: One complete output for each prompt, in order."""
        ...


class Reply(WholeReply, Protocol):
    """Writes complete responses and streams."""

    def update(self, update: ChoiceUpdate, usage: Usage | None) -> bytes:
        """Return the events for an update, or b"". usage: Token counts to include, or None."""
        ...

    def end(self, usage: Usage) -> bytes:
        """Return the last events of a complete stream."""
        ...

    def error(self, error: HttpError) -> bytes:
        """Return the last events of a failed stream."""
        ...


def event(data: Any, kind: str | None = None) -> bytes:
    """Encode a server-sent event."""
    return (b"" if kind is None else f"event: {kind}\n".encode()) + b"data: " + encoder.encode(data) + b"\n\n"


def line(data: Any) -> bytes:
    """Encode one line."""
    return encoder.encode(data) + b"\n"


def json_response(reply: Any) -> Response:
    """Return a JSON response. Encodes on the event loop."""
    return Response(encoder.encode(reply), media_type="application/json")
