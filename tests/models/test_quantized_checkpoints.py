"""Checkpoints of integers: those of other programs are read as intended, ours are read by them, and every refusal."""

import json
import shutil

import pytest
import torch
from quantized_files import (
    awq_checkpoint,
    gptq_checkpoint,
    linear_names,
    pack_words,
    plain_checkpoint,
    reordered_checkpoint,
    rewrite,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sdks import compressed_tensors, transformers
from typer.testing import CliRunner

from octavo.cli import app
from octavo.errors import ModelError
from octavo.kernels.quantization import Int4Weight, Int8Weight, quantize_int4, quantize_int8, round_to_int8
from octavo.kernels.reference import ReferenceKernels
from octavo.models.loader import load_model
from octavo.models.quantize_checkpoint import quantize_checkpoint
from octavo.models.quantized_weights import pack_nibbles, unpack_nibbles
from octavo.models.random_weights import tiny_config
from octavo.models.registry import FAMILIES, read_architecture
from octavo.models.weight_bytes import weight_bytes
from octavo.models.weight_source import FolderWeights

CPU = torch.device("cpu")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
MODULE = "model.layers.1.mlp.down_proj"  # 64 x 160
INT8_ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def load(path, kernels=None, **options):
    architecture = read_architecture(path)
    options = {"dtype": "float32", "device": CPU, "max_model_len": 64} | options
    return load_model(FolderWeights(path), architecture, kernels or ReferenceKernels(), **options)


def weight_of(model, module):
    """Return the weight that the engine multiplies with, dequantized: the part of a fused weight that belongs to
    `module`.
    """
    layer = model.layers[int(module.split(".")[2])]
    part = module.rpartition(".")[2]
    fused, names = {
        "qkv": (layer.attention.qkv, ("q_proj", "k_proj", "v_proj")),
        "o": (layer.attention.o, ("o_proj",)),
        "gate_up": (layer.mlp.gate_up, ("gate_proj", "up_proj")),
        "down": (layer.mlp.down, ("down_proj",)),
    }[{"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "o", "down_proj": "down"}.get(part, "gate_up")]
    weight = fused.storage
    weights = weight if isinstance(weight, list) else [weight]
    wide = torch.cat([each if isinstance(each, torch.Tensor) else each.dequantize() for each in weights])
    shapes = model.architecture.tensor_shapes()
    prefix = module.rpartition(".")[0]
    sizes = [shapes[f"{prefix}.{name}.weight"][0] for name in names]
    return dict(zip(names, wide.split(sizes), strict=True))[part]


# --- formats of other programs


def scheme_of(bits, group_size, *, symmetric):
    weights = compressed_tensors.quantization.QuantizationArgs(
        num_bits=bits,
        type="int",
        symmetric=symmetric,
        strategy="channel" if group_size is None else "group",
        group_size=group_size,
    )
    activations = compressed_tensors.quantization.QuantizationArgs(**INT8_ACTIVATIONS) if bits == 8 else None
    return compressed_tensors.quantization.QuantizationScheme(
        targets=["Linear"], weights=weights, input_activations=activations
    )


@pytest.mark.parametrize(
    ("bits", "group_size", "symmetric"), [(8, None, True), (4, 32, True), (4, None, True), (4, 32, False)]
)
def test_compressed_tensors_checkpoints_dequantize_to_library_weights(bits, group_size, symmetric, tmp_path, generator):
    path = plain_checkpoint(tmp_path)
    scheme = scheme_of(bits, group_size, symmetric=symmetric)
    compressor = (
        compressed_tensors.compressors.IntQuantizationCompressor
        if bits == 8
        else compressed_tensors.compressors.PackedQuantizationCompressor
    )
    tensors, meant = load_file(path / "model.safetensors"), {}
    for module in linear_names(tensors):
        weight = tensors.pop(f"{module}.weight")
        groups = 1 if group_size is None else weight.shape[1] // group_size
        state = {
            "weight": weight,
            "weight_scale": (torch.rand(weight.shape[0], groups, generator=generator) + 0.5) * 0.3 / 2 ** (bits - 1),
            "weight_zero_point": torch.zeros(weight.shape[0], groups, dtype=torch.int8)
            if symmetric
            else torch.randint(-8, 8, (weight.shape[0], groups), generator=generator, dtype=torch.int8),
        }
        compressed = compressor.compress(state, scheme)
        meant[module] = compressor.decompress(dict(compressed), scheme)["weight"]
        tensors |= {f"{module}.{name}": tensor for name, tensor in compressed.items()}
    config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if bits == 8 else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        "ignore": ["lm_head"],
    }
    rewrite(path, tensors, config)
    model = load(path)
    for module, expected in meant.items():
        found = weight_of(model, module)
        if bits == 8:  # rotated, and rounded again
            torch.testing.assert_close(found, quantize_int8(expected).dequantize(), rtol=1e-5, atol=1e-5)
            assert (found - expected).norm() < 0.01 * expected.norm()
        else:
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
def test_gptq_checkpoint_dequantizes_exactly(checkpoint_format, sym, tmp_path, generator):
    meant = gptq_checkpoint(tmp_path, generator, sym=sym, checkpoint_format=checkpoint_format)
    model = load(tmp_path)
    for module, expected in meant.items():
        torch.testing.assert_close(weight_of(model, module), expected, rtol=0, atol=0)
    assert (model.layers[0].mlp.down.storage.zeros is None) == sym


def test_awq_checkpoint_dequantizes_exactly(tmp_path, generator):
    meant = awq_checkpoint(tmp_path, generator)
    model = load(tmp_path)
    for module, expected in meant.items():
        torch.testing.assert_close(weight_of(model, module), expected, rtol=0, atol=0)


def test_nibbles_pack_and_unpack_along_both_dimensions():
    values = torch.arange(40, dtype=torch.uint8).view(2, 20) % 16
    words = pack_nibbles(values)
    assert words.shape == (2, 3)
    assert torch.equal(unpack_nibbles(words, dim=1)[:, :20], values)
    assert torch.equal(unpack_nibbles(words.T.contiguous(), dim=0)[:20], values.T)
    assert torch.equal(words, pack_words(torch.nn.functional.pad(values, (0, 4)), 1))


# --- octavo's own copies


@pytest.mark.sweep(12)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("precision", "group_size"), [("int8", 32), ("int4", 32), ("int4", 64)])
def test_transformers_loads_quantized_copy_with_same_weights(precision, group_size, tied, tmp_path):
    source = plain_checkpoint(
        tmp_path / "plain", "LlamaForCausalLM", tie_word_embeddings=tied, intermediate_size=192, dtype="bfloat16"
    )
    (source / "generation_config.json").write_text('{"temperature": 0.5}')
    quantize_checkpoint(source, tmp_path / "rounded", precision, group_size=group_size)
    assert (tmp_path / "rounded" / "generation_config.json").read_text() == '{"temperature": 0.5}'
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "rounded", dtype=torch.bfloat16)
    model, plain = load(tmp_path / "rounded"), load_file(source / "model.safetensors")
    with torch.no_grad():
        theirs(torch.tensor([PROMPT]))  # it decompresses when it runs
    for module in linear_names(plain):
        ours = weight_of(model, module)
        if precision == "int8":  # rotated, and rounded again
            read = theirs.get_submodule(module).weight.detach().float()
            assert (ours - read).norm() / read.norm() < 0.01
        else:
            torch.testing.assert_close(ours.bfloat16(), theirs.get_submodule(module).weight, rtol=1e-2, atol=0)
        error = (ours - plain[f"{module}.weight"].float()).norm() / plain[f"{module}.weight"].float().norm()
        assert error < (0.01 if precision == "int8" else 0.12)


