"""Describes what layers store in the KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from octavo.data.kv_groups import FullAttention, RecurrentStates, SlidingWindow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    import torch
    from torch import Tensor

    from octavo.data.kv_groups import KVGroupKind
    from octavo.models.declared import Ranges

ROUNDED_KV = {"int8": "int8", "fp8": "float8_e4m3fn"}
_VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
_SCALE_BYTES = 4  # per head and row
_STATE_ALIGNMENT = 64


class CacheSpec(Protocol):
    """What a layer stores for each position, and which positions it reads. Frozen and hashable.

    shared_layer: the earlier layer that provides this layer's KV, or None.
    """

    @property
    def shared_layer(self) -> int | None: ...  # noqa: D102 - above

    @property
    def kind(self) -> KVGroupKind:
        """The KV group's kind."""
        ...

    @property
    def keeping_all(self) -> CacheSpec:
        """The spec without a window."""
        ...

    def block_bytes(self, block_size: int, dtype: str) -> int:
        """Return the layer's bytes in a block."""
        ...

    def views(self, part: Tensor, block_size: int) -> tuple[Tensor, ...]:
        """Return the layer's views [num_blocks, ...] of `part` [num_blocks, block_bytes / bytes per number]."""
        ...

    def match(self, own: Any, whole_spec: Any, whole: Any) -> tuple[Any, Any]:
        """Return views of equal shapes: of `own`, and of the same part of `whole`.

        own: this layer's bytes [..., block_bytes] on one rank, numpy or torch. whole_spec, whole: the undivided layer,
        and its bytes. Writes to a view change its source.
        """
        ...

    def obstacle(self, dtype: str) -> str | None:
        """Return a problem with this dtype as the end of a sentence, or None."""
        ...


