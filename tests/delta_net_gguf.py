"""GGUF metadata and tensors of models with gated delta nets, as llama.cpp's conversion writes them."""

import re

import gguf
import numpy as np
from safetensors.torch import load_file

ARCHITECTURES = {
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "Qwen3NextForCausalLM": "qwen3next",
}
TILED = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.\d+(\..*)")


def numbers(config):
    """Return the architecture's keys that other architectures lack."""
    num_heads, head_dim = config["linear_num_value_heads"], config["head_dim"]
    rope = config.get("rope_parameters", config)
    keys = {
        "ssm.conv_kernel": config.get("linear_conv_kernel_dim", 4),
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": num_heads,
        "ssm.inner_size": num_heads * config["linear_value_head_dim"],
        "full_attention_interval": config.get("full_attention_interval", 4),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 0.25)),
    }
    if config["architectures"][0] in TILED:
        keys["rope.dimension_sections"] = [11, 11, 10, 0]
    if "num_experts" in config:
        keys |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
        }
    if config.get("layer_types"):
        keys["attention.recurrent_layers"] = [kind == "linear_attention" for kind in config["layer_types"]]
    return keys


def tensors(directory, config):
    """Return float32 by llama.cpp's names."""
    architecture = ARCHITECTURES[config["architectures"][0]]
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    found = {name: each.float().numpy() for name, each in load_file(directory / "model.safetensors").items()}
    for name, array in _with_whole_experts(found).items():
        if name.endswith(".in_proj_qkvz.weight"):
            layer = f"blk.{name.split('.')[2]}"
            inputs, gates = _apart(config, array)
            yield from ((f"{layer}.attn_qkv.weight", inputs), (f"{layer}.attn_gate.weight", gates))
        else:
            yield stored_name(names, name), _converted(config, name, array)


def stored_name(names, name):
    """Return llama.cpp's name of a tensor."""
    if name.endswith(".dt_bias"):
        return f"blk.{name.split('.')[2]}.ssm_dt.bias"
    return names.get_name(name, (".weight", ".bias"))


def _with_whole_experts(tensors):
    """Put each part of a layer's experts into one tensor, without joining gates and rows of `up`."""
    whole, experts = {}, {}
    for name, array in tensors.items():
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(match[1] + match[2], []).append(array)
        elif name.endswith(".gate_up_proj"):
            for part, rows in zip(("gate", "up"), np.split(array, 2, axis=1), strict=True):
                whole[f"{name.replace('gate_up', part)}.weight"] = rows
        else:
            whole[f"{name}.weight" if name.endswith(".down_proj") else name] = array
    return whole | {name: np.stack(each) for name, each in experts.items()}


def _apart(config, array):
    """Return the rows of queries, keys and values, then the gates'. They are stored together for each key head."""
    num_keys, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    size = config["linear_num_value_heads"] // num_keys * config["linear_value_head_dim"]
    heads = array.reshape(num_keys, -1, array.shape[1])
    parts = np.split(heads, np.cumsum((key_dim, key_dim, size)), axis=1)
    *inputs, gates = (part.reshape(-1, array.shape[1]) for part in parts)
    return np.concatenate(inputs), gates


def _converted(config, name, array):
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    num_queries = 2 * num_keys * config["linear_key_head_dim"]
    if name.endswith("norm.weight") and ".linear_attn." not in name:
        return array + 1
    if name.endswith(".A_log"):
        array = -np.exp(array)
    if name.endswith((".conv1d.weight", ".shared_expert_gate.weight")):
        array = array.squeeze()  # llama.cpp stores no sizes of 1
    if config["architectures"][0] not in TILED:
        return array

    def tiled(values):
        groups = values.reshape(num_keys, num_values // num_keys, -1, *values.shape[1:])
        return groups.swapaxes(0, 1).reshape(values.shape)

    match name.rpartition(".linear_attn.")[2].removesuffix(".weight"):
        case "in_proj_qkv" | "conv1d":
            return np.concatenate((array[:num_queries], tiled(array[num_queries:])))
        case "in_proj_z" | "in_proj_b" | "in_proj_a" | "A_log" | "dt_bias":
            return tiled(array)
        case "out_proj":
            return np.ascontiguousarray(tiled(array.T).T)
    return array
