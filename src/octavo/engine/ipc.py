"""What an engine process and the process it serves say to each other: msgpack, typed, and never pickle.

One direction has the requests, the other the news. Each start of an engine has sockets of its own, so nothing that an
earlier one said can be taken for the words of this one.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.config import EngineConfig  # noqa: TC001
from octavo.data.capacity import EngineCapacity  # noqa: TC001 - msgspec reads these types
from octavo.data.events import EVENT_TYPES, Event
from octavo.data.metrics import EngineStats  # noqa: TC001
from octavo.data.request import Request, RequestStatus
from octavo.data.request_options import RequestOptions  # noqa: TC001
from octavo.data.snapshot import BlockMap, Snapshot
from octavo.errors import (
    ConfigError,
    EngineDeadError,
    FingerprintError,
    ModelError,
    OctavoError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    RequestFailedError,
)
from octavo.outputs import EngineCoreOutput  # noqa: TC001
from octavo.sampling_params import SamplingParams  # noqa: TC001
from octavo.structured_output.grammars import GrammarError

if TYPE_CHECKING:
    from collections.abc import Sequence

_FOLDER, _SHARED_MEMORY = "octavo-", "/dev/shm"  # noqa: S108 - only for names that nobody can guess
_ERRORS: dict[str, type[OctavoError]] = {
    kind.__name__: kind
    for kind in (
        ConfigError,
        ModelError,
        RequestError,
        PromptTooLongError,
        QueueFullError,
        GrammarError,
        RequestFailedError,
        EngineDeadError,
        FingerprintError,
    )
}


class Launch(msgspec.Struct, frozen=True):
    """The first line on an engine process's standard input, as JSON: what to build, and where to talk."""

    config: EngineConfig
    requests_endpoint: str
    outputs_endpoint: str
    log_level: int = 30
    log_format: str = "text"


class Stream(msgspec.Struct, frozen=True):
    """One output stream of a request: what a `Request` has beside the prompt and the prediction."""

    request_id: str
    sampling_params: SamplingParams
    options: RequestOptions
    arrival_time: float
    seed: int
    sample_index: int
    stop_token_ids: frozenset[int]
    deadline: float | None


class Add(msgspec.Struct, frozen=True, tag=True):
    """A request with all its streams; answered by `Accepted` or `Refused`. Times are those of CLOCK_MONOTONIC."""

    request_id: str
    prompt_token_ids: list[int]
    predicted_token_ids: list[int] | None
    streams: list[Stream]

    @classmethod
    def of(cls, request_id: str, requests: Sequence[Request]) -> Add:
        """Take down the core's requests of one user's request."""
        fields = [name for name in Stream.__struct_fields__ if name != "request_id"]
        streams = [Stream(r.request_id, *(getattr(r, name) for name in fields)) for r in requests]
        first = requests[0]
        return cls(request_id, first.sequence.prompt_token_ids, first.predicted_token_ids, streams)

    def to_requests(self) -> list[Request]:
        """Return them as the core wants them; what form their answers must have is one object, as it was asked for."""
        requests = []
        wanted = self.streams[0].sampling_params.structured_outputs
        for stream in self.streams:
            stream.sampling_params.structured_outputs = wanted
            fields = {name: getattr(stream, name) for name in Stream.__struct_fields__}
            fields["predicted_token_ids"] = self.predicted_token_ids
            requests.append(Request(fields.pop("request_id"), self.prompt_token_ids, **fields))
        return requests


