"""Models with recurrent layers over KV stores: tokens are `==` to those of an engine without a store."""

from __future__ import annotations

from dataclasses import replace

import pytest
from faulty_store import FaultyStore
from mooncake_master import Master, needs_mooncake
from pairs import decode, prefill
from running import wait_until
from test_exactness import Schedule, answers, make_engine, make_requests, needs_kernels
from test_kv_disk import over_disk
from test_kv_stores import SCHEDULES, count, engine_over, node, reseeded, settle

from octavo import CacheConfig, ModelConfig, SamplingParams, SchedulerConfig
from octavo.build import build_engine
from octavo.config import EngineConfig, KVTransferConfig
from octavo.core.kv.checkpoints import Checkpoints
from octavo.data import events
from octavo.data.events import EventLog
from octavo.journal.replay import replay
from octavo.kv_transfer.memory import GlobalKVPool, MemoryStore
from octavo.kv_transfer.stored_states import count_pieces
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.worker.kv_plan import KVPlan, KVSize

pytestmark = needs_kernels
NUM_TRIED = 12
DTYPES = ["float32", "bfloat16", "bfloat16 with int8 KV"]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    layers = ["linear_attention", "full_attention", "linear_attention"]
    config = tiny_config("Qwen3_5ForCausalLM", num_hidden_layers=3, layer_types=layers, vocab_size=1500)
    return write_checkpoint(tmp_path_factory.mktemp("recurrent_stores") / "model", config, std=0.1)


