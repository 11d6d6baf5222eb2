"""Latent attention: worked by hand, weights as checkpoints store them, and configurations that are refused."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.errors import ModelError
from octavo.kernels import create_kernels
from octavo.models.config_file import ConfigFile
from octavo.models.kv_layout import LatentShape
from octavo.models.loader import load_model
from octavo.models.quantized_weights import describe_stored, read_quantized, stored_tensors
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import architecture_of, read_architecture
from octavo.models.weight_bytes import weight_bytes
from octavo.models.weight_source import FolderWeights

CPU = torch.device("cpu")
TOKENS = [(7 * i) % 500 + 2 for i in range(40)]


def architecture(family="DeepseekV3", **changes):
    return architecture_of(ConfigFile(Path("config.json"), tiny_config(f"{family}ForCausalLM", **changes)))


def load(path, **options):
    return load_model(
        FolderWeights(path), read_architecture(path), create_kernels(CPU, "auto"), device=CPU, max_model_len=64,
        **{"dtype": "float32"} | options,
    )  # fmt: skip


def test_absorbed_product_equals_attention_to_expanded_keys_and_values(tmp_path, prompt_logits):
    """One layer without rotation, computed by hand as in the paper: keys and values of each head from the latent."""
    config = tiny_config("DeepseekV3ForCausalLM", num_hidden_layers=1, first_k_dense_replace=1)
    path = write_checkpoint(tmp_path, config, std=0.3)
    model, stored = load(path), load_file(path / "model.safetensors")
    layer, hidden = model.layers[0].attention, torch.randn(1, 64)
    weight = lambda name: stored[f"model.layers.0.self_attn.{name}.weight"].double()  # noqa: E731
    norm = lambda x, name: x * (x.square().mean() + 1e-6).rsqrt() * weight(name)  # noqa: E731
    content = norm((hidden.double() @ weight("kv_a_proj_with_mqa").T)[0, :24], "kv_a_layernorm")
    heads = (weight("kv_b_proj") @ content).view(4, 16 + 12)
    attended = heads[:, 16:].flatten()  # of one position, each head attends to its own value alone
    from octavo.kernels.interface import AttentionBatch

    batch = AttentionBatch(
        query_start=torch.tensor([0, 1], dtype=torch.int32), seq_lens=torch.tensor([1], dtype=torch.int32),
        block_tables=torch.zeros(1, 1, dtype=torch.int32), positions=torch.zeros(1, dtype=torch.int64),
        slot_mapping=torch.zeros(1, dtype=torch.int64), block_size=16,
    )  # fmt: skip
    cache = layer.config.cache_spec.views(torch.zeros(1, 16 * 32), 16)
    queries = layer.write_kv(hidden, batch, cache)
    found = layer.attend(queries, batch, cache)
    torch.testing.assert_close(found[0].double(), weight("o_proj") @ attended, atol=1e-5, rtol=1e-5)
    q = weight("q_b_proj") @ norm((hidden.double() @ weight("q_a_proj").T)[0], "q_a_layernorm")
    scores = (q.view(4, 24)[:, :16] * heads[:, :16]).sum(1) + (q.view(4, 24)[:, 16:] @ cache[0][0, 0, 0, 24:].double())
    absorbed = queries[0].double() @ cache[0][0, 0, 0].double()
    torch.testing.assert_close(absorbed, scores, atol=1e-5, rtol=1e-5)  # position 0 is not rotated


def test_cache_holds_one_row_for_all_heads():
    found = architecture(kv_lora_rank=512, qk_rope_head_dim=64, num_attention_heads=16, num_key_value_heads=16)
    assert found.kv_layout.layers == (LatentShape(512, 64),) * 2
    assert found.kv_layout.bytes_per_token("bfloat16") == 2 * 576 * 2
    assert found.kv_layout.bytes_per_token("int8") == 2 * (576 + 4)


def test_absorbed_weights_are_not_rounded(tmp_path, prompt_logits):
    """Neither at load nor in a quantized copy; memory is counted accordingly."""
    path = write_checkpoint(tmp_path, tiny_config("DeepseekV3ForCausalLM"), std=0.1)
    exact, rounded = load(path), load(path, quantization="int8")
    for name in ("k_b", "v_b"):
        pair = [getattr(model.layers[0].attention, name).num_bytes for model in (exact, rounded)]
        assert pair[0] == pair[1]
    found = read_architecture(path)
    num_bytes = sum(each.num_bytes for each in rounded.linears)
    assert weight_bytes(found, "float32", quantization="int8") <= num_bytes  # packing pads columns to whole panels


def test_layers_that_predict_further_tokens_are_left_out(tmp_path, prompt_logits, caplog):
    path = write_checkpoint(tmp_path, tiny_config("DeepseekV3ForCausalLM"), std=0.1)
    expected = prompt_logits(load(path), TOKENS)
    stored = load_file(path / "model.safetensors")
    more = {
        name.replace("layers.1.", "layers.2."): each.clone() for name, each in stored.items() if ".layers.1." in name
    }
    more |= {f"model.layers.2.{name}": torch.zeros(64, 128) for name in ("eh_proj.weight", "shared_head.head.weight")}
    save_file(stored | more, path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.INFO):
        assert torch.equal(prompt_logits(load(path), TOKENS), expected)
    assert "model.layers.2 is not loaded" in caplog.text
    del more["model.layers.2.eh_proj.weight"]
    save_file(stored | more, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.2.*does not require"):
        load(path)


def test_fp8_blocks_of_keys_and_values_are_expanded(tmp_path, prompt_logits):
    """DeepSeek V3 stores all linear layers in FP8 with a scale for each block of 128 x 128."""
    config = tiny_config("DeepseekV3ForCausalLM", quantization_config={
        "quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3",
    })  # fmt: skip
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    path = write_checkpoint(tmp_path, plain, std=0.1)
    stored, rounded = load_file(path / "model.safetensors"), {}
    for name, weight in list(stored.items()):
        if weight.dim() == 2 and "_proj" in name:
            scales = torch.rand(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128)) / 100 + 0.01
            wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
            rounded[name] = (weight / wide).to(torch.float8_e4m3fn)
            rounded[f"{name}_scale_inv"] = scales
            stored[name] = rounded[name].float() * wide
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    expected = prompt_logits(load(path), TOKENS)
    save_file(stored | rounded, path / "model.safetensors", metadata={"format": "pt"})
    write_config(path, config)
    assert torch.equal(prompt_logits(load(path), TOKENS), expected)


def write_config(path, config):
    import json

    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, "n_group = 3: must divide the number of experts, 8"),
        ({"n_group": 4, "topk_group": 1}, "1 of 4 groups have 2 experts, but 3 are chosen"),
        ({"n_group": 2, "topk_group": 3}, "topk_group = 3: must be at most n_group = 2"),
        ({"num_experts_per_tok": 9}, "must be at most n_routed_experts = 8"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax': octavo supports sigmoid only"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"first_k_dense_replace": 3}, "must be an integer from 0 to 2"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ({"kv_lora_rank": 1024}, "at most 576 with qk_rope_head_dim, not 1032"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim = 7"),
        ({"kv_lora_rank": None}, "kv_lora_rank is null"),
    ],
)
def test_unsuitable_configuration_is_refused(changes, message):
    with pytest.raises(ModelError) as error:
        architecture(**changes)
    assert message in str(error.value)


def test_other_choice_of_v2_is_refused():
    with pytest.raises(ModelError, match="topk_method"):
        architecture("DeepseekV2", topk_method="noaux_tc")


def test_score_factor_of_yarn_is_squared():
    """DeepSeek V2-Lite: mscale_all_dim = 0.707 and factor = 40."""
    scaling = {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.707,
        "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1,
    }  # fmt: skip
    config = tiny_config("DeepseekV2ForCausalLM", rope_scaling=scaling, rope_theta=10000.0)
    del config["rope_parameters"]
    found = architecture_of(ConfigFile(Path("config.json"), config)).layers[0].attention
    assert found.scale == pytest.approx(24**-0.5 * 1.2608**2, rel=1e-4)
    assert found.rope.attention_factor == 1.0
    assert replace(found, rope=replace(found.rope, interleaved=True)) == found


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_integers_of_keys_and_values_are_dequantized(precision, tmp_path, prompt_logits):
    """Quantizers list neither kv_b_proj nor routers as ignored: the first is stored as integers, routers as floats."""
    config = tiny_config("DeepseekV3ForCausalLM", kv_lora_rank=32, q_lora_rank=32, v_head_dim=16)
    path = write_checkpoint(tmp_path, config, std=0.1)
    floats = load_file(path / "model.safetensors")
    quantized = {}
    for name, weight in floats.items():
        if weight.dim() == 2 and "_proj" in name:
            quantized |= stored_tensors(name.removesuffix(".weight"), weight, precision, 32)
        else:
            quantized[name] = weight
    save_file(quantized, path / "model.safetensors", metadata={"format": "pt"})
    write_config(path, config | {"quantization_config": describe_stored(precision, 32, ["lm_head"])})
    found = prompt_logits(load(path), TOKENS)
    architecture = read_architecture(path)
    for name in [name for name in floats if "kv_b_proj" in name]:
        module, rounded = name.removesuffix(".weight"), create_kernels(CPU, "auto").round_weight
        stored = read_quantized(architecture.stored, module, tuple(floats[name].shape), quantized.get, rounded)
        quantized = {key: each for key, each in quantized.items() if not key.startswith(f"{module}.")}
        quantized[name] = stored.dequantize()
    save_file(quantized, path / "model.safetensors", metadata={"format": "pt"})
    write_config(path, config | {"quantization_config": describe_stored(precision, 32, ["lm_head", "kv_b_proj"])})
    assert torch.equal(found, prompt_logits(load(path), TOKENS))


def test_quantized_prediction_layers_are_left_out(tmp_path):
    path = write_checkpoint(tmp_path, tiny_config("DeepseekV3ForCausalLM"), std=0.1)
    stored = load_file(path / "model.safetensors")
    more = {f"model.layers.2.{name}": torch.zeros(4) for name in ("eh_proj.qweight", "enorm.weight")}
    save_file(stored | more, path / "model.safetensors", metadata={"format": "pt"})
    load(path)


def test_biases_without_latent_of_queries_are_refused():
    with pytest.raises(ModelError, match="attention_bias = True: octavo supports biases only with q_lora_rank"):
        architecture(attention_bias=True, q_lora_rank=None)
