"""The engine that each policy chooses."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter

import pytest

from octavo.config import RouterConfig
from octavo.errors import ConfigError
from octavo.router.engines import EngineHandle, EnginePool
from octavo.router.policies import CacheAware, LeastLoaded, RoundRobin, SessionAffinity
from octavo.router.request_summary import read_request_summary

SYSTEM = {"role": "system", "content": "You are a helpful assistant who knows everything about octavos. " * 8}


def ask(tenant: str = "", headers: dict[str, str] | None = None, **body):
    return read_request_summary(
        json.dumps(body).encode(), tenant=tenant, headers=headers or {}, session_header="x-session-id"
    )


def chat(conversation: int, num_turns: int, **more):
    """Return a client's request in a conversation: it has all earlier messages, and a new one."""
    said = [
        {"role": role, "content": f"{role} {turn} of {conversation} " * 12}
        for turn in range(num_turns)
        for role in ("user", "assistant")
    ]
    return ask(messages=[SYSTEM, *said[:-1]], **more)


@pytest.fixture
def engines():
    return [EngineHandle(f"http://e{index}", number=index) for index in range(4)]


@pytest.fixture
def aware():
    return CacheAware(balance_tokens=4096, balance_ratio=1.5, max_entries=1 << 16)


def serve(policy, summary, engines, cached_share=None):
    """Choose an engine, send the request and end it. Return the engine."""
    engine = policy.choose(summary, engines)
    policy.sent(summary, engine)
    engine.num_sent_tokens += summary.num_tokens
    policy.ended(summary, engine, cached_share)
    return engine


def test_round_robin_continues_without_missing_engines(engines):
    policy = RoundRobin()
    got = [policy.choose(ask(), engines).number for _ in range(5)]
    first = engines[0].number
    assert [number - first for number in got] == [0, 1, 2, 3, 0]
    assert policy.choose(ask(), engines[2:]) is engines[2]
    assert policy.choose(ask(), engines) is engines[3]


def test_round_robin_starts_with_first_engine():
    engines = [EngineHandle(f"http://e{index}", number=index) for index in range(3)]
    policy = RoundRobin()
    assert [policy.choose(ask(), engines).number for _ in range(4)] == [0, 1, 2, 0]


def test_least_loaded_chooses_engine_with_fewest_tokens(engines):
    for engine, tokens in zip(engines, (30, 10, 20, 10), strict=True):
        engine.open_tokens = tokens
    engines[1].other_tokens = 1
    assert LeastLoaded().choose(ask(), engines) is engines[3]


def test_session_affinity_moves_only_sessions_of_removed_engine(engines):
    policy = SessionAffinity()
    sessions = [f"user-{index}" for index in range(400)]
    before = {each: policy.choose(ask(user=each), engines) for each in sessions}
    assert min(Counter(before.values()).values()) > 60
    after = {each: policy.choose(ask(user=each), engines[1:]) for each in sessions}
    assert all(after[each] is before[each] for each in sessions if before[each] is not engines[0])
    by_header = ask(headers={"x-session-id": "user-7"}, user="another")
    assert policy.choose(by_header, engines) is before["user-7"]
    engines[2].open_tokens = -1
    assert policy.choose(ask(prompt="no session"), engines) is engines[2]


def test_cache_aware_keeps_conversation_on_one_engine(engines, aware):
    homes = {}
    for turn in range(1, 6):
        for conversation in range(12):
            engine = serve(aware, chat(conversation, turn), engines)
            assert homes.setdefault(conversation, engine) is engine


@pytest.mark.parametrize("num_common", [8, 60])
def test_cache_aware_spreads_conversations_with_common_prefix(engines, num_common):
    aware = CacheAware(balance_tokens=1024, balance_ratio=1.5, max_entries=1 << 16)
    common = {"role": "system", "content": "what all have in common " * num_common}
    homes = Counter(
        serve(aware, ask(messages=[common, {"role": "user", "content": f"{index} " * 160}]), engines)
        for index in range(64)
    )
    assert len(homes) == 4
    assert min(homes.values()) >= 8


def test_cache_aware_spreads_unrelated_prompts_evenly(engines, aware):
    got = Counter(serve(aware, ask(prompt=f"{index} " * 200), engines) for index in range(400))
    assert min(got.values()) > 70


def test_overloaded_engine_loses_cache_preference(engines, aware):
    home = serve(aware, chat(1, 2), engines)
    home.open_tokens = 4000
    assert aware.choose(chat(1, 3), engines) is home
    home.open_tokens = 5000
    assert aware.choose(chat(1, 3), engines) is not home
    for engine in engines:
        engine.open_tokens += 20_000  # the imbalance is relatively small now
    assert aware.choose(chat(1, 3), engines) is home


@pytest.mark.parametrize("other", [{"tenant": "bob"}, {"cache_salt": "pepper"}, {"model": "another"}])
def test_prefix_hits_require_same_tenant_salt_and_model(engines, aware, other):
    home = serve(aware, ask(prompt="p" * 999, tenant="alice", model="m"), engines)
    same = ask(prompt="p" * 999, tenant="alice", model="m")
    home.open_tokens = 4000  # only a known prefix leads there
    assert aware.choose(same, engines) is home
    not_same = ask(**{"prompt": "p" * 999, "tenant": "alice", "model": "m", **other})
    assert aware.choose(not_same, engines) is not home


