"""Configurations for which octavo must give the tokens of transformers, and changes of the oracle's computation.

Both key styles of config.json occur. Seeds are picked (by trying 0, 1, 2, ...) so that in every step of every prompt
the two best logits are at least as far apart as the test requires, and no long prompt gets a short loop.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from octavo.models.random_weights import tiny_config

VOCAB_SIZE = 499  # odd on purpose
PROMPT_LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 40, 47, 64, 65, 90, 128, 129, 177, 256, 301, 400, 513, 700)
WINDOW = 37


def make_prompts(seed: int) -> list[list[int]]:
    """Return 24 random prompts in an order that mixes long and short."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]
    draw.shuffle(prompts)
    return prompts


@dataclass(frozen=True)
class Case:
    """One configuration. altered: names of features that must change the tokens if they are altered in the oracle.

    tolerance: of logits, relative to the largest.
    """

    name: str
    family: str
    seed: int
    config: dict[str, Any]
    altered: tuple[str, ...]
    altered_logits: tuple[str, ...] = ()  # features that change the logits but no greedy token
    max_model_len: int | None = None
    tolerance: float = 2e-5

    @property
    def full_config(self) -> dict[str, Any]:
        config = tiny_config(f"{self.family}ForCausalLM", vocab_size=VOCAB_SIZE, intermediate_size=176)
        if "rope_theta" in self.config:  # the style before transformers 5
            config["torch_dtype"] = config.pop("dtype")
            del config["rope_parameters"]
        return config | self.config


def heads(hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, int]:
    return {
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
    }


def equal_heads(hidden_size: int, num_heads: int) -> dict[str, int]:
    return {"hidden_size": hidden_size, "num_attention_heads": num_heads, "num_key_value_heads": num_heads}


# Wide enough that the next token is rarely the last one again, as tied random weights tend to choose.
TIED = {"tie_word_embeddings": True, "intermediate_size": 512, "num_hidden_layers": 3}
CONV, FULL = "conv", "full_attention"
YARN = {"factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

# Gemma 4 does not divide scores, so their rounding has more effect. In the cases with this tolerance, float32 logits of
# transformers differ from its float64 logits by up to 6e-5.
ROUNDED_SCORES = 1e-4
GEMMA4_DENSE = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}
GEMMA4_SMALL = {
    "enable_moe_block": False,
    "num_hidden_layers": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"],
}
GRANITE = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.1,
    "logits_scaling": 1.5,
}
SCALED_QUERIES = {
    "rope_parameters": {
        "type": "yarn",
        "rope_theta": 1e4,
        "factor": 16.0,
        "original_max_position_embeddings": 128,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.3,
    }
}


def longrope(num_pairs: int, original: int, **numbers: float) -> dict[str, Any]:
    """Return two kinds of factors for each pair, which differ much."""
    return {
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope",
            "short_factor": [1.0 + 0.1 * index for index in range(num_pairs)],
            "long_factor": [2.0 + 0.7 * index for index in range(num_pairs)],
            **numbers,
        },
    }


