"""The first steps reach each number of rows, keep no request, and change no answer."""

from __future__ import annotations

import pytest

from octavo import CacheConfig, DeviceConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig
from octavo.config import SpeculativeConfig
from octavo.kernels.reference import ReferenceKernels
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.worker.model_runner import ModelRunner

DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=3, verification="rejection")
# (limits of steps, speculation, numbers of rows of a step)
CASES = {
    "plain": ({"max_num_seqs": 40, "max_num_batched_tokens": 64}, None, {1, 5, 33}),
    "drafts": ({"max_num_seqs": 40, "max_num_batched_tokens": 64}, DRAFTS, {1, 5, 33}),
    "short sequences": ({"max_num_seqs": 3, "max_num_batched_tokens": 64, "max_model_len": 16}, None, {1, 3, 5, 33}),
    "small steps": ({"max_num_seqs": 3, "max_num_batched_tokens": 12}, DRAFTS, {1, 3, 5, 9, 12}),
}


def make_engine(model, speculative, max_model_len=48, **scheduler):
    return LLMEngine(
        ModelConfig(model=str(model), skip_tokenizer_init=True, max_model_len=max_model_len),
        cache_config=CacheConfig(block_size=4, num_gpu_blocks=24),
        scheduler_config=SchedulerConfig(**scheduler, mixed_step_ms=0.0),
        device_config=DeviceConfig(device="cpu", kernels="reference"),
        speculative_config=speculative or SpeculativeConfig(method="none"),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a model with sliding windows in one of two layers."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", tiny_config("Gemma2ForCausalLM"), std=0.2)


@pytest.mark.sweep(16)
@pytest.mark.parametrize("case", CASES)
def test_first_steps_have_all_numbers_of_rows_and_change_no_answer(case, model, monkeypatch):
    limits, speculative, num_rows = CASES[case]
    prompt, params = {"prompt_token_ids": list(range(2, 14))}, SamplingParams(max_tokens=4, seed=1, logprobs=1)
    expected = make_engine(model, speculative, **limits).generate(prompt, params).outputs[0]
    execute, steps = ModelRunner.execute, []

    def watch(runner, scheduled):
        result = execute(runner, scheduled)
        if scheduled.num_scheduled_tokens:
            steps.append((scheduled, result))
        return result

    monkeypatch.setattr(ModelRunner, "execute", watch)
    monkeypatch.setattr(ReferenceKernels, "warm_up_rows", (1, 5, 33))
    engine = make_engine(model, speculative, **limits)
    first, *steps = steps
    assert {scheduled.total_num_scheduled_tokens for scheduled, _ in steps} == num_rows
    assert any(scheduled.scheduled_spec_decode_tokens for scheduled, _ in steps) == (speculative is not None)
    assert max(max(each.num_computed_tokens for each in scheduled.scheduled_new_reqs) for scheduled, _ in steps) == (
        24 if case == "small steps" else 0
    )
    assert all(result.errors == {} for _, result in (first, *steps))
    assert engine.core.executor.worker.runner.batch.requests == {}
    assert engine.generate(prompt, params).outputs[0] == expected