@pytest.mark.parametrize(
    ("of_the_copy", "of_the_source"),
    [("int8", "int4"), ("int4_all", "int4_all")],
)
def test_int4_copy_equals_quantization_at_load(of_the_copy, of_the_source, tmp_path, prompt_logits):
    source = plain_checkpoint(tmp_path / "plain", tie_word_embeddings=True, attention_bias=True)
    quantize_checkpoint(source, tmp_path / "rounded", "int4", max_shard_bytes=20_000)
    assert len(list((tmp_path / "rounded").glob("model-*-of-*.safetensors"))) > 2
    rounded = load(tmp_path / "rounded", quantization=of_the_copy)  # embeddings and lm_head
    now = load(source, quantization=of_the_source)
    assert torch.equal(prompt_logits(rounded, PROMPT), prompt_logits(now, PROMPT))


@pytest.mark.sweep(32)
@pytest.mark.parametrize("name", FAMILIES)
def test_int4_copy_of_every_family_equals_quantization_at_load(name, tmp_path, prompt_logits):
    source = plain_checkpoint(tmp_path / "plain", name)
    quantize_checkpoint(source, tmp_path / "rounded", "int4", group_size=32)
    rounded = load(tmp_path / "rounded", quantization="int4_all", group_size=32)
    now = load(source, quantization="int4_all", group_size=32)
    assert torch.equal(prompt_logits(rounded, PROMPT), prompt_logits(now, PROMPT))


