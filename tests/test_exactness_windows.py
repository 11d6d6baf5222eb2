"""Models with windows, which release blocks before the window: tokens are `==` to those of each request alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_exactness import PRESSING, SCHEDULES, Schedule, answers, make_engine, make_requests, needs_kernels
from test_kv_stores import FEW_BLOCKS, count, engine_over, node, settle

from octavo import CacheConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig
from octavo.config import SpeculativeConfig
from octavo.core.invariants import check
from octavo.data import events
from octavo.data.events import EventLog
from octavo.kv_transfer.memory import GlobalKVPool
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.startup import draft_checkpoint
from octavo.worker.kv_plan import KVPlan, KVSize

pytestmark = needs_kernels
NUM_TRIED = 16
KINDS = ["some", "all"]
DTYPES = ["float32", "bfloat16", "int8 with int8 KV"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Models with windows of 37 tokens: in the first and the last layer; or in all."""
    folder = tmp_path_factory.mktemp("windows")
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    some = tiny_config("Gemma3ForCausalLM", num_hidden_layers=3, layer_types=layer_types, vocab_size=1500)
    every = tiny_config("MistralForCausalLM", sliding_window=37, vocab_size=1500)
    return {
        "some": write_checkpoint(folder / "some", some, std=0.1),
        "all": write_checkpoint(folder / "all", every, std=0.1),
    }


@pytest.fixture(scope="module")
def alone(checkpoints):
    """Answers to each request alone."""
    known = {}

    def run(kind, dtype):
        if (kind, dtype) not in known:
            schedule = Schedule("alone", max_num_seqs=1, prefix_caching=False)
            engine = make_engine(checkpoints[kind], dtype, schedule, "cpu")
            known[kind, dtype] = answers(engine, make_requests()[:NUM_TRIED])
        return known[kind, dtype]

    return run


@pytest.fixture
def few_window_blocks(monkeypatch):
    """Only the window blocks that a single sequence needs."""

    def with_blocks(plan, num_blocks):
        return KVSize((num_blocks, min(num_blocks, plan.blocks_of_sequence[0] + plan.blocks_of_step)))

    monkeypatch.setattr(KVPlan, "with_blocks", with_blocks)


@pytest.mark.sweep(160)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@pytest.mark.usefixtures("few_window_blocks")
def test_few_window_blocks_give_equal_tokens_in_every_schedule(checkpoints, alone, schedule, kind, dtype):
    engine = make_engine(checkpoints[kind], dtype, schedule, "cpu")
    cache = engine.core.executor.worker.kv_cache
    assert cache.groups[1].num_blocks < cache.num_blocks
    requests = make_requests()[:NUM_TRIED]
    assert answers(engine, requests) == alone(kind, dtype)
    for index, answer in enumerate(answers(engine, requests) if schedule.rounds > 1 else []):
        # A request without a seed gets one from its number, which a second round does not repeat.
        if requests[index][1].seed is not None or requests[index][1].is_greedy:
            assert answer == alone(kind, dtype)[index]
    assert check(engine.core.scheduler) == []


@pytest.mark.sweep(48)
@pytest.mark.parametrize("dtype", ["bfloat16", "bfloat16 with int8 KV"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "schedule",
    [
        Schedule("crowd"),
        Schedule("chunks_of_7", block_size=2, num_blocks=2000, threshold=7),
        Schedule("swapped", **FEW_BLOCKS, swap_space_bytes=1 << 22, options=(("preemption", "swap"),)),
    ],
    ids=lambda schedule: schedule.name,
)
def test_second_engine_gives_equal_tokens_with_window_kv_of_first(checkpoints, alone, schedule, kind, dtype):
    pool, log = GlobalKVPool(5000), EventLog()
    requests, expected = make_requests()[:NUM_TRIED], alone(kind, dtype)
    for name, sink in (("a", None), ("b", log)):
        engine = engine_over(node(pool, name), checkpoints[kind], schedule, dtype, sink=sink)
        assert answers(engine, requests) == expected
        settle(engine)
        engine.core.executor.shutdown()
    assert count(log, events.KVLoadEnded, outcome="done") >= 4


def guessing(path, speculative):
    """Return greedy answers with few blocks, the worker, and the numbers of verified and accepted drafts."""
    log = EventLog()
    engine = LLMEngine(
        ModelConfig(model=str(path), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=512),
        cache_config=CacheConfig(block_size=4, num_gpu_blocks=300, swap_space_bytes=1 << 21),
        scheduler_config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, preemption="swap", **PRESSING),
        speculative_config=speculative,
        sink=log,
    )
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    found = answers(engine, [(prompt, params) for prompt, _ in make_requests()[:8]])
    verified = [each for each in log.events if isinstance(each, events.DraftsVerified)]
    counts = sum(each.num_drafted for each in verified), sum(each.num_accepted for each in verified)
    return found, engine.core.executor.worker, *counts


@pytest.mark.sweep(16)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shares_kv", [True, False])
def test_draft_equal_to_target_has_every_draft_accepted(checkpoints, monkeypatch, kind, shares_kv):
    """The target is its own draft model, so all drafts are accepted: with the target's window blocks, or with blocks
    alone.
    """
    path = checkpoints[kind]
    rounded = draft_checkpoint._rounded
    monkeypatch.setattr(
        draft_checkpoint, "_rounded", lambda *arguments: replace(rounded(*arguments), quantization=None)
    )
    expected, *_ = guessing(path, SpeculativeConfig(method="none"))
    method = {"method": "quantized"} if shares_kv else {"method": "draft_model", "model": str(path)}
    found, worker, num_drafted, num_accepted = guessing(path, SpeculativeConfig(**method, num_speculative_tokens=5))
    assert found == expected
    assert num_accepted == num_drafted >= 60
    own = worker.runner.draft_runner.kv.cache
    assert (own is worker.kv_cache) == shares_kv
    assert worker.info.kv_cache_bytes == worker.kv_cache.num_bytes, "scratch blocks of drafts are planned, too"
    assert worker.info.draft_block_bytes == (0 if shares_kv else own.block_bytes)
    assert shares_kv or (len(own.groups), own.block_bytes) == (1, worker.kv_cache.stored_block_bytes)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("method", ["quantized", "ngram"])
def test_rejected_drafts_do_not_change_tokens_of_window_model(checkpoints, method):
    expected, *_ = guessing(checkpoints["some"], SpeculativeConfig(method="none"))
    found, _, num_drafted, num_accepted = guessing(
        checkpoints["some"], SpeculativeConfig(method=method, num_speculative_tokens=5)
    )
    assert found == expected
    assert num_accepted < num_drafted
