"""The keys and values of a model, layer by layer: shapes, windows, and where each stands in a block. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

_VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
_SCALE_BYTES = 4  # of each row of int8, as in `octavo.kernels.quantization`


@dataclass(frozen=True, slots=True)
class KVShape:
    """Keys and values of a layer.

    window: tokens a position sees, itself included, or None for all.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None

    def block_bytes(self, block_size: int, dtype: str) -> int:
        """Bytes of the layer's part of a block: its keys, then its values, [2, num_kv_heads, block_size, head_dim].

        Behind the rows of int8 of each head stand their scales.
        """
        row_bytes = self.head_dim * _VALUE_BYTES[dtype] + (_SCALE_BYTES if dtype == "int8" else 0)
        return 2 * self.num_kv_heads * block_size * row_bytes


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A block of a KV cache: one piece of memory, in which the layers stand in their order."""

    layers: tuple[KVShape, ...]

    @property
    def groups(self) -> dict[KVShape, tuple[int, ...]]:
        """Numbers of the layers by what they keep and see: what is decided for one of a group holds for all of it."""
        groups: dict[KVShape, tuple[int, ...]] = {}
        for index, shape in enumerate(self.layers):
            groups[shape] = (*groups.get(shape, ()), index)
        return groups

    def block_bytes(self, block_size: int, dtype: str) -> int:
        """Bytes of a block over all layers."""
        return sum(len(layers) * shape.block_bytes(block_size, dtype) for shape, layers in self.groups.items())

    def bytes_per_token(self, dtype: str) -> int:
        """Bytes that one token keeps over all layers."""
        return self.block_bytes(1, dtype)

    def offsets(self, block_size: int, dtype: str) -> list[int]:
        """Return the byte of a block at which each layer begins, and behind them where it ends."""
        return list(accumulate((each.block_bytes(block_size, dtype) for each in self.layers), initial=0))
