"""A request to answer, and the protocols by which an API writes its answer."""

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
    """How a stream is sent. keep_alive: bytes without meaning, sent when there was no event for a long time."""

    media_type: str
    keep_alive: bytes


EVENTS = StreamForm("text/event-stream", b": still at work\n\n")
LINES = StreamForm("application/x-ndjson", b" ")  # a blank before the next line, which is JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request to answer.

    model: the name in the answer. place: the permit that the job holds until it is answered.
    counts_completions: whether generated tokens count as completion tokens; prompts that are only scored have none.
    deadline: on the clock of the event loop. spelled: the engine's name of a parameter -> the client's name of it.
    check: called with each prompt after it is tokenized; raises `RequestError` to refuse it.
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
    spelled: dict[str, str] = field(default_factory=dict)
    check: Callable[[ProcessedInput], None] | None = None

    def __post_init__(self) -> None:
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        params = copy(self.params)  # skips the checks, which passed when `params` was made
        params.output_kind = kind
        object.__setattr__(self, "params", params)

    @property
    def request_ids(self) -> list[str]:
        """The engine's id for the request of each prompt."""
        count = len(self.prompts)
        return [self.request_id] if count == 1 else [f"{self.request_id}-{index}" for index in range(count)]


@dataclass(slots=True)  # not frozen: that would double the time to create one, and there is one for each token
class ChoiceUpdate:
    """New text and tokens of one choice, in `completion`. choice: the index over all prompts."""

    choice: int
    is_first: bool
    completion: CompletionOutput
    output: RequestOutput


class WholeReply(Protocol):
    """How one API writes complete outputs."""

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> msgspec.Struct | Sequence[msgspec.Struct]:
        """Return the whole answer; there is one output for each prompt."""
        ...


class Reply(WholeReply, Protocol):
    """How one API writes outputs: whole, or as the events of a stream."""

    def update(self, update: ChoiceUpdate, usage: Usage | None) -> bytes:
        """Return the events of an update; b"" if the client needs none. usage: None if events have no counts."""
        ...

    def end(self, usage: Usage) -> bytes:
        """Return the last events."""
        ...

    def error(self, error: HttpError) -> bytes:
        """Return the last events of a stream that fails."""
        ...


def event(data: Any, kind: str | None = None) -> bytes:
    """Encode a server-sent event."""
    return (b"" if kind is None else f"event: {kind}\n".encode()) + b"data: " + encoder.encode(data) + b"\n\n"


def line(data: Any) -> bytes:
    """Encode an event of a stream of lines."""
    return encoder.encode(data) + b"\n"


def json_response(told: Any) -> Response:
    """Return a response with a small object, which is encoded in the event loop."""
    return Response(encoder.encode(told), media_type="application/json")
