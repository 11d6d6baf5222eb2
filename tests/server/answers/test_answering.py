"""Outputs become an HTTP answer, whole or as a stream of events. Tested without an engine and in virtual time."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from router.virtual_time import run_virtually
from starlette.requests import ClientDisconnect

from octavo.data.kv_transfer_params import KVTransferParams
from octavo.errors import DeadlineError, RequestError, RequestFailedError
from octavo.outputs import CompletionOutput, ErrorCode, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.answers import answering
from octavo.server.answers.answering import ChoiceUpdates, EventStreamResponse, answer, answer_complete
from octavo.server.answers.job_outputs import MergedOutputs, error_of, outputs_of
from octavo.server.answers.jobs import Job, StreamForm, event, json_response, line
from octavo.server.answers.usage import UsageCounter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

KEEP_ALIVE_S = 10.0
ALIVE = b": alive\n\n"


def output(*texts: str, finished: bool = False, error: ErrorCode | None = None) -> RequestOutput:
    choices = [
        CompletionOutput(index, text, [*text.encode()], finish_reason="stop" if finished else None)
        for index, text in enumerate(texts)
    ]
    text = None if error is None else error.text
    return RequestOutput("r", None, [1, 2, 3], choices, finished, error=text, error_code=error)


class Service:
    """Generates the outputs of each prompt: pairs of a pause in seconds and an output or an exception.

    asked: request ids and options of the calls. ended: the prompts of the generators that have ended.
    """

    def __init__(self, **outputs: Any) -> None:
        self._outputs = outputs
        self.asked: list[tuple[str, Any]] = []
        self.ended: list[str] = []
        self.config = SimpleNamespace(max_request_logprobs=1000, stream_keep_alive_s=KEEP_ALIVE_S)
        self.model_info = SimpleNamespace(max_model_len=1000)
        self.engine = SimpleNamespace(text=None)

    async def generate(self, job: Job, index: int, *, check: Any, unsent: Any) -> AsyncIterator[RequestOutput]:
        del check
        prompt: Any = job.prompts[index]
        self.asked.append((job.request_ids[index], job.options))
        try:
            for seconds, each in self._outputs[prompt]:
                await asyncio.sleep(seconds)
                if isinstance(each, Exception):
                    raise each
                if (error := error_of(each)) is not None:
                    unsent(each)
                    raise error
                yield replace(each, request_id=job.request_ids[index])
        finally:
            self.ended.append(prompt)


class Reply:
    """Writes texts and counts."""

    def whole(self, outputs: Any, usage: Any) -> Any:
        return [[each.text for each in one.outputs] for one in outputs] + [usage.completion_tokens]

    def update(self, update: Any, usage: Any) -> bytes:
        counts = "" if usage is None else f"={usage.completion_tokens}"
        return f"{update.choice}{'!' if update.is_first else ''}{update.completion.text}{counts};".encode()

    def end(self, usage: Any) -> bytes:
        return f"end {usage.completion_tokens}".encode()

    def error(self, error: Any) -> bytes:
        return f"error {error.status}".encode()


class Place:
    num_streams = 8
    is_kept = False
    num_left = 0
    tenant = SimpleNamespace(name="t")

    def release(self) -> None:
        self.num_left += 1


class Client:
    """A client's request. leaves_after_s: seconds until it disconnects."""

    def __init__(self, leaves_after_s: float = 1e9, transfer: KVTransferParams | None = None) -> None:
        self._leaves_after_s = leaves_after_s
        self.state = SimpleNamespace(kv_transfer=transfer, audit={})
        self.scope: Any = {"type": "http", "state": {}}
        self.sent: list[tuple[float, Any]] = []
        self._messages = [{"type": "http.request"}]

    async def receive(self) -> Any:
        if self._messages:
            return self._messages.pop()
        await asyncio.sleep(self._leaves_after_s)
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append((asyncio.get_running_loop().time(), message))

    @property
    def text(self) -> bytes:
        return b"".join(message.get("body", b"") for _, message in self.sent)


