"""Engines that cannot exchange KV are detected and counted, are no longer paired, and the log has the reason."""

from __future__ import annotations

import logging
import threading

import pytest
from router.routing import run_router
from router.scripted_engine import NUM_PROMPT_TOKENS, scripted
from running import DEADLINE_S, wait_until

from octavo.router import pairing
from octavo.router.engines import EngineHandle, EnginePool
from octavo.router.partners import Partners, PromptFigures
from octavo.router.policies import LeastLoaded

FORMAT = {"kv": "bfloat16 in blocks of 16, layout 1", "model": "a1b2", "versions": "octavo 1"}
LONG = {"prompt": [7] * NUM_PROMPT_TOKENS, "max_tokens": 4}
PORT = 4711


@pytest.fixture
def pair():
    return EngineHandle("http://p", role="prefill", kv_format=FORMAT), EngineHandle(
        "http://d", role="decode", kv_format=FORMAT
    )


def in_vain(partners, prefill, decode, now, times=1):
    for _ in range(times):
        partners.ended(prefill, decode, 0.0, 0.0, now)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"kv": "bfloat16 in blocks of 32, layout 1"}, "kv: .*blocks of 16.* and .*blocks of 32"),
        ({"kv": "int8 in blocks of 16, layout 1"}, "kv: 'bfloat16.* and 'int8"),
        ({"model": "ffff"}, "model: 'a1b2' and 'ffff'"),
        ({"versions": "octavo 2", "more": "x"}, "versions: 'octavo 1' and 'octavo 2'; more: None and 'x'"),
    ],
)
def test_engines_with_different_kv_formats_are_unpaired_and_logged_once(pair, caplog, changed, told):
    prefill, decode = pair
    partners = Partners()
    assert partners.may_pair(prefill, decode, 0.0)
    decode.kv_format = {**FORMAT, **changed}
    with caplog.at_level(logging.INFO, logger="octavo.router.partners"):
        assert [partners.may_pair(prefill, decode, now) for now in (0.0, 1e3, 1e6)] == [False] * 3
        assert len(caplog.messages) == 1
        assert caplog.records[0].levelno == logging.WARNING
        caplog.clear()
        decode.kv_format = {**FORMAT, "kv": "fp8"}
        assert not partners.may_pair(prefill, decode, 0.0)
        assert "'fp8'" in caplog.text, "another difference is told, too"
        caplog.clear()
        decode.kv_format = dict(FORMAT)
        assert [partners.may_pair(prefill, decode, 0.0) for _ in range(2)] == [True] * 2
        assert len(caplog.messages) == 1
        assert "again" in caplog.text


def test_log_names_kv_format_difference(pair, caplog):
    prefill, decode = pair
    decode.kv_format = {**FORMAT, "kv": "int8 in blocks of 32, layout 1"}
    Partners().may_pair(prefill, decode, 0.0)
    expected = (
        "http://p does not compute prompts for http://d, because they cannot exchange KV: kv: 'bfloat16 in blocks of "
        "16, "
        "layout 1' and 'int8 in blocks of 32, layout 1'; start both with the same model, version and options"
    )
    assert caplog.messages == [expected]


@pytest.mark.parametrize("index", [0, 1])
def test_engine_without_kv_format_is_paired(pair, index):
    prefill, decode = pair
    pair[index].kv_format = None
    assert Partners().may_pair(prefill, decode, 0.0)


@pytest.mark.parametrize(
    ("found", "known", "came"),
    [(0.0, 0.0, False), (0.09, 0.0, False), (0.1, 0.0, True), (1.0, 0.0, True), (0.5, 0.5, False), (0.55, 0.5, True)],
)
def test_pairing_counts_as_useless_below_tenth_of_new_tokens(pair, found, known, came):
    prefill, decode = pair
    Partners().ended(prefill, decode, found, known, 0.0)
    assert decode.num_paired_in_vain == (not came)


