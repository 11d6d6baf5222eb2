"""GGUF files of models with gated delta nets give the logits of their folders, for every type of weights."""

import json

import delta_net_gguf
import pytest
import torch
from gguf_files import write_gguf
from safetensors.torch import save_file

from octavo.kernels import create_kernels
from octavo.models.config_file import ConfigFile
from octavo.models.gguf_file import GGUFFile
from octavo.models.gguf_weights import GGUFWeights
from octavo.models.loader import load_model
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import architecture_of
from octavo.models.weight_source import FolderWeights
from octavo.startup.gguf_checkpoint import GGUFCheckpoint

CPU = torch.device("cpu")
IDS = [(7 * place * place + 3 * place) % 288 for place in range(90)]
SIZES = {"vocab_size": 288, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
# All experts are chosen, because rounding may choose others.
EXPERTS = {
    "num_experts": 3,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
HEADS = {
    "2 values a key": (4, 8),
    "4 values a key": (2, 8),
    "5 values for one key": (1, 5),
    "as many values as keys": (8, 8),
}
KINDS = {
    "BF16": ({"kind": "BF16"}, 1e-5),
    "F16": ({"kind": "F16"}, 1e-5),
    "Q8_0": ({"kind": "Q8_0"}, 0.06),
    "Q4_0": ({"kind": "Q4_0"}, 0.06),
    "Q4_0 with rates in F32": ({"kind": "Q4_0", "kinds": {"ssm_alpha": "F32", "ssm_beta": "F32"}}, 0.06),
    "Q4_K_M": ({"kind": "Q4_K", "kinds": {"attn_v": "Q6_K", "ffn_down": "Q6_K", "attn_qkv": "Q5_K"}}, 0.06),
}


def make(tmp_path, name, num_keys=4, num_values=8, **options):
    heads = {"linear_num_key_heads": num_keys, "linear_num_value_heads": num_values, "linear_value_head_dim": 32}
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    experts = EXPERTS if "num_experts" in tiny_config(name) else {}
    config = tiny_config(name, **SIZES, **heads, **experts, num_hidden_layers=3, layer_types=kinds)
    folder = write_checkpoint(tmp_path / "folder", config, std=0.1)
    return folder, write_gguf(folder, tmp_path / "model.gguf", **options)


def logits_of(weights, config, prompt_logits):
    architecture = architecture_of(ConfigFile(weights.path, config))
    model = load_model(
        weights, architecture, create_kernels(CPU, "auto"), dtype="float32", device=CPU, max_model_len=128
    )
    with torch.inference_mode():
        return prompt_logits(model, IDS, step=23)


def apart(ours, theirs):
    """Return the largest difference, relative to the largest logit."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", delta_net_gguf.ARCHITECTURES)
def test_float_gguf_gives_logits_of_its_folder(name, heads, tmp_path, prompt_logits):
    folder, path = make(tmp_path, name, *HEADS[heads])
    checkpoint = GGUFCheckpoint(path)
    config = checkpoint.read_config()
    expected = logits_of(FolderWeights(folder), json.loads((folder / "config.json").read_text()), prompt_logits)
    ours = logits_of(checkpoint.weights, config, prompt_logits)
    assert apart(ours, expected) < 1e-5
    assert torch.equal(ours.argmax(1), expected.argmax(1))
    for changed in ("value_heads_are_tiled", "decay_is_stored"):
        altered = logits_of(checkpoint.weights, config | {changed: not config.get(changed, False)}, prompt_logits)
        keeps_order = changed == "value_heads_are_tiled" and HEADS[heads][0] in {1, HEADS[heads][1]}
        assert (apart(altered, expected) > 0.02) is not keeps_order


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", delta_net_gguf.ARCHITECTURES)
def test_stored_types_give_logits_of_their_floats(name, kind, tmp_path, prompt_logits):
    """The same tensors as floats, in the file's order of heads. Products of blocks round activations."""
    options, tolerance = KINDS[kind]
    _, path = make(tmp_path, name, **options)
    checkpoint = GGUFCheckpoint(path)
    config, tensors = checkpoint.read_config(), GGUFWeights(GGUFFile.read(path)).open()
    floats = {name: tensors.tensor(name).float().clone() for name in checkpoint.weights.names()}
    (tmp_path / "floats").mkdir()
    save_file(floats, tmp_path / "floats" / "model.safetensors")
    expected = logits_of(FolderWeights(tmp_path / "floats"), config, prompt_logits)
    ours = logits_of(checkpoint.weights, config, prompt_logits)
    assert (ours - expected).norm() < tolerance * expected.norm()


def test_dropped_sizes_of_one_are_restored(tmp_path):
    _, path = make(tmp_path, "Qwen3_5MoeForCausalLM")
    tensors = GGUFFile.read(path).tensors
    assert tensors["blk.0.ssm_conv1d.weight"].shape == (2 * 4 * 24 + 8 * 32, 1, 4)
    assert tensors["blk.0.ffn_gate_inp_shexp.weight"].shape == (1, 256)
