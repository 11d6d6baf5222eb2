"""An engine's asynchronous interface."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from octavo.data.request_options import NO_OPTIONS
from octavo.engine.output_stream import OutputStream
from octavo.errors import EngineDeadError, OctavoError, SlowReaderError
from octavo.runtime.text_work import TextWork

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from octavo.data.request_options import OptionFields, RequestOptions
    from octavo.data.snapshot import Snapshot
    from octavo.engine.input_processor import ProcessedInput, Prompt
    from octavo.engine.llm_engine import Engine
    from octavo.outputs import RequestOutput
    from octavo.sampling_params import SamplingParams

logger = logging.getLogger(__name__)
_CHARS_PER_ID = 4


class AsyncEngine:
    """Runs an engine in a thread, and offers its methods to asyncio code.

    Other threads reach the engine only through a command queue.

    max_unread_outputs: A request with more unread outputs is aborted. None: no limit.
    """

    def __init__(self, engine: Engine, *, max_unread_outputs: int | None = None) -> None:
        self.engine, self.client = engine, engine.client
        self.input_processor, self.output_processor = engine.input_processor, engine.output_processor
        self.clock = engine.clock
        self.text = TextWork()
        self._max_unread = max_unread_outputs
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._read: dict[str, OutputStream] = {}
        self._streams: dict[str, OutputStream] = {}  # only the engine's thread uses this and `_submitted`
        self._submitted: set[OutputStream] = set()
        self._dead: OctavoError | None = None
        self._door = threading.Lock()  # no command is added after `_dead` is set
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        engine.on_lost(self._lose)
        self._thread.start()

    @property
    def is_dead(self) -> bool:
        """True if the engine has ended permanently."""
        return self._dead is not None or not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """True if requests can be added."""
        return not self.is_dead and self.client.is_ready

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        options: RequestOptions = NO_OPTIONS,
        on_processed: Callable[[ProcessedInput], Awaitable[None]] | None = None,
        on_unread: Callable[[RequestOutput], None] | None = None,
        **fields: Unpack[OptionFields],
    ) -> AsyncIterator[RequestOutput]:
        """Yield a request's outputs. Closing the iterator early aborts the request.

        - fields: Replace fields of `options`.
        - on_processed: Awaited with the tokenized request before the core gets it. An exception ends the request.
        - on_unread: Called with each output that a disconnected or slow reader does not receive.

        Raises `RequestError` and `EngineDeadError`, and `SlowReaderError` if too many outputs are unread.
        """
        if self._dead is not None:
            raise self._dead
        options = replace(options, **fields)
        deadline = None if options.timeout_s is None else asyncio.get_running_loop().time() + options.timeout_s
        process = partial(
            self.input_processor.process,
            request_id,
            prompt,
            sampling_params,
            options=options,
            arrival_time=self.clock(),
        )
        processed = await self.text.do(process, num_chars=_num_chars(prompt, sampling_params), tenant=options.tenant)
        if on_processed is not None:
            await on_processed(processed)
        stream = OutputStream(deadline, on_unread)
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
            stream.detach()
            if self._read.get(request_id) is stream:
                del self._read[request_id]
            if not finished:
                with contextlib.suppress(EngineDeadError):
                    self._post(lambda: self._abort(request_id, stream))

    def fail(self, request_id: str, error: OctavoError) -> None:
        """Abort a request. Its reader gets the error immediately, even during a long step."""
        stream = self._read.get(request_id)
        if stream is not None:
            _call_soon(stream.loop, stream.fail, error)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """See `Engine.abort_request`. Raises `EngineDeadError`."""
        await self.call(lambda engine: engine.abort_request(request_ids))

    async def watch(self, listener: Callable[[Snapshot], None] | None) -> None:
        """See `CoreClient.watch`. Raises `EngineDeadError`."""
        await self.call(lambda engine: engine.client.watch(listener))

    async def call(self, function: Callable[[Any], Any]) -> Any:
        """Run a function on the engine's thread, between two steps. Return its result, or raise its error.

        Raises `EngineDeadError`.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            try:
                value = function(self.engine)
            except Exception as error:  # noqa: BLE001 - raised again by the caller
                _call_soon(loop, _set_exception, result, error)
            else:
                _call_soon(loop, _set_result, result, value)

        self._post(run)
        return await result

    def shutdown(self) -> None:
        """Stop the thread. Open streams fail with `EngineDeadError`."""
        self._inbox.put(None)
        self.client.wake()
        self._thread.join()
        self.text.shutdown()

    def _post(self, command: Callable[[], None]) -> None:
        with self._door:
            if self._dead is not None:
                raise self._dead
            self._inbox.put(command)
            self.client.wake()

    # --- on the engine's thread

    def _run(self) -> None:
        reason = "the engine was shut down"
        try:
            while self._run_commands():
                if self.engine.has_unfinished_requests():
                    self._deliver(self.engine.step())
                else:
                    self.client.wait()
        except Exception as error:
            logger.exception("the engine's thread failed")
            reason = f"the engine failed: {error}"
        with self._door:
            self._dead = EngineDeadError(reason)
        self._fail_all(self._dead)
        self.engine.shutdown()

    def _run_commands(self) -> bool:
        while not self._inbox.empty():
            command = self._inbox.get()
            if command is None:
                return False
            command()
        return True

    def _add(self, processed: ProcessedInput, stream: OutputStream) -> None:
        def accept(error: OctavoError | None) -> None:
            self._submitted.discard(stream)
            if error is not None:
                if not stream.is_detached:
                    _call_soon(stream.loop, _set_exception, stream.accepted, error)
                return
            self._streams[processed.request_id] = stream
            _call_soon(stream.loop, _set_result, stream.accepted, None)
            if stream.is_detached:
                self._abort(processed.request_id, stream)

        self._submitted.add(stream)
        self.engine.submit(processed, accept)

    def _abort(self, request_id: str, stream: OutputStream) -> None:
        stream.is_detached = True
        is_new = stream in self._submitted and request_id not in self._streams
        if is_new or self._streams.get(request_id) is stream:
            self.engine.abort_request(request_id)

    def _lose(self, request_id: str, error: OctavoError) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            _call_soon(stream.loop, stream.put, error)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        # One call per event loop, because waking a loop is slow.
        batches: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, RequestOutput]]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            stream.num_delivered += 1
            if output.finished:
                del self._streams[output.request_id]
            num_unread = stream.num_delivered - stream.num_read
            if self._max_unread is not None and num_unread > self._max_unread and not stream.is_detached:
                self._end_slow(output, stream, self._max_unread)
            batches.setdefault(stream.loop, []).append((stream, output))
        for loop, batch in batches.items():
            _call_soon(loop, _put_all, batch)

    def _end_slow(self, output: RequestOutput, stream: OutputStream, limit: int) -> None:
        stream.is_detached = True
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
                try:
                    command()
                except Exception:
                    logger.exception("a command to the dead engine failed")
        for stream in self._streams.values():
            _call_soon(stream.loop, stream.put, error)
        for stream in self._submitted:
            _call_soon(stream.loop, _set_exception, stream.accepted, error)


def _num_chars(prompt: Any, params: SamplingParams | None) -> int:
    if hasattr(prompt, "keys"):
        ids = prompt.get("prompt_token_ids")
        prompt = prompt.get("prompt") if ids is None else ids
    lists = () if params is None else (params.logit_bias, params.allowed_token_ids, params.stop_token_ids)
    num_ids = sum(len(ids) for ids in lists if ids is not None and hasattr(ids, "__len__"))
    return (len(prompt) if hasattr(prompt, "__len__") else 0) + _CHARS_PER_ID * num_ids


def _put_all(batch: list[tuple[OutputStream, RequestOutput]]) -> None:
    for stream, output in batch:
        stream.put(output)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object) -> None:
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)


def _set_result(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
