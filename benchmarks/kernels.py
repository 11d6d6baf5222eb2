"""Median times of every kernel at the shapes of Qwen2-0.5B, as fractions of peaks measured in the same run.

    python benchmarks/kernels.py [--threads 2] [--rounds 9] [--isa avx512] [--only int8]

Rounds are interleaved (every case once, then every case again), so that a disturbance affects all cases equally. The
peaks are float32 products of torch at 1024 x 4096 x 4096, and reading 512 MB; the best of their rounds counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from onednn import OneDnnKernels

from octavo.kernels import AttentionBatch, SamplingRows
from octavo.kernels.block_weight import BlockKind, BlockWeight
from octavo.kernels.cpu import CpuKernels
from octavo.kernels.machine import cold_bytes
from octavo.kernels.operations.add import add
from octavo.kernels.operations.divide import divide
from octavo.kernels.operations.log_softmax import log_softmax
from octavo.kernels.operations.relu_squared import relu_squared
from octavo.kernels.operations.soft_cap import soft_cap
from octavo.kernels.quantization import kv_scales, quantize_int4, quantize_int8, quantize_rows
from octavo.kernels.reference import ReferenceKernels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from octavo.kernels import Kernels

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 896, 4864, 14, 2, 64, 151936
BLOCK_SIZE = 16
COPIES_BYTES = cold_bytes()  # copies of weights fill this much memory, so that they are not in a cache


@dataclass
class Case:
    """One operation at one shape; `call(i)` runs it on its i-th copy of the data."""

    name: str
    backend: str
    call: Callable[[int], object]
    flops: float
    num_bytes: float
    times: list[float]
    calls: int = 0

    def run(self) -> None:
        """Time one call."""
        start = time.perf_counter()
        self.call(self.calls)
        self.times.append(time.perf_counter() - start)
        self.calls += 1


def case(name: str, kernels: Kernels, call: Callable[[int], object], flops: float, num_bytes: float) -> Case:
    """Return a case of one backend."""
    return Case(name, kernels.name, call, flops, num_bytes, [])


def peak_cases() -> Iterator[Case]:
    """Yield the cases for the peaks of the machine: arithmetic and memory."""
    a, b = torch.randn(1024, 4096), torch.randn(4096, 4096)
    yield Case("peak: float32 product", "torch", lambda _: a @ b, 2 * 1024 * 4096 * 4096, 0, [])
    data = torch.ones(512 << 18)
    yield Case("peak: read", "torch", lambda _: data.max(), 0, data.nbytes, [])


LAYERS = {
    "qkv": (HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (HIDDEN, 2 * INTERMEDIATE),
    "down": (INTERMEDIATE, HIDDEN),
    "lm_head": (HIDDEN, VOCAB),
}


def linear_cases(kernels: Kernels, only: str = "") -> Iterator[Case]:
    """Yield the products of a layer and of lm_head, with bfloat16, int8 and int4 weights.

    only: yield the cases with this text in their name; weights of other cases are not packed.
    """
    for layer, (depth, width) in LAYERS.items():
        wide = layer == "lm_head"
        weight = torch.randn(width, depth, dtype=torch.bfloat16)
        for name, rounded in (("linear", torch.clone), ("int8", quantize_int8), ("int4", quantize_int4)):
            all_rows = (1, 2, 4, 8, 16, 32) if wide else (1, 2, 4, 8, 16, 32, 128, 512)
            wanted = [rows for rows in all_rows if only in f"{name} {layer} x{rows}"]
            if not wanted:
                continue
            stored = rounded(weight)
            copies = 1 if kernels.name == "reference" else max(1, COPIES_BYTES // stored.nbytes)
            packed = [kernels.pack_linear(stored) for _ in range(copies)]
            for rows in wanted:
                x = torch.randn(rows, depth, dtype=torch.bfloat16)

                def call(i: int, x=x, packed=packed, wide=wide) -> object:  # noqa: ANN001
                    return kernels.linear(x, packed[i % len(packed)], float32_out=wide)

                yield case(f"{name} {layer} x{rows}", kernels, call, 2 * rows * depth * width, stored.nbytes)


def block_cases(kernels: Kernels, only: str = "") -> Iterator[Case]:
    """Yield the product of gate and up with weights in GGUF's blocks. only: as in `linear_cases`."""
    depth, width = 1024, 2 * INTERMEDIATE  # a multiple of 256
    for kind in BlockKind:
        wanted = [rows for rows in (1, 8, 32, 512) if only in f"{kind.name} x{rows}"]
        if not wanted:
            continue
        # the scales are float16: bytes below 120 make finite numbers
        data = torch.randint(0, 120, (width, kind.row_bytes(depth)), dtype=torch.uint8)
        weight = BlockWeight(kind, data, depth)
        copies = 1 if kernels.name == "reference" else max(1, COPIES_BYTES // weight.nbytes)
        packed = [kernels.pack_linear([weight]) for _ in range(copies)]
        for rows in wanted:
            x = torch.randn(rows, depth, dtype=torch.bfloat16)

            def call(i: int, x=x, packed=packed) -> object:  # noqa: ANN001
                return kernels.linear(x, packed[i % len(packed)])

            yield case(f"{kind.name} x{rows}", kernels, call, 2 * rows * depth * width, weight.nbytes)


def gated_cases(kernels: Kernels, only: str = "") -> Iterator[Case]:
    """Yield the product with a gated result: gate_up followed by the gate. only: as in `linear_cases`."""
    weight = torch.randn(2 * INTERMEDIATE, HIDDEN, dtype=torch.bfloat16)
    for name, rounded in (("gated_linear", torch.clone), ("gated int8", quantize_int8), ("gated int4", quantize_int4)):
        wanted = [rows for rows in (1, 8, 32, 128, 512) if only in f"{name} x{rows}"]
        if not wanted:
            continue
        stored = rounded(weight)
        copies = 1 if kernels.name == "reference" else COPIES_BYTES // stored.nbytes
        packed = [kernels.pack_linear(stored) for _ in range(copies)]
        for rows in wanted:
            x = torch.randn(rows, HIDDEN, dtype=torch.bfloat16)

            def call(i: int, x=x, packed=packed) -> object:  # noqa: ANN001
                return kernels.gated_linear(x, packed[i % len(packed)])

            yield case(f"{name} x{rows}", kernels, call, 4 * rows * HIDDEN * INTERMEDIATE, stored.nbytes)


def torch_cases() -> Iterator[Case]:
    """Yield products of torch itself for comparison: float32, and integers (with rounding done in advance)."""
    for layer, (depth, width) in LAYERS.items():
        weight = torch.randn(width, depth)
        bytes_weight = torch.randint(-127, 128, (width, depth), dtype=torch.int8).t()
        for rows in (32, 512) if layer != "lm_head" else (32,):
            x = torch.randn(rows, depth)
            bytes_x = torch.randint(-127, 128, (rows, depth), dtype=torch.int8)

            def wide_call(_: int, x=x, weight=weight) -> object:  # noqa: ANN001
                return torch.nn.functional.linear(x, weight)

            def bytes_call(_: int, x=bytes_x, weight=bytes_weight) -> object:  # noqa: ANN001
                return torch._int_mm(x, weight)  # noqa: SLF001

            flops = 2 * rows * depth * width
            yield Case(f"linear {layer} x{rows}", "torch fp32", wide_call, flops, weight.nbytes, [])
            yield Case(f"int8 {layer} x{rows}", "torch int8", bytes_call, flops, bytes_weight.nbytes, [])


def attention_cases(kernels: Kernels) -> Iterator[Case]:
    """Yield decodes and prompts. flops: those of causal attention. bytes: all KV once, including a common prefix."""
    shapes = {"1 decode, 16384 KV": ([(16384, 1)], 0), "32 decodes, 512 KV": ([(512, 1)] * 32, 0),
              "32 decodes, 512 of 576 KV common": ([(576, 1)] * 32, 512),
              "512 prompt": ([(512, 512)], 0), "512 of 4096": ([(4096, 512)], 0)}  # fmt: skip
    for name, (sequences, common) in shapes.items():
        batch, blocks = attention_batch(sequences, common)
        numbers = torch.randn(blocks, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        q = torch.randn(len(batch.positions), HEADS, HEAD_DIM).to(torch.bfloat16)
        seen = int((batch.positions + 1).sum())
        tokens = sum(length for length, _ in sequences) - common * (len(sequences) - 1)
        for kv, cache, row_bytes in (
            ("", numbers.to(torch.bfloat16), HEAD_DIM * 2),
            (" of int8", int8_cache(numbers), HEAD_DIM + 4),
        ):

            def call(_: int, q=q, cache=cache, batch=batch) -> object:  # noqa: ANN001
                return kernels.paged_attention(q, cache[:, 0], cache[:, 1], batch, HEAD_DIM**-0.5, None)

            read = tokens * KV_HEADS * 2 * row_bytes
            yield case(f"attention{kv} {name}", kernels, call, 4 * seen * HEADS * HEAD_DIM, read)


def int8_cache(numbers: Tensor) -> Tensor:
    """Return keys and values [blocks, 2, heads, block_size, head_dim] as int8, with scales after a block's rows."""
    *front, block_size, head_dim = numbers.shape
    values, scales = quantize_rows(numbers.flatten(0, -2))
    memory = torch.empty(*front, block_size * (head_dim + 4), dtype=torch.int8)
    rows = memory[..., : block_size * head_dim].unflatten(-1, (block_size, head_dim))
    rows.copy_(values.view(numbers.shape))
    for side, its_scales in enumerate(scales.view(*front, block_size).unbind(1)):
        kv_scales(rows[:, side]).copy_(its_scales)
    return rows


def attention_batch(sequences: list[tuple[int, int]], common: int = 0) -> tuple[AttentionBatch, int]:
    """Return a batch of sequences (KV length, query length) with consecutive blocks, and its number of blocks.

    common: number of tokens at the beginning that all sequences share with the first one.
    """
    starts, positions, tables, slots, used = [0], [], [], [], 0
    for length, queries in sequences:
        table = torch.arange(used, used + -(-length // BLOCK_SIZE))
        where = torch.arange(length - queries, length)
        used += len(table)
        starts.append(starts[-1] + queries)
        positions.append(where)
        tables.append(table)
        slots.append(table[where // BLOCK_SIZE] * BLOCK_SIZE + where % BLOCK_SIZE)
    lengths = torch.tensor([length for length, _ in sequences], dtype=torch.int32)
    table = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True).int()
    table[:, : common // BLOCK_SIZE] = table[0, : common // BLOCK_SIZE]
    return AttentionBatch(
        torch.tensor(starts, dtype=torch.int32), lengths, table, torch.cat(positions), torch.cat(slots), BLOCK_SIZE
    ), used


def elementwise_cases(kernels: Kernels) -> Iterator[Case]:
    """Yield norm, gate and rotary embedding."""
    for rows in (1, 32, 512):
        x = torch.randn(rows, HIDDEN, dtype=torch.bfloat16)
        residual, weight = torch.randn_like(x), torch.randn(HIDDEN, dtype=torch.bfloat16)
        gate_up = torch.randn(rows, 2 * INTERMEDIATE, dtype=torch.bfloat16)
        batch, blocks = attention_batch([(rows, rows)])
        cache = torch.zeros(blocks, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=torch.bfloat16)
        qkv = torch.randn(rows, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
        cos_sin = torch.rand(rows, HEAD_DIM)

        def norm(_: int, x=x, residual=residual, weight=weight) -> object:  # noqa: ANN001
            return kernels.add_rms_norm(x, residual, weight, 1e-6)

        def gate(_: int, gate_up=gate_up) -> object:  # noqa: ANN001
            return kernels.gate(gate_up)

        def gelu(_: int, gate_up=gate_up) -> object:  # noqa: ANN001
            return kernels.gate(gate_up, "gelu_tanh")

        def squared(_: int, gate_up=gate_up) -> object:  # noqa: ANN001
            return relu_squared(kernels, gate_up)

        def added(_: int, x=x, residual=residual) -> object:  # noqa: ANN001
            return add(kernels, x, residual, 1.0)

        def rope(_: int, qkv=qkv, cos_sin=cos_sin, batch=batch, cache=cache) -> object:  # noqa: ANN001
            q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            return kernels.rope_and_write_kv(q, k, v, cos_sin, batch, cache[:, 0], cache[:, 1])

        def pairs(_: int, qkv=qkv, cos_sin=cos_sin, batch=batch, cache=cache) -> object:  # noqa: ANN001
            q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            return kernels.rope_and_write_kv(q, k, v, cos_sin, batch, cache[:, 0], cache[:, 1], interleaved=True)

        yield case(f"add_rms_norm x{rows}", kernels, norm, 0, 4 * x.nbytes)
        yield case(f"add x{rows}", kernels, added, 0, 3 * x.nbytes)
        yield case(f"gate x{rows}", kernels, gate, 0, 1.5 * gate_up.nbytes)
        yield case(f"gate, gelu_tanh x{rows}", kernels, gelu, 0, 1.5 * gate_up.nbytes)
        yield case(f"relu_squared x{rows}", kernels, squared, 0, 2 * gate_up.nbytes)
        yield case(f"rope_and_write_kv x{rows}", kernels, rope, 0, 2 * qkv.nbytes)
        yield case(f"rope_and_write_kv, interleaved x{rows}", kernels, pairs, 0, 2 * qkv.nbytes)


def sampling_cases(kernels: Kernels) -> Iterator[Case]:
    """Yield sampling with and without filters, and log-probability candidates."""
    filters = {"greedy": (0.0, 0, 1.0, 0.0), "t=1": (1.0, 0, 1.0, 0.0), "top_k=50": (1.0, 50, 1.0, 0.0),
               "top_p=0.9": (1.0, 0, 0.9, 0.0), "all filters": (0.7, 50, 0.9, 0.05)}  # fmt: skip
    for rows in (1, 32):
        logits = torch.randn(rows, VOCAB) * 3

        def cap(_: int, logits=logits) -> object:  # noqa: ANN001
            return soft_cap(kernels, logits, 30.0)

        yield case(f"soft_cap x{rows}", kernels, cap, 0, 2 * logits.nbytes)
        for name, (temperature, top_k, top_p, min_p) in filters.items():
            ones = torch.ones(rows)
            arguments = SamplingRows(
                ones * temperature, (ones * top_k).int(), ones * top_p, ones * min_p,
                torch.arange(rows), torch.zeros(rows, dtype=torch.int32), torch.arange(rows).int(),
            )  # fmt: skip

            def call(_: int, logits=logits, arguments=arguments) -> object:  # noqa: ANN001
                return kernels.sample(logits, arguments)

            yield case(f"sample {name} x{rows}", kernels, call, 0, logits.nbytes)

        def divided(_: int, logits=logits) -> object:  # noqa: ANN001
            return divide(kernels, logits, 1.0)

        yield case(f"divide logits x{rows}", kernels, divided, 0, 2 * logits.nbytes)

        def logprobs(_: int, logits=logits) -> object:  # noqa: ANN001
            return log_softmax(kernels, logits)

        yield case(f"log_softmax x{rows}", kernels, logprobs, 0, 4 * logits.nbytes)

        def top(_: int, logits=logits) -> object:  # noqa: ANN001
            return kernels.top_tokens(logits, 20)

        yield case(f"top_tokens 20 x{rows}", kernels, top, 0, logits.nbytes)

        drafts = torch.zeros(rows * 5, dtype=torch.int64)
        bounds = torch.arange(0, rows * 5 + 1, 5, dtype=torch.int32)

        def verify(_: int, drafts=drafts, bounds=bounds) -> object:  # noqa: ANN001
            return kernels.rejection_sample(drafts, drafts, bounds, 4)

        yield case(f"rejection_sample 4 x{rows}", kernels, verify, 0, 2 * drafts.nbytes)


def report(cases: list[Case]) -> None:
    """Print one line per case."""
    best = {c.name: c for c in cases}
    product, read = best["peak: float32 product"], best["peak: read"]
    peak_flops = product.flops / min(product.times)
    peak_bytes = read.num_bytes / min(read.times)
    width = max(len(c.name) for c in cases)
    print(f"{'case':{width}} {'backend':10} {'median us':>11} {'GFLOP/s':>9} {'of peak':>8} {'GB/s':>7} {'of peak':>8}")
    for c in cases:
        seconds = statistics.median(c.times)
        flops, rate = c.flops / seconds, c.num_bytes / seconds
        print(f"{c.name:{width}} {c.backend:10} {seconds * 1e6:11.1f} {flops / 1e9:9.1f} {flops / peak_flops:8.1%}"
              f" {rate / 1e9:7.2f} {rate / peak_bytes:8.1%}")  # fmt: skip


def main() -> None:
    """Run every case in interleaved rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--isa", default="auto", choices=["auto", "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable"]
    )
    parser.add_argument("--linear", default="packed", choices=["packed", "onednn"], help="whose products of bfloat16")
    parser.add_argument("--only", default="", help="part of the names of the cases to run")
    parser.add_argument("--reference", action="store_true", help="plain torch as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kind = OneDnnKernels if options.linear == "onednn" else CpuKernels
    backends: list[Kernels] = [kind(options.isa, options.threads)]
    if options.reference:
        backends.append(ReferenceKernels())
    groups = (attention_cases, elementwise_cases, sampling_cases)
    cases = list(peak_cases())
    products = (linear_cases, block_cases, gated_cases)
    cases += [c for group in products for kernels in backends for c in group(kernels, options.only)]
    cases += [c for group in groups for kernels in backends for c in group(kernels) if options.only in c.name]
    cases += [c for c in torch_cases() if options.only in c.name]
    for c in cases:
        c.run()
        c.times.clear()  # the first call allocates
    for _ in range(options.rounds):
        for c in cases:
            c.run()
    report(cases)


if __name__ == "__main__":
    main()
