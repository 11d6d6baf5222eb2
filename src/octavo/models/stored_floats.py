"""Describes floats of 8 or 4 bits with scales.

MXFP4 is multiplied without expansion. FP8 is expanded at load, or in products of Triton kernels. The option
`quantization` rounds both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from octavo.errors import ModelError
from octavo.models.stored_quantization import FLOATS, StoredTensor, is_ignored

if TYPE_CHECKING:
    from collections.abc import Mapping

_BYTES = ("U8",)
_SCALES = (*FLOATS, "F8_E8M0")
MXFP4_GROUP = 32


class FloatLayout(StrEnum):
    """A layer's stored tensors."""

    FP8 = "FP8"  # weight, with weight_scale or weight_scale_inv
    MXFP4_PACKED = "MXFP4"  # compressed-tensors: weight_packed, weight_scale
    MXFP4_BLOCKS = "MXFP4 in blocks"  # transformers: weight_blocks, weight_scales


_VALUES = {
    FloatLayout.FP8: "weight",
    FloatLayout.MXFP4_PACKED: "weight_packed",
    FloatLayout.MXFP4_BLOCKS: "weight_blocks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFloats:
    """A checkpoint's FP8 (E4M3) or MXFP4 (OCP Microscaling Formats 1.0, section 5.4).

    block        (out_features, in_features) that share a scale; None means all
    scale_names  possible names of scales; the file's first is used
    """

    layout: FloatLayout
    block: tuple[int | None, int | None]
    scale_names: tuple[str, ...] = ("weight_scale",)
    ignored: tuple[str, ...] = ()

    @property
    def values_name(self) -> str:
        """The values' tensor name."""
        return _VALUES[self.layout]

    @property
    def bits(self) -> int:
        """Bits per value."""
        return 8 if self.layout is FloatLayout.FP8 else 4

    @property
    def summary(self) -> str:
        """Description for messages."""
        rows, columns = self.block
        if rows is None:
            return f"{self.layout.partition(' ')[0]} with a scale per tensor"
        of = "row" if columns is None else f"{rows} x {columns} values"
        return f"{self.layout.partition(' ')[0]} with a scale per {of}"

    def covers(self, module: str) -> bool:
        """See `StoredQuantization.covers`."""
        return not (module.endswith(("embed_tokens", "embed_tokens_per_layer")) or is_ignored(module, self.ignored))

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, int]:
        """Return the scales' shape."""
        sizes = zip((out_features, in_features), self.block, strict=True)
        rows, columns = (1 if block is None else -(-size // block) for size, block in sizes)
        return rows, columns

    def block_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Return the bytes of MXFP4 matrices, with one exponent byte per group."""
        if self.bits != 4:
            return {}
        covered = {name: shape for name, shape in shapes.items() if len(shape) == 2}
        group = 1 + MXFP4_GROUP // 2
        return {
            name: math.prod(shape) // MXFP4_GROUP * group
            for name, shape in covered.items()
            if self.covers(name.removesuffix(".weight"))
        }

    def tensors(self, module: str, out_features: int, in_features: int) -> dict[str, StoredTensor]:
        """Return a module's tensors by name. Scales of activations and KV are ignored."""
        if self.bits == 4 and in_features % MXFP4_GROUP:
            raise ModelError(
                f"{module} has {in_features} input features, which is not a multiple of MXFP4's {MXFP4_GROUP}"
            )
        is_optional = len(self.scale_names) > 1
        dtypes = _BYTES if self.bits == 4 else _SCALES
        scales = StoredTensor(self.scale_shape(out_features, in_features), dtypes, is_optional)
        match self.layout:
            case FloatLayout.FP8:
                values = StoredTensor((out_features, in_features), ("F8_E4M3",))
            case FloatLayout.MXFP4_PACKED:
                values = StoredTensor((out_features, in_features // 2), _BYTES)
            case FloatLayout.MXFP4_BLOCKS:
                values = StoredTensor((out_features, in_features // MXFP4_GROUP, MXFP4_GROUP // 2), _BYTES)
        tensors = {self.values_name: values} | dict.fromkeys(self.scale_names, scales)
        number = StoredTensor((1,), is_optional=True)
        tensors |= dict.fromkeys(("input_scale", "activation_scale", "input_global_scale"), number)
        named = {f"{module}.{name}": tensor for name, tensor in tensors.items()}
        parent, _, name = module.rpartition(".")
        if name in {"k_proj", "v_proj"}:
            named |= dict.fromkeys((f"{parent}.{name[0]}_scale", f"{module}.{name[0]}_scale"), number)
        return named