def test_forgotten_engine_has_no_prefix_hits(engines, aware):
    home = serve(aware, chat(1, 2), engines)
    home.open_tokens = 4000
    assert aware.choose(chat(1, 3), engines) is home
    aware.forget(home)
    assert aware.choose(chat(1, 3), engines) is not home


def test_prefix_miss_also_evicts_older_entries(engines, aware):
    home = engines[0]
    old, new = chat(1, 4), chat(2, 4)
    for summary in (chat(0, 4), old, new):
        aware.sent(summary, home)
        aware.ended(summary, home, None)
    again = chat(1, 4)
    aware.sent(again, home)
    aware.ended(again, home, 0.1)
    home.open_tokens = 4000  # only a known prefix leads there
    assert aware.choose(chat(2, 4), engines) is home, "it is newer"
    assert aware.choose(chat(1, 4), engines) is home, "it was sent again"
    assert aware.tree.find(chat(0, 4), [home]).num_bytes <= len(json.dumps(SYSTEM)) + 64, "but for what all share"


def test_miss_on_prompt_in_computation_keeps_entries(engines, aware):
    home = engines[0]
    first, second = chat(1, 4), chat(1, 4)
    aware.sent(first, home)
    aware.sent(second, home)
    aware.ended(second, home, 0.0)
    aware.ended(first, home, 0.0)
    assert aware.choose(chat(1, 5), engines) is home


def test_prefix_tree_is_bounded_and_keeps_latest_prompts(engines):
    aware = CacheAware(balance_tokens=4096, balance_ratio=1.5, max_entries=100)
    homes = [serve(aware, ask(prompt=f"{index} " * 500), engines) for index in range(30)]
    assert len(aware.tree._nodes) == 100
    assert aware.choose(ask(prompt="29 " * 500), engines) is homes[29]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": list(range(500))},
        {"inputs": "x y z " * 100, "parameters": {"max_new_tokens": 5}},
        {"input": "x y z " * 100, "instructions": "do"},
        {"system": "s" * 300, "messages": [{"role": "user", "content": "x" * 300}]},
        {"system": "s" * 300, "prompt": "x" * 300, "options": {"num_predict": 5}},
    ],
)
def test_prompts_of_every_api_give_prefix_hits(engines, aware, body):
    summary = ask(**body)
    assert summary.num_tokens > 50
    assert aware.choose(ask(**body), engines) is serve(aware, summary, engines)
    found = aware.tree.find(ask(**body), engines)
    assert found.engines == [serve(aware, ask(**body), engines)]
    assert found.num_bytes > 0.8 * summary.num_prompt_bytes


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"n": "x", "model": 3, "user": []}', b'{"parameters": 4}'])
def test_invalid_body_gives_default_request(body):
    summary = read_request_summary(body, tenant="", headers={}, session_header="x")
    assert (summary.num_streams, summary.session, summary.model) == (1, None, None)


def test_pool_chooses_remaining_engine_with_model(engines):
    pool = EnginePool(RoundRobin())
    pool.change(["http://a", "http://b"])
    a, b = pool.engines.values()
    a.is_ready = b.is_ready = True
    a.models, b.models = frozenset({"x"}), frozenset({"y"})
    assert pool.choose(ask(model="y"), []) is b
    assert pool.choose(ask(model="y:latest"), []) is b, "as Ollama's clients write it"
    assert pool.choose(ask(model="y"), [b]) is None, "it is full, which another one does not know"
    assert pool.choose(ask(model="z"), [b]) is a, "who may say that there is none"
    b.is_ready = False
    assert pool.choose(ask(model="y"), []) is None, "it comes back"
    assert pool.choose(ask(model="y:latest"), []) is None
    b.is_ready = True
    assert pool.choose(ask(), [a, b]) is None
    new, gone = pool.change(["http://b", "http://c"])
    assert ([each.url for each in new], gone) == (["http://c"], [a])
    assert not a.is_ready


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a", "http://", "http://a/v1", "http://u@a", "http://a:x"])
def test_invalid_engine_address_is_refused(url):
    with pytest.raises(ConfigError, match="address of an engine"):
        RouterConfig(engines=(url,))


def test_router_config_requires_engines():
    with pytest.raises(ConfigError, match="--engine URL"):
        RouterConfig()


@pytest.mark.parametrize(
    ("body", "counts"),
    [
        ({"prompt": ["a", "b", "c"], "n": 2}, (6, 2)),
        ({"prompt": [[1, 2], [3]]}, (2, 1)),
        ({"prompt": [1, 2, 3]}, (1, 1)),
        ({"prompt": []}, (1, 1)),
        ({"input": ["a", "b"]}, (2, 1)),
        ({"input": [{"role": "user", "content": "a"}]}, (1, 1)),
        ({"messages": [{"role": "user", "content": "a"}], "n": 3}, (3, 3)),
    ],
)
def test_streams_are_counted_per_prompt_and_choice(body, counts):
    summary = ask(**body)
    assert (summary.num_streams, summary.num_choices) == counts


