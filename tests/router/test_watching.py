"""Detection of silent engines within a time limit, without losing slow ones, in virtual time."""

from __future__ import annotations

import asyncio
import math

import pytest
from router.virtual_time import run_virtually

from octavo.config import RouterConfig
from octavo.router.engines import EnginePool
from octavo.router.launcher import Launcher
from octavo.router.policies import create_policy
from octavo.router.watching import EngineWatch

NO_LAUNCHER = Launcher()
URL = "http://10.0.0.1:8000"
CONFIG = RouterConfig(engines=(URL,))
ENDS_WITHIN_S = 7.5  # of a request's 10 s; the rest is for another engine


class MadeUpUpstream:
    """Answers after delay_s each. Is silent after num_answers answers; refuses connections after refused_at."""

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
    """Watch one engine until `seconds`. Return the times at which its readiness changed."""
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


@pytest.mark.sweep(8)
@pytest.mark.parametrize("num_answers", range(3, 9))
def test_engine_frozen_after_any_answer_is_detected_in_time(num_answers):
    upstream = MadeUpUpstream(num_answers=num_answers)
    _, lost_at = run_virtually(lambda now: watched(upstream, 40.0, now))
    assert lost_at - upstream.frozen_at < ENDS_WITHIN_S


def test_slow_engine_stays_ready():
    upstream = MadeUpUpstream(delay_s=0.9 * CONFIG.health_timeout_s)
    assert len(run_virtually(lambda now: watched(upstream, 100.0, now))) == 1


def test_engine_with_silent_metrics_stays_ready():
    upstream = MadeUpUpstream(silent={"/metrics"})
    assert len(run_virtually(lambda now: watched(upstream, 100.0, now))) == 1
    assert {"/ready", "/metrics", "/model_info", "/v1/models"} == set(upstream.paths)


def test_launcher_is_notified_after_two_silent_checks():
    async def work(now):
        launcher = HearingLauncher()
        await watched(MadeUpUpstream(num_answers=0), 2.5 * CONFIG.health_timeout_s, now, launcher)
        assert launcher.heard == [2]

    run_virtually(work)


class HearingLauncher(Launcher):
    def __init__(self):
        self.heard = []

    def silent(self, url, num_times):
        assert url == URL
        self.heard.append(num_times)


def test_launcher_receives_count_of_silent_checks():
    launcher = HearingLauncher()
    run_virtually(lambda now: watched(MadeUpUpstream(num_answers=6), 40.0, now, launcher))
    assert launcher.heard == list(range(2, 2 + len(launcher.heard)))
    assert len(launcher.heard) > 7


def test_refused_connection_resets_silence_count():
    """It is being restarted, and the silence of the process before it does not count."""
    launcher = HearingLauncher()
    upstream = MadeUpUpstream(num_answers=6, refused_at=30.0)
    run_virtually(lambda now: watched(upstream, 40.0, now, launcher))
    assert launcher.heard[-2:] == [0, 0]
    assert max(launcher.heard) > 5


class Figures:
    """Answers each path with a test's status and text, or an exception."""

    def __init__(self):
        self.note_usage = {
            "/ready": (200, b""),
            "/metrics": (200, b""),
            "/model_info": (200, b"{}"),
            "/v1/models": (404, b""),
        }
        self.summary = []

    async def get(self, _engine, path, key, _timeout_s):
        self.summary.append((path, key))
        told = self.note_usage[path]
        if isinstance(told, Exception):
            raise told
        return told


def looked_at(upstream, *, num_looks=1, engine=None, is_ready=True, config=CONFIG):
    """Let a watch check an engine `num_looks` times. Return the engine and the pool."""

    async def work(_now):
        pool = EnginePool(create_policy(config))
        (made,), _ = pool.change([URL])
        watch = EngineWatch(pool, upstream, config, NO_LAUNCHER)
        for name, value in (engine or {}).items():
            setattr(made, name, value)
        for _ in range(num_looks):
            await watch._record_health(made, is_ready=is_ready)
        return made, pool

    return run_virtually(work)


def test_role_and_models_are_fetched_once_per_ready_engine():
    upstream = Figures()
    upstream.note_usage["/v1/models"] = (200, b'{"data":[{"id":"m"}]}')
    engine, _ = looked_at(upstream, num_looks=2)
    assert [path for path, _ in upstream.summary] == ["/model_info", "/v1/models", "/metrics", "/metrics"]
    assert (engine.is_ready, engine.models) == (True, {"m"})
    upstream.summary.clear()
    looked_at(upstream, engine={"models": frozenset(), "role": "decode"})
    assert [path for path, _ in upstream.summary] == ["/model_info", "/metrics"]  # its port may have changed


