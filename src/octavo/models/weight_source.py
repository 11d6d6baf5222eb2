"""A checkpoint's weights in any format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from octavo.models.weight_files import find_weight_files

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from octavo.kernels.block_weight import BlockWeight
    from octavo.kernels.quantization import QuantizedWeight
    from octavo.models.stored_quantization import StoredTensor

    StoredWeight = Tensor | BlockWeight | QuantizedWeight


class StoredTensors(Protocol):
    """A checkpoint's tensors; its files are open while this or a tensor from it lives."""

    def check(self, expected: Mapping[str, StoredTensor]) -> None:
        """Refuse files without exactly the expected tensors."""
        ...

    def find(self, name: str) -> Tensor | None:
        """Return a tensor, or None."""
        ...

    def weight(self, name: str) -> StoredWeight:
        """Return blocks, fp8 or integers if kernels multiply these, else floats; they may alias a file's pages."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Return floats that may alias a file's pages: copy them before the file may change."""
        ...

    def release(self) -> None:
        """Release returned tensors' pages; a later call reads them again."""
        ...


class WeightSource(Protocol):
    """A checkpoint's weights."""

    @property
    def path(self) -> Path:
        """For messages and names of cached files."""
        ...

    @property
    def types(self) -> tuple[str, ...]:
        """The matrices' types, if not in the configuration."""
        ...

    @property
    def quantization_level(self) -> str:
        """Name of the mix of `types`, such as Q4_K_M."""
        ...

    @property
    def file_type(self) -> int | None:
        """llama.cpp's number of that mix."""
        ...

    def weight_files(self) -> list[Path]:
        """Return all files."""
        ...

    def config_files(self) -> list[Path]:
        """Return other files that weights depend on."""
        ...

    def open(self) -> StoredTensors:
        """Open. Raises `ModelError`."""
        ...


class FolderWeights:
    """A folder in Hugging Face's layout."""

    __slots__ = ("path",)
    types: tuple[str, ...] = ()
    quantization_level: str = ""
    file_type: int | None = None

    def __init__(self, path: Path) -> None:
        self.path = path

    def weight_files(self) -> list[Path]:
        """Return safetensors files."""
        return find_weight_files(self.path)

    def config_files(self) -> list[Path]:
        """Return config.json."""
        return [self.path / "config.json"]

    def open(self) -> StoredTensors:
        """Open the files."""
        from octavo.models.checkpoint import CheckpointFiles  # noqa: PLC0415

        return CheckpointFiles(self.path)
