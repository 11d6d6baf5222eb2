"""Loads models."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor

from octavo.config import DEFAULT_GROUP_SIZE
from octavo.errors import ConfigError, ModelError
from octavo.kernels.block_weight import BlockWeight
from octavo.kernels.quantization import (
    FP8_GROUP_MULTIPLE,
    ROUNDING_VERSION,
    fuse_quantized,
    have_one_order,
    quantize_fp8,
)
from octavo.kernels.vector_math import start_vector_math
from octavo.models.architecture import is_norm
from octavo.models.declared import HeadPart
from octavo.models.float_weights import open_tensors
from octavo.models.layers import CausalLM, ModelContext
from octavo.models.packed_cache import FORMAT_VERSION, Identity, KeptWeights, PackedCache
from octavo.models.quantized_weights import READING_VERSION, StoredIntegers, read_quantized, refuse_broken_scales
from octavo.models.random_weights import RandomWeights
from octavo.models.rope import make_cos_sin, make_query_scale
from octavo.models.split_tensors import SplitTensors
from octavo.models.weight_bytes import rounded_bits, weight_bytes
from octavo.runtime.process_memory import return_free_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from octavo.kernels.interface import Kernels, PackedLinear, RanksKernels, WeightToPack
    from octavo.kernels.quantization import QuantizedWeight
    from octavo.models.architecture import Architecture
    from octavo.models.declared import Linear, Norm, Table, Vector
    from octavo.models.share import Share
    from octavo.models.weight_source import StoredTensors, StoredWeight, TableRows, WeightSource

logger = logging.getLogger(__name__)

WeightT = TypeVar("WeightT")
_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def activation_dtype(weight_dtype: str, device: torch.device) -> torch.dtype:
    """Return the weights' dtype. On a CPU, float16 becomes float32."""
    if weight_dtype == "float16" and device.type == "cpu":
        return torch.float32
    return _TORCH_DTYPES[weight_dtype]


