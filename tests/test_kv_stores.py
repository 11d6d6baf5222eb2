"""A token never depends on the source of its KV: tokens and logprobs are `==` to those of engines without a store.

Engines of one process share a pool. Faults of stores cost time, never a token, a request or a block.
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace

import pytest
from faulty_store import FaultyStore, HangingStore
from kernels_available import kv_precision, precision
from test_exactness import PRESSING, Schedule, answers, make_engine, make_requests, needs_kernels

from octavo import CacheConfig, DeviceConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig
from octavo.build import build_engine
from octavo.config import EngineConfig
from octavo.core.invariants import check
from octavo.core.kv.block_hash import hash_block_tokens
from octavo.data import events
from octavo.data.events import EventLog
from octavo.journal.replay import replay
from octavo.kv_transfer import guard
from octavo.kv_transfer.memory import GlobalKVPool, MemoryStore
from octavo.kv_transfer.tiers import TieredStore
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.server.telemetry.metrics import _stores

pytestmark = needs_kernels
NUM_TRIED = 12  # requests; a third of them has a common prefix
DTYPES = ["bfloat16", "bfloat16 with int8 KV", "int8 with int8 KV"]
FEW_BLOCKS = {"block_size": 2, "num_blocks": 160, "budget": 64}
SCHEDULES = [
    Schedule("crowd"),
    Schedule("chunks_of_7", block_size=2, num_blocks=2000, threshold=7),
    Schedule("preempted", **FEW_BLOCKS),
    Schedule("swapped", **FEW_BLOCKS, swap_space_bytes=1 << 22, options=(("preemption", "swap"),)),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small model with grouped heads; random weights large enough to matter."""
    config = tiny_config(
        "Qwen3ForCausalLM", hidden_size=192, intermediate_size=320, head_dim=48, num_hidden_layers=3, vocab_size=1500
    )
    return write_checkpoint(tmp_path_factory.mktemp("stores") / "qwen3", config, std=0.1)


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Answers to each request alone, without a store."""
    known = {}

    def run(dtype):
        if dtype not in known:
            engine = make_engine(checkpoint, dtype, Schedule("alone", max_num_seqs=1, prefix_caching=False), "cpu")
            known[dtype] = answers(engine, make_requests()[:NUM_TRIED])
        return known[dtype]

    return run


def engine_over(
    make_store,
    checkpoint,
    schedule=SCHEDULES[0],
    dtype="bfloat16",
    sink=None,
    stores=None,
    num_ranks=1,
    **scheduler_options,
):
    return LLMEngine(
        ModelConfig(model=str(checkpoint), **precision(dtype), skip_tokenizer_init=True, max_model_len=512),
        cache_config=CacheConfig(
            block_size=schedule.block_size,
            num_gpu_blocks=schedule.num_blocks or 512,
            swap_space_bytes=schedule.swap_space_bytes,
            **kv_precision(dtype),
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=schedule.max_num_seqs,
            max_num_batched_tokens=schedule.budget,
            long_prefill_token_threshold=schedule.threshold,
            **{
                "min_tokens_to_cache": 2,
                "kv_lookup_timeout_s": 20.0,  # the machine may be busy with other tests
                **PRESSING,
                **dict(schedule.options),
                **scheduler_options,
            },
        ),
        device_config=DeviceConfig(device="cpu", tensor_parallel_size=num_ranks, rank_timeout_s=60.0),
        kv_store=make_store,
        kv_transfer_config=stores,
        sink=sink,
    )


def node(pool, name="a"):
    """Return a function that makes a node's store for a pool."""
    return lambda block_bytes: MemoryStore(pool, name, block_bytes)


def count(log, kind, **fields):
    found = [each for each in log.events if isinstance(each, kind)]
    return sum(all(getattr(each, name) == value for name, value in fields.items()) for each in found)


