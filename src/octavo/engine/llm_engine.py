"""An engine's synchronous interface."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Unpack

from octavo.data.request import RequestStatus
from octavo.data.request_options import RequestOptions
from octavo.errors import OctavoError, RequestError
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from octavo.data.capacity import EngineCapacity
    from octavo.data.metrics import EngineStats
    from octavo.data.request_options import OptionFields
    from octavo.engine.core_client import Answer, CoreClient
    from octavo.engine.engine_core import EngineCore
    from octavo.engine.input_processor import InputProcessor, ProcessedInput, Prompt
    from octavo.engine.output_processor import OutputProcessor
    from octavo.errors import EngineDeadError
    from octavo.outputs import RequestOutput

logger = logging.getLogger(__name__)


class Engine:
    """A synchronous engine. Not thread-safe."""

    def __init__(
        self,
        client: CoreClient,
        input_processor: InputProcessor,
        output_processor: OutputProcessor,
        clock: Callable[[], float],
    ) -> None:
        self.client = client
        self.input_processor = input_processor
        self.output_processor = output_processor
        self.clock = clock
        self._submitted: dict[str, ProcessedInput] = {}
        self._put_by: list[RequestOutput] = []  # outputs that the next `step` returns
        self._given_up: set[str] = set()  # requests of failed batches, whose outputs are dropped
        self._new_ids = map(str, itertools.count())
        self._is_shut_down = False

    @property
    def core(self) -> EngineCore:
        """See `CoreClient.core`."""
        return self.client.core

    @property
    def capacity(self) -> EngineCapacity:
        """The core's limits."""
        return self.client.capacity

    @property
    def stats(self) -> EngineStats:
        """The core's counters."""
        return self.client.stats

    def on_lost(self, lose: Callable[[str, OctavoError], None]) -> None:
        """Register `lose`, which is called for each unfinished request when the core dies."""

        def lose_all(error: EngineDeadError) -> None:
            for request_id in self.output_processor.forget_all():
                lose(request_id, error)

        self.client.on_lost(lose_all)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[OptionFields],
    ) -> None:
        """Add a request. If `RequestError` is raised, nothing is added. options: Fields of `RequestOptions`."""
        self.add_processed(
            self.input_processor.process(
                request_id, prompt, params, options=RequestOptions(**options), arrival_time=self.clock()
            )
        )

    def add_processed(self, processed: ProcessedInput) -> None:
        """Add all streams of a checked request, or none. Waits for the compilation of a grammar."""
        answers: list[OctavoError | None] = []
        self.submit(processed, answers.append)
        try:
            while not answers:
                self.client.wait()
        except BaseException:
            self._give_up([processed.request_id])
            raise
        if answers[0] is not None:
            raise answers[0]

    def submit(self, processed: ProcessedInput, accept: Answer) -> None:
        """Add a checked request. Calls accept(None) once it is queued, or accept(error) if it is refused."""
        request_id = processed.request_id
        if request_id in self._submitted or request_id in self.output_processor:
            accept(RequestError(f"request id {request_id!r} is in use", parameter="request_id"))
            return

        def answer(error: OctavoError | None) -> None:
            del self._submitted[request_id]
            if error is None:
                self.output_processor.add_request(
                    request_id,
                    [stream.request_id for stream in processed.streams],
                    processed.prompt,
                    processed.prompt_token_ids,
                    processed.sampling_params,
                    arrival_time=processed.streams[0].arrival_time,
                )
            accept(error)

        self._submitted[request_id] = processed
        try:
            self.client.add_request(request_id, processed.streams, answer)
        except BaseException:
            self._submitted.pop(request_id, None)
            raise

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Abort requests now. A later `step` returns the last output of each request, with finish_reason "abort"."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            stream_ids = self.output_processor.stream_ids(request_id)
            if request_id in self._submitted:
                stream_ids = [stream.request_id for stream in self._submitted[request_id].streams]
            self.client.finish_requests(stream_ids, RequestStatus.FINISHED_ABORTED)

    def _give_up(self, request_ids: Iterable[str]) -> None:
        self.abort_request(request_ids)
        self._given_up.update(name for name in request_ids if name in self.output_processor)

    def step(self) -> list[RequestOutput]:
        """Compute a step and return new outputs."""
        put_by, self._put_by = self._put_by, []
        return put_by + self._step()

    def _step(self) -> list[RequestOutput]:
        processed = self.output_processor.process(self.client.step())
        if processed.streams_to_stop:
            self.client.finish_requests(processed.streams_to_stop, RequestStatus.FINISHED_STOPPED)
        if processed.streams_to_fail:
            self.client.finish_requests(processed.streams_to_fail, RequestStatus.FINISHED_ERROR)
        outputs = processed.request_outputs
        if self._given_up:
            ended = {output.request_id for output in outputs if output.finished}
            outputs = [output for output in outputs if output.request_id not in self._given_up]
            self._given_up -= ended
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Return True if another `step` is needed."""
        return bool(self._put_by) or self.client.has_work()

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        params: SamplingParams | None = None,
    ) -> RequestOutput:
        """Answer one prompt, and return the last output. Raises `RequestError`.

        params: Another name of sampling_params.
        """
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
        """Answer all prompts together. Return the last outputs by request id, in the prompts' order.

        Earlier requests continue, and the next `step` returns their outputs. If the engine has no other requests, the
        call waits until the KV is saved in stores. An exception aborts the batch.

        - sampling_params or params: One object for all prompts, or a list with one per prompt.
        - on_output: Called with each output.
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
                request_id = next(each for each in self._new_ids if each not in self.output_processor)
                self.add_request(request_id, prompt, prompt_params, priority=priority)
                results[request_id] = None
            self._run(results, on_output)
        except BaseException:
            self._give_up(results)
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

    def finish_transfers(self) -> None:
        """If all requests are finished, run steps until their KV is saved.

        If no transfer ends for some seconds, log a warning and return.
        """
        self.client.finish_transfers()

    def shutdown(self) -> None:
        """Abort unfinished requests, save their KV, and free all memory. May be called twice."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        try:
            self.abort_request(self.output_processor.request_ids())
            self.client.finish_transfers()
        except Exception:
            logger.exception("KV of ended requests could not be saved")
        finally:
            self.client.shutdown()