def load_model(
    weights: WeightSource,
    architecture: Architecture,
    kernels: Kernels,
    *,
    dtype: str,
    device: torch.device,
    max_model_len: int,
    load_format: str = "auto",
    quantization: str | None = None,
    group_size: int = DEFAULT_GROUP_SIZE,
    seed: int = 0,
    packed_cache: PackedCache | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CausalLM:
    """Read and pack all weights of a checkpoint.

    load_format: "dummy" makes random weights from `seed`. quantization, group_size: for weights that are not stored as
    integers. progress(done, total): in bytes of `dtype`. Raises `ConfigError` if the kernels lack fp8. Peak memory:
    packed weights, the largest weight and recently read pages.
    """
    if quantization == "fp8" and not kernels.has_fp8_weights:
        raise ConfigError(
            f"quantization fp8 needs kernels triton or reference, not {kernels.name}: choose int8, which takes the "
            "same memory"
        )
    start_vector_math()
    is_dummy = load_format == "dummy"
    source = _open_source(weights, architecture.whole or architecture, kernels, dtype, seed if is_dummy else None)
    for each in (architecture.whole, architecture):  # a rank's rows are rows of the undivided model's parts
        if each is not None and each.has_parts:
            source = SplitTensors(source, each)
    computed = activation_dtype(dtype, device)
    norm_dtype = str(computed).removeprefix("torch.")
    keeps_fp8 = not is_dummy and kernels.multiplies_fp8 and quantization in {None, "fp8"}
    _log_small_floats(architecture, dtype, norm_dtype, quantization, group_size, keeps_fp8=keeps_fp8)
    total = weight_bytes(replace(architecture, stored=None, block_bytes={}), dtype, norm_dtype)
    packer = _Packer(
        source,
        architecture,
        kernels,
        _TORCH_DTYPES[dtype],
        quantization,
        group_size,
        computed,
        device,
        total,
        progress,
    )
    kept = None
    if packed_cache is not None and not is_dummy:
        kept = _kept_weights(packed_cache, weights, packer, dtype, architecture.share)
    context = ModelContext(
        architecture=architecture,
        kernels=kernels,
        weights=kept or packer,
        dtype=computed,
        device=device,
        cos_sin=cache(lambda rope, head_dim: make_cos_sin(rope, head_dim, max_model_len).to(device)),
        query_scale=cache(lambda rope: make_query_scale(rope, max_model_len, device)),
    )
    try:
        model = CausalLM(context)
        if kept is not None:
            kept.finish()
    finally:
        if kept is not None:
            kept.close()
    return_free_memory()
    return model


def open_packed_cache(max_bytes: int) -> PackedCache | None:
    """Return the cache, or None for 0 bytes or a missing home directory."""
    try:
        return PackedCache(max_bytes) if max_bytes else None
    except RuntimeError as error:
        logger.warning("packed weights are not stored: %s; set XDG_CACHE_HOME", error)
        return None


def _open_source(
    weights: WeightSource, architecture: Architecture, kernels: Kernels, dtype: str, seed: int | None
) -> StoredTensors:
    stored, source = architecture.stored, _source_of_floats(weights, architecture, dtype, seed)
    if stored is None:
        return source
    shapes = architecture.tensor_shapes()

    def read(name: str) -> QuantizedWeight:
        rows, columns = shapes[name]
        if seed is not None:
            return kernels.round_weight(source.tensor(name), stored.bits, stored.group_size or columns)
        module = name.removesuffix(".weight")
        return read_quantized(stored, module, (rows, columns), source.find, kernels.round_weight)

    return StoredIntegers(source, stored, read)


def _source_of_floats(weights: WeightSource, architecture: Architecture, dtype: str, seed: int | None) -> StoredTensors:
    if seed is None:
        return open_tensors(weights, architecture, _TORCH_DTYPES[dtype])
    norm_mean = 1.0 - architecture.norm_offset
    return RandomWeights(architecture.tensor_shapes(), _TORCH_DTYPES[dtype], seed, norm_mean=norm_mean)


def _keeps_format(architecture: Architecture, kernels: Kernels, quantization: str | None) -> bool:
    if architecture.stored is not None:
        return True
    floats = architecture.stored_floats
    if floats is not None and floats.bits == 8:
        return kernels.multiplies_fp8 and quantization in {None, "fp8"}
    return quantization is None


def _log_small_floats(
    architecture: Architecture,
    dtype: str,
    norm_dtype: str,
    quantization: str | None,
    group_size: int,
    *,
    keeps_fp8: bool,
) -> None:
    if architecture.stored_floats is None:
        return
    summary = architecture.stored_floats.summary
    columns = architecture.stored_floats.block[1]
    if keeps_fp8 and architecture.stored_floats.bits == 8 and not (columns and columns % FP8_GROUP_MULTIPLE):
        logger.info(
            "the weights are %s and are not expanded: they are multiplied in %s, and activations are not rounded",
            summary,
            dtype,
        )
        return
    if quantization is not None:
        logger.info("the weights are %s, expanded to %s and rounded to %s at load", summary, dtype, quantization)
        return
    gigabytes = [
        weight_bytes(architecture, dtype, norm_dtype, each, group_size) / 1e9 for each in (None, "int8", "int4")
    ]
    if architecture.block_bytes:
        becomes, activations = "used without expansion", "Activations are rounded to int8 in groups of 32"
    else:
        becomes, activations = f"expanded to {dtype} at load", "Activations are not rounded"
    logger.warning(
        "the weights are %s, which is %s: they take %.1f GB (with quantization int8 %.1f, int4 %.1f). %s",
        summary,
        becomes,
        *gigabytes,
        activations,
    )


def _kept_weights(
    cache: PackedCache, weights: WeightSource, packer: _Packer, dtype: str, share: Share | None
) -> KeptWeights | None:
    if not packer.has_integers or packer.kernels.layout is None:
        return None
    of_share = () if share is None else (str(share),)
    formats = (packer.kernels.layout, dtype, packer.quantization, packer.group_size, *of_share)
    versions = (ROUNDING_VERSION, READING_VERSION, FORMAT_VERSION)
    files = [*weights.config_files(), *weights.weight_files()]
    identity = Identity(files, (*formats, *versions), cache.hashes(), packer.report_progress)
    path = cache.path(weights.path, *formats)
    return KeptWeights(cache, path, identity, packer.kernels, packer, packer.report_progress)


class _Packer:
    def __init__(
        self,
        source: StoredTensors,
        architecture: Architecture,
        kernels: Kernels,
        dtype: torch.dtype,
        quantization: str | None,
        group_size: int,
        norm_dtype: torch.dtype,
        device: torch.device,
        total_bytes: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.source = source
        self.stored, self.is_share = architecture.stored, architecture.share is not None
        self.has_integers = bool(quantization or architecture.stored or architecture.block_bytes)
        self.keeps_format = _keeps_format(architecture, kernels, quantization)
        self.unchecked_scales = architecture.scale_names()
        self.kernels = kernels
        self.dtype = dtype
        self.quantization = quantization
        self.group_size = group_size
        self.norm_offset = architecture.norm_offset
        self.norm_dtype = torch.float32 if self.norm_offset else norm_dtype
        self.device = device
        self.last_matrix: tuple[str, Tensor] | None = None  # of which a head was packed
        self.done_bytes = 0
        self.total_bytes = total_bytes
        self.progress = progress or (lambda _done, _total: None)

    def linear(self, declared: Linear) -> PackedLinear:
        self._check_scales()
        weight = self._weight(declared)
        fused_bias = None
        if declared.has_bias:
            fused_bias = self._fuse([(f"{name}.bias", (rows,)) for name, rows in declared.parts])
        elif self.stored is not None:
            self._refuse_biases(declared.whole.names if isinstance(declared, HeadPart) else declared.names)
        return self.kernels.pack_linear(weight, fused_bias)

    def _check_scales(self) -> None:
        names, self.unchecked_scales = self.unchecked_scales, []
        if names:
            refuse_broken_scales(self.source, names)

    def _weight(self, declared: Linear) -> WeightToPack:
        if isinstance(declared, HeadPart):
            return self._of_head(declared)
        names = {f"{name}.weight": rows * declared.in_features for name, rows in declared.parts}
        if not self.keeps_format:
            return self._of_floats(names, (self._counted(self.source.tensor(n), names[n]) for n in names))
        stored = {name: self._counted(self.source.weight(name), size) for name, size in names.items()}
        floats = [each for each in stored.values() if isinstance(each, Tensor)]
        if floats and len(floats) < len(stored):
            if self.stored is not None:
                raise _mixed(stored)
            floats = [each if isinstance(each, Tensor) else self.source.tensor(n) for n, each in stored.items()]
        if floats:
            return self._of_floats(names, floats)
        return self._fused(stored)

    def _of_head(self, declared: HeadPart) -> WeightToPack:
        """Keep the matrix, because the next head usually needs it."""
        name = f"{declared.whole.names[0]}.weight"
        if self.last_matrix is None or self.last_matrix[0] != name:
            stored = self.source.weight(name)
            self.last_matrix = name, stored if isinstance(stored, Tensor) else stored.dequantize()
        rows = self.last_matrix[1][slice(*declared.rows)]
        return [self._counted((rows.T if declared.is_transposed else rows).to(self.device, self.dtype), rows.numel())]

    def _fused(self, stored: Mapping[str, StoredWeight]) -> WeightToPack:
        blocks = [each.to(self.device) for each in stored.values() if isinstance(each, BlockWeight)]
        if blocks:
            return blocks
        parts = [each.to(self.device) for each in stored.values() if not isinstance(each, Tensor | BlockWeight)]
        if not have_one_order(parts):
            raise ModelError(
                f"{', '.join(_modules(stored))} have different orders of input features (g_idx); octavo computes "
                "them together, so with act-order they must be quantized together"
            )
        return fuse_quantized(parts)

    def _of_floats(self, names: Iterable[str], parts: Iterable[Tensor]) -> WeightToPack:
        bits = rounded_bits(next(iter(names)), self.quantization)
        placed = (part.to(self.device, self.dtype) for part in parts)
        if bits is None:
            return list(placed)
        rounded = fuse_quantized([self._round_quantized(n, part, bits) for n, part in zip(names, placed, strict=True)])
        self.source.release()  # before packing, because the vocabulary's weight is the largest
        return rounded

    def _round_quantized(self, name: str, weight: Tensor, bits: int) -> QuantizedWeight:
        if self.quantization == "fp8":
            return quantize_fp8(weight)
        if bits == 4 and self.is_share and isinstance(self.source, SplitTensors) and self.source.divides(name):
            kernels = cast("RanksKernels", self.kernels)
            return kernels.round_rows_to_int4(weight, self.source.whole.tensor(name), self.group_size)
        return self.kernels.round_weight(weight, bits, self.group_size)

    def _refuse_biases(self, names: tuple[str, ...]) -> None:
        for name in names:
            bias = self.source.find(f"{name}.bias")
            if bias is not None and bool(bias.any()):
                raise ModelError(f"{name}.bias is not zero, but config.json has no such bias")

    def norm(self, declared: Norm) -> Tensor:
        weight = self._fuse(list(declared.shapes.items()))
        return weight.add_(self.norm_offset) if self.norm_offset else weight

    def vector(self, declared: Vector) -> Tensor:
        self._count(declared.size * torch.float32.itemsize)
        numbers = self.source.tensor(declared.name).flatten().to(self.device, torch.float32, copy=True)
        if not bool(numbers.isfinite().all()):
            raise ModelError(f"{declared.name} has a value that is infinite or not a number; download the model again")
        return numbers

    def table(self, declared: Table) -> TableRows:
        return self.source.table(f"{declared.name}.weight")

    def skip(self, declared: Linear) -> None:
        self._count(declared.num_weights * self.dtype.itemsize)

    def _fuse(self, tensors: list[tuple[str, tuple[int, ...]]]) -> Tensor:
        sizes = [math.prod(shape) for _, shape in tensors]
        dtype = self.norm_dtype if is_norm(tensors[0][0]) else self.dtype
        fused = torch.empty(sum(sizes), dtype=dtype, device=self.device)
        for part, (name, _) in zip(fused.split_with_sizes(sizes), tensors, strict=True):
            part.copy_(self.source.tensor(name))
            self._count(part.nbytes)
        return fused

    def _counted(self, weight: WeightT, size: int) -> WeightT:
        self._count(size * self.dtype.itemsize)
        return weight

    def _count(self, num_bytes: int) -> None:
        self.done_bytes += num_bytes
        self.report_progress()

    def report_progress(self) -> None:
        self.progress(self.done_bytes, self.total_bytes)


def _modules(tensors: Iterable[str]) -> list[str]:
    return [name.removesuffix(".weight") for name in tensors]


def _mixed(stored: Mapping[str, StoredWeight]) -> ModelError:
    floats = _modules(name for name, each in stored.items() if isinstance(each, Tensor))
    integers = _modules(name for name, each in stored.items() if not isinstance(each, Tensor))
    return ModelError(
        f"{', '.join(integers)} is stored as integers, but not {', '.join(floats)}; octavo computes them together, "
        "so they must have one format"
    )
