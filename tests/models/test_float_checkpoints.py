"""Checkpoints of FP8 and MXFP4: expanded bit for bit as their writers do, and every refusal."""

import json
import logging

import pytest
import torch
from quantized_files import block_checkpoint, fp8, plain_checkpoint, rewritten
from safetensors.torch import load_file, save_file
from sdks import compressed_tensors, transformers
from test_quantized_checkpoints import MODULE, PROMPT, load, weight_of

from octavo.errors import ModelError
from octavo.kernels.quantization import Fp8Weight, Int8Weight
from octavo.kernels.reference import ReferenceKernels
from octavo.models.quantize_checkpoint import quantize_checkpoint
from octavo.models.registry import read_architecture
from octavo.models.weight_bytes import weight_bytes

FP8_ACTIVATIONS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}


def compressed_config(weights, activations, name):
    scheme = compressed_tensors.quantization.QuantizationScheme(
        targets=["Linear"], weights=weights, input_activations=activations
    )
    return scheme, {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        "ignore": ["lm_head"],
    }


def assert_weights(path, meant, **options):
    model = load(path, **options)
    for module, expected in meant.items():
        found = weight_of(model, module)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected), module
    return model


def assert_blocks(path, meant, prompt_logits):
    """Check that weights of MXFP4 are multiplied as stored, and are expanded if they are to be rounded."""
    model = assert_weights(path, {module: weight.float() for module, weight in meant.items()}, dtype="bfloat16")
    assert model.layers[0].mlp.down.num_bytes == model.architecture.block_bytes["model.layers.0.mlp.down_proj.weight"]
    quantize_checkpoint(path, path / "rounded", "int4")
    rounded, now = load(path / "rounded", quantization="int8"), load(path, dtype="float32", quantization="int4")
    assert torch.equal(prompt_logits(rounded, PROMPT), prompt_logits(now, PROMPT))


# --- formats of other programs


@pytest.mark.sweep(16)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activations", [None, FP8_ACTIVATIONS], ids=["W8A16", "W8A8"])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_fp8_compressed_tensors_expand_exactly(strategy, activations, scale_dtype, tmp_path):
    structure = [32, 32] if strategy == "block" else None
    weights = compressed_tensors.quantization.QuantizationArgs(
        num_bits=8, type="float", symmetric=True, strategy=strategy, block_structure=structure
    )
    activations = activations and compressed_tensors.quantization.QuantizationArgs(**activations)
    scheme, config = compressed_config(weights, activations, "float-quantized")

    def store(weight, _):
        blocks = {"tensor": (None, None), "channel": (1, None), "block": (32, 32)}[strategy]
        state = {"weight": weight.to(scale_dtype), "weight_scale": fp8(weight, blocks)[1].to(scale_dtype)}
        if strategy == "tensor":
            state["weight_scale"] = state["weight_scale"].flatten()
        compressed = compressed_tensors.compressors.FloatQuantizationCompressor.compress(state, scheme)
        assert compressed["weight"].dtype == torch.float8_e4m3fn
        return compressed, compressed_tensors.compressors.FloatQuantizationCompressor.decompress(
            dict(compressed), scheme
        )["weight"]

    meant = rewritten(tmp_path, config, store)
    assert_weights(tmp_path, meant, dtype=str(scale_dtype).removeprefix("torch."))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deepseek_block_fp8_expands_exactly(dtype, tmp_path):
    modules = block_checkpoint(tmp_path)
    tensors, theirs = (
        load_file(tmp_path / "model.safetensors"),
        transformers.integrations.finegrained_fp8.Fp8Dequantize(hf_quantizer=None),
    )
    meant = {
        module: theirs._dequantize_one(
            tensors[f"{module}.weight"], tensors[f"{module}.weight_scale_inv"], output_dtype=dtype
        )
        for module in modules
    }
    assert_weights(tmp_path, meant, dtype=str(dtype).removeprefix("torch."))


def test_partial_edge_blocks_of_fp8_expand_exactly(tmp_path):
    assert_weights(tmp_path, block_checkpoint(tmp_path, (48, 128)), dtype="bfloat16")