@pytest.fixture(scope="module")
def alone(checkpoint):
    known = {}

    def run(dtype):
        if dtype not in known:
            engine = make_engine(checkpoint, dtype, Schedule("alone", max_num_seqs=1, prefix_caching=False), "cpu")
            known[dtype] = answers(engine, make_requests()[:NUM_TRIED])
        return known[dtype]

    return run


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Expected blocks are awaited, even if this process is stopped for a while."""
    monkeypatch.setattr("octavo.kv_transfer.connector._EXPECTED_S", 20.0)
    monkeypatch.setattr("octavo.core.transfer_cost.TransferCost.is_worth_loading", lambda *_: True)


@pytest.fixture
def few_states(monkeypatch):
    """States of all running requests and two checkpoints."""
    with_states = KVPlan._with_states

    def with_few(plan, size, num_bytes):
        *others, num_states = with_states(plan, size, num_bytes).blocks_of_groups
        return KVSize((*others, min(num_states, plan.max_num_seqs + 2)))

    monkeypatch.setattr(KVPlan, "_with_states", with_few)


def finish(*engines):
    for engine in engines:
        settle(engine)
        engine.core.executor.shutdown()


def usable_tokens(prompt, block_size=16):
    """Return how many tokens a store can provide: full blocks, but not the last token."""
    return (len(prompt) - 1) // block_size * block_size


@pytest.mark.sweep(24)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_second_engine_loads_states_of_first_from_pool(checkpoint, alone, schedule, dtype):
    pool, log = GlobalKVPool(20000), EventLog()
    requests, expected = make_requests()[:NUM_TRIED], alone(dtype)
    first = engine_over(node(pool, "a"), checkpoint, schedule, dtype)
    assert answers(first, requests) == expected
    settle(first)
    second = engine_over(node(pool, "b"), checkpoint, schedule, dtype, sink=log)
    assert answers(second, requests) == expected
    least = 1 if schedule.num_blocks == 160 else 4  # saves may pin few blocks and states
    assert count(log, events.KVLoadEnded, outcome="done") >= least
    finish(first, second)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@pytest.mark.usefixtures("few_states")
def test_tokens_are_equal_if_few_states_fit(checkpoint, alone, schedule):
    pool, log = GlobalKVPool(20000), EventLog()
    requests, expected = make_requests()[:NUM_TRIED], alone("bfloat16")
    schedule = replace(schedule, max_num_seqs=4)
    engines = [engine_over(node(pool, name), checkpoint, schedule, sink=log) for name in "ab"]
    for engine in engines:
        assert answers(engine, requests) == expected
        settle(engine)
    assert count(log, events.CheckpointEvicted) > 0
    finish(*engines)


@pytest.mark.parametrize("num_tokens", [129, 128, 127])
def test_engine_computes_only_tokens_after_stored_state(checkpoint, num_tokens):
    pool, log = GlobalKVPool(5000), EventLog()
    prompt = list(range(2, 2 + num_tokens))
    first, second = engine_over(node(pool), checkpoint), engine_over(node(pool, "b"), checkpoint, sink=log)
    want = first.generate({"prompt_token_ids": prompt}, GREEDY)
    settle(first)
    got = second.generate({"prompt_token_ids": prompt}, GREEDY)
    assert got.outputs[0].token_ids == want.outputs[0].token_ids
    assert got.num_cached_tokens == usable_tokens(prompt)
    steps = log.of_type(events.StepScheduled)
    assert sum(sum(step.num_scheduled_tokens.values()) for step in steps) == num_tokens - usable_tokens(prompt) + 3
    finish(first, second)


def test_loaded_state_is_kept_as_checkpoint(checkpoint):
    pool, log = GlobalKVPool(5000), EventLog()
    prompt = {"prompt_token_ids": list(range(2, 131))}
    first, second = engine_over(node(pool), checkpoint), engine_over(node(pool, "b"), checkpoint, sink=log)
    want = first.generate(prompt, GREEDY)
    settle(first)
    for _ in range(2):
        got = second.generate(prompt, GREEDY)
        assert (got.outputs[0].token_ids, got.num_cached_tokens) == (want.outputs[0].token_ids, 128)
    assert count(log, events.KVLoadStarted) == 1
    finish(first, second)


def test_state_after_answer_is_saved_for_next_turn(checkpoint):
    pool, prompt = GlobalKVPool(5000), list(range(2, 130))
    first, second = engine_over(node(pool), checkpoint), engine_over(node(pool, "b"), checkpoint)
    answer = first.generate({"prompt_token_ids": prompt}, replace(GREEDY, max_tokens=60)).outputs[0].token_ids
    settle(first)
    found = second.generate({"prompt_token_ids": [*prompt, *answer, 5]}, GREEDY).num_cached_tokens
    assert found == (len(prompt) + len(answer) - 1) // 16 * 16
    finish(first, second)


@pytest.mark.parametrize("dtype", DTYPES)
def test_restarted_engine_loads_states_from_disk(tmp_path, checkpoint, alone, dtype):
    for least in (0, 4):
        log = EventLog()
        engine = over_disk(tmp_path / "kv", checkpoint, dtype, sink=log)
        assert answers(engine, make_requests()[:NUM_TRIED]) == alone(dtype)
        finish(engine)
        assert count(log, events.KVLoadEnded, outcome="done") >= least


def test_limits_of_stores_in_bytes_and_blocks_hold_for_states(tmp_path, checkpoint, alone):
    pool, stores = GlobalKVPool(60), KVTransferConfig(disk_dir=tmp_path / "kv", disk_bytes=1 << 20)
    engine = engine_over(node(pool), checkpoint, stores=stores)
    sizes = engine.core.executor.worker.kv_cache.stored_block_bytes, engine.core.executor.worker.info.stored_state_bytes
    assert count_pieces(sizes[1], sizes[0]) > 1
    for _ in range(2):
        assert reseeded(engine, make_requests()[:NUM_TRIED]) == alone("bfloat16")
        settle(engine)
        assert engine.core.scheduler.reset_prefix_cache()
    assert {len(block.kv_data) for block in pool._nodes["a"].values()} == {32 + sizes[0]}
    assert pool.total_cached_blocks == 60
    assert 1 << 18 < sum(file.stat().st_size for file in (tmp_path / "kv").glob("*.kv")) <= 1 << 20
    finish(engine)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_decode_engine_starts_with_state_of_prefill_engine(checkpoint, alone, schedule, dtype):
    pool, log = GlobalKVPool(20000), EventLog()
    requests = make_requests()[:NUM_TRIED]
    first = engine_over(node(pool, "prefill"), checkpoint, schedule, dtype)
    second = engine_over(node(pool, "decode"), checkpoint, schedule, dtype, sink=log)
    prefill(first, requests)
    settle(first)
    told, num_found = decode(second, requests)
    assert told == alone(dtype)
    if schedule.name == "crowd":
        assert num_found == [usable_tokens(prompt) for prompt, _ in requests]
    assert count(log, events.KVLoadEnded, outcome="done") >= 4
    finish(first, second)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_prefill_and_decode_engines_share_states_on_disk(tmp_path, checkpoint, alone, dtype):
    requests = make_requests()[:NUM_TRIED]
    first, second = (
        engine_over(
            None, checkpoint, SCHEDULES[0], dtype,
            stores=KVTransferConfig(role=role, disk_dir=tmp_path / "kv", disk_bytes=1 << 28),
        )
        for role in ("prefill", "decode")
    )  # fmt: skip
    prefill(first, requests)
    settle(first)
    told, num_found = decode(second, requests)
    assert told == alone(dtype)
    assert num_found == [usable_tokens(prompt) for prompt, _ in requests]
    finish(first, second)


def test_state_of_prefix_hit_is_handed_over(checkpoint, monkeypatch):
    """The prefill engine has the whole prompt in its cache, and the store has lost it. The checkpoint is evicted before
    the step ends.
    """
    start = Checkpoints.start

    def start_and_evict(self, request, computed):
        start(self, request, computed)
        if computed.num_tokens:
            self.group.block_forgotten(computed.blocks[-1])

    monkeypatch.setattr(Checkpoints, "start", start_and_evict)
    pool, prompt = GlobalKVPool(5000), list(range(2, 131))
    first, second = engine_over(node(pool), checkpoint), engine_over(node(pool, "b"), checkpoint)
    want = first.generate({"prompt_token_ids": prompt}, GREEDY).outputs[0]
    settle(first)
    pool.remove(list(pool._holders))
    prefill(first, [(prompt, GREEDY)])
    settle(first)
    told, num_found = decode(second, [(prompt, GREEDY)])
    assert (told[0][0], num_found) == (want.token_ids, [128])
    finish(first, second)


class Incomplete(MemoryStore):
    """Has no loadable content for the key `missing`, though lookups find it."""

    missing = None

    def load(self, keys, blocks):
        keys = keys[: keys.index(self.missing)] if self.missing in keys else keys
        return super().load(keys, blocks) if keys else 0


def test_state_without_a_piece_is_not_used(checkpoint, monkeypatch):
    """The request asks again, and starts with an earlier state."""
    pool, log, stores, prompt = GlobalKVPool(5000), EventLog(), [], list(range(2, 131))

    def make(block_bytes):
        stores.append(Incomplete(pool, "b", block_bytes))
        return stores[0]

    keys = []
    publish = pool.publish
    monkeypatch.setattr(pool, "publish", lambda key, *rest, **more: keys.append(key) or publish(key, *rest, **more))
    first, second = engine_over(node(pool), checkpoint), engine_over(make, checkpoint, sink=log)
    want = first.generate({"prompt_token_ids": prompt}, GREEDY)
    settle(first)
    stores[0].missing = keys[-1]
    got = second.generate({"prompt_token_ids": prompt}, GREEDY)
    assert got.outputs[0].token_ids == want.outputs[0].token_ids
    assert [each.outcome for each in log.of_type(events.KVLoadEnded)] == ["failed", "done"]
    assert got.num_cached_tokens == 64
    finish(first, second)


@pytest.mark.parametrize("raises", [False, True], ids=["spoils", "raises too"])
def test_faulty_store_of_states_does_not_change_tokens(checkpoint, alone, monkeypatch, raises):
    monkeypatch.setattr("octavo.kv_transfer.guard.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("octavo.kv_transfer.guard.LONGEST_PAUSE_S", 0.002)
    pool, stores = GlobalKVPool(20000), []

    def make(block_bytes):
        stores.append(FaultyStore(pool, "a", block_bytes, seed=3, raises=raises, rate=0.1))
        return stores[0]

    engine = engine_over(make, checkpoint, replace(SCHEDULES[2], num_blocks=400))
    while stores[0].num_faults < 60:
        assert reseeded(engine, make_requests()[:NUM_TRIED]) == alone("bfloat16")
        settle(engine)
        assert engine.core.scheduler.reset_prefix_cache()
    finish(engine)


def test_journal_with_stored_states_replays(tmp_path, checkpoint):
    pool, prompt = GlobalKVPool(5000), {"prompt_token_ids": list(range(2, 131))}
    config = EngineConfig(
        model=ModelConfig(model=str(checkpoint), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=512),
        cache=CacheConfig(num_gpu_blocks=512),
        scheduler=SchedulerConfig(min_tokens_to_cache=2),
    )
    for name in ("a", "b"):
        engine = build_engine(replace(config, record=tmp_path / name), kv_store=node(pool, name))
        assert len(engine.generate(prompt, GREEDY).outputs[0].token_ids) == 4
        settle(engine)
        engine.core.scheduler.close()
        assert replay(tmp_path / name).mismatches == []
    assert count(replay(tmp_path / "b").log, events.KVLoadEnded, outcome="done") == 1


def await_store(engine):
    """Wait until the client of Mooncake is open: lookups before find nothing."""
    (tier,) = engine.core.executor._kv_mover._store.tiers
    wait_until(lambda: tier._store is not None and tier.is_usable, "the store is open")


@needs_mooncake
def test_second_engine_loads_states_from_mooncake(checkpoint, alone):
    master, log = Master(), EventLog()
    try:
        stores = KVTransferConfig(mooncake=master.address, mooncake_segment_bytes=64 << 20)
        first, got = engine_over(None, checkpoint, stores=stores), []
        await_store(first)
        for request in make_requests()[:NUM_TRIED]:
            got += answers(first, [request])
            settle(first)  # no save is dropped because too many are open
        assert got == alone("bfloat16")
        second = engine_over(None, checkpoint, stores=stores, sink=log)
        await_store(second)
        assert answers(second, make_requests()[:NUM_TRIED]) == alone("bfloat16")
        assert count(log, events.KVLoadEnded, outcome="done") >= 4
        finish(first, second)
    finally:
        master.kill()
