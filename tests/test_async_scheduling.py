"""The built-in model with steps decided ahead: the same answers, text and ends, whatever is asked for beside them."""

from __future__ import annotations

import pytest

from octavo import CacheConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig
from octavo.config import EngineConfig, SpeculativeConfig
from octavo.errors import ConfigError
from octavo.sampling_params import StructuredOutputsParams

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = ["Once upon a time there was a"]
PROMPTS += map(CHAT.format, ("Sort these words: pear apple fig", "What can you do?", "Write a long story about a cat."))
PLAIN = [
    {"temperature": 0.0, "max_tokens": 24},
    {"temperature": 1.0, "seed": 3, "max_tokens": 1},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "seed": 4, "max_tokens": 40},
    {"temperature": 0.7, "min_p": 0.05, "seed": 5, "max_tokens": 30, "logprobs": 3},
    {"temperature": 1.0, "seed": 6, "max_tokens": 30, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0.0, "max_tokens": 30, "stop": ["e"]},
    {"temperature": 0.0, "max_tokens": 30, "min_tokens": 25},
    {"temperature": 0.0, "max_tokens": 5, "prompt_logprobs": 2},
    {"temperature": 1.0, "n": 3, "seed": 7, "max_tokens": 12},
]
WAITING = [
    {"temperature": 0.0, "max_tokens": 20, "structured_outputs": StructuredOutputsParams(regex=r"[a-z]{3,9} [0-9]+")}
]


def make_engine(*, ahead, **options):
    return LLMEngine(
        ModelConfig(),
        SchedulerConfig(async_scheduling=ahead, max_num_seqs=8, max_num_batched_tokens=48, **options),
        cache_config=CacheConfig(kv_cache_memory_bytes=4 << 20),
        speculative_config=SpeculativeConfig(method="none"),
    )


def answers(engine, params):
    requests = [SamplingParams(**each) for each in params for _ in PROMPTS]
    outputs = engine.generate_batch(PROMPTS * len(params), requests)
    return [
        (
            output.prompt_logprobs,
            [
                (each.token_ids, each.text, each.finish_reason, each.stop_reason, each.logprobs)
                for each in output.outputs
            ],
        )
        for output in outputs.values()
    ]


def count_ahead(engine, monkeypatch):
    """Note for each step whether it is decided ahead."""
    scheduler, ahead = engine.core.scheduler, []
    schedule = scheduler.schedule

    def counted():
        ahead.append(scheduler.in_flight is not None)
        return schedule()

    monkeypatch.setattr(scheduler, "schedule", counted)
    return ahead


@pytest.mark.parametrize("params", [PLAIN, PLAIN + WAITING], ids=["plain", "with a grammar"])
def test_nothing_changes_but_when_steps_are_decided(params, monkeypatch):
    expected = answers(make_engine(ahead=False), params)
    engine = make_engine(ahead=True)
    ahead = count_ahead(engine, monkeypatch)
    assert answers(engine, params) == expected
    assert sum(ahead) > len(ahead) / 3
    engine.core.executor.shutdown()


def test_a_worker_that_breaks_ends_the_requests_of_its_step_and_no_others(monkeypatch):
    engine = make_engine(ahead=True)
    execute, steps = engine.core.executor.worker.execute, []

    def breaking(scheduled):
        steps.append(scheduled.step)
        if len(steps) == 5:
            raise MemoryError
        return execute(scheduled)

    monkeypatch.setattr(engine.core.executor.worker, "execute", breaking)
    engine.add_request("first", PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {each.request_id: each for each in engine.step()}
    assert outputs["first"].outputs[0].finish_reason == "error"
    assert answers(engine, PLAIN[:3]) == answers(make_engine(ahead=False), PLAIN[:3])
    engine.core.executor.shutdown()


def test_drafts_and_steps_that_are_decided_ahead_exclude_each_other():
    for speculative in (SpeculativeConfig(method="ngram"), SpeculativeConfig(model="octavo-demo-draft")):
        with pytest.raises(ConfigError, match="async_scheduling"):
            EngineConfig(scheduler=SchedulerConfig(async_scheduling=True), speculative=speculative)
    EngineConfig(scheduler=SchedulerConfig(async_scheduling=True))