def test_fp8_with_e8m0_scales_expands_exactly(tmp_path):
    def store(weight, generator):
        values, scales, _ = fp8(weight, (32, 32))
        exponents = torch.randint(115, 122, scales.shape, generator=generator, dtype=torch.uint8)
        wide = torch.exp2(exponents.float() - 127).repeat_interleave(32, 0).repeat_interleave(32, 1)
        meant = (values.float() * wide[: len(weight), : weight.shape[1]]).bfloat16()
        return {"weight": values, "weight_scale_inv": exponents.view(torch.float8_e8m0fnu)}, meant

    config = {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"}
    assert_weights(tmp_path, rewritten(tmp_path, config, store), dtype="bfloat16")


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize(
    ("config", "scale_name", "more"),
    [
        ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale", "input_scale"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale_inv", "activation_scale"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, "weight_scale", "input_scale"),
    ],
    ids=["AutoFP8", "Mistral", "ModelOpt"],
)
def test_per_tensor_fp8_expands_exactly(config, scale_name, more, shape, tmp_path):
    def store(weight, _):
        values, scales, meant = fp8(weight, (None, None))
        return {"weight": values, scale_name: scales.view(shape), more: torch.ones(shape)}, meant.bfloat16()

    meant = rewritten(tmp_path, config, store)
    tensors = load_file(tmp_path / "model.safetensors")
    for letter in "kv":  # scales of a KV cache
        tensors[f"model.layers.0.self_attn.{letter}_proj.{letter}_scale"] = torch.ones(shape)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_weights(tmp_path, meant, dtype="bfloat16")


def test_fbgemm_fp8_expands_exactly(tmp_path):
    def store(weight, _):
        values, scales, meant = fp8(weight, (1, None))
        return {"weight": values, "weight_scale": scales}, meant.bfloat16()

    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    assert_weights(tmp_path, rewritten(tmp_path, config, store), dtype="bfloat16")


