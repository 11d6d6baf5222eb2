"""A token never depends on the schedule: `==` on token ids and logprobs, however a request was computed.

Every run below is compared with each request computed alone, with its whole prompt and a cold cache.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import pytest
import torch
from alone_and_crowd import has_swapped
from kernels_available import COMPILED, INSTRUCTION_SETS, kv_precision, precision

from octavo import (
    CacheConfig,
    DeviceConfig,
    LLMEngine,
    ModelConfig,
    SamplingParams,
    SchedulerConfig,
    SpeculativeConfig,
)
from octavo.config import kernels_required
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.worker.input_batch import InputBatch

needs_kernels = pytest.mark.skipif(
    not COMPILED and not kernels_required(), reason="octavo was installed without its compiled kernels"
)
DTYPES = ["float32", "bfloat16", "int8", "int4", "bfloat16 with int8 KV", "int8 with int8 KV"]
MORE_DTYPES = [*DTYPES, "int4_all", "int4 with int8 KV", "float32 with int8 KV"]
NUM_REQUESTS = 32
PRESSING = {"mixed_step_ms": 0.0, "attention_cost_tokens": 0.0}  # prompts fill the steps, and soon the cache
NUM_TOKENS = 12


@dataclass(frozen=True)
class Schedule:
    """One way to compute the same requests."""

    name: str
    block_size: int = 16
    max_num_seqs: int = 32
    budget: int = 256
    threshold: int = 0
    num_blocks: int | None = None
    prefix_caching: bool = True
    rounds: int = 1
    num_threads: int | None = None
    swap_space_bytes: int = 0
    options: tuple[tuple[str, object], ...] = ()
    device: tuple[tuple[str, object], ...] = ()
    method: str = "auto"  # of speculation


FEW_BLOCKS = {"block_size": 2, "num_blocks": 160, "budget": 64}
SCHEDULES = [
    Schedule("crowd"),
    Schedule("chunks_of_1", threshold=1),
    Schedule("chunks_of_7", threshold=7),
    Schedule("chunks_of_64", threshold=64),
    Schedule("blocks_of_32", block_size=32),
    Schedule("blocks_of_128", block_size=128),
    Schedule("no_prefix_cache", prefix_caching=False),
    Schedule("warm_cache", rounds=2),
    Schedule("few_blocks", block_size=2, num_blocks=160, budget=64),
    Schedule("few_blocks_no_cache", block_size=2, num_blocks=160, prefix_caching=False),
    Schedule("swapped", **FEW_BLOCKS, swap_space_bytes=1 << 22, options=(("preemption", "swap"),)),
    Schedule(
        "swapped_no_cache", block_size=2, num_blocks=140, budget=64, prefix_caching=False, swap_space_bytes=1 << 22
    ),
    Schedule("little_swap", **FEW_BLOCKS, swap_space_bytes=100_000, options=(("preemption", "swap"),)),
    Schedule("priority", **FEW_BLOCKS, options=(("policy", "priority"),)),
    Schedule("deadline", **FEW_BLOCKS, options=(("policy", "deadline"),)),
    Schedule("fair", block_size=2, num_blocks=140, budget=64, options=(("policy", "fair"),)),
    Schedule("protected", **FEW_BLOCKS, options=(("max_num_preemptions", 1),)),
    Schedule("costly", budget=64, options=(("max_num_mixed_prefill_tokens", 3), ("attention_cost_tokens", 500.0))),
    Schedule("timed", budget=64, options=(("mixed_step_ms", 5.0),)),
    Schedule(
        "reservation",
        block_size=2,
        options=(("admission", "reservation"), ("max_batch_total_tokens", 900), ("max_batch_prefill_tokens", 37)),
    ),
    Schedule("prefill_first", options=(("batching", "prefill_first"),)),
    Schedule("ahead", options=(("async_scheduling", True),)),
    Schedule("ahead_chunks_of_7", threshold=7, options=(("async_scheduling", True),)),
    Schedule("ahead_few_blocks", **FEW_BLOCKS, swap_space_bytes=1 << 22, options=(("async_scheduling", True),)),
    Schedule("one_thread", num_threads=1),
    Schedule("two_threads", num_threads=2),
]
# For each instruction set: few requests, with prompts that are cut, swapped out and computed with other requests.
EVERYWHERE = Schedule(
    "chunks_and_swaps", **FEW_BLOCKS, threshold=7, swap_space_bytes=1 << 22, options=(("preemption", "swap"),)
)
NUM_REQUESTS_EVERYWHERE = 9
NUM_REQUESTS_OF_THE_REFERENCE = 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Qwen3 with grouped heads and a head size that is not a power of two; random weights large enough to matter."""
    config = tiny_config(
        "Qwen3ForCausalLM", hidden_size=192, intermediate_size=320, head_dim=48, num_hidden_layers=3, vocab_size=1500
    )
    return write_checkpoint(tmp_path_factory.mktemp("exact") / "qwen3", config, std=0.1)


