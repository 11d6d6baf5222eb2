"""The synchronous way to drive the core: add requests, step, read outputs."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Unpack

from octavo.data.request import RequestStatus
from octavo.data.request_options import RequestOptions
from octavo.engine.snapshot_feed import SnapshotFeed
from octavo.errors import EngineDeadError, EngineError, OctavoError, RequestError
from octavo.runtime.faults import error_for
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future
    from typing import TypeAlias

    from octavo.data.capacity import EngineCapacity
    from octavo.data.metrics import EngineStats
    from octavo.data.request_options import OptionFields
    from octavo.data.snapshot import Snapshot
    from octavo.engine.engine_core import EngineCore
    from octavo.engine.input_processor import InputProcessor, ProcessedInput, Prompt
    from octavo.engine.output_processor import OutputProcessor
    from octavo.outputs import EngineCoreOutput, RequestOutput

    Accept: TypeAlias = Callable[[OctavoError | None], None]  # a request's fate: None when it is in the queue
    Post: TypeAlias = Callable[[Callable[[], None]], None]  # runs a function on the thread that drives the engine
    Lose: TypeAlias = Callable[[str, OctavoError], None]  # a request that ends with nothing more than this

logger = logging.getLogger(__name__)
_PREPARING = "what it needs was prepared"
_SAVING_S = 5.0  # without a transfer that ends; a store may hang


class Engine:
    """Joins input processor, core and output processor, all of them already built. Not safe for several threads."""

    def __init__(
        self,
        core: EngineCore,
        input_processor: InputProcessor,
        output_processor: OutputProcessor,
        clock: Callable[[], float],
    ) -> None:
        self.core = core
        self.input_processor = input_processor
        self.output_processor = output_processor
        self.clock = clock
        self.num_restarts = self.num_failed_starts = 0
        self.retry_after_s = 1.0
        self._post: Post = lambda function: function()
        self._preparing: dict[int, Accept] = {}
        self._undelivered: list[EngineCoreOutput] = []
        self._put_by: list[RequestOutput] = []  # of requests that others added, while a batch was run
        self._given_up: set[str] = set()  # of a batch that failed: its requests end unheard
        self._num_generated_ids = 0
        self._is_shut_down = False
        self._feed: SnapshotFeed | None = None
        self._watch_with: Callable[[Snapshot], None] = lambda _snapshot: None

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[OptionFields],
    ) -> None:
        """Accept a request. Raises `RequestError` when it cannot be served; nothing changes then.

        prompt: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}. options: those of
        `octavo.data.request_options.RequestOptions`.
        """
        self.add_processed(
            self.input_processor.process(
                request_id, prompt, params, options=RequestOptions(**options), arrival_time=self.clock()
            )
        )

    def attach(self, post: Post, lose: Lose) -> None:  # noqa: ARG002 - nothing is lost here
        """Hear of what was prepared in the background from now on by post(function), which runs it."""
        self._post = post

    @property
    def is_ready(self) -> bool:
        """As long as somebody drives it."""
        return True

    @property
    def capacity(self) -> EngineCapacity:
        """What it can take at once."""
        return self.core.capacity

    @property
    def stats(self) -> EngineStats:
        """What it can be measured by, so far; belongs to the thread that drives it, and changes with every step."""
        return self.core.metrics.stats

    def watch(self, listener: Callable[[Snapshot], None] | None) -> None:
        """Let a listener hear what happens from now on, at most a few times a second, or nobody."""
        self._feed = None if listener is None else SnapshotFeed(self.core)
        self._watch_with = listener or self._watch_with
        self._show()

    def _show(self) -> None:
        if self._feed is not None:
            for snapshot in self._feed.look():
                self._watch_with(snapshot)

    def submit(self, processed: ProcessedInput, accept: Accept) -> None:
        """Accept a request as `add_processed` does when it is prepared, and tell."""
        try:
            prepared = self._prepare(processed)
        except BaseException as error:  # noqa: BLE001 - see octavo.runtime.faults
            accept(error_for(processed.request_id, _PREPARING, error))
            return
        if prepared is None:
            self._submit(processed, accept)
            return
        self._preparing[id(processed)] = accept
        prepared.add_done_callback(lambda done: self._post(lambda: self._take_prepared(processed, done)))

    def _take_prepared(self, processed: ProcessedInput, prepared: Future[None]) -> None:
        accept = self._preparing.pop(id(processed), None)
        if accept is not None:  # else this engine has ended meanwhile
            self._submit(processed, accept, prepared)

    def _submit(self, processed: ProcessedInput, accept: Accept, prepared: Future[None] | None = None) -> None:
        try:
            if prepared is not None:
                prepared.result()
        except BaseException as error:  # noqa: BLE001 - see octavo.runtime.faults
            accept(error_for(processed.request_id, _PREPARING, error))
            return
        try:
            self._add(processed)
        except Exception as error:
            accept(error if isinstance(error, OctavoError) else EngineError(f"the engine failed: {error}"))
            if not isinstance(error, OctavoError):
                raise
        else:
            accept(None)

    def add_processed(self, processed: ProcessedInput) -> None:
        """Accept a request that the input processor has checked: all of its streams or, with an error, none.

        Waits for what has to be prepared, the grammar that it asks for say.
        """
        try:
            prepared = self._prepare(processed)
            if prepared is not None:
                prepared.result()
        except OctavoError:
            raise
        except BaseException as error:
            raise error_for(processed.request_id, _PREPARING, error) from error
        self._add(processed)

    def _prepare(self, processed: ProcessedInput) -> Future[None] | None:
        return self.core.executor.prepare(processed.sampling_params, processed.streams[0].tenant)

    def _add(self, processed: ProcessedInput) -> None:
        if processed.request_id in self.output_processor:
            raise RequestError(f"request id {processed.request_id!r} is in use", parameter="request_id")
        added: list[str] = []
        try:
            for stream in processed.streams:
                self.core.scheduler.add_request(stream)
                added.append(stream.request_id)
        except RequestError:
            self.core.scheduler.finish_requests(added, RequestStatus.FINISHED_ABORTED)
            raise
        self.output_processor.add_request(
            processed.request_id,
            added,
            processed.prompt,
            processed.prompt_token_ids,
            processed.sampling_params,
            arrival_time=processed.streams[0].arrival_time,
        )

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests now; each gets its last output, with finish_reason "abort", from the next `step`.

        Ids that are unknown or finished are passed over.
        """
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            stream_ids = self.output_processor.stream_ids(request_id)
            self._undelivered += self.core.scheduler.finish_requests(stream_ids, RequestStatus.FINISHED_ABORTED)

    def step(self) -> list[RequestOutput]:
        """Do one step; return an output for every request that has news.

        What `generate_batch` put by comes first.
        """
        put_by, self._put_by = self._put_by, []
        return put_by + self._step()

    def _step(self) -> list[RequestOutput]:
        """Do one step; nobody hears of the requests of a batch that was given up."""
        news = self._undelivered
        self._undelivered = []
        processed = self.output_processor.process(news + self.core.step())
        self.core.scheduler.finish_requests(processed.streams_to_stop, RequestStatus.FINISHED_STOPPED)
        if processed.streams_to_fail:
            self.core.scheduler.finish_requests(processed.streams_to_fail, RequestStatus.FINISHED_ERROR)
        if self._feed is not None and (self._feed.is_due or not self.core.has_work()):
            self._show()
        outputs = processed.request_outputs
        if self._given_up:
            ended = {output.request_id for output in outputs if output.finished}
            outputs = [output for output in outputs if output.request_id not in self._given_up]
            self._given_up -= ended
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether another `step` has something to do or to tell."""
        return bool(self._undelivered or self._put_by) or self.core.has_work()

    def check_when_idle(self) -> None:
        """Check the core's invariants in an idle moment; a breach is logged, its blocks are not used again."""
        for breach in self.core.scheduler.check_when_idle():
            logger.error("%s; the blocks concerned are not used any more", breach)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        params: SamplingParams | None = None,
    ) -> RequestOutput:
        """Answer one prompt. params: another name of sampling_params. Raises `RequestError`."""
        return next(iter(self.generate_batch([prompt], sampling_params, params=params).values()))

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        on_output: Callable[[RequestOutput], None] | None = None,
        priorities: Sequence[int] | None = None,
    ) -> dict[str, RequestOutput]:
        """Answer all prompts together; return the last output of each by request id, in the order of the prompts.

        Returns after stores have saved the KV of these prompts (see `finish_transfers`). If other requests are
        unfinished, it returns at once and later steps save it.

        sampling_params: for all prompts, or one for each. params: another name of it. on_output is called with every
        output of these prompts as it comes. Requests that were added before continue; their outputs are returned by
        the next `step`.
        Raises `RequestError` if one prompt cannot be served; then the others are aborted.
        """
        if sampling_params is not None and params is not None:
            raise RequestError("sampling_params and params are two names of one argument", parameter="sampling_params")
        params = sampling_params if params is None else params
        if params is None or isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(params)} sampling_params", parameter="sampling_params")
        priorities = priorities or [0] * len(prompts)
        if len(priorities) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(priorities)} priorities", parameter="priority")
        results: dict[str, RequestOutput | None] = {}
        try:
            for prompt, prompt_params, priority in zip(prompts, params, priorities, strict=True):
                request_id = self._next_request_id()
                self.add_request(request_id, prompt, prompt_params, priority=priority)
                results[request_id] = None
            self._run(results, on_output)
        except BaseException:  # an interrupt as well: nothing may stay behind
            self.abort_request(results)
            self._given_up.update(request_id for request_id in results if request_id in self.output_processor)
            raise
        self.finish_transfers()
        return {request_id: output for request_id, output in results.items() if output is not None}

    def _run(self, results: dict[str, RequestOutput | None], on_output: Callable[[RequestOutput], None] | None) -> None:
        num_open = len(results)
        while num_open:
            outputs = self._step()
            self._put_by += [output for output in outputs if output.request_id not in results]
            for output in outputs:
                if output.request_id not in results:
                    continue
                if on_output is not None:
                    on_output(output)
                if output.finished:
                    results[output.request_id] = output
                    num_open -= 1

    def _next_request_id(self) -> str:
        request_id = str(self._num_generated_ids)
        self._num_generated_ids += 1
        return request_id if request_id not in self.output_processor else self._next_request_id()

    def finish_transfers(self) -> None:
        """Step until the KV of ended requests is saved, if no request is unfinished.

        Logs a warning and returns if no transfer ends for some seconds; later steps continue with the rest.
        """
        scheduler = self.core.scheduler
        if not scheduler.get_num_transfers():
            return
        num_left, until = -1, 0.0

        def is_progressing() -> bool:
            nonlocal num_left, until
            now, num_now = time.monotonic(), scheduler.get_num_transfers()
            if num_now != num_left:
                num_left, until = num_now, now + _SAVING_S
            return now < until

        self.core.finish_transfers(is_progressing)
        if self._feed is not None:
            self._show()
        if scheduler.get_num_transfers() and not scheduler.get_num_unfinished_requests():
            logger.warning("no transfer of KV ended within %g s; later steps continue %d of them", _SAVING_S, num_left)

    def shutdown(self) -> None:
        """Save the KV that stores still want, and free the executor's memory. A second call changes nothing.

        Unfinished requests are aborted; those whose preparation is not over are refused.
        """
        preparing, self._preparing = self._preparing, {}
        for accept in preparing.values():
            accept(EngineDeadError("the engine was shut down"))
        is_first, self._is_shut_down = not self._is_shut_down, True
        try:
            if is_first:
                self.abort_request(self.output_processor.request_ids())
                self.finish_transfers()
        except Exception:
            logger.exception("KV of ended requests could not be saved")
        finally:
            self.core.executor.shutdown()