def test_useless_pair_backs_off_up_to_one_minute(pair, caplog):
    prefill, decode = pair
    other, partners, now = EngineHandle("http://q", role="prefill", kv_format=FORMAT), Partners(), 100.0
    in_vain(partners, prefill, decode, now, times=2)
    assert partners.may_pair(prefill, decode, now), "twice may be chance"
    assert not caplog.messages
    pauses = []
    for _ in range(8):
        in_vain(partners, prefill, decode, now)
        assert partners.may_pair(other, decode, now), "others have no part in it"
        pauses.append(next(after for after in range(100) if partners.may_pair(prefill, decode, now + after)))
        now += pauses[-1]
    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60]
    assert decode.num_paired_in_vain == 10
    assert len(caplog.messages) == 1
    assert "computed 3 prompts for http://d but no KV arrived there" in caplog.text


def test_useless_requests_in_flight_do_not_extend_pause(pair):
    prefill, decode = pair
    partners = Partners()
    in_vain(partners, prefill, decode, 100.0, times=20)
    assert decode.num_paired_in_vain == 20
    assert partners.may_pair(prefill, decode, 102.0)


def test_arriving_kv_resets_pair_backoff(pair, caplog):
    prefill, decode = pair
    partners = Partners()
    in_vain(partners, prefill, decode, 0.0, times=3)
    with caplog.at_level(logging.INFO, logger="octavo.router.partners"):
        partners.ended(prefill, decode, 0.9, 0.0, 3.0)
    assert "again: KV arrives" in caplog.text
    in_vain(partners, prefill, decode, 4.0, times=2)
    assert partners.may_pair(prefill, decode, 4.0)
    in_vain(partners, prefill, decode, 4.0)
    assert not partners.may_pair(prefill, decode, 5.9)
    assert partners.may_pair(prefill, decode, 6.0), "as short as the first time"


@pytest.mark.parametrize("who", [0, 1])
def test_restarted_engine_is_paired_again_immediately(pair, who):
    prefill, decode = pair
    pool = EnginePool(LeastLoaded())
    in_vain(pool.partners, prefill, decode, 0.0, times=3)
    pool.partners.ended_without_usage(prefill, decode, PromptFigures(0.0, 0.0, 0), 300, 300.0)
    pool.forget(pair[who])
    assert pool.partners.may_pair(prefill, decode, 0.0)
    decode.prompt_figures = PromptFigures(0.0, 300.0, 300)
    pool.partners.figures_read(decode, 0.0)
    assert decode.num_paired_in_vain == 3, "what ended before is forgotten"


@pytest.mark.parametrize(
    ("before", "after", "num_vain"),
    [
        (None, (0.0, 600.0, 600), 0),
        ((50.0, 0.0, 0), None, 0),
        ((50.0, 0.0, 0), (50.0, None, 600), 0),
        ((50.0, None, 0), (50.0, 600.0, 600), 0),
        ((50.0, 100.0, 100), (50.0, 700.0, 700), 2),
        ((50.0, 100.0, 100), (50.0, 550.0, 700), 2),
        ((50.0, 100.0, 100), (66.0, 700.0, 700), 0),
        pytest.param((50.0, 100.0, 100), (50.0, 100.0, 700), 0, id="the prompts were in the decode engine's cache"),
        pytest.param((50.0, 100.0, 100), (50.0, 548.0, 700), 0, id="most of one prompt was"),
        pytest.param((50.0, 100.0, 100), (50.0, 1100.0, 1700), 0, id="other requests may have computed as much"),
        pytest.param((50.0, 100.0, 100), (50.0, 1700.0, 1700), 2, id="other requests have computed less"),
    ],
)
def test_engine_metrics_judge_paired_requests_without_usage(pair, before, after, num_vain):
    prefill, decode = pair
    partners = Partners()
    for _ in range(2):
        partners.ended_without_usage(prefill, decode, before and PromptFigures(*before), 300, 300.0)
    decode.prompt_figures = after and PromptFigures(*after)
    for _ in range(2):  # the second call has nothing to judge
        partners.figures_read(decode, 0.0)
    assert decode.num_paired_in_vain == num_vain


def test_pending_pairs_without_usage_are_bounded(pair):
    prefill, decode = pair
    partners = Partners()
    for _ in range(3000):
        partners.ended_without_usage(prefill, decode, PromptFigures(0.0, 0.0, 0), 300, 300.0)
    decode.prompt_figures = PromptFigures(0.0, 900_000.0, 900_000)
    partners.figures_read(decode, 0.0)
    assert decode.num_paired_in_vain == 1024


