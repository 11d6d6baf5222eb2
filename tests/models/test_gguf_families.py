"""The metadata that llama.cpp's conversion writes for a family's config.json is read like that config.json."""

import math
import re
from dataclasses import replace
from pathlib import Path

import delta_net_gguf
import gguf
import numpy as np
import pytest
from transformers_cases import CASES, MORE_CASES, TIED, WINDOW, YARN, heads, longrope

from octavo.errors import ModelError
from octavo.models.config_file import ConfigFile
from octavo.models.gguf_config import _FAMILIES, GGUFFields, find_gguf_family, read_gguf_config
from octavo.models.gguf_file import GGUFFile, StoredArray, TensorType
from octavo.models.gguf_rope import LONG_FACTORS, ROPE_FREQUENCIES, SHORT_FACTORS
from octavo.models.gguf_weights import GGUFWeights
from octavo.models.random_weights import tiny_config
from octavo.models.registry import architecture_of
from octavo.models.rope import make_cos_sin
from octavo.models.rope_config import RopeConfig

PATH = Path("model.gguf")
BY_NAME = {case.name: case for case in (*CASES, *MORE_CASES)}
ARCHITECTURES = {
    "Llama": "llama", "Mistral": "mistral3", "Ministral3": "mistral3", "Qwen2": "qwen2", "Qwen3": "qwen3",
    "Gemma": "gemma", "Gemma2": "gemma2", "Gemma3": "gemma3", "Gemma4": "gemma4", "Phi3": "phi3", "Granite": "granite",
    "SmolLM3": "smollm3", "Olmo2": "olmo2", "Olmo3": "olmo2", "Glm4": "glm4", "Qwen2Moe": "qwen2moe",
    "Qwen3Moe": "qwen3moe", "Mixtral": "llama", "Olmoe": "olmoe", "GptOss": "gpt-oss",
    "DeepseekV2": "deepseek2", "DeepseekV3": "deepseek2", "Glm4MoeLite": "deepseek2",
    "Glm4Moe": "glm4moe", "GraniteMoe": "granitemoe", "Lfm2": "lfm2", "Lfm2Moe": "lfm2moe",
    "Qwen3_5": "qwen35", "Qwen3_5Moe": "qwen35moe", "Qwen3Next": "qwen3next", "GraniteMoeHybrid": "granitehybrid",
    "NemotronH": "nemotron_h",
}  # fmt: skip
# The configurations compared with transformers that a GGUF file can represent.
CONFIGS = {name: BY_NAME[name].full_config for name in (
    "qwen2-tied-3-per-kv", "qwen2-yarn-head-48", "qwen3-head-80", "llama-linear", "llama-biases-tied",
    "mistral-7-per-kv-head-20", "gemma-head-96-tied", "gemma2-window-tied", "phi3-short-factors",
    "phi3-long-factors-partial-7-per-kv", "phi3-window-tied-partial", "granite-7-per-kv-head-20",
    "granite-biases-yarn", "ministral3-7-per-kv", "ministral3-tied-head-80", "olmo2-7-per-kv", "olmo2-tied-head-80",
    "olmo3-every-fourth-sees-all", "olmo3-tied-head-80", "glm4-7-per-kv", "glm4-tied-head-80",
    "qwen3-moe-5-experts-of-which-3", "qwen2-moe-7-per-kv", "mixtral-3-per-kv", "olmoe-3-per-kv",
    "gpt-oss-5-experts-of-which-3", "deepseek-v2-2-of-4-groups", "deepseek-v2-lite-3-of-5",
    "deepseek-v3-yarn-choice-bias", "glm-4.5-3-of-5-groups-dense-first", "granite-moe-3-of-7",
    "gemma4-heads-of-512", "gemma4-shared-kv-double-wide", "gemma4-3-of-7-experts",
    "granite-4-h-3-of-7-experts", "granite-4-h-dense-tied-groups-biases",
    "nemotron-h-wide-heads", "nemotron-h-neighbours-of-one-kind-biases", "nemotron-3-3-of-8-experts-in-groups",
    "nemotron-3-latents-3-of-8-experts-biases",
    "gemma4-one-expert-shared-kv-embeddings", "lfm2-7-layers-3-per-kv", "lfm2-adjusted-mlp-tied-layers-listed",
    "lfm2-old-style-attention-first", "lfm2-moe-3-of-7", "lfm2-moe-5-of-12-head-80",
    "qwen3_5-5-layers-2-values-per-key", "qwen3_5-short-conv-tied",
    "qwen3_5-recurrent-last", "qwen3_5-moe-3-of-7-2-values-per-key", "qwen3_5-moe-one-expert-tied-wide-shared",
    "qwen3-next-3-of-7-2-values-per-key",
)}  # fmt: skip
_GEMMA3 = {"query_pre_attn_scalar": 32, "sliding_window": WINDOW, "rope_parameters": {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}}  # fmt: skip
CONFIGS["deepseek-v3-yarn-choice-bias"]["rope_parameters"]["mscale"] = 0.8  # files have no value of its own
CONFIGS["deepseek-v2-lite-3-of-5"]["kv_b_is_split"] = True  # as in today's files
for name, each in CONFIGS.items():
    if name.startswith(("granite-4-h", "nemotron")):
        each |= {"decay_is_stored": True, "mlp_is_fused": False}
    if "linear_num_key_heads" in each:
        is_tiled = each["architectures"][0] in delta_net_gguf.TILED
        each |= {"value_heads_are_tiled": is_tiled, "decay_is_stored": True, "delta_inputs_are_joined": False}
