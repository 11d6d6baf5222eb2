"""What llama.cpp's conversion writes of each family's config.json is read as that config.json is."""

from dataclasses import replace
from pathlib import Path

import gguf
import pytest
from transformers_cases import CASES, TIED, WINDOW, YARN, heads, longrope

from octavo.models.config_file import ConfigFile
from octavo.models.gguf_config import _FAMILIES, LONG_FACTORS, SHORT_FACTORS, GGUFFields, read_gguf_config
from octavo.models.gguf_file import GGUFFile, StoredArray, TensorType
from octavo.models.gguf_weights import GGUFWeights
from octavo.models.random_weights import tiny_config
from octavo.models.registry import architecture_of

PATH = Path("model.gguf")
BY_NAME = {case.name: case for case in CASES}
ARCHITECTURES = {
    "Llama": "llama", "Mistral": "mistral3", "Ministral3": "mistral3", "Qwen2": "qwen2", "Qwen3": "qwen3",
    "Gemma": "gemma", "Gemma2": "gemma2", "Gemma3": "gemma3", "Phi3": "phi3", "Granite": "granite",
    "SmolLM3": "smollm3", "Olmo2": "olmo2", "Olmo3": "olmo2", "Glm4": "glm4",
}  # fmt: skip
# Of those that transformers is asked of, the ones that a GGUF file can say.
CONFIGS = {name: BY_NAME[name].full_config for name in (
    "qwen2-tied-3-per-kv", "qwen2-yarn-head-48", "qwen3-head-80", "llama-linear", "llama-biases-tied",
    "mistral-7-per-kv-head-20", "gemma-head-96-tied", "gemma2-window-tied", "phi3-short-factors",
    "phi3-long-factors-partial-7-per-kv", "phi3-window-tied-partial", "granite-7-per-kv-head-20",
    "granite-biases-yarn", "ministral3-7-per-kv", "ministral3-tied-head-80", "olmo2-7-per-kv", "olmo2-tied-head-80",
    "olmo3-every-fourth-sees-all", "olmo3-tied-head-80", "glm4-7-per-kv", "glm4-tied-head-80",
)}  # fmt: skip
_GEMMA3 = {"query_pre_attn_scalar": 32, "sliding_window": WINDOW, "rope_parameters": {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}}  # fmt: skip
CONFIGS["gemma2-window-tied"] |= {"query_pre_attn_scalar": 32}  # no file says another one than head_dim
CONFIGS |= {
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


def converted(config):
    """Return the file that llama.cpp's conversion would write, without its numbers; and the factors of longrope."""
    expected = architecture_of(ConfigFile(PATH, config))
    name = config["architectures"][0].removesuffix("ForCausalLM")
    architecture = ARCHITECTURES[name]
    ropes = config.get("rope_parameters") or {"rope_type": "default"}
    rope = dict(ropes.get("full_attention", ropes)) | dict(config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", expected.layers[-1].attention.rope.theta))
    kind = rope.get("type", rope.get("rope_type"))
    partial = expected.layers[-1].attention.rope.partial_rotary_factor
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
    said |= own_keys(name, config, rope)
    metadata = {f"{architecture}.{key}": value for key, value in said.items()}
    metadata["general.architecture"] = architecture
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], len(expected.layers))
    shapes = {names.get_name(name, (".weight", ".bias")): shape for name, shape in expected.tensor_shapes().items()}
    factors = {LONG_FACTORS: list(rope["long_factor"]), SHORT_FACTORS: list(rope["short_factor"])} if (
        kind == "longrope") else {}  # fmt: skip
    shapes |= {name: (len(each),) for name, each in factors.items()}
    tensors = {name: StoredArray(PATH, TensorType.F32, shape, 0, 0) for name, shape in shapes.items()}
    return GGUFFile(PATH, (PATH,), metadata, tensors), factors, expected


def own_keys(name, config, rope):  # noqa: PLR0911 - a case for each family
    """Return what set_gguf_parameters of the family's conversion adds."""
    match name:
        case "Gemma2":
            keys = {key: config[key] for key in ("attn_logit_softcapping", "final_logit_softcapping")}
            return keys | {"attention.sliding_window": config["sliding_window"]}
        case "Gemma3":
            local = config["rope_parameters"]["sliding_attention"]["rope_theta"]
            return {"attention.sliding_window": config["sliding_window"], "rope.freq_base_swa": local}
        case "Phi3":
            original = config.get("original_max_position_embeddings", config["max_position_embeddings"])
            keys = {"rope.scaling.original_context_length": original}
            return keys | {"attention.sliding_window": config["sliding_window"] or 0}
        case "Granite":
            return {
                "attention.scale": config["attention_multiplier"],
                "embedding_scale": config["embedding_multiplier"],
                "residual_scale": config["residual_multiplier"],
                "logit_scale": config["logits_scaling"],
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


@pytest.mark.parametrize("name", CONFIGS)
def test_what_conversion_writes_is_read_as_config_json_is(name, monkeypatch):
    file, factors, expected = converted(CONFIGS[name])
    monkeypatch.setattr(GGUFFields, "factors", lambda _, tensor: factors[tensor])
    read = architecture_of(ConfigFile(PATH, read_gguf_config(file)))
    assert read.layers == expected.layers
    same = {"dtype": "", "bos_token_id": None, "eos_token_ids": ()}
    assert replace(read, **same) == replace(expected, **same)
    assert set(GGUFWeights(file).names()) == set(expected.tensor_shapes())


def test_every_family_is_tried():
    assert {ARCHITECTURES[config["architectures"][0].removesuffix("ForCausalLM")] for config in CONFIGS.values()} == {
        *_FAMILIES
    }
