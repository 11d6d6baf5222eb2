"""The keys and values of a model, layer by layer: shapes, windows, and KV groups. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.data.kv_groups import FullAttention, SlidingWindow

if TYPE_CHECKING:
    from octavo.data.kv_groups import KVGroupKind

ROUNDED_KV = {"int8": "int8", "fp8": "float8_e4m3fn"}  # dtypes of rows with scales, by what users call them
_VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
_SCALE_BYTES = 4  # of each rounded row, as in `octavo.kernels.quantization`


@dataclass(frozen=True, slots=True)
class KVShape:
    """Keys and values of a layer.

    window: tokens a position sees, itself included, or None for all.
    shared_layer: number of an earlier layer whose keys and values this one reads; it keeps none of its own.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    shared_layer: int | None = None

    @property
    def kind(self) -> KVGroupKind:
        """The kind of the layer's KV group."""
        return FullAttention() if self.window is None else SlidingWindow(self.window)

    def block_bytes(self, block_size: int, dtype: str) -> int:
        """Bytes of the layer's part of a block: its keys, then its values, [2, num_kv_heads, block_size, head_dim].

        The rounded rows of each head are followed by their scales. 0 if another layer keeps them.
        """
        if self.shared_layer is not None:
            return 0
        row_bytes = self.head_dim * _VALUE_BYTES[dtype] + (_SCALE_BYTES if dtype in ROUNDED_KV.values() else 0)
        return 2 * self.num_kv_heads * block_size * row_bytes


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The layers of a KV group: their kind, and their numbers in the model."""

    kind: KVGroupKind
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV cache of a model: what each layer keeps, and in which KV group.

    A block of a group is one piece of memory: the parts of its layers, in their order.
    """

    layers: tuple[KVShape, ...]

    def __post_init__(self) -> None:
        for index, shape in enumerate(self.layers):
            if (shared := shape.shared_layer) is None:
                continue
            if not 0 <= shared < index or replace(self.layers[shared], shared_layer=shared) != replace(
                shape, shared_layer=shared
            ):
                raise ValueError(f"layer {index} cannot read the keys and values of layer {shared}: they differ")

    @property
    def shapes(self) -> dict[KVShape, tuple[int, ...]]:
        """Numbers of the layers by what they keep and read: what is decided for one of a shape holds for all of it."""
        shapes: dict[KVShape, tuple[int, ...]] = {}
        for index, shape in enumerate(self.layers):
            shapes[shape] = (*shapes.get(shape, ()), index)
        return shapes

    @property
    def kv_groups(self) -> tuple[LayerGroup, ...]:
        """The KV groups, one for each kind: first the layers that read all positions, perhaps none, then the others.

        Layers with different sliding windows are different groups. A layer that reads another one's keys and values
        adds nothing to a group.
        """
        groups: dict[KVGroupKind, list[int]] = {FullAttention(): []}
        for index, shape in enumerate(self.layers):
            if shape.shared_layer is None:
                groups.setdefault(shape.kind, []).append(index)
        return tuple(LayerGroup(kind, tuple(numbers)) for kind, numbers in groups.items())

    @property
    def group_indices(self) -> tuple[int, ...]:
        """For each layer the index of its KV group."""
        kinds = [group.kind for group in self.kv_groups]
        return tuple(kinds.index(shape.kind) for shape in self.layers)

    @property
    def window(self) -> int | None:
        """The largest of all windows, in tokens, or None if no layer has one."""
        return max((each.window for each in self.layers if each.window is not None), default=None)

    @property
    def without_windows(self) -> KVLayout:
        """The same layers, all in the first group."""
        return KVLayout(tuple(replace(each, window=None) for each in self.layers))

    def block_bytes(self, block_size: int, dtype: str) -> tuple[int, ...]:
        """Bytes of a block of each group."""
        return tuple(
            sum(self.layers[index].block_bytes(block_size, dtype) for index in group.layers) for group in self.kv_groups
        )

    def bytes_per_token(self, dtype: str) -> int:
        """Bytes that one token keeps over all layers, as long as all of them read it."""
        return sum(self.block_bytes(1, dtype))

    def bytes_behind_window(self, dtype: str) -> int:
        """Bytes that one token keeps once it has fallen behind the window."""
        return self.block_bytes(1, dtype)[0]