@pytest.mark.parametrize("url", ["http://p", "http://d"])
def test_requests_of_removed_engine_leave_no_state(url):
    pool = EnginePool(LeastLoaded())
    (prefill, decode), _ = pool.change(["http://p", "http://d"])
    figures = PromptFigures(0.0, 0.0, 0)
    pool.partners.ended_without_usage(prefill, decode, figures, 300, 300.0)
    in_vain(pool.partners, prefill, decode, 0.0)
    pool.change({"http://p", "http://d"} - {url})
    for before in (None, figures):
        pool.partners.ended_without_usage(prefill, decode, before, 300, 300.0)
    pool.partners.ended(prefill, decode, 0.9, 0.0, 0.0)
    in_vain(pool.partners, prefill, decode, 0.0)
    assert not pool.partners._pairs
    assert not any(pool.partners._unknown.values())
    assert pool.partners._unknown.keys() <= set(pool.engines.values())


@pytest.fixture(params=[None, PORT], ids=["store", "direct"])
def stage(request):
    """A prefill and a decode engine for a router."""
    with (
        scripted("prefill", port=request.param) as (prefill_url, prefill),
        scripted("decode", "follow") as (decode_url, decode),
    ):
        decode.follows = prefill
        prefill.kv_format = decode.kv_format = FORMAT
        yield prefill_url, prefill, decode_url, decode


def test_router_pairs_engines_after_kv_formats_match(stage):
    prefill_url, prefill, decode_url, decode = stage
    decode.kv_format = {**FORMAT, "kv": "int8 in blocks of 16, layout 1"}
    decode.does = "answer"
    with run_router(prefill_url, decode_url, policy="least_loaded") as routing, routing.http() as http:
        assert http.post("/v1/completions", json=LONG).status_code == 200
        assert (len(prefill.summary), decode.params) == (0, [None])
        decode.does, decode.kv_format = "follow", FORMAT  # as if it were restarted with other options
        wait_until(lambda: routing.engine(decode_url).kv_format == FORMAT, "the router knows of it")
        assert http.post("/v1/completions", json=LONG).status_code == 200
        assert (len(prefill.summary), decode.params[-1] is None) == (1, False)


def figures_of(num_computed):
    """Return the metrics of an engine that loaded 32 tokens and computed `num_computed` prompt tokens."""
    return (
        b'octavo:kv_load_tokens_total{a="b"} 32.0\n'
        b'octavo:prefix_cache_queries_total{a="b"} %d.0\noctavo:prefix_cache_hits_total{a="b"} 9000.0\n'
    ) % (9000 + num_computed)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("num_cached", [0, None])
def test_router_counts_useless_pairings_and_stops_pairing(stage, num_cached):
    prefill_url, _, decode_url, decode = stage
    decode.num_cached = num_cached
    if num_cached is None:
        decode.figures = lambda: figures_of(len(decode.summary) * NUM_PROMPT_TOKENS)
    with run_router(prefill_url, decode_url, policy="least_loaded") as routing, routing.http() as http:
        engine = routing.engine(decode_url)
        wait_until(lambda: num_cached == 0 or engine.prompt_figures is not None, "its figures are read")
        for count in range(1, 4):
            assert http.post("/v1/completions", json=LONG).status_code == 200
            wait_until(lambda count=count: engine.num_paired_in_vain == count, "it is counted")
        decode.does = "answer"
        assert http.post("/v1/completions", json=LONG).status_code == 200
        assert (engine.num_paired, decode.params[-1]) == (3, None)
        assert (routing.engine(prefill_url).num_prefills, routing.engine(prefill_url).num_failed_prefills) == (3, 0)
        assert f'octavo:router_paired_in_vain_total{{engine="{decode_url}"}} 3.0' in http.get("/metrics").text
        told = {each["role"]: each for each in http.get("/router/engines").json()["engines"]}
        assert told["decode"]["paired_in_vain"] == 3


@pytest.mark.sweep(8)
@pytest.mark.parametrize("num_cached", [200, None])
def test_arriving_or_unknown_kv_is_not_counted_as_useless(stage, num_cached):
    prefill_url, _, decode_url, decode = stage
    decode.num_cached = num_cached
    with run_router(prefill_url, decode_url, policy="least_loaded") as routing, routing.http() as http:
        for _ in range(5):
            assert http.post("/v1/completions", json=LONG).status_code == 200
        engine = routing.engine(decode_url)
        assert (engine.num_paired, engine.num_paired_in_vain) == (5, 0)


