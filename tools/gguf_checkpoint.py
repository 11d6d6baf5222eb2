"""Convert a GGUF file to a checkpoint in Hugging Face layout: config.json, tokenizer, template, bfloat16 weights.

Supports the architectures in `ARCHITECTURES`. transformers converts the tokenizer.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import gguf
import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

ARCHITECTURES = ("llama", "gemma3")
_GEMMA_FULL_ATTENTION_EVERY = 6  # layers; not in the file: llama.cpp has a constant for the family
_GEMMA_LOCAL_ROPE_THETA = 10000.0
_GEMMA_NORMS = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class GGUFError(Exception):
    """A GGUF file cannot be converted to a checkpoint."""


class GGUFFile:
    """A GGUF file with its fields by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reader = gguf.GGUFReader(path)
        self.architecture = str(self.value("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise GGUFError(f"{path}: architecture {self.architecture!r} is not one that is read: {known}")

    def value(self, key: str) -> Any:
        """Return a field's value. Raises `GGUFError` if the file does not have it."""
        field = self.reader.get_field(key)
        if field is None:
            raise GGUFError(f"{self.path}: no field {key!r}")
        return field.contents()

    def of_model(self, key: str) -> Any:
        """Return the value of a field with the architecture's name as prefix."""
        return self.value(f"{self.architecture}.{key}")

    @property
    def is_tied(self) -> bool:
        """Whether the output matrix is the input embedding."""
        return all(tensor.name != "output.weight" for tensor in self.reader.tensors)


def write_checkpoint(path: Path, directory: Path) -> None:
    """Write the checkpoint of a GGUF file into an existing directory."""
    file = GGUFFile(path)
    (directory / "config.json").write_text(json.dumps(read_config(file), indent=1) + "\n")
    save_file(read_weights(file), directory / "model.safetensors", metadata={"format": "pt"})
    load_tokenizer(path).save_pretrained(directory)


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a GGUF file, with its chat template if it has one. The file need not have weights."""
    from transformers import AutoTokenizer  # noqa: PLC0415  takes two seconds, not needed for config and weights

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return tokenizer


def read_config(file: GGUFFile) -> dict[str, Any]:
    """Return the content of config.json in the family's own form."""
    theta = float(file.of_model("rope.freq_base"))
    num_layers = int(file.of_model("block_count"))
    config = {
        "bos_token_id": int(file.value("tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(file.value("tokenizer.ggml.eos_token_id")),
        "dtype": "bfloat16",
        "hidden_size": int(file.of_model("embedding_length")),
        "intermediate_size": int(file.of_model("feed_forward_length")),
        "max_position_embeddings": int(file.of_model("context_length")),
        "num_attention_heads": int(file.of_model("attention.head_count")),
        "num_hidden_layers": num_layers,
        "num_key_value_heads": int(file.of_model("attention.head_count_kv")),
        "rms_norm_eps": _shortest_float32(file.of_model("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": file.is_tied,
        "vocab_size": len(file.value("tokenizer.ggml.tokens")),
    }
    if file.architecture == "llama":
        return config | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        }
    kinds = ("full_attention", "sliding_attention")
    return config | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": int(file.of_model("attention.key_length")),
        "query_pre_attn_scalar": int(file.of_model("attention.key_length")),
        "sliding_window": int(file.of_model("attention.sliding_window")),
        "layer_types": [kinds[(layer + 1) % _GEMMA_FULL_ATTENTION_EVERY != 0] for layer in range(num_layers)],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": _GEMMA_LOCAL_ROPE_THETA},
        },
    }


def read_weights(file: GGUFFile) -> dict[str, Tensor]:
    """Return all tensors, dequantized to bfloat16, by the family's names at Hugging Face."""
    weights = {}
    for tensor in file.reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if file.architecture == "llama" and ".attn_q." in tensor.name:
            values = _halves_of_heads(values, int(file.of_model("attention.head_count")))
        elif file.architecture == "llama" and ".attn_k." in tensor.name:
            values = _halves_of_heads(values, int(file.of_model("attention.head_count_kv")))
        elif file.architecture == "gemma3" and tensor.name.endswith("norm.weight"):
            values = values - 1  # llama.cpp stores the factor, the family stores factor - 1
        weights[_name_at_hugging_face(file, tensor.name)] = torch.tensor(values).to(torch.bfloat16)
    return weights


def _name_at_hugging_face(file: GGUFFile, name: str) -> str:
    """Translate a tensor's name: `blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`."""
    names = _LAYER_NAMES | (_GEMMA_NORMS if file.architecture == "gemma3" else {})
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in names:
            return f"model.layers.{layer}.{names[part]}.weight"
        case [part, "weight"] if part in _MODEL_NAMES:
            return f"{_MODEL_NAMES[part]}.weight"
    raise GGUFError(f"{file.path}: tensor {name!r} has no place in a model of architecture {file.architecture!r}")


def _halves_of_heads(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's order of a head's rows (rotated pairs are adjacent). rows: [num_heads * head_dim, hidden]."""
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _shortest_float32(value: float) -> float:
    """Return the shortest decimal with the same float32 value: 1e-05 for 9.999999747378752e-06."""
    return float(f"{value:.6g}")
