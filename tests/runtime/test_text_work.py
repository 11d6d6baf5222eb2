"""Text work on threads outside the event loop: short before long, in turns of tenants, with deadlines, and charged."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest

from octavo.engine.chat_template import ChatTemplate
from octavo.errors import DeadlineError, RequestError
from octavo.runtime import text_work
from octavo.runtime.text_work import TextWork, progress

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG = 1 << 20


@pytest.fixture
def text() -> Iterator[TextWork]:
    text = TextWork()
    yield text
    text.shutdown()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


def test_short_text_does_not_wait_for_long_texts(text: TextWork, gate: threading.Event) -> None:
    async def ask() -> tuple[int, list[bool]]:
        long = [asyncio.create_task(text.do(lambda: gate.wait(30), num_chars=LONG)) for _ in range(8)]
        await asyncio.sleep(0)
        short = await text.do(lambda: 7, num_chars=10)
        gate.set()
        return short, await asyncio.gather(*long)

    assert asyncio.run(ask()) == (7, [True] * 8)


@pytest.mark.parametrize(
    ("num_chars", "num_larger"), [(2000, 2100), (2000, 30_000), (30_000, 40_000), (500_000, 600_000)]
)
def test_text_size_lanes_do_not_wait_for_larger_lane(
    text: TextWork, gate: threading.Event, num_chars: int, num_larger: int
) -> None:
    async def ask() -> int:
        held = [asyncio.create_task(text.do(lambda: gate.wait(30), num_chars=num_larger)) for _ in range(8)]
        await asyncio.sleep(0)
        done = await asyncio.wait_for(text.do(lambda: 7, num_chars=num_chars), 10)
        gate.set()
        await asyncio.gather(*held)
        return done

    assert asyncio.run(ask()) == 7


def test_tiny_inference_text_runs_on_event_loop_thread(text: TextWork) -> None:
    counted: list[int] = []

    def work() -> int:
        progress(3)
        return threading.get_ident()

    async def ask(num_chars: int, *, is_count: bool = False) -> int:
        return await text.do(work, num_chars=num_chars, on_read=counted.append, is_count=is_count)

    own = threading.get_ident()
    assert asyncio.run(ask(512)) == own
    assert asyncio.run(ask(513)) != own
    assert asyncio.run(ask(512, is_count=True)) != own
    assert counted == [3, 3, 3]


def test_count_requests_run_singly_and_do_not_delay_answers(text: TextWork, gate: threading.Event) -> None:
    began: list[str] = []

    async def ask() -> str:
        counts = [
            asyncio.create_task(text.do(lambda: (began.append("count"), gate.wait(30)), num_chars=2000, is_count=True))
            for _ in range(8)
        ]
        await asyncio.sleep(0)
        answer = await asyncio.wait_for(text.do(lambda: "answer", num_chars=2000), 10)
        asked_for = sum(map(len, text._count_turns["short"]._waiting.values()))
        assert len(began) + asked_for <= 1  # the rest wait at the gate
        gate.set()
        await asyncio.gather(*counts)
        return answer

    assert asyncio.run(ask()) == "answer"
    assert len(began) == 8


def test_expired_count_request_raises_deadline_error(text: TextWork, gate: threading.Event) -> None:
    async def ask() -> int:
        first = asyncio.create_task(text.do(lambda: gate.wait(30), num_chars=2000, is_count=True))
        await asyncio.sleep(0)
        deadline = asyncio.get_running_loop().time() + 0.05
        with pytest.raises(DeadlineError):
            await text.do(lambda: 1, num_chars=2000, deadline=deadline, is_count=True)
        gate.set()
        await first
        return await asyncio.wait_for(text.do(lambda: 7, num_chars=2000, is_count=True), 10)

    assert asyncio.run(ask()) == 7


def test_text_work_alternates_tenants(text: TextWork, gate: threading.Event) -> None:
    order: list[str] = []

    async def ask() -> None:
        began = asyncio.Event()
        begin = partial(asyncio.get_running_loop().call_soon_threadsafe, began.set)
        first = asyncio.create_task(text.do(lambda: (begin(), gate.wait(30)), num_chars=LONG, tenant="greedy"))
        await began.wait()
        names = ["greedy"] * 5 + ["modest"] * 2
        tasks = [
            asyncio.create_task(text.do(lambda name=name: order.append(name), num_chars=LONG, tenant=name))
            for name in names
        ]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(first, *tasks)

    asyncio.run(ask())
    assert order == ["greedy", "modest", "greedy", "modest", "greedy", "greedy", "greedy"]


def test_expired_text_work_never_starts(text: TextWork, gate: threading.Event) -> None:
    began: list[str] = []

    async def ask() -> None:
        first = asyncio.create_task(text.do(lambda: gate.wait(30), num_chars=LONG))
        await asyncio.sleep(0)
        deadline = asyncio.get_running_loop().time() + 0.05
        with pytest.raises(DeadlineError):
            await text.do(lambda: began.append("late"), num_chars=LONG, deadline=deadline)
        gate.set()
        await first
        await text.do(lambda: began.append("next"), num_chars=LONG)

    asyncio.run(ask())
    assert began == ["next"]


def test_abandoned_text_work_stops_and_is_charged(text: TextWork) -> None:
    began, ended = threading.Event(), threading.Event()
    counted: list[int] = []

    def work() -> None:
        try:
            while True:
                progress(1)
                began.set()
        finally:
            ended.set()

    async def ask() -> None:
        deadline = asyncio.get_running_loop().time() + 0.1
        with pytest.raises(DeadlineError):
            await text.do(work, num_chars=LONG, deadline=deadline, on_read=counted.append)

    asyncio.run(ask())
    assert began.is_set()
    assert ended.wait(30)
    assert len(counted) == 1
    assert counted[0] >= 1


def test_refused_text_work_is_still_charged(text: TextWork) -> None:
    counted: list[int] = []

    def work() -> None:
        progress(5)
        progress(7)
        raise RequestError("too long")

    with pytest.raises(RequestError, match="too long"):
        asyncio.run(text.do(work, num_chars=LONG, on_read=counted.append))
    assert counted == [12]


@pytest.mark.parametrize("walk", ["{{ c.role }}", "user"])
def test_endless_template_rendering_is_aborted(text: TextWork, monkeypatch: pytest.MonkeyPatch, walk: str) -> None:
    monkeypatch.setattr(text_work, "_LONGEST_S", 0.2)
    for name in "cba":
        walk = f"{{% for {name} in messages %}}{walk}{{% endfor %}}"
    template = ChatTemplate(walk)
    messages = [{"role": "user", "content": "a"}] * 3000
    with pytest.raises(RequestError, match=r"took longer than 0\.2 s"):
        asyncio.run(text.do(lambda: template.render(messages), num_chars=LONG))
    assert template.render(messages[:2]) == "user" * 8
