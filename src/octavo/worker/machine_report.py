"""Measures a machine, matrix products and attention with compiled kernels."""

from __future__ import annotations

import importlib.util
import itertools
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from octavo.errors import ConfigError
from octavo.kernels.block_weight import BlockKind, random_blocks
from octavo.kernels.cpu import CpuKernels
from octavo.kernels.machine import cold_bytes, processor_name, usable_cores
from octavo.kernels.quantization import quantize_int4, quantize_int8
from octavo.models.attention import AttentionTensors
from octavo.models.experts import ExpertsConfig, ExpertsTensors
from octavo.models.gated_mlp import GatedMLPTensors
from octavo.models.latent_attention import LatentAttentionTensors
from octavo.worker.attention_report import Attention, attention_shapes, measure_attention
from octavo.worker.memory import free_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from octavo.kernels.block_weight import BlockWeight
    from octavo.kernels.cpu import Isa
    from octavo.kernels.interface import PackedGroups, PackedLinear
    from octavo.kernels.limits import Limits
    from octavo.kernels.quantization import QuantizedWeight
    from octavo.models.architecture import Architecture
    from octavo.models.declared import Linear
    from octavo.worker.attention_report import AttentionTiming

ROWS = (1, 8, 32, 512)
_ROUNDS = 7
_BLOCK_ROWS = 512  # kMostBlockPairs of csrc/tile_slices.h; kBlockRows of csrc/linear.h is less
_BLOCKS_BYTES = 1 << 20  # kBlockBytes of csrc/quantized_rows.h
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Timing:
    """One product's time. experts: number of experts per row; 1 for a dense layer."""

    name: str
    out_features: int
    in_features: int
    precision: str
    rows: int
    experts: int
    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Product(Timing):
    """A product, measured as the model computes it: gate_up includes SiLU.

    of_limit: the used share of the machine's arithmetic rate, or of its bandwidth, whichever share is larger.
    """

    ops_per_s: float
    bytes_per_s: float
    of_limit: float

    @classmethod
    def of(cls, timing: Timing, limits: Limits) -> Product:
        """Compare a time with limits."""
        if timing.precision in _DTYPES:
            peak = limits.bfloat16_flops if timing.precision == "bfloat16" else limits.flops
        else:
            peak = limits.byte_ops
        ops = 2 * timing.rows * timing.experts * timing.out_features * timing.in_features / timing.seconds
        read = timing.num_bytes / timing.seconds
        share = max(ops / peak, read / limits.bytes_read)
        return cls(**asdict(timing), ops_per_s=ops, bytes_per_s=read, of_limit=share)


@dataclass(frozen=True, slots=True)
class Check:
    """Results of checking one product.

    rows_are_independent: a row has equal bits in all checked batches. threads_are_equal: one thread and all threads
    compute equal bits. error: relative norm of the difference from the float64 product, including the rounding of
    activations and of int4's scales.
    """

    name: str
    precision: str
    rows_are_independent: bool
    threads_are_equal: bool
    error: float

    @property
    def is_exact(self) -> bool:
        """True if both comparisons found equal bits."""
        return self.rows_are_independent and self.threads_are_equal


@dataclass(frozen=True, slots=True)
class Report:
    """The results of an examination. attention: only of layers with paged attention over keys and values.

    limits_each: the processor's limits, measured before the matrix products and again after them. limits: for each
    rate, the higher of both. best_limits: like `limits`, with the best instruction set.
    """

    processor: str
    num_cores: int
    free_bytes: int
    versions: dict[str, str]
    instruction_sets: tuple[str, ...]
    isa: str
    num_threads: int
    limits: Limits
    limits_each: tuple[Limits, Limits]
    best_limits: Limits
    products: list[Product]
    attention: list[Attention]
    checks: list[Check]

    @property
    def is_exact(self) -> bool:
        """True if all checks are exact."""
        return all(check.is_exact for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "is_exact": self.is_exact}


