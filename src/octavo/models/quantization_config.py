"""Reads how weights are quantized."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from octavo.models.stored_floats import MXFP4_GROUP, FloatLayout, StoredFloats
from octavo.models.stored_quantization import StoredLayout, StoredQuantization
from octavo.models.weight_files import part_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.models.config_file import ConfigFile

_GROUP_MULTIPLE = 32
_KEYS = ("quantization_config", "compression_config")
_FLOAT_FORMATS = ("float-quantized", "mxfp4-pack-quantized")
_COMPRESSED_FORMATS = ("int-quantized", "pack-quantized", *_FLOAT_FORMATS)

_TAKE_THE_ORIGINAL = "use the original checkpoint with --quantization int8 or int4"
_REFUSED = {
    "bitsandbytes": (
        f"octavo does not read the layout of bitsandbytes; {_TAKE_THE_ORIGINAL}, or write its values as plain floats "
        "(pip install transformers bitsandbytes accelerate): "
        'python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
        "M.from_pretrained('{model}').dequantize().save_pretrained('{model}-plain'); "
        "T.from_pretrained('{model}').save_pretrained('{model}-plain')\""
    ),
    "auto-round": f"octavo does not read AutoRound's own layout; let it export to auto_gptq, or {_TAKE_THE_ORIGINAL}",
    "gguf": "octavo reads GGUF files directly: give the path of the file",
}
_OTHER_METHODS = {
    "aqlm": "AQLM",
    "bitnet": "BitNet",
    "eetq": "EETQ",
    "exl2": "EXL2",
    "exl3": "EXL3",
    "fp_quant": "FP-Quant",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "nvfp4": "NVFP4",
    "modelopt_fp4": "NVFP4",
    "mxfp8": "MXFP8",
    "quanto": "quanto",
    "quark": "Quark",
    "quip": "QuIP#",
    "sinq": "SINQ",
    "spqr": "SpQR",
    "torchao": "torchao",
    "vptq": "VPTQ",
}


def read_quantization_config(config: ConfigFile) -> StoredQuantization | StoredFloats | None:
    """Return the quantization, or None for plain floats."""
    for key in _KEYS:
        if (section := config.section(key)) is None:
            continue
        method = section.text("quant_method", _unnamed_method(key, section))
        if method in _READERS:
            return _READERS[method](section)
        problem = _REFUSED.get(method, f"octavo reads {', '.join(_READERS)}").format(model=config.path.parent)
        if method in _OTHER_METHODS:
            problem = f"octavo does not read the layout of {_OTHER_METHODS[method]}; {_TAKE_THE_ORIGINAL}"
        raise section.error("quant_method", problem)
    return None


def _unnamed_method(key: str, section: ConfigFile) -> str:
    if key == "compression_config":
        return "compressed-tensors"
    return "bitsandbytes" if any(section.values.get(f"load_in_{bits}bit") is True for bits in (4, 8)) else ""


def _read_compressed_tensors(section: ConfigFile) -> StoredQuantization | StoredFloats:
    if section.values.get("format") in {"nvfp4-pack-quantized", "mxfp8-quantized", "mxfp6-pack-quantized"}:
        raise section.error("format", f"octavo reads {', '.join(_COMPRESSED_FORMATS)}; {_TAKE_THE_ORIGINAL}")
    _allow(section, "format", _COMPRESSED_FORMATS)
    _allow(section, "quantization_status", ("compressed", "frozen"), default="compressed")
    if section.values.get("transform_config"):
        raise section.error("transform_config", "octavo does not rotate activations")
    if (sparsity := section.section("sparsity_config")) is not None:
        _allow(sparsity, "format", ("dense",))
    groups = section.section("config_groups")
    if groups is None or len(groups.values) != 1:
        raise section.error("config_groups", "octavo reads one scheme for all linear layers")
    group = groups.section(next(iter(groups.values)))
    if group is None or group.values.get("targets") != ["Linear"]:
        raise groups.error(next(iter(groups.values)), 'octavo reads one scheme with the targets ["Linear"]')
    _refuse(group, "output_activations", "octavo rounds inputs only")
    weights = group.section("weights")
    if weights is None:
        raise group.error("weights", "is missing")
    if section.text("format") in _FLOAT_FORMATS:
        return _compressed_floats(section, group, weights)
    _refuse(
        section,
        "kv_cache_scheme",
        "octavo does not support this; choose the format of keys and values with kv_cache_dtype",
    )
    _allow(weights, "type", ("int",), default="int")
    return _compressed_integers(section, group, weights)


def _compressed_integers(section: ConfigFile, group: ConfigFile, weights: ConfigFile) -> StoredQuantization:
    ignored = _names(section, "ignore")
    strategy, symmetric = weights.text("strategy"), weights.flag("symmetric", default=True)
    if section.text("format") == "int-quantized":
        if weights.count("num_bits") != 8 or strategy != "channel" or not symmetric:
            raise group.error("weights", "octavo reads symmetric int8 with one scale per channel")
        _check_activations(group)
        return StoredQuantization(layout=StoredLayout.INT8, bits=8, group_size=None, has_zeros=False, ignored=ignored)
    if weights.count("num_bits") != 4 or strategy not in {"group", "channel"}:
        raise group.error("weights", "octavo reads packed int4 with scales per group or channel")
    if group.has("input_activations"):
        _check_activations(group)
    order = weights.values.get("actorder")
    if order not in (None, False, True, "static", "weight", "group"):
        raise weights.error("actorder", "octavo reads static, weight and group")
    return StoredQuantization(
        layout=StoredLayout.PACKED,
        bits=4,
        group_size=_group_size(weights) if strategy == "group" else None,
        has_zeros=not symmetric,
        may_reorder=order in (True, "group"),
        ignored=ignored,
    )


def _compressed_floats(section: ConfigFile, group: ConfigFile, weights: ConfigFile) -> StoredFloats:
    _allow(weights, "type", ("float",))
    if not weights.flag("symmetric", default=True):
        raise weights.error("symmetric", "octavo reads floats without zero points")
    strategy, ignored = weights.text("strategy"), _names(section, "ignore")
    if section.text("format") == "mxfp4-pack-quantized":
        if weights.count("num_bits") != 4 or strategy != "group" or weights.count("group_size") != MXFP4_GROUP:
            raise group.error("weights", f"MXFP4 has 4 bits in groups of {MXFP4_GROUP}")
        return StoredFloats(layout=FloatLayout.MXFP4_PACKED, block=(1, MXFP4_GROUP), ignored=ignored)
    blocks = {"tensor": (None, None), "channel": (1, None), "block": None}
    if weights.count("num_bits") != 8 or strategy not in blocks:
        raise group.error("weights", f"octavo reads floats of 8 bits with a scale per {', '.join(blocks)}")
    block = blocks[strategy] or _block(weights, "block_structure")
    return StoredFloats(layout=FloatLayout.FP8, block=block, ignored=ignored)


def _check_activations(group: ConfigFile) -> None:
    activations = group.section("input_activations")
    expected = {"num_bits": 8, "type": "int", "dynamic": True, "symmetric": True, "strategy": "token"}
    if activations is None or any(activations.values.get(key, value) != value for key, value in expected.items()):
        raise group.error("input_activations", "octavo supports activations in int8 with one scale per token")


def _read_gptq(section: ConfigFile) -> StoredQuantization:
    _allow_bits(section)
    if section.values.get("dynamic"):
        raise section.error("dynamic", "octavo reads one scheme for all linear layers")
    checkpoint_format = section.text("checkpoint_format", "gptq")
    if checkpoint_format not in {"gptq", "gptq_v2"}:
        raise section.error("checkpoint_format", f"octavo reads gptq and gptq_v2; {_TAKE_THE_ORIGINAL}")
    ignored = () if section.flag("lm_head", default=False) else ("lm_head",)
    return StoredQuantization(
        layout=StoredLayout.GPTQ,
        bits=4,
        group_size=_group_size(section),
        has_zeros=not section.flag("sym", default=False),
        zero_offset=1 if checkpoint_format == "gptq" else 0,
        may_reorder=section.flag("desc_act", default=False),
        ignored=(*ignored, *_all_but(section, "modules_in_block_to_quantize")),
    )


def _all_but(section: ConfigFile, key: str) -> tuple[str, ...]:
    lists = section.values.get(key) or []
    are_lists = isinstance(lists, list) and all(isinstance(part, list) for part in lists)
    if not are_lists or not all(isinstance(name, str) for part in lists for name in part):
        raise section.error(key, "must be a list of lists of names")
    among = "|".join(re.escape(name) for part in lists for name in part)
    return (rf"re:model\.layers\.(?!.*\.(?:{among})$)",) if among else ()


def _read_awq(section: ConfigFile) -> StoredQuantization:
    _allow_bits(section)
    key = "format" if section.has("format") else "version"
    if section.text(key, "gemm").lower() != "gemm":
        raise section.error(key, f"octavo reads gemm; {_TAKE_THE_ORIGINAL}")
    return StoredQuantization(
        layout=StoredLayout.AWQ,
        bits=4,
        group_size=_group_size(section),
        has_zeros=True,
        ignored=("lm_head", *_names(section, "modules_to_not_convert")),
    )


def _allow_bits(section: ConfigFile) -> None:
    key = "w_bit" if section.has("w_bit") else "bits"
    if section.count(key) != 4:
        raise section.error(key, f"octavo reads 4 bits of this method; {_TAKE_THE_ORIGINAL}")


def _group_size(section: ConfigFile) -> int | None:
    key = "q_group_size" if section.has("q_group_size") else "group_size"
    if section.values.get(key) in (None, -1):
        return None
    size = section.count(key)
    if size % _GROUP_MULTIPLE:
        raise section.error(key, f"octavo computes groups of a multiple of {_GROUP_MULTIPLE}")
    return size


def _names(section: ConfigFile, key: str) -> tuple[str, ...]:
    names = section.values.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise section.error(key, "must be a list of names")
    for name in names:
        if name.startswith("re:"):
            try:
                re.compile(name[3:])
            except re.error as error:
                raise section.error(key, f"{name} is not a valid regular expression: {error}") from None
    return tuple(map(_as_pattern, names))


def _as_pattern(name: str) -> str:
    """Make a pattern of a name with `*`, which also matches modules inside the named modules."""
    name = part_name(f"{name.replace('language_model.', '')}.").removesuffix(".")
    if name.startswith("re:") or "*" not in name:
        return name
    return "re:" + re.escape(name).replace(r"\*", ".*") + r"(\.|$)"


def _allow(section: ConfigFile, key: str, values: tuple[str, ...], default: str | None = None) -> None:
    if (section.text(key) if default is None else section.text(key, default)) not in values:
        raise section.error(key, f"octavo reads {' and '.join(values)}")


def _refuse(section: ConfigFile, key: str, problem: str) -> None:
    if section.has(key):
        raise section.error(key, problem)


def _read_fp8(section: ConfigFile) -> StoredFloats:
    """`weight_scale_inv` multiplies values, in spite of its name."""
    _allow(section, "fmt", ("e4m3", "float8_e4m3fn"), default="e4m3")
    _allow(section, "activation_scheme", ("dynamic", "static"), default="dynamic")
    _allow(section, "scale_fmt", ("float", "ue8m0"), default="float")
    if section.values.get("modules_to_convert"):
        raise section.error("modules_to_convert", "octavo reads only linear layers in this format")
    ignored = ("lm_head", *_names(section, "modules_to_not_convert"), *_names(section, "ignored_layers"))
    names = ("weight_scale_inv", "weight_scale")
    if not section.has("weight_block_size"):
        return StoredFloats(layout=FloatLayout.FP8, block=(None, None), scale_names=names, ignored=ignored)
    block = _block(section, "weight_block_size")
    return StoredFloats(layout=FloatLayout.FP8, block=block, scale_names=names[:1], ignored=ignored)


def _read_fbgemm_fp8(section: ConfigFile) -> StoredFloats:
    ignored = ("lm_head", *_names(section, "modules_to_not_convert"))
    return StoredFloats(layout=FloatLayout.FP8, block=(1, None), ignored=ignored)


def _read_modelopt(section: ConfigFile) -> StoredFloats:
    if section.text("quant_algo") != "FP8":
        raise section.error("quant_algo", f"octavo reads FP8 of this method; {_TAKE_THE_ORIGINAL}")
    ignored = (*_names(section, "ignore"), *_names(section, "exclude_modules"))
    return StoredFloats(layout=FloatLayout.FP8, block=(None, None), ignored=ignored)


def _read_mxfp4(section: ConfigFile) -> StoredFloats:
    return StoredFloats(
        layout=FloatLayout.MXFP4_BLOCKS,
        block=(1, MXFP4_GROUP),
        scale_names=("weight_scales",),
        ignored=("lm_head", *_names(section, "modules_to_not_convert")),
    )


def _block(section: ConfigFile, key: str) -> tuple[int, int]:
    sizes = section.values.get(key)
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise section.error(key, "must be a list of two numbers: out_features and in_features of a block")
    return sizes[0], sizes[1]


_READERS: dict[str, Callable[[ConfigFile], StoredQuantization | StoredFloats]] = {
    "compressed-tensors": _read_compressed_tensors,
    "gptq": _read_gptq,
    "awq": _read_awq,
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm_fp8,
    "modelopt": _read_modelopt,
    "mxfp4": _read_mxfp4,
}
