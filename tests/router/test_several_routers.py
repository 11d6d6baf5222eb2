"""Routers side by side choose the same engines without exchanging messages."""

from __future__ import annotations

import json
import random

import pytest
from router.simulated_caches import Conversations, Router

from octavo.router.engines import EngineHandle
from octavo.router.policies import SessionAffinity
from octavo.router.policies.rendezvous import engine_of
from octavo.router.request_summary import read_request_summary

URLS = [f"http://10.0.0.{number}:8000" for number in range(4)]


def session(name: str):
    body = json.dumps({"prompt": "a", "user": name}).encode()
    return read_request_summary(body, tenant="", headers={}, session_header="x")


def shuffled(seed: int) -> list[str]:
    urls = URLS[:]
    random.Random(seed).shuffle(urls)
    return urls


def test_affinity_is_equal_in_all_routers_for_any_order_of_engines():
    one, other = [EngineHandle(url) for url in URLS], [EngineHandle(url) for url in shuffled(1)]
    assert [engine.url for engine in one] != [engine.url for engine in other]
    other[0].open_tokens = one[3].open_tokens = 10_000
    chosen = []
    for number in range(100):
        summary = session(f"user-{number}")
        engine = SessionAffinity().choose(summary, one)
        assert SessionAffinity().choose(summary, other).url == engine.url
        chosen.append(engine.url)
    assert set(chosen) == set(URLS)


def test_engine_that_only_one_router_cannot_reach_moves_only_its_sessions():
    one, other = [EngineHandle(url) for url in URLS], [EngineHandle(url) for url in URLS]
    moved = set()
    for number in range(100):
        summary = session(f"user-{number}")
        engine = SessionAffinity().choose(summary, one)
        without = SessionAffinity().choose(summary, other[1:])
        assert (without.url == engine.url) is (engine.url != URLS[0])
        if engine.url == URLS[0]:
            moved.add(without.url)
        assert SessionAffinity().choose(summary, other).url == engine.url, "it is ready again"
    assert moved == set(URLS[1:])


def test_rendezvous_spreads_keys_evenly():
    engines = [EngineHandle(url) for url in URLS]
    chosen = [engine_of(number.to_bytes(16, "big"), engines) for number in range(400)]
    assert min(chosen.count(engine) for engine in engines) > 70


@pytest.mark.parametrize("at_once", [2, 8])
def test_two_routers_find_nine_tenths_of_the_prefixes_that_one_finds(at_once):
    """The caches of four engines hold all conversations about once."""
    num_blocks = 48 * 8 * 5 // 4
    one = Conversations([Router(URLS)], num_blocks, at_once=at_once).turns(6)
    two = Conversations([Router(URLS), Router(shuffled(1))], num_blocks, at_once=at_once).turns(6)
    assert one > 0.6
    assert two > 0.9 * one


def test_new_prompt_goes_to_the_same_engine_in_all_routers():
    one, other = Router(URLS), Router(shuffled(1))
    chosen = set()
    for number in range(20):
        body = json.dumps({"prompt": f"{number} " * 100}).encode()
        summary = read_request_summary(body, tenant="", headers={}, session_header="x")
        engine = one.policy.choose(summary, one.engines)
        assert other.policy.choose(summary, other.engines).url == engine.url
        chosen.add(engine.url)
    assert chosen == set(URLS)


def test_new_prompt_goes_to_an_engine_whose_load_is_almost_the_lowest():
    router = Router(URLS)
    body = json.dumps({"prompt": [1] * 300, "max_tokens": 100}).encode()
    summary = read_request_summary(body, tenant="", headers={}, session_header="x")
    home = router.policy.choose(summary, router.engines)
    home.open_tokens = 799  # less than two requests of this size
    assert router.policy.choose(summary, router.engines) is home
    home.open_tokens = 800
    assert router.policy.choose(summary, router.engines) is not home


def test_new_prompt_does_not_go_to_an_engine_with_too_much_work():
    router = Router(URLS)
    body = json.dumps({"prompt": [1] * 300}).encode()
    summary = read_request_summary(body, tenant="", headers={}, session_header="x")
    home = router.policy.choose(summary, router.engines)
    for number in range(10, 20):
        other = read_request_summary(
            json.dumps({"prompt": [number] * 500}).encode(), tenant="", headers={}, session_header="x"
        )
        router.policy.sent(other, home)
    assert router.policy.choose(summary, router.engines) is not home