def examine(
    architecture: Architecture,
    *,
    isa: Isa = "auto",
    num_threads: int | None = None,
    precisions: tuple[str, ...],
    progress: Callable[[str], None] = lambda _text: None,
) -> Report:
    """Measure the processor's limits, the model's matrix products and its attention, and check exactness of products.

    precisions: dtypes, "int8", "int4" (without lm_head), "int4_all", or kinds of GGUF blocks. Raises `ConfigError` if
    no kernels for `isa` are compiled, or a precision is impossible for all matrices.
    """
    if importlib.util.find_spec("octavo._kernels") is None:
        raise ConfigError(
            "octavo was installed without its compiled kernels: it runs on plain torch, which this command does not "
            "examine"
        )
    try:
        kernels, one_thread = CpuKernels(isa, num_threads=num_threads), CpuKernels(isa, num_threads=1)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    shapes, experts = layer_shapes(architecture), expert_shapes(architecture)
    _refuse_impossible(shapes | {name: each.shape for name, each in experts.items()}, precisions)
    best = kernels if isa == "auto" else CpuKernels(num_threads=num_threads)
    num_torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # torch threads would spin on the kernels' cores
    try:
        progress("limits of the machine")
        limits_before, best_before = _measure_limits(kernels, best)
        timings: list[Timing] = []
        checks = []
        for name, (width, depth) in shapes.items():
            for precision in precisions:
                if not _is_possible(name, depth, precision):
                    continue
                progress(f"{precision} {name}")
                checks.append(_check(name, width, depth, precision, kernels, one_thread))
                timings += _measure(name, width, depth, precision, kernels)
        for (name, shape), precision in itertools.product(experts.items(), precisions):
            if _is_possible(name, shape.in_features, precision):
                progress(f"{precision} {name}")
                checks.append(_check_experts(name, shape, precision, kernels, one_thread))
                timings += _measure_experts(name, shape, precision, kernels)
        kv_types = dict.fromkeys(("float32" if architecture.dtype == "float32" else "bfloat16", "int8"))
        attentions: list[AttentionTiming] = []
        for attention_shape, kv in itertools.product(attention_shapes(architecture), kv_types):
            progress(f"attention, KV in {kv}")
            attentions += measure_attention(attention_shape, kv, kernels)
        progress("limits of the machine, again")
        limits_after, best_after = _measure_limits(kernels, best)
    finally:
        torch.set_num_threads(num_torch_threads)
    limits = limits_before.best(limits_after)
    return Report(
        processor=processor_name(),
        num_cores=len(usable_cores()),
        free_bytes=free_bytes(torch.device("cpu")),
        versions={"python": platform.python_version(), "torch": torch.__version__},
        instruction_sets=kernels.instruction_sets,
        isa=kernels.isa,
        num_threads=kernels.num_threads,
        limits=limits,
        limits_each=(limits_before, limits_after),
        best_limits=best_before.best(best_after),
        products=[Product.of(timing, limits) for timing in timings],
        attention=[Attention.of(timing, limits) for timing in attentions],
        checks=checks,
    )


def _measure_limits(kernels: CpuKernels, best: CpuKernels) -> tuple[Limits, Limits]:
    limits = kernels.measure_limits()
    return limits, limits if best.isa == kernels.isa else best.measure_limits()


def layer_shapes(architecture: Architecture) -> dict[str, tuple[int, int]]:
    """Return (out_features, in_features) by name, without experts."""
    tensors = architecture.tensors()
    linears: dict[str, Linear | None] = {}
    for layer in tensors.layers:
        attention, mlp = layer.attention, layer.mlp
        if isinstance(attention, AttentionTensors):
            linears |= {"qkv": attention.qkv, "o": attention.o}
        elif isinstance(attention, LatentAttentionTensors):
            linears |= {"latents": attention.down, "queries": attention.q_b, "o": attention.o}
        dense = mlp.shared if isinstance(mlp, ExpertsTensors) else mlp
        if isinstance(dense, GatedMLPTensors):
            linears |= {"gate_up": dense.gate_up, "down": dense.down}
    linears["lm_head"] = tensors.embedding
    return {name: (each.out_features, each.in_features) for name, each in linears.items() if each is not None}


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The shape of one weight matrix, such as `down`, of every expert in a layer. num_chosen: experts per token."""

    out_features: int
    in_features: int
    num_experts: int
    num_chosen: int

    @property
    def shape(self) -> tuple[int, int]:
        """One expert's rows and columns."""
        return self.out_features, self.in_features