def test_int8_copy_gives_logits_of_its_dequantized_weights(tmp_path, prompt_logits):
    """The copy is not rotated, because other programs read it; a load rotates it and rounds again."""
    source = plain_checkpoint(tmp_path / "plain", tie_word_embeddings=True, attention_bias=True)
    quantize_checkpoint(source, tmp_path / "rounded", "int8", max_shard_bytes=20_000)
    rounded = load(tmp_path / "rounded", quantization="int8")
    plain = load_file(source / "model.safetensors")
    for module in linear_names(plain):
        values, scales = round_to_int8(plain[f"{module}.weight"], rotated=False)
        plain[f"{module}.weight"] = values * scales.unsqueeze(1)
    save_file(plain, source / "model.safetensors")
    assert torch.equal(prompt_logits(rounded, PROMPT), prompt_logits(load(source, quantization="int8"), PROMPT))


def test_int8_quantization_refuses_group_size(tmp_path):
    with pytest.raises(ModelError, match="group_size is an option of int4"):
        quantize_checkpoint(plain_checkpoint(tmp_path / "plain"), tmp_path / "rounded", "int8", group_size=128)
    assert not (tmp_path / "rounded").exists()


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_loaded_weights_survive_overwriting_of_file(precision, tmp_path, prompt_logits):
    quantize_checkpoint(plain_checkpoint(tmp_path / "plain"), tmp_path / "rounded", precision)
    model = load(tmp_path / "rounded")
    before = prompt_logits(model, PROMPT)
    for path in (tmp_path / "rounded").glob("*.safetensors"):
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 4)
            file.write(b"\0" * (path.stat().st_size * 3 // 4))
    assert torch.equal(prompt_logits(model, PROMPT), before)


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_nonfinite_scale_is_refused(precision, broken, tmp_path):
    quantize_checkpoint(plain_checkpoint(tmp_path / "plain"), tmp_path / "rounded", precision)
    path = next(path for path in (tmp_path / "rounded").glob("*.safetensors"))
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("down_proj.weight_scale"))
    tensors[name][3, 0] = broken
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"down_proj\.weight_scale has a scale that is infinite or no"):
        load(tmp_path / "rounded")


@pytest.mark.turn(12)
def test_weight_bytes_equal_bytes_of_loaded_quantized_checkpoints(tmp_path, generator):
    gptq_checkpoint(tmp_path / "gptq", generator)
    reordered_checkpoint(tmp_path / "reordered", generator)
    source = plain_checkpoint(tmp_path / "plain")
    for precision in ("int8", "int4"):
        quantize_checkpoint(source, tmp_path / precision, precision)
    for name in ("gptq", "reordered", "int8", "int4"):
        for quantization in (None, "int8", "int4", "int4_all"):
            model = load(tmp_path / name, dtype="bfloat16", quantization=quantization)
            linears = [model.embed_tokens, model.lm_head]
            norms = [model.first_norm]
            for layer in model.layers:
                linears += [layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down]
                norms += [layer.after_attention.stream, layer.after_mlp.stream]
            num_bytes = sum(linear.num_bytes for linear in linears) + sum(norm.nbytes for norm in norms)
            assert num_bytes == weight_bytes(model.architecture, "bfloat16", "bfloat16", quantization)


