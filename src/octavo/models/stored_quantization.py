"""Describes stored integers: compressed-tensors (W8A8, or packed W4A16), GPTQ and AWQ.

All products round activations to int8.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

FLOATS = ("F32", "F16", "BF16", "F64")
SCALE_NAMES = ("weight_scale", "weight_scale_inv", "weight_scales", "scales")
_INT32 = ("I32",)
_VALUES_A_WORD = 8


class StoredLayout(StrEnum):
    """A layer's stored tensors."""

    INT8 = "int-quantized"  # compressed-tensors: weight, weight_scale
    PACKED = "pack-quantized"  # compressed-tensors: weight_packed, weight_scale, weight_zero_point, weight_shape
    GPTQ = "gptq"  # qweight, qzeros, scales, g_idx
    AWQ = "awq"  # qweight, qzeros, scales


class StoredTensor(NamedTuple):
    """A tensor's shape, and allowed dtypes as in safetensors."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    is_optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """How a checkpoint stores its integers.

    group_size   input features that share a scale, or None for all
    zero_offset  added to stored zero points (GPTQ stores them minus 1)
    may_reorder  groups may have any input features (act-order, g_idx)
    ignored      layers stored as floats: names, whole parts of names, or "re:" and a regular expression
    """

    layout: StoredLayout
    bits: int
    group_size: int | None
    has_zeros: bool
    zero_offset: int = 0
    may_reorder: bool = False
    ignored: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """Description for messages."""
        of = "row" if self.group_size is None else f"{self.group_size} values of a row"
        return f"int{self.bits} ({self.layout}) with a scale per {of}{', act-order' if self.may_reorder else ''}"

    def covers(self, module: str) -> bool:
        """Return True if a module (name without ".weight") has integers."""
        return not (module.endswith(("embed_tokens", "embed_tokens_per_layer")) or is_ignored(module, self.ignored))

    def num_groups(self, in_features: int) -> int:
        """Return scales per row."""
        return 1 if self.group_size is None else -(-in_features // self.group_size)

    def tensors(self, module: str, out_features: int, in_features: int) -> dict[str, StoredTensor]:
        """Return a module's tensors by name."""
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
                    "weight_g_idx": StoredTensor((in_features,), _INT32, is_optional=not self.may_reorder),
                }
                if self.has_zeros:
                    tensors["weight_zero_point"] = StoredTensor((out_words, groups), _INT32)
            case StoredLayout.GPTQ:
                tensors = {
                    "qweight": StoredTensor((words, out_features), _INT32),
                    "qzeros": StoredTensor(zero_shape, _INT32),
                    "scales": StoredTensor((groups, out_features)),
                    "g_idx": StoredTensor((in_features,), _INT32, is_optional=not self.may_reorder),
                    # Some programs write zeros; nonzero biases are refused.
                    "bias": StoredTensor((out_features,), is_optional=True),
                }
            case StoredLayout.AWQ:
                tensors = {
                    "qweight": StoredTensor((in_features, out_words), _INT32),
                    "qzeros": StoredTensor(zero_shape, _INT32),
                    "scales": StoredTensor((groups, out_features)),
                }
        return {f"{module}.{name}": tensor for name, tensor in tensors.items()}


def is_ignored(module: str, patterns: tuple[str, ...]) -> bool:
    """See `StoredQuantization.ignored`."""
    return any(_matches(module, pattern) for pattern in patterns)


def _matches(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return module == pattern or module.endswith(f".{pattern}") or f".{pattern}." in f".{module}."