def expert_shapes(architecture: Architecture) -> dict[str, ExpertShape]:
    """Return shapes of an expert's matrices by name; none for dense models."""
    for layer, tensors in zip(architecture.layers, architecture.tensors().layers, strict=True):
        if isinstance(layer.mlp, ExpertsConfig):
            router, experts = layer.mlp.router, cast("ExpertsTensors", tensors.mlp)
            linears = {"expert gate_up": experts.gate_up[0], "expert down": experts.down[0]}
            return {
                name: ExpertShape(each.out_features, each.in_features, router.num_experts, router.num_chosen)
                for name, each in linears.items()
            }
    return {}


def _refuse_impossible(shapes: dict[str, tuple[int, int]], precisions: tuple[str, ...]) -> None:
    for precision in precisions:
        if not any(_is_possible(name, depth, precision) for name, (_, depth) in shapes.items()):
            raise ConfigError(f"precision {precision}: no matrix of this model has rows of whole blocks")


def _is_possible(name: str, depth: int, precision: str) -> bool:
    if precision in BlockKind.__members__:
        return depth % BlockKind[precision].block_values == 0
    return precision != "int4" or name != "lm_head"  # lm_head is int8 then


def _stored(weight: Tensor, precision: str) -> Tensor | QuantizedWeight | list[BlockWeight]:
    if precision in _DTYPES:
        return weight.to(_DTYPES[precision])
    if precision in BlockKind.__members__:
        return [random_blocks(torch.Generator().manual_seed(0), BlockKind[precision], *weight.shape)]
    return quantize_int8(weight) if precision == "int8" else quantize_int4(weight)


def _rows(precision: str, count: int, depth: int) -> Tensor:
    x = torch.randn(count, depth, generator=torch.Generator().manual_seed(1))
    return x if precision in {"float32", "float16"} else x.to(torch.bfloat16)


def checked_rows(precision: str, depth: int) -> int:
    """Return a number of rows for which every product reads its panels twice."""
    row_bytes = depth * (2 if precision in _DTYPES else 1)
    return _BLOCKS_BYTES // row_bytes + _BLOCK_ROWS + 64


def _check(name: str, width: int, depth: int, precision: str, kernels: CpuKernels, one_thread: CpuKernels) -> Check:
    width = min(width, 8192)  # columns are independent
    weight = torch.randn(width, depth, generator=torch.Generator().manual_seed(0))
    x, wide = _rows(precision, checked_rows(precision, depth), depth), name == "lm_head"
    stored = _stored(weight, precision)
    packed, other = (each.pack_linear(stored) for each in (kernels, one_thread))

    def results(of: CpuKernels, rows: Tensor, weight: PackedLinear) -> list[Tensor]:
        product = of.linear(rows, weight, float32_out=wide)
        return [product, of.gated_linear(rows, weight)] if name == "gate_up" else [product]

    whole = results(kernels, x, packed)
    parts = [slice(count) for count in (*range(1, 30), 65)] + [slice(-count, None) for count in (1, 5, 29, 130)]
    independent = all(
        torch.equal(some, every[part])
        for part in parts
        for some, every in zip(results(kernels, x[part], packed), whole, strict=True)
    )
    equal = all(map(torch.equal, results(one_thread, x, other), whole))
    error = _error(whole[0][:_BLOCK_ROWS], x[:_BLOCK_ROWS], stored)
    return Check(name, precision, independent, equal, error)