CASES = (
    Case(
        "qwen2-tied-3-per-kv",
        "Qwen2",
        2,
        heads(192, 6, 2, 32) | TIED | {"rope_theta": 1e6},
        ("bias", "grouping", "tied", "theta"),
    ),
    Case(
        "qwen2-yarn-head-48",
        "Qwen2",
        0,
        heads(128, 4, 2, 48) | {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", **YARN}},
        ("scaling", "bias", "grouping"),
    ),
    Case(
        "qwen2-window-upper-layers",
        "Qwen2",
        0,
        heads(128, 8, 2, 16)
        | {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        ("window", "bias", "grouping"),
    ),
    Case(
        "qwen2-window-layer-types",
        "Qwen2",
        1,
        heads(96, 4, 2, 24)
        | {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        ("window", "layer_types"),
    ),
    Case("qwen3-head-80", "Qwen3", 5, heads(160, 4, 2, 80), ("qk_norm", "grouping")),
    Case(
        "qwen3-tied-bias-8-per-kv",
        "Qwen3",
        10,
        heads(192, 8, 1, 32) | TIED | {"attention_bias": True, "rope_theta": 1e6},
        ("qk_norm", "bias", "tied"),
    ),
    Case(
        "qwen3-yarn-untruncated",
        "Qwen3",
        1,
        heads(96, 6, 3, 32)
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                **YARN,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "truncate": False,
            }
        },
        ("scaling", "truncate", "mscale", "grouping"),
    ),
    Case("llama-1-per-kv-head-96", "Llama", 0, heads(192, 2, 2, 96) | {"rope_theta": 1e4}, ("grouping", "theta")),
    Case("llama-llama3", "Llama", 3, heads(128, 4, 2, 64) | {"rope_parameters": LLAMA3}, ("scaling", "grouping")),
    Case(
        "llama-linear",
        "Llama",
        0,
        heads(96, 6, 3, 16) | {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
        ("scaling", "grouping"),
    ),
    Case(
        "llama-biases-tied",
        "Llama",
        0,
        heads(192, 8, 2, 24) | TIED | {"attention_bias": True, "mlp_bias": True},
        ("bias", "grouping", "tied"),
    ),
    Case(
        "llama-yarn-6-per-kv",
        "Llama",
        1,
        heads(96, 6, 1, 48) | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN}},
        ("scaling",),
    ),
    Case(
        "mistral-window-5-per-kv",
        "Mistral",
        0,
        heads(160, 10, 2, 16) | {"sliding_window": WINDOW, "rope_theta": 1e4},
        ("window", "grouping"),
    ),
    Case(
        "gemma-7-per-kv-old-style",
        "Gemma",
        0,
        heads(112, 7, 1, 20) | {"hidden_act": "gelu", "rope_theta": 1e4, "num_hidden_layers": 3},
        ("gelu", "embedding_scale", "norm_offset"),
    ),
    Case(
        "gemma-head-80-bias", "Gemma", 2, heads(160, 4, 2, 80) | {"attention_bias": True}, ("gelu", "bias", "grouping")
    ),
    Case(
        "gemma2-head-80-layer-types",
        "Gemma2",
        8,
        heads(160, 4, 2, 80) | {"layer_types": ["full_attention", "sliding_attention"]},
        ("wide_window", "layer_types", "attention_softcap", "after_only", "norm_offset", "theta"),
        altered_logits=("logit_softcap",),
    ),
    Case(
        "gemma2-7-per-kv-without-caps",
        "Gemma2",
        6,
        heads(112, 7, 1, 20)
        | {"attention_bias": True, "attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_theta": 1e5},
        ("wide_window", "bias", "query_scalar", "gelu"),
    ),
    Case(
        "gemma3-head-80-old-style",
        "Gemma3",
        0,
        heads(160, 4, 2, 80)
        | {
            "num_hidden_layers": 3,
            "rope_theta": 1e6,
            "rope_local_base_freq": 5e3,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "layer_types": None,
            "sliding_window_pattern": 2,
        },
        ("wide_window", "sliding_theta", "full_scaling", "after_only"),
    ),
    Case(
        "gemma3-7-per-kv-biases-and-cap",
        "Gemma3",
        5,
        heads(112, 7, 1, 20)
        | {
            "attention_bias": True,
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 4.0,
        },
        ("wide_window", "bias", "after_only", "gelu"),
        altered_logits=("logit_softcap",),
    ),
    Case("mistral-7-per-kv-head-20", "Mistral", 4, heads(112, 7, 1, 20) | {"num_hidden_layers": 3}, ("theta",)),
)


# Their seeds are not picked: comparisons of tokens skip choices that are too close.
def linear_heads(num_key_heads: int, num_value_heads: int, key_dim: int, value_dim: int) -> dict[str, int]:
    return {
        "linear_num_key_heads": num_key_heads,
        "linear_num_value_heads": num_value_heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
    }


def mamba_heads(num_heads: int, head_dim: int, state_size: int, num_groups: int) -> dict[str, int]:
    return {
        "mamba_n_heads": num_heads,
        "mamba_d_head": head_dim,
        "mamba_d_state": state_size,
        "mamba_n_groups": num_groups,
    }


def pattern(letters: str, num_heads: int, head_dim: int, state_size: int, num_groups: int) -> dict[str, Any]:
    return {
        "hybrid_override_pattern": letters,
        "num_hidden_layers": len(letters),
        "mamba_num_heads": num_heads,
        "mamba_head_dim": head_dim,
        "ssm_state_size": state_size,
        "n_groups": num_groups,
    }


