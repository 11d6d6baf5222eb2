"""The asynchronous way to drive the core: streams of outputs, and an abort when nobody reads one any more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from octavo.data.request_options import RequestOptions
from octavo.errors import DeadlineError, EngineDeadError, OctavoError, SlowReaderError
from octavo.outputs import ErrorCode
from octavo.runtime.faults import log_fault
from octavo.runtime.text_work import TextWork

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from octavo.data.capacity import EngineCapacity
    from octavo.data.metrics import EngineStats
    from octavo.data.request_options import OptionFields
    from octavo.data.snapshot import Snapshot
    from octavo.engine.input_processor import InputProcessor, ProcessedInput, Prompt
    from octavo.engine.llm_engine import Engine
    from octavo.engine.output_processor import OutputProcessor
    from octavo.outputs import RequestOutput
    from octavo.sampling_params import SamplingParams

logger = logging.getLogger(__name__)
_CHARS_PER_ID = 4  # of a list that is checked
_DEADLINE_GRACE_S = 1.0  # in which the engine itself should tell that a request's time is over


class _Stream:
    """Where the outputs of one request arrive, on the event loop of its reader.

    num_delivered is counted by the engine's thread alone, num_read by the reader's. deadline: on the loop's clock.
    on_unread: hears of the outputs that nobody reads any more.
    """

    def __init__(self, deadline: float | None, on_unread: Callable[[RequestOutput], None] | None) -> None:
        self.loop = asyncio.get_running_loop()
        self._on_unread = on_unread
        self._has_reader = True
        self.accepted: asyncio.Future[None] = self.loop.create_future()
        self.is_left = False  # nobody is to read it any more; known to the engine's thread alone
        self.num_delivered = self.num_read = 0
        self._outputs: deque[RequestOutput | OctavoError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        # An engine in a long step tells nobody that a request's time is over.
        self._timer: asyncio.TimerHandle | None = None
        if deadline is not None:
            self._timer = self.loop.call_at(
                deadline + _DEADLINE_GRACE_S, self.fail, DeadlineError(ErrorCode.DEADLINE_PASSED.text)
            )

    def put(self, output: RequestOutput | OctavoError) -> None:
        """Add what the reader hears next."""
        if not self._has_reader:
            self._tell_unread(output)
            return
        self._outputs.append(output)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> RequestOutput | OctavoError:
        """Return what comes next; there is one reader."""
        while not self._outputs:
            self._waiter = self.loop.create_future()
            await self._waiter
        self.num_read += 1
        return self._outputs.popleft()

    def end(self, error: OctavoError) -> None:
        """Drop what nobody has read, and what follows, and let the reader hear why."""
        self._drop_unread()
        self.put(error)
        self._has_reader = False

    def leave(self) -> None:
        """Nobody reads any more."""
        self._has_reader = False
        if self._timer is not None:
            self._timer.cancel()
        self._drop_unread()

    def _drop_unread(self) -> None:
        while self._outputs:
            self._tell_unread(self._outputs.popleft())

    def _tell_unread(self, output: RequestOutput | OctavoError) -> None:
        if self._on_unread is None or isinstance(output, OctavoError):
            return
        try:
            self._on_unread(output)
        except Exception as error:  # noqa: BLE001 - of a request that is over; others are told behind it
            log_fault(output.request_id, "what nobody reads was counted", error)

    def fail(self, error: OctavoError) -> None:
        """Let the reader hear of an end behind what has come so far, whatever the engine is doing."""
        if self.accepted.done():
            self.put(error)
        else:
            self.accepted.set_exception(error)


class AsyncLLM:
    """An `EngineClient` that drives an engine in a thread, which sleeps when nothing is to be done.

    The engine belongs to that thread alone; everything else reaches it through one inbox.
    max_unread_outputs: a request with more unread outputs is ended; None for no limit.
    `text` has threads for work on large texts.
    """

    def __init__(self, engine: Engine, *, max_unread_outputs: int | None = None) -> None:
        self.engine = engine
        self.text = TextWork()
        self._max_unread = max_unread_outputs
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._read: dict[str, _Stream] = {}  # by request, while there is a reader
        self._streams: dict[str, _Stream] = {}  # the engine thread's alone, as is the next one
        self._submitted: set[_Stream] = set()  # neither accepted nor refused yet
        self._dead: OctavoError | None = None
        self._door = threading.Lock()  # nothing enters the inbox once the engine is known to be dead
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        engine.on_lost(self._lose)
        self._thread.start()

    @property
    def is_dead(self) -> bool:
        """Whether it will never take a request again."""
        return self._dead is not None or not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether requests can be added now."""
        return not self.is_dead and self.engine.client.is_ready

    @property
    def input_processor(self) -> InputProcessor:
        """Prompts to requests."""
        return self.engine.input_processor

    @property
    def output_processor(self) -> OutputProcessor:
        """Token ids to text."""
        return self.engine.output_processor

    @property
    def clock(self) -> Callable[[], float]:
        """The clock of arrival times, in seconds."""
        return self.engine.clock

    @property
    def capacity(self) -> EngineCapacity:
        """What the engine can take at once."""
        return self.engine.capacity

    @property
    def stats(self) -> EngineStats:
        """What the engine can be measured by, so far."""
        return self.engine.stats

    @property
    def num_restarts(self) -> int:
        """How often the engine's process was started again."""
        return self.engine.client.num_restarts

    @property
    def num_failed_starts(self) -> int:
        """How many of the engine's processes in a row ended before they took a request."""
        return self.engine.client.num_failed_starts

    @property
    def retry_after_s(self) -> float:
        """When to ask again, where the engine is not ready."""
        return self.engine.client.retry_after_s

    async def generate(
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
        """Yield the outputs of one request until it is finished; leaving the loop early aborts it.

        The arguments are those of `octavo.engine.llm_engine.Engine.add_request`; options: or else its fields as keyword
        arguments. on_processed sees the request before
        it is sent, when its tokens are known, and may let it wait; what it raises is the request's end. on_unread hears
        of each output that the loop was not told of, as it was left or too slow: what the request cost, say.
        Raises `RequestError` when it cannot be served, `EngineDeadError` when the engine stops meanwhile, and
        `SlowReaderError` when too many outputs were not read.
        """
        if self._dead is not None:
            raise self._dead
        options = RequestOptions(**fields) if options is None else options
        deadline = None if options.timeout_s is None else asyncio.get_running_loop().time() + options.timeout_s
        process = partial(
            self.engine.input_processor.process,
            request_id,
            prompt,
            sampling_params,
            options=options,
            arrival_time=self.engine.clock(),
        )
        processed = await self.text.do(process, num_chars=_num_chars(prompt, sampling_params), tenant=options.tenant)
        if on_processed is not None:
            await on_processed(processed)
        stream = _Stream(deadline, on_unread)
        finished = False
        self._read.setdefault(request_id, stream)
        try:
            self._post(lambda: self._add(processed, stream))
            await stream.accepted
            while not finished:
                output = await stream.get()
                if isinstance(output, OctavoError):
                    finished = True
                    raise output
                finished = output.finished
                yield output
        finally:
            stream.leave()
            if self._read.get(request_id) is stream:
                del self._read[request_id]
            if not finished:
                with contextlib.suppress(EngineDeadError):  # a dead engine has nothing to abort
                    self._post(lambda: self._abort(request_id, stream))

    def fail(self, request_id: str, error: OctavoError) -> None:
        """Let the reader of a request hear of its end now, and have it aborted; nothing where there is none.

        An engine in a long step hears of an abort when that is over, and tells nobody anything before.
        """
        stream = self._read.get(request_id)
        if stream is not None:
            _call_soon(stream.loop, stream.fail, error)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; each gets its last output, with finish_reason "abort". Raises `EngineDeadError`."""
        await self.call(lambda engine: engine.abort_request(request_ids))

    async def watch(self, listener: Callable[[Snapshot], None] | None) -> None:
        """Let a listener hear what happens from now on, on the engine's thread, or nobody. Raises `EngineDeadError`."""
        await self.call(lambda engine: engine.client.watch(listener))

    async def call(self, function: Callable[[Any], Any]) -> Any:
        """Run a function on the engine's thread, between two steps, and return its result (statistics, say)."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            try:
                value = function(self.engine)
            except Exception as error:  # noqa: BLE001 - the caller's own mistake, and the caller's to hear of
                _call_soon(loop, _set_exception, result, error)
            else:
                _call_soon(loop, _set_result, result, value)

        self._post(run)
        return await result

    def shutdown(self) -> None:
        """Stop the thread; open streams end with `EngineDeadError`."""
        self._inbox.put(None)
        self.engine.client.wake()
        self._thread.join()
        self.text.shutdown()

    def _post(self, command: Callable[[], None]) -> None:
        with self._door:
            if self._dead is not None:
                raise self._dead
            self._inbox.put(command)
            self.engine.client.wake()

    # --- on the engine's thread

    def _run(self) -> None:
        reason = "the engine was shut down"
        try:
            while self._run_commands():
                if self.engine.has_unfinished_requests():
                    self._deliver(self.engine.step())
                else:
                    self.engine.client.wait()
        except Exception as error:  # the thread's last word: everyone who waits must hear of it
            logger.exception("the engine's thread failed")
            reason = f"the engine failed: {error}"
        with self._door:
            self._dead = EngineDeadError(reason)
        self._fail_all(self._dead)
        self.engine.shutdown()

    def _run_commands(self) -> bool:
        """Run what is in the inbox. Returns False if the thread shall stop."""
        while not self._inbox.empty():
            command = self._inbox.get()
            if command is None:
                return False
            command()
        return True

    def _add(self, processed: ProcessedInput, stream: _Stream) -> None:
        def accept(error: OctavoError | None) -> None:
            self._submitted.discard(stream)
            if error is not None:
                if not stream.is_left:  # else nobody waits to hear of it
                    _call_soon(stream.loop, _set_exception, stream.accepted, error)
                return
            self._streams[processed.request_id] = stream
            _call_soon(stream.loop, _set_result, stream.accepted, None)
            if stream.is_left:
                self._abort(processed.request_id, stream)

        self._submitted.add(stream)
        self.engine.submit(processed, accept)

    def _abort(self, request_id: str, stream: _Stream) -> None:
        stream.is_left = True
        if stream in self._submitted and request_id not in self._streams:  # what is prepared for it need not be
            self.engine.abort_request(request_id)
        if self._streams.get(request_id) is stream:
            self.engine.abort_request(request_id)  # its last output is still delivered

    def _lose(self, request_id: str, error: OctavoError) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            _call_soon(stream.loop, stream.put, error)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Hand a step's outputs over, those of an event loop together: to wake it costs more than an output does."""
        batches: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput]]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            stream.num_delivered += 1
            if output.finished:
                del self._streams[output.request_id]
            num_unread = stream.num_delivered - stream.num_read
            if self._max_unread is not None and num_unread > self._max_unread and not stream.is_left:
                self._end_slow(output, stream, self._max_unread)
            batches.setdefault(stream.loop, []).append((stream, output))
        for loop, batch in batches.items():
            _call_soon(loop, _put_all, batch)

    def _end_slow(self, output: RequestOutput, stream: _Stream, limit: int) -> None:
        """End a request for nobody; what lies there and what follows is dropped, as memory is what it costs."""
        stream.is_left = True
        if not output.finished:
            self.engine.abort_request(output.request_id)
        error = SlowReaderError(f"more than {limit} outputs of this request were not read in time; it was ended")
        _call_soon(stream.loop, stream.end, error)

    def _fail_all(self, error: OctavoError) -> None:
        streams = list(self._streams.values())
        self._streams.clear()
        for stream in streams:
            _call_soon(stream.loop, stream.put, error)
        while not self._inbox.empty():
            command = self._inbox.get()
            if command is not None:
                self._run_last(command)
        for stream in self._streams.values():
            _call_soon(stream.loop, stream.put, error)
        for stream in self._submitted:
            _call_soon(stream.loop, _set_exception, stream.accepted, error)

    @staticmethod
    def _run_last(command: Callable[[], None]) -> None:
        """Run a command of a dead engine: it refuses or answers, and its caller hears so."""
        try:
            command()
        except Exception:
            logger.exception("a command to the dead engine failed")


def _num_chars(prompt: Any, params: SamplingParams | None) -> int:
    """Return how much there is to read and to check: a token id is as good as some characters."""
    if hasattr(prompt, "keys"):
        ids = prompt.get("prompt_token_ids")
        prompt = prompt.get("prompt") if ids is None else ids
    lists = () if params is None else (params.logit_bias, params.allowed_token_ids, params.stop_token_ids)
    num_ids = sum(len(ids) for ids in lists if ids is not None and hasattr(ids, "__len__"))
    return (len(prompt) if hasattr(prompt, "__len__") else 0) + _CHARS_PER_ID * num_ids


def _put_all(batch: list[tuple[_Stream, RequestOutput]]) -> None:
    for stream, output in batch:
        stream.put(output)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
        loop.call_soon_threadsafe(function, *args)


def _set_result(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
