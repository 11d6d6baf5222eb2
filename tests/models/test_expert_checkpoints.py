"""Mixtures of experts in all forms of checkpoints, and configurations that cannot be served."""

import re
from functools import partial

import gguf
import numpy as np
import pytest
import torch
from quantized_files import gptq_checkpoint, gptq_tensors, plain_checkpoint, store_as_mxfp4
from safetensors.torch import load_file, save_file

from octavo import LLMEngine, ModelConfig
from octavo.errors import ModelError
from octavo.kernels.interface import GATE_LIMIT, GATE_SLOPE, PackedGroups
from octavo.kernels.operations import choose_experts
from octavo.kernels.quantization import Int4Weight
from octavo.kernels.reference import ReferenceKernels
from octavo.models import gpt_oss
from octavo.models.checkpoint import CheckpointFiles
from octavo.models.config_file import ConfigFile
from octavo.models.experts import SOFTMAX_OF_CHOSEN, ExpertsConfig
from octavo.models.float_weights import open_tensors
from octavo.models.gguf_config import _read_dtype
from octavo.models.gguf_file import GGUFFile, StoredArray, TensorType
from octavo.models.loader import load_model
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import architecture_of, read_architecture
from octavo.models.weight_bytes import weight_bytes
from octavo.models.weight_source import FolderWeights

GROUPED = {"moe_intermediate_size": 96}  # widths that groups of 32 divide
FAMILIES = ("Qwen3Moe", "Qwen2Moe", "Mixtral", "Olmoe", "GptOss")


def architecture(name, **changes):
    return architecture_of(ConfigFile("config.json", tiny_config(f"{name}ForCausalLM", **changes)))


def rewrite(path, change):
    weights = change(load_file(path / "model.safetensors"))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, path / "model.safetensors")


def together(weights):
    """Store a layer's experts in tensors of three dimensions, as transformers 5 does."""
    experts = {name: weight for name, weight in weights.items() if ".experts." in name}
    layers = {name.split(".experts.")[0] for name in experts}
    count = 1 + max(int(name.split(".experts.")[1].split(".")[0]) for name in experts)

    def stacked(layer, part):
        return torch.stack([experts[f"{layer}.experts.{index}.{part}.weight"] for index in range(count)])

    made = {name: weight for name, weight in weights.items() if name not in experts}
    for layer in layers:
        made[f"{layer}.experts.gate_up_proj"] = torch.cat([stacked(layer, "gate_proj"), stacked(layer, "up_proj")], 1)
        made[f"{layer}.experts.down_proj"] = stacked(layer, "down_proj")
    return made


def test_experts_in_one_tensor_are_read_one_by_one(tmp_path):
    path = write_checkpoint(tmp_path, tiny_config("Qwen3MoeForCausalLM"))
    expected = load_file(path / "model.safetensors")
    rewrite(path, together)
    files = CheckpointFiles(path)
    files.check(read_architecture(path).stored_tensors())
    assert all(torch.equal(files.tensor(name), tensor) for name, tensor in expected.items())


