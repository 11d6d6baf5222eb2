"""The outputs of a job's prompts, as they come."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from octavo.errors import DeadlineError, ExecutionError, OctavoError, RequestError, RequestFailedError
from octavo.outputs import ErrorCode
from octavo.runtime.faults import is_fault
from octavo.server.answers.answer_size import LogprobLimit
from octavo.server.errors import spelling

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence

    from octavo.engine.input_processor import ProcessedInput
    from octavo.outputs import RequestOutput
    from octavo.server.answers.jobs import Job
    from octavo.server.answers.usage import UsageCounter
    from octavo.server.service import Service

T = TypeVar("T")
_ERRORS: dict[ErrorCode, Callable[[str], OctavoError]] = {
    ErrorCode.DEADLINE_PASSED: DeadlineError,
    ErrorCode.GRAMMAR_EXCEEDED: partial(RequestError, parameter="structured_outputs"),
    ErrorCode.NOTHING_ALLOWED: partial(RequestError, parameter="allowed_token_ids"),
    ErrorCode.REQUEST_FAILED: RequestFailedError,
    ErrorCode.STEP_FAILED: ExecutionError,
}
_MERGED = 16  # outputs between their streams and their reader: the streams themselves count what is not read


async def outputs_of(
    service: Service, job: Job, usage: UsageCounter
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of all prompts as they come, with the prompt's index; as many at once as the job's place has streams for.

    usage: counts what came last of one that failed or was cut off; who reads the others counts those.
    Raises `ExecutionError` for one that failed, `DeadlineError` for one that took too long, `RequestError` for one
    whose grammar did, `AuthenticationError` or `ServerClosingError` for one that ends with its key or with the server.
    """
    with spelling(job.spelled):
        most, longest = service.config.max_request_logprobs, service.model_info.max_model_len
        logprobs = LogprobLimit(most, longest, job.params, len(job.prompts))

        def check(processed: ProcessedInput) -> None:
            if job.check is not None:
                job.check(processed)
            logprobs.check(processed)

        streams = [
            service.generate(
                prompt,
                job.params,
                job.request_id if len(job.prompts) == 1 else f"{job.request_id}-{index}",
                place=job.place,
                options=job.options,
                deadline=job.deadline,
                check=check,
                untold=lambda output: usage.add(output, output.outputs),
            )
            for index, prompt in enumerate(job.prompts)
        ]
        async with aclosing(merge(streams, at_once=job.place.num_streams // job.params.n)) as merged:
            async for index, output in merged:
                if output.error_code is not None:
                    usage.add(output, output.outputs)
                    raise _ERRORS[output.error_code](output.error or output.error_code.text)
                yield index, output


async def merge(streams: Sequence[AsyncIterator[T]], *, at_once: int) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the items of several streams as they come, each with its stream's index; the first error ends them all.

    at_once: the next stream is begun when fewer than so many are open.
    """
    if len(streams) == 1:  # as most are: nothing to merge
        async with aclosing(streams[0]) as only:  # type: ignore[type-var]  # an async generator, by its protocol
            async for output in only:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(_MERGED)
    waiting = iter(enumerate(streams))
    tasks = [asyncio.create_task(_pump(waiting, queue)) for _ in range(min(at_once, len(streams)))]
    num_open = len(tasks)
    try:
        while num_open:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    waiting: Iterator[tuple[int, AsyncIterator[T]]], queue: asyncio.Queue[tuple[int, T] | BaseException | None]
) -> None:
    """Put the items of one stream behind the other into a queue; at last an error, or None."""
    try:
        for index, stream in waiting:
            async with aclosing(stream):  # type: ignore[type-var]  # an async generator, by its protocol
                async for item in stream:
                    await queue.put((index, item))
    except BaseException as error:
        if not is_fault(error):
            raise
        await queue.put(error)  # raised again by the reader
    else:
        await queue.put(None)
