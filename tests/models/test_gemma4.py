"""Gemma 4: published configurations, refusals, tables that stay in their files, and tensors that no layer reads."""

import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.errors import ModelError
from octavo.kernels.reference import ReferenceKernels
from octavo.models import gguf_tensors, weight_source
from octavo.models.gguf_file import StoredArray, TensorType
from octavo.models.gguf_tensors import ExpandedRows
from octavo.models.loader import load_model
from octavo.models.random_weights import RandomWeights, tiny_config, write_checkpoint
from octavo.models.registry import read_architecture
from octavo.models.weight_bytes import weight_bytes
from octavo.models.weight_source import FolderWeights

CPU = torch.device("cpu")
TABLE = "model.embed_tokens_per_layer.weight"
IDS = [(31 * i + 7) % 512 for i in range(60)]
SHAPE = {"head_dim": 256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "model_type": "gemma4_text"}
E4B = SHAPE | {
    "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42, "num_attention_heads": 8,
    "num_key_value_heads": 2, "num_kv_shared_layers": 18, "final_logit_softcapping": 30.0, "sliding_window": 512,
}  # fmt: skip
A4B = SHAPE | {
    "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16,
    "num_key_value_heads": 8, "num_global_key_value_heads": 2, "attention_k_eq_v": True, "enable_moe_block": True,
    "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704, "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
}  # fmt: skip


def read(directory, config, name="Gemma4ForConditionalGeneration"):
    config = {"architectures": [name], "text_config": config, "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    return read_architecture(directory)


def load(path, **options):
    return load_model(
        FolderWeights(path), read_architecture(path), ReferenceKernels(), dtype="float32", device=CPU,
        max_model_len=128, **options,
    )  # fmt: skip


def test_later_layers_of_e4b_share_kv_of_earlier_ones(tmp_path):
    architecture = read(tmp_path, E4B)
    attentions = architecture.attentions
    assert [each.shared_layer for each in attentions[22:26]] == [None, None, 22, 22]
    assert {each.shared_layer for each in attentions[24:]} == {22, 23}
    assert [(each.head_dim, each.window) for each in attentions[22:24]] == [(256, 512), (512, None)]
    assert architecture.kv_layout.bytes_per_token("bfloat16") == 2 * 2 * 2 * (20 * 256 + 4 * 512)
    assert (architecture.embeddings.width, architecture.logit_softcap, architecture.norm_offset) == (256, 30.0, 0.0)
    assert attentions[23].rope.kind == "proportional"
    assert (attentions[23].rope.theta, attentions[22].rope.theta) == (1e6, 1e4)
    table = 262_144 * 42 * 256
    assert weight_bytes(architecture, "bfloat16") == 2 * (architecture.num_parameters - table) + 2 * 42 + 2 * 256
    assert architecture.num_parameters - architecture.num_active_parameters == table - 42 * 256


def test_full_layers_of_26b_have_values_of_keys_and_experts_have_a_branch(tmp_path):
    architecture = read(tmp_path, A4B)
    near, far = architecture.layers[0], architecture.layers[5]
    assert (near.attention.num_kv_heads, near.attention.values_are_keys) == (8, False)
    assert (far.attention.num_kv_heads, far.attention.values_are_keys, far.attention.head_dim) == (2, True, 512)
    names = far.attention.tensors("0", 2816).qkv.names
    assert [name.rpartition(".")[2] for name in names] == ["q_proj", "k_proj"]
    assert (near.mlp.router.num_chosen, near.mlp.shared_size, near.norms.before_mlp) == (8, 2112, None)
    assert 25e9 < architecture.num_parameters < 26e9
    assert 3.5e9 < architecture.num_active_parameters < 4.2e9


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all': octavo computes causal"),
        ({"num_kv_shared_layers": 42}, "num_kv_shared_layers = 42: must be an integer from 0 to 41"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers = -1: must be an integer from 0 to 41"),
        ({"num_kv_shared_layers": 40}, r"num_kv_shared_layers = 40: no layer of its own has the keys of layer 5"),
        ({"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input = 100: must be at least vocab_size = 262144"),
        ({"hidden_size_per_layer_input": -2}, "hidden_size_per_layer_input = -2: must be an integer from 1"),
        ({"global_head_dim": 640}, "global_head_dim = 640: octavo's kernels support a head_dim of at most 512"),
        ({"global_head_dim": 33}, "global_head_dim = 33: rotary embeddings need an even head_dim"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3: must divide num_attention_heads = 8"),
        ({"per_layer_config": {"0": {"sliding_window": 4}}}, "per_layer_config.0.sliding_window = 4: octavo reads"),
        ({"per_layer_config": {"0": {"head_dim": 7}}}, "head_dim = 7: rotary embeddings need an even head_dim"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5}, "top_k_experts = 5: must be at most num"),
        ({"enable_moe_block": True}, "num_experts is missing"),
        ({"hidden_activation": "relu"}, "hidden_activation = 'relu'"),
        ({"layer_types": ["chunked_attention"] * 42}, "layer_types = .*chunked_attention"),
        ({"attention_k_eq_v": "yes"}, "attention_k_eq_v = 'yes': must be true or false"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.001}}},
            "partial_rotary_factor.*0.001 of a head's 512 dimensions is no pair",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "spiral"}}},
            "rope_type = 'spiral': octavo supports the rope types",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "partial_rotary_factor": 0.5}}},
            "partial_rotary_factor = 0.5: octavo rotates whole heads",
        ),
    ],
)
def test_unsupported_config_values_are_refused_by_name(changes, words, tmp_path):
    with pytest.raises(ModelError, match=words):
        read(tmp_path, E4B | changes)


