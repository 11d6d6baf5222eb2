from __future__ import annotations

import asyncio
import threading

import pytest
from fakes import FakeExecutor, answer_text, answer_token, make_engine
from streams import collect, run

from octavo.engine import output_stream
from octavo.engine.async_llm import AsyncEngine
from octavo.errors import EngineDeadError, RequestError, SlowReaderError
from octavo.sampling_params import RequestOutputKind, SamplingParams


@pytest.fixture
def llm():
    made = AsyncEngine(make_engine(FakeExecutor(step_s=0.001)))
    yield made
    made.shutdown()


async def until_free_blocks(llm, count: int, *, equal: bool = True) -> None:
    """Poll between steps. The time limit of the test ends a wait in vain."""
    while (await free_blocks(llm) == count) is not equal:  # noqa: ASYNC110 - the engine has no event for it
        await asyncio.sleep(0)


async def free_blocks(llm) -> int:
    return await llm.call(lambda engine: engine.core.scheduler.kv_cache_manager.pool.num_free_blocks)


def test_concurrent_streams_get_correct_texts_and_free_all_blocks(llm):
    async def main():
        prompts = ["x" * (index + 1) for index in range(20)]
        texts = await asyncio.gather(
            *(collect(llm, prompt, str(index), max_tokens=40) for index, prompt in enumerate(prompts))
        )
        assert texts == [answer_text(len(prompt), 0, 40) for prompt in prompts]
        assert await free_blocks(llm) == 256

    run(main())


def test_fault_in_on_unread_affects_only_its_request(llm, caplog):
    """The fault is reported on the event loop, next to outputs of other requests."""

    def fails(_output):
        raise RuntimeError("a fault")

    async def main():
        left = llm.generate("hello", SamplingParams(max_tokens=40, ignore_eos=True), "left", on_unread=fails)
        await anext(left)
        others = [asyncio.create_task(collect(llm, "x" * (n + 1), str(n), max_tokens=40)) for n in range(20)]
        await left.aclose()
        assert await asyncio.gather(*others) == [answer_text(n + 1, 0, 40) for n in range(20)]
        await until_free_blocks(llm, 256)

    run(main())
    assert {record.getMessage().split()[1] for record in caplog.records if record.levelname == "ERROR"} == {"left"}


