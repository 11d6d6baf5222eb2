"""Checkpoints of integers and FP8, written as other programs write them.

write: writes the checkpoint that is quantized.
"""

import json
import re

import torch
from safetensors.torch import load_file, save_file

from octavo.models.quantized_weights import unpack_nibbles
from octavo.models.random_weights import tiny_config, write_checkpoint

_LINEAR = re.compile(r"(proj|proj_with_mqa|w[123])\.weight$")  # not routers


def plain_checkpoint(path, name="Qwen2ForCausalLM", **changes):
    return write_checkpoint(path, tiny_config(name, **changes), std=0.1)


def linear_names(tensors):
    return [name.removesuffix(".weight") for name in tensors if _LINEAR.search(name)]


def rewrite(path, tensors, quantization_config):
    """Replace a checkpoint's tensors, and set its quantization_config."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = quantization_config
    (path / "config.json").write_text(json.dumps(config))


def pack_words(values, dim, order=range(8)):
    """Pack eight values of 0 .. 15 along `dim` into one int32; value order[i] is in the bits from 4 i on."""
    values = values.long() if dim == 1 else values.long().T
    words = sum(values[:, each::8] << 4 * i for i, each in enumerate(order))
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return words if dim == 1 else words.T


def grouped(weight, group_size, generator, *, zeros=True):
    """Return random values, scales and zero points to store."""
    groups = weight.shape[1] // group_size
    return (
        torch.randint(0, 16, weight.shape, generator=generator),
        (torch.rand(weight.shape[0], groups, generator=generator) * 0.02).half(),
        torch.randint(1, 16, (weight.shape[0], groups), generator=generator)
        if zeros
        else torch.full((weight.shape[0], groups), 8),
    )


def gptq_tensors(weight, generator, *, sym=False, offset=1):
    """Return random integers of a weight's shape as GPTQ stores them, and the weight that they represent.

    offset: subtracted from stored zero points.
    """
    values, scales, zeros = grouped(weight, 32, generator, zeros=not sym)
    stored = {
        "qweight": pack_words(values.T, 0),
        "qzeros": pack_words(zeros.T - offset, 1),
        "scales": scales.T,
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // 32,
    }
    return stored, (values - zeros.repeat_interleave(32, 1)) * scales.float().repeat_interleave(32, 1)


def gptq_checkpoint(path, generator, *, write=plain_checkpoint, sym=False, checkpoint_format="gptq", **config):
    """Write a checkpoint as GPTQModel does: words along in_features, scales [groups, out_features], zero points less
    one.
    """
    write(path)
    tensors, meant = load_file(path / "model.safetensors"), {}
    for module in linear_names(tensors):
        weight = tensors.pop(f"{module}.weight")
        stored, meant[module] = gptq_tensors(weight, generator, sym=sym, offset=int(checkpoint_format == "gptq"))
        tensors |= {f"{module}.{name}": tensor for name, tensor in stored.items()}
        tensors.setdefault(f"{module}.bias", torch.zeros(weight.shape[0], dtype=torch.float16))
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": sym}
    rewrite(path, tensors, settings | {"checkpoint_format": checkpoint_format} | config)
    return meant


def awq_checkpoint(path, generator, *, write=plain_checkpoint, **config):
    """Write a checkpoint as AutoAWQ does: words along out_features, with columns in the order 0 2 4 6 1 3 5 7."""
    write(path)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors, meant = load_file(path / "model.safetensors"), {}
    for module in linear_names(tensors):
        values, scales, zeros = grouped(tensors.pop(f"{module}.weight"), 32, generator)
        meant[module] = (values - zeros.repeat_interleave(32, 1)) * scales.float().repeat_interleave(32, 1)
        tensors |= {
            f"{module}.qweight": pack_words(values.T, 1, order),
            f"{module}.qzeros": pack_words(zeros.T, 1, order),
            f"{module}.scales": scales.T,
        }
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    rewrite(path, tensors, settings | config)
    return meant


def reordered_checkpoint(path, generator, *, write=plain_checkpoint):
    """Write a checkpoint as GPTQModel writes act-order: rows in their order, and g_idx with the group of each row."""
    gptq_checkpoint(path, generator, write=write, desc_act=True)
    tensors, meant = load_file(path / "model.safetensors"), {}
    modules = [name.removesuffix(".g_idx") for name in tensors if name.endswith(".g_idx")]
    sizes = sorted({len(tensors[f"{module}.g_idx"]) for module in modules})
    # The place of each feature by importance, and so its group.
    groups_of = {size: (torch.randperm(size, generator=generator) // 32).int() for size in sizes}
    for module in modules:
        groups = tensors[f"{module}.g_idx"] = groups_of[len(tensors[f"{module}.g_idx"])].clone()
        scales = tensors[f"{module}.scales"].float()[groups.long()].T
        values = unpack_nibbles(tensors[f"{module}.qweight"], dim=0).T
        zeros = unpack_nibbles(tensors[f"{module}.qzeros"], dim=1)[groups.long()].T + 1
        meant[module] = (values.float() - zeros) * scales
    save_file(tensors, path / "model.safetensors")
    return tensors, meant


def rewritten(path, config, store, *, write=plain_checkpoint):
    """Store each linear layer's weight of a random checkpoint again; return the represented weights by module.

    store(weight, generator) -> ({name: tensor}, the weight that the tensors represent)
    """
    write(path, dtype="bfloat16")
    generator = torch.Generator().manual_seed(7)
    tensors, meant = load_file(path / "model.safetensors"), {}
    for module in linear_names(tensors):
        stored, meant[module] = store(tensors.pop(f"{module}.weight").float(), generator)
        tensors |= {f"{module}.{name}": tensor for name, tensor in stored.items()}
    rewrite(path, tensors, config)
    return meant


def fp8(weight, blocks):
    """Return E4M3 values and a float32 scale per block; blocks at the end may have fewer rows and columns."""
    rows, columns = (size if block is None else block for size, block in zip(weight.shape, blocks, strict=True))
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    tiles = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scales = tiles.abs().amax((1, 3)).clamp(min=1e-6) / 448
    wide = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: weight.shape[0], : weight.shape[1]]
    values = (weight / wide).to(torch.float8_e4m3fn)
    return values, scales, values.float() * wide


def block_checkpoint(path, blocks=(32, 32), *, write=plain_checkpoint, **config):
    """Write a checkpoint in DeepSeek's format."""

    def store(weight, _):
        values, scales, meant = fp8(weight, blocks)
        return {"weight": values, "weight_scale_inv": scales}, meant.bfloat16()

    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(blocks)}
    return rewritten(path, settings | config, store, write=write)


def store_as_mxfp4(path):
    """Replace the experts of a gpt-oss checkpoint by random blocks. Return all stored tensors."""
    rng, tensors = torch.Generator().manual_seed(0), load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num_experts, columns, rows = tensors.pop(name).shape
        shape = num_experts, rows, columns // 32
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=rng)
        tensors[f"{name}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8, generator=rng)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    rewrite(path, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": kept})
    return tensors
