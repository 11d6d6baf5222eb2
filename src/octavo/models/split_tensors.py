"""Reads one rank's rows of a checkpoint's tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from octavo.kernels.block_weight import BlockWeight
from octavo.models.declared import RowsPart, VectorPart, in_order

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo.kernels.quantization import QuantizedWeight
    from octavo.models.architecture import Architecture
    from octavo.models.stored_quantization import StoredTensor
    from octavo.models.weight_source import StoredTensors, StoredWeight, TableRows

WeightT = TypeVar("WeightT", "Tensor", "BlockWeight", "QuantizedWeight")


class SplitTensors:
    """The `StoredTensors` of a rank. Tensors that are not divided are returned whole. whole: the checkpoint."""

    def __init__(self, whole: StoredTensors, architecture: Architecture) -> None:
        self.whole = whole
        self._rows: dict[str, slice | Tensor] = {}
        for part in in_order(architecture.tensors()):
            if isinstance(part, VectorPart):
                self._rows[part.name] = _index([slice(*each) for each in part.ranges])
            if isinstance(part, RowsPart):
                for name, pieces in part.pieces().items():
                    rows = _index(pieces)
                    self._rows |= {f"{name}.weight": rows, f"{name}.bias": rows}

    def rows(self, name: str, weight: WeightT) -> WeightT:
        """Return this rank's rows of a whole weight."""
        rows = self._rows.get(name)
        if rows is None:
            return weight
        if isinstance(weight, Tensor):
            return weight[rows]
        return weight.select_rows(rows) if isinstance(weight, BlockWeight) else weight.rows(rows)

    def divides(self, name: str) -> bool:
        """Return True if this rank has only some rows of a tensor."""
        return name in self._rows

    def check(self, expected: Mapping[str, StoredTensor]) -> None:
        """See `StoredTensors`."""
        self.whole.check(expected)

    def find(self, name: str) -> Tensor | None:
        """See `StoredTensors`."""
        found = self.whole.find(name)
        return None if found is None else self.rows(name, found)

    def weight(self, name: str) -> StoredWeight:
        """See `StoredTensors`."""
        found: Any = self.whole.weight(name)
        return self.rows(name, found)  # type: ignore[no-any-return]

    def table(self, name: str) -> TableRows:
        """See `StoredTensors`."""
        return self.whole.table(name)

    def tensor(self, name: str) -> Tensor:
        """See `StoredTensors`."""
        return self.rows(name, self.whole.tensor(name))

    def release(self) -> None:
        """See `StoredTensors`."""
        self.whole.release()


def _index(pieces: list[slice]) -> slice | Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat([torch.arange(p.start, p.stop) for p in pieces])
