"""A router's service alone: reloading keys, shutdown, and readiness. In virtual time."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest
from router.in_process import URLS, Client
from router.virtual_time import run_virtually

from octavo.config import RouterConfig
from octavo.http.errors import AuthenticationError, EngineLostError, NoEngineError, ServerClosingError
from octavo.http.tenants import EVERYBODY, Tenant, add_key, remove_key
from octavo.router.app import _cards
from octavo.router.engines import EngineHandle, EnginePool
from octavo.router.launcher import Launcher
from octavo.router.metrics import RouterCollector
from octavo.router.policies import CacheAware, LeastLoaded
from octavo.router.request_summary import RequestSummary, read_request_summary
from octavo.router.routed_request import RoutedRequest
from octavo.router.service import RouterService


class HearingLauncher(Launcher):
    num_reloads = 0

    def reload(self):
        self.num_reloads += 1


class FailedLauncher(Launcher):
    has_failed = True


class Watch:
    """A fake of `EngineWatch`."""

    def __init__(self):
        self.heard = []

    def suspect(self, engine):
        self.heard.append(engine)

    async def stop(self):
        self.heard.append("stop")


def test_removed_key_ends_only_its_requests(tmp_path, caplog):
    path = tmp_path / "keys.toml"
    for name in ("alice", "bob"):
        add_key(path, Tenant(name=name))
    launcher = HearingLauncher()
    service = RouterService(RouterConfig(engines=URLS, api_keys_file=path), launcher)
    routed_requests = {name: RoutedRequest(RequestSummary(), Tenant(name=name)) for name in ("alice", "bob")}
    service._routed_requests |= set(routed_requests.values())
    remove_key(path, "alice")
    service.reload()
    assert service.keyring.named("alice") is None
    assert isinstance(routed_requests["alice"]._why, AuthenticationError)
    assert routed_requests["bob"]._why is None
    assert launcher.num_reloads == 1
    path.write_text("nonsense")
    service.reload()
    assert service.keyring.named("bob") == Tenant(name="bob")
    assert (routed_requests["bob"]._why, launcher.num_reloads) == (None, 1)
    assert "the API keys were not reloaded" in caplog.text


def test_stream_limit_is_shared_only_with_keys_file(tmp_path):
    path = tmp_path / "keys.toml"
    add_key(path, Tenant(name="alice"))
    add_key(path, Tenant(name="bob"))
    assert RouterService(RouterConfig(engines=URLS, api_keys_file=path)).limiter.streams.is_shared
    service = RouterService(RouterConfig(engines=URLS, max_body_bytes=1000, max_open_requests=7))
    assert service.keyring is None
    service._routed_requests.add(routed := RoutedRequest(RequestSummary(), EVERYBODY))
    assert (service.limiter.streams.limit, service.limiter.body_bytes.limit) == (7, 64 * 1000)
    assert not service.limiter.streams.is_shared
    service.reload()  # there is no file to read
    assert routed._why is None


def test_failed_launcher_makes_router_dead():
    assert not RouterService(RouterConfig(engines=URLS), Launcher()).is_dead
    assert RouterService(RouterConfig(engines=URLS), FailedLauncher()).is_dead


def test_requests_are_refused_without_ready_engine_or_after_drain():
    async def work(_now):
        client = Client(2, health_interval_s=4.0)
        service = client.service
        service.check_ready()
        begun = []
        service.limiter.begin = begun.append
        service.begin(EVERYBODY)
        for engine in client.engines:
            engine.is_ready = False
        with pytest.raises(NoEngineError) as error:
            service.begin(EVERYBODY)
        assert error.value.retry_after_s == 4.0
        with (
            pytest.raises(NoEngineError),
            service.entering(RoutedRequest(RequestSummary(), EVERYBODY), takes_place=False),
        ):
            pytest.fail("nothing is entered")
        assert begun == [EVERYBODY]
        await service.drain(0.0)
        with pytest.raises(ServerClosingError):
            service.check_ready()

    run_virtually(work)


@pytest.mark.parametrize("takes_place", [False, True])
def test_request_releases_stream_slots(takes_place):
    service = Client(1, max_open_requests=10).service
    routed = RoutedRequest(RequestSummary(num_streams=4, num_choices=2), EVERYBODY)
    with service.entering(routed, takes_place=takes_place):
        assert service.limiter.streams.num_held == (4 if takes_place else 0)
        assert service._routed_requests == {routed}
        assert not service._is_idle.is_set()
        with service.entering(RoutedRequest(RequestSummary(), EVERYBODY), takes_place=False):
            pass
        assert not service._is_idle.is_set()
    assert service.limiter.streams.num_held == 0
    assert service._is_idle.is_set()


def test_drain_waits_for_requests_then_aborts_them(caplog):
    async def work(now):
        client = Client(1)
        service = client.service
        service._watch = watch = Watch()
        routed = RoutedRequest(RequestSummary(), EVERYBODY)
        service._routed_requests.add(routed)
        service._is_idle.clear()
        await service.drain(20.0)
        assert isinstance(routed._why, ServerClosingError)
        assert "aborting 1 open requests" in caplog.text
        assert now() == pytest.approx(25.0)  # 5 s more for a client that does not read
        assert watch.heard == ["stop"]
        service.suspect(client.engines[0])
        assert watch.heard == ["stop", client.engines[0]]
        service._routed_requests.clear()
        service._is_idle.set()
        caplog.clear()
        await service.drain(20.0)
        assert now() == pytest.approx(25.0)
        assert not caplog.text
        service.close()

    caplog.set_level(logging.INFO)
    run_virtually(work)


def test_request_timeout_is_configured_or_longest_engine_limit():
    assert Client(1, request_timeout_s=7.0).service.request_timeout_s == 7.0
    client = Client(2)
    client.engines[0].request_timeout_s, client.engines[1].request_timeout_s = 50.0, 90.0
    assert client.service.request_timeout_s == client.engines[1].ends_within_s > 90.0


def test_zero_tokens_are_not_charged():
    service, charged = Client(1).service, []
    service.limiter.charge = lambda tenant, num_tokens: charged.append((tenant, num_tokens))
    for num_tokens in (0, 1, 7):
        service.charge(RoutedRequest(RequestSummary(), EVERYBODY), num_tokens)
    assert charged == [(EVERYBODY, 1), (EVERYBODY, 7)]


# --- engines ------------------------------------------------------------------------------------------------------


def test_new_engine_counters_are_zero():
    engine, other = EngineHandle("http://a"), EngineHandle("http://b")
    counts = {name: getattr(engine, name) for name in EngineHandle.__slots__ if name.startswith("num_")}
    assert counts
    assert set(counts.values()) == {0}
    assert (engine.load, engine.open_tokens, engine.other_tokens, engine.prefills_from) == (0, 0, 0, 0.0)
    assert (engine.is_ready, engine.is_member, engine.role, engine.models) == (False, True, "both", None)
    assert engine.routed_requests is not other.routed_requests


def test_pool_adds_listed_engines_and_forgets_removed_ones():
    class RoutingPolicy(LeastLoaded):
        def forget(self, engine):
            forgotten.append(engine.url)

    forgotten = []
    pool = EnginePool(RoutingPolicy())
    new, gone = pool.change(["http://a", "http://b", "http://a"])
    assert ([engine.url for engine in new], gone) == (["http://a", "http://b"], [])
    a, b = new
    a.is_ready = b.is_ready = True
    assert pool.change(["http://b", "http://c"])[1] == [a]
    assert (a.is_member, a.is_ready, b.is_member, forgotten) == (False, False, True, ["http://a"])
    assert list(pool.engines) == ["http://b", "http://c"]
    assert pool.ready() == [b]
    pool.forget(b)
    assert forgotten == ["http://a", "http://b"]


def test_lost_engine_ends_its_requests():
    async def work(_now):
        pool = EnginePool(LeastLoaded())
        (engine,), _ = pool.change(["http://a"])
        engine.is_ready, engine.other_tokens = True, 7
        routed_requests = [RoutedRequest(RequestSummary(), EVERYBODY) for _ in range(2)]
        engine.routed_requests |= set(routed_requests)
        pool.lost(engine)
        assert (engine.is_ready, engine.other_tokens, pool.ready()) == (False, 0, [])
        assert all(isinstance(routed._why, EngineLostError) for routed in routed_requests)

    run_virtually(work)


@pytest.mark.parametrize(
    ("prompt", "cached", "counted", "share"),
    [(100, 25, (100, 25), 0.25), (100, 0, (100, 0), 0.0), (None, None, (0, 0), None), (100, None, (0, 0), None)],
)
def test_policy_receives_cached_share_of_prompt(prompt, cached, counted, share):
    class RoutingPolicy(LeastLoaded):
        def ended(self, summary, engine, cached_share):
            heard.append(cached_share)

    heard = []
    pool = EnginePool(RoutingPolicy())
    (engine,), _ = pool.change(["http://a"])
    pool.note_usage(RequestSummary(), engine, prompt, cached)
    assert (engine.num_prompt_tokens, engine.num_cached_tokens) == counted
    assert heard == [share]


@pytest.mark.parametrize(
    ("models", "model", "serves"),
    [
        (None, "x", True),
        (frozenset(), "x", True),
        (frozenset({"x"}), None, True),
        (frozenset({"x"}), "x", True),
        (frozenset({"x"}), "x:latest", True),
        (frozenset({"x:latest"}), "x:latest", True),
        (frozenset({"x"}), "y", False),
        (frozenset({"x"}), "x:other", False),
    ],
)
def test_engine_serves_listed_models_or_any(models, model, serves):
    assert EngineHandle("http://a", models=models).serves(model) is serves


def test_least_loaded_available_prefill_engine_is_chosen():
    pool = EnginePool(LeastLoaded())
    (a, b, decode), _ = pool.change(["http://a", "http://b", "http://d"])
    for engine, role in ((a, "prefill"), (b, "prefill"), (decode, "decode")):
        engine.is_ready, engine.role = True, role
    a.open_tokens, a.prefills_from = 5, 10.0
    assert pool.choose_prefill(RequestSummary(), decode, 9.0) is b
    b.open_tokens = 6
    assert pool.choose_prefill(RequestSummary(), decode, 10.0) is a
    b.is_ready = False
    assert pool.choose_prefill(RequestSummary(), decode, 9.0) is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (b'{"data":[{"id":"a"},{"id":7},{},{"id":"b"}]}', ["a", "b"]),
        (b'{"models":[]}', []),
        (b'{"data":5}', []),
        (b"none", []),
    ],
)
def test_model_ids_are_read_from_engine_answer(text, names):
    assert [card["id"] for card in _cards(text, "data", "id")] == names


def test_model_list_merges_engines_without_duplicates(monkeypatch):
    from octavo.router import app

    async def work(_now):
        client = Client(3)
        told = {
            URLS[0]: (200, b'{"data":[{"id":"a","n":1}]}'),
            URLS[1]: (200, b'{"data":[{"id":"a","n":2},{"id":"b"}]}'),
            URLS[2]: None,
        }

        async def models_of(_service, engine, _request):
            await asyncio.sleep(0)
            return told[engine.url]

        monkeypatch.setattr(app, "_models_of", models_of)

        def ask():
            return app._models(client.service, "data", "id", {"object": "list"}, None)

        response = await ask()
        assert response.body == b'{"object":"list","data":[{"id":"a","n":1},{"id":"b"}]}'
        told.update(dict.fromkeys(URLS[:2]), **{URLS[2]: (403, b'{"error":1}')})
        response = await ask()
        assert (response.status_code, response.body) == (403, b'{"error":1}')
        told[URLS[2]] = None
        with pytest.raises(NoEngineError):
            await ask()

    run_virtually(work)


def test_metrics_export_every_counter_per_engine():
    client = Client(2)
    for index, engine in enumerate(client.engines):
        engine.is_ready = bool(index)
        engine.routed_requests |= set(range(index + 1))
        counts = [name for name in EngineHandle.__slots__ if name.startswith("num_") or name.endswith("_tokens")]
        for place, name in enumerate(counts):
            setattr(engine, name, 100 * place + index)
    told = {}
    for family in RouterCollector(client.service.pool).collect():
        assert [sample.labels["engine"] for sample in family.samples] == list(URLS[:2])
        told[family.name, family.type] = [sample.value for sample in family.samples]
    assert told.pop(("octavo:router_engine_ready", "gauge")) == [0.0, 1.0]
    assert told.pop(("octavo:router_open_requests", "gauge")) == [1, 2]
    assert told.pop(("octavo:router_open_tokens", "gauge")) == [0.0, 1.0]
    names = ("requests", "prompt_tokens", "cached_tokens", "failures", "paired_requests", "paired_in_vain", "prefills")
    names += ("failed_prefills", "prefill_tokens", "engine_restarts")
    assert set(told) == {
        ("octavo:router_other_tokens", "gauge"),
        *((f"octavo:router_{name}", "counter") for name in names),
    }
    assert all(second == first + 1 for first, second in told.values())
    assert len({first for first, _ in told.values()}) == len(told)


def test_removed_engine_is_freed_and_its_number_used_again():
    """Otherwise a piece that all prompts share would remember each engine that ever came and went."""
    pool = EnginePool(policy := CacheAware(4096, 1.5, 1000))
    summary = read_request_summary(b'{"prompt":"%b"}' % (b"text " * 99), tenant="", headers={}, session_header="")
    for number in range(20):
        for engine in pool.change([f"http://comes-{number}", f"http://comes-{number + 1}"])[0]:
            pool.sent(summary, engine)
            pool.note_usage(summary, engine, None, None)
            assert policy.tree.find(summary, [engine]).num_bytes == summary.pieces[1][-1]
    gc.collect()
    handles = [each for each in gc.get_objects() if isinstance(each, EngineHandle) and "comes" in each.url]
    assert sorted(engine.url for engine in handles) == ["http://comes-19", "http://comes-20"]
    assert sorted(engine.number for engine in pool.engines.values()) == [0, 1]
    assert all(len(node.times) == 2 for node in policy.tree._nodes.values())


def test_engine_with_number_of_removed_one_has_none_of_its_prefixes():
    pool = EnginePool(policy := CacheAware(4096, 1.5, 1000))
    summary = read_request_summary(b'{"prompt":"%b"}' % (b"text " * 99), tenant="", headers={}, session_header="")
    (old,), _ = pool.change(["http://a"])
    for _ in range(2):
        pool.sent(summary, old)
        pool.note_usage(summary, old, None, None)
    pool.sent(summary, old)
    (new,), _ = pool.change(["http://b"])
    assert new.number == old.number
    assert policy.tree.find(summary, [new]).num_bytes == 0
    pool.sent(summary, new)
    pool.note_usage(summary, new, None, None)
    pool.note_usage(summary, old, 100, 0)  # it ends later, and its cache had nothing
    assert policy.tree.find(summary, [new]).num_bytes == summary.pieces[1][-1]