def test_f22_closed_stream_aborts_its_request(llm):
    async def main():
        stream = llm.generate("hello", SamplingParams(max_tokens=None, ignore_eos=True), "a")
        async for _ in stream:
            break
        await stream.aclose()
        await until_free_blocks(llm, 256)
        assert await llm.call(lambda engine: engine.core.scheduler.get_num_unfinished_requests()) == 0

    run(main())


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "reads nothing"])
def test_unread_outputs_are_reported_through_on_unread(leaves):
    """Each token is reported once: to the reader, or as unread."""
    made = AsyncEngine(make_engine(FakeExecutor(step_s=0.001)), max_unread_outputs=20)

    async def main():
        unread = []
        params = SamplingParams(max_tokens=None, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        stream = made.generate("hello", params, "a", on_unread=unread.append)
        read = [await anext(stream)]
        if leaves:
            await stream.aclose()
        else:
            await until_free_blocks(made, 256)  # the request was aborted
            with pytest.raises(SlowReaderError):
                read += [output async for output in stream]
        while not any(output.finished for output in unread):  # noqa: ASYNC110 - nobody tells of it but this
            await asyncio.sleep(0.001)
        tokens = [token for output in read + unread for token in output.outputs[0].token_ids]
        assert [output.finished for output in unread].count(True) == 1
        return tokens

    try:
        tokens = run(main())
    finally:
        made.shutdown()
    assert len(tokens) > 20 or leaves
    assert tokens == [answer_token(5, 0, index) for index in range(len(tokens))]


def test_cancelled_reader_aborts_its_request(llm):
    async def main():
        task = asyncio.create_task(collect(llm, "hello", "a", max_tokens=None, ignore_eos=True))
        await until_free_blocks(llm, 256, equal=False)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_free_blocks(llm, 256)

    run(main())


def test_refused_request_raises_only_for_its_caller(llm):
    async def main():
        good = asyncio.create_task(collect(llm, "hello", "a", max_tokens=30))
        with pytest.raises(RequestError):
            await collect(llm, "", "b")
        with pytest.raises(RequestError):
            await collect(llm, "x" * 5000, "c")
        assert await good == answer_text(5, 0, 30)

    run(main())


def test_reader_cancelled_before_acceptance_aborts_request(monkeypatch):
    """Its preparation, for example of a grammar, is no longer needed."""
    engine = make_engine(FakeExecutor())
    submitted, aborted = threading.Event(), threading.Event()
    monkeypatch.setattr(engine, "submit", lambda *_: submitted.set())  # the engine never answers
    monkeypatch.setattr(engine, "abort_request", lambda request_id: request_id == "a" and aborted.set())
    llm = AsyncEngine(engine)

    async def main():
        task = asyncio.create_task(collect(llm, "hello", "a"))
        assert await asyncio.to_thread(submitted.wait, 20)
        task.cancel()
        assert await asyncio.to_thread(aborted.wait, 20)

    run(main())
    llm.shutdown()


@pytest.mark.turn(8)
def test_cancelled_duplicate_id_does_not_abort_first_request(monkeypatch):
    engine = make_engine(FakeExecutor(step_s=0.001))
    llm, submitted = AsyncEngine(engine), threading.Event()

    async def main():
        first = asyncio.create_task(collect(llm, "hello", "a", max_tokens=500, ignore_eos=True))
        await until_free_blocks(llm, 256, equal=False)
        monkeypatch.setattr(engine, "submit", lambda *_: submitted.set())  # as if it waited for its grammar
        second = asyncio.create_task(collect(llm, "hello", "a"))
        assert await asyncio.to_thread(submitted.wait, 20)
        second.cancel()
        assert await first == answer_text(5, 0, 500)

    run(main())
    llm.shutdown()


def test_timeout_s_counts_from_call_of_generate():
    llm = AsyncEngine(make_engine(FakeExecutor(step_s=0.001)))

    async def main():
        loop, timers, reached = asyncio.get_running_loop(), [], []
        call_at = loop.call_at
        loop.call_at = lambda when, *rest, **options: timers.append(when) or call_at(when, *rest, **options)
        begin = loop.time()

        async def wait(_processed):  # as if it waited for room
            reached.append(loop.time())
            await asyncio.sleep(0.01)

        async for _ in llm.generate("hello", SamplingParams(max_tokens=2), "a", timeout_s=1000, on_processed=wait):
            pass
        limit_s = 1000 + output_stream.DEADLINE_GRACE_S
        assert [when for when in timers if begin + limit_s <= when <= reached[0] + limit_s]

    run(main())
    llm.shutdown()


def test_engine_death_reaches_every_reader():
    executor = FakeExecutor()
    llm = AsyncEngine(make_engine(executor))

    async def main():
        executor.die = True
        results = await asyncio.gather(
            *(collect(llm, "hello", str(index), max_tokens=50) for index in range(4)), return_exceptions=True
        )
        assert all(isinstance(result, EngineDeadError) for result in results)
        assert not llm.is_alive
        with pytest.raises(EngineDeadError):
            await collect(llm, "hello", "later")

    run(main())
    llm.shutdown()  # readers get the error first, then the thread ends
    assert executor.is_shut_down


def test_request_that_kills_engine_raises_EngineDeadError(monkeypatch):
    executor = FakeExecutor()
    engine = make_engine(executor)
    monkeypatch.setattr(engine, "submit", lambda *_: 1 / 0)
    llm = AsyncEngine(engine)

    async def main():
        with pytest.raises(EngineDeadError, match="division"):
            await collect(llm, "hello", "a")

    run(main())
    llm.shutdown()  # readers get the error first, then the thread ends
    assert executor.is_shut_down


def test_shutdown_ends_open_streams():
    llm = AsyncEngine(make_engine(FakeExecutor(step_s=0.001)))

    async def main():
        task = asyncio.create_task(collect(llm, "hello", "a", max_tokens=None, ignore_eos=True))
        await until_free_blocks(llm, 256, equal=False)
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(EngineDeadError):
            await task

    run(main())
