"""Prefill and decode engines with a router: the order of their requests. Each client's request is answered once."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from dataclasses import fields
from typing import TYPE_CHECKING

import pytest
from router.routing import run_router
from router.scripted_engine import scripted
from running import DEADLINE_S, asking, run_server, wait_until

from octavo.data.kv_transfer_params import KVTransferParams
from octavo.router import pairing
from octavo.router.engines import EngineHandle, EnginePool
from octavo.router.pairing import Pair, _source_of
from octavo.router.policies import LeastLoaded
from octavo.router.request_summary import RequestSummary

if TYPE_CHECKING:
    import httpx

PROMPT = "What is an octavo? " * 80
LONG = {"prompt": PROMPT, "max_tokens": 4}
COUNTS = [each.name for each in fields(EngineHandle) if each.name.startswith("num_")]
PORT = 4711


@pytest.fixture(scope="module")
def stage():
    """Run one engine of each role, a router and a client, shared by all tests."""
    with (
        scripted("prefill") as (prefill_url, prefill),
        scripted("decode") as (decode_url, decode),
        run_router(prefill_url, decode_url, policy="least_loaded") as routing,
        routing.http() as http,
    ):
        decode.follows = prefill
        yield prefill, decode, routing, http


@pytest.fixture
def paired(stage):
    """Return a function that resets the engines and sets their actions."""
    prefill, decode, routing, http = stage

    def begin(prefill_does: str = "answer", decode_does: str = "answer", port: int | None = None):
        engines = routing.service.pool.engines.values()
        wait_until(lambda: not any(engine.routed_requests for engine in engines), "what was before is over")
        prefill.begin("prefill", prefill_does, port)
        decode.begin("decode", decode_does, None)
        wait_until(lambda: _roles(engines) == [("prefill", port), ("decode", None)], "the router knows of it")
        routing.wait_ready(2)
        for engine in engines:
            for name in COUNTS:
                setattr(engine, name, 0)
            engine.prefills_from = 0.0
        return prefill, decode, routing, http

    yield begin
    prefill.release.set()
    decode.release.set()


def _roles(engines) -> list[tuple[str, int | None]]:
    return [(engine.role, engine.kv_transfer_port) for engine in engines]


def engine_of(routing, role: str) -> EngineHandle:
    return next(engine for engine in routing.service.pool.engines.values() if engine.role == role)


def ask_aside(http, body=LONG, **more):
    """Send a request in a thread. Return the thread, and the list for its answer."""
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=body, **more)))
    thread.start()
    return thread, answers


ways = pytest.mark.parametrize("port", [None, PORT], ids=["store", "direct"])


@pytest.mark.sweep(16)
@ways
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions?a=1", {"messages": [{"role": "user", "content": PROMPT}], "n": 2, "stream": True}),
        ("/v1/completions", {"prompt": list(range(256))}),
        ("/v1/responses", {"input": PROMPT}),
        ("/v1/messages", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 9}),
        ("/generate", {"inputs": PROMPT}),
        ("/generate_stream", {"inputs": PROMPT}),
        ("/", {"inputs": PROMPT}),
        ("/api/chat", {"model": "m", "messages": [{"role": "user", "content": PROMPT}]}),
        ("/api/generate", {"model": "m", "prompt": PROMPT, "options": {"num_predict": 9}}),
    ],
)
def test_prefill_and_decode_get_same_request_on_every_route(paired, port, path, body):
    prefill, decode, _, http = paired(decode_does="follow", port=port)
    answer = http.post(path, json=body, headers={"X-Request-Id": "mine", "Authorization": "Bearer k"})
    assert answer.json()["from"] == "decode"
    wait_until(lambda: prefill.params, "the prefill engine has read its request, which a direct pair may do last")
    assert len(prefill.summary) == 1
    (path_of_prefill, first, first_body), (_, second, second_body) = prefill.summary[0], decode.summary[0]
    assert (path_of_prefill, first_body) == (path.partition("?")[0], second_body)
    for name in ("x-request-id", "authorization", "x-forwarded-for", "content-type"):
        assert first[name] == second[name]
    assert len(decode.summary) == 1
    (of_prefill,), (of_decode,) = prefill.params, decode.params
    assert of_prefill == KVTransferParams(of_decode.transfer_id, is_prefill=True)
    assert of_decode.source == (None if port is None else f"127.0.0.1:{PORT}")


def test_store_transfer_delays_decode_until_prefill_ends(paired):
    prefill, decode, routing, http = paired("wait")
    thread, answers = ask_aside(http)
    wait_until(lambda: prefill.summary, "the prefill has begun")
    assert len(engine_of(routing, "decode").routed_requests) == 1, "it counts as its load meanwhile"
    assert not thread.join(0.1)
    assert not decode.summary
    prefill.release.set()
    thread.join(DEADLINE_S)
    assert answers[0].json()["from"] == "decode"
    assert decode.params[0].transfer_id == prefill.params[0].transfer_id


def test_direct_transfer_starts_prefill_and_decode_together(paired):
    prefill, decode, routing, http = paired("wait", "wait", PORT)
    thread, answers = ask_aside(http)
    wait_until(lambda: prefill.summary and decode.summary, "both have begun")
    prefill.release.set()
    wait_until(lambda: engine_of(routing, "prefill").num_prefill_tokens == 300, "the prefill is counted")
    assert not answers
    decode.release.set()
    thread.join(DEADLINE_S)
    assert answers[0].json()["from"] == "decode"


@ways
def test_paired_prompt_is_charged_once(paired, port):
    _, _, routing, http = paired(port=port)
    prefill, decode = engine_of(routing, "prefill"), engine_of(routing, "decode")
    charged: list[int] = []
    limiter = routing.service.limiter
    limiter.charge = lambda _tenant, num_tokens: charged.append(num_tokens)
    assert http.post("/v1/completions", json=LONG).status_code == 200
    wait_until(lambda: not prefill.routed_requests and not decode.routed_requests, "both are over")
    assert charged == [300]
    assert (decode.num_paired, decode.num_prefills) == (1, 0)
    assert (prefill.num_paired, prefill.num_prefills, prefill.num_failed_prefills) == (0, 1, 0)
    assert (prefill.open_tokens, decode.open_tokens) == (0, 0)
    assert (decode.num_prompt_tokens, decode.num_cached_tokens) == (300, 30)
    if port is None:  # with a direct transfer the prefill's own answer may come later
        assert (prefill.num_prompt_tokens, prefill.num_cached_tokens, prefill.num_prefill_tokens) == (300, 30, 300)
    text = http.get("/metrics").text
    assert f'octavo:router_paired_requests_total{{engine="{decode.url}"}} 1.0' in text
    assert f'octavo:router_prefills_total{{engine="{prefill.url}"}} 1.0' in text
    assert f'octavo:router_failed_prefills_total{{engine="{prefill.url}"}} 0.0' in text
    assert f'octavo:router_prefill_tokens_total{{engine="{prefill.url}"}} {prefill.num_prefill_tokens}.0' in text
    told = {each["role"]: each for each in http.get("/router/engines").json()["engines"]}
    assert (told["prefill"]["prefills"], told["decode"]["paired_requests"]) == (1, 1)


@pytest.mark.sweep(16)
@ways
@pytest.mark.parametrize("trouble", ["refuse", "full", "fail", "closing", "die", "die in its answer"])
def test_decode_engine_answers_despite_prefill_failure(paired, port, trouble):
    prefill, decode, routing, http = paired(trouble, "wait", port)
    thread, answers = ask_aside(http)
    engine = engine_of(routing, "prefill")
    wait_until(lambda: prefill.summary and not engine.routed_requests, "the prefill is over")
    decode.release.set()
    thread.join(DEADLINE_S)
    assert (answers[0].status_code, answers[0].json()["from"]) == (200, "decode")
    assert len(decode.summary) == 1
    assert (decode.params == [None]) == (port is None), "where it is known in time, there is no KV to wait for"
    is_its_fault = trouble != "refuse"
    assert (engine.num_failed_prefills, engine.num_failures) == (is_its_fault, 0)
    assert engine_of(routing, "decode").num_failures == 0
    routing.wait_ready(2)
    assert http.post("/v1/completions", json=LONG).status_code == 200
    assert (decode.params[1] is None) == (is_its_fault or port is None), "it is left alone for a while"


@pytest.mark.parametrize(
    ("retry_after", "pause_s"), [(b"7", 7), (b"99999", 60), (b"soon", 1), (b"1 Jan 99999999999999999999 1:1:1", 1)]
)
def test_full_prefill_engine_pauses_for_retry_after(paired, retry_after, pause_s):
    prefill, _, routing, http = paired("full")
    prefill.retry_after = retry_after
    engine, loop = engine_of(routing, "prefill"), routing.server.servers[0].get_loop()
    asked_at = loop.time()
    assert http.post("/v1/completions", json=LONG).status_code == 200
    assert asked_at + pause_s <= engine.prefills_from <= loop.time() + pause_s
    prefill.does, engine.prefills_from = "answer", loop.time()
    http.post("/v1/completions", json=LONG)
    assert len(prefill.summary) == 2


def test_error_in_reading_prefill_answer_keeps_request(paired, monkeypatch):
    def fail(*_):
        raise RuntimeError("a fault of the router")

    monkeypatch.setattr(pairing, "read_usage", fail)
    _, decode, routing, http = paired()
    assert http.post("/v1/completions", json=LONG).json()["from"] == "decode"
    assert decode.params == [None]
    assert engine_of(routing, "prefill").num_failed_prefills == 1


def test_slow_prefill_is_aborted_and_decode_computes_prompt(paired, monkeypatch):
    monkeypatch.setattr(pairing, "_LEAST_S", 0.05)
    monkeypatch.setattr(pairing, "_S_PER_TOKEN", 0.0)
    prefill, decode, routing, http = paired("hang")
    assert http.post("/v1/completions", json=LONG).json()["from"] == "decode"
    assert decode.params == [None]
    wait_until(lambda: prefill.num_left, "it hears of it")
    assert engine_of(routing, "prefill").num_failed_prefills == 1


@ways
def test_lost_prefill_engine_does_not_fail_request(paired, port):
    """For example a frozen engine, which is detected while it computes."""
    prefill, decode, routing, http = paired("hang", "wait", port)
    thread, answers = ask_aside(http)
    wait_until(lambda: prefill.summary, "the prefill has begun")
    engine, loop = engine_of(routing, "prefill"), routing.server.servers[0].get_loop()
    loop.call_soon_threadsafe(routing.service.pool.lost, engine)
    wait_until(lambda: prefill.num_left and decode.summary, "the other one goes on")
    decode.release.set()
    thread.join(DEADLINE_S)
    assert answers[0].json()["from"] == "decode"
    assert (engine.num_failed_prefills, engine.num_failures) == (1, 0)


@pytest.mark.parametrize(
    ("prefill_does", "decode_does", "port"),
    [("hang", "hang", PORT), ("answer", "hang", None), ("hang", "answer", None)],
)
def test_client_disconnect_aborts_prefill_and_decode(paired, prefill_does, decode_does, port):
    prefill, decode, routing, _ = paired(prefill_does, decode_does, port)
    hanging = [engine for engine in (prefill, decode) if engine.does == "hang"]
    with asking(routing, "/v1/completions", LONG):
        wait_until(lambda: all(engine.summary for engine in hanging), "they are asked")
    wait_until(lambda: all(engine.num_left == 1 for engine in hanging), "they hear of it")
    engines = routing.service.pool.engines.values()
    wait_until(lambda: not any(engine.routed_requests for engine in engines), "the router has forgotten it")
    assert [engine.open_tokens for engine in engines] == [0, 0]
    assert [engine.num_failures + engine.num_failed_prefills for engine in engines] == [0, 0]
    if prefill_does == "hang" and port is None:
        assert not decode.summary


def test_finished_answer_aborts_direct_prefill(paired):
    prefill, _, routing, http = paired("hang", "answer", PORT)
    assert http.post("/v1/completions", json=LONG).status_code == 200
    wait_until(lambda: prefill.num_left == len(prefill.summary), "nobody waits for it")
    assert engine_of(routing, "prefill").num_failed_prefills == 0


@ways
def test_client_kv_transfer_headers_are_dropped(paired, port):
    named = {"X-KV-Transfer-Id": "mine", "x-kv-transfer-role": "decode", "X-KV-TRANSFER-SOURCE": "10.0.0.1:1"}
    prefill, decode, _, http = paired(port=port)
    assert http.post("/v1/completions", json={"prompt": "short"}, headers=named).status_code == 200
    assert decode.params == [None]
    decode.does = "follow"
    assert http.post("/v1/completions", json=LONG, headers=named).status_code == 200
    assert decode.params[1].transfer_id != "mine"
    assert len(decode.summary[1][1].getlist("x-kv-transfer-id")) == 1
    assert prefill.params[0].is_prefill


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "short", "max_tokens": 4000}),
        ("/v1/completions", {"prompt": PROMPT, "prompt_logprobs": 0}),
        ("/v1/completions", {"prompt": PROMPT, "echo": True, "logprobs": 0}),
        ("/generate", {"inputs": PROMPT, "parameters": {"decoder_input_details": True}}),
        ("/v1/embeddings", {"input": PROMPT}),
        ("/tokenize", {"prompt": PROMPT}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": PROMPT}]}),
        ("/v1/completions", {"prompt": PROMPT, "model": "another"}),
    ],
)
def test_short_scored_and_pooled_prompts_skip_remote_prefill(paired, path, body):
    prefill, decode, _, http = paired(port=PORT)
    assert http.post(path, json=body).json()["from"] == "decode"
    assert (len(prefill.summary), decode.params) == (0, [None])


def test_remote_prefill_starts_at_256_tokens(paired):
    prefill, _, _, http = paired()
    for num_tokens, num_asked in ((255, 0), (256, 1)):
        http.post("/v1/completions", json={"prompt": [7] * num_tokens})
        assert len(prefill.summary) == num_asked


def test_min_prefill_tokens_option_sets_remote_prefill_threshold(paired):
    prefill, _, routing, _ = paired()
    with run_router(*routing.service.pool.engines, min_prefill_tokens=3) as other, other.http() as http:
        for num_tokens, num_asked in ((2, 0), (3, 1)):
            http.post("/v1/completions", json={"prompt": [7] * num_tokens})
            assert len(prefill.summary) == num_asked


def test_expected_prefix_hit_on_decode_engine_skips_prefill(paired):
    prefill, decode, routing, _ = paired()
    turns = []
    with run_router(*routing.service.pool.engines, policy="cache_aware") as aware, aware.http() as http:
        for content in (PROMPT, "A book?", "And a quarto? " * 150):
            turns.append({"role": "user", "content": content})
            assert http.post("/v1/chat/completions", json={"messages": turns}).status_code == 200
    assert [params is None for params in decode.params] == [False, True, False]
    assert len(prefill.summary) == 2


@pytest.mark.parametrize("role", ["both", None, "decode"])
def test_request_is_unpaired_without_prefill_engine(role):
    with scripted(role) as (url, engine), run_router(url) as routing, routing.http() as http:
        assert http.post("/v1/completions", json=LONG).status_code == 200
        assert engine.params == [None]


def test_engine_of_both_roles_answers_alone():
    with (
        scripted("prefill") as (first, prefill),
        scripted("both") as (second, both),
        run_router(first, second) as routing,
        routing.http() as http,
    ):
        assert [http.post("/v1/completions", json=LONG).json()["from"] for _ in range(3)] == ["both"] * 3
        assert (len(prefill.summary), both.params) == (0, [None] * 3)


def test_prefill_engine_answers_only_without_decode_engine(paired):
    prefill, decode, routing, http = paired()

    def ask() -> str | int:
        answer = http.post("/v1/completions", json={"prompt": "short"})
        return answer.json()["from"] if answer.status_code == 200 else answer.status_code

    assert [ask() for _ in range(3)] == ["decode"] * 3
    decode.does = "full"
    assert ask() == 429
    assert not prefill.summary
    for trouble in ("die", "closing"):
        decode.does = trouble
        routing.wait_ready(2)
        assert ask() == "prefill"
    decode.is_ready = False
    routing.wait_ready(1)
    assert http.post("/v1/completions", json=LONG).json()["from"] == "prefill"
    assert prefill.params == [None] * 3


def test_late_engine_loss_does_not_end_retry(paired, monkeypatch):
    _, _, routing, http = paired(decode_does="die", port=PORT)
    close = Pair.close

    def close_and_look(pair, usage):
        asyncio.get_running_loop().call_soon(routing.service.pool.lost, engine_of(routing, "decode"))
        return close(pair, usage)

    monkeypatch.setattr(Pair, "close", close_and_look)
    assert http.post("/v1/completions", json=LONG).json()["from"] == "prefill"


def test_prefills_balance_by_load_and_retry_uses_new_pair():
    with (
        scripted("prefill", "wait") as (_url_a, a),
        scripted("prefill", "wait") as (_url_b, b),
        scripted("decode", "die") as (_url_c, c),
        scripted("decode", "answer") as (_url_d, d),
        run_router(_url_a, _url_b, _url_c, _url_d, policy="round_robin") as routing,
        routing.http() as http,
    ):
        summary = [ask_aside(http) for _ in range(4)]
        wait_until(lambda: len(a.summary) + len(b.summary) == 4, "all prompts are under way")
        assert (len(a.summary), len(b.summary)) == (2, 2)
        a.release.set()
        b.release.set()
        for thread, answers in summary:
            thread.join(DEADLINE_S)
            assert answers[0].json()["from"] == "decode"
        assert (len(c.summary), len(d.summary)) == (2, 4)
        ids = Counter(params.transfer_id for each in (a, b) for params in each.params)
        assert set(ids.values()) == {1}, "who begins anew is another pair"


def test_router_rereads_role_and_transfer_port(paired):
    prefill, _, routing, _ = paired(port=PORT)
    engine = engine_of(routing, "prefill")
    prefill.port = PORT + 1
    wait_until(lambda: engine.kv_transfer_port == PORT + 1, "its new port is known")
    prefill.port = None
    wait_until(lambda: engine.kv_transfer_port is None, "it has none any more")
    prefill.port = 70000  # an invalid port counts as none
    prefill.role = "decode"
    wait_until(lambda: engine.role == "both", "what says nothing clear is for both")


def test_prefill_and_decode_servers_give_answer_of_one_server():
    with (
        run_server(engine_options={"role": "prefill"}) as prefill,
        run_server(engine_options={"role": "decode"}) as decode,
        run_server() as alone,
        run_router(prefill.url, decode.url) as routing,
    ):
        with alone.http() as http:
            expected = http.post("/v1/completions", json=LONG).json()
        with routing.http() as http:
            got = http.post("/v1/completions", json=LONG).json()
        assert got["choices"] == expected["choices"]
        assert engine_of(routing, "prefill").num_prefill_tokens == len(PROMPT)
        assert decode.executor.num_computing_steps == alone.executor.num_computing_steps


@pytest.mark.parametrize(
    ("url", "source"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1:4711"),
        ("https://engine.local", "engine.local:4711"),
        ("http://[fe80::1%25eth0]:8000", "[fe80::1]:4711"),
    ],
)
def test_kv_transfer_source_is_built_from_engine_url(url, source):
    engine = EngineHandle(url, role="prefill", kv_transfer_port=PORT)
    assert _source_of(engine) == source
    KVTransferParams("a", source=source)


def test_model_only_on_prefill_engine_is_served_there():
    pool = EnginePool(LeastLoaded())
    pool.change(["http://a", "http://b"])
    a, b = pool.engines.values()
    a.is_ready = b.is_ready = True
    a.role, b.role = "prefill", "decode"
    a.models, b.models = frozenset({"x"}), frozenset({"y"})
    assert pool.choose(RequestSummary(model="x"), []) is a
    assert pool.choose(RequestSummary(model="y"), []) is b
    assert pool.choose_prefill(RequestSummary(model="y"), b, 0.0) is None
    assert pool.choose_prefill(RequestSummary(model="x"), b, 0.0) is a