class Finish(msgspec.Struct, frozen=True, tag=True):
    """End streams now, with a terminal status. Unknown ones are passed over."""

    stream_ids: list[str]
    status: RequestStatus


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Tell what happens from now on, and what is still known of the past; or tell no more."""

    is_on: bool


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the process."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Bytes of weights that are packed, of so many."""

    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine takes requests, and so much at once."""

    capacity: EngineCapacity


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not be built; kind: the name of an error of `octavo.errors`."""

    kind: str
    message: str


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """A request is in the queue."""

    request_id: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request cannot be served; nothing of it is kept."""

    request_id: str
    kind: str
    message: str
    parameter: str | None


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """What a step, or an ending from outside, means for streams."""

    outputs: list[EngineCoreOutput]


class Report(msgspec.Struct, frozen=True, tag=True):
    """What the engine can be measured by, so far."""

    stats: EngineStats


class Seen(msgspec.Struct, frozen=True, tag=True):
    """A `Snapshot` on its way: each event with the name of its type."""

    events: list[tuple[str, msgspec.Raw]]
    is_first: bool
    blocks: BlockMap | None

    @classmethod
    def of(cls, snapshot: Snapshot) -> Seen:
        """Take it down."""
        told = [(type(event).__name__, msgspec.Raw(encode(event))) for event in snapshot.events]
        return cls(told, snapshot.is_first, snapshot.blocks)

    def to_snapshot(self) -> Snapshot:
        """Return it as it was."""
        read = [_EVENT_DECODERS[name].decode(event) for name, event in self.events]
        return Snapshot(read, self.is_first, self.blocks)


class Alive(msgspec.Struct, frozen=True, tag=True):
    """The process runs.

    progress: grows with each step that computed tokens or ended a request, and as long as there is nothing to do.
    """

    progress: int


DecodeError = msgspec.DecodeError
ToEngine = Add | Finish | Watch | Stop
ToParent = Loading | Ready | Failed | Accepted | Refused | Outputs | Report | Seen | Alive


class _Envelope(msgspec.Struct, tag="Add"):
    """What can be told of a request that cannot be read."""

    request_id: str


encode = msgspec.msgpack.Encoder().encode
_EVENT_DECODERS: dict[str, msgspec.msgpack.Decoder[Event]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind) for kind in EVENT_TYPES
}
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
_decode_envelope = msgspec.msgpack.Decoder(_Envelope).decode
decode_from_engine = msgspec.msgpack.Decoder(ToParent).decode


def request_id_of(data: bytes) -> str | None:
    """Return whose request this is, of a message that cannot be decoded; None for no request at all."""
    try:
        return _decode_envelope(data).request_id
    except DecodeError:
        return None


def make_folder() -> Path:
    """Make a folder for sockets that only this user can enter: below TMPDIR and the like, else in shared memory.

    Raises `ConfigError` if nothing of that is writable.
    """
    try:
        return Path(tempfile.mkdtemp(prefix=_FOLDER))
    except OSError:
        pass  # a container with a read-only file system often has shared memory
    try:
        return Path(tempfile.mkdtemp(prefix=_FOLDER, dir=_SHARED_MEMORY))
    except OSError as error:
        raise ConfigError(
            "no directory for temporary files can be written to (tried the one that TMPDIR names, /tmp, /var/tmp, "
            f"/usr/tmp, the current one and {_SHARED_MEMORY}), and the engine process needs one for its sockets "
            f"({error.strerror}); make one writable, or name another one in the environment variable TMPDIR"
        ) from error


def encode_launch(launch: Launch) -> bytes:
    """Return one line of JSON."""
    return msgspec.json.encode(launch, enc_hook=str) + b"\n"


def decode_launch(line: bytes) -> Launch:
    """Read that line."""
    return msgspec.json.decode(line, type=Launch, dec_hook=_decode_path)


def _decode_path(kind: type, value: Any) -> Any:
    return Path(value) if kind is Path else value


def refusal(request_id: str, error: OctavoError) -> Refused:
    """Return what tells of an error."""
    return Refused(request_id, type(error).__name__, str(error), getattr(error, "parameter", None))


def failure(error: BaseException) -> Failed:
    """Return what tells why an engine cannot be built; errors of no known kind come as those of a dead engine."""
    kind = type(error).__name__
    return Failed(kind, str(error)) if kind in _ERRORS else Failed("EngineDeadError", f"{kind}: {error}")


def error_of(message: Refused | Failed) -> OctavoError:
    """Return the error that a message tells of."""
    kind = _ERRORS.get(message.kind, EngineDeadError)
    if isinstance(message, Refused) and issubclass(kind, RequestError):
        return kind(message.message, parameter=message.parameter)
    return kind(message.message)
