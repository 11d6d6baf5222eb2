"""From prompts to an HTTP answer, whole or as a stream of events; the same for every API.

What differs between APIs is how outputs are spelled: a `Reply`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from octavo.errors import DeadlineError, ExecutionError, OctavoError, RequestError, RequestFailedError
from octavo.outputs import DEADLINE_PASSED, GRAMMAR_EXCEEDED, NOTHING_ALLOWED
from octavo.runtime.faults import error_for, is_fault, request_failed
from octavo.runtime.text_work import beside
from octavo.sampling_params import RequestOutputKind
from octavo.server.answers.answer_size import LogprobLimit, num_entries
from octavo.server.answers.prefill import PrefillReply, prefill_of
from octavo.server.answers.usage import UsageCounter
from octavo.server.errors import note_error, spelling, to_http

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence

    from starlette.requests import Request
    from starlette.types import Message, Receive, Scope, Send

    from octavo.data.kv_transfer_params import KVTransferParams
    from octavo.outputs import CompletionOutput, RequestOutput
    from octavo.sampling_params import SamplingParams
    from octavo.server.access.limiter import Permit
    from octavo.server.answers.usage import Usage
    from octavo.server.errors import HttpError
    from octavo.server.service import Service

encoder = msgspec.json.Encoder()
T = TypeVar("T")
_ANSWERING = "it was answered"
_FIELDS_TO_BLAME = {GRAMMAR_EXCEEDED: "structured_outputs", NOTHING_ALLOWED: "allowed_token_ids"}
_MERGED = 16  # outputs between their streams and their reader: the streams themselves count what is not read


@dataclass(frozen=True, slots=True)
class StreamForm:
    """How a stream is sent. keep_alive: what is sent where nothing is told for long, and tells a client nothing."""

    media_type: str
    keep_alive: bytes


EVENTS = StreamForm("text/event-stream", b": still at work\n\n")
LINES = StreamForm("application/x-ndjson", b" ")  # a blank before the next line, which is JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be answered. `model` is the name to answer under, `place` what it holds until it is.

    counts_completions: whether tokens of answers count as such; of prompts that are only scored there are none.
    deadline: on the clock of the event loop. spelled: the engine's name of a parameter -> the one that the client used.
    """

    request_id: str
    model: str
    prompts: list[Any]
    params: SamplingParams
    place: Permit
    deadline: float
    stream: bool = False
    form: StreamForm = EVENTS
    include_usage: bool = False
    continuous_usage: bool = False
    counts_completions: bool = True
    priority: int = 0
    cache_salt: str | None = None
    kv_transfer_params: KVTransferParams | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    spelled: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        params = copy(self.params)  # which were checked when they were made
        params.output_kind = kind
        object.__setattr__(self, "params", params)


@dataclass(frozen=True, slots=True)
class ChoiceUpdate:
    """What came of one choice: `completion` holds its new text and tokens. `choice` counts over all prompts."""

    choice: int
    is_first: bool
    completion: CompletionOutput
    output: RequestOutput


class WholeReply(Protocol):
    """How one API spells outputs when all of them are there."""

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> msgspec.Struct | Sequence[msgspec.Struct]:
        """Return the whole answer; there is one output for each prompt."""
        ...


class Reply(WholeReply, Protocol):
    """How one API spells outputs: whole, or as the events of a stream."""

    def update(self, update: ChoiceUpdate, usage: Usage | None) -> bytes:
        """Return the events of some update; none where they tell a client nothing. usage: if counts go with each."""
        ...

    def end(self, usage: Usage) -> bytes:
        """Return the last events."""
        ...

    def error(self, error: HttpError) -> bytes:
        """Return the last events of a stream that fails."""
        ...


def event(data: Any, kind: str | None = None) -> bytes:
    """Spell a server-sent event."""
    return (b"" if kind is None else f"event: {kind}\n".encode()) + b"data: " + encoder.encode(data) + b"\n\n"


def line(data: Any) -> bytes:
    """Spell an event of a stream of lines."""
    return encoder.encode(data) + b"\n"


def json_response(told: Any) -> Response:
    """Answer with an object that is small."""
    return Response(encoder.encode(told), media_type="application/json")


