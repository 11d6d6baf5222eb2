"""Weights and metadata of GGUF files equal those of the original checkpoint; impossible files are refused."""

import json
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf_files import write_gguf
from safetensors.torch import load_file

from octavo.errors import ModelError
from octavo.kernels.block_weight import BlockKind, BlockWeight
from octavo.models.config_file import ConfigFile
from octavo.models.gguf_config import _FAMILIES, BLOCK_KINDS, find_gguf_family, read_gguf_config
from octavo.models.gguf_file import GGUFFile, TensorType
from octavo.models.gguf_tensors import halves_of_heads
from octavo.models.gguf_weights import _LAYER_NAMES, GGUFWeights
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import architecture_of, read_architecture

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512}
CASES = {
    "llama": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied, GQA 7": (
        "LlamaForCausalLM",
        {"tie_word_embeddings": True, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 32},
    ),
    "llama 3": ("LlamaForCausalLM", {"rope_parameters": LLAMA3, "head_dim": 64}),
    "linear": ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "qwen2": ("Qwen2ForCausalLM", {"rms_norm_eps": 1e-5}),
    "qwen2, yarn": ("Qwen2ForCausalLM", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32, "tie_word_embeddings": True}),
}


def config_of(file):
    return read_gguf_config(file, *find_gguf_family(file))


def make(tmp_path, name="LlamaForCausalLM", config=None, **options):
    directory = write_checkpoint(tmp_path / "folder", tiny_config(name, vocab_size=288, **(config or {})))
    return directory, write_gguf(directory, tmp_path / "model.gguf", **options)


def architecture_in(path):
    return architecture_of(ConfigFile(path, config_of(GGUFFile.read(path))))


@pytest.mark.parametrize("case", CASES)
def test_gguf_architecture_and_weights_equal_source_checkpoint(case, tmp_path):
    directory, path = make(tmp_path, *CASES[case])
    expected, read = read_architecture(directory), architecture_in(path)
    assert read.layers == expected.layers
    for name in ("name", "vocab_size", "hidden_size", "rms_norm_eps", "max_context_tokens", "dtype"):
        assert getattr(read, name) == getattr(expected, name), name
    assert read.tie_word_embeddings == expected.tie_word_embeddings
    tensors = GGUFWeights(GGUFFile.read(path)).open()
    tensors.check(read.stored_tensors())
    for name, value in load_file(directory / "model.safetensors").items():
        assert torch.equal(tensors.tensor(name), value), name
        assert tensors.find(name) is not None
    tensors.release()
    assert torch.equal(tensors.tensor("model.norm.weight"), value if name == "model.norm.weight" else
                       load_file(directory / "model.safetensors")["model.norm.weight"])  # fmt: skip
    assert tensors.find("model.layers.9.mlp.up_proj.weight") is None