def make_requests() -> list[tuple[list[int], SamplingParams]]:
    """Return prompts of 1 to 160 tokens, some with a common prefix, greedy and sampled in every way."""
    rng = random.Random(1)
    prefix = [rng.randrange(2, 1500) for _ in range(70)]
    ways = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.8, "top_k": 20, "seed": 8},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.2},
        {"temperature": 1.1, "typical_p": 0.9, "top_p": 0.95},
        {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {5: 2.0, 9: -3.0}},
    ]
    requests = []
    for index in range(NUM_REQUESTS):
        own = [rng.randrange(2, 1500) for _ in range(rng.choice([1, 2, 15, 16, 17, 33, 64, 90]))]
        prompt = (prefix if index % 3 == 0 else []) + own
        logprobs = None if index % 4 == 3 else 3  # without logprobs, the kernel alone samples
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=logprobs, **ways[index % len(ways)])
        requests.append((prompt, params))
    return requests


def make_engine(checkpoint, dtype: str, schedule: Schedule, kernels: str, isa: str = "auto") -> LLMEngine:
    return LLMEngine(
        ModelConfig(model=str(checkpoint), **precision(dtype), skip_tokenizer_init=True, max_model_len=512),
        cache_config=CacheConfig(
            block_size=schedule.block_size,
            num_gpu_blocks=schedule.num_blocks or 4096 // schedule.block_size * 2,
            enable_prefix_caching=schedule.prefix_caching,
            swap_space_bytes=schedule.swap_space_bytes,
            **kv_precision(dtype),
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=schedule.max_num_seqs,
            max_num_batched_tokens=schedule.budget,
            long_prefill_token_threshold=schedule.threshold,
            **{**PRESSING, **dict(schedule.options)},
        ),
        device_config=DeviceConfig(
            device="cpu", kernels=kernels, isa=isa, num_threads=schedule.num_threads, **dict(schedule.device)
        ),
        speculative_config=SpeculativeConfig(method=schedule.method),
    )


def answers(engine: LLMEngine, requests, *, staggered: bool = True) -> list[tuple]:
    """Add requests a few at a time between steps; return (token ids, logprobs) of each."""
    finished = {}
    pending = list(enumerate(requests))
    while pending or engine.has_unfinished_requests():
        for _ in range(5 if staggered else len(pending)):
            if pending:
                index, (prompt, params) = pending.pop(0)
                engine.add_request(
                    str(index), {"prompt_token_ids": prompt}, params, priority=index % 3, tenant=str(index % 4)
                )
        for output in engine.step():
            if output.finished:
                finished[int(output.request_id)] = output.outputs[0]
    return [(finished[index].token_ids, finished[index].logprobs) for index in range(len(requests))]


@pytest.fixture(scope="module")
def window_checkpoint(tmp_path_factory):
    """A Mistral with windows of 37 positions: fewer than prompts have, and not whole blocks or tiles."""
    config = tiny_config("MistralForCausalLM", sliding_window=37, vocab_size=1500)
    return write_checkpoint(tmp_path_factory.mktemp("exact") / "mistral", config, std=0.1)


@pytest.fixture(scope="module")
def alone():
    """Answers to each request alone, with seeds as if they had arrived in order."""
    cache: dict[tuple, list[tuple]] = {}

    def run(checkpoint, dtype: str, kernels: str, isa: str = "auto", count: int = NUM_REQUESTS) -> list[tuple]:
        key = (checkpoint, dtype, kernels, isa, count)
        if key not in cache:
            schedule = Schedule("alone", max_num_seqs=1, budget=256, prefix_caching=False)
            engine = make_engine(checkpoint, dtype, schedule, kernels, isa)
            cache[key] = answers(engine, make_requests()[:count])
        return cache[key]

    return run