def settle(engine):
    """Finish open saves; then check that no block is held, no record remains and no invariant is broken."""
    end = time.monotonic() + 20
    while engine.core.has_work() and time.monotonic() < end:
        engine.step()
    scheduler = engine.core.scheduler
    assert not scheduler.has_work()
    assert check(scheduler) == []
    assert scheduler.num_kept_records == 0
    assert scheduler.kv_cache_manager.num_transfers == 0
    connector = scheduler.transfers._connector
    assert getattr(connector, "_connector", connector).num_lookups == 0  # inside the connector that records


@pytest.mark.sweep(48)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_second_engine_gives_equal_tokens_with_pool_kv_of_first(checkpoint, alone, schedule, dtype):
    pool, log = GlobalKVPool(5000), EventLog()
    requests, expected = make_requests()[:NUM_TRIED], alone(dtype)
    first = engine_over(node(pool, "a"), checkpoint, schedule, dtype)
    assert answers(first, requests) == expected
    settle(first)
    second = engine_over(node(pool, "b"), checkpoint, schedule, dtype, sink=log)
    assert answers(second, requests) == expected
    settle(second)
    assert count(log, events.KVLoadEnded, outcome="done") >= 4
    first.core.executor.shutdown()
    second.core.executor.shutdown()


def test_engine_computes_only_tokens_missing_from_pool(checkpoint):
    pool, log = GlobalKVPool(5000), EventLog()
    prompt = {"prompt_token_ids": list(range(2, 130))}
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    first = engine_over(node(pool), checkpoint)
    want = first.generate(prompt, params)
    settle(first)
    second = engine_over(node(pool, "b"), checkpoint, sink=log)
    got = second.generate(prompt, params)
    assert got.outputs[0].token_ids == want.outputs[0].token_ids
    assert got.num_cached_tokens >= len(prompt["prompt_token_ids"]) - 16
    assert got.metrics.num_recomputed_tokens == 0
    steps = [each for each in log.events if isinstance(each, events.StepScheduled)]
    assert sum(sum(step.num_scheduled_tokens.values()) for step in steps) <= 4 + 16


def test_answer_blocks_are_saved_for_next_turn(checkpoint):
    """The store has all of its whole blocks, also those that were too few to be saved before its end."""
    pool = GlobalKVPool(5000)
    prompt = list(range(2, 130))
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    first = engine_over(node(pool), checkpoint)
    answer = first.generate({"prompt_token_ids": prompt}, params).outputs[0].token_ids
    settle(first)
    second = engine_over(node(pool, "b"), checkpoint)
    found = second.generate({"prompt_token_ids": [*prompt, *answer, 5]}, params).num_cached_tokens
    assert found == (len(prompt) + len(answer) - 1) // 16 * 16


