"""Exactness if attention merges several partitions of 1,024 positions, and after repeated preemption."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from alone_and_crowd import alone, crowd, needs_kernels
from kernels_available import kv_precision, precision

from octavo import CacheConfig, DeviceConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig
from octavo.models.random_weights import tiny_config, write_checkpoint

pytestmark = needs_kernels
VOCAB_SIZE = 500
MAX_MODEL_LEN = 4096
DTYPES = ["float32", "bfloat16", "int8", "int4", "bfloat16 with int8 KV", "int8 with int8 KV"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = tiny_config("Qwen3ForCausalLM", vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_MODEL_LEN)
    return write_checkpoint(tmp_path_factory.mktemp("long") / "qwen3", config, std=0.2)


def make_engine(checkpoint, dtype, *, num_threads=1, num_blocks=600, max_num_seqs=8, budget=4096, **scheduler):
    return LLMEngine(
        ModelConfig(model=str(checkpoint), **precision(dtype), skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN),
        cache_config=CacheConfig(num_gpu_blocks=num_blocks, enable_prefix_caching=False, **kv_precision(dtype)),
        scheduler_config=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, **scheduler),
        device_config=DeviceConfig(device="cpu", kernels="cpu", num_threads=num_threads),
    )


def make_requests(lengths, max_tokens):
    """Return greedy and sampled requests in turns."""
    rng = random.Random(3)
    ways = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}]
    return [
        (
            [rng.randrange(2, VOCAB_SIZE) for _ in range(length)],
            SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=3, **ways[index % 2]),
        )
        for index, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module", params=DTYPES)
def long_answers(request, checkpoint):
    """Return (dtype, requests, answers): two prompts that reach the third partition and four other ones, each alone."""
    requests = make_requests([2105, 2300, 1, 40, 1020, 300], max_tokens=8)
    return request.param, requests, alone(make_engine(checkpoint, request.param), requests)


@pytest.mark.sweep(32)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="crowd"),
        pytest.param({"long_prefill_token_threshold": 512}, id="chunks_of_512"),
        pytest.param({"budget": 700}, id="budget_of_700"),  # cuts prompts inside partitions and tiles
        pytest.param({"num_threads": 2}, id="two_threads"),
    ],
)
def test_prompts_over_several_attention_partitions_give_equal_tokens(checkpoint, long_answers, options):
    dtype, requests, expected = long_answers
    got = crowd(make_engine(checkpoint, dtype, **options), requests)
    for index in range(len(requests)):
        assert got[index] == expected[index], f"request {index} differs"
    assert all(len(set(token_ids)) > 4 for token_ids, _ in expected)  # otherwise equality would mean little


@pytest.mark.sweep(12)
def test_first_attention_partition_affects_logprobs(checkpoint, long_answers):
    """Another first token, two partitions before the end, changes logprobs: attention does read it."""
    dtype, requests, expected = long_answers
    prompt, params = requests[0]
    other = [(prompt[0] + 1) % VOCAB_SIZE, *prompt[1:]]
    assert alone(make_engine(checkpoint, dtype), [(other, params)])[0][1] != expected[0][1]


@pytest.mark.sweep(24)
@pytest.mark.parametrize("dtype", DTYPES)
def test_repeated_preemption_does_not_change_tokens(checkpoint, dtype):
    requests = make_requests([20, 12, 36, 4, 16, 28, 8, 24], max_tokens=100)
    expected = alone(make_engine(checkpoint, dtype, max_num_seqs=1), requests)
    engine = make_engine(checkpoint, dtype, num_blocks=12, budget=64)
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
    finished, preemptions = {}, Counter()
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output.outputs[0]
        for request in engine.core.scheduler.requests.values():
            preemptions[request.request_id] = request.num_preemptions
    assert max(preemptions.values()) >= 2, preemptions
    for index in range(len(requests)):
        got = finished[str(index)]
        assert (got.token_ids, got.logprobs) == expected[index], f"request {index} differs"