@needs_kernels
@pytest.mark.sweep(72)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_compiled_kernels_give_equal_tokens_in_every_schedule(checkpoint, alone, schedule, dtype):
    check(make_engine(checkpoint, dtype, schedule, "cpu"), schedule, alone(checkpoint, dtype, "cpu"))


@needs_kernels
@pytest.mark.sweep(48)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", MORE_DTYPES)
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_every_instruction_set_gives_equal_tokens_alone_and_batched(checkpoint, alone, isa, dtype, num_threads):
    """One thread and two threads give the answer of the request alone."""
    engine = make_engine(checkpoint, dtype, replace(EVERYWHERE, num_threads=num_threads), "cpu", isa)
    kernels = engine.core.executor.worker.kernels
    assert (kernels.isa, kernels.num_threads) == (isa, num_threads)
    check(engine, EVERYWHERE, alone(checkpoint, dtype, "cpu", isa, NUM_REQUESTS_EVERYWHERE))


@needs_kernels
@pytest.mark.sweep(20)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16 with int8 KV"])
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_sliding_window_gives_equal_tokens_alone_and_batched(window_checkpoint, alone, isa, dtype):
    engine = make_engine(window_checkpoint, dtype, EVERYWHERE, "cpu", isa)
    layers = engine.core.executor.worker.model.architecture.layers
    assert [layer.attention.window for layer in layers] == [37, 37]
    check(engine, EVERYWHERE, alone(window_checkpoint, dtype, "cpu", isa, NUM_REQUESTS_EVERYWHERE))