CONFIGS["gemma2-window-tied"] |= {"query_pre_attn_scalar": 32}  # files have no other value than head_dim
for name in ("lfm2-moe-3-of-7", "lfm2-moe-5-of-12-head-80"):
    CONFIGS[name]["tie_word_embeddings"] = True  # its files have no other head
CONFIGS |= {
    "granite-4-experts-without-mamba": tiny_config("GraniteMoeHybridForCausalLM", **heads(112, 7, 1, 16)) | {
        "layer_types": ["full_attention"] * 2, "position_embedding_type": "rope", "mlp_is_fused": False},
    "qwen3-next-of-2025": CONFIGS["qwen3-next-3-of-7-2-values-per-key"] | {"delta_inputs_are_joined": True},
    "gemma3-scaled": tiny_config("Gemma3ForCausalLM", **heads(192, 6, 2, 32), **TIED | {"num_hidden_layers": 7})
    | _GEMMA3 | {"layer_types": None},
    "smollm3": tiny_config("SmolLM3ForCausalLM", **heads(112, 7, 1, 16), num_hidden_layers=5),
    "phi3-plain": tiny_config("Phi3ForCausalLM", **heads(96, 6, 3, 16)),
    "olmo3-yarn": tiny_config("Olmo3ForCausalLM", **heads(112, 7, 1, 16)) | {
        "sliding_window": WINDOW, "num_hidden_layers": 4, "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "rope_theta": 1e4, **YARN},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "phi3-attention-factor": tiny_config("Phi3ForCausalLM", **heads(96, 6, 3, 16)) | longrope(8, 128, rope_theta=1e4),
}  # fmt: skip


def config_of(file):
    return read_gguf_config(file, *find_gguf_family(file))


def architecture_in_file(config):
    name = config["architectures"][0].removesuffix("ForCausalLM")
    has_experts = "moe" in config.get("layers_block_type", ())
    if name == "GraniteMoeHybrid" and {*config["layer_types"]} == {"full_attention"}:
        return "granitemoe"
    return ARCHITECTURES[name] + ("_moe" if name == "NemotronH" and has_experts else "")


def converted(config):
    """Return the file that llama.cpp's conversion would write, without weights; and the factors of longrope."""
    expected = architecture_of(ConfigFile(PATH, config))
    name = config["architectures"][0].removesuffix("ForCausalLM")
    architecture = architecture_in_file(config)
    ropes = config.get("rope_parameters") or {"rope_type": "default"}
    rope = dict(ropes.get("full_attention", ropes)) | dict(config.get("rope_scaling") or {})
    own_rope = expected.attentions[-1].rope or RopeConfig()
    rope.setdefault("rope_theta", config.get("rope_theta", own_rope.theta))
    kind = rope.get("type", rope.get("rope_type"))
    partial = own_rope.partial_rotary_factor
    said = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": round(config["head_dim"] * partial),
    }
    if kind in {"linear", "yarn"}:
        said |= {"rope.scaling.type": kind, "rope.scaling.factor": rope["factor"]}
    if kind == "yarn":
        said["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    said |= lfm2_keys(name, config, expected) if name.startswith("Lfm2") else own_keys(name, config, rope)
    metadata = {f"{architecture}.{key}": value for key, value in said.items()}
    metadata["general.architecture"] = architecture
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(number, len(expected.layers))
    shapes = {stored_name(names, name): shape for name, shape in expected.tensor_shapes().items()}
    factors = {LONG_FACTORS: list(rope["long_factor"]), SHORT_FACTORS: list(rope["short_factor"])} if (
        kind == "longrope") else {}  # fmt: skip
    if name == "Gemma4":
        pairs = config["global_head_dim"] // 2
        factors = {ROPE_FREQUENCIES: [1.0] * (pairs // 4) + [1e30] * (pairs - pairs // 4)}
    shapes |= {name: (len(each),) for name, each in factors.items()}
    tensors = {name: StoredArray(PATH, TensorType.F32, shape, 0, 0) for name, shape in shapes.items()}
    return GGUFFile(PATH, (PATH,), metadata, tensors), factors, expected


def stored_name(names, name):
    """Return llama.cpp's name of a tensor; of an expert's matrix the one that octavo gives its part of the tensor."""
    name = name.replace(".mamba.decay", ".mamba.A_log").replace(".mamba.dt_bias", ".mamba.dt_proj.bias")
    name = re.sub(r"^model(\.layers\.\d+\.)mlp\.(?=fc[12]_latent_proj)", r"backbone\1mixer.", name)
    if match := re.fullmatch(r"(.*\.mlp\.experts\.)(\d+)\.(.*)\.(weight|bias)", name):
        whole = names.get_name(match[1] + match[3]) or f"blk.{name.split('.')[2]}.ffn_{match[3][:-5]}_exps"
        return f"{whole}.{match[2]}.{match[4]}"
    if match := re.fullmatch(r"(.*\.self_attn\.[kv]_b_proj)\.(\d+)\.weight", name):
        return f"{names.get_name(match[1])}.{match[2]}.weight"
    if name.endswith("e_score_correction_bias"):
        return f"{names.get_name(name.removesuffix('_bias'))}.bias"
    for said, part in ((".router.scale", "ffn_gate_inp"), (".per_expert_scale", "ffn_down_exps")):
        if name.endswith(said):
            return f"blk.{name.split('.')[2]}.{part}.scale"
    if name.endswith((".sinks", ".layer_scalar")):
        return f"{names.get_name(name)}.weight"
    found = delta_net_gguf.stored_name(names, name)
    found = found or names.get_name(name.replace("model.norm.", "model.embedding_norm."), (".weight",))  # of LFM2
    return found or names.get_name(name.replace(".mlp.", ".mlp.shared_expert."), (".weight",))  # of Granite 4


def own_keys(name, config, rope):  # noqa: C901, PLR0911, PLR0912 - a case for each family
    """Return the keys that set_gguf_parameters of the family's conversion adds."""
    match name:
        case "Gemma2":
            keys = {key: config[key] for key in ("attn_logit_softcapping", "final_logit_softcapping")}
            return keys | {"attention.sliding_window": config["sliding_window"]}
        case "Gemma3":
            local = config["rope_parameters"]["sliding_attention"]["rope_theta"]
            return {"attention.sliding_window": config["sliding_window"], "rope.freq_base_swa": local}
        case "Gemma4":
            return gemma4_keys(config)
        case "Qwen3_5" | "Qwen3_5Moe" | "Qwen3Next":
            return delta_net_gguf.numbers(config)
        case "Phi3":
            original = config.get("original_max_position_embeddings", config["max_position_embeddings"])
            keys = {"rope.scaling.original_context_length": original}
            return keys | {"attention.sliding_window": config["sliding_window"] or 0}
        case "Glm4Moe":
            keys = {
                "leading_dense_block_count": config["first_k_dense_replace"],
                "expert_count": config["n_routed_experts"],
                "expert_used_count": config["num_experts_per_tok"],
                "expert_feed_forward_length": config["moe_intermediate_size"],
                "expert_shared_count": config["n_shared_experts"],
                "expert_weights_scale": config["routed_scaling_factor"],
                "expert_weights_norm": config.get("norm_topk_prob", True),
                "expert_gating_func": 2,
                "expert_group_count": config["n_group"],
                "expert_group_used_count": config["topk_group"],
            }
            return keys | {"nextn_predict_layers": 1, "block_count": config["num_hidden_layers"] + 1}
        case "Granite" | "GraniteMoe":
            return granite_keys(config)
        case "GraniteMoeHybrid":
            is_full = ["attention" in kind.removeprefix("linear_attention") for kind in config["layer_types"]]
            return granite_keys(config) | {
                "attention.head_count_kv": [config["num_key_value_heads"] * each for each in is_full],
                "expert_shared_feed_forward_length": config["shared_intermediate_size"],
                "rope.scaling.finetuned": all(is_full),
                "ssm.conv_kernel": config["mamba_d_conv"],
                "ssm.state_size": config["mamba_d_state"],
                "ssm.group_count": config["mamba_n_groups"],
                "ssm.inner_size": config["mamba_n_heads"] * config["mamba_d_head"],
                "ssm.time_step_rank": config["mamba_n_heads"],
            }
        case "Qwen2Moe" | "Qwen3Moe" | "Mixtral" | "Olmoe":
            keys = {
                "expert_count": config.get("num_experts") or config["num_local_experts"],
                "expert_used_count": config["num_experts_per_tok"],
                "expert_feed_forward_length": config.get("moe_intermediate_size"),
                "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
            }
            return {key: value for key, value in keys.items() if value is not None}
        case "DeepseekV2" | "DeepseekV3":
            rotated, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
            widths = {"key_length": config["qk_nope_head_dim"] + rotated, "value_length": config["v_head_dim"]}
            keys = {f"attention.{key}": width for key, width in widths.items()}
            if config.get("kv_b_is_split"):  # since April 2025
                keys = {f"attention.{key}_mla": width for key, width in widths.items()}
                keys |= {"attention.key_length": rank + rotated, "attention.value_length": rank}
                keys |= {"attention.head_count_kv": 1}
            keys |= {
                "attention.kv_lora_rank": rank,
                "attention.q_lora_rank": config["q_lora_rank"],
                "rope.dimension_count": rotated,
                "leading_dense_block_count": config.get("first_k_dense_replace", 0),
                "expert_count": config["n_routed_experts"],
                "expert_used_count": config["num_experts_per_tok"],
                "expert_feed_forward_length": config["moe_intermediate_size"],
                "expert_shared_count": config["n_shared_experts"],
                "expert_weights_scale": config["routed_scaling_factor"],
                "expert_weights_norm": config.get("norm_topk_prob"),
                "expert_gating_func": 2 if name == "DeepseekV3" else 1,
                "expert_group_count": config["n_group"],
                "expert_group_used_count": config["topk_group"],
                "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"] / 10 if "mscale_all_dim" in rope else None,
            }
            return {key: value for key, value in keys.items() if value is not None}
        case "NemotronH":
            return nemotron_keys(config)
        case "GptOss":
            return {
                "expert_count": config["num_local_experts"],
                "expert_used_count": config["num_experts_per_tok"],
                "expert_feed_forward_length": config["intermediate_size"],
                "attention.sliding_window": config["sliding_window"],
            }
        case "Olmo3":
            kinds = config.get("layer_types") or [
                "sliding_attention" if (layer + 1) % 4 else "full_attention"
                for layer in range(config["num_hidden_layers"])
            ]
            window = config["sliding_window"] or 4096
            pattern = [kind == "sliding_attention" for kind in kinds]
            return {"attention.sliding_window": window, "attention.sliding_window_pattern": pattern}
        case "Ministral3":
            beta, log_multiplier = rope["llama_4_scaling_beta"], rope["mscale_all_dim"]
            return {"rope.scaling.yarn_log_multiplier": log_multiplier, "attention.temperature_scale": beta}
        case _:
            return {}


def granite_keys(config):
    experts = {
        "expert_count": config.get("num_local_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
    }
    return {key: value for key, value in experts.items() if value} | {
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
    }


def nemotron_keys(config):
    kinds = config.get("layers_block_type") or config["hybrid_override_pattern"]
    is_full, is_moe = (
        [each in {"*", "attention", "full_attention"} for each in kinds],
        [each == "moe" for each in kinds],
    )
    sizes = [config["intermediate_size"] * (each == "-") for each in kinds]
    keys = {
        "attention.head_count_kv": [config["num_key_value_heads"] * each for each in is_full],
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        "feed_forward_length": sizes,
        "ssm.conv_kernel": config.get("conv_kernel", 4),
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "ssm.time_step_rank": config["mamba_num_heads"],
    }
    if not any(is_moe):
        return keys
    return keys | {
        "feed_forward_length": [config["moe_intermediate_size"] * each for each in is_moe],
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_shared_count": 1,
        **({"moe_latent_size": config["moe_latent_size"]} if "moe_latent_size" in config else {}),
        "expert_weights_norm": True,
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
    }


def lfm2_keys(name, config, expected):
    attentions = [getattr(layer.attention, "num_kv_heads", 0) for layer in expected.layers]
    keys = {
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count_kv": attentions,
        "attention.layer_norm_rms_epsilon": config["norm_eps"],
        "shortconv.l_cache": config.get("conv_L_cache", 3),
    }
    if name == "Lfm2":
        return keys | {"feed_forward_length": expected.layers[0].mlp.intermediate_size}
    return keys | {
        "leading_dense_block_count": config["num_dense_layers"],
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_weights_scale": config.get("routed_scaling_factor"),
        "expert_gating_func": 2,
    }


def gemma4_keys(config):
    width, inner, kinds = config["global_head_dim"], config["intermediate_size"], config["layer_types"]
    own = len(kinds) - config["num_kv_shared_layers"]
    is_near = [kind == "sliding_attention" for kind in kinds]
    heads = config["num_key_value_heads"]
    full_heads = config["num_global_key_value_heads"] if config.get("attention_k_eq_v") else heads
    keys = {f"attention.{part}_length": width for part in ("key", "value")}
    keys |= {f"attention.{part}_length_swa": config["head_dim"] for part in ("key", "value")}
    keys |= {
        "rope.dimension_count": width,
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": is_near,
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "attention.head_count_kv": [heads if near else full_heads for near in is_near],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "final_logit_softcapping": config["final_logit_softcapping"],
    }
    if config["use_double_wide_mlp"]:
        keys["feed_forward_length"] = [inner] * own + [2 * inner] * (len(kinds) - own)
    if config["enable_moe_block"]:
        keys |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["top_k_experts"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    return keys


@pytest.mark.parametrize("name", CONFIGS)
def test_converted_gguf_metadata_reads_like_config_json(name, monkeypatch):
    file, factors, expected = converted(CONFIGS[name])
    monkeypatch.setattr(GGUFFields, "factors", lambda _, tensor: factors[tensor])
    read = architecture_of(ConfigFile(PATH, config_of(file)))
    assert read.layers == expected.layers
    same = {"dtype": "", "bos_token_id": None, "eos_token_ids": ()}
    assert replace(read, **same) == replace(expected, **same)
    assert set(GGUFWeights(file).names()) == set(expected.tensor_shapes())


OLMO3_YARN = {  # of Olmo-3-7B-Instruct
    "rope_type": "yarn", "rope_theta": 500_000.0, "factor": 8.0, "original_max_position_embeddings": 8192,
    "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip


def with_keys(config, **said):
    """Return the converted file with further keys of its architecture."""
    file, _, expected = converted(config)
    architecture = file.metadata["general.architecture"]
    return replace(file, metadata=file.metadata | {f"{architecture}.{key}": said[key] for key in said}), expected


def ropes_of(file):
    """Return the rotary embeddings of a file's layers."""
    return [layer.attention.rope for layer in architecture_of(ConfigFile(PATH, config_of(file))).layers]


def test_olmo3_yarn_keys_give_rope_of_config_json(caplog):
    local = {"rope_type": "default", "rope_theta": 500_000.0}
    config = CONFIGS["olmo3-yarn"] | {"rope_parameters": {"full_attention": OLMO3_YARN, "sliding_attention": local}}
    said = {f"rope.scaling.yarn_{name}": OLMO3_YARN[key] for name, key in (
        ("attn_factor", "attention_factor"), ("beta_fast", "beta_fast"), ("beta_slow", "beta_slow"))}  # fmt: skip
    said["rope.scaling.yarn_attn_factor"] = float(np.float32(said["rope.scaling.yarn_attn_factor"]))
    file, expected = with_keys(config, **said, **{"rope.scaling.yarn_ext_factor": 1.0})
    assert ropes_of(file) == [layer.attention.rope for layer in expected.layers]
    assert not caplog.messages


@pytest.mark.parametrize("log_multiplier", [None, 0.7, 1.0])
@pytest.mark.parametrize("attn_factor", [None, 0.8])
@pytest.mark.parametrize("name", ["qwen2-yarn-head-48", "ministral3-7-per-kv", "mistral-7-per-kv-head-20"])
def test_yarn_rope_matches_llama_cpp(name, attn_factor, log_multiplier, caplog):
    """Only llama.cpp's mistral3 reads the betas and the log multiplier; no family reads yarn_attn_factor and
    yarn_ext_factor.
    """
    reads = "istral" in name
    said = {"type": "yarn", "factor": 4.0, "original_context_length": 256, "yarn_ext_factor": 0.5, "yarn_beta_slow": 2}
    said |= {"yarn_attn_factor": 7.0, "yarn_beta_fast": 20.0}
    if reads:
        said["yarn_log_multiplier"] = log_multiplier or 0.0
    if attn_factor is not None:
        said["attn_factor"] = attn_factor
    file, _ = with_keys(CONFIGS[name], **{f"rope.scaling.{key}": value for key, value in said.items()})
    betas = (20.0, 2.0) if reads else (32.0, 1.0)
    multiplier = (log_multiplier or 0.0) if reads else 0.0
    for rope in set(ropes_of(file)):
        head_dim = CONFIGS[name]["head_dim"]
        expected = llama_cpp_yarn(rope.theta, head_dim, 4.0, 256, multiplier, attn_factor or 1.0, betas)
        np.testing.assert_allclose(make_cos_sin(rope, head_dim, 64).numpy(), expected, rtol=0, atol=1e-4)
    told = "\n".join(caplog.messages)
    assert ("yarn_attn_factor = 7" in told, "yarn_ext_factor = 0.5" in told) == (True, True)
    assert ("yarn_beta_fast" in told, "yarn_beta_slow" in told) == (not reads, not reads)
    assert len(caplog.messages) == len(set(caplog.messages)), "each is logged once"


def llama_cpp_yarn(theta, head_dim, factor, original, log_multiplier, rope_attn_factor, betas):
    """Follow `llama_context`, `ggml_rope_yarn_corr_dims` and `rope_yarn` line by line, in float64."""
    scale = 1.0 if factor <= 1.0 else 0.1 * math.log(factor) + 1.0
    if log_multiplier:
        scale /= 0.1 * log_multiplier * math.log(factor) + 1.0
    attn_factor = scale / (1.0 + 0.1 * math.log(factor)) * rope_attn_factor
    ends = [head_dim * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(theta)) for beta in betas]
    low, high = max(0, math.floor(ends[0])), min(head_dim - 1, math.ceil(ends[1]))
    pair = np.arange(head_dim // 2)
    extrapolated = np.arange(64)[:, None] * theta ** (-2.0 * pair / head_dim)
    mix = 1 - np.clip((pair - low) / max(0.001, high - low), 0, 1)
    angles = extrapolated / factor * (1 - mix) + extrapolated * mix
    magnitude = attn_factor * (1.0 + 0.1 * math.log(factor))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * magnitude


def test_yarn_keys_without_yarn_are_ignored_or_refused():
    file, expected = with_keys(
        CONFIGS["qwen3-head-80"], **{"rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.attn_factor": 1.0}
    )
    assert ropes_of(file) == [layer.attention.rope for layer in expected.layers]
    file, _ = with_keys(CONFIGS["qwen3-head-80"], **{"rope.scaling.attn_factor": 1.5})
    with pytest.raises(ModelError, match="attn_factor"):
        config_of(file)


def test_configs_cover_every_gguf_family():
    assert {*map(architecture_in_file, CONFIGS.values())} == {*_FAMILIES}


def test_granite_4_without_mamba_is_read_as_granite():
    """Its conversion also writes the keys of Mamba-2, and the MLP's size as that of a shared expert."""
    said = {"ssm.conv_kernel": 4, "ssm.inner_size": 280, "expert_shared_feed_forward_length": 88, "expert_count": 0}
    file, expected = with_keys(CONFIGS["granite-7-per-kv-head-20"], **said)
    read = architecture_of(ConfigFile(PATH, config_of(file)))
    assert read.name == "GraniteForCausalLM"
    assert {each.mlp.intermediate_size for each in read.layers} == {88}
    assert [each.attention for each in read.layers] == [each.attention for each in expected.layers]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("attention.head_count_kv", [0, 0, 0, 0, 0], "head_count_kv = 0: must be an integer from 1"),
        ("attention.head_count_kv", [0, 3, 0, -1, 0], "must have 5 integers of at least 0"),
        ("ssm.inner_size", 100, "inner_size = 100: must be a multiple of ssm.time_step_rank = 12"),
        ("ssm.group_count", 5, "mamba_n_groups = 5: must divide mamba_n_heads = 12"),
        ("ssm.dt_b_c_rms", True, "dt_b_c_rms = True: octavo does not support this"),
    ],
)
def test_other_granite_hybrid_metadata_is_refused(key, value, words):
    file, _ = with_keys(CONFIGS["granite-4-h-3-of-7-experts"], **{key: value})
    with pytest.raises(ModelError, match=words):
        architecture_of(ConfigFile(PATH, config_of(file)))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("attention.head_count_kv", [0, 0, 2, 0, 3], "must be the same number in all layers with attention"),
        ("attention.head_count_kv", [0, 0, 2, 0, -2], "must have 5 integers of at least 0"),
        ("attention.head_count_kv", [0, 2], "must have 5 integers of at least 0"),
        ("attention.head_count_kv", 0, "head_count_kv = 0: must be an integer from 1"),
        ("attention.sliding_window", 64, "sliding_window = 64: octavo does not support this"),
        ("shortconv.l_cache", None, "shortconv.l_cache is null"),
        ("expert_gating_func", 1, "octavo supports 2 .sigmoid. for this family"),
    ],
)
def test_other_lfm2_metadata_is_refused(key, value, words):
    file, *_ = converted(CONFIGS["lfm2-moe-3-of-7"])
    file = replace(file, metadata=file.metadata | {f"lfm2moe.{key}": value})
    with pytest.raises(ModelError, match=words):
        config_of(file)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("attention.value_length_swa", 8, "value_length_swa = 8: must be attention.key_length_swa = 20"),
        ("rope.dimension_count_swa", 10, "dimension_count_swa = 10: must be attention.key_length_swa = 20"),
        ("feed_forward_length", [176] * 6 + [352], "feed_forward_length.*: must double in the last 3 layers only"),
        ("feed_forward_length", [176, 352], "feed_forward_length.*: must have 7 integers of at least 1"),
        ("attention.head_count_kv", [1, 0, 1, 1, 1, 1, 1], "head_count_kv.*: must have 7 integers of at least 1"),
        ("attention.shared_kv_layers", 9, "must double in the last 9 layers only"),
        ("expert_gating_func", 2, "expert_gating_func = 2: octavo does not support this"),
    ],
)
def test_other_gemma4_metadata_is_refused(key, value, words, monkeypatch):
    file, factors, _ = converted(CONFIGS["gemma4-shared-kv-double-wide"])
    monkeypatch.setattr(GGUFFields, "factors", lambda _, tensor: factors[tensor])
    file = replace(file, metadata=file.metadata | {f"gemma4.{key}": value})
    with pytest.raises(ModelError, match=words):
        architecture_of(ConfigFile(PATH, config_of(file)))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("ssm.inner_size", 100, "inner_size = 100: must be a multiple of ssm.time_step_rank = 6"),
        ("ssm.group_count", 4, "linear_num_value_heads = 6: must be a multiple of linear_num_key_heads = 4"),
        ("attention.recurrent_layers", [True, False], "recurrent_layers.*: must have 5 booleans, one for each layer"),
        ("attention.recurrent_layers", [True] * 5, "recurrent_layers = True: must have 5 booleans"),
        ("attention.recurrent_layers", [1, 1, 1, 0, 1], "recurrent_layers.*: must have 5 booleans"),
        ("attention.scale", 2.0, "attention.scale = 2.0: octavo does not support this"),
        ("expert_count", 4, "expert_count = 4: octavo does not support this"),
    ],
)
def test_other_metadata_of_delta_nets_is_refused(key, value, words):
    file, _ = with_keys(CONFIGS["qwen3_5-5-layers-2-values-per-key"], **{key: value})
    with pytest.raises(ModelError, match=words):
        architecture_of(ConfigFile(PATH, config_of(file)))