def spoiling(pool, seed, **options):
    stores = []

    def make(block_bytes):
        stores.append(FaultyStore(pool, "a", block_bytes, seed=seed, **options))
        return stores[-1]

    return stores, make


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    "num_faults", [60, pytest.param(5000, marks=pytest.mark.slow)], ids=["some faults", "many faults"]
)
@pytest.mark.parametrize("raises", [False, True], ids=["spoils", "raises too"])
def test_faulty_store_does_not_change_tokens(checkpoint, alone, monkeypatch, num_faults, raises):
    monkeypatch.setattr(guard, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(guard, "LONGEST_PAUSE_S", 0.002)
    pool = GlobalKVPool(5000)
    stores, make = spoiling(pool, 3, raises=raises, rate=0.3)
    engine = engine_over(make, checkpoint, replace(SCHEDULES[2], num_blocks=400))
    # the store's answers are compared, so load times must not decide
    monkeypatch.setattr("octavo.core.transfer_cost.TransferCost.is_worth_loading", lambda *_: True)
    requests, expected = make_requests()[:NUM_TRIED], alone("bfloat16")
    while stores[0].num_faults < num_faults:
        assert reseeded(engine, requests) == expected
        settle(engine)
        assert engine.core.scheduler.reset_prefix_cache()
    engine.core.executor.shutdown()


def reseeded(engine, requests):
    """Answer requests as if they were the first: seeds of those without one follow from their arrival number."""
    engine.input_processor._arrivals = itertools.count()
    return answers(engine, requests)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", ["num_matched", "load", "save"])
def test_hanging_store_costs_only_timeout_and_engine_shuts_down(checkpoint, alone, monkeypatch, name):
    pool, stores = GlobalKVPool(5000), []
    first = engine_over(node(pool), checkpoint)
    requests, expected = make_requests()[:NUM_TRIED], alone("bfloat16")
    answers(first, requests)
    settle(first)
    if name == "save":
        pool.remove(list(pool._holders))

    class Hanging(HangingStore):
        def _wait(self, called):
            if called == name:
                monkeypatch.setattr(guard, "HANGS_AFTER_S", 0.1)
            super()._wait(called)

    def make(block_bytes):
        stores.append(Hanging(pool, "b", block_bytes, name))
        return stores[0]

    monkeypatch.setattr("octavo.worker.transfer_threads._SHUTDOWN_S", 0.2)
    lookup_s = 0.05 if name == "num_matched" else 20.0  # calls that do not hang have time
    engine = engine_over(make, checkpoint, kv_transfer_timeout_s=0.2, kv_lookup_timeout_s=lookup_s)
    assert answers(engine, requests) == expected
    assert stores[0].entered.is_set()
    settle(engine)
    start = time.monotonic()
    engine.core.executor.shutdown()
    assert time.monotonic() - start < 20  # it would hang forever
    stores[0].release.set()


def test_request_aborted_during_kv_load_releases_everything(checkpoint, alone):
    pool, stores, log = GlobalKVPool(5000), [], EventLog()
    first = engine_over(node(pool), checkpoint)
    requests, expected = make_requests()[:NUM_TRIED], alone("bfloat16")
    answers(first, requests)
    settle(first)

    def make(block_bytes):
        stores.append(HangingStore(pool, "b", block_bytes, "load"))
        return stores[0]

    engine = engine_over(make, checkpoint, sink=log)
    prompt, params = requests[0]
    engine.add_request("aborted", {"prompt_token_ids": prompt}, params)
    end = time.monotonic() + 20
    while not stores[0].entered.is_set() and time.monotonic() < end:
        engine.step()
    engine.abort_request("aborted")
    settle(engine)
    assert count(log, events.KVLoadEnded, outcome="cancelled") == 1
    stores[0].hangs.clear()
    stores[0].release.set()
    assert reseeded(engine, requests) == expected
    settle(engine)


def test_unreachable_store_does_not_stop_engine(checkpoint, alone, caplog):
    def make(block_bytes):
        store = MemoryStore(GlobalKVPool(), "a", block_bytes)
        for name in ("num_matched", "load", "save"):
            setattr(store, name, lambda *_: (_ for _ in ()).throw(OSError(111, "Connection refused")))
        return store

    engine = engine_over(make, checkpoint)
    assert answers(engine, make_requests()[:NUM_TRIED]) == alone("bfloat16")
    settle(engine)
    assert caplog.text.count("it is not used for a while, then retried") == 1


def test_tiered_store_gives_equal_tokens(checkpoint, alone):
    fast, slow = GlobalKVPool(20), GlobalKVPool(5000)

    def make(block_bytes):
        return TieredStore([MemoryStore(fast, "a", block_bytes), MemoryStore(slow, "a", block_bytes)])

    requests, expected = make_requests()[:NUM_TRIED], alone("bfloat16")
    for _ in range(2):
        engine = engine_over(make, checkpoint)
        assert answers(engine, requests) == expected
        settle(engine)
        engine.core.executor.shutdown()
    assert 0 < fast.total_cached_blocks <= 20 < slow.total_cached_blocks


def key_of(engine, salt=None):
    """Return the key of one block of an engine."""
    extra = engine.core.scheduler.kv_cache_manager.prefix_cache.chains.extra_keys
    engine.core.executor.shutdown()
    return hash_block_tokens(None, [1, 2, 3], extra if salt is None else (*extra, f"salt:{salt}"))


@pytest.mark.turn(12)
def test_block_keys_differ_by_model_dtype_version_and_secret(checkpoint, tmp_path, monkeypatch):
    """F18. A copy of the checkpoint under another name has the same keys; any other difference changes them."""

    def key(path=checkpoint, dtype="bfloat16", schedule=SCHEDULES[0]):
        return key_of(engine_over(node(GlobalKVPool()), path, schedule, dtype))

    copy = tmp_path / "copy"
    copy.mkdir()
    for file in checkpoint.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    base = key()
    assert key(copy) == base
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    keys = [
        base,
        key(copy),
        key(dtype="float32"),
        key(dtype="int8"),
        key(dtype="int4"),
        key(dtype="bfloat16 with int8 KV"),
        key(schedule=SCHEDULES[1]),
    ]
    for name, value in [
        ("octavo.worker.worker.LAYOUT_VERSION", 3),
        ("octavo.startup.identity.__version__", "0.0.0"),
        ("octavo.kernels.cpu.CpuKernels.identity", "other"),
        ("octavo.startup.identity.torch.__version__", "9.9.9"),
        ("octavo.worker.device.torch.backends.cpu.get_cpu_capability", lambda: "another"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            keys.append(key())
    monkeypatch.setenv("OCTAVO_KV_SECRET", "of this fleet")
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_seed_of_dummy_weights_changes_block_keys(checkpoint):
    def key(seed):
        model = ModelConfig(model=str(checkpoint), load_format="dummy", skip_tokenizer_init=True, seed=seed)
        return key_of(
            LLMEngine(
                model,
                cache_config=CacheConfig(num_gpu_blocks=64),
                kv_store=node(GlobalKVPool()),
            )
        )

    assert key(1) == key(1) != key(2)


def test_cache_salt_isolates_kv_in_store(checkpoint):
    pool, log = GlobalKVPool(5000), EventLog()
    prompt = list(range(2, 130))
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)

    def ask(engine, salt):
        engine.add_request("r", {"prompt_token_ids": prompt}, params, cache_salt=salt)
        while engine.has_unfinished_requests():
            engine.step()
        settle(engine)

    ask(engine_over(node(pool), checkpoint), "one")
    second = engine_over(node(pool, "b"), checkpoint, sink=log)
    ask(second, "other")
    assert count(log, events.KVLoadStarted) == 0
    second.core.scheduler.reset_prefix_cache()
    ask(second, "one")
    assert count(log, events.KVLoadStarted) == 1


def test_engine_shutdown_stops_kv_transfer_threads(checkpoint):
    before = set(threading.enumerate())
    engine = engine_over(node(GlobalKVPool()), checkpoint)
    engine.core.executor.shutdown()
    engine.core.executor.shutdown()
    del engine
    left = [each.name for each in threading.enumerate() if each not in before and "octavo-kv" in each.name]
    assert [name for name in left if "lookup" not in name and name != "octavo-kv-memory"] == []


def test_run_with_store_is_replayed_and_its_metrics_match(checkpoint, tmp_path):
    pool, path = GlobalKVPool(5000), tmp_path / "journal"
    requests = make_requests()[:NUM_TRIED]
    first = engine_over(node(pool), checkpoint)
    want = answers(first, requests)
    settle(first)
    config = EngineConfig(
        model=ModelConfig(model=str(checkpoint), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=512),
        cache=CacheConfig(num_gpu_blocks=512),
        scheduler=SchedulerConfig(min_tokens_to_cache=2, **PRESSING),
        record=path,
    )
    second = build_engine(config, kv_store=node(pool, "b"))
    assert answers(second, requests) == want
    settle(second)
    second.core.scheduler.close()
    played = replay(path)
    assert played.mismatches == []
    assert count(played.log, events.KVLoadEnded, outcome="done", store="memory") >= 2
    stats, store = second.core.metrics.stats, second.core.metrics.stats.kv_stores["memory"]
    assert stats.kv_loads["done"] == count(played.log, events.KVLoadEnded, outcome="done")
    assert (store.num_corrupt, store.num_errors, store.is_usable) == (0, 0, 1)
    told = {
        (sample.name, sample.labels.get("store")): sample.value
        for family in _stores(stats, ["model"])
        for sample in family.samples
    }
    assert told["octavo:kv_store_usable", "memory"] == 1
