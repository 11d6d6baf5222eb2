"""The protocol between a server and its engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Unpack

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from octavo.data.capacity import EngineCapacity
    from octavo.data.metrics import EngineStats
    from octavo.data.request_options import OptionFields, RequestOptions
    from octavo.data.snapshot import Snapshot
    from octavo.engine.input_processor import InputProcessor, ProcessedInput, Prompt
    from octavo.engine.output_processor import OutputProcessor
    from octavo.errors import OctavoError
    from octavo.outputs import RequestOutput
    from octavo.runtime.text_work import TextWork
    from octavo.sampling_params import SamplingParams


class EngineClient(Protocol):
    """An engine as a server uses it, on its event loop. `octavo.engine.async_llm.AsyncLLM` is one.

    The name is that of vLLM's protocol for the same.
    """

    @property
    def input_processor(self) -> InputProcessor:
        """Prompts to requests."""
        ...

    @property
    def output_processor(self) -> OutputProcessor:
        """Token ids to text."""
        ...

    @property
    def clock(self) -> Callable[[], float]:
        """The clock of arrival times, in seconds."""
        ...

    @property
    def capacity(self) -> EngineCapacity:
        """What the core can take at once."""
        ...

    @property
    def stats(self) -> EngineStats:
        """Counters of the core since its start."""
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
        """Seconds until an engine that is not ready may be ready."""
        ...

    @property
    def text(self) -> TextWork:
        """Threads for work on large texts, so that the event loop does not wait for it."""
        ...

    @property
    def is_dead(self) -> bool:
        """Whether the engine will never take a request again."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether requests can be added now."""
        ...

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        options: RequestOptions | None = None,
        on_processed: Callable[[ProcessedInput], Awaitable[None]] | None = None,
        on_unread: Callable[[RequestOutput], None] | None = None,
        **fields: Unpack[OptionFields],
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of one request until it is finished; leaving the loop early aborts it."""
        ...

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; each gets its last output, with finish_reason "abort". Raises `EngineDeadError`."""
        ...

    def fail(self, request_id: str, error: OctavoError) -> None:
        """Fail the request's output stream now and abort the request. Does nothing if the id is unknown."""
        ...

    async def watch(self, listener: Callable[[Snapshot], None] | None) -> None:
        """Tell a listener what happens, on the engine's thread, or stop telling. Raises `EngineDeadError`."""
        ...
