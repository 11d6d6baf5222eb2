"""The keys and values of a model, layer by layer: shapes, windows, and where each stands in a block. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace

ROUNDED_KV = {"int8": "int8", "fp8": "float8_e4m3fn"}  # dtypes of rows with scales, by what users call them
_VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
_SCALE_BYTES = 4  # of each rounded row, as in `octavo.kernels.quantization`


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

        Behind the rounded rows of each head stand their scales.
        """
        row_bytes = self.head_dim * _VALUE_BYTES[dtype] + (_SCALE_BYTES if dtype in ROUNDED_KV.values() else 0)
        return 2 * self.num_kv_heads * block_size * row_bytes


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV cache of a model: what each layer keeps, and in which of two pieces of memory it stands.

    A block is one piece, of the layers that see all that came before. A window block is another, of those with a
    window: there is one as long as somebody sees so far back. Within a piece the layers stand in their order.
    """

    layers: tuple[KVShape, ...]

    @property
    def groups(self) -> dict[KVShape, tuple[int, ...]]:
        """Numbers of the layers by what they keep and see: what is decided for one of a group holds for all of it."""
        groups: dict[KVShape, tuple[int, ...]] = {}
        for index, shape in enumerate(self.layers):
            groups[shape] = (*groups.get(shape, ()), index)
        return groups

    @property
    def window(self) -> int | None:
        """How many tokens, itself included, a position sees in window blocks: the largest of all windows, or None."""
        return max((each.window for each in self.layers if each.window is not None), default=None)

    @property
    def without_windows(self) -> KVLayout:
        """The same layers, all in blocks."""
        return KVLayout(tuple(replace(each, window=None) for each in self.layers))

    @property
    def in_blocks(self) -> tuple[int, ...]:
        """Numbers of the layers that stand in blocks."""
        return tuple(index for index, each in enumerate(self.layers) if each.window is None)

    @property
    def in_window_blocks(self) -> tuple[int, ...]:
        """Numbers of the layers that stand in window blocks."""
        return tuple(index for index, each in enumerate(self.layers) if each.window is not None)

    def block_bytes(self, block_size: int, dtype: str) -> int:
        """Bytes of a block."""
        return sum(self.layers[index].block_bytes(block_size, dtype) for index in self.in_blocks)

    def window_block_bytes(self, block_size: int, dtype: str) -> int:
        """Bytes of a window block; 0 where no layer has a window."""
        return sum(self.layers[index].block_bytes(block_size, dtype) for index in self.in_window_blocks)

    def bytes_per_token(self, dtype: str) -> int:
        """Bytes that one token keeps over all layers, as long as all of them see it."""
        return self.block_bytes(1, dtype) + self.window_block_bytes(1, dtype)

    def bytes_behind_window(self, dtype: str) -> int:
        """Bytes that one token keeps once it has fallen behind the window."""
        return self.block_bytes(1, dtype)
