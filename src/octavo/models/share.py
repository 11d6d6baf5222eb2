"""The share of a rank, which is one of the processes that compute a model together."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.models.declared import RowsPart
from octavo.models.gated_mlp import GatedMLPTensors

if TYPE_CHECKING:
    from octavo.models.declared import Borders, Linear

_UNIT = 64  # features; borders at multiples of it leave no half-empty panels


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one of `count` ranks. divides_by_expert: each expert belongs to one rank, and is not divided."""

    rank: int
    count: int
    divides_by_expert: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.count}{' with own experts' if self.divides_by_expert else ''}"

    def borders(self, size: int, unit: int = _UNIT, what: str = "features in a layer") -> Borders:
        """Divide `size` as equally as multiples of `unit` allow. Rank 0 has the largest part.

        Halves `unit` if there are too few of them. Raises `ConfigError` if a rank would have nothing.
        """
        if size < self.count:
            raise ConfigError(f"tensor_parallel_size {self.count} is more than {size}, the model's {what}")
        while unit > 1 and size < unit * self.count:
            unit //= 2
        units = -(-size // unit)
        return tuple(min(size, unit * -(-units * rank // self.count)) for rank in range(self.count + 1))

    def own(self, borders: Borders) -> tuple[int, int]:
        """Return this rank's first and end index."""
        return borders[self.rank], borders[self.rank + 1]

    def rows(self, whole: Linear, *, inputs: Borders | None = None, is_joined: bool = True) -> RowsPart:
        """Divide a matrix. is_joined: True if all ranks need the result."""
        borders = self.borders(whole.out_features)
        return RowsPart.of(whole, [self.own(borders)], inputs=inputs, outputs=borders if is_joined else None)

    def mlp(self, whole: GatedMLPTensors, *, is_joined: bool = True) -> GatedMLPTensors:
        """Divide an MLP along its inner features. It may lack a gate. is_joined: see `rows`."""
        inner = whole.down.in_features
        borders = self.borders(inner)
        first, end = self.own(borders)
        starts = range(0, whole.gate_up.out_features, inner)
        return GatedMLPTensors(
            gate_up=RowsPart.of(whole.gate_up, [(start + first, start + end) for start in starts]),
            down=self.rows(whole.down, inputs=borders, is_joined=is_joined),
        )

    def experts(self, num_experts: int) -> Borders:
        """Return each rank's first expert, then their number. Each rank has a node of the tree of `add_experts`.

        Raises `ConfigError` if the number of ranks is no power of two, or if there are fewer experts.
        """
        if self.count & (self.count - 1) or self.count > num_experts:
            raise ConfigError(
                f"enable_expert_parallel divides {num_experts} experts by halving: set tensor_parallel_size to a power "
                f"of two up to {num_experts}, not to {self.count}"
            )
        borders = [0, num_experts]
        while len(borders) <= self.count:
            borders = [*(each for a, b in pairwise(borders) for each in (a, (a + b) // 2)), num_experts]
        return tuple(borders)

    def heads(
        self, num_heads: int, num_kv_heads: int, kinds: tuple[str, str] = ("query heads", "heads of keys and values")
    ) -> tuple[Borders, list[tuple[int, int]]]:
        """Return the borders of query heads, and the range of KV heads of each rank.

        If there are fewer KV heads than ranks, several ranks have the same KV head. kinds: names of both for an error,
        if other heads are shared in the same way. Raises `ConfigError`.
        """
        group, count = num_heads // num_kv_heads, self.count
        if num_kv_heads >= count:
            kv = self.borders(num_kv_heads, 1)
            return tuple(group * border for border in kv), list(pairwise(kv))
        together = count // num_kv_heads
        if count % num_kv_heads or together > group:
            raise ConfigError(
                f"tensor_parallel_size {count} does not suit a model with {num_heads} {kinds[0]} and {num_kv_heads} "
                f"{kinds[1]}: choose at most {num_kv_heads}, or a multiple of {num_kv_heads} up to {num_heads}"
            )
        kv_heads = [rank // together for rank in range(count)]
        queries = (group * head - (-group * (rank % together) // together) for rank, head in enumerate(kv_heads))
        return (*queries, num_heads), [(head, head + 1) for head in kv_heads]