def _error(product: Tensor, x: Tensor, stored: Tensor | QuantizedWeight | list[BlockWeight]) -> float:
    weight = stored[0] if isinstance(stored, list) else stored
    meant = weight if isinstance(weight, torch.Tensor) else weight.dequantize()
    sums = x.double() @ meant.double().T
    return float((product.double() - sums).norm() / sums.norm())


def _measure(name: str, width: int, depth: int, precision: str, kernels: CpuKernels) -> Iterator[Timing]:
    weight = torch.randn(width, depth)
    stored, wide = _stored(weight, precision), name == "lm_head"
    first = kernels.pack_linear(stored)
    others = (kernels.pack_linear(stored) for _ in range(cold_bytes() // first.num_bytes - 1))
    copies = itertools.cycle([first, *others])

    def multiply(x: Tensor) -> Tensor:
        if name == "gate_up":
            return kernels.gated_linear(x, next(copies))
        return kernels.linear(x, next(copies), float32_out=wide)

    for rows in ROWS[:-1] if wide else ROWS:
        x, count = _rows(precision, rows, depth), 8 if rows <= 32 and not wide else 1
        times = []
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            for _ in range(count):
                multiply(x)
            times.append((time.perf_counter() - start) / count)
        yield Timing(name, width, depth, precision, rows, 1, statistics.median(times), first.num_bytes)


def _packed_experts(
    shape: ExpertShape, precision: str, kernels: CpuKernels, count: int
) -> tuple[list[PackedLinear], PackedGroups]:
    stored = _stored(torch.randn(*shape.shape, generator=torch.Generator().manual_seed(0)), precision)
    packed = [kernels.pack_linear(stored) for _ in range(count)]
    return packed, kernels.pack_groups(packed)


def _check_experts(name: str, shape: ExpertShape, precision: str, kernels: CpuKernels, one_thread: CpuKernels) -> Check:
    counts = torch.tensor([3, 0, checked_rows(precision, shape.in_features), 1])
    x = _rows(precision, int(counts.sum()), shape.in_features)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    (linears, packed), (_, other) = (_packed_experts(shape, precision, each, 4) for each in (kernels, one_thread))
    found = kernels.grouped_linear(x, packed, starts)
    alone = torch.cat([kernels.linear(x[first:end], linears[0]) for first, end in itertools.pairwise(starts.tolist())])
    equal = torch.equal(found, one_thread.grouped_linear(x, other, starts))
    weight = _stored(torch.randn(*shape.shape, generator=torch.Generator().manual_seed(0)), precision)
    error = _error(found[:_BLOCK_ROWS], x[:_BLOCK_ROWS], weight)
    return Check(name, precision, torch.equal(found, alone), equal, error)


def _measure_experts(name: str, shape: ExpertShape, precision: str, kernels: CpuKernels) -> Iterator[Timing]:
    one = _packed_experts(shape, precision, kernels, 1)[0][0].num_bytes
    count = max(shape.num_experts, -(-cold_bytes() // one))
    packed = _packed_experts(shape, precision, kernels, count)[1]
    firsts = itertools.count()
    for tokens in ROWS:
        rows = tokens * shape.num_chosen
        hit = min(rows, shape.num_experts)
        x, times = _rows(precision, rows, shape.in_features), []
        for _ in range(_ROUNDS):
            chosen = (next(firsts) * hit + torch.arange(hit)) % count
            numbers = torch.zeros(count, dtype=torch.int64)
            numbers[chosen] = rows // hit
            numbers[chosen[: rows % hit]] += 1
            starts = torch.cat([numbers.new_zeros(1), numbers.cumsum(0)]).int()
            start = time.perf_counter()
            kernels.grouped_linear(x, packed, starts)
            times.append(time.perf_counter() - start)
        yield Timing(name, *shape.shape, precision, tokens, shape.num_chosen, statistics.median(times), hit * one)
