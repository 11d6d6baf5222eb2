"""What is to be answered, and how an API spells what comes of it."""

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
    """How a stream is sent. keep_alive: what is sent where nothing is told for long, and tells a client nothing."""

    media_type: str
    keep_alive: bytes


EVENTS = StreamForm("text/event-stream", b": still at work\n\n")
LINES = StreamForm("application/x-ndjson", b" ")  # a blank before the next line, which is JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be answered. `model` is the name to answer under, `place` what it holds until it is.

    counts_completions: whether tokens of answers count as such; of prompts that are only scored there are none.
    deadline: on the clock of the event loop. spelled: the engine's name of a parameter -> the one that the client used.
    check: called with each prompt once it is tokenized; raises `RequestError` to refuse it.
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
        params = copy(self.params)  # which were checked when they were made
        params.output_kind = kind
        object.__setattr__(self, "params", params)

    @property
    def request_ids(self) -> list[str]:
        """The engine's id for the request of each prompt."""
        count = len(self.prompts)
        return [self.request_id] if count == 1 else [f"{self.request_id}-{index}" for index in range(count)]


@dataclass(slots=True)  # frozen, it would take twice as long to make: there is one for each token
class ChoiceUpdate:
    """News of one choice: `completion` holds its new text and tokens. `choice` counts over all prompts."""

    choice: int
    is_first: bool
    completion: CompletionOutput
    output: RequestOutput


class WholeReply(Protocol):
    """How one API spells outputs when all of them are there."""

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> msgspec.Struct | Sequence[msgspec.Struct]:
        """Return the whole answer; there is one output for each prompt."""
        ...


class Reply(WholeReply, Protocol):
    """How one API spells outputs: whole, or as the events of a stream."""

    def update(self, update: ChoiceUpdate, usage: Usage | None) -> bytes:
        """Return the events of some update; none where they tell a client nothing. usage: if counts go with each."""
        ...

    def end(self, usage: Usage) -> bytes:
        """Return the last events."""
        ...

    def error(self, error: HttpError) -> bytes:
        """Return the last events of a stream that fails."""
        ...


def event(data: Any, kind: str | None = None) -> bytes:
    """Spell a server-sent event."""
    return (b"" if kind is None else f"event: {kind}\n".encode()) + b"data: " + encoder.encode(data) + b"\n\n"


def line(data: Any) -> bytes:
    """Spell an event of a stream of lines."""
    return encoder.encode(data) + b"\n"


def json_response(told: Any) -> Response:
    """Answer with an object that is small."""
    return Response(encoder.encode(told), media_type="application/json")
