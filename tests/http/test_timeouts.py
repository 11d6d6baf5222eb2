"""Limits of time that end in the same moment are acted on one after the other, with pauses for other work."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from typing import TYPE_CHECKING

import pytest
from running import run_server, wait_until
from test_limits import COMPLETIONS, connect, head, read_all

from octavo.http import timeouts as timeouts_module
from octavo.http.connection import BoundedHttpProtocol
from octavo.http.timeouts import Timeout, TimeoutQueue

if TYPE_CHECKING:
    from collections.abc import Callable


def test_each_expired_timeout_runs_in_separate_loop_turn() -> None:
    async def run() -> tuple[list[int], list[int]]:
        turn, order, turns = 0, list[int](), list[int]()
        timeouts = TimeoutQueue()

        def cut(number: int) -> None:
            order.append(number)
            turns.append(turn)

        for number in range(30):
            timeouts.call_later(0.0, lambda number=number: cut(number))
        while len(order) < 30:
            turn += 1
            await asyncio.sleep(0)
        return order, turns

    order, turns = asyncio.run(run())
    assert order == list(range(30))
    assert all(after > before for before, after in itertools.pairwise(turns))


def test_cancelled_timeouts_neither_run_nor_delay_later_ones() -> None:
    async def run() -> list[str]:
        timeouts, acted, is_over, waiting = TimeoutQueue(), list[str](), asyncio.Event(), list[Timeout]()

        def end_all() -> None:
            for cut in waiting:
                cut.cancel()

        first = timeouts.call_later(0.0, end_all)
        waiting += [timeouts.call_later(0.0, lambda: acted.append("ended")) for _ in range(5000)]
        timeouts.call_later(0.05, is_over.set)
        async with asyncio.timeout(len(waiting) * timeouts_module.SPACING_S / 2):
            await is_over.wait()
        first.cancel()  # a second cancel changes nothing
        timeouts.call_later(0.0, lambda: acted.append("never")).cancel()
        await asyncio.sleep(0.01)
        return acted

    assert not asyncio.run(run())


def test_timeout_block_raises_timeout_error_only_if_it_expires() -> None:
    async def run() -> None:
        timeouts, faults, is_over = TimeoutQueue(), list[dict[str, object]](), asyncio.Event()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        async with timeouts.timeout(0.01):
            pass
        timeouts.call_later(0.02, is_over.set)
        await is_over.wait()
        assert not faults  # a cancelled limit is not acted on later
        with pytest.raises(TimeoutError):
            async with timeouts.timeout(0.01):
                await asyncio.Event().wait()
        with pytest.raises(KeyError):
            async with timeouts.timeout(60.0):
                raise KeyError

    asyncio.run(run())


def test_failing_timeout_callback_does_not_block_later_ones() -> None:
    async def run() -> int:
        timeouts, faults, is_over = TimeoutQueue(), list[dict[str, object]](), asyncio.Event()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        for _ in range(3):
            timeouts.call_later(0.0, lambda: 1 / 0)
        timeouts.call_later(0.0, is_over.set)
        await is_over.wait()
        return len(faults)

    assert asyncio.run(run()) == 3


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    "sent", [b"GET /version HTT", head(COMPLETIONS, 100), b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"]
)
def test_simultaneously_expired_connections_are_closed_one_by_one(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """For connections without complete headers, without a complete body, and idle ones."""
    times: list[float] = []
    act_on_first: Callable[[TimeoutQueue], None] = TimeoutQueue._act_on_first

    def watched(timeouts: TimeoutQueue) -> None:
        if timeouts._waiting:
            times.append(time.monotonic())  # first: a late turn must not shorten the difference
        act_on_first(timeouts)

    monkeypatch.setattr(timeouts_module, "SPACING_S", 0.1)
    monkeypatch.setattr(TimeoutQueue, "_act_on_first", watched)
    with run_server(body_timeout_s=0.5, keep_alive_timeout_s=0.5) as running, contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connect(running)) for _ in range(15)]
        for sock in socks:
            sock.sendall(sent)
        answers = {read_all(sock)[:12] for sock in socks}
        wait_until(lambda: not running.server.server_state.connections, "all are cut off")
    assert len(answers) == 1
    assert len(times) == 15
    assert all(after - before > 0.09 for before, after in itertools.pairwise(times))


@pytest.mark.turn(12)
def test_finished_answer_that_client_never_reads_closes_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends after the timeout of a client that takes nothing, even if connections may be idle for longer."""
    were_finished: list[bool] = []
    abort = BoundedHttpProtocol._abort

    def watched(protocol: BoundedHttpProtocol) -> None:
        assert protocol._answered is not None
        were_finished.append(protocol._answered.response_complete)
        abort(protocol)

    monkeypatch.setattr(BoundedHttpProtocol, "_abort", watched)
    body = json.dumps({"prompt": "hello", "max_tokens": 200, "ignore_eos": True, "logprobs": 5}).encode()
    limits = {"keep_alive_timeout_s": 600.0, "idle_timeout_s": 0.5}
    with run_server(**limits) as running, connect(running, receive_bytes=4096) as sock:
        sock.sendall(head(COMPLETIONS, len(body)) + body)
        wait_until(lambda: were_finished, "it is cut off")
        wait_until(lambda: not running.server.server_state.connections, "it is gone")
    assert were_finished == [True]
