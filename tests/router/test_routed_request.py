"""A request in flight: the reasons that end it, and its deadline, in virtual time."""

from __future__ import annotations

import asyncio

import pytest
from router.virtual_time import run_virtually

from octavo.errors import DeadlineError
from octavo.http.errors import EngineLostError
from octavo.http.tenants import EVERYBODY
from octavo.http.timeouts import TimeoutQueue
from octavo.router.request_summary import RequestSummary
from octavo.router.routed_request import RoutedRequest


def test_end_between_guarded_blocks_raises_once_at_next_block():
    async def work(_now):
        routed = RoutedRequest(RequestSummary(), EVERYBODY)
        async with routed.guarded():
            pass
        routed.end(EngineLostError())
        routed.end(DeadlineError("later"))
        with pytest.raises(EngineLostError):
            async with routed.guarded():
                pytest.fail("the block is not entered")
        async with routed.guarded():
            pass  # the reason is reported only once

    run_virtually(work)


def test_ended_task_can_be_cancelled_again():
    async def work(_now):
        routed = RoutedRequest(RequestSummary(), EVERYBODY)
        task = asyncio.current_task()
        asyncio.get_running_loop().call_later(1.0, routed.end, EngineLostError())
        with pytest.raises(EngineLostError):
            async with routed.guarded():
                await asyncio.sleep(10.0)
        assert task.cancelling() == 0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.sleep(10.0)

    run_virtually(work)


def test_outside_cancellation_propagates_through_guarded_block():
    async def work(_now):
        routed = RoutedRequest(RequestSummary(), EVERYBODY)

        async def wait():
            async with routed.guarded():
                await asyncio.sleep(10.0)

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    run_virtually(work)


def test_time_limit_ends_with_block():
    async def work(_now):
        routed = RoutedRequest(RequestSummary(), EVERYBODY)
        with routed.limited(TimeoutQueue(), 1.0):
            pass
        with routed.limited(TimeoutQueue(), None):
            await asyncio.sleep(100.0)
        async with routed.guarded():
            await asyncio.sleep(5.0)

    run_virtually(work)
