"""config.json of all families with old and new keys: values read, values computed from them, and refusals."""

import dataclasses
import json
import math
import re
import subprocess
import sys

import pytest
from sdks import transformers

from octavo.errors import ModelError
from octavo.models.config_file import ConfigFile
from octavo.models.random_weights import tiny_config
from octavo.models.registry import FAMILIES, read_architecture
from octavo.models.weight_bytes import weight_bytes
from octavo.models.weight_files import LFM2_PARTS

QWEN25_OLD = {  # as published, before transformers 5
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def write(directory, config):
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_published_old_style_config_is_read(tmp_path):
    architecture = read_architecture(write(tmp_path, QWEN25_OLD))
    assert architecture.name == "Qwen2ForCausalLM"
    assert architecture.layers == (architecture.layers[0],) * 24
    attention = architecture.layers[0].attention
    assert attention.head_dim == 64
    assert attention.rope.theta == 1e6
    assert architecture.dtype == "bfloat16"
    assert attention.qkv_bias
    assert not attention.o_bias
    assert attention.window is None
    assert architecture.eos_token_ids == (151645,)
    assert architecture.max_context_tokens == 32768
    assert architecture.num_parameters == 494_032_768  # the model card's 0.49B
    assert weight_bytes(architecture, "bfloat16") == 2 * 494_032_768
    assert architecture.kv_layout.bytes_per_token("bfloat16") == 2 * 24 * 2 * 64 * 2
    assert architecture.attention_share == 24 * 2 * 14 * 64 / (24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864))


OWN_SCALING = {
    "Phi3ForCausalLM": {
        "type": "longrope",
        "short_factor": [1.5] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 4096,
    }
}


@pytest.mark.sweep(16)
@pytest.mark.parametrize("name", [name for name in FAMILIES if not name.startswith("Gemma4")])  # has only the new style
def test_new_config_style_equals_old_style(name, tmp_path):
    """transformers 5 writes `dtype` and `rope_parameters` in place of older keys."""
    scaling = OWN_SCALING.get(name, {"rope_type": "linear", "factor": 2.0})
    old = tiny_config(name, rope_theta=5e5, rope_scaling=scaling, torch_dtype="bfloat16")
    del old["dtype"], old["rope_parameters"]
    expected = read_architecture(write(tmp_path, old))
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    ropes = saved["rope_parameters"]
    assert ropes.get("full_attention", ropes)["rope_theta"] == 5e5
    assert "rope_theta" not in saved
    assert "torch_dtype" not in saved
    assert dataclasses.replace(read_architecture(tmp_path), dtype="bfloat16") == expected


_RENAMED = {
    r"(layers\.\d+)\.(router|experts)(?:\.proj)?(?=\.)": r"\1.mlp.\2",  # Gemma 4
    r"\.block_sparse_moe\.": ".mlp.",
    r"\.shared_mlp\.input_linear\.": ".mlp.gate_up_proj.",
    r"\.shared_mlp\.output_linear\.": ".mlp.down_proj.",
    r"model\.embeddings\.": "model.embed_tokens.",  # Nemotron-H
    r"model\.norm_f\.": "model.norm.",
    r"(layers\.\d+)\.norm\.": r"\1.input_layernorm.",
    r"\.mixer\.(?=[qkvo]_proj)": ".self_attn.",
    r"\.mixer\.(?=up_proj|down_proj|gate|experts|shared_experts)": ".mlp.",
    r"\.mixer\.": ".mamba.",
}


def renamed(name):
    """Return octavo's name of a parameter of transformers."""
    for theirs, ours in _RENAMED.items():
        name = re.sub(theirs, ours, name)
    for theirs, ours in LFM2_PARTS.items():
        name = name.replace(theirs, ours)
    return name


@pytest.mark.sweep(20)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_tensor_shapes_equal_transformers(name, tied, tmp_path):
    """Transformers never ties the embeddings of Nemotron-H."""
    tied = tied and name != "NemotronHForCausalLM"
    config = tiny_config(name, attention_bias=True, mlp_bias=True, tie_word_embeddings=tied)
    architecture = read_architecture(write(tmp_path, config))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    expected = {}
    for key, parameter in model.named_parameters():
        expected |= shapes_of_experts(renamed(key), tuple(parameter.shape), is_transposed=name == "GptOssForCausalLM")
    names = ("score_correction_bias", "layer_scalar", ".expert_bias")
    biases = {renamed(key): tuple(each.shape) for key, each in model.named_buffers() if key.endswith(names)}
    assert architecture.tensor_shapes() == expected | biases
    assert architecture.num_parameters == model.num_parameters() + sum(map(math.prod, biases.values()))