def test_assistant_models_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"Gemma4AssistantForCausalLM.*: unknown architecture"):
        read(tmp_path, {}, name="Gemma4AssistantForCausalLM")


def test_kv_projections_of_layers_that_share_kv_are_ignored(tmp_path, prompt_logits):
    """Published checkpoints have them. A layer with KV of its own needs them."""
    path = write_checkpoint(tmp_path, tiny_config("Gemma4ForCausalLM"), std=0.1)
    expected = prompt_logits(load(path), IDS)
    tensors = load_file(path / "model.safetensors")
    unused = {
        name.replace("layers.0", "layers.2"): each.clone() for name, each in tensors.items() if OF_KV.search(name)
    }
    assert len(unused) == 3
    save_file(tensors | unused, path / "model.safetensors")
    assert torch.equal(prompt_logits(load(path), IDS), expected)
    save_file({name: each for name, each in tensors.items() if not OF_KV.search(name)}, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"the weights lack model\.layers\.0\.self_attn\.k_\w+\.weight"):
        load(path)
    named = {"model.layers.2.self_attn.q_extra.weight": torch.ones(2)}
    save_file(tensors | named, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"q_extra\.weight, which config\.json does not require"):
        load(path)


OF_KV = re.compile(r"layers\.0\.self_attn\.(k_proj|v_proj|k_norm)")


def file_at(address):
    """Return the file that is mapped at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(each, 16) for each in line.split()[0].split("-"))
        if first <= address < last:
            return line.split()[-1]
    return None


@pytest.mark.sweep(12)
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_table_stays_in_its_file(tmp_path, quantization, prompt_logits):
    config = tiny_config("Gemma4ForCausalLM", vocab_size_per_layer_input=40_000)
    path = write_checkpoint(tmp_path, config, std=0.1)
    model = load(path, quantization=quantization)
    stored = load_file(path / "model.safetensors")[TABLE]
    rows = model.layer_inputs.table.rows(torch.tensor([39_999, 3, 3]), stored.dtype)
    assert torch.equal(rows, stored[[39_999, 3, 3]])
    assert file_at(model.layer_inputs.table.matrix.data_ptr()) == str(path / "model.safetensors")
    assert prompt_logits(model, IDS).isfinite().all()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q6_K", "IQ4_NL"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_gguf_tables_are_expanded_alone(dtype, kind, tmp_path, generator, monkeypatch):
    monkeypatch.setattr(weight_source, "_VALUES_AT_ONCE", 3 * 512)
    stored_type = TensorType[kind]
    row_bytes = 512 // stored_type.block_values * stored_type.block_bytes
    packed = torch.randint(0, 60, (9, row_bytes), generator=generator, dtype=torch.uint8)
    rows = ExpandedRows(StoredArray(tmp_path, stored_type, (9, 512), 0, packed.numel()), packed)
    expected = gguf.dequantize(packed.numpy(), gguf.GGMLQuantizationType[kind]).astype(np.float32)
    chosen = torch.tensor([8, 0, 0, 5])
    assert torch.equal(rows.rows(chosen, dtype), torch.from_numpy(expected)[chosen].to(dtype))
    assert rows.rows(chosen[:0], dtype).shape == (0, 512)


def test_step_expands_few_rows_of_gguf_table_at_a_time(tmp_path, monkeypatch):
    """So a step does not need memory for all its rows in float32."""
    kind = TensorType.Q8_0
    packed = torch.zeros(4, 4096 // kind.block_values * kind.block_bytes, dtype=torch.uint8)
    rows = ExpandedRows(StoredArray(tmp_path, kind, (4, 4096), 0, packed.numel()), packed)
    expand, sizes = gguf_tensors._expand, []

    def expand_and_note(stored, blocks):
        numbers = expand(stored, blocks)
        sizes.append(numbers.nbytes)
        return numbers

    monkeypatch.setattr(gguf_tensors, "_expand", expand_and_note)
    assert rows.rows(torch.zeros(1000, dtype=torch.int64), torch.bfloat16).shape == (1000, 4096)
    assert sum(sizes) == 1000 * 4096 * 4
    assert max(sizes) == 2 << 20


def test_dummy_table_makes_few_rows():
    weights = RandomWeights({"table.weight": (1 << 30, 64)}, torch.bfloat16, seed=3)
    table = weights.table("table.weight")
    assert table.first_rows.shape == (4096, 64)
    assert torch.equal(table.rows(torch.tensor([5, 4096 + 5]), torch.float32), table.first_rows[[5, 5]].float())


@pytest.mark.parametrize("number", [0.02, 0.5, -1.5])
def test_layer_scalar_multiplies_whole_stream(number, tmp_path, prompt_logits):
    """The last layer's number has no effect but through the final norm's epsilon and its sign."""
    path = write_checkpoint(tmp_path, tiny_config("Gemma4UnifiedForCausalLM", final_logit_softcapping=None), std=0.1)
    tensors = load_file(path / "model.safetensors")
    before = prompt_logits(load(path), IDS)
    name = "model.layers.1.layer_scalar"
    scale = number / tensors[name]
    save_file(tensors | {name: torch.full((1,), number)}, path / "model.safetensors")
    after = prompt_logits(load(path), IDS)
    torch.testing.assert_close(after, before * scale.sign(), rtol=0, atol=1e-3 * before.abs().max().item())
