"""Published config.json of three generations of Gemma: defaults of the class, and refusals."""

import json

import pytest

from octavo.errors import ModelError
from octavo.models.random_weights import tiny_config
from octavo.models.registry import read_architecture

GEMMA_2B = {
    "architectures": ["GemmaForCausalLM"], "attention_bias": False, "bos_token_id": 2, "eos_token_id": 1,
    "head_dim": 256, "hidden_act": "gelu", "hidden_activation": None, "hidden_size": 2048,
    "intermediate_size": 16384, "max_position_embeddings": 8192, "model_type": "gemma", "num_attention_heads": 8,
    "num_hidden_layers": 18, "num_key_value_heads": 1, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 10000.0, "torch_dtype": "bfloat16", "vocab_size": 256000,
}  # fmt: skip
GEMMA2_2B = {
    "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0, "bos_token_id": 2,
    "cache_implementation": "hybrid", "eos_token_id": [1, 107], "final_logit_softcapping": 30.0, "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304,
    "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
    "num_hidden_layers": 26, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "bfloat16", "vocab_size": 256000,
}  # fmt: skip


def read(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_architecture(tmp_path)


def test_gemma_1_config_is_read(tmp_path):
    architecture = read(tmp_path, GEMMA_2B)
    layer = architecture.layers[0]
    assert architecture.layers == (layer,) * 18
    assert (layer.mlp.activation, layer.attention.scale, layer.attention.window) == ("gelu_tanh", None, None)
    assert (layer.norms.after_attention, layer.norms.after_mlp) == (None, None)
    assert architecture.embedding_scale == 2048**0.5
    assert (architecture.norm_offset, architecture.logit_softcap) == (1.0, None)
    assert architecture.tie_word_embeddings


def test_gemma_2_config_is_read(tmp_path):
    architecture = read(tmp_path, GEMMA2_2B)
    near, far = architecture.layers[0].attention, architecture.layers[1].attention
    assert (near.window, far.window, near.softcap, far.softcap) == (4096, None, 50.0, 50.0)
    assert (near.scale, near.qk_norm, near.rope) == (1 / 16, None, far.rope)
    assert architecture.layers == architecture.layers[:2] * 13
    assert architecture.logit_softcap == 30.0


def test_missing_softcap_uses_class_default_and_null_disables_it(tmp_path):
    keys = ("attn_logit_softcapping", "final_logit_softcapping")
    silent = read(tmp_path, {key: value for key, value in GEMMA2_2B.items() if key not in keys})
    assert silent == read(tmp_path, GEMMA2_2B)
    without = read(tmp_path, GEMMA2_2B | dict.fromkeys(keys))
    assert (without.layers[0].attention.softcap, without.logit_softcap) == (None, None)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("GemmaForCausalLM", {"hidden_act": "silu"}, "hidden_act = 'silu'"),
        ("Gemma2ForCausalLM", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping = -1.0"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("Gemma3ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types"),
        ("Gemma3ForCausalLM", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ("LlamaForCausalLM", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
    ],
)
def test_unsupported_config_values_are_refused_by_name(name, changes, words, tmp_path):
    with pytest.raises(ModelError, match=words):
        read(tmp_path, tiny_config(name) | changes)