def shapes_of_experts(name, shape, *, is_transposed):
    """Return the shapes of the experts' matrices in a tensor of all experts; that of any other tensor."""
    experts, _, part = name.rpartition(".")
    if not experts.endswith(".experts"):
        return {name: shape}
    kind = "bias" if part.endswith("_bias") else "weight"
    part, (num_experts, *own) = part.removesuffix("_bias"), shape
    rows, *columns = own[::-1] if is_transposed else own
    parts = ["gate_proj", "up_proj"] if part == "gate_up_proj" else [part]
    shape = (rows // len(parts), *columns)
    return {f"{experts}.{index}.{each}.{kind}": shape for index in range(num_experts) for each in parts}


def test_layer_windows_follow_config():
    assert windows("Mistral", sliding_window=64) == (64, 64)
    assert windows("Mistral", sliding_window=None) == (None, None)
    assert windows("Mistral", drop=("sliding_window",)) == (4096, 4096)  # the family's default
    assert windows("Llama", sliding_window=64) == (None, None)
    assert windows("Qwen2", sliding_window=64) == (None, None)
    assert windows("Qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=1) == (None, 64)
    assert windows("Qwen3", sliding_window=64, use_sliding_window=True, max_window_layers=0) == (64, 64)
    assert windows("Qwen2", sliding_window=None, use_sliding_window=True, max_window_layers=0) == (None, None)
    missing = windows("Qwen2", drop=("sliding_window",), use_sliding_window=True, max_window_layers=0)
    assert missing == (4096, 4096)
    kinds = ["sliding_attention", "full_attention"]
    assert windows("Qwen3", sliding_window=64, use_sliding_window=True, layer_types=kinds) == (64, None)


def windows(family, drop=(), **changes):
    from octavo.models.registry import find_family

    name = f"{family}ForCausalLM"
    config = {key: value for key, value in tiny_config(name, **changes).items() if key not in drop}
    layers = find_family(name).read_architecture(ConfigFile(None, config), name).layers
    return tuple(layer.attention.window for layer in layers)


SMOLLM3_3B = {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 65536,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 128256,
}
PHI4_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "full_attn_mod": 1,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "phi3",
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 200064,
}


def test_published_layers_without_rope_are_read(tmp_path):
    architecture = read_architecture(write(tmp_path, SMOLLM3_3B))
    assert [layer.attention.rope is None for layer in architecture.layers] == [False, False, False, True] * 9
    assert architecture.num_parameters == 3_075_098_624  # 3.08B on the hub; embeddings are tied by default
    assert read_architecture(write(tmp_path, SMOLLM3_3B | {"no_rope_layers": None})) == architecture


def test_published_longrope_is_read(tmp_path):
    architecture = read_architecture(write(tmp_path, PHI4_MINI))
    attention = architecture.layers[0].attention
    assert architecture.num_parameters == 3_836_021_760  # 3.84B on the hub
    assert (attention.head_dim, attention.rope.rotary_dim(128), attention.window) == (128, 96, 262144)
    assert architecture.max_context_tokens == 131072
    for length, factor in ((4096, 1.0), (4097, 2.0)):
        assert architecture.within(length).layers[7].attention.rope.short_factors == (factor,) * 48


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("Llama", {"embedding_multiplier": 12.0}, ["embedding_multiplier = 12.0", "LlamaForCausalLM"]),
        ("Llama", {"residual_multiplier": 0.2}, ["residual_multiplier"]),
        ("Qwen3", {"attention_multiplier": 0.1}, ["attention_multiplier"]),
        ("Olmo2", {"clip_qkv": 8.0}, ["clip_qkv"]),
        ("Mistral", {"no_rope_layers": [1, 0]}, ["no_rope_layers"]),
        ("Granite", {"num_local_experts": 32}, ["num_local_experts = 32"]),
        ("Granite", {"logits_scaling": 0}, ["logits_scaling = 0", "above 0"]),
        ("Granite", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "whole heads"]),
        (
            "Mistral",
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            ["llama_4_scaling_beta"],
        ),
        ("Phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, ["rope_scaling", "longrope"]),
        ("Phi3", {"partial_rotary_factor": 0.7}, ["partial_rotary_factor", "11 of 16"]),
        ("Phi3", {"partial_rotary_factor": 1.5}, ["partial_rotary_factor", "not be above 1"]),
        ("SmolLM3", {"no_rope_layers": [1]}, ["no_rope_layers", "each of 2 layers"]),
        ("SmolLM3", {"no_rope_layers": [1, 2]}, ["no_rope_layers"]),
        ("SmolLM3", {"no_rope_layers": "all"}, ["no_rope_layers", "integers"]),
        ("Ministral3", {"rope_parameters": None}, ["rope_parameters is missing"]),
        ("Ministral", {"layer_types": ["sliding_attention", "full_attention"]}, ["layer_types", "sliding_window"]),
        (
            "Olmo3",
            {"rope_parameters": {"rope_type": "default"}},
            ["rope_parameters.full_attention", "each type of layer"],
        ),
        ("Glm4", {"hidden_act": "gelu_new"}, ["hidden_act", "gelu_new"]),
    ],
)
def test_family_refuses_unsupported_config_values(name, changes, words, tmp_path):
    write(tmp_path, tiny_config(f"{name}ForCausalLM") | changes)
    with pytest.raises(ModelError) as caught:
        read_architecture(tmp_path)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("value", "expected"), [(-1, ()), ([-1, 7], (7,)), ([], ()), (None, ()), (0, (0,))])
