"""Configurations of hybrids with Mamba-2, and layers with one sublayer."""

import math
from pathlib import Path

import pytest

from octavo.errors import ModelError
from octavo.models.config_file import ConfigFile
from octavo.models.no_sublayer import NoSublayer
from octavo.models.random_weights import tiny_config
from octavo.models.registry import architecture_of
from octavo.models.share import Share

GRANITE, NEMOTRON = "GraniteMoeHybridForCausalLM", "NemotronHForCausalLM"
INFINITY = {"__float__": "Infinity"}  # in config.json of transformers 5


def read(name, **changes):
    return architecture_of(ConfigFile(Path("config.json"), tiny_config(name, **changes)))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (GRANITE, {"mamba_d_head": 24}, "mamba_d_head = 24: must be a multiple of 16"),
        (GRANITE, {"mamba_n_groups": 3}, "mamba_n_groups = 3: must divide mamba_n_heads = 8"),
        (GRANITE, {"mamba_d_conv": 9}, "mamba_d_conv = 9: must be 2 to 8"),
        (GRANITE, {"mamba_d_conv": 1}, "mamba_d_conv = 1: must be 2 to 8"),
        (GRANITE, {"hidden_act": "gelu_pytorch_tanh"}, "octavo computes Mamba-2 with silu only"),
        (GRANITE, {"layer_types": ["mamba"] * 2}, "octavo needs at least one layer with full_attention"),
        (GRANITE, {"layer_types": ["attention"]}, "must list num_hidden_layers = 2 entries"),
        (GRANITE, {"layer_types": ["attention", "conv"]}, "supports full_attention and linear_attention in this"),
        (GRANITE, {"layer_types": ["attention", {}]}, "supports full_attention and linear_attention in this"),
        (GRANITE, {"position_embedding_type": "alibi"}, "octavo supports rope and nope"),
        (GRANITE, {"time_step_limit": [0.5, 0.1]}, "must be two ascending numbers"),
        (GRANITE, {"time_step_limit": [0.5]}, "must be two ascending numbers"),
        (GRANITE, {"time_step_limit": [0.0, {"__float__": "NaN"}]}, "must be two ascending numbers"),
        (GRANITE, {"time_step_limit": [False, 1.0]}, "must be two ascending numbers"),
        (GRANITE, {"attn_logit_softcapping": 9.0}, "octavo does not support this"),
        (GRANITE, {"num_experts_per_tok": 6}, "must be at most num_local_experts = 5"),
        (NEMOTRON, {"mamba_head_dim": 8}, "mamba_head_dim = 8: must be a multiple of 16"),
        (NEMOTRON, {"mlp_hidden_act": "silu"}, "octavo computes relu2 only"),
        (NEMOTRON, {"mamba_hidden_act": "gelu"}, "octavo computes Mamba-2 with silu only"),
        (NEMOTRON, {"moe_latent_size": 0}, "moe_latent_size = 0: must be an integer from 1"),
        (NEMOTRON, {"block_configs": [{"block_type": "moe"}]}, "octavo does not support this"),
        (NEMOTRON, {"hybrid_override_pattern": "ME-M"}, "octavo needs at least one layer of attention"),
        (NEMOTRON, {"hybrid_override_pattern": "ME*"}, "must name the kind of each of num_hidden_layers layers"),
        (NEMOTRON, {"hybrid_override_pattern": "ME*X"}, "octavo supports M, *, -, E, not 'X'"),
        (NEMOTRON, {"layers_block_type": ["mamba", "M", "moe", "mlp"]}, "not 'M'"),
        (NEMOTRON, {"layers_block_type": 4}, "must name the kind of each of num_hidden_layers layers"),
        (NEMOTRON, {"hybrid_override_pattern": None}, "hybrid_override_pattern is null"),
        (NEMOTRON, {"n_group": 3}, "n_group = 3: must divide the number of experts, 8"),
        (NEMOTRON, {"final_logit_softcapping": 9.0}, "octavo does not support this"),
    ],
)
def test_other_configurations_are_refused(name, changes, message):
    with pytest.raises(ModelError) as caught:
        read(name, **changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("stored", "limits"),
    [
        (None, (0.0, math.inf)),
        ([0.0, INFINITY], (0.0, math.inf)),
        ([0.001, math.inf], (0.001, math.inf)),
        ([0, 2], (0.0, 2.0)),
    ],
)
def test_limits_of_step_sizes_are_read_in_every_form(stored, limits):
    mamba = read(GRANITE, time_step_limit=stored).layers[0].attention
    assert (mamba.dt_min, mamba.dt_max) == limits


def test_width_of_heads_follows_from_the_expansion():
    auto = read(GRANITE, mamba_d_head="auto", mamba_expand=2)
    assert auto.layers[0].attention.head_dim == 2 * 64 // 8
    assert auto == read(GRANITE)


def test_pattern_equals_list_of_kinds():
    kinds = ["linear_attention", "moe", "attention", "mlp"]
    assert read(NEMOTRON, layers_block_type=kinds) == read(NEMOTRON)
    assert read(NEMOTRON, layers_block_type=kinds, num_hidden_layers=None) == read(NEMOTRON)


def test_modules_of_a_backbone_are_left_as_floats():
    ignored = ["backbone.layers.0.mixer.in_proj", "backbone.layers.*.mixer.q_proj", "lm_head"]
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ignored}
    stored = read(NEMOTRON, quantization_config=config).stored_floats
    layers = "model.layers"
    floats = [f"{layers}.0.mamba.in_proj", f"{layers}.2.self_attn.q_proj", f"{layers}.1.mlp.gate", "lm_head"]
    assert not any(map(stored.covers, floats))
    assert stored.covers(f"{layers}.0.mamba.out_proj")
    assert stored.covers(f"{layers}.1.mlp.experts.0.up_proj")


def test_older_name_of_head_dim_is_read():
    assert read(NEMOTRON, head_dim=None, attention_head_dim=40).layers[2].attention.head_dim == 40


def test_layers_without_a_mixer_store_nothing():
    layout = read(NEMOTRON, hybrid_override_pattern="M*-E", num_hidden_layers=4).kv_layout
    assert list(layout.states) == [0]
    assert [group.layers for group in layout.kv_groups] == [(1,)]
    assert layout.last_writer == 1
    without = read(NEMOTRON, hybrid_override_pattern="*", num_hidden_layers=1).kv_layout
    assert layout.bytes_per_token("bfloat16") == without.bytes_per_token("bfloat16")
    assert layout.columns(16, "bfloat16").keys() == {1}


def test_model_without_recurrent_layers_has_no_states():
    assert not read(NEMOTRON, hybrid_override_pattern="*-E-", num_hidden_layers=4).kv_layout.states
    granite = read(GRANITE, layer_types=["attention"] * 2)
    assert not granite.kv_layout.states
    assert len(granite.split(Share(0, 2)).layers) == 2


def test_ranks_keep_missing_sublayers():
    layers = read(NEMOTRON, hybrid_override_pattern="*-*-", num_hidden_layers=4).split(Share(0, 2)).layers
    assert [isinstance(each.attention, NoSublayer) for each in layers] == [False, True] * 2
    assert [isinstance(each.mlp, NoSublayer) for each in layers] == [True, False] * 2