@needs_kernels
@pytest.mark.sweep(20)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16 with int8 KV"])
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_long_common_prefix_does_not_change_tokens(checkpoint, isa, dtype, monkeypatch):
    """Two prompts of 200 tokens, each the prefix of some requests that alternate: a shared prefix is read once for
    all.
    """
    rng = random.Random(2)
    prefixes = [[rng.randrange(2, 1500) for _ in range(200)] for _ in range(2)]
    requests = []
    for index in range(9):
        own = [rng.randrange(2, 1500) for _ in range(1 + 5 * index)]
        params = SamplingParams(
            max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3, temperature=index % 3 / 2, seed=index
        )
        requests.append((prefixes[index % 2] + own, params))
    prepare_inputs, side_by_side = InputBatch.prepare_inputs, set()

    def watch(batch, scheduled):
        inputs = prepare_inputs(batch, scheduled)
        beginnings = [row[: 192 // batch.block_size] for row in inputs.attention.block_tables.tolist()]
        side_by_side.update(len(list(group)) for _, group in itertools.groupby(beginnings))
        return inputs

    expected = answers(
        make_engine(checkpoint, dtype, Schedule("alone", max_num_seqs=1, prefix_caching=False), "cpu", isa), requests
    )
    monkeypatch.setattr(InputBatch, "prepare_inputs", watch)
    for schedule in (Schedule("crowd"), Schedule("chunks", threshold=33, rounds=2)):
        engine = make_engine(checkpoint, dtype, schedule, "cpu", isa)
        for _ in range(schedule.rounds):
            assert answers(engine, requests) == expected, schedule.name
    assert {4, 5} < side_by_side


def check(engine: LLMEngine, schedule: Schedule, expected: list[tuple]) -> None:
    """Answer the requests and compare; check that the events happened that the schedule is for."""
    requests = make_requests()[: len(expected)]
    for _ in range(schedule.rounds):
        got = answers(engine, requests)
        # A request without a seed gets one from its arrival number, which a second round does not repeat.
        fixed = [i for i, (_, params) in enumerate(requests) if params.seed is not None or params.is_greedy]
        for index in range(len(requests)) if schedule.rounds == 1 else fixed:
            assert got[index] == expected[index], f"request {index} differs in {schedule.name}"
    stats = engine.core.metrics.stats
    if schedule.num_blocks is not None:
        assert stats.num_preemptions >= 3
    assert has_swapped(engine) == (schedule.swap_space_bytes > 0)
    if schedule.rounds > 1:
        assert stats.prefix_cache_hits > 0.4 * stats.prefix_cache_queries
    assert engine.core.scheduler.kv_cache_manager.pool.usage == 0.0


@pytest.mark.turn(16)
@needs_kernels
def test_logprobs_differ_between_dtypes(checkpoint, alone):
    """Otherwise equality within each format would mean little."""
    seen = [[logprobs for _, logprobs in alone(checkpoint, dtype, "cpu", count=2)] for dtype in MORE_DTYPES]
    assert all(a != b for a, b in itertools.combinations(seen, 2))


@needs_kernels
def test_all_test_requests_have_different_answers(checkpoint, alone):
    texts = {tuple(token_ids) for token_ids, _ in alone(checkpoint, "bfloat16", "cpu")}
    assert len(texts) == NUM_REQUESTS


@needs_kernels
def test_float16_weights_are_computed_in_float32_on_cpu(checkpoint, alone):
    engine = make_engine(checkpoint, "float16", Schedule("crowd"), "cpu")
    assert engine.core.executor.worker.model.dtype == torch.float32
    whole = answers(engine, make_requests())
    engine = make_engine(checkpoint, "float16", Schedule("chunks", threshold=7), "cpu")
    assert answers(engine, make_requests()) == whole


@pytest.mark.turn(12)
@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="plain torch: one-row products and wide sums depend on the batch (docs/why.md)",
)
def test_reference_kernels_depend_on_batch(checkpoint, alone):
    engine = make_engine(checkpoint, "float32", Schedule("crowd"), "reference")
    expected = alone(checkpoint, "float32", "reference", count=NUM_REQUESTS_OF_THE_REFERENCE)
    assert answers(engine, make_requests()[: len(expected)]) == expected


@needs_kernels
@pytest.mark.parametrize("n", [1, 3])
def test_n_outputs_differ_and_first_equals_single_output(checkpoint, n):
    engine = make_engine(checkpoint, "bfloat16", Schedule("crowd"), "cpu")
    params = SamplingParams(n=n, temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)
    (prompt, _) = make_requests()[3]
    output = engine.generate({"prompt_token_ids": prompt}, params)
    first = engine.generate({"prompt_token_ids": prompt}, replace(params, n=1)).outputs[0].token_ids
    assert output.outputs[0].token_ids == first
    assert len({tuple(each.token_ids) for each in output.outputs}) == n


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "block_size"), [("float32", 2), ("bfloat16", 64), ("int8", 16), ("bfloat16 with int8 KV", 16)]
)
def test_full_prefix_hit_recomputes_only_last_token_and_keeps_outputs(checkpoint, dtype, block_size):
    rng = random.Random(2)
    prompt = {"prompt_token_ids": [rng.randrange(2, 1500) for _ in range(64)]}
    ways = [
        SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3),
        SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=6, ignore_eos=True, logprobs=3),
    ]
    cold = make_engine(checkpoint, dtype, Schedule("cold", block_size=block_size, prefix_caching=False), "cpu")
    warm = make_engine(checkpoint, dtype, Schedule("warm", block_size=block_size), "cpu")
    for _ in range(3):
        for params in ways:
            expected, output = cold.generate(prompt, params), warm.generate(prompt, params)
            assert [(each.token_ids, each.logprobs) for each in output.outputs] == [
                (each.token_ids, each.logprobs) for each in expected.outputs
            ]
    assert (output.num_cached_tokens, expected.num_cached_tokens) == (63, 0)
    crowd = warm.generate_batch([prompt] * 5, ways[0])
    assert {output.num_cached_tokens for output in crowd.values()} == {63}
    alone = cold.generate(prompt, ways[0]).outputs[0]
    for output in crowd.values():
        assert (output.outputs[0].token_ids, output.outputs[0].logprobs) == (alone.token_ids, alone.logprobs)


@needs_kernels
def test_prompt_logprobs_do_not_depend_on_chunks_or_preemption(checkpoint):
    prompts = [prompt for prompt, _ in make_requests()[:8]]
    asked = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=2)
    params = [asked.replace(prompt_logprobs=None) if i % 3 == 2 else asked for i in range(len(prompts))]
    results = []
    for schedule in (
        Schedule("whole", max_num_seqs=1),
        Schedule("chunks", threshold=7),
        Schedule("few", num_blocks=14, prefix_caching=True, budget=64),
    ):
        engine = make_engine(checkpoint, "bfloat16", schedule, "cpu")
        outputs = engine.generate_batch([{"prompt_token_ids": prompt} for prompt in prompts], params)
        results.append([(output.prompt_logprobs, output.outputs[0].token_ids) for output in outputs.values()])
        counts = [None if i % 3 == 2 else len(prompt) for i, prompt in enumerate(prompts)]
        assert [None if entries is None else len(entries) for entries, _ in results[-1]] == counts
    assert results[1] == results[0]
    assert results[2] == results[0]


