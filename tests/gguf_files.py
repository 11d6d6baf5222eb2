"""GGUF files for tests, written with the package `gguf` from checkpoints in Hugging Face's layout."""

import json
import math

import delta_net_gguf
import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel

from octavo.kernels.block_weight import BlockKind, random_blocks
from octavo.models.weight_files import decoder_names

_ARCHITECTURES = {
    "Lfm2ForCausalLM": "lfm2", "LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3",
}  # fmt: skip
_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
}
_FLOATS = (".ssm_conv1d.", ".ffn_gate_inp")  # matrices that llama.cpp does not quantize
_MODEL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def byte_vocabulary(size):
    """Return metadata of a byte tokenizer with a few merges, special tokens and filler tokens up to `size`."""
    letters = sorted(ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll", "Ġ w"]
    words = [merge.replace(" ", "") for merge in merges]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>"]
    tokens = [*special, *letters, *words]
    tokens += [f"[PAD{number}]" for number in range(len(tokens), size)]
    types = [3, 3, 3, 4] + [1] * (len(letters) + len(words))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens[:size],
        "tokenizer.ggml.token_type": (types + [5] * size)[:size],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
    }


def write_gguf(directory, path, *, kind="F32", kinds=None, changes=None, splits=1):
    """Write a checkpoint of a family that octavo has as a GGUF file; matrices in a type of GGUF. Return the path.

    kinds: other types of parts of layers, by llama.cpp's names. K types, which the package cannot write, are random
    blocks. changes: metadata, set last; None removes a key.
    """
    config = json.loads((directory / "config.json").read_text())
    has_delta_nets = (name := config["architectures"][0]) in delta_net_gguf.ARCHITECTURES
    architecture = (_ARCHITECTURES | delta_net_gguf.ARCHITECTURES)[name]
    numbers = _numbers(config) | (delta_net_gguf.numbers(config) if has_delta_nets else {})
    metadata = {f"{architecture}.{key}": value for key, value in numbers.items()}
    metadata |= byte_vocabulary(config["vocab_size"])
    metadata |= changes or {}
    tensors = dict((delta_net_gguf.tensors if has_delta_nets else _tensors)(directory, config))
    factors = _llama3_factors(config)
    if factors is not None:
        tensors["rope_freqs.weight"] = factors
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=-(-len(tensors) // splits) if splits > 1 else 0)
    for key, value in metadata.items():
        add(writer, key, value)
    for name, value in tensors.items():
        stored = gguf.GGMLQuantizationType[(kinds or {}).get(name.split(".")[-2], kind)]
        is_matrix = value.ndim > 1 and not any(part in name for part in _FLOATS)
        if is_matrix and stored.name.endswith("_K"):
            shape = math.prod(value.shape[:-1]), value.shape[-1]
            blocks = random_blocks(torch.Generator().manual_seed(len(name)), BlockKind[stored.name], *shape)
            writer.add_tensor(name, blocks.rows.view(*value.shape[:-1], -1).numpy(), raw_dtype=stored)
        elif is_matrix and stored.name != "F32":
            writer.add_tensor(name, gguf.quantize(value, stored), raw_dtype=stored)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if splits == 1 else path.with_name(f"{path.stem}-00001-of-{splits:05}.gguf")


def add(writer, key, value):
    """Add one metadata value, in the type that llama.cpp uses."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _numbers(config):
    rope = config["rope_parameters"]
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    numbers = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.freq_base": rope["rope_theta"],
        "vocab_size": config["vocab_size"],
    }
    if config["architectures"] == ["Lfm2ForCausalLM"]:
        kv_heads = [0 if kind == "conv" else config["num_key_value_heads"] for kind in config["layer_types"]]
        numbers |= {"attention.head_count_kv": kv_heads, "shortconv.l_cache": config.get("conv_L_cache", 3)}
        numbers["attention.layer_norm_rms_epsilon"] = config["norm_eps"]
    if rope["rope_type"] in {"linear", "yarn"}:
        numbers |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        numbers["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return numbers


def _tensors(directory, config):
    """Return float32 by llama.cpp's names; rows of a Llama's q and k are in the order of its rotation."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    is_llama, is_lfm2 = (config["architectures"] == [f"{name}ForCausalLM"] for name in ("Llama", "Lfm2"))
    stored = load_file(directory / "model.safetensors")
    for name, stored_name in decoder_names(stored).items():
        array, part = stored[stored_name].float().numpy(), name.split(".")[-2]
        array = array[:, 0] if array.ndim == 3 else array  # the taps of a convolution
        if is_llama and part in heads:  # as LlamaModel.permute of llama.cpp's conversion
            pairs = array.reshape(heads[part], 2, -1, *array.shape[1:])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        if is_lfm2 and name == "model.norm.weight":
            yield_name = "token_embd_norm.weight"
        elif name in _MODEL:
            yield_name = _MODEL[name]
        else:
            _, _, layer, *parts, kind = name.split(".")
            yield_name = f"blk.{layer}.{_PARTS['.'.join(parts)]}.{kind}"
        yield yield_name, array


def _llama3_factors(config):
    """Return the factors that llama.cpp's conversion makes of Llama 3's rope (generate_extra_tensors)."""
    rope = config["rope_parameters"]
    if rope["rope_type"] != "llama3":
        return None
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original, factors = rope["original_max_position_embeddings"], []
    for frequency in 1.0 / rope["rope_theta"] ** (np.arange(0, config["head_dim"], 2) / config["head_dim"]):
        wavelength = 2 * np.pi / frequency
        if wavelength < original / high:
            factors.append(1)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)
