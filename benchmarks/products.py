"""Compare octavo's matrix products with torch's products by oneDNN, at the shapes of the checkpoints, in turns.

    python benchmarks/products.py                                # qwen2-0.5b and qwen3-0.6b, 1 to 512 rows
    python benchmarks/products.py --shape qwen2-0.5b --precision int8 --layer down --rows 1 32 512

torch's products: bf16 is `mkldnn._linear_pointwise` of prepacked weights, or plain `F.linear` on processors for which
torch does not have it (no AVX-512 or similar). fp32 is that product of float32 weights and rows, which octavo gets as
well, or plain `F.linear` if torch was built without oneDNN. int8 is `onednn.qlinear_pointwise` of prepacked weights.
Its activations are converted to bytes in advance (unsigned, one scale for all rows), while octavo rounds them row by
row within the measured time. int4 is `aten._weight_int4pack_mm_for_cpu`, groups of 32, which multiplies in bfloat16.

In each round both are timed once, one right after the other, in alternating order. Copies of the weights fill so much
memory that they are not in a cache. ratio: torch's time divided by octavo's in each round; above 1, octavo is faster.
On a busy machine torch's threads wait far longer for one another than octavo's: measure on an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

import onednn
import torch
from torch.nn import functional
from workloads import FOLDER, prepare

from octavo.kernels.cpu import CpuKernels
from octavo.kernels.machine import cold_bytes
from octavo.kernels.quantization import quantize_int4, quantize_int8, round_to_int8
from octavo.models.registry import read_architecture
from octavo.worker.machine_report import layer_shapes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from octavo.models.architecture import Architecture

PRECISIONS = ("bf16", "fp32", "int8", "int4")
BYTES_OF_TWO_VALUES = {"bf16": 4, "fp32": 8, "int8": 2, "int4": 1}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
GROUP_SIZE = 32
COPIES_BYTES = cold_bytes()  # copies of weights fill this much memory, so that they are not in a cache


def layers(architecture: Architecture) -> dict[str, tuple[int, int]]:
    """Return {name: (input features, output features)} of a decoder's products."""
    shapes = layer_shapes(architecture)
    return {name: shapes[name][::-1] for name in ("qkv", "o", "gate_up", "down")}


def octavo_products(
    kernels: CpuKernels, weight: Tensor, precision: str, copies: int
) -> list[Callable[[Tensor], Tensor]]:
    """Pack a weight `copies` times for octavo; return the products x [rows, in] (fp32: float32) -> [rows, out]."""
    formats = {"bf16": torch.clone, "fp32": torch.Tensor.float, "int8": quantize_int8, "int4": quantize_int4}
    rounded = formats[precision](weight)
    packed = [kernels.pack_linear(rounded) for _ in range(copies)]
    return [lambda x, each=each: kernels.linear(x, each) for each in packed]


def torch_products(weight: Tensor, precision: str, copies: int) -> list[Callable[[Tensor], Tensor]]:
    """Pack a weight `copies` times for torch; return the products `rows_for_torch(x)` -> [rows, out]."""
    if precision in {"bf16", "fp32"}:
        weight = weight.float() if precision == "fp32" else weight
        if not onednn.has_product(weight.dtype):
            clones = [weight.clone() for _ in range(copies)]
            return [lambda x, each=each: functional.linear(x, each) for each in clones]
        whole = [onednn.pack(weight) for _ in range(copies)]
        return [lambda x, each=each: onednn.multiply(x, each) for each in whole]
    if precision == "int8":
        (values, scales), product = round_to_int8(weight, rotated=False), torch.ops.onednn.qlinear_pointwise
        zeros = torch.zeros(len(scales), dtype=torch.int32)
        behind = (scales, zeros, None, 1.0, 0, torch.bfloat16, "none", [], "")
        bytes_ = [torch.ops.onednn.qlinear_prepack(values, None) for _ in range(copies)]
        return [lambda x, each=each: product(x, X_SCALE, X_ZERO, each, *behind) for each in bytes_]
    groups = weight.float().unflatten(1, (-1, GROUP_SIZE))
    scales = groups.abs().amax(2) / 7
    values = (groups / scales.unsqueeze(2)).round().clamp(-8, 7).flatten(1).int() + 8
    scales_and_zeros = torch.stack([scales, torch.zeros_like(scales)], dim=2).transpose(0, 1).contiguous().bfloat16()
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu  # noqa: SLF001
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 2)  # noqa: SLF001
    clones = [packed.clone() for _ in range(copies)]
    return [lambda x, each=each: multiply(x, each, GROUP_SIZE, scales_and_zeros) for each in clones]


X_SCALE, X_ZERO = 1 / 32, 128  # of activations as bytes


def rows_for_torch(x: Tensor, precision: str) -> Tensor:
    """Return activations in the form for torch's product: bytes for int8."""
    if precision != "int8":
        return x
    return (x.float() / X_SCALE + X_ZERO).round().clamp(0, 255).to(torch.uint8)


def in_turns(
    ours: list[Callable[[], object]], theirs: list[Callable[[], object]], rounds: int
) -> list[tuple[float, float]]:
    """Time the i-th call of both lists in round i, after a warm-up round; return the seconds of each round."""
    found = []
    for number in range(rounds + 1):
        sides = [ours[number % len(ours)], theirs[number % len(theirs)]]
        seconds = [0.0, 0.0]
        for side in (0, 1) if number % 2 else (1, 0):
            start = time.perf_counter()
            sides[side]()
            seconds[side] = time.perf_counter() - start
        found.append((seconds[0], seconds[1]))
    return found[1:]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="of tools/make_checkpoint.py (qwen2-0.5b and qwen3-0.6b)")
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="again for more (default: all)")
    parser.add_argument("--layer", action="append", help="qkv, o, gate_up or down (default: all)")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="default: 1 to 512, doubled")
    parser.add_argument("--rounds", type=int, default=9, help="of each case (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of both (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernels = CpuKernels(num_threads=options.threads)
    print(
        "| checkpoint | product | weights | rows | octavo, us | oneDNN, us | ratio | of the rounds |\n"
        + "|---" * 8
        + "|"
    )
    for shape in options.shape or ("qwen2-0.5b", "qwen3-0.6b"):
        folder = FOLDER / shape
        architecture = read_architecture(folder if (folder / "config.json").exists() else prepare(shape)[0])
        for layer, (depth, width) in layers(architecture).items():
            for precision in options.precision or PRECISIONS:
                if options.layer and layer not in options.layer:
                    continue
                weight = torch.randn(width, depth, dtype=torch.bfloat16)
                copies = max(1, COPIES_BYTES // (weight.numel() * BYTES_OF_TWO_VALUES[precision] // 2))
                ours = octavo_products(kernels, weight, precision, copies)
                theirs = torch_products(weight, precision, copies)
                for rows in options.rows:
                    x = torch.randn(rows, depth, dtype=torch.float32 if precision == "fp32" else torch.bfloat16)
                    other_x = rows_for_torch(x, precision)
                    found = in_turns(
                        [lambda f=f, x=x: f(x) for f in ours],
                        [lambda f=f, x=other_x: f(x) for f in theirs],
                        options.rounds,
                    )
                    ratios = [b / a for a, b in found]
                    medians = [statistics.median(side) * 1e6 for side in zip(*found, strict=True)]
                    cells = [
                        shape,
                        f"{layer} {depth} x {width}",
                        precision,
                        str(rows),
                        *(f"{us:.0f}" for us in medians),
                    ]
                    cells += [f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]
                    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
