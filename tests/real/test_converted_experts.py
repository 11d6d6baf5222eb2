"""Mixtures of experts and hybrids that llama.cpp's own converter has written give the tokens of their folders."""

import json
import random
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from quantized_files import store_as_mxfp4
from real.conftest import HOME, SCALE, drawn, found

from octavo import LLMEngine, ModelConfig, SamplingParams
from octavo.models.random_weights import tiny_config, write_checkpoint

VOCAB_SIZE, NUM_TOKENS = 288, 24
PARTS = ("convert_hf_to_gguf.py", "conversion/", "gguf-py/")
FAMILIES = (
    "Qwen3Moe", "Qwen2Moe", "Mixtral", "Olmoe", "GptOss", "GptOss in MXFP4", "GraniteMoe", "Glm4Moe", "DeepseekV2",
    "DeepseekV3", "Glm4MoeLite", "Gemma4", "Gemma4 without experts", "Lfm2", "Lfm2Moe",
    "Qwen3_5", "Qwen3_5Moe", "Qwen3Next", "GraniteMoeHybrid", "GraniteMoeHybrid without experts",
    "GraniteMoeHybrid without Mamba", "NemotronH", "NemotronH without experts",
)  # fmt: skip
PREDICTING = ("Qwen3_5", "Qwen3_5Moe", "Qwen3Next")  # with layers of multi-token prediction, which are not loaded
LATENT = ("DeepseekV2", "DeepseekV3", "Glm4MoeLite")
SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32,
    "num_hidden_layers": 4, "intermediate_size": 160,
}  # fmt: skip

# The converter knows only these names of Granite's layers, and these sizes.
GRANITE_4 = {"layer_types": ["mamba", "attention"], "mamba_n_heads": 12, "mamba_d_head": 16, "head_dim": 16}
DENSE_GRANITE_4 = GRANITE_4 | {"num_local_experts": 0, "num_experts_per_tok": 0}
OF_CASE = {
    "Gemma4 without experts": {
        "enable_moe_block": False, "attention_k_eq_v": True, "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
    },
    "Lfm2Moe": {"tie_word_embeddings": True},  # its files have no other head
    "GraniteMoeHybrid": GRANITE_4,
    "GraniteMoeHybrid without experts": DENSE_GRANITE_4,
    "GraniteMoeHybrid without Mamba": DENSE_GRANITE_4
    | {"layer_types": ["attention"] * 2, "position_embedding_type": "rope"},
    "NemotronH": {"hybrid_override_pattern": "ME*E"},
    "NemotronH without experts": {"hybrid_override_pattern": "M-*-"},
}  # fmt: skip


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory):
    archives = sorted((HOME / "downloads").glob("llama_cpp_python-*.tar.gz"))
    source = found(archives[-1] if archives else HOME / "downloads" / "llama_cpp_python.tar.gz")
    folder, marker = tmp_path_factory.mktemp("llama.cpp"), "/vendor/llama.cpp/"
    with tarfile.open(source) as archive:
        for member in archive:
            _, is_inside, name = member.name.partition(marker)
            if is_inside and name.startswith(PARTS) and member.isfile():
                archive.extract(member, folder, filter="data")
    return next(folder.glob("*/vendor/llama.cpp"))


@pytest.mark.parametrize("case", drawn(FAMILIES, SCALE))
def test_tokens_of_converted_experts_equal_those_of_folder(case, llama_cpp, tmp_path):
    family, config = case.split()[0], config_of(case)
    folder, file = write_checkpoint(tmp_path / "folder", config, std=0.1), tmp_path / "model.gguf"
    if family in PREDICTING:
        add_prediction_layer(folder)
    if "MXFP4" in case:
        store_as_mxfp4(folder)
    if family == "Gemma4":  # the converter counts the tokens
        tokenizer = {"model": {"vocab": {str(index): index for index in range(VOCAB_SIZE)}}, "added_tokens": []}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    command = [sys.executable, str(Path(__file__).with_name("converted_with_bytes.py")), llama_cpp, folder, file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tokens = tokens_of(folder)
    assert tokens_of(file) == tokens
    assert len({*map(tuple, tokens)}) == len(tokens)


def config_of(case):
    """Return a configuration that the converter can read."""
    family = case.split()[0]
    config = tiny_config(f"{family}ForCausalLM", **SIZES)
    if family in LATENT:
        config |= {"num_key_value_heads": SIZES["num_attention_heads"], "head_dim": config["qk_rope_head_dim"]}
    if family == "GraniteMoe":  # its files have no other head_dim
        config["head_dim"] = SIZES["hidden_size"] // SIZES["num_attention_heads"]
    if "global_head_dim" in config:  # the converter needs another one than head_dim
        config["global_head_dim"] = 2 * SIZES["head_dim"]
    config |= OF_CASE.get(case, {})
    if "mlp_layer_types" in config:
        config |= {"mlp_layer_types": ["dense", *["sparse"] * 3], "first_k_dense_replace": 1}
    if family in PREDICTING:
        config["mtp_num_hidden_layers"] = 1
    if "layer_types" in config:
        config["layer_types"] = (config["layer_types"] * 2)[: SIZES["num_hidden_layers"]]
    return config


def add_prediction_layer(folder):
    """Add a layer of multi-token prediction, with the weights of the last attention layer."""
    tensors = load_file(folder / "model.safetensors")
    layer, size = f"model.layers.{SIZES['num_hidden_layers'] - 1}.", SIZES["hidden_size"]
    more = {name.replace(layer, "mtp.layers.0."): each.clone() for name, each in tensors.items() if layer in name}
    more |= {f"mtp.{name}.weight": torch.ones(size) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    save_file(tensors | more | {"mtp.fc.weight": torch.ones(size, 2 * size)}, folder / "model.safetensors")


def tokens_of(model):
    config = ModelConfig(model=str(model), dtype="float32", skip_tokenizer_init=True)
    engine, rng, tokens = LLMEngine(model_config=config), random.Random(0), {}
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for length in (1, 3, 17, 40, 90):
        prompt = [rng.randrange(2, VOCAB_SIZE) for _ in range(length)]
        engine.add_request(str(length), {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
    return [tokens[name] for name in sorted(tokens)]
