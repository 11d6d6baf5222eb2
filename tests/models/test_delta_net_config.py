"""Hybrids of attention and gated delta nets: configurations that are refused, and matrices that are rounded."""

import pytest
import torch
from quantized_files import fp8, rewrite
from safetensors.torch import load_file, save_file

from octavo.errors import ModelError
from octavo.kernels.reference import ReferenceKernels
from octavo.models.architecture import is_vocabulary
from octavo.models.checkpoint import CheckpointFiles
from octavo.models.config_file import ConfigFile
from octavo.models.loader import load_model
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import architecture_of, read_architecture
from octavo.models.weight_bytes import is_never_rounded
from octavo.models.weight_source import FolderWeights

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["Qwen3_5", "Qwen3_5Moe", "Qwen3Next"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": 5}, "linear_num_value_heads = 5: must be a multiple of linear_num_key_heads = 2"),
        ({"linear_value_head_dim": 24}, "linear_value_head_dim = 24: must be a multiple of 16"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim = 1: must be 2 to 8"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types.*: octavo needs at least one layer with full"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types.*: octavo supports full_attention and linear_"),
        ({"layer_types": ["full_attention"]}, "layer_types.*: must list num_hidden_layers = 2 entries"),
        ({"final_logit_softcapping": 9.0}, "final_logit_softcapping = 9.0: octavo does not support this for Qwen3"),
        ({"is_causal": False}, "is_causal = False: octavo does not support this for Qwen3"),
    ],
)
def test_configuration_that_cannot_be_served_is_refused(name, changes, message):
    with pytest.raises(ModelError, match=message):
        architecture_of(ConfigFile("config.json", tiny_config(f"{name}ForCausalLM", **changes)))


def test_experts_in_the_dense_family_are_refused():
    config = tiny_config("Qwen3_5ForCausalLM", num_experts=8)
    with pytest.raises(ModelError, match="num_experts = 8: octavo does not support this for Qwen3_5ForCausalLM"):
        architecture_of(ConfigFile("config.json", config))


@pytest.mark.parametrize("quantization", ["int8", "int4", "int4_all"])
@pytest.mark.parametrize("name", ["Qwen3_5Moe", "Qwen3Next"])
def test_rates_and_routers_stay_floats_and_experts_are_rounded(name, quantization, tmp_path):
    path = write_checkpoint(tmp_path, tiny_config(f"{name}ForCausalLM"))
    options = {"dtype": "bfloat16", "device": CPU, "max_model_len": 64, "quantization": quantization}
    first = load_model(FolderWeights(path), read_architecture(path), ReferenceKernels(), **options).layers[0]
    kept = first.attention.rates, first.mlp.router, first.mlp.shared_gate
    rounded = first.attention.inputs, first.attention.out, first.mlp.shared_gate_up
    assert all(isinstance(each.storage, torch.Tensor) for each in kept)
    assert not any(isinstance(each.storage, torch.Tensor) for each in rounded)
    exact = load_model(
        FolderWeights(path), read_architecture(path), ReferenceKernels(), **options | {"quantization": None}
    )
    assert first.mlp.bytes_per_expert < 0.75 * exact.layers[0].mlp.bytes_per_expert


def test_experts_with_own_tensors_are_read_like_those_in_one_tensor(tmp_path):
    path = write_checkpoint(tmp_path, tiny_config("Qwen3_5MoeForCausalLM"))
    names = read_architecture(path).tensor_shapes()
    files = CheckpointFiles(path)
    apart = {name: files.tensor(name).clone() for name in names}
    assert not apart.keys() <= load_file(path / "model.safetensors").keys()
    save_file(apart, path / "model.safetensors", metadata={"format": "pt"})
    files = CheckpointFiles(path)
    files.check(read_architecture(path).stored_tensors())
    assert all(torch.equal(files.tensor(name), tensor) for name, tensor in apart.items())


@pytest.mark.parametrize("name", ["Qwen3_5", "Qwen3_5Moe", "Qwen3Next"])
def test_fp8_blocks_give_logits_of_their_expanded_weights(name, tmp_path, prompt_logits):
    """Stored as on the hub: each expert has its own tensors, and rates and routers are not converted."""
    plain, blocks = (write_checkpoint(tmp_path / each, tiny_config(f"{name}ForCausalLM")) for each in ("a", "b"))
    files, stored, kept = CheckpointFiles(plain), {}, []
    expanded = {each: files.tensor(each).clone() for each in read_architecture(plain).tensor_shapes()}
    for each, tensor in expanded.items():
        if tensor.dim() != 2 or is_vocabulary(each) or is_never_rounded(each):
            kept.append(each.removesuffix(".weight"))
            stored[each] = tensor
            continue
        stored[each], stored[f"{each}_scale_inv"], expanded[each] = fp8(tensor, (32, 32))
    save_file(expanded, plain / "model.safetensors")
    rewrite(blocks, stored, {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": kept})
    options = {"dtype": "float32", "device": CPU, "max_model_len": 64}
    ours, expected = (
        prompt_logits(load_model(FolderWeights(path), read_architecture(path), ReferenceKernels(), **options), range(9))
        for path in (blocks, plain)
    )
    assert torch.equal(ours, expected)
