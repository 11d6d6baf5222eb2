"""Measure the speed of a device and of the kernels on it, by the device's clock."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from gpu_device import in_blocks
from kernel_times import predictions

from octavo.kernels.block_weight import BlockKind
from octavo.kernels.quantization import quantize_int8

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_device import Check, Entries

HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128  # of Qwen3-0.6B


def peaks(check: Check, entries: Entries) -> None:
    """Measure the bytes per second and the operations per second of the device."""
    entries.add("bytes_per_s", lambda: {"value": _bytes_per_s(check)})
    entries.add("flops_per_s", lambda: {"value": _flops_per_s(check)})


def shares(check: Check, entries: Entries) -> None:
    """Measure times of products and other kernels, relative to the best time for their bytes and operations.

    Entries on a known device also have `predicted_us`, from `kernel_times`.
    """
    add = partial(_add, entries, predictions(check.sizes, check.device_name))
    bytes_per_s, flops_per_s = _bytes_per_s(check), _flops_per_s(check)

    def share(call: Any, num_bytes: float, flops: float = 0.0) -> dict[str, float]:
        taken = check.seconds(call)
        return {"us": taken * 1e6, "share": max(num_bytes / bytes_per_s, flops / flops_per_s) / taken}

    def product(width: int, columns: int, rows: int, stored: Any) -> dict[str, float]:
        packed = check.kernels.pack_linear(stored(check.random(columns, width, seed=1)))
        call = partial(check.kernels.linear, check.random(rows, width), packed)
        return share(call, packed.num_bytes + 2 * rows * (width + columns), 2 * rows * width * columns)

    def library(width: int, columns: int, rows: int) -> dict[str, float]:
        call = partial(torch.mm, check.random(rows, width), check.random(columns, width, seed=1).T)
        return share(call, 2 * (rows * (width + columns) + width * columns), 2 * rows * width * columns)

    def sample(rows: int) -> dict[str, float]:
        logits, parameters = check.sampling(rows)
        return share(partial(check.kernels.sample, logits, parameters), logits.nbytes)

    def attention(spans: list[tuple[int, int]]) -> dict[str, float]:
        """Measure attention. Each sequence has blocks of its own, so the bytes read correspond to the lengths."""
        tables = check.tables(len(spans), max(last for _, last in spans))
        caches = check.caches(tables.numel(), KV_HEADS, HEAD_DIM, torch.bfloat16)
        batch = check.batch(spans, tables)
        q = check.random(len(batch.positions), HEADS, HEAD_DIM)
        call = partial(check.kernels.paged_attention, q, *caches, batch, HEAD_DIM**-0.5, None)
        num_bytes = 2 * 2 * KV_HEADS * HEAD_DIM * sum(last for _, last in spans) + 2 * 2 * q.numel()
        return share(call, num_bytes, 4.0 * HEADS * HEAD_DIM * int((batch.positions + 1).sum()))

    for width, columns in check.sizes.layers:
        for rows in check.sizes.rows:
            for name, stored in (("bfloat16", lambda weight: weight), ("int8", quantize_int8)):
                add(f"linear {name} {width} {columns} {rows}", partial(product, width, columns, rows, stored))
            whole, in_q4_k = width - width % BlockKind.Q4_K.block_values, partial(in_blocks, BlockKind.Q4_K)
            add(f"linear Q4_K {whole} {columns} {rows}", partial(product, whole, columns, rows, in_q4_k))
            add(f"torch {width} {columns} {rows}", partial(library, width, columns, rows))
    for rows in check.sizes.rows[:3]:
        add(f"sample {rows}", partial(sample, rows))
    for count, context in check.sizes.decodes:
        add(f"decode {count} at {context}", partial(attention, [(context - 1, context)] * count))
    for tokens, context in check.sizes.prefills:
        add(f"prefill {tokens} to {context}", partial(attention, [(context - tokens, context)]))


def _add(
    entries: Entries, predicted: dict[str, dict[str, float]], name: str, measure: Callable[[], dict[str, float]]
) -> None:
    entries.add(name, lambda: measure() | predicted.get(name, {}))


def _bytes_per_s(check: Check) -> float:
    values = torch.ones(check.sizes.peak_values, dtype=torch.bfloat16, device=check.device)
    return values.nbytes / check.seconds(values.max)


def _flops_per_s(check: Check) -> float:
    side = min(8192, int(check.sizes.peak_values**0.5))
    square = check.random(side, side)
    return 2 * side**3 / check.seconds(lambda: square @ square)
