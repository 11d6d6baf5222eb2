"""How a checkpoint holds weights that are integers already: what `config.json` says of them. No torch here.

Read are the common layouts: compressed-tensors with int8 weights and activations (W8A8) or packed int4 weights (W4A16),
GPTQ and AWQ with int4 weights. octavo multiplies all of them with activations rounded to int8 on the way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile

FLOATS = ("F32", "F16", "BF16", "F64")
_INT32 = ("I32",)
_VALUES_A_WORD = 8  # int4 values of an int32
_GROUP_MULTIPLE = 32  # as in `octavo.kernels.quantization`
_KEYS = ("quantization_config", "compression_config")


class StoredLayout(StrEnum):
    """Names and order of the tensors of a linear layer."""

    INT8 = "int-quantized"  # compressed-tensors: weight, weight_scale
    PACKED = "pack-quantized"  # compressed-tensors: weight_packed, weight_scale, weight_zero_point, weight_shape
    GPTQ = "gptq"  # qweight, qzeros, scales, g_idx
    AWQ = "awq"  # qweight, qzeros, scales


class StoredTensor(NamedTuple):
    """What a file must hold: a shape, one of some dtypes by safetensors' names; it may be missing if it is optional."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    is_optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """The integers of a checkpoint.

    group_size   input features that share a scale, or None: all of them
    has_zeros    each group has a zero point
    zero_offset  what is to be added to stored zero points (GPTQ stores one less)
    may_reorder  input features may stand in another order: the files say whether they do
    ignored      linear layers that are stored as they are: names, their last parts, or "re:" and a regular expression
    """

    layout: StoredLayout
    bits: int
    group_size: int | None
    has_zeros: bool
    zero_offset: int = 0
    may_reorder: bool = False
    ignored: tuple[str, ...] = ()

    def covers(self, module: str) -> bool:
        """Whether the weight of a linear layer (its name without ".weight") is stored as integers."""
        return not (module.endswith("embed_tokens") or any(_matches(module, pattern) for pattern in self.ignored))

    def num_groups(self, in_features: int) -> int:
        """Scales of each output feature."""
        return 1 if self.group_size is None else -(-in_features // self.group_size)

    def tensors(self, module: str, out_features: int, in_features: int) -> dict[str, StoredTensor]:
        """Return the tensors that hold a linear layer's weight, by name."""
        groups = self.num_groups(in_features)
        words, out_words = -(-in_features // _VALUES_A_WORD), -(-out_features // _VALUES_A_WORD)
        zero_shape = (groups, out_words)
        match self.layout:
            case StoredLayout.INT8:
                tensors = {
                    "weight": StoredTensor((out_features, in_features), ("I8",)),
                    "weight_scale": StoredTensor((out_features, 1)),
                }
            case StoredLayout.PACKED:
                tensors = {
                    "weight_packed": StoredTensor((out_features, words), _INT32),
                    "weight_scale": StoredTensor((out_features, groups)),
                    "weight_shape": StoredTensor((2,), ("I64", "I32"), is_optional=True),
                    "weight_g_idx": StoredTensor((in_features,), _INT32, is_optional=True),
                }
                if self.has_zeros:
                    tensors["weight_zero_point"] = StoredTensor((out_words, groups), _INT32)
            case StoredLayout.GPTQ:
                tensors = {
                    "qweight": StoredTensor((words, out_features), _INT32),
                    "qzeros": StoredTensor(zero_shape, _INT32),
                    "scales": StoredTensor((groups, out_features)),
                    "g_idx": StoredTensor((in_features,), _INT32, is_optional=not self.may_reorder),
                    # Written for every layer by some programs, all zero; read so that another one is not ignored.
                    "bias": StoredTensor((out_features,), is_optional=True),
                }
            case StoredLayout.AWQ:
                tensors = {
                    "qweight": StoredTensor((in_features, out_words), _INT32),
                    "qzeros": StoredTensor(zero_shape, _INT32),
                    "scales": StoredTensor((groups, out_features)),
                }
        return {f"{module}.{name}": tensor for name, tensor in tensors.items()}


def read_stored_quantization(config: ConfigFile) -> StoredQuantization | None:
    """Read the part of config.json on quantization; None where weights are stored as they are.

    Raises `ModelError` for methods and options that octavo does not compute.
    """
    for key in _KEYS:
        if (section := config.section(key)) is not None:
            method = section.text("quant_method", "compressed-tensors" if key == "compression_config" else "")
            readers = {"compressed-tensors": _read_compressed_tensors, "gptq": _read_gptq, "awq": _read_awq}
            if method not in readers:
                raise section.error("quant_method", f"octavo reads {', '.join(readers)}")
            return readers[method](section)
    return None


def _read_compressed_tensors(section: ConfigFile) -> StoredQuantization:
    _allow(section, "format", ("int-quantized", "pack-quantized"))
    _allow(section, "quantization_status", ("compressed", "frozen"), default="compressed")
    _refuse(section, "kv_cache_scheme", "octavo has no quantized KV cache yet")
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
    _allow(weights, "type", ("int",), default="int")
    if weights.has("actorder") and weights.values["actorder"] not in ("static", "weight"):
        raise weights.error("actorder", "octavo does not reorder input features yet")
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
    size = _group_size(weights) if strategy == "group" else None
    return StoredQuantization(
        layout=StoredLayout.PACKED, bits=4, group_size=size, has_zeros=not symmetric, ignored=ignored
    )


def _check_activations(group: ConfigFile) -> None:
    activations = group.section("input_activations")
    expected = {"num_bits": 8, "type": "int", "dynamic": True, "symmetric": True, "strategy": "token"}
    if activations is None or any(activations.values.get(key, value) != value for key, value in expected.items()):
        raise group.error("input_activations", "octavo rounds activations to int8 on the way, one scale per token")


def _read_gptq(section: ConfigFile) -> StoredQuantization:
    _allow_bits(section)
    if section.values.get("dynamic"):
        raise section.error("dynamic", "octavo reads one scheme for all linear layers")
    _allow(section, "checkpoint_format", ("gptq", "gptq_v2"), default="gptq")
    offset = 1 if section.text("checkpoint_format", "gptq") == "gptq" else 0
    ignored = () if section.flag("lm_head", default=False) else ("lm_head",)
    return StoredQuantization(
        layout=StoredLayout.GPTQ,
        bits=4,
        group_size=_group_size(section),
        has_zeros=not section.flag("sym", default=False),
        zero_offset=offset,
        may_reorder=section.flag("desc_act", default=False),
        ignored=(*ignored, *_all_but(section, "modules_in_block_to_quantize")),
    )


def _all_but(section: ConfigFile, key: str) -> tuple[str, ...]:
    """Read optional lists of names as the pattern of all other linear layers of a block."""
    lists = section.values.get(key) or []
    are_lists = isinstance(lists, list) and all(isinstance(part, list) for part in lists)
    if not are_lists or not all(isinstance(name, str) for part in lists for name in part):
        raise section.error(key, "must be a list of lists of names")
    among = "|".join(re.escape(name) for part in lists for name in part)
    return (rf"re:model\.layers\.(?!.*\.(?:{among})$)",) if among else ()


def _read_awq(section: ConfigFile) -> StoredQuantization:
    _allow_bits(section)
    _allow(section, "version", ("gemm", "GEMM"), default="gemm")
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
        raise section.error(key, "octavo reads 4 bits of this method")


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
                raise section.error(key, f"{name} is no regular expression: {error}") from None
    return tuple(names)


def _allow(section: ConfigFile, key: str, values: tuple[str, ...], default: str | None = None) -> None:
    if (section.text(key) if default is None else section.text(key, default)) not in values:
        raise section.error(key, f"octavo reads {' and '.join(values)}")


def _refuse(section: ConfigFile, key: str, problem: str) -> None:
    if section.has(key):
        raise section.error(key, problem)


def _matches(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return module == pattern or module.endswith(f".{pattern}") or f".{pattern}." in f".{module}."
