"""Declares a model's tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear layers of one input, computed as one product. parts: (name without ".weight", out_features)."""

    parts: tuple[tuple[str, int], ...]
    in_features: int
    has_bias: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Layer names."""
        return tuple(name for name, _ in self.parts)

    @property
    def out_features(self) -> int:
        """Total rows."""
        return sum(rows for _, rows in self.parts)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, rows in self.parts:
            shapes[f"{name}.weight"] = (rows, self.in_features)
            if self.has_bias:
                shapes[f"{name}.bias"] = (rows,)
        return shapes

    @property
    def num_weights(self) -> int:
        """Number of weights and biases."""
        return sum(map(math.prod, self.shapes.values()))


@dataclass(frozen=True, slots=True)
class HeadPart(Linear):
    """One head's rows of a stored matrix, multiplied as floats.

    whole: the stored matrix. rows: first and end row. is_transposed: rows become columns.
    """

    whole: Linear = field(kw_only=True)
    rows: tuple[int, int] = field(kw_only=True)
    is_transposed: bool = field(default=False, kw_only=True)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of the whole stored matrix."""
        return self.whole.shapes

    @property
    def num_weights(self) -> int:
        """See `Linear`."""
        return self.out_features * self.in_features


@dataclass(frozen=True, slots=True)
class Norm:
    """The weight of an RMS norm. name: without ".weight"."""

    name: str
    size: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `Linear`."""
        return {f"{self.name}.weight": (self.size,)}


@dataclass(frozen=True, slots=True)
class Vector:
    """Numbers kept in float32. name: full tensor name."""

    name: str
    size: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `Linear`."""
        return {self.name: (self.size,)}


@dataclass(frozen=True, slots=True)
class Taps(Vector):
    """The weights of a depthwise convolution, `width` neighbouring ones for each channel."""

    width: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `Linear`."""
        return {self.name: (self.size // self.width, 1, self.width)}


@dataclass(frozen=True, slots=True)
class VectorPart(Vector):
    """Neighbouring numbers of a stored vector. first: index of the first one. whole_size: numbers in the file."""

    first: int = field(kw_only=True)
    whole_size: int = field(kw_only=True)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of the whole stored vector."""
        return {self.name: (self.whole_size,)}


@dataclass(frozen=True, slots=True)
class Table:
    """A matrix that stays in its file. name: without ".weight"."""

    name: str
    num_rows: int
    width: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `Linear`."""
        return {f"{self.name}.weight": (self.num_rows, self.width)}


def in_order(declared: object) -> Iterator[Linear | Norm | Vector | Table]:
    """Yield declarations from nested tuples."""
    if isinstance(declared, Linear | Norm | Vector | Table):
        yield declared
    elif isinstance(declared, tuple):
        for each in declared:
            yield from in_order(each)
    else:
        assert declared is None, declared
