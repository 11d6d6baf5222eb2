"""What a server asks of its engine, and what drives an engine asks of it: two protocols."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Unpack

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from octavo.data.capacity import EngineCapacity
    from octavo.data.metrics import EngineStats
    from octavo.data.request_options import OptionFields, RequestOptions
    from octavo.data.snapshot import Snapshot
    from octavo.engine.input_processor import InputProcessor, ProcessedInput, Prompt
    from octavo.engine.llm_engine import Accept, Lose, Post
    from octavo.engine.output_processor import OutputProcessor
    from octavo.errors import OctavoError
    from octavo.outputs import RequestOutput
    from octavo.runtime.text_work import TextWork
    from octavo.sampling_params import SamplingParams


class _Described(Protocol):
    """What any engine tells of itself."""

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
        """What it can take at once."""
        ...

    @property
    def stats(self) -> EngineStats:
        """What it can be measured by, so far."""
        ...

    @property
    def num_restarts(self) -> int:
        """How often its process was started again."""
        ...

    @property
    def num_failed_starts(self) -> int:
        """How many of its processes in a row ended before they took a request."""
        ...

    @property
    def retry_after_s(self) -> float:
        """When to ask one that is not ready again."""
        ...


class EngineClient(_Described, Protocol):
    """What a server asks of its engine, on its event loop. `octavo.engine.async_llm.AsyncLLM` is one.

    The name is that of vLLM's protocol for the same.
    """

    @property
    def text(self) -> TextWork:
        """Does what the texts of requests cost, beside the event loop."""
        ...

    @property
    def is_dead(self) -> bool:
        """Whether it will never take a request again."""
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
        """Let the reader of a request hear of its end now, whatever the engine is doing, and have it aborted."""
        ...

    async def watch(self, listener: Callable[[Snapshot], None] | None) -> None:
        """Let a listener hear what happens from now on, on the engine's thread, or nobody. Raises `EngineDeadError`."""
        ...


class DrivenEngine(_Described, Protocol):
    """What `AsyncLLM` asks of the engine that it drives: one in this process, or one whose core is in another.

    All of it happens on one thread, but for `is_ready`, which any may ask.
    """

    @property
    def is_ready(self) -> bool:
        """Whether requests can be added now."""
        ...

    def attach(self, post: Post, lose: Lose) -> None:
        """Hear from now on: post(function) runs it on that thread, lose(request_id, error) ends a request's stream."""
        ...

    def submit(self, processed: ProcessedInput, accept: Accept) -> None:
        """Take a request; accept(None) when it is in the queue, accept(error) when it cannot be served."""
        ...

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests; each gets its last output, with finish_reason "abort". Unknown ids are passed over."""
        ...

    def step(self) -> list[RequestOutput]:
        """Return an output for every request that has news."""
        ...

    def has_unfinished_requests(self) -> bool:
        """Whether another `step` has something to do or to tell."""
        ...

    def check_when_idle(self) -> None:
        """Do what idle moments are for."""
        ...

    def watch(self, listener: Callable[[Snapshot], None] | None) -> None:
        """Let a listener hear what happens from now on, or nobody."""
        ...

    def shutdown(self) -> None:
        """End it."""
        ...
