"""Reads integer weights. Writes compressed-tensors' layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from octavo.errors import ModelError
from octavo.kernels.quantization import (
    INT4_ZERO,
    Int4Weight,
    QuantizedWeight,
    fuse_quantized,
    quantize_int4,
    round_to_int8,
)
from octavo.models.stored_quantization import StoredLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    from octavo.models.stored_quantization import StoredQuantization, StoredTensor
    from octavo.models.weight_source import StoredTensors, StoredWeight, TableRows

# An increase invalidates packed weights on disk.
READING_VERSION = 2
_VALUES_A_WORD = 8
_VALUES_AT_ONCE = 1 << 22
_NIBBLE = 15
# AWQ stores columns in the order 0, 2, 4, 6, 1, 3, 5, 7, lowest bits first. Entry j is the place of column j.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class StoredIntegers:
    """The `StoredTensors` of integer checkpoints. read(name): returns a quantized weight."""

    def __init__(
        self, files: StoredTensors, stored: StoredQuantization, read: Callable[[str], QuantizedWeight]
    ) -> None:
        self.files = files
        self.stored = stored
        self.read = read

    def check(self, expected: Mapping[str, StoredTensor]) -> None:
        """See `StoredTensors`."""
        self.files.check(expected)

    def find(self, name: str) -> Tensor | None:
        """See `StoredTensors`."""
        return self.files.find(name)

    def weight(self, name: str) -> StoredWeight:
        """See `StoredTensors`."""
        return self.read(name) if self.stored.covers(name.removesuffix(".weight")) else self.files.weight(name)

    def table(self, name: str) -> TableRows:
        """See `StoredTensors`."""
        return self.files.table(name)

    def tensor(self, name: str) -> Tensor:
        """See `StoredTensors`."""
        return self.files.tensor(name)

    def release(self) -> None:
        """See `StoredTensors`."""
        self.files.release()


def read_quantized(
    stored: StoredQuantization,
    module: str,
    shape: tuple[int, int],
    tensor: Callable[[str], Tensor | None],
    round_weight: Callable[[Tensor, int], QuantizedWeight],
) -> QuantizedWeight:
    """Return a linear layer's weight [out_features, in_features].

    tensor(name): returns one of `stored.tensors(module, ...)`, or None. round_weight: `Kernels.round_weight`, to rotate
    and round int8 weights again.
    """

    def required(name: str) -> Tensor:
        found = tensor(f"{module}.{name}")
        assert found is not None
        return found

    if stored.layout == StoredLayout.INT8:
        scales = required("weight_scale").flatten().to(torch.float32, copy=True)
        values = required("weight")
        rows = max(1, _VALUES_AT_ONCE // values.shape[1])
        parts = [slice(first, first + rows) for first in range(0, len(values), rows)]
        return fuse_quantized([round_weight(values[part].float() * scales[part].unsqueeze(1), 8) for part in parts])
    order = _read_order(stored, module, tensor)
    out_features, in_features = shape
    zeros: Tensor | None = None
    match stored.layout:
        case StoredLayout.PACKED:
            values = unpack_nibbles(required("weight_packed"), dim=1)[:, :in_features]
            scales = required("weight_scale")
            if stored.has_zeros:
                zeros = unpack_nibbles(required("weight_zero_point"), dim=0)[:out_features]
        case StoredLayout.GPTQ:
            values = unpack_nibbles(required("qweight"), dim=0)[:in_features].T
            scales = required("scales").T
            zeros = unpack_nibbles(required("qzeros"), dim=1)[:, :out_features].T + stored.zero_offset
        case StoredLayout.AWQ:
            values, zeros = (
                _in_order(unpack_nibbles(required(name), dim=1))[:, :out_features].T for name in ("qweight", "qzeros")
            )
            scales = required("scales").T
    if zeros is not None and bool((zeros == INT4_ZERO).all()):
        zeros = None
    size = stored.group_size or in_features
    scales = scales.float() if scales.dtype == torch.float64 else scales.clone(memory_format=torch.contiguous_format)
    if order is not None:
        values = values[:, order.long()]
    return Int4Weight(
        values.contiguous(), scales.contiguous(), None if zeros is None else zeros.contiguous(), size, order
    )


def refuse_broken_scales(files: StoredTensors, names: Iterable[str]) -> None:
    """Raise `ModelError` if a scale is not finite."""
    for name in names:
        scales = files.find(name)
        if scales is None:
            continue
        if scales.dtype == torch.uint8:  # exponents, of which 255 is NaN
            scales = scales.view(torch.float8_e8m0fnu)
        if not bool(scales.float().isfinite().all()):
            raise ModelError(f"{name} has a scale that is infinite or not a number; the checkpoint is damaged")
    files.release()


def _read_order(stored: StoredQuantization, module: str, tensor: Callable[[str], Tensor | None]) -> Tensor | None:
    name = {StoredLayout.PACKED: "weight_g_idx", StoredLayout.GPTQ: "g_idx"}.get(stored.layout)
    group_of = None if name is None else tensor(f"{module}.{name}")
    if group_of is None or bool((group_of == -1).all()):  # not reordered
        return None
    ordered, order = group_of.long().sort(stable=True)
    expected = torch.arange(len(group_of)) // (stored.group_size or len(group_of))
    if not torch.equal(ordered, expected):
        raise ModelError(
            f"{module}.{name} has groups that do not have group_size = {stored.group_size} input features; the "
            "checkpoint is damaged"
        )
    return None if torch.equal(group_of.long(), expected) else order.int()


def _in_order(values: Tensor) -> Tensor:
    places = torch.tensor(_AWQ_PLACES)
    return values.view(values.shape[0], -1, _VALUES_A_WORD)[:, :, places].reshape(values.shape)


def unpack_nibbles(words: Tensor, dim: int) -> Tensor:
    """Return the eight values of each int32 along `dim`, lowest bits first, as uint8 0 .. 15."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    if dim == 1:
        return ((words.unsqueeze(2) >> shifts) & _NIBBLE).to(torch.uint8).flatten(1)
    return ((words.unsqueeze(1) >> shifts.unsqueeze(1)) & _NIBBLE).to(torch.uint8).flatten(0, 1)