def test_dummy_load_of_gptq_checkpoint_creates_int4_weights(tmp_path, generator):
    gptq_checkpoint(tmp_path, generator)
    (tmp_path / "model.safetensors").unlink()
    model = load(tmp_path, load_format="dummy")
    assert isinstance(model.layers[0].mlp.down.storage, Int4Weight)
    assert model.layers[0].mlp.down.storage.group_size == 32


# --- refusals ------


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "other"}, ["quant_method = 'other'", "compressed-tensors, gptq, awq, fp8"]),
        (
            {"load_in_4bit": True},
            ["quant_method = None", "bitsandbytes", "dequantize().save_pretrained", "--quantization"],
        ),
        ({"quant_method": "bitsandbytes"}, ["quant_method = 'bitsandbytes'", "pip install transformers bitsandbytes"]),
        *(
            (
                {"quant_method": method},
                [f"quant_method = {method!r}", f"layout of {name};", "--quantization int8 or int4"],
            )
            for method, name in (("exl2", "EXL2"), ("hqq", "HQQ"), ("aqlm", "AQLM"), ("quanto", "quanto"))
        ),
        ({"quant_method": "torchao"}, ["quant_method = 'torchao'", "layout of torchao;"]),
        ({"quant_method": "auto-round"}, ["auto-round", "auto_gptq"]),
        ({"quant_method": "gptq", "bits": 8}, ["bits = 8"]),
        ({"quant_method": "gptq", "bits": 4, "group_size": 16}, ["group_size = 16", "multiple of 32"]),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, ["checkpoint_format = 'marlin'"]),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "modules_in_block_to_quantize": "mlp"},
            ["modules_in_block_to_quantize = 'mlp'", "list of lists"],
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "modules_in_block_to_quantize": ["mlp.gate_proj"]},
            ["modules_in_block_to_quantize = ['mlp.gate_proj']", "list of lists"],
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "modules_in_block_to_quantize": [[1]]},
            ["modules_in_block_to_quantize = [[1]]", "list of lists"],
        ),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, ["version = 'gemv'"]),
        ({"quant_method": "awq", "w_bit": 3}, ["w_bit = 3"]),
        ({"quant_method": "awq", "bits": 4, "format": "gemv"}, ["format = 'gemv'", "--quantization int8 or int4"]),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            ["format = 'nvfp4-pack-quantized'", "mxfp4-pack-quantized", "--quantization int8 or int4"],
        ),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, ["config_groups"]),
    ],
)
def test_unsupported_quantization_configs_are_refused_by_name(config, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("Qwen2ForCausalLM", quantization_config=config)))
    with pytest.raises(ModelError) as caught:
        read_architecture(tmp_path)
    for word in ["quantization_config", *words]:
        assert word in str(caught.value)


@pytest.mark.sweep(16)
@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (("config_groups", "group_0", "weights", "num_bits"), 3, ["num_bits"]),
        (("config_groups", "group_0", "weights", "type"), "float", ["type = 'float'"]),
        (("config_groups", "group_0", "weights", "strategy"), "tensor", ["weights", "per channel"]),
        (("config_groups", "group_0", "weights", "symmetric"), False, ["weights", "symmetric"]),
        (
            ("config_groups", "group_0", "input_activations", "dynamic"),
            False,
            ["input_activations", "scale per token"],
        ),
        (("config_groups", "group_0", "input_activations"), None, ["input_activations"]),
        (("config_groups", "group_0", "targets"), ["re:.*q_proj"], ["targets"]),
        (("config_groups", "group_1"), {"targets": ["Linear"]}, ["config_groups", "one scheme"]),
        (("ignore",), ["re:("], ["ignore", "regular expression"]),
        (("kv_cache_scheme",), {"num_bits": 8}, ["kv_cache_scheme"]),
        (("transform_config",), {"config_groups": {"R1": {"type": "hadamard"}}}, ["transform_config", "rotate"]),
        (("quantization_status",), "calibration", ["quantization_status"]),
        (("sparsity_config",), {"format": "sparse-24-bitmask"}, ["sparsity_config.format"]),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else None,
)
def test_unsupported_compressed_tensors_schemes_are_refused_by_name(keys, value, words, tmp_path):
    quantize_checkpoint(plain_checkpoint(tmp_path / "plain"), tmp_path / "int8", "int8")
    path = tmp_path / "int8" / "config.json"
    config = json.loads(path.read_text())
    inner = config["quantization_config"]
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        read_architecture(path.parent)
    for word in ["quantization_config", *words]:
        assert word in str(caught.value)


