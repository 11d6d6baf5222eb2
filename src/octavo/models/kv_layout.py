"""The KV cache of a model's layers: what each stores of a position, in which KV group. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from octavo.data.kv_groups import FullAttention, SlidingWindow

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.data.kv_groups import KVGroupKind

ROUNDED_KV = {"int8": "int8", "fp8": "float8_e4m3fn"}  # dtypes of rows with scales, by users' names for them
_VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
_SCALE_BYTES = 4  # of each rounded row, as in `octavo.kernels.quantization`


class CacheSpec(Protocol):
    """What a layer stores of each position, and which positions it reads. Frozen and hashable.

    shared_layer: number of an earlier layer whose cache this one reads; it stores nothing itself.
    """

    @property
    def shared_layer(self) -> int | None: ...  # noqa: D102 - above

    @property
    def kind(self) -> KVGroupKind:
        """The kind of the layer's KV group."""
        ...

    @property
    def keeping_all(self) -> CacheSpec:
        """The same for a layer that reads all positions."""
        ...

    def block_bytes(self, block_size: int, dtype: str) -> int:
        """Return the bytes of the layer's part of a block; 0 if another layer stores them. dtype: of the cache."""
        ...

    def views(self, part: Tensor, block_size: int) -> tuple[Tensor, ...]:
        """Return the tensors that the layer reads and writes, as views of its part of all blocks.

        part: [num_blocks, block_bytes / width]. width: bytes of a number of the cache's dtype. The first dimension of
        each view is num_blocks.
        """
        ...

    def obstacle(self, dtype: str) -> str | None:
        """Return the reason why the cache cannot have this dtype, as the end of a sentence; None if it can."""
        ...


@dataclass(frozen=True, slots=True)
class KVShape:
    """Keys and values of a layer.

    window: tokens that a position sees, itself included, or None for all.
    shared_layer: number of an earlier layer whose keys and values this one reads; it stores none itself.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    shared_layer: int | None = None

    @property
    def kind(self) -> KVGroupKind:
        """The kind of the layer's KV group."""
        return FullAttention() if self.window is None else SlidingWindow(self.window)

    @property
    def keeping_all(self) -> KVShape:
        """The same without a window."""
        return replace(self, window=None)

    def block_bytes(self, block_size: int, dtype: str) -> int:
        """Return the bytes of the layer's part of a block: its keys, then its values.

        The part is [2, num_kv_heads, block_size, head_dim]. The quantized rows of each head are followed by their
        scales. 0 if another layer stores them.
        """
        if self.shared_layer is not None:
            return 0
        row_bytes = self.head_dim * _VALUE_BYTES[dtype] + (_SCALE_BYTES if dtype in ROUNDED_KV.values() else 0)
        return 2 * self.num_kv_heads * block_size * row_bytes

    def views(self, part: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        """Return keys and values without scales, each [num_blocks, num_kv_heads, block_size, head_dim]."""
        num_blocks, num_heads = part.shape[0], self.num_kv_heads
        heads = part.view(num_blocks, 2, num_heads, part.shape[1] // (2 * num_heads))
        rows = heads[..., : block_size * self.head_dim].view(num_blocks, 2, num_heads, block_size, self.head_dim)
        return rows[:, 0], rows[:, 1]

    def obstacle(self, dtype: str) -> str | None:
        """Return the reason if the scales of quantized heads would not be aligned, otherwise None."""
        if dtype in ROUNDED_KV.values() and self.head_dim % 4:
            return f"needs a head_dim that is a multiple of 4, not {self.head_dim}"
        return None


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The layers of a KV group: their kind, and their numbers in the model."""

    kind: KVGroupKind
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV cache of a model: what each layer stores, and in which KV group.

    A block of a group is one piece of memory: the parts of its layers, in their order.
    """

    layers: tuple[CacheSpec, ...]

    def __post_init__(self) -> None:
        for index, spec in enumerate(self.layers):
            if (shared := spec.shared_layer) is None:
                continue
            if not 0 <= shared < index or _reading(self.layers[shared], shared) != _reading(spec, shared):
                raise ValueError(f"layer {index} cannot read the keys and values of layer {shared}: they differ")

    @property
    def specs(self) -> dict[CacheSpec, tuple[int, ...]]:
        """Numbers of the layers by spec: a decision for one layer of a spec holds for all of them."""
        specs: dict[CacheSpec, tuple[int, ...]] = {}
        for index, spec in enumerate(self.layers):
            specs[spec] = (*specs.get(spec, ()), index)
        return specs

    @property
    def kv_groups(self) -> tuple[LayerGroup, ...]:
        """The KV groups, one for each kind: first the layers that read all positions, perhaps none, then bounded ones.

        Layers with different sliding windows are different groups. A layer that reads another one's keys and values
        adds nothing to a group.
        """
        groups: dict[KVGroupKind, list[int]] = {FullAttention(): []}
        for index, spec in enumerate(self.layers):
            if spec.shared_layer is None:
                groups.setdefault(spec.kind, []).append(index)
        return tuple(LayerGroup(kind, tuple(numbers)) for kind, numbers in groups.items())

    @property
    def group_indices(self) -> tuple[int, ...]:
        """For each layer the index of its KV group."""
        kinds = [group.kind for group in self.kv_groups]
        return tuple(kinds.index(spec.kind) for spec in self.layers)

    @property
    def window(self) -> int | None:
        """The largest of all windows, in tokens, or None if every layer reads all positions."""
        read = (each.kind.most_positions for each in self.layers)
        return max((most for most in read if most is not None), default=None)

    @property
    def without_windows(self) -> KVLayout:
        """The same layers, all in the first group."""
        return KVLayout(tuple(each.keeping_all for each in self.layers))

    def block_bytes(self, block_size: int, dtype: str) -> tuple[int, ...]:
        """Return the bytes of a block of each group."""
        return tuple(
            sum(self.layers[index].block_bytes(block_size, dtype) for index in group.layers) for group in self.kv_groups
        )

    def bytes_per_token(self, dtype: str) -> int:
        """Return the bytes that one token takes over all layers, as long as all of them read it."""
        return sum(self.block_bytes(1, dtype))

    def bytes_behind_window(self, dtype: str) -> int:
        """Return the bytes that one token takes when it has left the window."""
        return self.block_bytes(1, dtype)[0]


def _reading(spec: CacheSpec, layer: int) -> CacheSpec:
    """Return a spec that reads the cache of a layer."""
    return replace(spec, shared_layer=layer)  # type: ignore[type-var]
