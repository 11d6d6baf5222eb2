"""A model with windows in the real engine: how far few window blocks suffice, and which prefixes are found."""

from __future__ import annotations

import pytest
from test_exactness import needs_kernels

from octavo import CacheConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig
from octavo.config import SpeculativeConfig
from octavo.core.invariants import check
from octavo.data import events
from octavo.data.events import EventLog
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.worker.kv_plan import KVPlan, KVSize

pytestmark = needs_kernels
PROMPT = [7 * i % 1000 + 10 for i in range(90)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = tiny_config(
        "Gemma3ForCausalLM", num_hidden_layers=3, layer_types=layer_types, sliding_window=16, vocab_size=1500
    )
    return write_checkpoint(tmp_path_factory.mktemp("window"), config, std=0.1)


def engine_of(checkpoint, log=None, method="auto"):
    return LLMEngine(
        ModelConfig(model=str(checkpoint), dtype="float32", skip_tokenizer_init=True, max_model_len=512),
        cache_config=CacheConfig(block_size=4, num_gpu_blocks=150),
        scheduler_config=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, min_tokens_to_cache=1),
        speculative_config=SpeculativeConfig(method=method),
        sink=log,
    )


def answer(engine, prompt, max_tokens):
    """Return an answer's tokens, and the largest number of window blocks held after any step."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    engine.add_request("r", prompt, params)
    windows, most = engine.core.scheduler.kv_cache_manager.bounded[0], 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = output.outputs[0].token_ids
        most = max(most, round(windows.usage * windows.num_blocks))
    assert check(engine.core.scheduler) == []
    return list(tokens), most


@pytest.fixture
def few_window_blocks(monkeypatch):
    def with_blocks(plan, num_blocks):
        return KVSize((num_blocks, plan.blocks_of_sequence[0] + plan.blocks_of_step))

    monkeypatch.setattr(KVPlan, "with_blocks", with_blocks)


@pytest.mark.usefixtures("few_window_blocks")
def test_long_answer_holds_only_blocks_of_its_window(checkpoint):
    engine = engine_of(checkpoint, method="none")  # the number of drafts depends on step times
    num_window_blocks = engine.core.executor.worker.kv_cache.groups[1].num_blocks
    assert num_window_blocks == 10  # 40 tokens
    tokens, most = answer(engine, PROMPT, 300)
    assert len(tokens) == 300
    assert most <= 6


def test_number_of_window_blocks_does_not_change_tokens(checkpoint, monkeypatch):
    many, _ = answer(engine_of(checkpoint), PROMPT, 120)
    monkeypatch.setattr(KVPlan, "with_blocks", lambda _plan, num_blocks: KVSize((num_blocks, 10)))
    few, _ = answer(engine_of(checkpoint), PROMPT, 120)
    assert few == many


def test_prefix_longer_than_window_hits_with_equal_tokens(checkpoint):
    log = EventLog()
    engine = engine_of(checkpoint, log)
    first, _ = answer(engine, PROMPT, 30)
    again, _ = answer(engine, PROMPT, 30)
    assert again == first
    longer, _ = answer(engine, PROMPT + first[:20], 10)
    assert longer == first[20:]
    found = [each.num_hit_tokens for each in log.of_type(events.PrefixCacheQueried)]
    assert found[0] == 0
    assert found[1] >= 84
    assert found[2] >= 104