def test_gptq_act_order_dequantizes_exactly(tmp_path, generator):
    _, meant = reordered_checkpoint(tmp_path, generator)
    model = load(tmp_path)
    assert model.layers[0].mlp.down.storage.order is not None
    for module, expected in meant.items():
        torch.testing.assert_close(weight_of(model, module), expected, rtol=0, atol=0)


def test_act_order_equals_checkpoint_with_permuted_features(tmp_path, generator, prompt_logits):
    """The hidden features of an MLP have no order of their own: the matrices that compute them can be permuted
    instead.
    """
    tensors, _ = reordered_checkpoint(tmp_path / "reordered", generator)
    before = prompt_logits(load(tmp_path / "reordered"), PROMPT)
    for layer in range(2):
        mlp = f"model.layers.{layer}.mlp"
        order = tensors[f"{mlp}.down_proj.g_idx"].argsort(stable=True)
        down = unpack_nibbles(tensors[f"{mlp}.down_proj.qweight"], dim=0)
        tensors[f"{mlp}.down_proj.qweight"] = pack_words(down[order], 0)
        tensors[f"{mlp}.down_proj.g_idx"] = (torch.arange(160) // 32).int()
        for name in ("gate_proj", "up_proj"):
            for tensor, dim in (("qweight", 0), ("qzeros", 1)):
                values = unpack_nibbles(tensors[f"{mlp}.{name}.{tensor}"], dim=dim)[:, order]
                tensors[f"{mlp}.{name}.{tensor}"] = pack_words(values, dim)
            tensors[f"{mlp}.{name}.scales"] = tensors[f"{mlp}.{name}.scales"][:, order]
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "reordered/model.safetensors")
    model = load(tmp_path / "reordered")
    assert model.layers[0].mlp.down.storage.order is None
    assert torch.equal(prompt_logits(model, PROMPT), before)


