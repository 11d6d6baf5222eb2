"""Measures attention with compiled kernels."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from octavo.kernels.interface import AttentionBatch
from octavo.kernels.machine import cold_bytes
from octavo.kernels.quantization import kv_scales
from octavo.models.attention import AttentionConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from octavo.kernels.cpu import CpuKernels
    from octavo.kernels.limits import Limits
    from octavo.models.architecture import Architecture

ROWS = (1, 512)
POSITIONS = (1024, 8192)
_BLOCK_SIZE = 16
_ROUNDS = 7


@dataclass(frozen=True, slots=True)
class AttentionTiming:
    """The time of attention in one layer, for the last `rows` tokens of a sequence of `positions` tokens.

    kv: How keys and values are stored: a dtype or "int8". num_bytes: Of all keys and values.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv: str
    rows: int
    positions: int
    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Attention(AttentionTiming):
    """A time beside the machine's limits.

    ops_per_s: Of the products with the positions that each token sees. of_limit: Like `Product.of_limit`.
    """

    ops_per_s: float
    bytes_per_s: float
    of_limit: float

    @classmethod
    def of(cls, timing: AttentionTiming, limits: Limits) -> Attention:
        """Compare a time with limits."""
        peak = limits.flops if timing.kv == "float32" else limits.bfloat16_flops
        seen = timing.rows * (timing.positions - (timing.rows - 1) / 2)
        ops = 4 * seen * timing.num_heads * timing.head_dim / timing.seconds
        read = timing.num_bytes / timing.seconds
        return cls(
            **asdict(timing), ops_per_s=ops, bytes_per_s=read, of_limit=max(ops / peak, read / limits.bytes_read)
        )


def attention_shapes(architecture: Architecture) -> list[tuple[int, int, int]]:
    """Return (num_heads, num_kv_heads, head_dim) of all layers with paged attention, each once."""
    configs = (layer.attention for layer in architecture.layers)
    return list(
        dict.fromkeys(
            (each.num_heads, each.num_kv_heads, each.head_dim) for each in configs if isinstance(each, AttentionConfig)
        )
    )


def measure_attention(shape: tuple[int, int, int], kv: str, kernels: CpuKernels) -> Iterator[AttentionTiming]:
    """Measure all combinations of `ROWS` and `POSITIONS`. Keys and values are not in a cache of the processor.

    shape: See `attention_shapes`. kv: See `AttentionTiming`.
    """
    num_heads, num_kv_heads, head_dim = shape
    dtype = torch.bfloat16 if kv == "int8" else getattr(torch, kv)
    cache = _cache(num_kv_heads, head_dim, kv)
    position_bytes = cache[0].nbytes // _BLOCK_SIZE + (8 * num_kv_heads if kv == "int8" else 0)
    for positions, rows in itertools.product(POSITIONS, ROWS):
        num_blocks = positions // _BLOCK_SIZE
        batches = itertools.cycle(
            [_batch(first, positions, rows) for first in range(0, len(cache) - num_blocks + 1, num_blocks)]
        )
        q = torch.randn(rows, num_heads, head_dim, generator=torch.Generator().manual_seed(1)).to(dtype)
        times = []
        for _ in range(_ROUNDS):
            batch = next(batches)
            start = time.perf_counter()
            kernels.paged_attention(q, cache[:, 0], cache[:, 1], batch, head_dim**-0.5, None)
            times.append(time.perf_counter() - start)
        yield AttentionTiming(*shape, kv, rows, positions, statistics.median(times), positions * position_bytes)


def _cache(num_kv_heads: int, head_dim: int, kv: str) -> Tensor:
    """Return [blocks, 2, num_kv_heads, _BLOCK_SIZE, head_dim]: more than the processor's caches hold."""
    row_bytes = head_dim + 4 if kv == "int8" else head_dim * getattr(torch, kv).itemsize
    block_bytes = 2 * num_kv_heads * _BLOCK_SIZE * row_bytes
    front = (max(cold_bytes() // block_bytes, max(POSITIONS) // _BLOCK_SIZE), 2, num_kv_heads)
    if kv != "int8":
        return torch.full((*front, _BLOCK_SIZE, head_dim), 0.5, dtype=getattr(torch, kv))
    memory = torch.ones(*front, _BLOCK_SIZE * row_bytes, dtype=torch.int8)
    # A view of a slice: reshape would copy it.
    *strides, _ = memory.stride()
    rows = memory.as_strided((*front, _BLOCK_SIZE, head_dim), (*strides, head_dim, 1))
    for side in range(2):
        kv_scales(rows[:, side]).fill_(0.5)
    return rows


def _batch(first_block: int, positions: int, rows: int) -> AttentionBatch:
    """Return a batch of one sequence in consecutive blocks."""
    blocks = torch.arange(first_block, first_block + positions // _BLOCK_SIZE)
    where = torch.arange(positions - rows, positions)
    return AttentionBatch(
        torch.tensor([0, rows], dtype=torch.int32),
        torch.tensor([positions], dtype=torch.int32),
        blocks[None].int(),
        where,
        blocks[where // _BLOCK_SIZE] * _BLOCK_SIZE + where % _BLOCK_SIZE,
        _BLOCK_SIZE,
    )
