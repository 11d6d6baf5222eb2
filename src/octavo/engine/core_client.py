"""The interface of a core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from octavo.data.capacity import EngineCapacity
    from octavo.data.metrics import EngineStats
    from octavo.data.request import Request, RequestStatus
    from octavo.data.snapshot import Snapshot
    from octavo.engine.engine_core import EngineCore
    from octavo.errors import EngineDeadError, OctavoError
    from octavo.outputs import EngineCoreOutput

    Answer: TypeAlias = Callable[[OctavoError | None], None]
    """Called once per added request: with None once it is queued, or with the error that refuses it."""


class CoreClient(Protocol):
    """A core in this process or another. Only `wake` and the properties are thread-safe.

    A request is answered once. If accepted, it ends once, by outputs of its streams or by `on_lost`.
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
        """Restarts so far."""
        ...

    @property
    def num_failed_starts(self) -> int:
        """Consecutive processes that ended before they were ready."""
        ...

    @property
    def retry_after_s(self) -> float:
        """Estimated seconds until the core is ready again."""
        ...

    def on_lost(self, lose: Callable[[EngineDeadError], None]) -> None:
        """Call `lose` each time the core dies, after unanswered requests were refused."""
        ...

    def add_request(self, request_id: str, streams: Sequence[Request], answer: Answer) -> None:
        """Add all streams of a request, or none. May call `answer` immediately."""
        ...

    def finish_requests(self, stream_ids: Sequence[str], status: RequestStatus) -> None:
        """End known streams. Only aborted streams have a last output: the engine itself decides on other ends."""
        ...

    def has_work(self) -> bool:
        """Return True if `step` would do anything."""
        ...

    def step(self) -> list[EngineCoreOutput]:
        """Return new outputs. A core in this process computes a step."""
        ...

    def wait(self) -> None:
        """Block until there is work, an answer or a `wake`, for at most a second."""
        ...

    def wake(self) -> None:
        """End the current or next `wait`. Thread-safe."""
        ...

    def watch(self, listener: Callable[[Snapshot], None] | None) -> None:
        """Report events to a listener a few times a second, or stop if it is None."""
        ...

    def finish_transfers(self) -> None:
        """Wait until the KV of ended requests is saved. A core in its own process saves it without this call."""
        ...

    def shutdown(self) -> None:
        """Refuse unanswered requests, and free all resources. May be repeated."""
        ...
