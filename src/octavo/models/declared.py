"""Declares a model's tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Borders = tuple[int, ...]
"""The first index of each rank, then the total."""
Ranges = tuple[tuple[int, int], ...]
"""The first and end index of each piece."""


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
class RowsPart(Linear):
    """One rank's rows of stored matrices.

    ranges   first and end row of each piece, over all stored matrices as one
    inputs   borders of the input, if it is divided
    outputs  borders of the result, if all ranks need it
    """

    whole: Linear = field(kw_only=True)
    ranges: Ranges = field(kw_only=True)
    inputs: Borders | None = field(default=None, kw_only=True)
    outputs: Borders | None = field(default=None, kw_only=True)

    @classmethod
    def of(
        cls,
        whole: Linear,
        ranges: Sequence[tuple[int, int]],
        *,
        inputs: Borders | None = None,
        outputs: Borders | None = None,
    ) -> RowsPart:
        """Take rows of `whole`. No range crosses the border of two stored matrices."""
        pieces = _pieces(whole, ranges)
        return cls(
            tuple((name, sum(each.stop - each.start for each in pieces[name])) for name in whole.names),
            whole.in_features,
            whole.has_bias,
            whole=whole,
            ranges=tuple(ranges),
            inputs=inputs,
            outputs=outputs,
        )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the stored matrices."""
        return self.whole.shapes

    @property
    def num_weights(self) -> int:
        """See `Linear`."""
        return self.out_features * (self.in_features + self.has_bias)

    def pieces(self) -> dict[str, list[slice]]:
        """Return the rows of each stored matrix."""
        return _pieces(self.whole, self.ranges)


def _pieces(whole: Linear, ranges: Iterable[tuple[int, int]]) -> dict[str, list[slice]]:
    pieces: dict[str, list[slice]] = {}
    start = 0
    for name, rows in whole.parts:
        pieces[name] = [slice(a - start, b - start) for a, b in ranges if start <= a < start + rows]
        start += rows
    return pieces


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
    """One rank's numbers of a stored vector, or its channels of `Taps`. ranges: first and end index of each piece."""

    whole: Vector = field(kw_only=True)
    ranges: Ranges = field(kw_only=True)

    @classmethod
    def of(cls, whole: Vector, ranges: Sequence[tuple[int, int]]) -> VectorPart:
        """Take numbers or channels of `whole`."""
        width = whole.size // whole.shapes[whole.name][0]
        size = width * sum(end - first for first, end in ranges)
        return cls(whole.name, size, whole=whole, ranges=tuple(ranges))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of the whole stored vector."""
        return self.whole.shapes


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