@needs_kernels
def test_preemption_keeps_drawn_seed_of_request(checkpoint):
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    requests = [(prompt, params) for prompt, _ in make_requests()]
    roomy = answers(make_engine(checkpoint, "float32", Schedule("crowd"), "cpu"), requests)
    engine = make_engine(checkpoint, "float32", Schedule("few", num_blocks=20), "cpu")
    assert answers(engine, requests) == roomy
    assert engine.core.metrics.stats.num_preemptions > 0


@pytest.mark.turn(8)
@pytest.mark.sweep(12)
@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_embeddings_do_not_depend_on_schedule(checkpoint, dtype, monkeypatch):
    """Last states and means of prompts, among other requests; whole, in chunks, preempted and swapped."""
    others = make_requests()
    prompts = [prompt for prompt, _ in others if len(prompt) > 30]
    kinds = ["mean" if index % 3 else "last" for index in range(len(prompts))]
    asked = [(prompt, SamplingParams(max_tokens=1, pooling=kind)) for prompt, kind in zip(prompts, kinds, strict=True)]
    mixed = [request for pair in zip(others, asked, strict=False) for request in pair]
    resumed = []
    add_request = InputBatch.add_request

    def watch(batch, data):
        """A mean does not use the prefix cache: if tokens are computed already, they were swapped."""
        if data.sampling_params.pooling == "mean" and data.num_computed_tokens:
            resumed.append(data.request_id)
        add_request(batch, data)

    monkeypatch.setattr(InputBatch, "add_request", watch)

    def vectors(schedule: Schedule, requests) -> list[bytes]:
        engine = make_engine(checkpoint, dtype, schedule, "cpu")
        result = {}
        for _ in range(schedule.rounds):
            pending = list(enumerate(requests))
            while pending or engine.has_unfinished_requests():
                for index, (prompt, params) in pending[:5]:
                    engine.add_request(f"{index}", {"prompt_token_ids": prompt}, params, priority=-(index % 3))
                del pending[:5]
                result.update({output.request_id: output for output in engine.step() if output.finished})
        if schedule.num_blocks is not None:
            assert engine.core.metrics.stats.num_preemptions >= 3
        return [result[str(i)].pooled for i, (_, params) in enumerate(requests) if params.pooling is not None]

    expected = vectors(Schedule("alone", max_num_seqs=1, prefix_caching=False), asked)
    assert len({*expected}) == len(asked)
    assert all(len(vector) == 192 * 4 for vector in expected)
    few = {"block_size": 2, "num_blocks": 100, "budget": 40, "threshold": 11}
    schedules = [
        Schedule("crowd", rounds=2),
        Schedule("chunks_of_7", threshold=7),
        Schedule("few_blocks", **few, options=(("policy", "priority"),)),
        Schedule("swapped", **few, swap_space_bytes=1 << 22, options=(("policy", "priority"), ("preemption", "swap"))),
    ]
    for schedule in schedules:
        assert vectors(schedule, mixed) == expected, schedule.name
    assert resumed, "no sum was gone on with after a swap"


@pytest.mark.sweep(12)
@needs_kernels
@pytest.mark.parametrize("name", ["crowd", "few_blocks", "swapped"])
def test_computed_tokens_of_requests_sum_to_scheduled_tokens(checkpoint, name):
    """Every computed position is on one request's receipt; positions that are computed twice are listed separately."""
    schedule = next(each for each in SCHEDULES if each.name == name)
    engine = make_engine(checkpoint, "float32", schedule, "cpu")
    requests, done = make_requests(), []
    pending = list(enumerate(requests))
    while pending or engine.has_unfinished_requests():
        for index, (prompt, params) in pending[:5]:
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params, priority=index % 3)
        del pending[:5]
        done += [output for output in engine.step() if output.finished]
    metrics = [output.metrics for output in done]
    assert sum(each.num_computed_tokens for each in metrics) == engine.core.metrics.stats.scheduled_tokens
    assert any(each.num_recomputed_tokens for each in metrics) == (name == "few_blocks")
    for output in done:
        needed = len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1 - output.num_cached_tokens
        assert output.metrics.num_computed_tokens == needed + output.metrics.num_recomputed_tokens
