"""Write a GGUF file with random blocks in the widths of a real mixture of experts or hybrid model, for benchmarks.

    python tools/make_expert_gguf.py qwen3-30b-a3b OUT.gguf --layers 4 --type Q4_K
    python tools/make_expert_gguf.py gpt-oss-20b OUT.gguf --layers 4
    python tools/make_expert_gguf.py qwen3.5-0.8b OUT.gguf --layers 24 --type Q4_K

Tensors are written one by one, and no float weights are made or rounded. All layers have the same blocks, but each
layer has its own bytes in the file. The vocabulary consists of bytes, with filler tokens up to the model's size.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import torch
from tokenizers.pre_tokenizers import ByteLevel

from octavo.kernels.block_weight import BlockKind, random_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

# Each width is that of config.json. attention: type of other matrices, if the experts' type does not suit them.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "architecture": "qwen3moe", "hidden": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "experts": 128,
        "chosen": 8, "expert": 768, "vocabulary": 151936, "has_qk_norm": True, "theta": 1e6,
    },
    "olmoe-1b-7b": {
        "architecture": "olmoe", "hidden": 2048, "heads": 16, "kv_heads": 16, "head_dim": 128, "experts": 64,
        "chosen": 8, "expert": 1024, "vocabulary": 50304, "has_qk_norm": True, "theta": 1e4,
    },
    "gpt-oss-20b": {
        "architecture": "gpt-oss", "hidden": 2880, "heads": 64, "kv_heads": 8, "head_dim": 64, "experts": 32,
        "chosen": 4, "expert": 2880, "vocabulary": 201088, "has_qk_norm": False, "theta": 150000.0,
    },
    "glm-4.7-flash": {
        "architecture": "deepseek2", "hidden": 2048, "heads": 20, "kv_heads": 1, "head_dim": 256, "experts": 64,
        "chosen": 4, "expert": 1536, "vocabulary": 154880, "has_qk_norm": False, "theta": 1e6, "query": 768,
        "latent": 512, "rotated": 64, "value": 256, "shared": 1, "dense": 10240,
    },
    "qwen3.5-0.8b": {
        "architecture": "qwen35", "hidden": 1024, "heads": 8, "kv_heads": 2, "head_dim": 256, "dense": 3584,
        "vocabulary": 248320, "theta": 1e7, "key_heads": 16, "value_heads": 16, "state": 128, "taps": 4, "interval": 4,
        "rotated": 64,
    },
    "qwen3.6-35b-a3b": {
        "architecture": "qwen35moe", "hidden": 2048, "heads": 16, "kv_heads": 2, "head_dim": 256, "experts": 256,
        "chosen": 8, "expert": 512, "vocabulary": 248320, "theta": 1e7, "key_heads": 16, "value_heads": 32,
        "state": 128, "taps": 4, "interval": 4, "rotated": 64,
    },
}  # fmt: skip


def write(path: Path, shape: dict[str, Any], *, layers: int, kind: str, seed: int = 0) -> Path:
    """Write the file; return its path."""
    writer = gguf.GGUFWriter(path, shape["architecture"])
    for key, value in metadata(shape, layers).items():
        add(writer, key, value)
    made: dict[tuple[str, int, int], Any] = {}
    generator = torch.Generator().manual_seed(seed)
    for name, in_kind, sizes in tensors(shape, layers, kind):
        if in_kind == "F32":
            writer.add_tensor(name, float_values(name, sizes).numpy())
            continue
        rows = sizes[0] if len(sizes) == 2 else sizes[0] * sizes[1]
        columns = sizes[-1]
        if (in_kind, rows, columns) not in made:
            blocks = random_blocks(generator, BlockKind[in_kind], rows, columns).rows
            made[in_kind, rows, columns] = blocks.view(*sizes[:-1], -1).numpy()
        writer.add_tensor(name, made[in_kind, rows, columns], raw_dtype=gguf.GGMLQuantizationType[in_kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def float_values(name: str, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return a float tensor: ones for norms, and negative decays."""
    if "norm" in name:
        return torch.ones(sizes)
    return -torch.rand(sizes) if name.endswith("ssm_a") else 0.02 * torch.randn(sizes)