@pytest.mark.parametrize("engine", [{}, {"models": frozenset(), "role": "decode", "is_ready": True}])
def test_unready_engine_is_not_queried_for_details(engine):
    upstream = Figures()
    found, _ = looked_at(upstream, is_ready=False, engine=engine)
    assert (found.is_ready, upstream.summary) == (False, [])


def test_removed_engine_does_not_become_ready():
    engine, _ = looked_at(Figures(), engine={"is_member": False})
    assert not engine.is_ready


@pytest.mark.parametrize(
    ("text", "models"),
    [
        ((200, b'{"data":[{"id":"a"},{"id":"b"}]}'), {"a", "b"}),
        ((200, b"nonsense"), frozenset()),
        ((403, b'{"data":[{"id":"a"}]}'), None),
        (ConnectionResetError(), None),
    ],
)
def test_models_are_read_from_v1_models(text, models):
    upstream = Figures()
    upstream.note_usage["/v1/models"] = text
    engine, _ = looked_at(upstream)
    assert (engine.models, engine.is_ready) == (models, True)


def test_metrics_timeout_after_ready_answer_is_raised():
    upstream = Figures()
    upstream.note_usage["/metrics"] = TimeoutError()
    with pytest.raises(TimeoutError):
        looked_at(upstream)


@pytest.mark.parametrize(
    ("text", "role", "port", "timeout_s"),
    [
        (b'{"role":"prefill","kv_transfer_port":65535,"request_timeout":0}', "prefill", 65535, 0.0),
        (b'{"role":"decode","kv_transfer_port":1,"request_timeout":9.5}', "decode", 1, 9.5),
        (b'{"role":"decode","kv_transfer_port":0}', "both", None, None),
        (b'{"role":"decode","kv_transfer_port":65536}', "both", None, None),
        (b'{"role":"decode","request_timeout":-1}', "both", None, None),
        (b"{}", "both", None, None),
    ],
)
def test_invalid_or_missing_role_data_gives_role_both(text, role, port, timeout_s):
    upstream = Figures()
    upstream.note_usage["/model_info"] = (200, text)
    engine, _ = looked_at(upstream)
    assert (engine.role, engine.kv_transfer_port, engine.request_timeout_s) == (role, port, timeout_s)


def metrics(start: float, restarts: float, running: float, waiting: float, more: str = "") -> tuple[int, bytes]:
    text = (
        f"process_start_time_seconds {start}\nocta:other 9\noctavo:engine_restarts_total {restarts}\n"
        f'octavo:num_requests_running{{a="b"}} {running}\noctavo:num_requests_waiting {waiting}\n{more}'
    )
    return 200, text.encode()


def test_changed_start_time_or_restart_count_is_restart():
    async def work(_now):
        pool = EnginePool(create_policy(CONFIG))
        (engine,), _ = pool.change([URL])
        upstream = Figures()
        watch = EngineWatch(pool, upstream, CONFIG, NO_LAUNCHER)
        restarts = []
        for told in ((1, 0), (1, 0), (2, 0), (2, 1), (2, 1)):
            upstream.note_usage["/metrics"] = metrics(*told, 0, 0)
            await watch._record_health(engine, is_ready=True)
            restarts.append(engine.num_restarts)
        assert restarts == [0, 0, 1, 2, 2]

    run_virtually(work)


@pytest.mark.parametrize(
    ("running", "num_requests", "num_own", "tokens"), [(3, 4, 1, 400), (3, 4, 9, 0), (3, 0, 0, 0), (0, 4, 0, 100)]
)
def test_foreign_load_is_estimated_from_mean_request_size(running, num_requests, num_own, tokens):
    """The engine has a waiting request and `running` running ones. This router sent it 100 tokens per request."""
    upstream = Figures()
    upstream.note_usage["/metrics"] = metrics(1, 0, running, 1 if running != 3 else 2)
    given = {"num_requests": num_requests, "num_sent_tokens": 400, "routed_requests": set(range(num_own))}
    engine, _ = looked_at(upstream, engine=given)
    assert engine.other_tokens == tokens


