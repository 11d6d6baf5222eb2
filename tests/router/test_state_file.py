"""The prefixes of a router that starts again."""

from __future__ import annotations

import asyncio
import json
import logging
import stat

import pytest
from router.routing import run_router
from router.scripted_engine import scripted
from router.simulated_caches import Conversations, Router
from running import wait_until

from octavo.config import RouterConfig
from octavo.errors import ConfigError
from octavo.router import state_file
from octavo.router.engines import EnginePool
from octavo.router.policies import CacheAware
from octavo.router.request_summary import read_request_summary
from octavo.router.state_file import StateFile

URLS = ["http://a:1", "http://b:1", "http://c:1"]
RUN, OTHER_RUN = (1764547200.5, 0.0), (1764547999.5, 0.0)


def prompt(name: str):
    body = json.dumps({"prompt": f"{name} " * 100}).encode()
    return read_request_summary(body, tenant="", headers={}, session_header="x")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state"


def identified(router: Router, run=RUN) -> Router:
    for engine in router.engines:
        router.pool.identify(engine, run)
    return router


def serve(router: Router, summary, number: int) -> None:
    router.policy.sent(summary, router.engines[number])
    router.policy.ended(summary, router.engines[number], None)


def urls_of(router: Router, name: str) -> list[str]:
    """Return the engines that are expected to have a prompt."""
    found = router.policy.tree.find(prompt(name), router.engines)
    return [engine.url for engine in found.engines] if found.num_bytes else []


def saved(path) -> Router:
    """Save the state of a router that has sent prompts a, b and c to the engines of these names."""
    router = identified(Router(URLS, path))
    for number, name in enumerate("abc"):
        serve(router, prompt(name), number)
    asyncio.run(router.state.save())
    return router


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_router_finds_as_many_prefixes_after_its_restart(path):
    urls = [f"http://10.0.0.{number}:8000" for number in range(4)]
    router = identified(Router(urls, path))
    conversations = Conversations([router], num_blocks=48 * 8 * 5 // 4)
    before = [conversations.turn() for _ in range(6)][-1]
    asyncio.run(router.state.save())
    conversations.routers = [identified(Router(urls, path))]
    assert conversations.turn() >= 0.95 * before
    conversations.routers = [Router(urls)]
    assert conversations.turn() < 0.8 * before, "a router without the file"


def test_restored_engines_have_their_prefixes_in_any_order_of_addresses(path):
    saved(path)
    router = identified(Router([*reversed(URLS), "http://new:1"], path))
    assert [urls_of(router, name) for name in "abc"] == [[url] for url in URLS]
    assert len({engine.number for engine in router.engines}) == 4


def test_prefixes_wait_until_the_engine_is_identified(path):
    saved(path)
    router = Router(URLS, path)
    assert urls_of(router, "a") == []
    router.pool.identify(router.engines[0], RUN)
    assert (urls_of(router, "a"), urls_of(router, "b")) == ([URLS[0]], [])


def test_engine_that_restarted_meanwhile_is_forgotten(path):
    saved(path)
    router = Router(URLS, path)
    for engine, run in zip(router.engines, (RUN, OTHER_RUN, RUN), strict=True):
        router.pool.identify(engine, run)
    assert [urls_of(router, name) for name in "abc"] == [[URLS[0]], [], [URLS[2]]]
    assert [engine.num_restarts for engine in router.engines] == [0, 0, 0]


def test_engine_that_refused_connections_is_forgotten(path):
    saved(path)
    router = Router(URLS, path)
    router.pool.forget(router.engines[0])
    assert not router.pool.is_saved(router.engines[0])
    identified(router)
    assert [urls_of(router, name) for name in "ab"] == [[], [URLS[1]]]


def test_engine_without_known_start_is_not_saved(path):
    router = Router(URLS, path)
    for engine, run in zip(router.engines, (RUN, (0.0, 0.0)), strict=False):
        router.pool.identify(engine, run)
    for number, name in enumerate("abc"):
        serve(router, prompt(name), number)
    asyncio.run(router.state.save())
    header, pieces = path.read_bytes().split(b"\n")
    assert [engine["url"] for engine in json.loads(header)["engines"]] == [URLS[0]]
    assert len(json.loads(pieces)) == len(prompt("a").pieces[0])


def test_evicted_prefixes_stay_evicted_and_time_continues(path):
    router = identified(Router(URLS, path))
    for name in ("old", "new"):
        serve(router, prompt(name), 0)
    router.policy.tree.lost(router.engines[0], 1)
    asyncio.run(router.state.save())
    again = identified(Router(URLS, path))
    assert (urls_of(again, "old"), urls_of(again, "new")) == ([], [URLS[0]])
    assert again.policy.tree.now == 2
    serve(again, prompt("old"), 0)
    assert urls_of(again, "old") == [URLS[0]]


def test_restored_tree_is_bounded_and_keeps_latest_prompts(path):
    router = saved(path)
    num_pieces = len(prompt("a").pieces[0])
    policy = CacheAware(4096, 1.5, max_entries=num_pieces)
    asyncio.run(StateFile(path, EnginePool(policy), policy.tree).read())
    assert policy.tree.hashes == [*reversed(prompt("c").pieces[0])]
    assert len(router.policy.tree.hashes) == 3 * num_pieces


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text[: text.rindex(b"\n")],
        lambda text: text.replace(b'"version":1', b'"version":0'),
        lambda text: text.replace(b'"now":3', b'"now":2'),
        lambda text: text.replace(b'{"2":', b'{"3":'),
        lambda text: text.replace(b'"url"', b'"name"'),
        lambda text: text[:-300] + b"\xff" + text[-299:],
        lambda _: b"",
    ],
)
def test_damaged_or_old_file_gives_one_warning_and_is_replaced(path, caplog, change):
    saved(path)
    text = change(path.read_bytes())
    assert text != path.read_bytes()
    path.write_bytes(text)
    router = identified(Router(URLS, path))
    (warning,) = warnings_of(caplog)
    assert str(path) in warning
    assert "starts without prefixes" in warning
    assert [urls_of(router, name) for name in "abc"] == [[], [], []]
    assert saved(path).policy.tree.now == 3
    assert [urls_of(identified(Router(URLS, path)), name) for name in "abc"] == [[url] for url in URLS]


