"""The interface between an engine and its core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    from octavo.data.capacity import EngineCapacity
    from octavo.data.metrics import EngineStats
    from octavo.data.request import Request, RequestStatus
    from octavo.data.snapshot import Snapshot
    from octavo.engine.engine_core import EngineCore
    from octavo.errors import EngineDeadError, OctavoError
    from octavo.outputs import EngineCoreOutput

    Answer: TypeAlias = Callable[[OctavoError | None], None]
    """Called once per added request: with None if the core accepts it, otherwise with an error."""


class CoreClient(Protocol):
    """A client of a core in this process or another one. Only `wake` and the properties are thread-safe.

    `step` returns an accepted request's outputs until all its output streams have ended. If the core dies earlier, the
    callback of `on_lost` is called.
    """

    @property
    def core(self) -> EngineCore:
        """The core. Raises `EngineError` if it is in another process."""
        ...

    @property
    def capacity(self) -> EngineCapacity:
        """The core's limits."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The core's counters."""
        ...

    @property
    def is_ready(self) -> bool:
        """True if requests can be added."""
        ...

    @property
    def num_restarts(self) -> int:
        """Number of restarts."""
        ...

    @property
    def rank_failures(self) -> Mapping[int, int]:
        """Number of failures by rank."""
        ...

    @property
    def num_failed_starts(self) -> int:
        """Number of consecutive starts that failed."""
        ...

    @property
    def retry_after_s(self) -> float:
        """Estimated seconds until the core is ready again."""
        ...

    def on_lost(self, lose: Callable[[EngineDeadError], None]) -> None:
        """Register `lose`. When the core dies, unanswered requests are refused, and then `lose` is called."""
        ...

    def add_request(self, request_id: str, streams: Sequence[Request], answer: Answer) -> None:
        """Add all streams of a request, or none. May call `answer` immediately."""
        ...

    def finish_requests(self, stream_ids: Sequence[str], status: RequestStatus) -> None:
        """End streams. Unknown ids are ignored. `step` returns a last output only for aborted streams."""
        ...

    def has_work(self) -> bool:
        """Return True if `step` would do anything."""
        ...

    def step(self) -> list[EngineCoreOutput]:
        """Return new outputs. If the core runs in this process, compute a step."""
        ...

    def wait(self) -> None:
        """Block until `wake` is called, work or an answer arrives, or a second has passed."""
        ...

    def wake(self) -> None:
        """End the current or next `wait`. Thread-safe."""
        ...

    def watch(self, listener: Callable[[Snapshot], None] | None) -> None:
        """Report events to a listener a few times a second. None: end the reports.

        The first reports are of the newest events before this call.
        """
        ...

    def finish_transfers(self) -> None:
        """Wait until the KV of ended requests is saved. A core in another process saves KV without this call."""
        ...

    def shutdown(self) -> None:
        """Refuse unanswered requests, and free all resources. May be called again."""
        ...