def test_mxfp4_compressed_tensors_load_exactly(tmp_path, prompt_logits):
    weights = compressed_tensors.quantization.QuantizationArgs(
        num_bits=4, type="float", symmetric=True, strategy="group", group_size=32
    )
    scheme, config = compressed_config(weights, None, "mxfp4-pack-quantized")

    def store(weight, generator):
        exponents = torch.randint(-6, -2, (weight.shape[0], weight.shape[1] // 32), generator=generator)
        state = {"weight": weight.bfloat16(), "weight_scale": torch.exp2(exponents.float()).bfloat16()}
        compressed = compressed_tensors.compressors.MXFP4PackedCompressor.compress(state, scheme)
        meant = compressed_tensors.compressors.MXFP4PackedCompressor.decompress(dict(compressed), scheme)["weight"]
        assert meant.unique().numel() > 8
        return compressed, meant

    assert_blocks(tmp_path, rewritten(tmp_path, config, store), prompt_logits)


@pytest.mark.turn(8)
def test_mxfp4_blocks_load_exactly(tmp_path, prompt_logits):
    def store(weight, generator):
        groups = weight.shape[1] // 32
        blocks = torch.randint(0, 256, (len(weight), groups, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(110, 130, (len(weight), groups), generator=generator, dtype=torch.uint8)
        meant = transformers.integrations.mxfp4.convert_moe_packed_tensors(blocks[None], scales[None])[
            0
        ].T  # of one expert
        return {"weight_blocks": blocks, "weight_scales": scales}, meant

    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}
    assert_blocks(tmp_path, rewritten(tmp_path, config, store), prompt_logits)


def test_unconverted_layers_load_unchanged(tmp_path):
    meant = block_checkpoint(tmp_path, modules_to_not_convert=["model.layers.*.self_attn", "model.layers.0.mlp"])
    tensors = load_file(tmp_path / "model.safetensors")
    for module, weight in meant.items():
        if "self_attn" in module or ".0." in module:
            del tensors[f"{module}.weight_scale_inv"]
            tensors[f"{module}.weight"] = weight
    save_file(tensors, tmp_path / "model.safetensors")
    assert_weights(tmp_path, meant, dtype="bfloat16")


# --- octavo's use of them --


@pytest.mark.turn(12)
@pytest.mark.parametrize("quantization", [None, "int8", "int4_all"])
def test_fp8_logits_and_bytes_equal_expanded_checkpoint(quantization, tmp_path, prompt_logits):
    meant = block_checkpoint(tmp_path)
    model = load(tmp_path, dtype="bfloat16", quantization=quantization)
    expanded = plain_checkpoint(tmp_path / "expanded", dtype="bfloat16")
    weights = {f"{module}.weight": weight for module, weight in meant.items()}
    save_file(load_file(expanded / "model.safetensors") | weights, expanded / "model.safetensors")
    plain = load(expanded, dtype="bfloat16", quantization=quantization)
    assert torch.equal(prompt_logits(model, PROMPT), prompt_logits(plain, PROMPT))
    sizes = [weight_bytes(each.architecture, "bfloat16", None, quantization) for each in (model, plain)]
    assert sizes[0] == sizes[1]


class KeepsFp8(ReferenceKernels):
    """Plain torch that multiplies weights of FP8 as they are stored, as the Triton kernels do."""

    multiplies_fp8 = True


def fp8_checkpoint(path, blocks):
    if blocks != (None, None):
        return block_checkpoint(path, blocks)

    def store(weight, _):
        values, scales, meant = fp8(weight, blocks)
        return {"weight": values, "weight_scale": scales.flatten()}, meant.bfloat16()

    return rewritten(path, {"quant_method": "fp8"}, store)


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("blocks", [(32, 64), (8, 128), (None, None)], ids=str)
def test_fp8_is_not_expanded_if_kernels_multiply_fp8(blocks, quantization, tmp_path, caplog):
    meant = fp8_checkpoint(tmp_path, blocks)
    with caplog.at_level(logging.INFO, "octavo"):
        model = load(tmp_path, KeepsFp8(), dtype="bfloat16", quantization=quantization)
    for module, expected in meant.items():
        assert torch.equal(weight_of(model, module).bfloat16(), expected), module
    for product in (model.layers[0].attention.qkv, model.layers[1].mlp.down):
        values, groups = product.storage.values, product.storage.scales.shape[1]
        assert values.dtype == torch.float8_e4m3fn
        bias = 0 if product.bias is None else product.bias.nbytes
        assert product.num_bytes - bias == values.numel() + 4 * groups * len(values)
    assert "and are not expanded: they are multiplied in bfloat16" in caplog.text


def test_narrow_or_partly_fp8_weights_are_expanded(tmp_path):
    """Also if it is to be rounded to integers."""
    meant = block_checkpoint(tmp_path / "narrow")
    assert_weights(tmp_path / "narrow", meant, kernels=KeepsFp8(), dtype="bfloat16")
    meant = block_checkpoint(tmp_path / "mixed", (32, 64), modules_to_not_convert=["q_proj"])
    tensors = load_file(tmp_path / "mixed" / "model.safetensors")
    for module in (each for each in meant if "q_proj" in each):
        del tensors[f"{module}.weight_scale_inv"]
        tensors[f"{module}.weight"] = meant[module]
    save_file(tensors, tmp_path / "mixed" / "model.safetensors")
    model = load(tmp_path / "mixed", KeepsFp8(), dtype="bfloat16")
    assert all(torch.equal(weight_of(model, module).bfloat16(), expected) for module, expected in meant.items())
    assert isinstance(model.layers[0].attention.qkv.storage, torch.Tensor)
    assert isinstance(model.layers[0].attention.o.storage, Fp8Weight)
    rounded = load(tmp_path / "mixed", KeepsFp8(), dtype="bfloat16", quantization="int8")
    assert isinstance(rounded.layers[0].attention.o.storage, Int8Weight)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantized_fp8_equals_quantized_expanded_checkpoint(precision, tmp_path, prompt_logits):
    meant = block_checkpoint(tmp_path / "fp8")
    expanded = plain_checkpoint(tmp_path / "expanded", dtype="bfloat16")
    weights = {f"{module}.weight": weight for module, weight in meant.items()}
    save_file(load_file(expanded / "model.safetensors") | weights, expanded / "model.safetensors")
    for name in ("fp8", "expanded"):
        quantize_checkpoint(tmp_path / name, tmp_path / f"{name}-rounded", precision)
    ours, theirs = (load(tmp_path / f"{name}-rounded", dtype="bfloat16") for name in ("fp8", "expanded"))
    assert torch.equal(prompt_logits(ours, PROMPT), prompt_logits(theirs, PROMPT))
    assert ours.architecture.stored_floats is None


def test_fp8_load_logs_compute_dtype_and_memory(tmp_path, caplog):
    block_checkpoint(tmp_path)
    with caplog.at_level(logging.INFO, "octavo"):
        load(tmp_path, dtype="bfloat16")
        load(tmp_path, dtype="bfloat16", quantization="int8")
    expanded, rounded = (record.getMessage() for record in caplog.records)
    assert "FP8 with a scale per 32 x 32 values, which is expanded to bfloat16" in expanded
    assert "GB (with quantization int8" in expanded
    assert "Activations are not rounded" in expanded
    assert rounded.endswith("expanded to bfloat16 and rounded to int8 at load")


def test_dummy_weights_of_fp8_checkpoint_are_float32(tmp_path):
    block_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert load(tmp_path, load_format="dummy").layers[0].mlp.down.storage.dtype == torch.float32


# --- refusals ------


def refused(path, changed, *words):
    save_file(changed, path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load(path)
    for word in words:
        assert word in str(caught.value)


def test_invalid_fp8_scales_or_values_are_refused_by_name(tmp_path, monkeypatch):
    block_checkpoint(tmp_path)
    monkeypatch.setattr(
        "octavo.kernels.reference.ReferenceKernels.pack_linear", lambda *_: pytest.fail("memory was taken")
    )
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"{MODULE}.weight_scale_inv"
    scales = tensors[name]
    refused(tmp_path, {key: value for key, value in tensors.items() if key != name}, name, "lack")
    refused(tmp_path, tensors | {name: scales[1:].contiguous()}, name, "[1, 5]", "[2, 5]")
    for broken in (torch.nan, torch.inf):
        changed = scales.clone()
        changed[1, 2] = broken
        refused(tmp_path, tensors | {name: changed}, name, "infinite or not a number")
    values = tensors[f"{MODULE}.weight"]
    refused(tmp_path, tensors | {f"{MODULE}.weight": values.to(torch.float8_e5m2)}, "F8_E5M2", "F8_E4M3")
    refused(tmp_path, tensors | {f"{MODULE}.weight": values.float()}, "F32", "F8_E4M3")


def test_fp8_tensor_without_scale_is_refused(tmp_path):
    def store(weight, _):
        return {"weight": weight.to(torch.float8_e4m3fn)}, weight

    rewritten(tmp_path, {"quant_method": "fp8"}, store)
    with pytest.raises(ModelError, match=r"q_proj has no scale: weight_scale_inv or weight_scale is missing"):
        load(tmp_path)


def test_nan_mxfp4_exponent_is_refused_by_name(tmp_path):
    def store(weight, _):
        groups = weight.shape[1] // 32
        return {
            "weight_blocks": torch.zeros(len(weight), groups, 16, dtype=torch.uint8),
            "weight_scales": torch.full((len(weight), groups), 127, dtype=torch.uint8),
        }, weight

    rewritten(tmp_path, {"quant_method": "mxfp4"}, store)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{MODULE}.weight_scales"][5, 1] = 255
    refused(tmp_path, tensors, f"{MODULE}.weight_scales", "infinite or not a number")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fmt": "e5m2"}, ["fmt = 'e5m2'"]),
        ({"activation_scheme": "other"}, ["activation_scheme = 'other'"]),
        ({"weight_block_size": [128]}, ["weight_block_size = [128]", "two numbers"]),
        ({"weight_block_size": [128, 0]}, ["weight_block_size = [128, 0]", "two numbers"]),
        ({"modules_to_convert": ["embed_tokens"]}, ["modules_to_convert"]),
        ({"modules_to_not_convert": "lm_head"}, ["modules_to_not_convert = 'lm_head'", "list of names"]),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ["quant_algo = 'NVFP4'", "--quantization int8 or int4"]),
    ],
)
def test_unsupported_quantization_options_are_refused_by_name(changes, words, tmp_path):
    block_checkpoint(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        read_architecture(tmp_path)
    for word in ["quantization_config", *words]:
        assert word in str(caught.value)