async def answer(service: Service, http_request: Request, job: Job, reply: Reply) -> Response:
    """Answer a job, whole or as a stream; when the client leaves, its requests are aborted.

    A stream's status is sent with its first event, so that whatever refuses a request still has a status of its own.
    Of a request whose answer is another engine's only the prompts are computed, and that is told.
    """
    transfer: KVTransferParams | None = http_request.state.kv_transfer
    if transfer is not None:
        job = replace(job, kv_transfer_params=transfer)
        if transfer.is_prefill:
            return await answer_whole(service, http_request, prefill_of(job), PrefillReply(job))
    if not job.stream:
        return await answer_whole(service, http_request, job, reply)
    usage = _counter(http_request, job)
    update = _updates(service, job, usage)
    with _failing_alone(job):
        begun = asyncio.ensure_future(anext(update))
        first = await _begun(http_request, begun, service.config.stream_keep_alive_s)
    events = _events(service, _chain(first, update), http_request.scope["state"], job, reply, usage)
    return EventStream(events, job.form, first, update, job.place, service.config.stream_keep_alive_s)


async def answer_whole(service: Service, http_request: Request, job: Job, reply: WholeReply) -> Response:
    """Answer a job when all of its outputs are there; when the client leaves, its requests are aborted."""
    usage = _counter(http_request, job)
    with _failing_alone(job):
        outputs = await unless_disconnected(http_request, _whole(service, job, usage))
        size = sum(num_entries(output, output.outputs, with_prompt=True) for output in outputs)
        content = await beside(
            service.engine.text,
            size,
            lambda: encoder.encode(reply.whole(outputs, usage.usage())),
            tenant=job.place.tenant.name,
        )
    return Response(content, media_type="application/json")


@contextlib.contextmanager
def _failing_alone(job: Job) -> Iterator[None]:
    """Make an error that names the request of whatever goes wrong while it is answered."""
    try:
        yield
    except (OctavoError, ClientDisconnect):
        raise
    except BaseException as error:
        if not is_fault(error):
            raise
        raise error_for(job.request_id, _ANSWERING, error) from error


def _counter(http_request: Request, job: Job) -> UsageCounter:
    """Make what counts a job's tokens, and put what it is into its line of the audit log, which reads the counts."""
    usage = UsageCounter(counts_completions=job.counts_completions)
    http_request.state.audit.update(id=job.request_id, model=job.model, stream=job.stream, usage=usage)
    return usage


class EventStream(StreamingResponse):
    """Events of a stream. However it ends, also before its first one, its request and its place are given up.

    Where nothing is told for keep_alive_s seconds, a sign of life is sent: whatever stands between a server and its
    client ends connections on which nothing moves.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        form: StreamForm,
        first: asyncio.Task[ChoiceUpdate],
        updates: AsyncGenerator[ChoiceUpdate, None],
        place: Permit,
        keep_alive_s: float,
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type=form.media_type, headers=headers)
        self._keep_alive_bytes = form.keep_alive
        self._first, self._updates, self._place = first, updates, place
        self._keep_alive_s = keep_alive_s
        self._last_sent = 0.0
        self._is_open = False
        place.is_kept = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events."""
        clock = asyncio.get_running_loop().time

        async def sending(message: Message) -> None:
            self._last_sent = clock()
            self._is_open = bool(message.get("more_body", True))
            await send(message)

        keeper = asyncio.create_task(self._keep_alive(send, clock))
        try:
            await super().__call__(scope, receive, sending)
        finally:
            keeper.cancel()
            self._first.cancel()
            await asyncio.gather(keeper, self._first, return_exceptions=True)
            await self._updates.aclose()
            self._place.leave()

    async def _keep_alive(self, send: Send, clock: Callable[[], float]) -> None:
        """Send signs of life between events; an event is handed over at once, so none is cut by one."""
        while True:
            await asyncio.sleep(self._last_sent + self._keep_alive_s - clock())
            if self._is_open and clock() >= self._last_sent + self._keep_alive_s:
                self._last_sent = clock()
                await send({"type": "http.response.body", "body": self._keep_alive_bytes, "more_body": True})
            elif not self._is_open:
                await asyncio.sleep(self._keep_alive_s)


