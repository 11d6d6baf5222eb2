"""`==` over schedules for every family: alone, and in a batch with cut and swapped prompts."""

from __future__ import annotations

import pytest
from test_exactness import EVERYWHERE, NUM_REQUESTS_EVERYWHERE, Schedule, answers, check, make_engine, make_requests

from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import FAMILIES

DTYPES = ["float32", "bfloat16", "int8", "int4", "bfloat16 with int8 KV"]
# Features that random configurations lack: windows in some layers, parts of a few checkpoints.
MORE = {
    "GraniteForCausalLM": {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "logits_scaling": 1.5},
    "MinistralForCausalLM": {"sliding_window": 37, "layer_types": ["sliding_attention", "full_attention"]},
    "Ministral3ForCausalLM": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.3,
        }
    },
    "Phi3ForCausalLM": {
        "original_max_position_embeddings": 64,
        "sliding_window": 37,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        },
    },
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0]},
}


@pytest.mark.sweep(64)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_equal_tokens_alone_and_batched(name, dtype, tmp_path):
    config = tiny_config(name, vocab_size=1500, num_attention_heads=6, num_key_value_heads=2) | MORE.get(name, {})
    path = write_checkpoint(tmp_path, config, std=0.1)
    alone = make_engine(path, dtype, Schedule("alone", max_num_seqs=1, prefix_caching=False), "cpu")
    expected = answers(alone, make_requests()[:NUM_REQUESTS_EVERYWHERE])
    check(make_engine(path, dtype, EVERYWHERE, "cpu"), EVERYWHERE, expected)
