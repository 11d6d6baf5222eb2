"""Declares tensors. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear layers of one input, computed as one. parts: each layer's name, without ".weight", and out_features."""

    parts: tuple[tuple[str, int], ...]
    in_features: int
    has_bias: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers."""
        return tuple(name for name, _ in self.parts)

    @property
    def out_features(self) -> int:
        """Rows of all layers."""
        return sum(rows for _, rows in self.parts)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Each tensor's shape."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, rows in self.parts:
            shapes[f"{name}.weight"] = (rows, self.in_features)
            if self.has_bias:
                shapes[f"{name}.bias"] = (rows,)
        return shapes


@dataclass(frozen=True, slots=True)
class Norm:
    """The weight of an RMS norm. name: without ".weight"."""

    name: str
    size: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensor's shape."""
        return {f"{self.name}.weight": (self.size,)}


@dataclass(frozen=True, slots=True)
class Vector:
    """Numbers that are kept in float32. name: of the tensor."""

    name: str
    size: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensor's shape."""
        return {self.name: (self.size,)}


def in_order(declared: object) -> Iterator[Linear | Norm | Vector]:
    """Yield the declarations in nested tuples."""
    if isinstance(declared, Linear | Norm | Vector):
        yield declared
    elif isinstance(declared, tuple):
        for each in declared:
            yield from in_order(each)
    else:
        assert declared is None, declared