async def unless_disconnected(http_request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Wait for some work; cancel it and raise `ClientDisconnect` when the client leaves first."""
    return (await _begun(http_request, asyncio.create_task(work))).result()


async def _begun(http_request: Request, task: asyncio.Task[T], patience_s: float | None = None) -> asyncio.Task[T]:
    """Wait for a task, for so long at most; cancel it and raise `ClientDisconnect` when the client leaves first."""
    watcher = asyncio.create_task(_disconnected(http_request))
    is_kept = False
    try:
        await asyncio.wait({task, watcher}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        elif watcher.done():
            raise ClientDisconnect
        is_kept = True
        return task
    finally:
        watcher.cancel()
        if not is_kept:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await asyncio.gather(watcher, return_exceptions=True)


async def _disconnected(http_request: Request) -> None:
    while (await http_request.receive())["type"] != "http.disconnect":
        pass


async def _whole(service: Service, job: Job, usage: UsageCounter) -> list[RequestOutput]:
    outputs = {}
    async with aclosing(_outputs(service, job, usage)) as stream:
        async for index, output in stream:
            outputs[index] = output
            usage.add(output, output.outputs)
    return [outputs[index] for index in range(len(job.prompts))]


async def _outputs(service: Service, job: Job, usage: UsageCounter) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of all prompts as they come, with the prompt's index; as many at once as the job's place has streams for.

    usage: counts what came last of one that failed or was cut off; who reads the others counts those.
    Raises `ExecutionError` for one that failed, `DeadlineError` for one that took too long, `RequestError` for one
    whose grammar did, `AuthenticationError` or `ServerClosingError` for one that ends with its key or with the server.
    """
    with spelling(job.spelled):
        most, longest = service.config.max_request_logprobs, service.model_info.max_model_len
        logprobs = LogprobLimit(most, longest, job.params, len(job.prompts))
        streams = [
            service.generate(
                prompt,
                job.params,
                job.request_id if len(job.prompts) == 1 else f"{job.request_id}-{index}",
                place=job.place,
                priority=job.priority,
                cache_salt=job.cache_salt,
                kv_transfer_params=job.kv_transfer_params,
                deadline=job.deadline,
                check=logprobs.check,
                untold=lambda output: usage.add(output, output.outputs),
            )
            for index, prompt in enumerate(job.prompts)
        ]
        async with aclosing(merge(streams, at_once=job.place.num_streams // job.params.n)) as merged:
            async for index, output in merged:
                if output.error is not None:
                    usage.add(output, output.outputs)
                    raise _error_of(output.error, output.request_id)
                yield index, output


def _error_of(message: str, request_id: str) -> OctavoError:
    """Return what a request's `error` is to its client."""
    if message in _FIELDS_TO_BLAME:
        return RequestError(message, parameter=_FIELDS_TO_BLAME[message])
    kinds = {request_failed(request_id): RequestFailedError, DEADLINE_PASSED: DeadlineError}
    return kinds.get(message, ExecutionError)(message)


async def _updates(service: Service, job: Job, usage: UsageCounter) -> AsyncGenerator[ChoiceUpdate, None]:
    """Yield what changed, choice by choice; each ends once."""
    seen: set[int] = set()
    ended: set[int] = set()
    async with aclosing(_outputs(service, job, usage)) as stream:
        async for index, output in stream:
            for completion in output.outputs:
                choice = index * job.params.n + completion.index
                if choice in ended or not (completion.token_ids or completion.text or completion.finished):
                    continue
                if completion.finished:
                    ended.add(choice)
                yield ChoiceUpdate(choice, choice not in seen, completion, output)
                seen.add(choice)


async def _events(
    service: Service,
    updates: AsyncGenerator[ChoiceUpdate, None],
    state: dict[str, Any],
    job: Job,
    reply: Reply,
    counter: UsageCounter,
) -> AsyncGenerator[bytes, None]:
    """Spell a stream as events; an error is its last one."""
    try:
        async with aclosing(updates):
            async for each in updates:
                counter.add(each.output, [each.completion])
                spell = partial(reply.update, each, counter.usage() if job.continuous_usage else None)
                size = num_entries(each.output, [each.completion], with_prompt=each.is_first)
                if told := await beside(service.engine.text, size, spell, tenant=job.place.tenant.name):
                    yield told
        yield reply.end(counter.usage())
    except BaseException as error:
        if not is_fault(error):
            raise
        yield reply.error(note_error(state, to_http(error_for(job.request_id, _ANSWERING, error))))


async def _chain(
    first: asyncio.Task[ChoiceUpdate], rest: AsyncGenerator[ChoiceUpdate, None]
) -> AsyncGenerator[ChoiceUpdate, None]:
    yield await first
    async with aclosing(rest):
        async for update in rest:
            yield update


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