def test_inconsistent_act_orders_are_refused(tmp_path, generator):
    tensors, _ = reordered_checkpoint(tmp_path, generator)
    name = "model.layers.1.mlp.up_proj.g_idx"
    save_file(tensors | {name: tensors[name].flip(0)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"gate_proj, .*up_proj have different orders of input features \(g_idx\)"):
        load(tmp_path)
    save_file(tensors | {name: torch.zeros_like(tensors[name])}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"up_proj\.g_idx has groups that do not have group_size = 32"):
        load(tmp_path)


def test_compressed_tensors_act_order_is_read_and_requires_g_idx(tmp_path, generator):
    """As its versions up to 0.12 read it: columns in their order, weight_g_idx with the group of each column."""
    path = plain_checkpoint(tmp_path)
    scheme = scheme_of(4, 32, symmetric=True)
    scheme.weights.actorder = "group"
    tensors, meant = load_file(path / "model.safetensors"), {}
    for module in linear_names(tensors):
        weight = tensors.pop(f"{module}.weight")
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
        places = order.argsort()
        scales = (torch.rand(weight.shape[0], weight.shape[1] // 32, generator=generator) + 0.5) * 0.04
        compressed = compressed_tensors.compressors.PackedQuantizationCompressor.compress(
            {"weight": weight[:, order], "weight_scale": scales}, scheme
        )
        meant[module] = compressed_tensors.compressors.PackedQuantizationCompressor.decompress(
            dict(compressed), scheme
        )["weight"][:, places]
        values = unpack_nibbles(compressed["weight_packed"], dim=1)[:, : weight.shape[1]]
        compressed["weight_packed"] = pack_words(values[:, places], 1)
        compressed["weight_g_idx"] = (places // 32).int()
        tensors |= {f"{module}.{name}": tensor for name, tensor in compressed.items()}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        "ignore": ["lm_head"],
    }
    rewrite(path, tensors, config)
    model = load(path)
    for module, expected in meant.items():
        torch.testing.assert_close(weight_of(model, module), expected, rtol=1e-6, atol=0)
    name = f"{MODULE}.weight_g_idx"
    save_file({key: value for key, value in tensors.items() if key != name}, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"down_proj\.weight_g_idx, which config.json requires"):
        load(path)


def test_identity_act_order_is_read_and_requires_g_idx(tmp_path, generator):
    meant = gptq_checkpoint(tmp_path, generator, desc_act=True)
    torch.testing.assert_close(weight_of(load(tmp_path), MODULE), meant[MODULE], rtol=0, atol=0)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"{MODULE}.g_idx"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"down_proj\.g_idx, which config.json requires"):
        load(tmp_path)


def test_frozen_quantization_status_is_accepted(tmp_path):
    quantize_checkpoint(plain_checkpoint(tmp_path / "plain"), tmp_path / "int8", "int8")
    path = tmp_path / "int8" / "config.json"
    path.write_text(path.read_text().replace('"compressed"', '"frozen"'))
    load(tmp_path / "int8")


def test_nonzero_bias_unused_by_model_is_refused(tmp_path, generator):
    gptq_checkpoint(tmp_path, generator)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{MODULE}.bias"][3] = 0.5
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"down_proj\.bias is not zero"):
        load(tmp_path)


def test_gptq_quantizes_only_listed_modules(tmp_path, generator):
    meant = gptq_checkpoint(tmp_path, generator, modules_in_block_to_quantize=[["mlp.gate_proj", "mlp.up_proj"], []])
    tensors = load_file(tmp_path / "model.safetensors")
    for module, weight in meant.items():
        if not module.endswith(("gate_proj", "up_proj")):
            for name in ("qweight", "qzeros", "scales", "g_idx"):
                del tensors[f"{module}.{name}"]
            tensors[f"{module}.weight"] = weight
        if module.endswith(("o_proj", "down_proj")):
            del tensors[f"{module}.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    layer = load(tmp_path).layers[0]
    assert isinstance(layer.mlp.gate_up.storage, Int4Weight)
    assert torch.equal(layer.mlp.down.storage, meant["model.layers.0.mlp.down_proj"])
    assert isinstance(layer.attention.qkv.storage, torch.Tensor)


def test_fused_projections_must_share_one_format(tmp_path):
    source = plain_checkpoint(tmp_path / "plain")
    quantize_checkpoint(source, tmp_path / "int8", "int8")
    tensors = load_file(tmp_path / "int8" / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj"
    del tensors[f"{name}.weight_scale"]
    tensors[f"{name}.weight"] = load_file(source / "model.safetensors")[f"{name}.weight"]
    config = json.loads((tmp_path / "int8" / "config.json").read_text())["quantization_config"]
    rewrite(tmp_path / "int8", tensors, config | {"ignore": ["lm_head", name]})
    with pytest.raises(ModelError, match="they must have one format"):
        load(tmp_path / "int8")
    whole = [f"model.layers.0.self_attn.{each}_proj" for each in "qkv"]
    quantize_checkpoint(source, tmp_path / "again", "int8")
    tensors = load_file(tmp_path / "again" / "model.safetensors")
    for name in whole:
        del tensors[f"{name}.weight_scale"]
        tensors[f"{name}.weight"] = load_file(source / "model.safetensors")[f"{name}.weight"]
    rewrite(tmp_path / "again", tensors, config | {"ignore": ["lm_head", r"re:.*layers\.0\.self_attn\.[qkv]_proj"]})
    model = load(tmp_path / "again")
    assert isinstance(model.layers[0].attention.qkv.storage, torch.Tensor)
    assert isinstance(model.layers[1].attention.qkv.storage, Int8Weight)


def test_errors_name_missing_misshapen_and_extra_tensors(tmp_path):
    quantize_checkpoint(plain_checkpoint(tmp_path / "plain"), tmp_path / "int4", "int4")
    file = tmp_path / "int4" / "model.safetensors"
    tensors = load_file(file)

    def refused(changed, *words):
        save_file(changed, file)
        with pytest.raises(ModelError) as caught:
            load(tmp_path / "int4")
        for word in words:
            assert word in str(caught.value)

    name = f"{MODULE}.weight_packed"
    refused({key: value for key, value in tensors.items() if key != name}, name, "missing")
    refused(tensors | {name: tensors[name][:, 1:].contiguous()}, name, "[64, 19]", "[64, 20]")
    refused(tensors | {name: tensors[name].float()}, name, "F32", "I32")
    refused(tensors | {f"{MODULE}.weight": torch.zeros(64, 160)}, f"{MODULE}.weight", "does not require")


def test_failed_quantize_keeps_existing_files_and_writes_nothing(tmp_path):
    source = plain_checkpoint(tmp_path / "plain")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("data")
    with pytest.raises(ModelError, match="already exists"):
        quantize_checkpoint(source, tmp_path / "full", "int8")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["precious"]
    quantize_checkpoint(source, tmp_path / "int8", "int8")
    with pytest.raises(ModelError, match="quantized already"):
        quantize_checkpoint(tmp_path / "int8", tmp_path / "twice", "int4")
    with pytest.raises(ModelError, match="group_size"):
        quantize_checkpoint(source, tmp_path / "odd", "int4", group_size=48)
    broken = shutil.copytree(source, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(ModelError, match="truncated"):
        quantize_checkpoint(broken, tmp_path / "never", "int8")

    def interrupted(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, tmp_path / "stopped", "int8", progress=interrupted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "full", "int8", "plain"]


def test_quantize_command_refuses_int4_all(tmp_path):
    source = plain_checkpoint(tmp_path / "plain")
    result = CliRunner().invoke(app, ["quantize", str(source), str(tmp_path / "out"), "-q", "int4_all"])
    assert result.exit_code == 1
    assert "quantization must be one of int8, int4, got 'int4_all'" in result.stderr
    assert not (tmp_path / "out").exists()


def test_quantize_writes_into_existing_empty_directory(tmp_path, monkeypatch):
    """It may be a mount point: a directory cannot be renamed to it."""
    source = plain_checkpoint(tmp_path / "plain")
    for name in ("tf_model.h5", "pytorch_model.bin", "pytorch_model.bin.index.json", "flax_model.msgpack"):
        (source / name).write_text("weights of others")
    for name in ("tokenizer.json", "LICENSE.txt", "chat_template.jinja", "tokenizer.model"):
        (source / name).write_text("text")
    (tmp_path / "mount").mkdir()
    before = set(tmp_path.iterdir())
    seen = []
    quantize_checkpoint(
        source, tmp_path / "mount", "int8", progress=lambda *_: seen.append(set(tmp_path.iterdir()) == before)
    )
    assert all(seen)
    assert {path.name for path in (tmp_path / "mount").iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "LICENSE.txt", "chat_template.jinja", "tokenizer.model",
    }  # fmt: skip

    def full(*_args, **_options):
        raise OSError("No space left on device")

    monkeypatch.setattr("octavo.models.quantize_checkpoint.save_file", full)
    with pytest.raises(ModelError, match="cannot be written: No space left"):
        quantize_checkpoint(source, tmp_path / "full", "int8")
    assert not (tmp_path / "full").exists()


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantize_reports_progress_and_written_bytes(precision, tmp_path):
    source = plain_checkpoint(tmp_path / "plain")
    calls = []
    num_bytes = quantize_checkpoint(source, tmp_path / "out", precision, progress=lambda *call: calls.append(call))
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1]
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert num_bytes == sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118 - not a mapping
    down = load_file(source / "model.safetensors")[f"{MODULE}.weight"]
    values, scales = round_to_int8(down, rotated=False)
    expected = quantize_int8(values * scales.unsqueeze(1)) if precision == "int8" else quantize_int4(down)
    stored = load(tmp_path / "out").layers[1].mlp.down.storage
    assert torch.equal(stored.values, expected.values)
    assert torch.equal(stored.scales, expected.scales)
