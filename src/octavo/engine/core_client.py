"""The protocol between an engine and its core, which runs in this process or in another one.

Prompts, text, streams and readers are handled above it, independent of where the core runs. It is implemented by
`octavo.engine.local_core.LocalCore` and `octavo.engine.remote_core.RemoteCore`, and corresponds to vLLM's
`EngineCoreClient`.
"""

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
    """Called once for each added request: with None once it is in the queue, or with the error that refuses it."""


class CoreClient(Protocol):
    """A core as an engine uses it. One thread uses it, except for `wake`, `is_ready` and the descriptive properties.

    A request is answered once, ends once, and ends after its answer: by the outputs of its streams, or by `on_lost`.
    """

    @property
    def core(self) -> EngineCore:
        """The core object. Raises `EngineError` if it runs in another process."""
        ...

    @property
    def capacity(self) -> EngineCapacity:
        """Limits of the core: tokens, sequences, blocks."""
        ...

    @property
    def stats(self) -> EngineStats:
        """Counters of the core since its start."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether requests can be added now."""
        ...

    @property
    def num_restarts(self) -> int:
        """How often the process of the core was started again."""
        ...

    @property
    def num_failed_starts(self) -> int:
        """How many processes in a row ended before they took a request."""
        ...

    @property
    def retry_after_s(self) -> float:
        """Seconds until a core that is not ready may be ready."""
        ...

    def on_lost(self, lose: Callable[[EngineDeadError], None]) -> None:
        """Call `lose` each time the core dies, after the requests that it had not answered were refused."""
        ...

    def add_request(self, request_id: str, streams: Sequence[Request], answer: Answer) -> None:
        """Add all streams of a request or, with an error, none of them. `answer` may be called before this returns."""
        ...

    def finish_requests(self, stream_ids: Sequence[str], status: RequestStatus) -> None:
        """End streams now, with a terminal status. Unknown and ended ones are ignored.

        The last outputs of aborted streams follow. Any other status is the engine's own decision, so no output follows.
        """
        ...

    def has_work(self) -> bool:
        """Whether `step` has something to compute or to return."""
        ...

    def step(self) -> list[EngineCoreOutput]:
        """Return new outputs of streams, after computing a step if the core is in this process."""
        ...

    def wait(self) -> None:
        """Block until there is work or an answer, or `wake` is called, for at most a second."""
        ...

    def wake(self) -> None:
        """End the current `wait`, or the next one if none is running. Any thread may call it."""
        ...

    def watch(self, listener: Callable[[Snapshot], None] | None) -> None:
        """Report events of the core to a listener, a few times a second, or stop doing so."""
        ...

    def finish_transfers(self) -> None:
        """Wait until the KV of ended requests is saved; a core in another process saves it whenever it is idle."""
        ...

    def shutdown(self) -> None:
        """Refuse the requests that were not answered, and free all resources. A second call does nothing."""
        ...
