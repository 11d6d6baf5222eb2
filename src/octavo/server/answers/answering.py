"""Answer jobs, for all APIs."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from octavo.errors import OctavoError
from octavo.http.errors import note_error, to_http
from octavo.runtime.faults import error_for
from octavo.runtime.text_work import run_text_work
from octavo.server.answers.answer_size import num_entries
from octavo.server.answers.job_outputs import outputs_of
from octavo.server.answers.jobs import ChoiceUpdate, encoder
from octavo.server.answers.prefill import PrefillReply, prefill_of
from octavo.server.answers.usage import UsageCounter

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator

    from starlette.requests import Request
    from starlette.types import Message, Receive, Scope, Send

    from octavo.data.kv_transfer_params import KVTransferParams
    from octavo.http.limiter import Permit
    from octavo.outputs import RequestOutput
    from octavo.server.answers.job_outputs import Outputs
    from octavo.server.answers.jobs import Job, Reply, StreamForm, WholeReply
    from octavo.server.service import Service

T = TypeVar("T")
_ANSWERING = "it was answered"


async def answer(service: Service, http_request: Request, job: Job, reply: Reply) -> Response:
    """Answer a job. If the client disconnects, abort the job's requests.

    A stream sends the HTTP status after the first output, or after `stream_keep_alive_s` seconds without output. An
    error before that time determines the status.
    """
    transfer: KVTransferParams | None = http_request.state.kv_transfer
    if transfer is not None:
        job = replace(job, options=replace(job.options, kv_transfer_params=transfer))
        if transfer.is_prefill:
            return await answer_complete(service, http_request, prefill_of(job), PrefillReply(job))
    if not job.stream:
        return await answer_complete(service, http_request, job, reply)
    usage, choices = _counter(http_request, job), ChoiceUpdates(job)
    with _failing_alone(job):
        outputs = outputs_of(service, job, usage)
        begun = asyncio.ensure_future(_first_updates(outputs, choices))
        try:
            first = await _begun(http_request, begun, service.config.stream_keep_alive_s)
        except BaseException:
            await outputs.aclose()
            raise
    events = _events(service, first, outputs, choices, http_request.scope["state"], job, reply, usage)
    return EventStreamResponse(events, job.form, first, outputs, job.place, service.config.stream_keep_alive_s)


async def answer_complete(service: Service, http_request: Request, job: Job, reply: WholeReply) -> Response:
    """Answer a job with one response. If the client disconnects, abort the job's requests."""
    usage = _counter(http_request, job)
    with _failing_alone(job):
        outputs = await unless_disconnected(http_request, _whole(service, job, usage))
        size = sum(num_entries(output, output.outputs, with_prompt=True) for output in outputs)
        content = await run_text_work(
            service.engine.text,
            size,
            lambda: encoder.encode(reply.whole(outputs, usage.usage())),
            tenant=job.place.tenant.name,
        )
    return Response(content, media_type="application/json")


@contextlib.contextmanager
def _failing_alone(job: Job) -> Iterator[None]:
    try:
        yield
    except (OctavoError, ClientDisconnect):
        raise
    except BaseException as error:
        raise error_for(job.request_id, _ANSWERING, error) from error


def _counter(http_request: Request, job: Job) -> UsageCounter:
    usage = UsageCounter(counts_completions=job.counts_completions)
    http_request.state.audit.update(id=job.request_id, model=job.model, stream=job.stream, usage=usage)
    return usage


class EventStreamResponse(StreamingResponse):
    """Streams events. After `keep_alive_s` seconds without an event, sends keep-alive bytes.

    The end of the response aborts the job's open requests and releases the job's permit, even if no event was sent.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        form: StreamForm,
        first: asyncio.Task[list[ChoiceUpdate]],
        outputs: Outputs,
        place: Permit,
        keep_alive_s: float,
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type=form.media_type, headers=headers)
        self._keep_alive_bytes = form.keep_alive
        self._first, self._outputs, self._place = first, outputs, place
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
            await self._outputs.aclose()
            self._place.release()

    async def _keep_alive(self, send: Send, clock: Callable[[], float]) -> None:
        while True:
            await asyncio.sleep(self._last_sent + self._keep_alive_s - clock())
            if self._is_open and clock() >= self._last_sent + self._keep_alive_s:
                self._last_sent = clock()
                await send({"type": "http.response.body", "body": self._keep_alive_bytes, "more_body": True})
            elif not self._is_open:
                await asyncio.sleep(self._keep_alive_s)


class ChoiceUpdates:
    """Splits outputs into updates of choices."""

    def __init__(self, job: Job) -> None:
        self._first_choice = {name: index * job.params.n for index, name in enumerate(job.request_ids)}
        self._seen: set[int] = set()
        self._ended: set[int] = set()

    def of(self, output: RequestOutput) -> list[ChoiceUpdate]:
        """Return an update for each choice that has new tokens or text, or that ends."""
        updates = []
        for completion in output.outputs:
            choice = self._first_choice[output.request_id] + completion.index
            is_end = completion.finish_reason is not None
            if choice in self._ended or not (completion.token_ids or completion.text or is_end):
                continue
            if is_end:
                self._ended.add(choice)
            updates.append(ChoiceUpdate(choice, choice not in self._seen, completion, output))
            self._seen.add(choice)
        return updates


async def unless_disconnected(http_request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client disconnects, cancel `work` and raise `ClientDisconnect`."""
    return (await _begun(http_request, asyncio.create_task(work))).result()


async def _begun(http_request: Request, task: asyncio.Task[T], patience_s: float | None = None) -> asyncio.Task[T]:
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
    last = {}
    async with aclosing(outputs_of(service, job, usage)) as outputs:
        async for output in outputs:
            last[output.request_id] = output
            usage.add(output, output.outputs)
    return [last[request_id] for request_id in job.request_ids]


async def _first_updates(outputs: Outputs, choices: ChoiceUpdates) -> list[ChoiceUpdate]:
    async for output in outputs:
        if updates := choices.of(output):
            return updates
    return []


async def _events(
    service: Service,
    first: asyncio.Task[list[ChoiceUpdate]],
    outputs: Outputs,
    choices: ChoiceUpdates,
    state: dict[str, Any],
    job: Job,
    reply: Reply,
    counter: UsageCounter,
) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(outputs):
            updates = await first
            while True:
                for each in updates:
                    completions = [each.completion]
                    counter.add(each.output, completions)
                    encode = partial(reply.update, each, counter.usage() if job.continuous_usage else None)
                    size = num_entries(each.output, completions, with_prompt=each.is_first)
                    if chunk := await run_text_work(service.engine.text, size, encode, tenant=job.place.tenant.name):
                        yield chunk
                try:
                    updates = choices.of(await anext(outputs))
                except StopAsyncIteration:
                    break
        yield reply.end(counter.usage())
    except BaseException as error:  # noqa: BLE001 - see octavo.runtime.faults
        yield reply.error(note_error(state, to_http(error_for(job.request_id, _ANSWERING, error))))