@dataclass(frozen=True, slots=True)
class KVShape:
    """Keys and values of a layer. window: see `AttentionConfig`. first_head: this rank's first head in the model."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    shared_layer: int | None = None
    first_head: int = 0

    @property
    def kind(self) -> KVGroupKind:
        """See `CacheSpec`."""
        return FullAttention() if self.window is None else SlidingWindow(self.window)

    @property
    def keeping_all(self) -> KVShape:
        """See `CacheSpec`."""
        return replace(self, window=None)

    def block_bytes(self, block_size: int, dtype: str) -> int:
        """See `CacheSpec`. Includes the scales of rounded rows."""
        if self.shared_layer is not None:
            return 0
        return 2 * self.num_kv_heads * block_size * _row_bytes(self.head_dim, dtype)

    def views(self, part: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        """Return keys and values, each [num_blocks, num_kv_heads, block_size, head_dim]."""
        num_blocks, num_heads = part.shape[0], self.num_kv_heads
        heads = part.view(num_blocks, 2, num_heads, part.shape[1] // (2 * num_heads))
        rows = heads[..., : block_size * self.head_dim].view(num_blocks, 2, num_heads, block_size, self.head_dim)
        return rows[:, 0], rows[:, 1]

    def match(self, own: Any, whole_spec: KVShape, whole: Any) -> tuple[Any, Any]:
        """See `CacheSpec`."""
        num_heads, first = self.num_kv_heads, self.first_head
        own_heads = own.reshape(*own.shape[:-1], 2, num_heads, own.shape[-1] // (2 * num_heads))
        heads = whole.reshape(*whole.shape[:-1], 2, whole_spec.num_kv_heads, own_heads.shape[-1])
        return own_heads, heads[..., first : first + num_heads, :]

    def obstacle(self, dtype: str) -> str | None:
        """See `CacheSpec`."""
        return _obstacle(self.head_dim, dtype)


@dataclass(frozen=True, slots=True)
class LatentShape:
    """A row of a latent (`rank` values) and a rotated key (`rope_dim`) for all heads."""

    rank: int
    rope_dim: int
    shared_layer: int | None = None

    @property
    def kind(self) -> KVGroupKind:
        """See `CacheSpec`."""
        return FullAttention()

    @property
    def keeping_all(self) -> LatentShape:
        """See `CacheSpec`."""
        return self

    def block_bytes(self, block_size: int, dtype: str) -> int:
        """See `CacheSpec`."""
        return 0 if self.shared_layer is not None else block_size * _row_bytes(self.width, dtype)

    @property
    def width(self) -> int:
        """Values of a row."""
        return self.rank + self.rope_dim

    def views(self, part: Tensor, block_size: int) -> tuple[Tensor]:
        """Return rows [num_blocks, 1, block_size, rank + rope_dim]."""
        rows = part[:, : block_size * self.width]
        return (rows.view(len(rows), 1, block_size, self.width),)

    def match(self, own: Any, whole_spec: LatentShape, whole: Any) -> tuple[Any, Any]:
        """See `CacheSpec`. Each rank stores all latents."""
        assert self == whole_spec
        return own, whole

    def obstacle(self, dtype: str) -> str | None:
        """See `CacheSpec`."""
        return _obstacle(self.width, dtype)


@dataclass(frozen=True, slots=True)
class NothingStored:
    """No data per position."""

    @property
    def shared_layer(self) -> None:
        """See `CacheSpec`."""
        return

    @property
    def kind(self) -> KVGroupKind:
        """See `CacheSpec`."""
        return FullAttention()

    @property
    def keeping_all(self) -> NothingStored:
        """See `CacheSpec`."""
        return self

    def block_bytes(self, block_size: int, dtype: str) -> int:
        """Return 0."""
        del block_size, dtype
        return 0

    def views(self, part: Tensor, block_size: int) -> tuple[Tensor, ...]:
        """Return nothing."""
        del part, block_size
        return ()

    def match(self, own: Any, whole_spec: NothingStored, whole: Any) -> tuple[Any, Any]:
        """See `CacheSpec`."""
        assert self == whole_spec
        return own, whole

    def obstacle(self, dtype: str) -> str | None:
        """Return None."""
        del dtype
        return None


class StateRun(NamedTuple):
    """Bytes of a rank's state that are also neighbours in the undivided state. own, whole: the first byte in each."""

    own: int
    whole: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StateShape(NothingStored):
    """A recurrent state per sequence, instead of data per position.

    inputs: shapes [rows, channels] of parts in the activations' dtype. numbers: shapes [heads, ...] of float32 parts.
    kept_width: numbers of a kept row, in the activations' dtype (see `octavo.kernels.operations.keep_rows`). channels:
    this rank's ranges of the model's channels. first_head: this rank's first head in the model.
    """

    inputs: tuple[tuple[int, ...], ...]
    numbers: tuple[tuple[int, ...], ...]
    kept_width: int = 0
    channels: Ranges = ()
    first_head: int = 0

    @property
    def kind(self) -> KVGroupKind:
        """See `CacheSpec`."""
        return RecurrentStates()

    def slot_bytes(self, dtype: str) -> int:
        """Return the bytes of a sequence's state. dtype: of activations."""
        return sum(num_bytes for _, num_bytes in self._parts(dtype))

    def kept_bytes(self, dtype: str) -> int:
        """Return the bytes of a kept row. dtype: of activations."""
        return self.kept_width * _VALUE_BYTES[dtype]

    def runs(self, whole: StateShape, dtype: str) -> Iterator[StateRun]:
        """Yield the places of this rank's bytes in the undivided state. dtype: of activations."""
        own_start = whole_start = 0
        heads = ((self.first_head, self.first_head + shape[0]) for shape in self.numbers)
        divided = [*((1, self.channels) for _ in self.inputs), *((0, (each,)) for each in heads)]
        for (axis, ranges), own_part, whole_part in zip(divided, self._parts(dtype), whole._parts(dtype), strict=True):
            (shape, own_bytes), (whole_shape, whole_bytes) = own_part, whole_part
            size = math.prod(shape[axis + 1 :]) * _VALUE_BYTES[dtype if axis else "float32"]
            own = own_start
            for row in range(math.prod(shape[:axis])):
                whole_row = whole_start + row * whole_shape[axis] * size
                for first, end in ranges:
                    yield StateRun(own, whole_row + first * size, (end - first) * size)
                    own += (end - first) * size
            own_start, whole_start = own_start + own_bytes, whole_start + whole_bytes

    def _parts(self, dtype: str) -> list[tuple[tuple[int, ...], int]]:
        """Return shapes, and bytes with padding."""
        sizes = [*((each, dtype) for each in self.inputs), *((each, "float32") for each in self.numbers)]
        return [
            (shape, -(-math.prod(shape) * _VALUE_BYTES[each] // _STATE_ALIGNMENT) * _STATE_ALIGNMENT)
            for shape, each in sizes
        ]

    def slot_views(self, part: Tensor, dtype: torch.dtype, number_dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the state's parts, each [num_slots, ...], as views of `part`, uint8 [num_slots, slot_bytes].

        dtype: of activations. number_dtype: float32.
        """
        views, start = [], 0
        for index, (shape, num_bytes) in enumerate(self._parts(str(dtype).removeprefix("torch."))):
            each = dtype if index < len(self.inputs) else number_dtype
            data = part[:, start : start + math.prod(shape) * each.itemsize].view(each)
            views.append(data.view(len(part), *shape))
            start += num_bytes
        return tuple(views)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one KV group."""

    kind: KVGroupKind
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What each layer stores. A KV group's block holds its layers' parts in order."""

    layers: tuple[CacheSpec, ...]

    def __post_init__(self) -> None:
        for index, spec in enumerate(self.layers):
            if (shared := spec.shared_layer) is None:
                continue
            if not 0 <= shared < index or _reading(self.layers[shared], shared) != _reading(spec, shared):
                raise ValueError(f"layer {index} cannot read the keys and values of layer {shared}: they differ")

    @property
    def specs(self) -> dict[CacheSpec, tuple[int, ...]]:
        """Layers by spec."""
        specs: dict[CacheSpec, tuple[int, ...]] = {}
        for index, spec in enumerate(self.layers):
            specs[spec] = (*specs.get(spec, ()), index)
        return specs

    @property
    def states(self) -> dict[int, StateShape]:
        """Recurrent states, by layer."""
        return {index: spec for index, spec in enumerate(self.layers) if isinstance(spec, StateShape)}

    def state_bytes(self, dtype: str) -> int:
        """Return the bytes of a sequence's states. dtype: of activations."""
        return sum(spec.slot_bytes(dtype) for spec in self.states.values())

    def state_runs(self, whole: KVLayout, dtype: str) -> Iterator[StateRun]:
        """Yield the places of this rank's bytes in the states of the undivided model. dtype: of activations."""
        own_start = whole_start = 0
        for number, spec in self.states.items():
            for own, start, num_bytes in spec.runs(whole.states[number], dtype):
                yield StateRun(own_start + own, whole_start + start, num_bytes)
            own_start += spec.slot_bytes(dtype)
            whole_start += whole.states[number].slot_bytes(dtype)

    def kept_bytes(self, dtype: str) -> int:
        """Return the bytes of a kept row of all recurrent layers. dtype: of activations."""
        return sum(spec.kept_bytes(dtype) for spec in self.states.values())

    @property
    def last_writer(self) -> int:
        """The last layer that stores something."""
        stores = (spec.shared_layer is None and spec != NothingStored() for spec in self.layers)
        return max(index for index, each in enumerate(stores) if each)

    @property
    def kv_groups(self) -> tuple[LayerGroup, ...]:
        """One group per kind, without recurrent states. The first reads all positions, and may be empty."""
        groups: dict[KVGroupKind, list[int]] = {FullAttention(): []}
        for index, spec in enumerate(self.layers):
            if spec.shared_layer is None and not isinstance(spec, NothingStored):
                groups.setdefault(spec.kind, []).append(index)
        return tuple(LayerGroup(kind, tuple(numbers)) for kind, numbers in groups.items())

    @property
    def group_indices(self) -> tuple[int, ...]:
        """Each layer's group index."""
        kinds = [*(group.kind for group in self.kv_groups), RecurrentStates()]
        return tuple(kinds.index(spec.kind) for spec in self.layers)

    @property
    def window(self) -> int | None:
        """The largest window, or None if no layer has one."""
        read = (group.kind.most_positions for group in self.kv_groups)
        return max((most for most in read if most is not None), default=None)

    @property
    def without_windows(self) -> KVLayout:
        """One group that keeps all positions."""
        return KVLayout(tuple(each.keeping_all for each in self.layers))

    def block_bytes(self, block_size: int, dtype: str) -> tuple[int, ...]:
        """Return each group's bytes per block."""
        return tuple(
            sum(self.layers[index].block_bytes(block_size, dtype) for index in group.layers) for group in self.kv_groups
        )

    def columns(self, block_size: int, dtype: str) -> dict[int, slice]:
        """Return each layer's bytes within a block of its group. Layers without own KV have none."""
        columns = {}
        for group in self.kv_groups:
            start = 0
            for index in group.layers:
                end = start + self.layers[index].block_bytes(block_size, dtype)
                columns[index] = slice(start, end)
                start = end
        return columns

    def bytes_per_token(self, dtype: str) -> int:
        """Return a token's bytes inside all windows."""
        return sum(self.block_bytes(1, dtype))

    def bytes_before_window(self, dtype: str) -> int:
        """Return a token's bytes before all windows."""
        return self.block_bytes(1, dtype)[0]


def _row_bytes(width: int, dtype: str) -> int:
    return width * _VALUE_BYTES[dtype] + (_SCALE_BYTES if dtype in ROUNDED_KV.values() else 0)


def _obstacle(width: int, dtype: str) -> str | None:
    if dtype in ROUNDED_KV.values() and width % 4:
        return f"needs a head_dim that is a multiple of 4, not {width}"
    return None


def _reading(spec: CacheSpec, layer: int) -> CacheSpec:
    return replace(spec, shared_layer=layer)  # type: ignore[type-var]
