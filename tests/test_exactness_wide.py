"""Exactness with layers as wide as those of a real model: products and sums have other shapes and orders.

Hidden size 896, MLP 4,864, vocabulary 151,936: the widths of Qwen2 0.5B, in one layer.
"""

from __future__ import annotations

import functools
import json
import random

import pytest
from alone_and_crowd import alone, crowd, needs_kernels
from kernels_available import kv_precision, precision

from octavo import CacheConfig, DeviceConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig
from octavo.models import loader
from octavo.models.random_weights import tiny_config

VOCAB_SIZE = 151_936
NUM_REQUESTS = 33  # one row more than whole tiles have
NUM_TOKENS = 3
CONFIG = tiny_config(
    "Qwen2ForCausalLM",
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=1,
    num_attention_heads=14,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=VOCAB_SIZE,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="module", params=["bfloat16", "float32", "int8", "int4", "int4_all", "int8 with int8 KV"])
def engine(request, tmp_path_factory):
    """An engine without prefix hits for a request that comes a second time."""
    directory = tmp_path_factory.mktemp("wide")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    with pytest.MonkeyPatch.context() as patch:
        # At the usual 0.02, one layer with tied embeddings would only repeat the last token.
        patch.setattr(loader, "RandomWeights", functools.partial(loader.RandomWeights, std=0.1))
        return LLMEngine(
            ModelConfig(
                model=str(directory), **precision(request.param), load_format="dummy", skip_tokenizer_init=True
            ),
            cache_config=CacheConfig(num_gpu_blocks=256, enable_prefix_caching=False, **kv_precision(request.param)),
            scheduler_config=SchedulerConfig(max_num_seqs=NUM_REQUESTS, max_num_batched_tokens=256),
            device_config=DeviceConfig(device="cpu", kernels="cpu"),
        )


def make_requests():
    """Return prompts of 1 to 24 tokens: greedy, sampled from all tokens, and sampled from few of them."""
    rng = random.Random(0)
    ways = [
        {"temperature": 0.0},
        {"temperature": 2.0, "seed": 11},
        {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "seed": 12},
    ]
    return [
        (
            [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.choice([1, 2, 7, 16, 24]))],
            SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3, **ways[index % len(ways)]),
        )
        for index in range(NUM_REQUESTS)
    ]


@needs_kernels
@pytest.mark.sweep(24)
def test_wide_layers_give_equal_tokens_alone_and_batched(engine):
    requests = make_requests()
    expected = alone(engine, requests)
    got = crowd(engine, requests)
    for index in range(NUM_REQUESTS):
        assert got[index] == expected[index], f"request {index} differs in the crowd"
    tokens = {token for token_ids, _ in expected for token in token_ids}
    assert len(tokens) > NUM_REQUESTS * NUM_TOKENS // 2  # otherwise equality would mean little
