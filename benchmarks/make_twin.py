"""Write a big twin of the built-in model: the same function with about as many weights as qwen2-0.5b.

    python benchmarks/make_twin.py OUT_DIR
    python benchmarks/make_twin.py OUT_DIR --hybrid     # a Qwen3.5 with the layers of its 0.8B model

For measurements of a memory-bound size with a model that gives real answers. It is four times as wide. So the mean in
each norm is a quarter, and every correcting factor is a power of two: nothing is rounded. All other weights are dense
zeros, which are read and multiplied like any weight: greater width, more heads, more layers after the existing ones.
The vocabulary is that of the model, so that its sibling can draft. Instead of qwen2-0.5b's larger embedding, the MLP is
larger.

In the hybrid twin, each fourth layer has attention, and the first of these layers are the built-in model's. The other
layers are gated delta nets with random weights, but their output projections are zeros. So all their work is done and
the answers do not change.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from octavo.assets import built_in_model_path

if TYPE_CHECKING:
    from torch import Tensor

WIDTH_FACTOR = 4  # its root is a power of two


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that the twin gets. The number of KV heads stays."""

    num_layers: int = 24
    intermediate_size: int = 6144
    num_heads: int = 14
    is_hybrid: bool = False

    def has_attention(self, layer: int) -> bool:
        """Return True unless the layer is recurrent."""
        return layer % 4 == 3 or not self.is_hybrid


