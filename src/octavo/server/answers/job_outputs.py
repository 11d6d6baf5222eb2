"""Outputs of a job's prompts."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Self

from octavo.errors import DeadlineError, ExecutionError, OctavoError, RequestError, RequestFailedError
from octavo.http.errors import client_field_names
from octavo.outputs import ErrorCode
from octavo.runtime.faults import is_fault
from octavo.server.answers.answer_size import LogprobLimit

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
    from typing import TypeAlias

    from octavo.engine.input_processor import ProcessedInput
    from octavo.outputs import RequestOutput
    from octavo.server.answers.jobs import Job
    from octavo.server.answers.usage import UsageCounter
    from octavo.server.service import Service

    Outputs: TypeAlias = "AsyncGenerator[RequestOutput, None] | MergedOutputs"  # `aclose` aborts open requests

_MERGED = 16
_ERRORS: dict[ErrorCode, Callable[[str], OctavoError]] = {
    ErrorCode.DEADLINE_PASSED: DeadlineError,
    ErrorCode.GRAMMAR_EXCEEDED: partial(RequestError, parameter="structured_outputs"),
    ErrorCode.NOTHING_ALLOWED: partial(RequestError, parameter="allowed_token_ids"),
    ErrorCode.REQUEST_FAILED: RequestFailedError,
    ErrorCode.STEP_FAILED: ExecutionError,
}


def error_of(output: RequestOutput) -> OctavoError | None:
    """Return the error of a failed request, otherwise None."""
    code = output.error_code
    return None if code is None else _ERRORS[code](output.error or code.text)


def outputs_of(service: Service, job: Job, usage: UsageCounter) -> Outputs:
    """Return a generator that yields the outputs of all prompts, in order of arrival.

    The job's permit limits how many prompts run in parallel. The call or the iteration raises `RequestFailedError`,
    `ExecutionError`, `DeadlineError`, `RequestError`, `AuthenticationError` or `ServerClosingError`.

    usage: The caller must add each yielded output to these counts. The generator adds the last outputs of failed and
    aborted requests, which it does not yield.
    """
    with client_field_names(job.client_names):
        most, longest = service.config.max_request_logprobs, service.model_info.max_model_len
        logprobs = LogprobLimit(most, longest, job.params, len(job.prompts))

    def check(processed: ProcessedInput) -> None:
        if job.check is not None:
            job.check(processed)
        logprobs.check(processed)

    def unsent(output: RequestOutput) -> None:
        usage.add(output, output.outputs)

    streams = [service.generate(job, index, check=check, unsent=unsent) for index in range(len(job.prompts))]
    return streams[0] if len(streams) == 1 else MergedOutputs(streams, at_once=job.place.num_streams // job.params.n)


class MergedOutputs:
    """Yields the outputs of several streams, in order of arrival. At most `at_once` streams are open concurrently.

    Raises the first error of a stream. Then the caller must call `aclose`.
    """

    def __init__(self, streams: Sequence[AsyncGenerator[RequestOutput, None]], *, at_once: int) -> None:
        self._waiting = iter(streams)
        self._num_open = min(at_once, len(streams))
        self._queue: asyncio.Queue[RequestOutput | BaseException | None] = asyncio.Queue(_MERGED)
        self._tasks: list[asyncio.Task[None]] = []

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if not self._tasks:
            self._tasks = [asyncio.create_task(_pump(self._waiting, self._queue)) for _ in range(self._num_open)]
        while self._num_open:
            item = await self._queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is not None:
                return item
            self._num_open -= 1
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Abort open requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _pump(
    waiting: Iterator[AsyncGenerator[RequestOutput, None]], queue: asyncio.Queue[RequestOutput | BaseException | None]
) -> None:
    try:
        for stream in waiting:
            async with aclosing(stream):
                async for output in stream:
                    await queue.put(output)
    except BaseException as error:
        if not is_fault(error):
            raise
        await queue.put(error)
    else:
        await queue.put(None)
