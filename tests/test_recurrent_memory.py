"""Memory of models with recurrent layers: allocated as planned and logged, and steady over many conversations."""

from __future__ import annotations

import itertools
import random
import re

import pytest
from test_exactness import needs_kernels

from octavo import CacheConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig, SpeculativeConfig
from octavo.core import invariants
from octavo.data import events
from octavo.data.events import EventLog, FanOut
from octavo.models.random_weights import tiny_config, write_checkpoint

pytestmark = needs_kernels
LAYERS = ["linear_attention", "full_attention", "linear_attention"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = tiny_config("Qwen3_5ForCausalLM", num_hidden_layers=3, layer_types=LAYERS, vocab_size=1500)
    return write_checkpoint(tmp_path_factory.mktemp("recurrent") / "model", config, std=0.1)


def engine_of(checkpoint, cache, *, method="none", dtype="float32", max_num_seqs=8):
    return LLMEngine(
        ModelConfig(model=str(checkpoint), skip_tokenizer_init=True, max_model_len=256, dtype=dtype),
        cache_config=cache,
        scheduler_config=SchedulerConfig(max_num_seqs=max_num_seqs, min_tokens_to_cache=1),
        speculative_config=SpeculativeConfig(method=method),
    )


def logged_bytes(text, what):
    """Return the bytes in the log line that begins with `what`."""
    return int(re.search(rf"{what}:.*?(\d+) bytes", text)[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["none", "ngram", "quantized"])
@pytest.mark.parametrize("cache", [{"num_gpu_blocks": 40}, {"kv_cache_memory_bytes": 3 << 20}], ids=str)
def test_allocated_bytes_are_those_of_log_and_capacity(checkpoint, caplog, cache, method, dtype):
    caplog.set_level("INFO")
    engine = engine_of(checkpoint, CacheConfig(**cache), method=method, dtype=dtype)
    capacity, worker = engine.capacity, engine.core.executor.worker
    kv_cache, layout = worker.kv_cache, worker.model.architecture.kv_layout
    in_blocks = sum(each.untyped_storage().nbytes() for each in kv_cache.memory)
    kept = [kv_cache.layer(number)[-1].untyped_storage().nbytes() for number in layout.states]
    of_running = capacity.max_num_seqs * layout.state_bytes(dtype)
    of_scratch = (len(kv_cache.states) - kv_cache.groups[-1].num_blocks) * layout.state_bytes(dtype)
    assert of_scratch == (of_running if method == "quantized" else 0)
    of_scratch_blocks = (len(kv_cache.groups[0].blocks) - kv_cache.num_blocks) * kv_cache.block_bytes
    of_drafts = of_scratch + of_scratch_blocks

    groups = [(capacity.num_gpu_blocks, capacity.kv_block_bytes)]
    groups += [(each.num_blocks, each.block_bytes) for each in capacity.bounded_groups]
    assert in_blocks == pytest.approx(sum(count * size for count, size in groups) + of_drafts, rel=0.02)
    assert in_blocks == pytest.approx(logged_bytes(caplog.text, "KV cache"), rel=0.02)
    assert sum(kept) == pytest.approx(logged_bytes(caplog.text, "recurrent states") - of_running - of_scratch, rel=0.02)
    if "kv_cache_memory_bytes" in cache:
        largest = max(size for _, size in groups)
        most = cache["kv_cache_memory_bytes"]
        assert most - 2 * largest <= in_blocks - of_running - of_drafts <= most


NUM_CONVERSATIONS, NUM_AT_ONCE = 1000, 20


def conversations():
    """Return the prompts of each conversation: one of four system prompts, and the tokens of two users' turns."""
    draw = random.Random(7)
    systems = [[draw.randrange(1500) for _ in range(35)] for _ in range(4)]
    return [
        (systems[index % 4], *([draw.randrange(1500) for _ in range(draw.randint(5, 25))] for _ in range(2)))
        for index in range(NUM_CONVERSATIONS)
    ]


def answers(engine, prompts):
    for index, (prompt, points) in enumerate(prompts):
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        engine.add_request(str(index), {"prompt_token_ids": prompt}, params, cache_points=points)
    found = {}
    for _ in range(1000):
        found |= {int(each.request_id): each.outputs[0].token_ids for each in engine.step() if each.finished}
        if len(found) == len(prompts):
            return [found[index] for index in range(len(prompts))]
    raise AssertionError("the engine makes no progress")


def talk(engine, told, check=lambda: None):
    """Have all conversations, some at a time; return the answers of both turns."""
    said = []
    for start in range(0, len(told), NUM_AT_ONCE):
        some = told[start : start + NUM_AT_ONCE]
        prompts = [([*system, *first], (len(system),)) for system, first, _ in some]
        before = answers(engine, prompts)
        further = [
            ([*prompt, *answer, *second], (len(system),))
            for (prompt, _), answer, (system, _, second) in zip(prompts, before, some, strict=True)
        ]
        said += itertools.chain(*zip(before, answers(engine, further), strict=True))
        check()
    return said


@pytest.mark.turn(4)
def test_a_thousand_conversations_keep_memory_steady_and_find_prefixes(checkpoint):
    engine = engine_of(checkpoint, CacheConfig(num_gpu_blocks=60, block_size=8), max_num_seqs=8)
    scheduler, capacity, log = engine.core.scheduler, engine.capacity, EventLog()
    scheduler._emitter._sink = FanOut([scheduler._emitter._sink, log])
    manager, num_slots, held = scheduler.kv_cache_manager, capacity.bounded_groups[-1].num_blocks, []

    def check():
        assert invariants.check(scheduler) == []
        assert manager.num_tracked_requests == 0
        slots = manager.states.slots
        assert slots.num_running == 0
        assert engine.stats.state_slots == slots
        assert slots.num_checkpoints + slots.num_free == num_slots
        assert manager.pool.num_free_blocks == capacity.num_gpu_blocks
        held.append((sum(block.hash is not None for block in manager.pool.blocks), slots.num_checkpoints))

    told = conversations()
    said = talk(engine, told, check)
    num_saved_states = capacity.num_gpu_blocks * capacity.kv_block_bytes // capacity.bounded_groups[-1].block_bytes
    assert num_slots == capacity.max_num_seqs + num_saved_states
    assert min(held[5:]) >= (0.75 * capacity.num_gpu_blocks, num_saved_states)
    queries = log.of_type(events.PrefixCacheQueried)
    assert len(queries) == 2 * NUM_CONVERSATIONS
    parts = [queries[start : start + 200] for start in range(0, len(queries), 200)]
    rates = [sum(each.num_hit_tokens for each in part) / sum(each.num_query_tokens for each in part) for part in parts]
    assert min(rates) > 0.2
    assert engine.stats.num_saved_checkpoints > engine.stats.num_evicted_checkpoints > 0
    without = engine_of(checkpoint, CacheConfig(num_gpu_blocks=200, block_size=8, enable_prefix_caching=False))
    assert said == talk(without, told)