def make_twin(directory: Path, shape: Shape = Shape()) -> Path:
    """Write the checkpoint; return the directory."""
    source = built_in_model_path()
    config = json.loads((source / "config.json").read_bytes())
    weights = load_file(source / "model.safetensors")
    directory.mkdir(parents=True, exist_ok=True)
    for path in source.glob("*.json*"):
        shutil.copyfile(path, directory / path.name)
    shutil.copyfile(source / "chat_template.jinja", directory / "chat_template.jinja")
    wider = widened(config, shape)
    embedded_weights = embedded(weights, config, wider, shape)
    if shape.is_hybrid:
        wider = hybrid_config(wider, shape)
        embedded_weights = hybrid_weights(embedded_weights, wider)
    (directory / "config.json").write_text(json.dumps(wider, indent=1) + "\n")
    save_file(embedded_weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def widened(config: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """Return the twin's config.json."""
    num_kv_heads = config["num_key_value_heads"]
    if shape.num_heads % num_kv_heads or shape.num_heads < config["num_attention_heads"]:
        raise ValueError(
            f"{shape.num_heads} heads do not hold {config['num_attention_heads']} in {num_kv_heads} groups"
        )
    return config | {
        "hidden_size": WIDTH_FACTOR * config["hidden_size"],
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "max_window_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "rms_norm_eps": config["rms_norm_eps"] / WIDTH_FACTOR,  # like the mean of squares
    }


def embedded(
    weights: dict[str, Tensor], config: dict[str, Any], wider: dict[str, Any], places: Shape
) -> dict[str, Tensor]:
    """Return the twin's weights, without those of recurrent layers.

    A norm of the hidden state divides by the root of a mean over WIDTH_FACTOR times as many dimensions; its weight
    compensates for that. The norms of q and k have as many dimensions as before, but the smaller epsilon; so q and k
    are scaled down accordingly.
    """
    hidden, inner, head_dim = wider["hidden_size"], wider["intermediate_size"], config["head_dim"]
    root = WIDTH_FACTOR**0.5
    heads = _places_of_heads(config, wider)
    dims = (heads[:, None] * head_dim + torch.arange(head_dim)).flatten()  # of queries
    num_q, num_kv = wider["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    found = {
        "model.embed_tokens.weight": _within(weights["model.embed_tokens.weight"], (config["vocab_size"], hidden)),
        "model.norm.weight": _within(weights["model.norm.weight"] / root, (hidden,)),
    }
    shapes = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "self_attn.q_proj": (num_q, hidden),
        "self_attn.k_proj": (num_kv, hidden),
        "self_attn.v_proj": (num_kv, hidden),
        "self_attn.o_proj": (hidden, num_q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    factors = dict.fromkeys(
        ["input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj"], root
    )
    sources = iter(range(config["num_hidden_layers"]))
    for layer in range(wider["num_hidden_layers"]):
        source = next(sources, None) if places.has_attention(layer) else None
        for part, shape in shapes.items():
            if part.startswith("self_attn") and not places.has_attention(layer):
                continue
            name = f"model.layers.{layer}.{part}.weight"
            if source is None:
                found[name] = torch.zeros(shape, dtype=torch.bfloat16)
                continue
            tensor = weights[f"model.layers.{source}.{part}.weight"] / factors.get(part, 1.0)
            rows = dims if part == "self_attn.q_proj" else None
            columns = dims if part == "self_attn.o_proj" else None
            found[name] = _within(tensor, shape, rows=rows, columns=columns)
    return found


def hybrid_config(wider: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """Return the config.json of a Qwen3.5 with a twin's sizes and the recurrent layers of the 0.8B model."""
    kept = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "attention_bias",
        "attention_dropout", "initializer_range", "tie_word_embeddings", "use_cache", "bos_token_id", "eos_token_id",
        "pad_token_id", "torch_dtype",
    )  # fmt: skip
    kinds = ("linear_attention", "full_attention")
    return {name: wider[name] for name in kept} | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "layer_types": [kinds[shape.has_attention(layer)] for layer in range(shape.num_layers)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_value_head_dim": 128,
        "rope_parameters": {
            "partial_rotary_factor": 1.0, "rope_theta": wider["rope_theta"], "rope_type": "default",
        },
    }  # fmt: skip


def hybrid_weights(weights: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights of a hybrid twin.

    Gates of attention have zero weights, so they halve each output, and `o_proj` compensates for that. Norms add 1 to
    their weights, so 1 is subtracted: in float32, because bfloat16 would round it.
    """
    found, head_dim = dict[str, "Tensor"](), config["head_dim"]
    for name, tensor in weights.items():
        if "norm" in name:
            found[name] = tensor.float() - 1
        elif "q_proj" in name:
            heads = tensor.view(-1, head_dim, tensor.shape[1])
            found[name] = torch.cat([heads, torch.zeros_like(heads)], dim=1).flatten(0, 1)
        else:
            found[name] = tensor * 2 if "o_proj" in name else tensor
    generator = torch.Generator().manual_seed(0)
    hidden, taps = config["hidden_size"], config["linear_conv_kernel_dim"]
    heads, width = config["linear_num_value_heads"], config["linear_value_head_dim"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * width
    shapes = {
        "in_proj_qkv.weight": (2 * keys + values, hidden), "in_proj_z.weight": (values, hidden),
        "in_proj_a.weight": (heads, hidden), "in_proj_b.weight": (heads, hidden),
        "conv1d.weight": (2 * keys + values, 1, taps),
    }  # fmt: skip
    for layer, kind in enumerate(config["layer_types"]):
        if kind != "linear_attention":
            continue
        own = {name: torch.randn(shape, generator=generator) / hidden**0.5 for name, shape in shapes.items()}
        own |= {"dt_bias": torch.ones(heads), "A_log": torch.zeros(heads), "norm.weight": torch.ones(width)}
        own["out_proj.weight"] = torch.zeros(hidden, values)
        found |= {f"model.layers.{layer}.linear_attn.{name}": tensor.bfloat16() for name, tensor in own.items()}
    return found


def _places_of_heads(config: dict[str, Any], wider: dict[str, Any]) -> Tensor:
    """Return the index in the twin of each query head: heads that share a KV head still share it."""
    num_groups, num_heads = config["num_key_value_heads"], config["num_attention_heads"]
    before, after = num_heads // num_groups, wider["num_attention_heads"] // num_groups
    return torch.tensor([head // before * after + head % before for head in range(num_heads)])


def _within(
    tensor: Tensor, shape: tuple[int, ...], *, rows: Tensor | None = None, columns: Tensor | None = None
) -> Tensor:
    """Return zeros of a shape with a tensor in the first rows and columns, or in the given ones."""
    padded = torch.zeros(shape, dtype=tensor.dtype)
    if tensor.dim() == 1:
        padded[: len(tensor)] = tensor
        return padded
    rows = torch.arange(tensor.shape[0]) if rows is None else rows
    columns = torch.arange(tensor.shape[1]) if columns is None else columns
    padded[rows[:, None], columns] = tensor
    return padded


def main() -> None:
    """Write the twin and print its size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=Shape().num_layers, help="(default: %(default)s)")
    parser.add_argument(
        "--intermediate-size", type=int, default=Shape().intermediate_size, help="(default: %(default)s)"
    )
    parser.add_argument("--heads", type=int, default=Shape().num_heads, help="of queries (default: %(default)s)")
    parser.add_argument("--hybrid", action="store_true", help="with gated delta nets in three of four layers")
    arguments = parser.parse_args()
    shape = Shape(arguments.layers, arguments.intermediate_size, arguments.heads, arguments.hybrid)
    path = make_twin(arguments.directory, shape) / "model.safetensors"
    print(f"{arguments.directory}: {path.stat().st_size / 2e6:.0f} million weights in bf16")


if __name__ == "__main__":
    main()
