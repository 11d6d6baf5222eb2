"""Interfaces to weights in any format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo.models.weight_files import find_weight_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch
    from torch import Tensor

    from octavo.kernels.block_weight import BlockWeight
    from octavo.kernels.quantization import QuantizedWeight
    from octavo.models.stored_quantization import StoredTensor

    StoredWeight = Tensor | BlockWeight | QuantizedWeight

_VALUES_AT_ONCE = 1 << 19


class TableRows(Protocol):
    """A matrix's rows, read when a step needs them."""

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows in `dtype` on the CPU. indices: int64."""
        ...


def read_rows(indices: Tensor, width: int, dtype: torch.dtype, read: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `read(indices)` in `dtype`. Reads few rows at a time."""
    indices = indices.cpu()
    numbers = indices.new_empty((len(indices), width), dtype=dtype)
    step = max(1, _VALUES_AT_ONCE // width)
    for first in range(0, len(indices), step):
        part = slice(first, first + step)
        numbers[part] = read(indices[part])
    return numbers


@dataclass(frozen=True, slots=True)
class FloatRows:
    """The `TableRows` of floats."""

    matrix: Tensor

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """See `TableRows`."""
        return read_rows(indices, self.matrix.shape[1], dtype, self.matrix.__getitem__)


class StoredTensors(Protocol):
    """A checkpoint's tensors. Files stay open while this object or a tensor lives."""

    def check(self, expected: Mapping[str, StoredTensor]) -> None:
        """Raise `ModelError` for missing or unexpected tensors, shapes or dtypes."""
        ...

    def find(self, name: str) -> Tensor | None:
        """Return a tensor if present."""
        ...

    def weight(self, name: str) -> StoredWeight:
        """Return blocks, fp8, integers or floats for kernels. May alias a file's pages."""
        ...

    def table(self, name: str) -> TableRows:
        """Return a matrix's rows."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Return floats. May alias a file's pages, so copy before the file may change."""
        ...

    def release(self) -> None:
        """Release the pages of returned tensors. A later access reads them again."""
        ...


class WeightSource(Protocol):
    """A checkpoint's weight files."""

    @property
    def path(self) -> Path:
        """Path for messages and names of cached files."""
        ...

    @property
    def types(self) -> tuple[str, ...]:
        """Types of the matrices, or () if the configuration describes them."""
        ...

    @property
    def quantization_level(self) -> str:
        """Name of the mix of types, such as Q4_K_M."""
        ...

    @property
    def file_type(self) -> int | None:
        """llama.cpp's number for the mix of types."""
        ...

    def weight_files(self) -> list[Path]:
        """Return all files."""
        ...

    def config_files(self) -> list[Path]:
        """Return other files that weights depend on."""
        ...

    def open(self) -> StoredTensors:
        """Open the files. Raises `ModelError`."""
        ...


class FolderWeights:
    """Weights in Hugging Face's layout."""

    __slots__ = ("path",)
    types: tuple[str, ...] = ()
    quantization_level: str = ""
    file_type: int | None = None

    def __init__(self, path: Path) -> None:
        self.path = path

    def weight_files(self) -> list[Path]:
        """See `WeightSource`."""
        return find_weight_files(self.path)

    def config_files(self) -> list[Path]:
        """See `WeightSource`."""
        return [self.path / "config.json"]

    def open(self) -> StoredTensors:
        """See `WeightSource`."""
        from octavo.models.checkpoint import CheckpointFiles  # noqa: PLC0415

        return CheckpointFiles(self.path)