def test_prompt_figures_are_read_from_metrics():
    upstream = Figures()
    loaded = "octavo:kv_load_tokens_total 5\n"
    queries, hits = "octavo:prefix_cache_queries_total 9\n", "octavo:prefix_cache_hits_total 2\n"
    figures = []
    for more in ("", loaded, loaded + queries + hits, loaded + queries):
        upstream.note_usage["/metrics"] = metrics(1, 0, 0, 0, more)
        engine, _ = looked_at(upstream, engine={"num_sent_prompt_tokens": 70})
        figures.append(engine.prompt_figures)
    assert figures == [None, (5.0, None, 70), (5.0, 7.0, 70), (5.0, None, 70)]


def test_engine_state_changes_are_logged(caplog):
    caplog.set_level("DEBUG")
    looked_at(Figures())
    assert f"{URL} is ready" in caplog.text
    looked_at(Figures(), is_ready=False, engine={"is_ready": True})
    assert f"{URL} accepts no new requests" in caplog.text
    upstream = Figures()
    upstream.note_usage["/metrics"], upstream.note_usage["/v1/models"] = (
        ConnectionResetError("reset"),
        (200, b"nonsense"),
    )
    looked_at(upstream)
    assert f"{URL} does not list its models" in caplog.text
    assert f"{URL} does not answer /metrics: reset" in caplog.text


def test_watch_of_removed_engine_ends_after_its_requests(caplog):
    async def work(_now):
        upstream, pool = MadeUpUpstream(), EnginePool(create_policy(CONFIG))
        watch = EngineWatch(pool, upstream, CONFIG, NO_LAUNCHER)
        watch._change([URL, "http://other"])
        await asyncio.sleep(1.0)
        assert len(watch._tasks) == len(watch._wake) == len(pool.ready()) == 2
        left = pool.engines["http://other"]
        left.routed_requests.add(request := object())
        watch._change([URL])
        await asyncio.sleep(10.0)
        assert (len(watch._tasks), left in watch._wake) == (2, True), "its requests end if it is lost"
        left.routed_requests.remove(request)
        await asyncio.sleep(10.0)
        assert len(watch._tasks) == len(watch._wake) == len(pool.ready()) == 1
        assert "http://other was removed" in caplog.text
        await watch.stop()
        await asyncio.sleep(0)
        assert not watch._tasks
        assert "Exception in callback" not in caplog.text

    caplog.set_level("INFO")
    run_virtually(work)


def test_suspected_engine_is_checked_immediately():
    async def work(now):
        upstream, pool = MadeUpUpstream(), EnginePool(create_policy(CONFIG))
        watch = EngineWatch(pool, upstream, CONFIG, NO_LAUNCHER)
        (engine,) = [*(watch._change([URL]) or pool.engines.values())]
        await asyncio.sleep(0.5)
        num_asked = upstream.paths.count("/ready")
        watch.suspect(engine)
        await asyncio.sleep(0.01)
        assert upstream.paths.count("/ready") == num_asked + 1
        await asyncio.sleep(0.9 * CONFIG.health_interval_s)
        assert upstream.paths.count("/ready") == num_asked + 1
        await asyncio.sleep(0.2 * CONFIG.health_interval_s)
        assert upstream.paths.count("/ready") == num_asked + 2
        watch.suspect(object())  # an engine that was removed
        await watch.stop()
        assert now() < 2.0 * CONFIG.health_interval_s + 1.0

    run_virtually(work)


def test_unexpected_check_error_is_logged_and_checks_continue(caplog):
    class Faulty(MadeUpUpstream):
        async def get(self, engine, path, key, timeout_s):
            answer = await super().get(engine, path, key, timeout_s)
            if path == "/ready" and self.paths.count("/ready") == 2:
                raise RuntimeError("a fault")
            return answer

    upstream = Faulty()
    assert len(run_virtually(lambda now: watched(upstream, 10.0, now))) == 1
    assert f"{URL} could not be checked" in caplog.text
    assert upstream.paths.count("/ready") > 5