def test_prefix_hit_on_decode_engine_keeps_pair(stage):
    """Its answers have no `usage`, and its counts of loaded and computed tokens do not grow."""
    prefill_url, prefill, decode_url, decode = stage
    decode.num_cached, decode.figures = None, lambda: figures_of(0)
    with run_router(prefill_url, decode_url, policy="least_loaded") as routing, routing.http() as http:
        engine = routing.engine(decode_url)
        wait_until(lambda: engine.prompt_figures is not None, "its figures are read")
        for _ in range(4):
            assert http.post("/v1/completions", json=LONG).status_code == 200
            num_sent = engine.num_sent_prompt_tokens
            wait_until(lambda num_sent=num_sent: engine.prompt_figures.num_sent == num_sent, "they are read again")
        assert (engine.num_paired, engine.num_paired_in_vain) == (4, 0)
        # A direct prefill that has not begun before the answer ends is cancelled.
        assert len(prefill.summary) == 4 or routing.engine(prefill_url).kv_transfer_port is not None


def test_short_prompt_by_reported_usage_is_not_judged(stage):
    """The router estimates 300 tokens. The engine reports fewer than are worth a prefill on another engine."""
    prefill_url, _, decode_url, decode = stage
    decode.num_cached, decode.num_prompt = 0, 255
    with run_router(prefill_url, decode_url, policy="least_loaded") as routing, routing.http() as http:
        for _ in range(4):
            assert http.post("/v1/completions", json=LONG).status_code == 200
        engine = routing.engine(decode_url)
        assert (engine.num_paired, engine.num_paired_in_vain) == (4, 0)


def test_failed_prefill_is_not_counted_twice(stage):
    prefill_url, prefill, decode_url, decode = stage
    prefill.does, decode.does, decode.num_cached = "fail", "wait", 0
    with run_router(prefill_url, decode_url, policy="least_loaded") as routing, routing.http() as http:
        thread = threading.Thread(target=http.post, args=("/v1/completions",), kwargs={"json": LONG})
        thread.start()
        wait_until(lambda: routing.engine(prefill_url).num_failed_prefills, "it is counted")
        decode.release.set()
        thread.join(DEADLINE_S)
        assert routing.engine(decode_url).num_paired_in_vain == 0


@pytest.mark.sweep(8)
@pytest.mark.parametrize("trouble", ["refuse", "die in its answer"])
def test_refused_or_failed_request_is_not_counted_as_useless_pairing(stage, trouble):
    """Invalid requests of clients must not separate a pair."""
    prefill_url, _, decode_url, decode = stage
    decode.does, decode.figures = trouble, lambda: figures_of(0)
    with run_router(prefill_url, decode_url, policy="least_loaded") as routing, routing.http() as http:
        engine = routing.engine(decode_url)
        wait_until(lambda: engine.prompt_figures is not None, "its figures are read")
        for _ in range(3):
            http.post("/v1/completions", json=LONG)
            routing.wait_ready(2)
        assert engine.num_paired
        decode.figures = lambda: figures_of(9 * NUM_PROMPT_TOKENS) + b"octavo:num_requests_running 7.0\n"
        wait_until(lambda: engine.other_tokens, "and again")
        assert engine.num_paired_in_vain == 0


def test_timed_out_prefill_is_not_counted_twice(monkeypatch):
    monkeypatch.setattr(pairing, "_LEAST_S", 0.05)
    monkeypatch.setattr(pairing, "_S_PER_TOKEN", 0.0)
    with (
        scripted("prefill", "hang") as (prefill_url, _),
        scripted("decode") as (decode_url, decode),
        run_router(prefill_url, decode_url, policy="least_loaded") as routing,
        routing.http() as http,
    ):
        decode.num_cached = 0
        assert http.post("/v1/completions", json=LONG).status_code == 200
        assert decode.params == [None]
        assert routing.engine(prefill_url).num_failed_prefills == 1
        wait_until(lambda: not routing.engine(decode_url).routed_requests, "it is over")
        assert routing.engine(decode_url).num_paired_in_vain == 0
