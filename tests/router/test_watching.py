"""How soon an engine that says nothing any more is lost, and that one that is only slow is not: in virtual time."""

from __future__ import annotations

import asyncio
import math

import pytest
from router.virtual_time import run_virtually

from octavo.config import RouterConfig
from octavo.router.engines import EnginePool
from octavo.router.launcher import NoLauncher
from octavo.router.policies import create_policy
from octavo.router.watching import EngineWatch

NO_LAUNCHER = NoLauncher()
URL = "http://10.0.0.1:8000"
CONFIG = RouterConfig(engines=(URL,))
ENDS_WITHIN_S = 7.5  # of the 10 s that a request has; the rest is another engine's


class MadeUpUpstream:
    """Answers after delay_s each; from the nth answer on it says nothing, and from refused_at on nobody is there."""

    def __init__(self, *, delay_s=0.0, num_answers=10**9, silent=(), refused_at=math.inf):
        self.delay_s, self.num_answers, self.silent, self.refused_at = delay_s, num_answers, silent, refused_at
        self.frozen_at = None
        self.paths = []

    async def get(self, engine, path, key, timeout_s):
        self.paths.append(path)
        if asyncio.get_running_loop().time() > self.refused_at:
            raise ConnectionRefusedError
        if len(self.paths) > self.num_answers or path in self.silent:
            async with asyncio.timeout(timeout_s):
                await asyncio.Event().wait()
        async with asyncio.timeout(timeout_s):
            await asyncio.sleep(self.delay_s)
        if len(self.paths) == self.num_answers:
            self.frozen_at = asyncio.get_running_loop().time()
        return 200, b'{"data": [{"id": "m"}]}'


async def watched(upstream, seconds, now, launcher=NO_LAUNCHER):
    """Look after one engine for some time; return when it was ready, and when it was no more."""
    pool = EnginePool(create_policy(CONFIG))
    watch = EngineWatch(pool, upstream, CONFIG, launcher)
    watch.start()
    changes, was_ready = [], False
    while now() < seconds:
        await asyncio.sleep(0.01)
        is_ready = bool(pool.ready())
        if is_ready is not was_ready:
            changes.append(now())
        was_ready = is_ready
    await watch.stop()
    return changes


@pytest.mark.parametrize("num_answers", range(3, 9))
def test_an_engine_that_freezes_behind_any_of_its_answers_is_lost_in_time(num_answers):
    upstream = MadeUpUpstream(num_answers=num_answers)
    _, lost_at = run_virtually(lambda now: watched(upstream, 40.0, now))
    assert lost_at - upstream.frozen_at < ENDS_WITHIN_S


def test_an_engine_whose_every_answer_is_slow_is_kept():
    upstream = MadeUpUpstream(delay_s=0.9 * CONFIG.health_timeout_s)
    assert len(run_virtually(lambda now: watched(upstream, 100.0, now))) == 1


def test_an_engine_that_tells_no_figures_is_kept():
    upstream = MadeUpUpstream(silent={"/metrics"})
    assert len(run_virtually(lambda now: watched(upstream, 100.0, now))) == 1
    assert {"/ready", "/metrics", "/model_info", "/v1/models"} == set(upstream.paths)


class HearingLauncher(NoLauncher):
    def __init__(self):
        self.heard = []

    def silent(self, url, num_times):
        assert url == URL
        self.heard.append(num_times)


def test_whoever_runs_an_engine_hears_how_often_it_was_silent():
    launcher = HearingLauncher()
    run_virtually(lambda now: watched(MadeUpUpstream(num_answers=6), 40.0, now, launcher))
    assert launcher.heard == list(range(2, 2 + len(launcher.heard)))
    assert len(launcher.heard) > 7


def test_an_engine_that_refuses_is_not_silent():
    """It is being started: how often the one before was silent says nothing of it."""
    launcher = HearingLauncher()
    upstream = MadeUpUpstream(num_answers=6, refused_at=30.0)
    run_virtually(lambda now: watched(upstream, 40.0, now, launcher))
    assert launcher.heard[-2:] == [0, 0]
    assert max(launcher.heard) > 5
