"""Reads the tensors of GGUF files."""

from __future__ import annotations

import logging
import math
import mmap
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from octavo.errors import ModelError
from octavo.kernels.block_weight import BlockKind, BlockWeight
from octavo.models.gguf_config import BLOCK_KINDS, TABLE
from octavo.models.gguf_file import TensorType
from octavo.models.weight_files import some
from octavo.models.weight_source import read_rows
from octavo.runtime.process_memory import forget_pages, return_free_memory

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from octavo.models.gguf_file import StoredArray
    from octavo.models.gguf_weights import GGUFWeights
    from octavo.models.stored_quantization import StoredTensor

logger = logging.getLogger(__name__)

_RESIDENT_BYTES = 32 << 20  # of resident tensors, in addition to the last one
_FLOATS = {TensorType.F32: torch.float32, TensorType.F16: torch.float16, TensorType.BF16: torch.bfloat16}
_BLOCKS = {each: BlockKind[each.name] for each in BLOCK_KINDS}
_EXPANDED_AT_ONCE = 1 << 22


class GGUFTensors:
    """The `StoredTensors` of GGUF files, by Hugging Face's names."""

    __slots__ = ("_handed_out", "_mapped", "_names", "_weights")

    def __init__(self, weights: GGUFWeights) -> None:
        self._weights = weights
        self._names = weights.names()
        self._mapped = {path: _map(path) for path in weights.weight_files()}
        self._handed_out: dict[Path, list[tuple[int, int]]] = {}

    def check(self, expected: Mapping[str, StoredTensor]) -> None:
        """See `StoredTensors`. Also refuses unsupported tensor types."""
        path = self._weights.path
        missing = [name for name, each in expected.items() if not each.is_optional and name not in self._names]
        if missing:
            raise ModelError(
                f"{path}: the file lacks {some(missing)}, which this architecture needs; download it again"
            )
        if unknown := [stored for name, stored in self._names.items() if name not in expected]:
            raise ModelError(
                f"{path} has {some(unknown)}, which this architecture does not use; octavo would generate wrong tokens"
            )
        for name, (shape, _, _) in expected.items():
            if name not in self._names:
                continue
            stored = self._weights.file.tensors[self._names[name]]
            if not _fits(stored.shape, shape):
                raise ModelError(
                    f"{stored.path}: {self._names[name]} has the shape {list(stored.shape)}, but the metadata requires "
                    f"{list(shape)}"
                )
        self._check_types()

    def _check_types(self) -> None:
        names = list(self._names.values())
        found = {name: self._weights.file.tensors[name] for name in names}
        rare = [each for each in found.values() if each.type not in _BLOCKS | _FLOATS]
        if not rare:
            return
        kinds = ", ".join(sorted({each.type.name for each in rare}))
        if find_spec("gguf") is None:
            raise ModelError(
                f"{self._weights.path}: weights of type {kinds} need the package gguf: pip install "
                "'octavo[gguf]', or use a file of another type, such as Q4_K_M"
            )
        if not (rare := [each for each in rare if each is not found.get(TABLE)]):
            return
        logger.warning(
            "%s has weights of type %s, which octavo expands: %d MB become %d MB of float32 (with --dtype bfloat16 "
            "half as many, rounded). A file of another type, such as Q4_K_M, is smaller and faster",
            self._weights.path,
            kinds,
            sum(each.num_bytes for each in rare) // 10**6,
            sum(4 * math.prod(each.shape) for each in rare) // 10**6,
        )

    def find(self, name: str) -> Tensor | None:
        """See `StoredTensors`."""
        return self.tensor(name) if name in self._names else None

    def weight(self, name: str) -> Tensor | BlockWeight:
        """Return a matrix with Hugging Face's row order."""
        stored_name = self._names[name]
        stored = self._weights.file.tensors[stored_name]
        if stored.type not in _BLOCKS or len(stored.shape) != 2:
            return self.tensor(name)
        out_features, in_features = stored.shape
        rows = self._bytes(stored).view(out_features, -1)
        weight = BlockWeight(_BLOCKS[stored.type], rows, in_features, partial(_forget, stored.path))
        step = max(1, _RESIDENT_BYTES // weight.kind.row_bytes(in_features))
        for first in range(0, out_features, step):
            part = weight.select_rows(slice(first, first + step))
            if part.has_broken_scale():
                raise _broken(stored, stored_name, "scale")
            if step < out_features:
                weight.forget(part.rows)
        heads = self._weights.heads_of_pairs(stored_name)
        return weight if heads is None else weight.select_rows(halves_of_heads(heads, out_features))

    def table(self, name: str) -> ExpandedRows:
        """See `StoredTensors`."""
        stored = self._weights.file.tensors[self._names[name]]
        return ExpandedRows(stored, self._bytes(stored).view(stored.shape[0], -1))

    def tensor(self, name: str) -> Tensor:
        """Return the tensor. Blocks become float32. Raises `ModelError` for values that are not finite.

        Matrices of floats are not checked.
        """
        stored_name = self._names[name]
        stored = self._weights.file.tensors[stored_name]
        data = self._bytes(stored)
        if stored.type in _FLOATS:
            numbers = data.view(_FLOATS[stored.type]).view(stored.shape)
            if len(stored.shape) == 1 and not bool(numbers.isfinite().all()):
                raise _broken(stored, stored_name, "value")
        else:
            numbers = _expand(stored, data.view(-1, stored.type.block_bytes)).view(stored.shape)
            if not bool(numbers.isfinite().all()):
                raise _broken(stored, stored_name, "scale")
        heads = self._weights.heads_of_pairs(stored_name)
        if heads is not None:
            numbers = numbers[halves_of_heads(heads, stored.shape[0])]
        if self._weights.family.norms_around_one and _is_norm_around_one(stored_name):
            numbers = numbers.float() - 1
        return numbers

    def release(self) -> None:
        """See `StoredTensors`."""
        for path, parts in self._handed_out.items():
            forget_pages(path, parts)
        self._handed_out.clear()
        return_free_memory()

    def _bytes(self, stored: StoredArray) -> Tensor:
        mapped = self._mapped[stored.path][stored.offset : stored.offset + stored.num_bytes]
        if sum(num_bytes for parts in self._handed_out.values() for _, num_bytes in parts) >= _RESIDENT_BYTES:
            self.release()
        self._handed_out.setdefault(stored.path, []).append((mapped.data_ptr(), mapped.nbytes))
        return mapped


@dataclass(frozen=True, slots=True)
class ExpandedRows:
    """The `TableRows` of packed uint8 [rows, bytes]."""

    stored: StoredArray
    packed: Tensor

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """See `TableRows`."""
        return read_rows(indices, self.stored.shape[1], dtype, self._read)

    def _read(self, indices: Tensor) -> Tensor:
        kind, chosen = self.stored.type, self.packed[indices]
        if kind in _FLOATS:
            return chosen.view(_FLOATS[kind])
        return _expand(self.stored, chosen.view(-1, kind.block_bytes)).view(len(chosen), self.stored.shape[1])


def _is_norm_around_one(stored_name: str) -> bool:
    """Return True for norms whose factors Hugging Face stores minus 1."""
    return stored_name.endswith("norm.weight") and not stored_name.endswith(".ssm_norm.weight")


def _forget(path: Path, rows: Tensor) -> None:
    forget_pages(path, [(rows.data_ptr(), rows.nbytes)])


def _fits(found: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return True for equal shapes. llama.cpp stores some vectors as rows."""
    return found == shape or (len(shape) == 1 and math.prod(found) == shape[0])


def halves_of_heads(num_heads: int, num_rows: int) -> Tensor:
    """Return llama.cpp's row indices in Hugging Face's order.

    llama.cpp stores rows that rotate together as neighbours, Hugging Face in a head's two halves.
    """
    return torch.arange(num_rows).view(num_heads, -1, 2).swapaxes(1, 2).flatten()


def _map(path: Path) -> Tensor:
    try:
        with path.open("rb") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error})") from error


def _broken(stored: StoredArray, name: str, what: str) -> ModelError:
    return ModelError(
        f"{stored.path}: {name} holds a {what} that is infinite or not a number, so results would be NaN; the file "
        "is damaged, download it again"
    )


def _expand(stored: StoredArray, blocks: Tensor) -> Tensor:
    values = stored.type.block_values
    numbers = torch.empty(len(blocks), values)
    step = max(1, _EXPANDED_AT_ONCE // values)
    for first in range(0, len(blocks), step):
        part = slice(first, first + step)
        numbers[part] = _expand_blocks(stored.type, blocks[part])
    return numbers


def _expand_blocks(kind: TensorType, blocks: Tensor) -> Tensor:
    if kind in _BLOCKS:
        return BlockWeight(_BLOCKS[kind], blocks, kind.block_values).dequantize()
    from gguf import GGMLQuantizationType, dequantize  # noqa: PLC0415 - optional

    return torch.from_numpy(dequantize(blocks.numpy(), GGMLQuantizationType[kind.name]))