@pytest.mark.parametrize("text", [b"[keys.alice]\n", b'{"content": "other", "version": 1}\n', b"\x00\x01", b"[]"])
def test_foreign_file_gives_one_warning_and_is_never_replaced(path, caplog, text):
    path.write_bytes(text)
    saved(path)
    (warning,) = warnings_of(caplog)
    assert "it will not be replaced" in warning
    assert path.read_bytes() == text


def test_file_that_cannot_be_read_gives_one_warning(path, caplog):
    path.mkdir()
    Router(URLS, path)
    assert len(warnings_of(caplog)) == 1


def test_file_is_private_and_replaced_as_a_whole(path):
    saved(path)
    first = path.stat()
    assert stat.S_IMODE(first.st_mode) == 0o600
    with path.open("rb") as before:
        saved(path)
        assert before.read().count(b"\n") == 1, "a reader of the old file reads it to its end"
    assert path.stat().st_ino != first.st_ino
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_failed_save_is_logged_once_and_leaves_nothing(path, caplog):
    router = identified(Router(URLS, path))
    path.mkdir()
    for _ in range(2):
        asyncio.run(router.state.save())
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "not saved" in errors[0]
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_prompts_that_are_sent_during_a_save_keep_the_order_of_times(path, monkeypatch):
    """An engine with a piece has all pieces before it, so its times never increase along a prompt."""
    monkeypatch.setattr(state_file, "_BATCH", 3)
    router = identified(Router(URLS, path))
    summaries = [prompt(name) for name in ("a", "a b", "c")]

    async def save_and_send():
        saving = asyncio.create_task(router.state.save())
        for index in range(12):
            serve(router, summaries[index % 3], index % 2)
            await asyncio.sleep(0)
        await saving

    for index in range(6):
        serve(router, summaries[index % 3], index % 2)
    asyncio.run(save_and_send())
    again = identified(Router(URLS, path)).policy.tree
    nodes = again._nodes
    assert nodes
    for summary in summaries:
        for number in (0, 1):
            times = [nodes[digest].times.get(number, 0) for digest in summary.pieces[0]]
            assert times == sorted(times, reverse=True)
            assert times[0] <= again.now


def test_state_file_needs_the_policy_cache_aware(path):
    with pytest.raises(ConfigError, match="state_file needs the policy cache_aware"):
        RouterConfig(engines=("http://a",), policy="affinity", state_file=path)


def test_router_saves_at_its_end_and_expects_the_prefixes_before_the_engine_is_ready(path):
    with scripted("both") as (one, first), scripted("both") as (two, second):
        for engine in (first, second):
            engine.figures = lambda: b"process_start_time_seconds 1764547200.5\n"
        body = {"prompt": "a word " * 100, "max_tokens": 4}
        with run_router(one, two, state_file=path) as routing:
            wait_until(lambda: all(routing.engine(url).incarnation for url in (one, two)), "the engines are identified")
            with routing.http() as http:
                assert http.post("/v1/completions", json=body).status_code == 200
        home, other = (first, second) if first.summary else (second, first)
        home_url = one if home is first else two
        with run_router(two, one, state_file=path) as routing:
            routing.engine(home_url).open_tokens += 3000  # only a known prefix leads there
            with routing.http() as http:
                assert http.post("/v1/completions", json=body).status_code == 200
        assert (len(home.summary), len(other.summary)) == (2, 0)


def test_router_saves_repeatedly(path, monkeypatch):
    monkeypatch.setattr("octavo.router.service._SAVE_INTERVAL_S", 0.01)
    with scripted("both") as (url, engine):
        engine.figures = lambda: b"process_start_time_seconds 1764547200.5\n"
        with run_router(url, state_file=path):
            wait_until(lambda: path.exists() and url.encode() in path.read_bytes(), "the state is saved")