MAMBA = ("decay", "taps", "mamba_gate", "mamba_inputs", "mamba_steps", "mamba_norm")
MORE_CASES = (
    Case(
        "granite-4-h-3-of-7-experts",
        "GraniteMoeHybrid",
        0,
        heads(96, 6, 3, 16)
        | GRANITE
        | mamba_heads(12, 16, 40, 1)
        | {"num_local_experts": 7, "num_experts_per_tok": 3, "num_hidden_layers": 5}
        | {"layer_types": ["mamba", "mamba", "attention", "mamba", "mamba"]},
        (*MAMBA, "mamba_skip", "granite_experts", "granite_router", "shared_mlp", "residual", "attention_scale"),
        altered_logits=("logits_scaling",),
    ),
    Case(
        "granite-4-h-dense-tied-groups-biases",
        "GraniteMoeHybrid",
        0,
        heads(64, 4, 2, 40)
        | GRANITE
        | mamba_heads(8, 16, 8, 4)
        | TIED
        | {"num_local_experts": 0, "shared_intermediate_size": 512, "mamba_proj_bias": True, "mamba_d_conv": 7}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        (*MAMBA, "mamba_bias", "conv_bias", "shared_mlp", "tied"),
    ),
    Case(
        "granite-4-h-step-limits-no-conv-bias",
        "GraniteMoeHybrid",
        0,
        heads(112, 7, 1, 16)
        | GRANITE
        | mamba_heads(2, 112, 33, 2)
        | {"num_local_experts": 0, "mamba_conv_bias": False, "mamba_d_conv": 2, "time_step_limit": [0.6, 0.75]}
        | {"attention_bias": True, "layer_types": ["full_attention", "linear_attention"]},
        ("decay", "taps", "step_limits", "mamba_inputs", "mamba_skip", "bias"),
    ),
    Case(
        "nemotron-h-wide-heads",
        "NemotronH",
        0,
        heads(96, 6, 3, 32) | pattern("M-M*-M-", 12, 16, 40, 2),
        (*MAMBA, "mamba_skip", "conv_bias", "step_bias", "up_projection", "grouping"),
    ),
    Case(
        "nemotron-h-neighbours-of-one-kind-biases",
        "NemotronH",
        0,
        heads(64, 4, 2, 40)
        | pattern("M---MM**-M", 2, 80, 7, 1)
        | {"use_bias": True, "mlp_bias": True, "conv_kernel": 7, "layer_norm_epsilon": 1e-3},
        (*MAMBA, "mamba_bias", "bias", "up_projection", "epsilon"),
    ),
    Case(
        "nemotron-3-3-of-8-experts-in-groups",
        "NemotronH",
        0,
        heads(112, 7, 1, 16)
        | pattern("", 8, 32, 33, 8)
        | {"layers_block_type": ["mamba", "moe", "linear_attention", "attention", "moe", "full_attention", "moe"]}
        | {"num_hidden_layers": 7, "n_group": 4, "topk_group": 2},
        (*MAMBA, "experts", "router", "shared_experts", "choice_bias", "groups", "routed_scale", "normalizing"),
    ),
    Case(
        "nemotron-3-step-limit-every-kind",
        "NemotronH",
        0,
        heads(160, 4, 4, 24)
        | pattern("E*-M", 3, 48, 16, 3)
        | {"use_conv_bias": False, "time_step_min": 0.7, "norm_topk_prob": False, "conv_kernel": 2}
        | {"num_experts_per_tok": 1, "n_routed_experts": 5},
        ("decay", "taps", "least_step", "experts", "router", "up_projection", "normalizing"),
    ),
    Case(
        "nemotron-3-latents-3-of-8-experts-biases",
        "NemotronH",
        0,
        heads(112, 7, 1, 16)
        | pattern("", 4, 32, 24, 2)
        | {"layers_block_type": ["mamba", "moe", "attention", "moe"], "moe_latent_size": 40, "mlp_bias": True}
        | {"num_hidden_layers": 4, "n_group": 2, "topk_group": 1},
        (*MAMBA, "experts", "router", "shared_experts", "choice_bias", "latents", "bias_after_latents"),
    ),
    Case(
        "granite-4-without-mamba-rope",
        "GraniteMoeHybrid",
        0,
        heads(160, 4, 2, 40)
        | GRANITE
        | mamba_heads(8, 40, 8, 1)
        | {"num_local_experts": 0, "position_embedding_type": "rope", "rope_theta": 1e4}
        | {"layer_types": ["attention"] * 3, "num_hidden_layers": 3},
        ("shared_mlp", "theta", "rotation", "residual", "attention_scale", "grouping"),
    ),
    Case(
        "lfm2-7-layers-3-per-kv",
        "Lfm2",
        0,
        heads(96, 6, 2, 16) | {"num_hidden_layers": 7, "layer_types": [CONV, CONV, FULL, CONV, FULL, CONV, CONV]},
        ("taps", "conv_gates", "conv_output", "qk_norm", "grouping"),
    ),
    Case(
        "lfm2-adjusted-mlp-tied-layers-listed",
        "Lfm2",
        0,
        heads(192, 6, 3, 32)
        | TIED
        | {"tie_word_embeddings": False, "tie_embedding": True, "layer_types": None, "full_attn_idxs": [1]}
        | {"block_auto_adjust_ff_dim": True, "block_ff_dim": 700, "block_ffn_dim_multiplier": 1.1}
        | {"block_multiple_of": 24, "conv_L_cache": 2},
        ("taps", "conv_gates", "tied"),
    ),
    Case(
        "lfm2-7-per-kv-biases-long-conv",
        "Lfm2",
        0,
        heads(112, 7, 1, 20) | {"conv_bias": True, "conv_L_cache": 7, "norm_eps": 0.02},
        ("taps", "conv_gates", "conv_bias", "bias"),
    ),
    Case(
        "lfm2-old-style-attention-first",
        "Lfm2",
        0,
        heads(160, 2, 2, 80)
        | {"rope_theta": 1e4, "num_hidden_layers": 3, "layer_types": [FULL, CONV, FULL]}
        | {"block_auto_adjust_ff_dim": True},
        ("taps", "theta", "qk_norm"),
    ),
    Case(
        "lfm2-moe-3-of-7",
        "Lfm2Moe",
        0,
        heads(96, 6, 2, 16)
        | {"num_hidden_layers": 5, "layer_types": [CONV, CONV, FULL, CONV, FULL], "num_experts": 7}
        | {"routed_scaling_factor": 2.0},
        ("taps", "conv_gates", "experts", "router", "expert_choice_bias", "normalizing", "routed_scale", "qk_norm"),
    ),
    Case(
        "lfm2-moe-one-expert-without-bias-tied",
        "Lfm2Moe",
        0,
        heads(192, 6, 3, 32)
        | TIED
        | {"layer_types": [CONV, FULL, CONV], "num_dense_layers": 0, "num_experts_per_tok": 1}
        | {"use_expert_bias": False, "norm_topk_prob": False, "conv_L_cache": 2},
        ("taps", "experts", "router", "tied"),
    ),
    Case(
        "lfm2-moe-7-per-kv-biases-long-conv",
        "Lfm2Moe",
        0,
        heads(112, 7, 1, 20)
        | {"num_hidden_layers": 3, "layer_types": [CONV, FULL, CONV], "conv_bias": True, "conv_L_cache": 8}
        | {"norm_topk_prob": False, "num_dense_layers": 2, "routed_scaling_factor": 1.5},
        ("taps", "conv_bias", "experts", "expert_choice_bias", "routed_scale"),
    ),
    Case(
        "lfm2-moe-5-of-12-head-80",
        "Lfm2Moe",
        0,
        heads(160, 2, 2, 80)
        | {"rope_theta": 1e4, "num_experts": 12, "num_experts_per_tok": 5, "layer_types": [FULL, CONV]},
        ("experts", "router", "theta", "conv_output"),
    ),
    Case(
        "qwen3_5-5-layers-2-values-per-key",
        "Qwen3_5",
        0,
        heads(96, 6, 3, 32) | linear_heads(3, 6, 16, 32) | {"num_hidden_layers": 5, "layer_types": None},
        ("decay", "taps", "delta_gate", "output_gate", "rates", "key_heads", "delta_norm"),
    ),
    Case(
        "qwen3_5-short-conv-tied",
        "Qwen3_5",
        0,
        heads(64, 4, 2, 40)
        | linear_heads(2, 2, 40, 16)
        | TIED
        | {"linear_conv_kernel_dim": 2, "layer_types": None}
        | {"full_attention_interval": 2},
        ("decay", "taps", "delta_gate", "output_gate", "tied"),
    ),
    Case(
        "qwen3_5-7-per-kv-bias-long-conv",
        "Qwen3_5",
        0,
        heads(112, 7, 1, 16)
        | linear_heads(1, 5, 8, 48)
        | {"attention_bias": True, "linear_conv_kernel_dim": 7}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ("decay", "taps", "output_gate", "bias", "partial", "qk_norm"),
    ),
    Case(
        "qwen3_5-recurrent-last",
        "Qwen3_5",
        0,
        heads(160, 2, 2, 80)
        | linear_heads(2, 8, 24, 16)
        | {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        ("decay", "rates", "key_heads", "theta"),
    ),
    Case(
        "qwen3_5-moe-3-of-7-2-values-per-key",
        "Qwen3_5Moe",
        0,
        heads(96, 6, 3, 32)
        | linear_heads(3, 6, 16, 32)
        | {"num_hidden_layers": 5, "layer_types": None, "num_experts": 7},
        ("decay", "taps", "rates", "key_heads", "experts", "router", "shared", "shared_gate"),
    ),
    Case(
        "qwen3_5-moe-one-expert-tied-wide-shared",
        "Qwen3_5Moe",
        0,
        heads(64, 4, 2, 40)
        | linear_heads(2, 2, 40, 16)
        | TIED
        | {"layer_types": None, "full_attention_interval": 2, "linear_conv_kernel_dim": 3}
        | {"num_experts": 5, "num_experts_per_tok": 1, "shared_expert_intermediate_size": 200},
        ("decay", "output_gate", "experts", "shared", "shared_gate", "tied"),
    ),
    Case(
        "qwen3_5-moe-all-experts-bias-5-values",
        "Qwen3_5Moe",
        0,
        heads(112, 7, 1, 16)
        | linear_heads(1, 5, 8, 48)
        | {"attention_bias": True, "num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 20}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ("decay", "delta_gate", "bias", "partial", "qk_norm", "experts", "router"),
    ),
    Case(
        "qwen3_5-moe-9-experts-recurrent-last",
        "Qwen3_5Moe",
        0,
        heads(160, 2, 2, 80)
        | linear_heads(2, 8, 24, 16)
        | {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"num_experts": 9, "num_experts_per_tok": 8, "moe_intermediate_size": 36},
        ("decay", "delta_norm", "theta", "router", "shared_gate"),
    ),
    Case(
        "qwen3-next-3-of-7-2-values-per-key",
        "Qwen3Next",
        0,
        heads(96, 6, 3, 32)
        | linear_heads(3, 6, 16, 32)
        | {"num_hidden_layers": 5, "layer_types": None, "num_experts": 7},
        ("decay", "taps", "joined_rates", "joined_inputs", "experts", "router", "shared", "shared_gate", "normalizing"),
    ),
    Case(
        "qwen3-next-some-dense-layers-tied",
        "Qwen3Next",
        0,
        heads(64, 4, 2, 40)
        | linear_heads(2, 2, 40, 16)
        | TIED
        | {"layer_types": None, "full_attention_interval": 2, "linear_conv_kernel_dim": 3, "num_hidden_layers": 4}
        | {"mlp_only_layers": [1], "num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": False},
        ("decay", "output_gate", "experts", "shared_gate", "normalizing", "tied"),
    ),
    Case(
        "qwen3-next-bias-5-values",
        "Qwen3Next",
        0,
        heads(112, 7, 1, 16)
        | linear_heads(1, 5, 8, 48)
        | {"attention_bias": True, "num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 20}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ("decay", "bias", "partial", "qk_norm", "experts", "joined_inputs"),
    ),
    Case(
        "qwen3-next-old-keys-4-values-per-key",
        "Qwen3Next",
        0,
        heads(160, 2, 2, 80)
        | linear_heads(2, 8, 24, 16)
        | {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "decoder_sparse_step": 2, "linear_conv_kernel_dim": 5},
        ("decay", "delta_norm", "theta", "joined_rates", "joined_inputs"),
    ),
    Case(
        "gemma-head-96-tied",
        "Gemma",
        0,
        heads(192, 2, 2, 96) | TIED,
        ("gelu", "embedding_scale", "norm_offset", "grouping", "theta", "tied"),
    ),
    Case(
        "gemma2-window-tied",
        "Gemma2",
        0,
        heads(192, 6, 2, 32) | TIED,
        ("wide_window", "attention_softcap", "query_scalar", "after_only", "gelu", "embedding_scale", "grouping"),
        altered_logits=("logit_softcap",),
    ),
    Case(
        "gemma3-window-tied",
        "Gemma3",
        0,
        heads(192, 6, 2, 32)
        | TIED
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "query_pre_attn_scalar": 24},
        (
            "wide_window",
            "layer_types",
            "sliding_theta",
            "after_only",
            "gelu",
            "embedding_scale",
            "query_scalar",
            "qk_norm",
            "norm_offset",
            "grouping",
        ),
    ),
    Case(
        "granite-7-per-kv-head-20",
        "Granite",
        0,
        heads(140, 7, 1, 20) | GRANITE,
        ("residual", "attention_scale"),
        ("logits_scaling",),
    ),
    Case(
        "granite-tied-head-80",
        "Granite",
        0,
        heads(160, 4, 2, 80) | TIED | GRANITE | {"residual_multiplier": 0.5},
        ("embedding_multiplier", "residual", "attention_scale", "tied", "grouping"),
    ),
    Case(
        "granite-biases-yarn",
        "Granite",
        0,
        heads(96, 6, 3, 32)
        | GRANITE
        | {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN},
        },
        ("embedding_multiplier", "residual", "bias", "scaling"),
    ),
    Case(
        "phi3-short-factors",
        "Phi3",
        0,
        heads(160, 2, 1, 80) | longrope(40, original=1024, rope_theta=1e4),
        ("short_factor", "grouping_fused"),
        max_model_len=1024,
    ),
    Case(
        "phi3-long-factors-partial-7-per-kv",
        "Phi3",
        0,
        heads(224, 7, 1, 32) | longrope(12, original=32, rope_theta=1e4, partial_rotary_factor=0.75),
        ("long_factor",),
    ),
    Case(
        "phi3-window-tied-partial",
        "Phi3",
        0,
        heads(192, 6, 2, 32)
        | TIED
        | {
            "sliding_window": WINDOW,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
        ("window", "tied", "partial", "grouping_fused"),
    ),
    Case(
        "smollm3-untied-7-per-kv",
        "SmolLM3",
        0,
        heads(112, 7, 1, 16) | {"num_hidden_layers": 4, "rope_theta": 1e4},
        ("rope_everywhere", "theta"),
    ),
    Case(
        "smollm3-tied-head-80-layers-listed",
        "SmolLM3",
        0,
        heads(160, 4, 2, 80) | TIED | {"no_rope_layers": [0, 1, 0]},
        ("rope_everywhere", "grouping", "tied"),
    ),
    Case(
        "smollm3-window-where-no-rope",
        "SmolLM3",
        0,
        heads(96, 6, 3, 32)
        | {
            "num_hidden_layers": 3,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "attention_bias": True,
        },
        ("rope_everywhere", "window", "bias"),
    ),
    Case(
        "ministral-layer-types-7-per-kv",
        "Ministral",
        0,
        heads(112, 7, 1, 16) | {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
        ("wide_window", "layer_types", "theta"),
    ),
    Case(
        "ministral-all-windows-head-80",
        "Ministral",
        0,
        heads(160, 4, 2, 80) | {"sliding_window": WINDOW},
        ("wide_window",),
    ),
    Case(
        "ministral-tied-wide-window",
        "Ministral",
        0,
        heads(192, 6, 2, 32) | TIED | {"sliding_window": 256},
        ("tied", "grouping"),
    ),
    Case("ministral3-7-per-kv", "Ministral3", 0, heads(112, 7, 1, 16) | SCALED_QUERIES, ("query_scale", "rope_type")),
    Case(
        "ministral3-tied-head-80",
        "Ministral3",
        0,
        heads(160, 4, 2, 80) | TIED | SCALED_QUERIES,
        ("query_scale", "tied", "grouping"),
    ),
    Case(
        "ministral3-window",
        "Ministral3",
        0,
        heads(96, 6, 3, 32) | SCALED_QUERIES | {"sliding_window": WINDOW},
        ("query_scale", "window_of_all"),
    ),
    Case("olmo2-7-per-kv", "Olmo2", 0, heads(112, 7, 1, 16), ("qk_norm", "after_only")),
    Case("olmo2-tied-head-80", "Olmo2", 0, heads(160, 4, 2, 80) | TIED, ("qk_norm", "after_only", "tied", "grouping")),
    Case(
        "olmo2-biases-linear",
        "Olmo2",
        0,
        heads(96, 6, 3, 32)
        | {"attention_bias": True, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        ("bias", "scaling"),
    ),
    Case(
        "olmo3-every-fourth-sees-all",
        "Olmo3",
        0,
        heads(96, 6, 3, 32) | {"num_hidden_layers": 4},
        ("wide_window", "qk_norm", "after_only", "grouping"),
    ),
    Case(
        "olmo3-7-per-kv-yarn-of-full-layers",
        "Olmo3",
        0,
        heads(112, 7, 1, 16)
        | {
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 1e4, **YARN},
                "sliding_attention": {"rope_type": "default", "rope_theta": 8e3},
            },
        },
        ("layer_types", "full_scaling", "sliding_theta"),
    ),
    Case("olmo3-tied-head-80", "Olmo3", 0, heads(160, 4, 2, 80) | TIED, ("wide_window", "tied")),
    Case("glm-7-per-kv", "Glm", 0, heads(112, 7, 1, 16), ("pairs", "partial", "bias")),
    Case("glm-tied-head-80", "Glm", 0, heads(160, 4, 2, 80) | TIED, ("pairs", "grouping", "tied")),
    Case(
        "glm-whole-heads-no-bias",
        "Glm",
        0,
        heads(96, 6, 3, 32) | {"attention_bias": False, "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        ("pairs", "theta"),
    ),
    Case("glm4-7-per-kv", "Glm4", 0, heads(112, 7, 1, 16), ("pairs", "partial", "bias", "behind")),
    Case("glm4-tied-head-80", "Glm4", 0, heads(160, 4, 2, 80) | TIED, ("pairs", "behind", "grouping", "tied")),
    Case(
        "qwen3-moe-5-experts-of-which-3",
        "Qwen3Moe",
        0,
        heads(96, 6, 3, 32) | {"num_experts": 5, "num_experts_per_tok": 3},
        ("experts", "router", "normalizing", "qk_norm"),
    ),
    Case(
        "qwen3-moe-dense-layers-between",
        "Qwen3Moe",
        0,
        heads(112, 7, 1, 16)
        | {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3], "num_experts": 16}
        | {"num_experts_per_tok": 4, "norm_topk_prob": False}
        | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 4},
        ("experts", "router", "normalizing", "window_of_all"),
    ),
    Case(
        "qwen3-moe-tied-one-expert",
        "Qwen3Moe",
        0,
        heads(192, 6, 2, 32) | TIED | {"num_experts_per_tok": 1, "norm_topk_prob": False},
        ("experts", "router", "tied"),
    ),
    Case(
        "qwen2-moe-7-per-kv",
        "Qwen2Moe",
        0,
        heads(112, 7, 1, 16) | {"shared_expert_intermediate_size": 80},
        ("experts", "shared", "shared_gate", "bias"),
    ),
    Case(
        "qwen2-moe-window-normalized",
        "Qwen2Moe",
        0,
        heads(96, 6, 3, 16)
        | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "norm_topk_prob": True},
        ("normalizing", "window", "shared"),
    ),
    Case("mixtral-3-per-kv", "Mixtral", 0, heads(96, 6, 2, 16), ("experts", "router", "grouping")),
    Case(
        "mixtral-window-3-of-6",
        "Mixtral",
        0,
        heads(112, 7, 1, 16)
        | {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": WINDOW, "num_hidden_layers": 3},
        ("experts", "router", "wide_window"),
    ),
    Case("olmoe-3-per-kv", "Olmoe", 0, heads(96, 6, 2, 16), ("experts", "router", "normalizing", "qk_norm")),
    Case(
        "olmoe-tied-normalized",
        "Olmoe",
        0,
        heads(160, 4, 2, 40) | TIED | {"num_experts": 12, "num_experts_per_tok": 5, "norm_topk_prob": True},
        ("experts", "normalizing", "tied"),
    ),
    Case(
        "gpt-oss-5-experts-of-which-3",
        "GptOss",
        0,
        heads(96, 6, 3, 32) | {"num_local_experts": 5, "num_experts_per_tok": 3},
        ("experts", "router", "router_bias", "expert_bias", "gate_slope", "sinks", "truncate"),
    ),
    Case(
        "gpt-oss-8-per-kv-every-layer-a-window",
        "GptOss",
        0,
        heads(128, 8, 1, 64)
        | {"num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 3, "num_local_experts": 9},
        ("experts", "wide_window", "sinks", "bias"),
    ),
    Case(
        "gpt-oss-one-expert-full-window-last",
        "GptOss",
        0,
        heads(112, 7, 1, 16) | {"num_experts_per_tok": 1, "attention_bias": False, "sliding_window": WINDOW},
        ("layer_types", "experts", "sinks"),
    ),
    Case(
        "deepseek-v2-2-of-4-groups",
        "DeepseekV2",
        0,
        equal_heads(96, 6) | {"n_routed_experts": 16, "num_hidden_layers": 3},
        ("experts", "router", "groups", "routed_scale", "shared_experts", "latent_norm", "head_keys"),
    ),
    Case(
        "deepseek-v2-lite-3-of-5",
        "DeepseekV2",
        0,
        equal_heads(112, 7)
        | {"q_lora_rank": None, "topk_method": "greedy", "n_group": None, "topk_group": None, "kv_lora_rank": 40}
        | {"n_routed_experts": 5, "num_experts_per_tok": 3, "n_shared_experts": 1, "v_head_dim": 20},
        ("experts", "router", "routed_scale", "shared_experts", "head_keys"),
    ),
    Case(
        "deepseek-v3-yarn-choice-bias",
        "DeepseekV3",
        0,
        equal_heads(96, 6)
        | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 0.8} | YARN}
        | {"num_hidden_layers": 3, "qk_rope_head_dim": 16, "head_dim": 16},
        ("experts", "choice_bias", "groups", "normalizing", "rope_pairs", "score_scale", "latent_norm"),
    ),
    Case(
        "deepseek-v3-halves-one-expert-biases",
        "DeepseekV3",
        0,
        equal_heads(112, 7)
        | {"rope_interleave": False, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1, "attention_bias": True}
        | {"norm_topk_prob": False, "first_k_dense_replace": 0},
        ("experts", "choice_bias", "rope_pairs", "routed_scale", "bias_of_latents"),
    ),
    Case(
        "glm-4.7-flash-dense-between",
        "Glm4MoeLite",
        0,
        equal_heads(160, 5)
        | {"num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"], "n_routed_experts": 9},
        ("experts", "choice_bias", "normalizing", "shared_experts", "rope_pairs"),
    ),
    Case(
        "glm-4.5-3-of-5-groups-dense-first",
        "Glm4Moe",
        0,
        heads(96, 6, 3, 32) | {"n_routed_experts": 10, "n_group": 5, "topk_group": 3, "num_hidden_layers": 3},
        ("experts", "choice_bias", "groups", "qk_norm", "shared_experts", "partial"),
    ),
    Case(
        "glm-4.5-biases-whole-heads-rotate",
        "Glm4Moe",
        0,
        heads(112, 7, 1, 16)
        | {"use_qk_norm": False, "attention_bias": True, "first_k_dense_replace": 0, "norm_topk_prob": False}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
        ("experts", "routed_scale", "bias", "theta"),
    ),
    Case(
        "granite-moe-3-of-7",
        "GraniteMoe",
        0,
        heads(96, 6, 3, 32) | {"num_local_experts": 7, "num_experts_per_tok": 3},
        ("granite_experts", "granite_router", "embedding_multiplier", "residual", "attention_scale", "logits_scaling"),
    ),
    Case(
        "granite-moe-one-expert-tied",
        "GraniteMoe",
        0,
        heads(160, 4, 2, 40) | TIED | {"num_experts_per_tok": 1},
        ("granite_experts", "granite_router", "tied"),
    ),
    Case(
        "gemma4-values-are-keys-7-per-kv",
        "Gemma4Unified",
        0,
        heads(112, 7, 1, 20)
        | {
            "global_head_dim": 52,
            "num_hidden_layers": 3,
            "layer_types": [*["sliding_attention"] * 2, "full_attention"],
        },
        ("wide_window", "sliding_theta", "rotated_share", "stream_scale", "value_norm", "score_scale", "qk_norm"),
        altered_logits=("logit_softcap",),
        tolerance=ROUNDED_SCORES,
    ),
    Case(
        "gemma4-heads-of-512",
        "Gemma4",
        0,
        heads(96, 2, 1, 256) | GEMMA4_DENSE | {"global_head_dim": 512, "attention_k_eq_v": True},
        ("wide_window", "layer_types_of_values", "rotated_share", "stream_scale", "after_only"),
        tolerance=ROUNDED_SCORES,
    ),
    Case(
        "gemma4-biases-heads-listed",
        "Gemma4",
        0,
        heads(96, 6, 3, 32)
        | GEMMA4_DENSE
        | {
            "attention_bias": True,
            "per_layer_config": {"1": {"head_dim": 24, "num_key_value_heads": 2}},
            "use_bidirectional_attention": "vision",
        },
        ("wide_window", "bias", "gelu", "embedding_scale", "value_norm"),
    ),
    Case(
        "gemma4-shared-kv-double-wide",
        "Gemma4",
        0,
        heads(112, 7, 1, 20) | GEMMA4_SMALL | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True},
        ("kv_of_first", "layer_table", "layer_projection", "layer_gate", "layer_norm", "stream_scale", "wide_window"),
        tolerance=ROUNDED_SCORES,
    ),
    Case(
        "gemma4-layer-embeddings-tied",
        "Gemma4",
        0,
        heads(160, 4, 2, 40)
        | TIED
        | {"num_hidden_layers": 4, "enable_moe_block": False, "hidden_size_per_layer_input": 24},
        ("layer_table", "layer_projection", "layer_gate", "tied"),
    ),
    Case(
        "gemma4-3-of-7-experts",
        "Gemma4",
        0,
        heads(96, 6, 3, 32)
        | GEMMA4_DENSE
        | {"enable_moe_block": True, "num_experts": 7, "attention_k_eq_v": True, "num_hidden_layers": 3}
        | {"layer_types": [*["sliding_attention"] * 2, "full_attention"]},
        ("experts", "gemma_router", "router_scale", "expert_scale", "branch_norms", "stream_scale"),
    ),
    Case(
        "gemma4-one-expert-shared-kv-embeddings",
        "Gemma4",
        0,
        heads(112, 7, 1, 20) | {"top_k_experts": 1, "num_experts": 5},
        ("experts", "gemma_router", "expert_scale", "layer_table"),
        tolerance=ROUNDED_SCORES,
    ),
    Case("glm4-three-layers", "Glm4", 0, heads(96, 6, 3, 32) | {"num_hidden_layers": 3}, ("behind", "theta")),
)