def test_recurrent_layers_may_include_multi_token_prediction():
    kinds = [True, False, True, False]
    file, expected = with_keys(CONFIGS["qwen3_5-recurrent-last"], **{"attention.recurrent_layers": kinds})
    assert architecture_of(ConfigFile(PATH, config_of(file))).layers == expected.layers


@pytest.mark.parametrize("divisors", [None, [1.0, 2.0], [1.0] * 8, [1e30] * 16, [1.0] * 4 + [8.0] * 12])
def test_other_gemma4_rope_factors_are_refused(divisors, monkeypatch):
    file, _, _ = converted(CONFIGS["gemma4-shared-kv-double-wide"])
    monkeypatch.setattr(GGUFFields, "factors", lambda *_: divisors)
    if divisors is None:
        file = replace(file, tensors={name: each for name, each in file.tensors.items() if name != ROPE_FREQUENCIES})
    with pytest.raises(ModelError, match=r"rope_freqs\.weight must have 16 numbers: 1 for rotated pairs"):
        config_of(file)


@pytest.mark.parametrize(("turned", "pairs"), [(4, 16), (1, 5), (13, 26), (5, 7), (9, 11), (16, 16)])
def test_gemma4_rope_factors_rotate_their_pairs(turned, pairs, monkeypatch):
    width = 2 * pairs
    config = CONFIGS["gemma4-shared-kv-double-wide"] | {"global_head_dim": width}
    file, _, _ = converted(config)
    monkeypatch.setattr(GGUFFields, "factors", lambda *_: [1.0] * turned + [1e30] * (pairs - turned))
    rope = ropes_of(file)[1]
    sines = make_cos_sin(rope, width, 3)[2, pairs:]
    assert sines.count_nonzero() == turned
    assert not sines[turned:].any()
