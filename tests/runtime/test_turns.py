"""Tasks of several tenants on one executor: they take turns."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from octavo.errors import QueueFullError
from octavo.runtime.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture
def gate(executor: ThreadPoolExecutor) -> Iterator[threading.Event]:
    """Block the executor's only thread until the event is set."""
    gate = threading.Event()
    executor.submit(gate.wait, 30)
    yield gate
    gate.set()


class Order:
    """Tasks that record their order."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def task(self, name: str) -> Callable[[], None]:
        return lambda: self.ran.append(name)


def test_tasks_of_two_keys_alternate(executor: ThreadPoolExecutor, gate: threading.Event) -> None:
    turns, order = Turns(executor, 20), Order()
    futures = [turns.submit("greedy", order.task(f"greedy {index}")) for index in range(20)]
    futures += [turns.submit("modest", order.task(f"modest {index}")) for index in range(2)]
    gate.set()
    for future in futures:
        future.result(30)
    assert order.ran[:4] == ["greedy 0", "modest 0", "greedy 1", "modest 1"]
    assert order.ran[4:] == [f"greedy {index}" for index in range(2, 20)]


def test_future_reports_running_state_and_exception(executor: ThreadPoolExecutor, gate: threading.Event) -> None:
    turns, began, goes_on = Turns(executor, 9), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        goes_on.wait(30)
        raise ValueError("it is wrong")

    future = turns.submit("a", work)
    assert not future.running()
    gate.set()
    assert began.wait(30)
    assert future.running()
    goes_on.set()
    with pytest.raises(ValueError, match="wrong"):
        future.result(30)


def test_cancelled_tasks_take_no_turn(executor: ThreadPoolExecutor, gate: threading.Event) -> None:
    turns, order = Turns(executor, 9), Order()
    cancelled: list[Future[None]] = [turns.submit("a", order.task("never")) for _ in range(5)]
    kept = [turns.submit("a", order.task("a")), turns.submit("b", order.task("b"))]
    assert all(future.cancel() for future in cancelled)
    gate.set()
    for future in kept:
        future.result(30)
    assert order.ran == ["a", "b"]
    turns.submit("a", order.task("again")).result(30)


def test_full_task_queue_refuses_only_its_key(executor: ThreadPoolExecutor, gate: threading.Event) -> None:
    turns, order = Turns(executor, 3, "3 tasks wait already", "field"), Order()
    futures = [turns.submit("greedy", order.task("greedy")) for _ in range(3)]
    with pytest.raises(QueueFullError, match="3 tasks"):
        turns.submit("greedy", order.task("one more"))
    assert futures.pop().cancel()
    futures.append(turns.submit("greedy", order.task("greedy")))  # it takes the free place
    futures.append(turns.submit("modest", order.task("modest")))
    gate.set()
    for future in futures:
        future.result(30)
    assert sorted(order.ran) == ["greedy", "greedy", "greedy", "modest"]
    turns.submit("greedy", order.task("later")).result(30)
