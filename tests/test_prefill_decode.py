"""One engine computes prompts, another one answers: the tokens are bit for bit those of one engine alone."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
from pairs import add_decode, add_prefill, decode, prefill
from test_exactness import make_requests, needs_kernels
from test_kv_stores import DTYPES, NUM_TRIED, SCHEDULES, alone, checkpoint, count, engine_over, node, settle

from octavo import CacheConfig, ModelConfig, SamplingParams, SchedulerConfig
from octavo.build import build_engine
from octavo.config import EngineConfig, KVTransferConfig
from octavo.core.transfer_cost import TransferCost
from octavo.data import events
from octavo.data.events import EventLog
from octavo.journal.replay import replay
from octavo.kv_transfer.memory import GlobalKVPool

__all__ = ["alone", "checkpoint"]  # fixtures
pytestmark = needs_kernels


def whole_blocks(prompt, block_size):
    """Return the number of prompt tokens handed over: whole blocks, and never the last token."""
    return min(len(prompt) // block_size * block_size, len(prompt) - 1)


@pytest.mark.sweep(48)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_decode_engine_gives_equal_tokens_with_kv_of_prefill_engine(checkpoint, alone, schedule, dtype):
    pool, log = GlobalKVPool(5000), EventLog()
    requests = make_requests()[:NUM_TRIED]
    first = engine_over(node(pool, "prefill"), checkpoint, schedule, dtype)
    second = engine_over(node(pool, "decode"), checkpoint, schedule, dtype, sink=log)
    prefill(first, requests)
    settle(first)
    told, num_found = decode(second, requests)
    assert told == alone(dtype)
    least = [whole_blocks(prompt, schedule.block_size) for prompt, _ in requests]
    if schedule.name == "crowd":
        assert num_found == least
    assert count(log, events.KVLoadEnded, outcome="done") >= 4
    for engine in (first, second):
        settle(engine)
        engine.core.executor.shutdown()


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_prefill_and_decode_over_disk_give_equal_tokens(tmp_path, checkpoint, alone, dtype):
    requests = make_requests()[:NUM_TRIED]

    def start(role):
        stores = KVTransferConfig(role=role, disk_dir=tmp_path / "kv", disk_bytes=1 << 28)
        engine = engine_over(None, checkpoint, SCHEDULES[0], dtype, stores=stores)
        assert engine.capacity.role == role
        return engine

    first, second = start("prefill"), start("decode")
    prefill(first, requests)
    settle(first)
    told, num_found = decode(second, requests)
    assert told == alone(dtype)
    assert num_found == [whole_blocks(prompt, SCHEDULES[0].block_size) for prompt, _ in requests]
    for engine in (first, second):
        settle(engine)
        engine.core.executor.shutdown()


def test_kv_format_differs_by_block_size_dtype_and_weights(tmp_path, checkpoint, monkeypatch):
    """Engines that differ in it cannot use each other's KV; a router compares it. It does not reveal the secret."""

    def described(role, schedule=SCHEDULES[0], dtype=DTYPES[0]):
        stores = KVTransferConfig(role=role, disk_dir=tmp_path / "kv", disk_bytes=1 << 28)
        engine = engine_over(None, checkpoint, schedule, dtype, stores=stores)
        engine.core.executor.shutdown()
        return engine.capacity.kv_format

    format_of_prefill = described("prefill")
    assert {"kv", "weights", "kernels", "model", "versions", "fingerprint"} == set(format_of_prefill)
    monkeypatch.setenv("OCTAVO_KV_SECRET", "of this fleet")
    assert described("decode") == format_of_prefill
    for others, differs in (
        ({"schedule": replace(SCHEDULES[0], block_size=32)}, {"kv"}),
        ({"dtype": "bfloat16 with int8 KV"}, {"kv", "fingerprint"}),
        ({"dtype": "int8 with int8 KV"}, {"kv", "weights", "fingerprint"}),
    ):
        other = described("decode", **others)
        assert {name for name, text in other.items() if text != format_of_prefill[name]} == differs
    pool = GlobalKVPool(100)
    assert engine_over(node(pool, "plain"), checkpoint, SCHEDULES[0], DTYPES[0]).capacity.kv_format is None


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Expected blocks are awaited, even if this process is stopped for a while."""
    monkeypatch.setattr("octavo.kv_transfer.connector._EXPECTED_S", 20.0)


LONG = (list(range(2, 452)), SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=2))


def test_decode_engine_waits_for_unfinished_saves_of_prefill(checkpoint, monkeypatch):
    """The router forwards a request when its prompt is computed; the last blocks may still be on their way."""
    pool = GlobalKVPool(5000)
    publish, release = pool.publish, threading.Event()

    def publish_late(*args, **more):
        release.wait(20)
        time.sleep(0.01)
        return publish(*args, **more)

    monkeypatch.setattr(pool, "publish", publish_late)
    first, second = engine_over(node(pool, "a"), checkpoint), engine_over(node(pool, "b"), checkpoint)
    want = engine_over(None, checkpoint).generate({"prompt_token_ids": LONG[0]}, LONG[1]).outputs[0]
    add_prefill(first, 0, LONG)
    while first.core.scheduler.requests:
        first.step()
    stepping = threading.Thread(target=settle, args=(first,))
    stepping.start()
    add_decode(second, 0, LONG)
    for _ in range(5):
        assert not second.step()
    release.set()
    outputs = []
    while second.has_unfinished_requests():
        outputs += second.step()
    stepping.join()
    assert outputs[-1].num_cached_tokens == whole_blocks(LONG[0], 16)
    assert (outputs[-1].outputs[0].token_ids, outputs[-1].outputs[0].logprobs) == (want.token_ids, want.logprobs)


def test_prefill_saves_complete_prompt_after_request_finishes(checkpoint):
    """It takes most of the cache, of which other saves may pin an eighth."""
    pool = GlobalKVPool(5000)
    schedule = replace(SCHEDULES[2], budget=320)  # 160 blocks of 2 tokens
    engine = engine_over(node(pool, "a"), checkpoint, schedule)
    request = (LONG[0][:300], LONG[1])
    prefill(engine, [request])
    settle(engine)
    assert pool.total_cached_blocks == 150
    engine.core.executor.shutdown()


def test_decode_engine_loads_expected_kv_despite_high_cost(checkpoint, alone, monkeypatch):
    monkeypatch.setattr(TransferCost, "is_worth_loading", lambda *_: False)
    pool = GlobalKVPool(5000)
    first, second = engine_over(node(pool, "a"), checkpoint), engine_over(node(pool, "b"), checkpoint)
    requests = make_requests()[:NUM_TRIED]
    prefill(first, requests)
    told, num_found = decode(second, requests)
    assert told == alone("bfloat16")
    assert num_found == [whole_blocks(prompt, 16) for prompt, _ in requests]


def test_missing_prefill_kv_is_recomputed_after_timeout(checkpoint, alone, monkeypatch):
    monkeypatch.setattr("octavo.kv_transfer.connector._EXPECTED_S", 0.05)
    second = engine_over(node(GlobalKVPool(5000), "b"), checkpoint)
    start = time.monotonic()
    told, _ = decode(second, make_requests()[:NUM_TRIED])
    assert told == alone("bfloat16")
    assert time.monotonic() - start < 10
    settle(second)


def recorded(make_store, checkpoint, path):
    config = EngineConfig(
        model=ModelConfig(model=str(checkpoint), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=512),
        cache=CacheConfig(num_gpu_blocks=512),
        scheduler=SchedulerConfig(min_tokens_to_cache=2),
        record=path,
    )
    return build_engine(config, kv_store=make_store)


def test_journals_of_prefill_and_decode_engines_replay(tmp_path, checkpoint):
    pool = GlobalKVPool(5000)
    first, second = (recorded(node(pool, name), checkpoint, tmp_path / name) for name in ("prefill", "decode"))
    prefill(first, [LONG])
    settle(first)
    _, num_found = decode(second, [LONG])
    assert num_found == [whole_blocks(LONG[0], 16)]
    for name, engine in (("prefill", first), ("decode", second)):
        settle(engine)
        engine.core.scheduler.close()
        repeated = replay(tmp_path / name)
        assert (repeated.num_requests, repeated.mismatches) == (1, [])
