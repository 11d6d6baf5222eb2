"""From prompts to an HTTP answer, whole or as a stream of events; the same for every API.

What differs between APIs is how outputs are spelled: a `Reply`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from octavo.errors import DeadlineError, ExecutionError, OctavoError, RequestError
from octavo.outputs import DEADLINE_PASSED, GRAMMAR_EXCEEDED
from octavo.sampling_params import RequestOutputKind
from octavo.server.errors import to_http
from octavo.server.openai_responses import PromptTokensDetails, Usage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Sequence

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from octavo.outputs import CompletionOutput, RequestOutput
    from octavo.sampling_params import SamplingParams
    from octavo.server.admission import Place
    from octavo.server.openai_requests import SamplingFields
    from octavo.server.service import Service

logger = logging.getLogger(__name__)
encoder = msgspec.json.Encoder()
T = TypeVar("T")
_MERGED = 16  # outputs between their streams and their reader: the streams themselves count what is not read


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be answered. `model` is the name to answer under, `place` what it holds until it is."""

    request_id: str
    model: str
    prompts: list[Any]
    params: SamplingParams
    stream: bool
    include_usage: bool
    continuous_usage: bool
    priority: int
    cache_salt: str | None
    created: int
    place: Place
    timeout_s: float
    spelled: dict[str, str]  # the engine's name of a parameter -> the one that the client used

    @classmethod
    def make(
        cls,
        request_id: str,
        model: str,
        prompts: list[Any],
        params: SamplingParams,
        request: SamplingFields,
        place: Place,
        timeout_s: float,
        *,
        prompt_field: str = "prompt",
    ) -> Job:
        """Take the fields that all APIs spell alike."""
        structure_field = "structured_outputs" if request.response_format is None else "response_format"
        options = request.stream_options
        stream = bool(request.stream)
        kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        return cls(
            request_id=request_id,
            model=model,
            prompts=prompts,
            params=replace(params, output_kind=kind),
            stream=stream,
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
            priority=request.priority or 0,
            cache_salt=request.cache_salt,
            created=int(time.time()),
            place=place,
            timeout_s=timeout_s,
            spelled={"prompt": prompt_field, "structured_outputs": structure_field},
        )


@dataclass(frozen=True, slots=True)
class News:
    """What came of one choice: `completion` holds its new text and tokens. `choice` counts over all prompts."""

    choice: int
    is_first: bool
    completion: CompletionOutput
    output: RequestOutput

    @property
    def is_visible(self) -> bool:
        """Whether it tells a client anything: not so while its text is held back, in the middle of a character, say."""
        completion = self.completion
        return bool(self.is_first or completion.text or completion.logprobs or completion.finished)


class Reply(Protocol):
    """How one API spells outputs. `end`: what ends a stream behind its last event."""

    end: bytes

    def chunk(self, news: News, usage: Usage | None) -> msgspec.Struct:
        """One event of a stream."""
        ...

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        """The event that ends a stream with its usage."""
        ...

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> msgspec.Struct:
        """The whole answer; one output for each prompt."""
        ...

    def error(self, error: Exception) -> Any:
        """The event of an error in mid-stream."""
        ...


class OpenAIReply:
    """What the OpenAI API's replies share."""

    end = b"data: [DONE]\n\n"

    def error(self, error: Exception) -> Any:
        """Return an error object."""
        return to_http(error).body


class UsageCounter:
    """Counts tokens of a stream as they go by."""

    def __init__(self) -> None:
        self._prompts: dict[str, tuple[int, int]] = {}
        self._num_completion_tokens = 0
        self.finish_reasons: list[str] = []

    def add(self, output: RequestOutput, completions: Iterable[CompletionOutput]) -> None:
        """Count an output's prompt, once, and the tokens of some of its completions."""
        self._prompts[output.request_id] = (len(output.prompt_token_ids), output.num_cached_tokens)
        for completion in completions:
            self._num_completion_tokens += len(completion.token_ids)
            if completion.finish_reason is not None:
                self.finish_reasons.append(completion.finish_reason)

    def summary(self) -> dict[str, Any]:
        """Return the counts so far, for a log."""
        usage = self.usage()
        return {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "finish_reasons": self.finish_reasons,
        }

    def usage(self) -> Usage:
        """Return the counts so far."""
        num_prompt_tokens = sum(num_tokens for num_tokens, _ in self._prompts.values())
        num_cached_tokens = sum(num_cached for _, num_cached in self._prompts.values())
        total = num_prompt_tokens + self._num_completion_tokens
        return Usage(num_prompt_tokens, self._num_completion_tokens, total, PromptTokensDetails(num_cached_tokens))


def read_timeout(http_request: Request, limit_s: float) -> float:
    """Return the seconds of X-Request-Timeout, at most the limit. Raises `RequestError` for what is no time."""
    given = http_request.headers.get("x-request-timeout")
    if given is None:
        return limit_s
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise RequestError("X-Request-Timeout must be a number of seconds above 0", parameter="X-Request-Timeout")
    return min(seconds, limit_s)