def pack_nibbles(values: Tensor) -> Tensor:
    """Pack values 0 .. 15 into int32 [rows, ceil(columns / 8)], lowest bits first."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % _VALUES_A_WORD))
    pairs = padded[:, ::2] | padded[:, 1::2] << 4
    return pairs.contiguous().view(torch.int32)


def stored_tensors(module: str, weight: Tensor, precision: str, group_size: int) -> dict[str, Tensor]:
    """Round a weight and return its tensors by name. int8 is not rotated."""
    if precision == "int8":
        values, scales = round_to_int8(weight, rotated=False)
        return {f"{module}.weight": values, f"{module}.weight_scale": scales.unsqueeze(1)}
    rounded = quantize_int4(weight, group_size, minima=False)
    return {
        f"{module}.weight_packed": pack_nibbles(rounded.values),
        f"{module}.weight_scale": rounded.scales,
        f"{module}.weight_shape": torch.tensor(rounded.shape),
    }


def describe_stored(precision: str, group_size: int, ignored: list[str]) -> dict[str, Any]:
    """Return quantization_config."""
    is_int8 = precision == "int8"
    weights = {
        "num_bits": 8 if is_int8 else 4,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if is_int8 else "group",
        "group_size": None if is_int8 else group_size,
        "dynamic": False,
        "actorder": None,
    }
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": str(StoredLayout.INT8 if is_int8 else StoredLayout.PACKED),
        "kv_cache_scheme": None,
        "ignore": ignored,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": activations if is_int8 else None,
                "output_activations": None,
            }
        },
    }