@pytest.mark.sweep(16)
@pytest.mark.parametrize("kind", [each.name for each in TensorType if each.name not in {"F32", "F16", "BF16"}])
def test_dequantized_blocks_equal_gguf_package(kind, tmp_path):
    """With random bytes: each kind is read as stored, also kinds that the package cannot write."""
    stored, rng = TensorType[kind], np.random.default_rng(0)
    _, path = make(tmp_path, config={"hidden_size": 256, "intermediate_size": 256, "head_dim": 64})
    read = GGUFFile.read(path)
    blocks = rng.integers(0, 256, (64 * 256 // stored.block_values, stored.block_bytes), np.uint8)
    with np.errstate(all="ignore"):  # some random scales are infinite, and refused
        is_finite = np.isfinite(gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])).all(axis=1)
    blocks = blocks[is_finite][: 8 * 256 // stored.block_values]
    theirs = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    (tmp_path / "blocks").write_bytes(bytes(64) + blocks.tobytes())
    name = "blk.0.ffn_down.weight"
    read.tensors[name] = type(read.tensors[name])(tmp_path / "blocks", stored, (8, 256), 64, blocks.nbytes)
    weights = GGUFWeights(GGUFFile(path, (path, tmp_path / "blocks"), read.metadata, read.tensors))
    ours = weights.open().tensor("model.layers.0.mlp.down_proj.weight").numpy()
    assert np.array_equal(ours.reshape(-1), theirs.reshape(-1))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_rope_row_order_is_restored_for_each_tensor_type(kind, tmp_path):
    directory, path = make(tmp_path, kind=kind)
    tensors, stored = GGUFWeights(GGUFFile.read(path)).open(), gguf.GGMLQuantizationType[kind]
    for name, value in load_file(directory / "model.safetensors").items():
        if value.dim() == 2:
            rounded = gguf.dequantize(gguf.quantize(value.numpy(), stored), stored)
            assert np.array_equal(tensors.tensor(name).float().numpy(), rounded), name


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_quantized_blocks_are_passed_unchanged(kind, tmp_path):
    """Rows of rotated pairs are in order; vectors and floats are not blocks."""
    directory, path = make(tmp_path, kind=kind)
    weights = GGUFWeights(GGUFFile.read(path))
    tensors, sizes = weights.open(), weights.block_bytes()
    for name, value in load_file(directory / "model.safetensors").items():
        blocks = tensors.weight(name)
        if value.dim() == 1:
            assert isinstance(blocks, torch.Tensor)
        else:
            assert torch.equal(blocks.dequantize(), tensors.tensor(name)), name
            assert sizes.pop(name) == blocks.nbytes
    assert not sizes


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q6_K", "IQ4_NL"])
def test_nan_block_scale_is_refused_by_tensor_name(kind, tmp_path):
    """As blocks, and as numbers, to which kinds are expanded that are not multiplied as stored."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    _, path = make(tmp_path, config=sizes, kind="Q8_0" if kind == "IQ4_NL" else kind)
    read = GGUFFile.read(path)
    stored = read.tensors["blk.1.ffn_up.weight"]
    scale_at = 208 if kind == "Q6_K" else 0
    with path.open("r+b") as file:
        file.seek(stored.offset + 3 * TensorType[kind].block_bytes + scale_at)
        file.write(np.float16(np.nan).tobytes())
    if kind == "IQ4_NL":
        read.tensors["blk.1.ffn_up.weight"] = replace(stored, type=TensorType[kind], num_bytes=256 * 8 * 18)
    tensors = GGUFWeights(read).open()
    name, message = "model.layers.1.mlp.up_proj.weight", r"model\.gguf: blk\.1\.ffn_up\.weight holds a scale that is"
    with pytest.raises(ModelError, match=message), np.errstate(all="ignore"):
        tensors.tensor(name)
    if kind == "IQ4_NL":
        return
    with pytest.raises(ModelError, match=message):
        tensors.weight(name)
    assert isinstance(tensors.weight("model.layers.1.mlp.down_proj.weight"), BlockWeight)


@pytest.mark.parametrize("number", [np.nan, -np.inf])
@pytest.mark.parametrize(
    ("own", "name"),
    [("blk.1.attn_norm.weight", "model.layers.1.input_layernorm.weight"),
     ("blk.0.attn_q.bias", "model.layers.0.self_attn.q_proj.bias")],
)  # fmt: skip
def test_nonfinite_norm_or_bias_is_refused_by_tensor_name(own, name, number, tmp_path):
    _, path = make(tmp_path, "Qwen2ForCausalLM", kind="Q8_0")
    read = GGUFFile.read(path)
    assert GGUFWeights(read).open().tensor(name).isfinite().all()
    with path.open("r+b") as file:
        file.seek(read.tensors[own].offset + 12)
        file.write(np.array(number, "<f4").tobytes())
    with pytest.raises(ModelError, match=rf"model\.gguf: {own} holds a value that is infinite or not a number"):
        GGUFWeights(read).open().tensor(name)


def test_gguf_block_kinds_equal_kernel_block_kinds():
    assert {kind.name for kind in BLOCK_KINDS} == {kind.name for kind in BlockKind}
    for kind, more in BLOCK_KINDS.items():
        block = BlockKind[kind.name]
        assert (block.block_values, block.block_bytes) == (kind.block_values, kind.block_bytes)
        assert block.packed_bytes(1, block.block_values) == kind.block_bytes + more


def test_halves_of_heads_undoes_llama_cpp_permutation():
    rows = torch.arange(24)
    converted = rows.view(3, 2, 4).swapaxes(1, 2).flatten()  # LlamaModel.permute of llama.cpp
    assert not torch.equal(converted, rows)
    assert torch.equal(converted[halves_of_heads(3, 24)], rows)


@pytest.mark.parametrize("name", _FAMILIES)
def test_tensor_names_equal_llama_cpp(name):
    """The name of each part in Hugging Face's layout equals the one in llama.cpp's own conversion."""
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    theirs, writes = gguf.get_tensor_name_map(architecture, 4), gguf.MODEL_TENSORS[architecture]
    parts = {gguf.TENSOR_NAMES[each].split(".")[-1] for each in writes if "{bid}" in gguf.TENSOR_NAMES[each]}
    if name in {"granitehybrid", "granitemoe"}:  # octavo has one name for the MLP and for the shared expert
        parts = {part for part in parts if not part.endswith("_shexp")}
    for part, ours in (_LAYER_NAMES | _FAMILIES[name].names).items():
        if part in parts:
            stored = ours.replace("mamba.decay", "mamba.A_log")
            names = f"model.layers.3.{stored}", f"backbone.layers.3.mixer.{stored.rpartition('.')[2]}"
            assert f"blk.3.{part}" in {theirs.get_name(each) for each in names}, part


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mamba"}, "'mamba'; the supported architectures of GGUF files are llama, "),
        ({"llama.block_count": 3}, "llama.block_count = 3: the file has tensors of 2 layers"),
        ({"llama.block_count": 2**31}, "llama.block_count = 2147483648"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.embedding_length": "64"}, "llama.embedding_length = '64': must be an integer"),
        ({"llama.embedding_length": 48}, "llama.embedding_length = 48: token_embd.weight has the shape .288, 64."),
        ({"llama.attention.head_count": 5, "llama.attention.key_length": None}, "head_count = 5: must divide"),
        ({"llama.rope.dimension_count": 32}, "llama.rope.dimension_count = 32: a head has 16 dimensions"),
        ({"llama.expert_count": 8}, "llama.expert_used_count is missing; this architecture needs it"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale = 0.5: octavo does not support this"),
        ({"llama.attention.causal": False}, "is_causal = False"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length = 8: keys have a width of 16"),
        ({"llama.attention.head_count_kv": [2, 1]}, "llama.attention.head_count_kv = .2, 1.: must be an integer"),
        ({"llama.rope.scaling.type": "dynamic", "llama.rope.scaling.factor": 2.0}, "supports the rope types"),
        ({"llama.rope.dimension_count": 8}, "partial_rotary_factor|rotates whole heads"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "layer_norm_rms_epsilon = -1.0: must be a number above 0"),
    ],
)  # fmt: skip
def test_unsupported_metadata_is_refused(changes, message, tmp_path):
    _, path = make(tmp_path, changes=changes)
    with pytest.raises(ModelError, match=message) as caught:
        architecture_in(path)
    assert str(path) in str(caught.value)


def test_equal_per_layer_values_are_read_as_one_number(tmp_path):
    _, path = make(tmp_path, changes={"llama.attention.head_count_kv": [2, 2], "llama.expert_count": 0})
    assert architecture_in(path).layers[1].attention.num_kv_heads == 2


def test_rope_factors_other_than_llama3_are_refused(tmp_path):
    _, path = make(tmp_path, config={"rope_parameters": LLAMA3, "head_dim": 64})
    content, stored = bytearray(path.read_bytes()), GGUFFile.read(path).tensors["rope_freqs.weight"]
    numbers = np.frombuffer(content, np.float32, 32, stored.offset)
    for changed, message in (
        (numbers[20] * 1.01, "differs from the values of Llama 3"),
        (0, "not a number above zero"),
    ):
        numbers[20] = changed
        path.write_bytes(content)
        with pytest.raises(ModelError, match=message):
            architecture_in(path)


@pytest.mark.parametrize(
    ("renamed", "name", "message"),
    [
        (b"blk.1.attn_k.weight", b"blk.1.attn_z.weight", "self_attn.k_proj.weight, which this architecture needs"),
        (b"output_norm.weight", b"output_morn.weight", "model.norm.weight, which this architecture needs"),
        (b"token_embd.weight", b"token_embs.weight", "no tensor token_embd.weight"),
        (b"\0output.weight", b"\0outbut.weight", "has outbut.weight, which this architecture does not use"),
    ],
)
def test_missing_or_unexpected_tensor_is_refused(renamed, name, message, tmp_path):
    _, path = make(tmp_path)
    path.write_bytes(path.read_bytes().replace(renamed, name))
    with pytest.raises(ModelError, match=message):
        GGUFWeights(GGUFFile.read(path)).open().check(architecture_in(path).stored_tensors())


def test_tensor_shape_must_match_metadata(tmp_path):
    _, path = make(tmp_path, changes={"llama.feed_forward_length": 161})
    with pytest.raises(ModelError, match=r"blk.0.ffn_\w+.weight has the shape"):
        GGUFWeights(GGUFFile.read(path)).open().check(architecture_in(path).stored_tensors())


def test_gguf_config_equals_config_json(tmp_path):
    directory, path = make(tmp_path)
    said, ours = json.loads((directory / "config.json").read_text()), config_of(GGUFFile.read(path))
    keys = said.keys() & ours.keys()
    assert len(keys) > 10
    assert {key: ours[key] for key in keys} == {key: said[key] for key in keys}


@pytest.mark.parametrize(
    ("kinds", "dtype"),
    [
        ("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("F16 F32", "float32"), ("Q4_K Q6_K", "bfloat16"),
        ("Q8_0 BF16", "bfloat16"), ("Q8_0 F16", "float32"), ("Q4_K IQ3_S", "float32"), ("IQ2_XS", "float32"),
    ],
)  # fmt: skip
def test_compute_dtype_represents_all_matrices_exactly(kinds, dtype, tmp_path):
    _, path = make(tmp_path)
    read, stored = GGUFFile.read(path), [TensorType[kind] for kind in kinds.split()]
    matrices = [name for name, each in read.tensors.items() if len(each.shape) == 2]
    for number, name in enumerate(matrices):
        read.tensors[name] = replace(read.tensors[name], type=stored[number % len(stored)])
    assert config_of(read)["dtype"] == dtype


def test_expanded_tensor_types_are_logged(tmp_path, caplog, monkeypatch):
    _, path = make(tmp_path, config={"hidden_size": 256, "intermediate_size": 256, "head_dim": 64})
    read = GGUFFile.read(path)
    name = "blk.1.ffn_up.weight"
    read.tensors[name] = replace(read.tensors[name], type=TensorType.IQ3_S, num_bytes=256 * 110)
    expected = architecture_of(ConfigFile(path, config_of(read))).stored_tensors()
    GGUFWeights(read).open().check(expected)
    assert "has weights of type IQ3_S, which octavo expands" in caplog.text
    monkeypatch.setattr("octavo.models.gguf_tensors.find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"IQ3_S need the package gguf: pip install 'octavo\[gguf\]'"):
        GGUFWeights(read).open().check(expected)