@pytest.mark.parametrize(
    ("body", "max_tokens"),
    [({"options": {"num_predict": 7}}, 7), ({"num_predict": 8}, 8), ({"options": {"num_predict": -1}}, 256), ({}, 256)],
)
def test_num_predict_sets_max_tokens(body, max_tokens):
    assert ask(prompt="a", **body).max_tokens == max_tokens


def test_request_without_answer_has_zero_max_tokens():
    body = json.dumps({"input": ["a" * 40, "b" * 40]}).encode()
    summary = read_request_summary(body, tenant="", headers={}, session_header="x", is_answered=False)
    assert (summary.num_tokens > 10, summary.max_tokens) == (True, 0)


@pytest.mark.parametrize("size", [10, 64, 100, 5000, 100_000])
def test_prompt_pieces_span_system_and_messages(size):
    whole = ask(system="s" * size, messages=[{"role": "user", "content": "x" * size}])
    longer = ask(system="s" * size, messages=[{"role": "user", "content": "x" * size + "y" * 3000}])
    other = ask(system="s" * size + "t", messages=[{"role": "user", "content": "x" * size}])
    hashes, ends = whole.pieces
    assert whole.num_prompt_bytes - 1024 < (ends or [0])[-1] <= whole.num_prompt_bytes
    assert longer.pieces[0][: len(hashes)] == hashes
    num_common = sum(one == another for one, another in zip(hashes, other.pieces[0], strict=False))
    assert num_common == sum(end <= size + 1 for end in ends), "the quote before them, and what both have"


@pytest.mark.turn(12)
@pytest.mark.parametrize("num_spaces", [0, 40_000_000])
def test_reading_request_does_not_copy_prompt(num_spaces):
    """The body is large because other threads of this process may allocate a MB in the meantime."""
    body = b'{"messages": [{"role": "user", "content": "' + b"x" * 40_000_000 + b'"}' + b" " * num_spaces + b"]}"
    tracemalloc.start()
    try:
        summary = read_request_summary(body, tenant="", headers={}, session_header="x")
        assert tracemalloc.get_traced_memory()[1] < len(body) / 20
    finally:
        tracemalloc.stop()
    assert summary.num_prompt_bytes == body.rindex(b"x") + 1 - body.index(b"[")


def test_short_prompts_are_spread_evenly(engines, aware):
    got = Counter(serve(aware, ask(prompt="x" * 40), engines) for _ in range(40))
    assert sorted(got.values()) == [10, 10, 10, 10]


@pytest.mark.parametrize(("load", "is_home"), [(4096, True), (4097, False)])
def test_cache_preference_ends_above_balance_limits(engines, aware, load, is_home):
    home = serve(aware, chat(1, 2), engines)
    home.open_tokens = load
    assert (aware.choose(chat(1, 3), engines) is home) is is_home
    for engine in engines:
        if engine is not home:
            engine.open_tokens = 2 * load
    home.open_tokens = 3 * load  # 1.5 times the load of the other engines
    assert aware.choose(chat(1, 3), engines) is home
    home.open_tokens += 1
    assert aware.choose(chat(1, 3), engines) is not home


def test_assigned_work_is_counted_and_halved(engines):
    aware = CacheAware(balance_tokens=10, balance_ratio=1.5, max_entries=1 << 16)
    summary = ask(prompt=[7] * 300)
    assert aware.sent(summary, engines[0]) == 0.0
    assert aware._work == {engines[0]: 300.0}
    assert aware._work_of(engines[1]) == 300.0  # a new engine starts with the minimum of all
    aware.ended(summary, engines[0], None)
    known = aware.sent(summary, engines[0])
    assert 0.8 < known <= 1.0
    assert aware._work[engines[0]] == pytest.approx(300.0 + (1 - known) * 300)
    aware.sent(ask(prompt=[8] * 340), engines[1])
    assert aware._work[engines[1]] == 640.0
    aware.sent(ask(prompt=[9] * 2), engines[1])
    assert aware._work[engines[1]] == 321.0  # above 640 all values are halved
    aware.forget(engines[1])
    assert set(aware._work) == {engines[0]}


@pytest.mark.parametrize(("cached_share", "is_lost"), [(0.0, True), (0.3, True), (0.6, False), (None, False)])
def test_cached_share_below_half_marks_prompt_lost(engines, aware, cached_share, is_lost):
    summary = ask(prompt=[7] * 1000)
    aware.sent(summary, engines[0])
    aware.ended(summary, engines[0], 0.0)
    assert aware.sent(summary, engines[0]) > 0.8
    aware.ended(summary, engines[0], cached_share)
    assert aware._open == {}
    assert (engines[0].number in aware.tree._lost) is is_lost


def test_small_prefix_miss_is_not_loss(engines, aware):
    summary = ask(prompt=[77777] * 64)
    aware.sent(summary, engines[0])
    aware.ended(summary, engines[0], 0.0)
    aware.sent(summary, engines[0])
    aware.ended(summary, engines[0], 0.0)
    assert not aware.tree._lost