def test_failed_discovery_is_retried(caplog):
    class Source:
        num_asked = 0

        async def urls(self):
            self.num_asked += 1
            if self.num_asked < 3:
                raise RuntimeError("a fault")
            return [URL]

    async def work(_now):
        pool = EnginePool(create_policy(CONFIG))
        watch = EngineWatch(pool, MadeUpUpstream(), CONFIG, NO_LAUNCHER)
        watch._sources = [Source()]
        watch.start()
        await asyncio.sleep(2.5 * CONFIG.health_interval_s)
        assert len(pool.engines) == 1
        assert watch._sources[0].num_asked == 3
        await watch.stop()

    run_virtually(work)
    assert caplog.text.count("the engines could not be discovered") == 2


def test_crashed_watch_task_is_logged_as_error(caplog):
    async def work(_now):
        watch = EngineWatch(EnginePool(create_policy(CONFIG)), MadeUpUpstream(), CONFIG, NO_LAUNCHER)

        async def fail():
            raise RuntimeError("a fault")

        watch._begin(fail())
        watch._begin(asyncio.sleep(0))
        await asyncio.sleep(1.0)
        assert not watch._tasks

    run_virtually(work)
    assert caplog.text.count("the checks of engines have stopped") == 1
    assert "a fault" in caplog.text


@pytest.mark.parametrize(
    ("error", "was_ready", "logs"),
    [
        (TimeoutError("late"), True, True),
        (TimeoutError("late"), False, False),
        (ConnectionRefusedError("no"), True, True),
    ],
)
def test_lost_engine_is_logged_only_if_previously_ready(caplog, error, was_ready, logs):
    pool = EnginePool(create_policy(CONFIG))
    (engine,), _ = pool.change([URL])
    engine.is_ready, engine.models = was_ready, frozenset({"m"})
    EngineWatch(pool, MadeUpUpstream(), CONFIG, NO_LAUNCHER)._lost(engine, error)
    assert (f"{URL} is lost: {type(error).__name__}: {error}" in caplog.text) is logs
    assert (engine.is_ready, engine.models) == (False, None)


@pytest.mark.parametrize("is_silent", [False, True])
def test_saved_engine_is_identified_before_it_is_ready(is_silent):
    class Metrics(Figures):
        async def get(self, engine, path, key, timeout_s):
            if path == "/metrics":
                seen.append(engine.is_ready)
                if is_silent and len(seen) == 1:
                    raise TimeoutError
            return await super().get(engine, path, key, timeout_s)

    async def work(_now):
        pool, upstream = EnginePool(create_policy(CONFIG)), Metrics()
        upstream.note_usage["/metrics"] = (200, b"process_start_time_seconds 5.0\n")
        pool.reserve(URL, (5.0, 0.0), 0)
        (engine,), _ = pool.change([URL])
        await EngineWatch(pool, upstream, CONFIG, NO_LAUNCHER)._record_health(engine, is_ready=True)
        assert (engine.is_ready, engine.incarnation, pool.is_saved(engine)) == (True, (5.0, 0.0), False)

    seen = []
    run_virtually(work)
    assert seen == [False, True]


def test_removed_engine_loses_its_idle_connections_after_its_last_request():
    class Idle(MadeUpUpstream):
        def close_idle(self, url):
            closed.append(url)

    async def work(_now):
        pool, upstream = EnginePool(create_policy(CONFIG)), Idle()
        watch = EngineWatch(pool, upstream, CONFIG, NO_LAUNCHER)
        watch._change([URL])
        engine = pool.engines[URL]
        engine.routed_requests.add("open")
        watch._change([])
        await asyncio.sleep(5.0)
        assert closed == []
        engine.routed_requests.clear()
        await asyncio.sleep(5.0)
        assert (closed, watch._wake) == ([URL], {})
        await watch.stop()

    closed = []
    run_virtually(work)


def test_engines_of_launcher_come_and_go():
    class ComingLauncher(Launcher):
        found = ("http://a",)

        async def urls(self):
            return list(self.found)

    async def work(_now):
        pool, launcher = EnginePool(create_policy(CONFIG)), ComingLauncher()
        watch = EngineWatch(pool, MadeUpUpstream(), CONFIG, launcher)
        watch.start()
        await asyncio.sleep(0.1)
        assert list(pool.engines) == [URL, "http://a"]
        launcher.found = ("http://b", "http://a")
        await asyncio.sleep(CONFIG.health_interval_s)
        assert list(pool.engines) == [URL, "http://a", "http://b"]
        launcher.found = ()
        await asyncio.sleep(CONFIG.health_interval_s)
        assert list(pool.engines) == [URL]
        await watch.stop()

    run_virtually(work)
