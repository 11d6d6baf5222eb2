"""Models with recurrent layers draft with their own weights in fewer bits. Drafts change no state of the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scripted_drafts import verify_all
from test_exactness import SCHEDULES, answers, make_engine, make_requests, needs_kernels
from test_recurrent_models import MODELS, NUM_TRIED, alone, checkpoint, models

from octavo import LLM, CacheConfig, LLMEngine, ModelConfig, SamplingParams, SpeculativeConfig
from octavo import build as building
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import read_architecture
from octavo.worker import worker

__all__ = ["alone", "checkpoint", "models"]  # fixtures
pytestmark = needs_kernels
CHOSEN = {"crowd", "chunks_of_7", "few_blocks", "few_blocks_no_cache", "swapped", "warm_cache"}
DRAFTED = [each for each in SCHEDULES if each.name in CHOSEN]
PROMPTS = [[3], [5, 6], *([5 + index, 6, 7, 9 * index + 2] * (1 + index) for index in range(4))]


@pytest.mark.parametrize("num_drafts", [1, 5])
@pytest.mark.parametrize("name", MODELS)
def test_all_drafts_are_right_if_weights_are_not_rounded(models, name, num_drafts, monkeypatch):
    """Drafts begin with the model's state, and with the accepted rows that the state lacks."""
    find = building.find_draft_checkpoint
    monkeypatch.setattr(building, "find_draft_checkpoint", lambda *args: replace(find(*args), quantization=None))
    llm = LLM(
        str(models(name)), skip_tokenizer_init=True, max_model_len=128, block_size=4, num_threads=1, dtype="bfloat16",
        kv_cache_memory_bytes=8 << 20, packed_cache_bytes=0,
        speculative_config={"method": "quantized", "num_speculative_tokens": num_drafts},
    )  # fmt: skip
    verify_all(llm.llm_engine)
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    drafts = llm.llm_engine.core.metrics.stats.drafts
    llm.llm_engine.shutdown()
    assert drafts.num_accepted_tokens == drafts.num_draft_tokens >= 40


@pytest.mark.sweep(36)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("schedule", DRAFTED, ids=lambda schedule: schedule.name)
def test_model_that_drafts_gives_equal_tokens_in_every_schedule(models, alone, schedule, dtype, name):
    engine = make_engine(models(name), dtype, replace(schedule, method="quantized"), "cpu")
    verify_all(engine)
    requests, stats = make_requests()[:NUM_TRIED], engine.core.metrics.stats
    for _ in range(schedule.rounds):
        got = answers(engine, requests)
        for index, (_, params) in enumerate(requests):
            if schedule.rounds == 1 or params.seed is not None or params.is_greedy:
                assert got[index] == alone(name, dtype)[index]
    assert stats.drafts.num_draft_tokens > 0


@pytest.mark.parametrize("drafter", ["quantized", "draft_model"])
def test_fewer_requests_run_and_draft_if_their_states_do_not_fit(checkpoint, drafter, tmp_path, monkeypatch):
    layout, num_drafts = read_architecture(checkpoint).kv_layout, 2
    of_drafts = layout.state_bytes("float32") if drafter == "quantized" else 0
    size = layout.state_bytes("float32") + of_drafts + (1 + num_drafts) * layout.kept_bytes("float32")
    monkeypatch.setattr(worker, "free_bytes", lambda _: 10 * size)
    config = {"method": "quantized"}
    if drafter == "draft_model":
        small = tiny_config("Qwen3ForCausalLM", vocab_size=1500, num_hidden_layers=1, hidden_size=32)
        config = {"method": drafter, "model": str(write_checkpoint(tmp_path / "draft", small))}
    engine = LLMEngine(
        ModelConfig(model=str(checkpoint), skip_tokenizer_init=True, max_model_len=64, dtype="float32"),
        cache_config=CacheConfig(num_gpu_blocks=40),
        speculative_config=SpeculativeConfig(**config, num_speculative_tokens=num_drafts),
    )
    verify_all(engine)
    assert engine.core.executor.worker.scheduler_config.max_num_seqs == 5
    for index in range(8):
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        engine.add_request(str(index), {"prompt_token_ids": [5 + index, 6, 7]}, params)
    while engine.has_unfinished_requests():
        assert all(output.error is None for output in engine.step())
    assert engine.core.metrics.stats.drafts.num_draft_tokens > 0
