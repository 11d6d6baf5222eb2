"""Reads FP8 and MXFP4 weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from octavo.errors import ModelError
from octavo.kernels.block_weight import BlockKind, BlockWeight
from octavo.kernels.quantization import FP8_GROUP_MULTIPLE, Fp8Weight
from octavo.models.stored_floats import MXFP4_GROUP, FloatLayout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from octavo.models.architecture import Architecture
    from octavo.models.stored_floats import StoredFloats
    from octavo.models.stored_quantization import StoredTensor
    from octavo.models.weight_source import StoredTensors, StoredWeight, TableRows, WeightSource

_VALUES_AT_ONCE = 1 << 22
# The 16 values of E2M1 (OCP Microscaling Formats 1.0, section 5.3.3).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def open_tensors(weights: WeightSource, architecture: Architecture, dtype: torch.dtype) -> StoredTensors:
    """Open and check files."""
    files = weights.open()
    files.check(architecture.stored_tensors())
    stored = architecture.stored_floats
    return files if stored is None else ExpandedFloats(files, stored, dtype)


class ExpandedFloats:
    """The `StoredTensors` of FP8 or MXFP4 checkpoints."""

    def __init__(self, files: StoredTensors, stored: StoredFloats, dtype: torch.dtype) -> None:
        self.files = files
        self.stored = stored
        self.dtype = dtype

    def check(self, expected: Mapping[str, StoredTensor]) -> None:
        """See `StoredTensors`."""
        self.files.check(expected)

    def find(self, name: str) -> Tensor | None:
        """See `StoredTensors`."""
        expanded = self._expanded(name)
        return self.files.find(name) if expanded is None else expanded

    def weight(self, name: str) -> StoredWeight:
        """Return GGUF blocks (MXFP4), FP8 or floats.

        FP8 is expanded if a scale's columns are no multiple of `FP8_GROUP_MULTIPLE`.
        """
        module = name.removesuffix(".weight")
        if (stored := self._stored(module)) is None:
            return self.files.weight(name)
        values, scales = stored
        if self.stored.bits == 4:
            return as_blocks(values.flatten(1), scales)
        columns = self.stored.block[1] or values.shape[1]
        if columns % FP8_GROUP_MULTIPLE and columns < values.shape[1]:
            return expand(self.stored, values, scales, self.dtype)
        return Fp8Weight(values, _scales_of_rows(self.stored, values.shape, scales), columns)

    def table(self, name: str) -> TableRows:
        """See `StoredTensors`."""
        return self.files.table(name)

    def tensor(self, name: str) -> Tensor:
        """See `StoredTensors`. Expanded weights alias no file."""
        expanded = self._expanded(name)
        return self.files.tensor(name) if expanded is None else expanded

    def release(self) -> None:
        """See `StoredTensors`."""
        self.files.release()

    def _expanded(self, name: str) -> Tensor | None:
        module = name.removesuffix(".weight")
        stored = None if module == name else self._stored(module)
        return None if stored is None else expand(self.stored, *stored, self.dtype)

    def _stored(self, module: str) -> tuple[Tensor, Tensor] | None:
        values = self.files.find(f"{module}.{self.stored.values_name}")
        if values is None or values.dtype not in {torch.float8_e4m3fn, torch.uint8}:
            return None
        found = (self.files.find(f"{module}.{name}") for name in self.stored.scale_names)
        scales = next((each for each in found if each is not None), None)
        if scales is None:
            raise ModelError(f"{module} has no scale: {' or '.join(self.stored.scale_names)} is missing")
        return values, scales


def expand(stored: StoredFloats, values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values times scales [out_features, in_features], computed in float32 and rounded to `dtype`."""
    flat = values.flatten(1)
    out_features, in_features = len(flat), flat.shape[1] * (1 if stored.layout is FloatLayout.FP8 else 2)
    scales = _scales_of_rows(stored, (out_features, in_features), scales)
    columns_of_block = stored.block[1]
    expanded = torch.empty(out_features, in_features, dtype=dtype)
    step = max(1, _VALUES_AT_ONCE // in_features)
    for first in range(0, out_features, step):
        part = slice(first, min(first + step, out_features))
        factors = scales[part]
        if columns_of_block is not None:
            factors = factors.repeat_interleave(columns_of_block, dim=1)[:, :in_features]
        expanded[part] = _decoded(flat[part]) * factors
    return expanded


def _scales_of_rows(stored: StoredFloats, shape: Sequence[int], scales: Tensor) -> Tensor:
    scales = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
    scales = scales.float().view(stored.scale_shape(shape[0], shape[1]))
    return scales[torch.arange(shape[0]) // (stored.block[0] or shape[0])]


def as_blocks(values: Tensor, exponents: Tensor) -> BlockWeight:
    """Return MXFP4 as GGUF blocks: a group's exponent, then bytes with its second half in the upper bits.

    values: uint8 [out_features, in_features / 2], neighbours in a byte. exponents: uint8 [out_features, groups].
    """
    pairs = values.reshape(len(values), -1, MXFP4_GROUP // 2)
    nibbles = torch.stack((pairs & 15, pairs >> 4), dim=3).flatten(2)
    lower, upper = nibbles.chunk(2, dim=2)
    rows = torch.cat((exponents.unsqueeze(2), lower | upper << 4), dim=2).flatten(1)
    return BlockWeight(BlockKind.MXFP4, rows, 2 * values.shape[1])


def _decoded(values: Tensor) -> Tensor:
    """Convert FP8, or bytes of two E2M1 values (lower bits first), to float32."""
    if values.dtype == torch.float8_e4m3fn:
        return values.float()
    pairs = torch.tensor([(_E2M1[byte & 15], _E2M1[byte >> 4]) for byte in range(256)])
    return pairs[values.int()].flatten(1)