@pytest.fixture
def virtually(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a test in virtual time, without threads for texts."""

    async def at_once(_text: Any, _size: int, work: Any, **_: Any) -> Any:
        return work()

    monkeypatch.setattr(answering, "run_text_work", at_once)
    return run_virtually


def job_of(*prompts: str, n: int = 1, **options: Any) -> Job:
    given: Any = Place()
    params = SamplingParams(n=n)
    return Job(request_id="r", model="m", prompts=[*prompts], params=params, place=given, deadline=1e9, **options)


def streamed(service: Service, client: Client, job: Job) -> Any:
    """Return a function that answers with a stream."""

    async def run() -> None:
        given: Any = service
        asked: Any = client
        reply: Any = Reply()
        response = await answer(given, asked, job, reply)
        await response(client.scope, client.receive, client.send)

    return run()


def test_whole_answer_keeps_prompt_order(virtually: Any) -> None:
    async def work(_now: Any) -> None:
        service: Any = Service(a=[(2.0, output("xy", "z", finished=True))], b=[(1.0, output("uvw", finished=True))])
        client: Any = Client()
        job = job_of("a", "b", n=2)
        response = await answer(service, client, job, Reply())  # type: ignore[arg-type]
        assert json.loads(response.body) == [["xy", "z"], ["uvw"], 6]
        assert response.media_type == "application/json"
        assert [request_id for request_id, _ in service.asked] == ["r-0", "r-1"]
        assert [service.ended, client.state.audit["id"]] == [["b", "a"], "r"]
        audit = client.state.audit
        assert (audit["model"], audit["stream"], audit["usage"].usage().completion_tokens) == ("m", False, 6)
        assert not job.place.is_kept

    virtually(work)


@pytest.mark.parametrize("is_stream", [False, True])
def test_disconnect_before_first_output_ends_request(virtually: Any, is_stream: bool) -> None:
    async def work(now: Any) -> None:
        service: Any = Service(a=[(9.0, output("x", finished=True))])
        client: Any = Client(leaves_after_s=3.0)
        with pytest.raises(ClientDisconnect):
            await answer(service, client, job_of("a", stream=is_stream), Reply())  # type: ignore[arg-type]
        assert (now(), service.ended) == (3.0, ["a"])
        assert len(asyncio.all_tasks()) == 1

    virtually(work)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        (output(error=ErrorCode.DEADLINE_PASSED, finished=True), DeadlineError),
        (RuntimeError("a fault"), RequestFailedError),
        (DeadlineError("mine"), DeadlineError),
    ],
)
def test_error_before_first_output_is_raised(virtually: Any, is_stream: bool, trouble: Any, kind: Any) -> None:
    async def work(_now: Any) -> None:
        service: Any = Service(a=[(1.0, trouble)])
        client: Any = Client()
        with pytest.raises(kind):
            await answer(service, client, job_of("a", stream=is_stream), Reply())  # type: ignore[arg-type]
        assert len(asyncio.all_tasks()) == 1

    virtually(work)


@pytest.mark.parametrize("is_stream", [False, True])
def test_error_of_one_prompt_ends_others(virtually: Any, is_stream: bool) -> None:
    async def work(now: Any) -> None:
        service: Any = Service(a=[(1.0, DeadlineError("mine"))], b=[(9.0, output("x", finished=True))])
        client: Any = Client()
        with pytest.raises(DeadlineError):
            await answer(service, client, job_of("a", "b", stream=is_stream), Reply())  # type: ignore[arg-type]
        assert (now(), service.ended, len(asyncio.all_tasks())) == (1.0, ["a", "b"], 1)

    virtually(work)


@pytest.mark.parametrize("code", ErrorCode)
def test_error_without_text_has_text_of_its_code(code: ErrorCode) -> None:
    for text in (None, "mine"):
        error = error_of(RequestOutput("r", None, [], [], finished=True, error=text, error_code=code))
        assert str(error) == (text or code.text)


def test_events_and_lines_are_json() -> None:
    assert event({"a": 1}) == b'data: {"a":1}\n\n'
    assert event({"a": 1}, "done") == b'event: done\ndata: {"a":1}\n\n'
    assert line({"a": 1}) == b'{"a":1}\n'
    assert json_response({"a": 1}).body == b'{"a":1}'


@pytest.mark.parametrize("counts", [False, True])
def test_stream_sends_changed_choices_until_finished(virtually: Any, counts: bool) -> None:
    async def work(_now: Any) -> None:
        done = output("c", "", finished=True)
        steps = [output("", ""), output("a", ""), output("", "b"), output("d", ""), done, output("late", "late")]
        service = Service(p=[(0.1, step) for step in steps], q=[(5.0, output("e", finished=True))])
        client, job = Client(), job_of("p", "q", n=2, stream=True, continuous_usage=counts)
        await streamed(service, client, job)
        told = [("0!a", 1), ("1!b", 2), ("0d", 3), ("0c", 4), ("1", 4), ("2!e", 5)]
        expected = "".join(f"{text}={count};" if counts else f"{text};" for text, count in told)
        assert client.text.decode() == expected + "end 5"
        start = client.sent[0][1]
        assert start["status"] == 200
        assert {(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")} < set(start["headers"])
        assert (job.place.is_kept, job.place.num_left) == (True, 1)
        assert client.state.audit["stream"] is True
        assert len(asyncio.all_tasks()) == 1

    virtually(work)


@pytest.mark.parametrize(
    ("trouble", "status"),
    [(RuntimeError("a fault"), 500), (output(error=ErrorCode.DEADLINE_PASSED, finished=True), 504)],
)
def test_error_during_stream_is_last_event(virtually: Any, trouble: Any, status: int) -> None:
    async def work(_now: Any) -> None:
        service = Service(a=[(1.0, output("x")), (1.0, trouble)])
        client, job = Client(), job_of("a", stream=True)
        await streamed(service, client, job)
        assert client.text == b"0!x;error %d" % status
        assert client.scope["state"]["error"].status == status
        assert (job.place.num_left, service.ended) == (1, ["a"])

    virtually(work)


def test_disconnect_during_stream_ends_request(virtually: Any) -> None:
    async def work(now: Any) -> None:
        service = Service(a=[(1.0, output("x")), (100.0, output("y", finished=True))])
        client, job = Client(leaves_after_s=5.0), job_of("a", stream=True)
        await streamed(service, client, job)
        assert now() < 20.0
        assert (client.text, service.ended, job.place.num_left) == (b"0!x;", ["a"], 1)
        assert len(asyncio.all_tasks()) == 1

    virtually(work)


def test_silent_stream_sends_keep_alives(virtually: Any) -> None:
    async def work(_now: Any) -> None:
        service = Service(a=[(25.0, output("x")), (4.0, output("y")), (31.0, output("z", finished=True))])
        client, job = Client(), job_of("a", stream=True, form=StreamForm("text/x", ALIVE))
        await streamed(service, client, job)
        moments = [round(moment, 3) for moment, message in client.sent if message.get("body") == ALIVE]
        begun = next(moment for moment, message in client.sent if message["type"] == "http.response.start")
        assert begun == 10.0
        assert moments == [20.0, 39.0, 49.0, 59.0]
        assert client.text.replace(ALIVE, b"") == b"0!x;0y;0z;end 3"
        assert all(message["more_body"] for _, message in client.sent if message.get("body") == ALIVE)

    virtually(work)


def test_failed_send_releases_stream_resources(virtually: Any) -> None:
    """The client disconnects before the first message is sent."""

    async def work(_now: Any) -> None:
        service = Service(a=[(1.0, output("x")), (100.0, output("y", finished=True))])
        client, job = Client(), job_of("a", stream=True)

        async def fail(_message: Any) -> None:
            raise OSError

        client.send = fail  # type: ignore[method-assign]
        with pytest.raises((OSError, ClientDisconnect)):
            await streamed(service, client, job)
        assert (service.ended, job.place.num_left) == (["a"], 1)
        assert len(asyncio.all_tasks()) == 1

    virtually(work)


def test_prefill_request_is_answered_without_stream(virtually: Any) -> None:
    async def work(_now: Any) -> None:
        transfer = KVTransferParams("t", is_prefill=True)
        service: Any = Service(a=[(1.0, output("x", finished=True))])
        client: Any = Client(transfer=transfer)
        response = await answer(service, client, job_of("a", stream=True), Reply())  # type: ignore[arg-type]
        assert not isinstance(response, EventStreamResponse)
        ((_, told),) = service.asked
        assert told.kv_transfer_params == transfer
        service = Service(a=[(1.0, output("x", finished=True))])
        client = Client(transfer=KVTransferParams("t"))
        response = await answer(service, client, job_of("a"), Reply())  # type: ignore[arg-type]
        assert json.loads(response.body) == [["x"], 1]
        ((_, told),) = service.asked
        assert told.kv_transfer_params.transfer_id == "t"

    virtually(work)


def test_uncounted_completions_give_zero_completion_tokens(virtually: Any) -> None:
    async def work(_now: Any) -> None:
        service: Any = Service(a=[(1.0, output("xy", finished=True))])
        client: Any = Client()
        response = await answer_complete(service, client, job_of("a", counts_completions=False), Reply())  # type: ignore[arg-type]
        assert json.loads(response.body) == [["xy"], 0]

    virtually(work)


class SlowToEnd(Service):
    """A service whose generators need a second to end."""

    async def generate(self, job: Job, index: int, *, check: Any, unsent: Any) -> AsyncIterator[RequestOutput]:
        try:
            async for each in super().generate(job, index, check=check, unsent=unsent):
                yield each
        finally:
            await asyncio.sleep(1.0)
            self.ended.append("at last")


@pytest.mark.parametrize("is_stream", [False, True])
def test_request_ends_before_disconnected_client_is_released(virtually: Any, is_stream: bool) -> None:
    async def work(now: Any) -> None:
        service: Any = SlowToEnd(a=[(9.0, output("x", finished=True))])
        client: Any = Client(leaves_after_s=3.0)
        with pytest.raises(ClientDisconnect):
            await answer(service, client, job_of("a", stream=is_stream), Reply())  # type: ignore[arg-type]
        assert (now(), service.ended[-1]) == (4.0, "at last")
        assert len(asyncio.all_tasks()) == 1

    virtually(work)


def test_slow_reader_of_last_event_gets_no_keep_alive(virtually: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(_now: Any) -> None:
        service = Service(a=[(1.0, output("x", finished=True))])
        client, job = Client(), job_of("a", stream=True, form=StreamForm("text/x", ALIVE))
        send, waits = client.send, []

        async def slowly(message: Any) -> None:
            await send(message)
            if not message.get("more_body", True):
                await asyncio.sleep(95.0)

        async def noted(seconds: float) -> None:
            waits.append(seconds)
            await sleep(seconds)

        sleep = asyncio.sleep
        client.send = slowly  # type: ignore[method-assign]
        monkeypatch.setattr(asyncio, "sleep", noted)
        await streamed(service, client, job)
        assert client.text == b"0!x;end 1"
        assert (job.place.num_left, service.ended) == (1, ["a"])
        assert len(waits) < 40  # it sleeps between its looks

    virtually(work)


class Checking(Service):
    """A service that checks each prompt before it generates."""

    async def generate(self, job: Job, index: int, *, check: Any, unsent: Any) -> AsyncIterator[RequestOutput]:
        check(SimpleNamespace(prompt_token_ids=[1] * (index + 1), sampling_params=job.params))
        async for each in super().generate(job, index, check=check, unsent=unsent):
            yield each


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_refusal_by_check_of_job_ends_request(virtually: Any, num_prompts: int) -> None:
    async def work(_now: Any) -> None:
        def refuse(processed: Any) -> None:
            if len(processed.prompt_token_ids) == num_prompts:
                raise RequestError("mine", parameter="input")

        service: Any = Checking(a=[(1.0, output("x", finished=True))])
        job = job_of(*"a" * num_prompts, check=refuse)
        with pytest.raises(RequestError, match="mine"):
            await answer(service, Client(), job, Reply())  # type: ignore[arg-type]

    virtually(work)


@pytest.mark.parametrize("is_stream", [False, True])
def test_cancellation_is_no_fault_of_request(virtually: Any, is_stream: bool) -> None:
    async def work(_now: Any) -> None:
        service: Any = Service(a=[(9.0, output("x", finished=True))])
        client: Any = Client()
        task = asyncio.create_task(answer(service, client, job_of("a", stream=is_stream), Reply()))  # type: ignore[arg-type]
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert service.ended == ["a"]

    virtually(work)


def test_single_prompt_keeps_its_stream_and_several_are_merged(virtually: Any) -> None:
    async def work(_now: Any) -> None:
        service: Any = Service(a=[(1.0, output("x", finished=True))], b=[(1.0, output("y", finished=True))])
        one = outputs_of(service, job_of("a"), UsageCounter())
        several = outputs_of(service, job_of("a", "b"), UsageCounter())
        assert [isinstance(each, MergedOutputs) for each in (one, several)] == [False, True]
        assert len([each async for each in one]) == 1
        assert len([each async for each in several]) == 2
        assert sorted(service.ended) == ["a", "a", "b"]

    virtually(work)


def test_permit_limits_choices_of_prompts_at_once(virtually: Any) -> None:
    async def work(now: Any) -> None:
        service: Any = Service(a=[(1.0, output("x", finished=True))])
        outputs = outputs_of(service, job_of(*"aaaa", n=Place.num_streams // 2), UsageCounter())
        assert len([each async for each in outputs]) == 4
        assert now() == 2.0

    virtually(work)


def test_full_queue_of_merged_outputs_does_not_delay_end(virtually: Any) -> None:
    async def work(now: Any) -> None:
        service: Any = Service(a=[(0.0, output("x"))] * 99)
        outputs = outputs_of(service, job_of("a", "a"), UsageCounter())
        await anext(outputs)
        await asyncio.sleep(1.0)
        await asyncio.wait_for(outputs.aclose(), 1.0)
        assert (now(), service.ended) == (1.0, ["a", "a"])

    virtually(work)


@pytest.mark.parametrize(
    ("text", "token_ids", "finish_reason", "is_told"),
    [("", [], None, False), ("x", [], None, True), ("", [5], None, True), ("", [], "stop", True)],
)
def test_update_is_told_only_if_it_has_news(text: str, token_ids: list[int], finish_reason: Any, is_told: bool) -> None:
    completion = CompletionOutput(0, text, token_ids, finish_reason=finish_reason)
    told = ChoiceUpdates(job_of("a")).of(RequestOutput("r", None, [1], [completion], finished=False))
    assert len(told) == is_told


def test_client_failure_before_first_output_ends_request(virtually: Any) -> None:
    async def work(now: Any) -> None:
        service = Service(a=[(1000.0, output("x", finished=True))])
        client, job = Client(), job_of("a", stream=True)

        async def fail(_message: Any) -> None:
            raise OSError

        client.send = fail  # type: ignore[method-assign]
        with pytest.raises((OSError, ClientDisconnect)):
            await streamed(service, client, job)
        assert now() < 2 * KEEP_ALIVE_S
        assert (service.ended, job.place.num_left) == (["a"], 1)

    virtually(work)


def test_single_prompt_keeps_request_id_and_several_are_numbered() -> None:
    assert job_of("a").request_ids == ["r"]
    assert job_of("a", "b").request_ids == ["r-0", "r-1"]
