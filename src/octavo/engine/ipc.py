"""Messages between an engine process and its parent, encoded as msgpack, never as pickle."""

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

_FOLDER, _SHARED_MEMORY = "octavo-", "/dev/shm"  # noqa: S108 - names that cannot be guessed
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
    """The first line on the engine process's standard input, as JSON."""

    config: EngineConfig
    requests_endpoint: str
    outputs_endpoint: str
    log_level: int = 30
    log_format: str = "text"


class StreamFields(msgspec.Struct, frozen=True):
    """The fields of a core `Request`, except the prompt and the predicted tokens."""

    request_id: str
    sampling_params: SamplingParams
    options: RequestOptions
    arrival_time: float
    seed: int
    sample_index: int
    stop_token_ids: frozenset[int]
    deadline: float | None


class Add(msgspec.Struct, frozen=True, tag=True):
    """Adds a request, which is answered by `Accepted` or `Refused`. Times are of CLOCK_MONOTONIC."""

    request_id: str
    prompt_token_ids: list[int]
    predicted_token_ids: list[int] | None
    streams: list[StreamFields]

    @classmethod
    def of(cls, request_id: str, requests: Sequence[Request]) -> Add:
        """Encode streams."""
        streams = [StreamFields(*(getattr(each, name) for name in StreamFields.__struct_fields__)) for each in requests]
        first = requests[0]
        return cls(request_id, first.sequence.prompt_token_ids, first.predicted_token_ids, streams)

    def to_requests(self) -> list[Request]:
        """Rebuild the core requests, which share `structured_outputs`."""
        requests = []
        wanted = self.streams[0].sampling_params.structured_outputs
        for stream in self.streams:
            stream.sampling_params.structured_outputs = wanted
            fields = {**msgspec.structs.asdict(stream), "predicted_token_ids": self.predicted_token_ids}
            requests.append(Request(prompt_token_ids=self.prompt_token_ids, **fields))
        return requests


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Ends streams. Ignores unknown ids."""

    stream_ids: list[str]
    status: RequestStatus


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Starts or stops `Seen` messages. The first messages are of the newest events before the start."""

    is_on: bool


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Ends the process."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Loading progress, in bytes of packed weights."""

    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Reports readiness."""

    capacity: EngineCapacity


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Reports a failed build, or an executor that cannot continue.

    kind: Name of the error's class. rank: See `OctavoError`.
    """

    kind: str
    message: str
    rank: int | None = None


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """Accepts a request."""

    request_id: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Refuses a request."""

    request_id: str
    kind: str
    message: str
    parameter: str | None


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """New outputs."""

    outputs: list[EngineCoreOutput]


class Report(msgspec.Struct, frozen=True, tag=True):
    """The engine's counters."""

    stats: EngineStats


class Seen(msgspec.Struct, frozen=True, tag=True):
    """Sends a snapshot. events: Pairs of an event type's name and the encoded event."""

    events: list[tuple[str, msgspec.Raw]]
    is_first: bool
    blocks: BlockMap | None

    @classmethod
    def of(cls, snapshot: Snapshot) -> Seen:
        """Encode a snapshot."""
        records = [(type(event).__name__, msgspec.Raw(encode(event))) for event in snapshot.events]
        return cls(records, snapshot.is_first, snapshot.blocks)

    def to_snapshot(self) -> Snapshot:
        """Decode the snapshot."""
        read = [_EVENT_DECODERS[name].decode(event) for name, event in self.events]
        return Snapshot(read, self.is_first, self.blocks)


class Alive(msgspec.Struct, frozen=True, tag=True):
    """A sign of life. progress: Counter that grows with useful steps and while idle."""

    progress: int


DecodeError = msgspec.DecodeError
ToEngine = Add | Finish | Watch | Stop
ToParent = Loading | Ready | Failed | Accepted | Refused | Outputs | Report | Seen | Alive


class _Envelope(msgspec.Struct, tag="Add"):
    request_id: str


encode = msgspec.msgpack.Encoder().encode
_EVENT_DECODERS: dict[str, msgspec.msgpack.Decoder[Event]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind) for kind in EVENT_TYPES
}
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
_decode_envelope = msgspec.msgpack.Decoder(_Envelope).decode
decode_from_engine = msgspec.msgpack.Decoder(ToParent).decode


def request_id_of(data: bytes) -> str | None:
    """Decode only the request id of an `Add`. Return None if the id is invalid."""
    try:
        return _decode_envelope(data).request_id
    except DecodeError:
        return None


def make_folder() -> Path:
    """Create a private folder for sockets. Raises `ConfigError`."""
    try:
        return Path(tempfile.mkdtemp(prefix=_FOLDER))
    except OSError:
        pass  # a read-only container can often write to shared memory
    try:
        return Path(tempfile.mkdtemp(prefix=_FOLDER, dir=_SHARED_MEMORY))
    except OSError as error:
        raise ConfigError(
            "no directory for temporary files can be written to (tried the one that TMPDIR names, /tmp, /var/tmp, "
            f"/usr/tmp, the current one and {_SHARED_MEMORY}), and the engine process needs one for its sockets "
            f"({error.strerror}); make one writable, or name another one in the environment variable TMPDIR"
        ) from error


def encode_launch(launch: Launch) -> bytes:
    """Encode a `Launch`."""
    return msgspec.json.encode(launch, enc_hook=str) + b"\n"


def decode_launch(line: bytes) -> Launch:
    """Read a `Launch`."""
    return msgspec.json.decode(line, type=Launch, dec_hook=_decode_path)


def _decode_path(kind: type, value: Any) -> Any:
    return Path(value) if kind is Path else value


def refusal(request_id: str, error: OctavoError) -> Refused:
    """Encode a refusal."""
    return Refused(request_id, type(error).__name__, str(error), getattr(error, "parameter", None))


def failure(error: BaseException) -> Failed:
    """Encode an error of the build or of the executor. Unknown classes become `EngineDeadError`."""
    kind, rank = type(error).__name__, error.rank if isinstance(error, OctavoError) else None
    if isinstance(error, EngineDeadError):
        return Failed("EngineDeadError", str(error), rank)
    return Failed(kind, str(error), rank) if kind in _ERRORS else Failed("EngineDeadError", f"{kind}: {error}", rank)


def error_of(message: Refused | Failed) -> OctavoError:
    """Decode an error. Unknown classes become `EngineDeadError`."""
    kind = _ERRORS.get(message.kind, EngineDeadError)
    if isinstance(message, Refused) and issubclass(kind, RequestError):
        return kind(message.message, parameter=message.parameter)
    error = kind(message.message)
    error.rank = message.rank if isinstance(message, Failed) else None
    return error