def test_names_of_mixtral_are_read_like_those_of_other_families(tmp_path):
    path = write_checkpoint(tmp_path, tiny_config("MixtralForCausalLM"))
    stored = load_file(path / "model.safetensors")
    files = CheckpointFiles(path)
    files.check(read_architecture(path).stored_tensors())
    layer, names = "model.layers.1", {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for ours, theirs in names.items():
        expected = stored[f"{layer}.block_sparse_moe.experts.2.{theirs}.weight"]
        assert torch.equal(files.tensor(f"{layer}.mlp.experts.2.{ours}.weight"), expected)
    assert torch.equal(files.tensor(f"{layer}.mlp.gate.weight"), stored[f"{layer}.block_sparse_moe.gate.weight"])


def test_layers_without_experts_are_read():
    """Qwen: each `decoder_sparse_step`-th layer has experts, except those of `mlp_only_layers`."""
    read = architecture("Qwen3Moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert [isinstance(layer.mlp, ExpertsConfig) for layer in read.layers] == [False, True, False, False, False, True]


@pytest.mark.parametrize("name", FAMILIES)
def test_idle_experts_do_not_count_as_active(name):
    read = architecture(name)
    router = read.layers[0].mlp.router
    idle = sum(layer.mlp.num_idle_parameters for layer in read.layers)
    assert idle == 2 * (router.num_experts - router.num_chosen) * 3 * 64 * read.layers[0].mlp.expert_size
    assert read.num_active_parameters == read.num_parameters - idle
    assert read.attention_share > architecture(name, num_experts_per_tok=router.num_chosen + 1).attention_share


@pytest.mark.parametrize("name", FAMILIES)
def test_routers_are_not_rounded(name):
    """Rounded weights of experts take a quarter of float32; the router stays as it is."""
    read = architecture(name)
    sizes = {name: weight.nbytes for name, weight in zeros(read).items()}
    assert weight_bytes(read, "float32") == sum(sizes.values())
    routers = {each for each in sizes if re.search(r"\.mlp\.(gate|router|shared_expert_gate)\.weight$", each)}
    assert len(routers) == 2 * (1 + (name == "Qwen2Moe"))
    rounded = {n: s for n, s in read.tensor_shapes().items() if len(s) == 2 and n not in routers}
    expected = sum(size for name, size in sizes.items() if name not in rounded)
    assert weight_bytes(read, "float32", quantization="int8") == expected + sum(
        r * c + 4 * r for r, c in rounded.values()
    )


def zeros(read):
    return {name: torch.zeros(shape) for name, shape in read.tensor_shapes().items()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9: must be at most num_experts = 8, and 64"),
        ({"num_experts": 200, "num_experts_per_tok": 65}, "must be at most num_experts = 200, and 64"),
        ({"num_experts": 0}, "num_experts = 0: must be an integer from 1"),
        ({"mlp_only_layers": "none"}, "must be a list of integers"),
        ({"hidden_act": "relu2"}, "octavo computes silu"),
    ],
)
def test_configuration_that_cannot_be_served_is_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        architecture("Qwen3Moe", **changes)


def test_dense_family_refuses_experts():
    with pytest.raises(ModelError, match="num_experts = 8: octavo does not support this for Qwen3ForCausalLM"):
        architecture("Qwen3", num_experts=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {n: t for n, t in w.items() if ".experts.5.up_proj" not in n}, "lack .*experts.5.up_proj.weight"),
        (lambda w: w | {"model.layers.0.mlp.gate.weight": torch.zeros(7, 64)}, r"shape \[7, 64\].* requires \[8, 64\]"),
        (lambda w: together(w) | {"model.layers.1.mlp.experts.down_proj": torch.zeros(7, 64, 48)}, "lack .*experts.7"),
        (lambda w: together(w) | {"model.layers.1.mlp.experts.gate_up_proj": torch.zeros(8, 97, 64)}, r"2 x rows"),
        (
            lambda w: together(w) | {n: t for n, t in w.items() if ".0.mlp.experts.3.up_proj" in n},
            "are both present; remove the superfluous file",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(change, message, tmp_path):
    path = write_checkpoint(tmp_path, tiny_config("Qwen3MoeForCausalLM"))
    rewrite(path, change)
    with pytest.raises(ModelError, match=message):
        CheckpointFiles(path).check(read_architecture(path).stored_tensors())


@pytest.mark.parametrize("is_quantized", [False, True])
def test_experts_of_gpt_oss_are_read_from_alternating_rows(tmp_path, is_quantized):
    """MXFP4 has the values that transformers gives its blocks. A float is stored in the transposed matrix."""
    convert = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    path = write_checkpoint(tmp_path, tiny_config("GptOssForCausalLM"))
    whole = load_file(path / "model.safetensors")
    if is_quantized:
        stored = store_as_mxfp4(path)
        names = [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]
        whole |= {n: convert(stored[f"{n}_blocks"], stored[f"{n}_scales"], dtype=torch.float32) for n in names}
    architecture, layer = read_architecture(path), "model.layers.1.mlp.experts"
    files = open_tensors(FolderWeights(path), architecture, torch.float32)
    gate_up, down = whole[f"{layer}.gate_up_proj"], whole[f"{layer}.down_proj"]
    for expert in range(4):
        for part, expected in (
            ("gate", gate_up[expert, :, ::2]),
            ("up", gate_up[expert, :, 1::2]),
            ("down", down[expert]),
        ):
            name = f"{layer}.{expert}.{part}_proj"
            assert torch.equal(files.tensor(f"{name}.weight"), expected.T.float())
            stored = files.weight(f"{name}.weight")
            assert not is_quantized or torch.equal(stored.dequantize(), expected.T.float())
        biases = whole[f"{layer}.gate_up_proj_bias"][expert]
        assert torch.equal(files.tensor(f"{layer}.{expert}.gate_proj.bias"), biases[::2])
        assert torch.equal(files.tensor(f"{layer}.{expert}.up_proj.bias"), biases[1::2])
    files.release()
    assert torch.equal(files.tensor(f"{layer}.0.up_proj.weight"), gate_up[0, :, 1::2].T.float())


@pytest.mark.parametrize(
    ("key", "value"), [("swiglu_limit", 6.0), ("swiglu_alpha", 1.5), ("num_experts_per_tok", 5), ("layer_types", ["x"])]
)
def test_other_gpt_oss_is_refused(key, value):
    with pytest.raises(ModelError, match=key):
        architecture("GptOss", **{key: value})


def test_published_gpt_oss_config_has_defaults():
    """The published file names no dtype, and `experts_per_token`; MXFP4 holds experts, whatever is not converted."""
    config = tiny_config("GptOssForCausalLM", experts_per_token=3, quantization_config={"quant_method": "mxfp4"})
    for key in ("dtype", "rope_parameters", "num_experts_per_tok"):
        del config[key]
    read = architecture_of(ConfigFile("config.json", config))
    assert (read.dtype, read.layers[0].mlp.router.num_chosen) == ("bfloat16", 3)
    rope = read.layers[0].attention.rope
    assert (rope.kind, rope.factor, rope.truncate, rope.theta) == ("yarn", 32.0, False, 150_000.0)
    assert {name for name in read.block_bytes if ".experts." not in name} == set()
    assert "model.layers.0.self_attn.q_proj.weight" in read.stored_tensors()


def test_numbers_of_configurations_are_those_of_kernels():
    """Configurations are read without torch, which modules of kernels import."""
    assert SOFTMAX_OF_CHOSEN == choose_experts.SOFTMAX_OF_CHOSEN
    assert (gpt_oss.LIMIT, gpt_oss.SLOPE) == (GATE_LIMIT, GATE_SLOPE)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_sinks_that_are_no_numbers_are_refused(tmp_path, value):
    path = write_checkpoint(tmp_path, tiny_config("GptOssForCausalLM"))
    name = "model.layers.1.self_attn.sinks"
    rewrite(path, lambda weights: weights | {name: torch.full((4,), value)})
    with pytest.raises(ModelError, match=f"{name} has a value"):
        LLMEngine(model_config=ModelConfig(model=str(path), skip_tokenizer_init=True))


def test_gguf_router_in_float32_does_not_make_model_float32(tmp_path):
    path = tmp_path / "model.gguf"
    tensors = {"blk.0.ffn_gate_inp.weight": "F32", "blk.0.attn_q.weight": "Q8_0", "blk.0.attn_norm.weight": "F32"}
    stored = {name: StoredArray(path, TensorType[kind], (32, 32), 0, 0) for name, kind in tensors.items()}
    assert _read_dtype(GGUFFile(path, (path,), {}, stored)) == "float32"  # the norm is a matrix here
    stored.pop("blk.0.attn_norm.weight")
    assert _read_dtype(GGUFFile(path, (path,), {}, stored)) == "bfloat16"


def test_gguf_experts_of_layer_are_divided(tmp_path):
    """A tensor of three dimensions holds the matrices of all experts; one of gate and up holds both."""
    path, rng = tmp_path / "model.gguf", np.random.default_rng(0)
    gate_up, down = rng.random((3, 8, 32), np.float32), rng.random((3, 32, 4), np.float32)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_tensor("blk.0.ffn_gate_up_exps.weight", gate_up)
    writer.add_tensor("blk.0.ffn_down_exps.weight", down)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = GGUFFile.read(path).tensors
    assert len(tensors) == 9
    for expert in range(3):
        for part, expected in (("gate", gate_up[expert, :4]), ("up", gate_up[expert, 4:]), ("down", down[expert])):
            stored = tensors[f"blk.0.ffn_{part}_exps.{expert}.weight"]
            found = np.fromfile(path, np.float32, expected.size, offset=stored.offset)
            assert stored.shape == expected.shape
            assert np.array_equal(found.reshape(expected.shape), expected)


@pytest.mark.parametrize("is_rounded", [False, True])
def test_gptq_routers_are_floats_or_integers(is_rounded, tmp_path, generator):
    """AutoGPTQ keeps routers as floats, and AutoRound rounds them. The configuration is the same."""
    gptq_checkpoint(tmp_path, generator, write=partial(plain_checkpoint, name="Qwen3MoeForCausalLM", **GROUPED))

    def change(weights):
        for name in [name for name in weights if name.endswith(".mlp.gate.weight")] * is_rounded:
            weight = weights.pop(name)
            weights |= {name.replace("weight", part): each for part, each in gptq_tensors(weight, generator)[0].items()}
        return weights

    rewrite(tmp_path, change)
    read = read_architecture(tmp_path)
    options = {"dtype": "bfloat16", "device": torch.device("cpu"), "max_model_len": 64}
    layer = load_model(FolderWeights(tmp_path), read, ReferenceKernels(), **options).layers[1]
    assert isinstance(layer.mlp.router.storage, Int4Weight if is_rounded else torch.Tensor)
    assert all(isinstance(each.storage, Int4Weight) for each in layer.mlp.gate_up.storage)


def test_grouped_copy_of_float_experts_replaces_single_ones(tmp_path):
    """A backend that copies all experts into one tensor keeps no second copy."""

    class Copying(ReferenceKernels):
        def pack_groups(self, weights):
            kept = torch.stack([each.storage for each in weights])
            return PackedGroups(len(weights), weights[0].out_features, weights[0].in_features, kept, kept.nbytes)

    path = write_checkpoint(tmp_path, tiny_config("Qwen3MoeForCausalLM"))
    model = load_model(
        FolderWeights(path),
        read_architecture(path),
        Copying(),
        dtype="float32",
        device=torch.device("cpu"),
        max_model_len=64,
    )
    memory = {
        each.storage.untyped_storage().data_ptr() for each in model.linears if isinstance(each.storage, torch.Tensor)
    }
    for layer in model.layers:
        assert layer.mlp.gate_up.storage.untyped_storage().data_ptr() in memory
    assert len(memory) == 2 + len(model.layers) * (2 + 1 + 2), (
        "embedding, head; qkv and o, router, two groups of experts"
    )