def metadata(shape: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return the file's metadata."""
    keys = {
        "block_count": layers,
        "context_length": 32768,
        "embedding_length": shape["hidden"],
        "feed_forward_length": shape.get("dense", shape.get("expert")),
        "attention.head_count": shape["heads"],
        "attention.head_count_kv": shape["kv_heads"],
        "attention.key_length": shape["head_dim"],
        "attention.value_length": shape["head_dim"],
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": shape["theta"],
    }
    if "experts" in shape:
        keys |= {
            "expert_count": shape["experts"],
            "expert_used_count": shape["chosen"],
            "expert_feed_forward_length": shape["expert"],
        }
    if "state" in shape:
        keys |= {
            "ssm.conv_kernel": shape["taps"],
            "ssm.state_size": shape["state"],
            "ssm.group_count": shape["key_heads"],
            "ssm.time_step_rank": shape["value_heads"],
            "ssm.inner_size": shape["value_heads"] * shape["state"],
            "full_attention_interval": shape["interval"],
            "rope.dimension_count": shape["rotated"],
            "rope.dimension_sections": [11, 11, 10, 0],
        }
        if "experts" in shape:
            keys["expert_shared_feed_forward_length"] = shape["expert"]
    if shape["architecture"] == "gpt-oss":
        keys["attention.sliding_window"] = 128
    if "latent" in shape:
        keys |= {
            "leading_dense_block_count": 1,
            "attention.q_lora_rank": shape["query"],
            "attention.kv_lora_rank": shape["latent"],
            "attention.key_length": shape["latent"] + shape["rotated"],
            "attention.value_length": shape["latent"],
            "attention.key_length_mla": shape["head_dim"],
            "attention.value_length_mla": shape["value"],
            "rope.dimension_count": shape["rotated"],
            "expert_shared_count": shape["shared"],
            "expert_weights_scale": 1.8,
            "expert_weights_norm": True,
            "expert_gating_func": 2,  # sigmoid
        }
    return {f"{shape['architecture']}.{key}": value for key, value in keys.items()} | vocabulary(shape["vocabulary"])


def vocabulary(size: int) -> dict[str, Any]:
    """Return the metadata of a tokenizer of bytes."""
    words = [*sorted(ByteLevel.alphabet()), "he"]
    tokens = ["<|endoftext|>", *words]
    tokens += [f"[PAD{number}]" for number in range(len(tokens), size)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * len(words) + [5] * (size - 1 - len(words)),
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


def tensors(  # noqa: C901 - a case for each family
    shape: dict[str, Any], layers: int, kind: str
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield names, types and sizes. Embeddings, head and values have Q6_K in a file of Q4_K, as llama.cpp's mix."""
    hidden, inner, experts = shape["hidden"], shape.get("expert", 0), shape.get("experts", 0)
    wide, dense = "Q6_K" if kind == "Q4_K" else "Q8_0", "Q8_0" if kind == "MXFP4" else kind
    q_rows, kv_rows = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    is_gpt_oss = shape["architecture"] == "gpt-oss"
    for part in ("token_embd", "output"):
        yield f"{part}.weight", wide, (shape["vocabulary"], hidden)
    yield "output_norm.weight", "F32", (hidden,)
    for layer in range(layers):
        name = f"blk.{layer}."
        if "latent" in shape:
            yield from latent_layer(name, shape, kind, wide, is_dense=layer == 0)
            continue
        if "state" in shape:
            yield from hybrid_layer(name, shape, kind, wide, is_recurrent=(layer + 1) % shape["interval"] > 0)
            continue
        rows = {"attn_q": q_rows, "attn_k": kv_rows, "attn_v": kv_rows}
        for part, count in rows.items():
            yield f"{name}{part}.weight", wide if part == "attn_v" else dense, (count, hidden)
        yield f"{name}attn_output.weight", dense, (hidden, q_rows)
        for part in ("attn", "post_attention" if is_gpt_oss else "ffn"):
            yield f"{name}{part}_norm.weight", "F32", (hidden,)
        yield f"{name}ffn_gate_inp.weight", "F32", (experts, hidden)
        for part in ("gate", "up"):
            yield f"{name}ffn_{part}_exps.weight", kind, (experts, inner, hidden)
        yield f"{name}ffn_down_exps.weight", kind, (experts, hidden, inner)
        if shape["has_qk_norm"]:
            is_wide = shape["architecture"] == "olmoe"
            for part, count in (("q", q_rows), ("k", kv_rows)):
                yield f"{name}attn_{part}_norm.weight", "F32", (count if is_wide else shape["head_dim"],)
        if is_gpt_oss:
            yield f"{name}attn_sinks.weight", "F32", (shape["heads"],)
            for part, count in (rows | {"attn_output": hidden, "ffn_gate_inp": experts}).items():
                yield f"{name}{part}.bias", "F32", (count,)
            for part, count in (("gate", inner), ("up", inner), ("down", hidden)):
                yield f"{name}ffn_{part}_exps.bias", "F32", (experts, count)


def hybrid_layer(
    name: str, shape: dict[str, Any], kind: str, wide: str, *, is_recurrent: bool
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield a layer with a gated delta net or gated attention, and an MLP or experts with a shared expert."""
    hidden, heads, values = shape["hidden"], shape["value_heads"], shape["value_heads"] * shape["state"]
    channels = 2 * shape["key_heads"] * shape["state"] + values
    for part in ("attn", "post_attention"):
        yield f"{name}{part}_norm.weight", "F32", (hidden,)
    if is_recurrent:
        yield f"{name}attn_qkv.weight", kind, (channels, hidden)
        yield f"{name}attn_gate.weight", kind, (values, hidden)
        yield f"{name}ssm_conv1d.weight", "F32", (channels, shape["taps"])
        yield f"{name}ssm_dt.bias", "F32", (heads,)
        yield f"{name}ssm_a", "F32", (heads,)
        for part in ("beta", "alpha"):
            yield f"{name}ssm_{part}.weight", "F32", (heads, hidden)
        yield f"{name}ssm_norm.weight", "F32", (shape["state"],)
        yield f"{name}ssm_out.weight", kind, (hidden, values)
    else:
        rows, kv_rows = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
        yield f"{name}attn_q.weight", kind, (2 * rows, hidden)
        yield f"{name}attn_k.weight", kind, (kv_rows, hidden)
        yield f"{name}attn_v.weight", wide, (kv_rows, hidden)
        yield f"{name}attn_output.weight", kind, (hidden, rows)
        for part in ("q", "k"):
            yield f"{name}attn_{part}_norm.weight", "F32", (shape["head_dim"],)
    suffix = ""
    if "experts" in shape:
        suffix, experts, inner = "_shexp", shape["experts"], shape["expert"]
        yield f"{name}ffn_gate_inp.weight", "F32", (experts, hidden)
        yield f"{name}ffn_gate_inp_shexp.weight", "F32", (hidden,)
        for part in ("gate", "up"):
            yield f"{name}ffn_{part}_exps.weight", kind, (experts, inner, hidden)
        yield f"{name}ffn_down_exps.weight", kind, (experts, hidden, inner)
    inner = shape.get("dense") or shape["expert"]
    for part in ("gate", "up"):
        yield f"{name}ffn_{part}{suffix}.weight", kind, (inner, hidden)
    yield f"{name}ffn_down{suffix}.weight", kind, (hidden, inner)


def latent_layer(
    name: str, shape: dict[str, Any], kind: str, wide: str, *, is_dense: bool
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield a layer with latent attention. The rows of attn_k_b are no multiple of 256, so it has Q8_0."""
    hidden, heads, experts, latent = shape["hidden"], shape["heads"], shape["experts"], shape["latent"]
    plain = shape["head_dim"] - shape["rotated"]
    yield f"{name}attn_norm.weight", "F32", (hidden,)
    yield f"{name}attn_q_a.weight", kind, (shape["query"], hidden)
    yield f"{name}attn_q_a_norm.weight", "F32", (shape["query"],)
    yield f"{name}attn_q_b.weight", kind, (heads * shape["head_dim"], shape["query"])
    yield f"{name}attn_kv_a_mqa.weight", kind, (latent + shape["rotated"], hidden)
    yield f"{name}attn_kv_a_norm.weight", "F32", (latent,)
    yield f"{name}attn_k_b.weight", "Q8_0", (heads, latent, plain)
    yield f"{name}attn_v_b.weight", wide, (heads, shape["value"], latent)
    yield f"{name}attn_output.weight", kind, (hidden, heads * shape["value"])
    yield f"{name}ffn_norm.weight", "F32", (hidden,)
    if not is_dense:
        yield f"{name}ffn_gate_inp.weight", "F32", (experts, hidden)
        for part in ("gate", "up"):
            yield f"{name}ffn_{part}_exps.weight", kind, (experts, shape["expert"], hidden)
        yield f"{name}ffn_down_exps.weight", kind, (experts, hidden, shape["expert"])
        yield f"{name}exp_probs_b.bias", "F32", (experts,)
    suffix, inner = ("", shape["dense"]) if is_dense else ("_shexp", shape["shared"] * shape["expert"])
    for part in ("gate", "up"):
        yield f"{name}ffn_{part}{suffix}.weight", kind, (inner, hidden)
    yield f"{name}ffn_down{suffix}.weight", kind, (hidden, inner)


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a key with the type that llama.cpp expects."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def main() -> None:
    """Write one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, default=4, help="number of layers (default: %(default)s)")
    parser.add_argument("--type", choices=("Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4"), help="of the experts")
    options = parser.parse_args()
    kind = options.type or ("MXFP4" if options.shape == "gpt-oss-20b" else "Q4_K")
    path = write(options.path, SHAPES[options.shape], layers=options.layers, kind=kind)
    print(f"{path}: {path.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
