"""LFM2: the configuration, its refusals, and GGUF files."""

import json

import pytest
import torch
from gguf_files import write_gguf
from test_against_transformers import generate_staggered

from octavo.errors import ModelError
from octavo.models.gated_conv import GatedConvConfig
from octavo.models.gguf_config import find_gguf_family, read_gguf_config
from octavo.models.gguf_file import GGUFFile
from octavo.models.gguf_weights import GGUFWeights
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import read_architecture

LFM2_1_2B = {  # as published
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "conv_use_xavier_init": True,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0.dev0",
    "use_cache": True,
    "use_pos_enc": True,
    "vocab_size": 65536,
}


def read(directory, config):
    (directory / "config.json").write_text(json.dumps(config))
    return read_architecture(directory)


def test_published_config_is_read(tmp_path):
    architecture = read(tmp_path, LFM2_1_2B)
    kinds = [isinstance(layer.attention, GatedConvConfig) for layer in architecture.layers]
    assert [index for index, is_conv in enumerate(kinds) if not is_conv] == LFM2_1_2B["full_attn_idxs"]
    assert architecture.layers[0].mlp.intermediate_size == 8192
    assert architecture.layers[2].attention.rope.theta == 1e6
    assert architecture.rms_norm_eps == 1e-5
    assert architecture.tie_word_embeddings
    assert architecture.max_context_tokens == 128_000
    assert architecture.num_parameters == 1_170_340_608  # the model card's 1.17B
    assert architecture.kv_layout.state_bytes("bfloat16") == 10 * 2 * 2048 * 2
    assert architecture.kv_layout.bytes_per_token("bfloat16") == 6 * 2 * 8 * 64 * 2


def test_own_keys_replace_common_ones(tmp_path):
    changes = {"tie_embedding": False, "tie_word_embeddings": True, "intermediate_size": 99, "layer_types": None}
    architecture = read(tmp_path, LFM2_1_2B | changes)
    assert not architecture.tie_word_embeddings
    assert architecture.layers[0].mlp.intermediate_size == 8192


def test_missing_keys_have_defaults_of_transformers(tmp_path):
    from transformers import Lfm2MoeConfig

    needed = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8}
    needed |= {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48, "moe_intermediate_size": 32}
    needed |= {"layer_types": ["conv", "full_attention", "conv"]}
    theirs = Lfm2MoeConfig(**needed)
    architecture = read(tmp_path, needed | {"architectures": ["Lfm2MoeForCausalLM"]})
    conv, attention, _ = (layer.attention for layer in architecture.layers)
    assert (conv.num_taps, conv.bias) == (theirs.conv_L_cache, theirs.conv_bias)
    assert (attention.num_kv_heads, attention.head_dim) == (theirs.num_key_value_heads, 8)
    assert attention.rope.theta == theirs.rope_parameters["rope_theta"]
    assert architecture.rms_norm_eps == theirs.norm_eps
    assert architecture.tie_word_embeddings == theirs.tie_word_embeddings
    assert architecture.max_context_tokens == theirs.max_position_embeddings
    routers = [getattr(layer.mlp, "router", None) for layer in architecture.layers]
    assert [router is None for router in routers] == [index < theirs.num_dense_layers for index in range(3)]
    assert routers[2].has_choice_bias == theirs.use_expert_bias
    assert (routers[2].scale, routers[2].least_sum) == (theirs.routed_scaling_factor, 1e-6)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Lfm2", {"conv_L_cache": 9}, "conv_L_cache = 9: must be 2 to 8"),
        ("Lfm2", {"layer_types": ["conv"]}, "must list num_hidden_layers = 2 entries"),
        ("Lfm2", {"layer_types": ["conv", "sliding_attention"]}, "octavo supports full_attention and conv"),
        ("Lfm2", {"layer_types": ["conv", "conv"]}, "needs at least one layer with full_attention"),
        ("Lfm2", {"num_experts": 4}, "num_experts = 4: octavo does not support this"),
        ("Lfm2Moe", {"num_dense_layers": 3}, "num_dense_layers = 3: must be an integer from 0 to 2"),
        ("Lfm2Moe", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9: must be at most"),
    ],
)
def test_configuration_is_refused(name, changes, message, tmp_path):
    with pytest.raises(ModelError, match=message):
        read(tmp_path, tiny_config(f"{name}ForCausalLM", **changes))


def test_names_of_modules_are_left_as_floats(tmp_path):
    ignored = ["model.layers.0.feed_forward.w1", "model.layers.*.self_attn.out_proj"]
    quantization = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ignored}
    stored = read(tmp_path, tiny_config("Lfm2ForCausalLM", quantization_config=quantization)).stored_floats
    assert not any(map(stored.covers, ("model.layers.0.mlp.gate_proj", "model.layers.1.self_attn.o_proj")))
    assert stored.covers("model.layers.0.mlp.up_proj")


SMALL = {"vocab_size": 288, "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
PROMPTS = [[index % 281 + 3 for index in range(length)] for length in (1, 2, 3, 17, 60)]


@pytest.mark.parametrize("changes", [{"conv_L_cache": 5, "norm_eps": 0.01}, {"tie_word_embeddings": True}])
def test_gguf_file_gives_tokens_of_folder(changes, tmp_path):
    folder = write_checkpoint(tmp_path / "folder", tiny_config("Lfm2ForCausalLM", **SMALL | changes), std=0.1)
    file = write_gguf(folder, tmp_path / "model.gguf")
    tokens = generate_staggered(folder, PROMPTS, 24)
    assert generate_staggered(file, PROMPTS, 24) == tokens
    assert len({*map(tuple, tokens)}) == len(tokens)


def test_gguf_blocks_of_linear_layers_are_multiplied_as_stored(tmp_path):
    folder = write_checkpoint(tmp_path / "folder", tiny_config("Lfm2ForCausalLM", **SMALL), std=0.1)
    weights = GGUFWeights(
        GGUFFile.read(write_gguf(folder, tmp_path / "model.gguf", kind="Q8_0", kinds={"conv": "F32"}))
    )
    blocks = {name for name in weights.block_bytes() if ".layers.0." in name}
    assert {f"model.layers.0.conv.{part}_proj.weight" for part in ("in", "out")} < blocks
    assert weights.open().tensor("model.layers.0.conv.conv.weight").dtype == torch.float32
    assert len(generate_staggered(weights.path, PROMPTS, 8)) == len(PROMPTS)


def test_float32_taps_do_not_change_the_dtype_of_a_gguf_file(tmp_path):
    folder = write_checkpoint(tmp_path / "folder", tiny_config("Lfm2ForCausalLM", **SMALL))
    file = GGUFFile.read(write_gguf(folder, tmp_path / "model.gguf", kind="BF16", kinds={"conv": "F32"}))
    assert read_gguf_config(file, *find_gguf_family(file))["dtype"] == "bfloat16"


def test_gguf_file_with_other_taps_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "folder", tiny_config("Lfm2ForCausalLM", **SMALL))
    file = write_gguf(folder, tmp_path / "model.gguf", changes={"lfm2.shortconv.l_cache": 4})
    with pytest.raises(ModelError, match=r"blk.0.shortconv.conv.weight has the shape \[64, 1, 3\]"):
        generate_staggered(file, PROMPTS, 1)