async def answer(service: Service, http_request: Request, job: Job, reply: Reply) -> Response:
    """Answer a job; when the client leaves, its requests are aborted.

    A stream's status is sent with its first event, so that whatever refuses a request still has a status of its own.
    """
    try:
        return await _answer(service, http_request, job, reply)
    except RequestError as error:
        error.parameter = job.spelled.get(error.parameter or "", error.parameter)
        raise


async def _answer(service: Service, http_request: Request, job: Job, reply: Reply) -> Response:
    if not job.stream:
        outputs = await unless_disconnected(http_request, _whole(service, job))
        usage = UsageCounter()
        for output in outputs:
            usage.add(output, output.outputs)
        note(http_request, job, usage)
        return Response(encoder.encode(reply.whole(outputs, usage.usage())), media_type="application/json")
    news = _news(service, job)
    first = await unless_disconnected(http_request, _next(news))
    usage = UsageCounter()
    note(http_request, job, usage)
    return EventStream(_events(first, news, job, reply, usage), news, job.place)


def note(http_request: Request, job: Job, usage: UsageCounter) -> None:
    """Put what a request is and costs into its line of the audit log; counts are read when the line is written."""
    http_request.state.audit.update(id=job.request_id, model=job.model, stream=job.stream, usage=usage)


class EventStream(StreamingResponse):
    """Server-sent events. However it ends, also before its first one, its request and its place are given up."""

    def __init__(self, events: AsyncIterator[bytes], news: AsyncGenerator[News, None], place: Place) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._news, self._place = news, place
        place.is_kept = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._news.aclose()
            self._place.leave()


async def unless_disconnected(http_request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Wait for some work; cancel it and raise `ClientDisconnect` when the client leaves first."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(http_request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(http_request: Request) -> None:
    while (await http_request.receive())["type"] != "http.disconnect":
        pass


async def _next(news: AsyncGenerator[News, None]) -> News:
    return await anext(news)


async def _whole(service: Service, job: Job) -> list[RequestOutput]:
    async with aclosing(_outputs(service, job)) as stream:
        outputs = {index: output async for index, output in stream}
    return [outputs[index] for index in range(len(job.prompts))]


async def _outputs(service: Service, job: Job) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of all prompts as they come, with the prompt's place.

    Raises `ExecutionError` for one that failed, `DeadlineError` for one that took too long, and `RequestError` for one
    whose grammar did.
    """
    begun: set[int] = set()
    streams = [
        service.generate(
            prompt,
            job.params,
            job.request_id if len(job.prompts) == 1 else f"{job.request_id}-{index}",
            place=job.place,
            priority=job.priority,
            cache_salt=job.cache_salt,
            timeout_s=job.timeout_s,
        )
        for index, prompt in enumerate(job.prompts)
    ]
    async with aclosing(merge(streams)) as merged:
        async for index, output in merged:
            if output.error is not None:
                raise _error_of(output.error)
            begun.add(index)
            if len(begun) == len(job.prompts):
                job.place.start()
            job.place.charge(sum(len(completion.token_ids) for completion in output.outputs))
            yield index, output


def _error_of(message: str) -> OctavoError:
    """Return what a request's `error` is to its client."""
    if message == DEADLINE_PASSED:
        return DeadlineError(message)
    if message == GRAMMAR_EXCEEDED:
        return RequestError(message, parameter="structured_outputs")
    return ExecutionError(message)


async def _news(service: Service, job: Job) -> AsyncGenerator[News, None]:
    """Yield what changed, choice by choice; each ends once."""
    seen: set[int] = set()
    ended: set[int] = set()
    async with aclosing(_outputs(service, job)) as stream:
        async for index, output in stream:
            for completion in output.outputs:
                choice = index * job.params.n + completion.index
                if choice in ended or not (completion.token_ids or completion.text or completion.finished):
                    continue
                if completion.finished:
                    ended.add(choice)
                yield News(choice, choice not in seen, completion, output)
                seen.add(choice)


async def _events(
    first: News, rest: AsyncGenerator[News, None], job: Job, reply: Reply, counter: UsageCounter
) -> AsyncGenerator[bytes, None]:
    """Spell a stream as server-sent events; an error is its last one."""
    try:
        async with aclosing(rest):
            async for news in _chain(first, rest):
                counter.add(news.output, [news.completion])
                if news.is_visible:
                    yield _event(reply.chunk(news, counter.usage() if job.continuous_usage else None))
        if job.include_usage:
            yield _event(reply.usage_chunk(counter.usage()))
    except Exception as error:
        if not isinstance(error, OctavoError):
            logger.exception("a stream failed")
        yield _event(reply.error(error))
    if reply.end:
        yield reply.end


async def _chain(first: News, rest: AsyncGenerator[News, None]) -> AsyncIterator[News]:
    yield first
    async for news in rest:
        yield news


def _event(data: Any) -> bytes:
    return b"data: " + encoder.encode(data) + b"\n\n"


async def merge(streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the items of several streams as they come, each with its stream's place; the first error ends them all."""
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(_MERGED)

    async def pump(index: int, stream: AsyncIterator[T]) -> None:
        try:
            async for item in stream:
                await queue.put((index, item))
        except Exception as error:  # noqa: BLE001 - raised again by the reader
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
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
