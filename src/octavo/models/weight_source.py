"""The weights of a checkpoint in any file format. Does not import torch until they are opened."""

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
    """The tensors of a checkpoint by name; its files are open while this or a tensor from it lives."""

    def check(self, expected: Mapping[str, StoredTensor]) -> None:
        """Raise `ModelError` unless the files hold exactly the expected tensors."""
        ...

    def find(self, name: str) -> Tensor | None:
        """Return a tensor as `tensor` does, or None if there is none of that name."""
        ...

    def weight(self, name: str) -> StoredWeight:
        """Return the weight of linear layers in the format in which it is stored; it may alias a file's pages.

        A format that kernels multiply is returned as it is: blocks, fp8, integers. Any other is returned as floats.
        """
        ...

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of floats that may alias a file's pages: copy it before the file may change."""
        ...

    def release(self) -> None:
        """Release the pages of the tensors that were returned; a later call reads them again."""
        ...


class WeightSource(Protocol):
    """The weights of a checkpoint, as the loader gets them."""

    @property
    def path(self) -> Path:
        """Path of the checkpoint, for messages and for names of cached files."""
        ...

    @property
    def types(self) -> tuple[str, ...]:
        """Name the types of its matrices; empty if the configuration names them."""
        ...

    @property
    def quantization_level(self) -> str:
        """Name of that mix of types, such as Q4_K_M; "" if `types` is empty."""
        ...

    @property
    def file_type(self) -> int | None:
        """Number of that mix in the file; None if the file has none."""
        ...

    def weight_files(self) -> list[Path]:
        """Return the files that hold the weights. Raises `ModelError` if there are none."""
        ...

    def config_files(self) -> list[Path]:
        """Return the other files that determine how weights are read."""
        ...

    def open(self) -> StoredTensors:
        """Open the files. Raises `ModelError` for a file that cannot be read."""
        ...


class FolderWeights:
    """The weights in a folder in Hugging Face's layout: safetensors files, and `config.json`."""

    __slots__ = ("path",)
    types: tuple[str, ...] = ()
    quantization_level: str = ""
    file_type: int | None = None

    def __init__(self, path: Path) -> None:
        self.path = path

    def weight_files(self) -> list[Path]:
        """Return the safetensors files."""
        return find_weight_files(self.path)

    def config_files(self) -> list[Path]:
        """Return config.json."""
        return [self.path / "config.json"]

    def open(self) -> StoredTensors:
        """Open the safetensors files."""
        from octavo.models.checkpoint import CheckpointFiles  # noqa: PLC0415 - only the loader needs it

        return CheckpointFiles(self.path)