def test_negative_token_ids_mean_none(value, expected, tmp_path):
    write(tmp_path, tiny_config("LlamaForCausalLM") | {"eos_token_id": value, "bos_token_id": value})
    architecture = read_architecture(tmp_path)
    assert architecture.eos_token_ids == expected
    assert architecture.bos_token_id == next(iter(expected), None)


def test_head_dim_512_is_accepted(tmp_path):
    write(tmp_path, tiny_config("LlamaForCausalLM", head_dim=512))
    assert read_architecture(tmp_path).layers[0].attention.head_dim == 512


def test_context_length_includes_rope_scaling(tmp_path):
    def longest(**changes):
        return read_architecture(write(tmp_path, tiny_config("LlamaForCausalLM", **changes))).max_context_tokens

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert longest() == 2048
    assert longest(rope_parameters={"rope_type": "linear", "factor": 2.0}) == 4096
    assert longest(rope_parameters=yarn) == 2048
    assert longest(rope_parameters=yarn | {"original_max_position_embeddings": 1024}) == 4096


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "unknown", *FAMILIES]),
        ({"architectures": None}, ["architectures", *FAMILIES]),
        ({"architectures": []}, ["architectures"]),
        ({"vocab_size": None}, ["vocab_size is null"]),
        ({"hidden_size": -4}, ["hidden_size = -4"]),
        ({"hidden_size": 2.5}, ["hidden_size = 2.5"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers = True"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads = 3", "num_attention_heads = 4"]),
        ({"head_dim": 15}, ["head_dim = 15", "even"]),
        ({"head_dim": 514}, ["head_dim = 514", "512"]),
        ({"head_dim": None, "hidden_size": 4096}, ["head_dim", "1024", "512"]),
        ({"head_dim": None, "hidden_size": 66}, ["hidden_size = 66", "multiple"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps = 0"]),
        ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "silu"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "true or false"]),
        ({"dtype": "float8_e4m3fn"}, ["dtype", "bfloat16"]),
        ({"eos_token_id": [1, "2"]}, ["eos_token_id"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config.bits is missing"]),
        ({"quantization_config": {"quant_method": "new"}}, ["quantization_config.quant_method = 'new'", "gptq, awq"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping"]),
        ({"attention_sinks": True}, ["attention_sinks"]),
        ({"num_experts": 8}, ["num_experts"]),
        ({"is_causal": False}, ["is_causal"]),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ({"use_sliding_window": True, "layer_types": ["full_attention"]}, ["layer_types", "2"]),
        ({"layer_types": ["full_attention", "chunked_attention"]}, ["chunked_attention"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "use_sliding_window"]),
        ({"use_sliding_window": True, "max_window_layers": -1}, ["max_window_layers = -1"]),
    ],
)
def test_unusable_config_value_is_refused_by_name(changes, words, tmp_path):
    write(tmp_path, tiny_config("Qwen2ForCausalLM") | changes)
    with pytest.raises(ModelError) as caught:
        read_architecture(tmp_path)
    for word in [*words, str(tmp_path / "config.json")]:
        assert word in str(caught.value)


def test_config_key_of_one_family_is_refused_for_another(tmp_path):
    config = ConfigFile.read(write(tmp_path, tiny_config("LlamaForCausalLM", logits_scaling=8.0)) / "config.json")
    with pytest.raises(ModelError, match=r"logits_scaling = 8.0.*LlamaForCausalLM"):
        read_architecture(tmp_path)
    assert config.number("logits_scaling", 1.0) == 8
    config.refuse_unread("GraniteForCausalLM")


def test_harmless_values_of_unsupported_keys_are_accepted(tmp_path):
    config = tiny_config("LlamaForCausalLM", quantization_config=None, final_logit_softcapping=None, num_experts=0)
    assert read_architecture(write(tmp_path, config)) == read_architecture(
        write(tmp_path, tiny_config("LlamaForCausalLM"))
    )


def test_mistral_with_mixed_layer_types_is_refused(tmp_path):
    kinds = ["full_attention", "sliding_attention"]
    write(tmp_path, tiny_config("MistralForCausalLM", sliding_window=64, layer_types=kinds))
    with pytest.raises(ModelError, match="layer_types"):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["not valid JSON"]),
        ("[1]", ["list", "object was expected"]),
        ("\xff", ["not valid JSON"]),
        ("[" * 100_000, ["not valid JSON"]),
    ],
)
def test_broken_config_file_is_refused(text, words, tmp_path):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError) as caught:
        read_architecture(tmp_path)
    for word in [*words, "config.json"]:
        assert word in str(caught.value)


def test_missing_config_file_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        read_architecture(tmp_path)


def test_reading_config_does_not_import_torch(tmp_path):
    write(tmp_path, QWEN25_OLD)
    code = (
        "import sys, pathlib; from octavo.models.registry import read_architecture;"
        f"read_architecture(pathlib.Path({str(tmp_path)!r})).num_parameters; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
