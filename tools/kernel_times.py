"""Predict the time of kernels on a GPU from their tiles and the tables in tools/kernel_bounds, without a GPU.

    python tools/kernel_times.py [--device H100] [--triton 3.9]

Prints tables in Markdown: the operations that the stage `shares` of tools/gpu_check.py measures, and whole steps.
"Predicted times" in docs/gpu.md describes the method. No prediction has been compared with a device yet.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from compile_kernels import BOUNDS, read_bounds
from kernel_work import MODELS, attention, linear, sample, step

from octavo.kernels.triton.launch import cdiv

if TYPE_CHECKING:
    from collections.abc import Iterator

    from compile_kernels import Taken
    from gpu_device import Sizes
    from kernel_work import Launch, Operation

Bounds = dict[tuple[str, str, str], "Taken"]

MEMORY_SHARE, TENSOR_SHARE = 0.9, 0.8  # attainable parts of published rates; an H200: 4.3 TB/s and 790 TFLOP/s
LONE_WARP_CYCLES = 2.0  # between two instructions of a warp
MMA_MACS, MMA_READS = 1024, 2  # of `mma`: rate as on sm_80, and how often it reads its operands
SHARED_BYTES_PER_CYCLE = 128
# Of a processor. Each program reserves RESERVED_BYTES of shared memory.
SCHEDULERS, REGISTERS, MOST_WARPS, MOST_PROGRAMS, RESERVED_BYTES = 4, 65536, 64, 32, 1024
STEPS = ((1, 1, 1024), (64, 1, 1024), (256, 1, 1024), (1, 8192, 8192))  # sequences, rows of each, positions


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU. macs: multiply-adds of bfloat16 per cycle and processor; int8 has twice as many.

    The vendor publishes the fields up to shared_bytes. The fields from clock_hz on are estimates.
    """

    target: str
    processors: int
    macs: int
    memory_bytes_per_s: float
    shared_bytes: int
    clock_hz: float
    l2_bytes_per_s: float
    memory_latency_s: float
    l2_latency_s: float = 0.25e-6
    launch_s: float = 1.5e-6


DEVICES = {
    "A100": Device("sm_80", 108, 1024, 2.04e12, 167936, 1.41e9, 4.5e12, 0.5e-6),
    "H100": Device("sm_90", 132, 2048, 3.35e12, 233472, 1.75e9, 7.0e12, 0.6e-6),
    "H200": Device("sm_90", 132, 2048, 4.8e12, 233472, 1.75e9, 7.0e12, 0.6e-6),
    "B200": Device("sm_100", 148, 4096, 8.0e12, 233472, 1.85e9, 10.0e12, 0.75e-6),
}


@dataclass(frozen=True, slots=True)
class Prediction:
    """Time in microseconds, the resource that bounds it, and the ideal time divided by the predicted time."""

    us: float
    bound: str
    share: float


@cache
def bounds_of(version: str | None = None) -> Bounds:
    """Read the table for a minor version of Triton, by default the newest. Raises ValueError if there is none."""
    paths = {path.stem.removeprefix("triton-"): path for path in BOUNDS.glob("triton-*.csv")}
    newest = max(paths, key=lambda each: [int(part) for part in each.split(".")])
    if version is not None and version not in paths:
        raise ValueError(f"no table for Triton {version}: {BOUNDS} has {', '.join(sorted(paths))}")
    return read_bounds(paths[version or newest])


def programs_per_processor(taken: Taken, device: Device) -> int:
    """Return how many programs of a kernel are resident on a processor. Raises ValueError if none fits."""
    registers_per_warp = 32 * 8 * cdiv(taken.registers, 8)  # allocated in units of 8 per thread
    fits = min(
        REGISTERS // (registers_per_warp * taken.num_warps),
        device.shared_bytes // (taken.shared_bytes + RESERVED_BYTES),
        MOST_WARPS // taken.num_warps,
        MOST_PROGRAMS,
    )
    if fits < 1:
        raise ValueError(f"{taken.kernel} of {taken.case} does not fit on a processor of {device.target}")
    return fits


def seconds(launch: Launch, taken: Taken, device: Device) -> dict[str, float]:
    """Return the seconds that each resource needs for a launch. The largest value is the predicted time."""
    is_mma = taken.products.startswith("mma")
    macs = min(device.macs, MMA_MACS) if is_mma else device.macs
    mac_cycles = launch.macs / (2 * macs if launch.is_int8 else macs)
    spilled_bytes = 2 * taken.spilled_bytes * 32 * taken.num_warps / launch.pipeline  # written and read per pipeline
    operand_bytes = launch.operand_bytes * (MMA_READS if is_mma else 1)
    shared_cycles = (launch.l2_bytes + operand_bytes + spilled_bytes) / SHARED_BYTES_PER_CYCLE
    busiest = max(cdiv(launch.programs, device.processors) * launch.steps, launch.longest)  # steps on one processor
    cycles = {
        "tensor cores": mac_cycles / TENSOR_SHARE,
        "shared memory": shared_cycles,
        "issue": launch.instructions * taken.num_warps / SCHEDULERS,
    }
    alone = mac_cycles + LONE_WARP_CYCLES * launch.instructions + spilled_bytes / SHARED_BYTES_PER_CYCLE
    step_s = alone / device.clock_hz + launch.num_waits * device.l2_latency_s
    name, rounds_s = _rounds(launch, step_s, programs_per_processor(taken, device), device)
    return {
        "memory": launch.memory_bytes / (MEMORY_SHARE * device.memory_bytes_per_s),
        "L2": launch.programs * launch.steps * launch.l2_bytes / device.l2_bytes_per_s,
        **{each: busiest * number / device.clock_hz for each, number in cycles.items()},
        name: rounds_s,
    }


def _rounds(launch: Launch, step_s: float, resident: int, device: Device) -> tuple[str, float]:
    """Return the time of programs that run one after another, and if loads or instructions take most of it.

    step_s: time of a step's instructions if nothing else runs on the processor.
    """
    latency = device.l2_latency_s if launch.is_cached else device.memory_latency_s
    num_steps = launch.pipeline
    if launch.depth:  # loads overlap with earlier steps; Little's law: `depth` steps arrive per latency
        pipeline_s = max(num_steps / launch.depth * latency, latency + num_steps * step_s)
    else:
        pipeline_s = num_steps * (latency + step_s)
    start_s = latency + launch.start_waits * device.l2_latency_s
    average = start_s + pipeline_s * launch.steps / num_steps
    longest = start_s + pipeline_s * max(launch.longest, launch.steps) / num_steps
    slots = device.processors * resident
    total = max(cdiv(launch.programs, slots) * average, launch.programs / slots * average + longest - average)
    return ("latency" if pipeline_s > 2 * num_steps * step_s else "few warps"), max(total, longest)


def predict(operation: Operation, device: Device, bounds: Bounds) -> Prediction:
    """Predict the time of an operation. Raises LookupError if the table has no row for one of its kernels."""
    total = longest = 0.0
    bound = ""
    for launch in operation.launches:
        taken = bounds.get((launch.case, launch.kernel, device.target))
        if taken is None:
            raise LookupError(f"the table has no row for {launch.kernel} of {launch.case!r} on {device.target}")
        times = seconds(launch, taken, device)
        name = max(times, key=lambda each: times[each])
        total += times[name]
        longest, bound = max((longest, bound), (times[name], name))
    launching = len(operation.launches) * device.launch_s
    if launching > total:
        bound = "launch"
    macs = device.macs * (2 if any(launch.is_int8 for launch in operation.launches) else 1)
    flops_per_s = 2 * TENSOR_SHARE * macs * device.processors * device.clock_hz
    ideal = max(operation.num_bytes / (MEMORY_SHARE * device.memory_bytes_per_s), operation.flops / flops_per_s)
    return Prediction((total + launching) * 1e6, bound, ideal / (total + launching))


def measured(sizes: Sizes, device: Device) -> Iterator[tuple[str, Operation]]:
    """Yield the operations of the stage `shares` with the names of their entries, except products of torch."""
    model = MODELS["Qwen3-0.6B"]
    for width, columns in sizes.layers:
        for rows in sizes.rows:
            for kind in ("bfloat16", "int8", "Q4_K"):
                whole = width - width % 256 if kind == "Q4_K" else width
                yield f"linear {kind} {whole} {columns} {rows}", linear(kind, rows, whole, columns, device)
    for rows in sizes.rows[:3]:
        yield f"sample {rows}", sample(rows, sizes.vocab, filtered=rows // 2)
    for count, context in sizes.decodes:
        yield f"decode {count} at {context}", attention(model, count, 1, context, device)
    for tokens, context in sizes.prefills:
        yield f"prefill {tokens} to {context}", attention(model, 1, tokens, context, device)


def unmeasured(device: Device) -> Iterator[tuple[str, Operation]]:
    """Yield operations with types that the stage `shares` does not measure."""
    for kind in ("fp8", "int4"):
        for rows in (1, 64, 4096):
            yield f"linear {kind} 12288 4096 {rows}", linear(kind, rows, 12288, 4096, device)
    for kv in ("int8", "fp8"):
        for count in (64, 256):
            yield f"decode {count} at 1024, {kv} KV", attention(MODELS["Qwen3-0.6B"], count, 1, 1024, device, kv)


def predictions(sizes: Sizes, device_name: str) -> dict[str, dict[str, float]]:
    """Return `predicted_us` for each entry of the stage `shares`. Returns nothing for a device not in `DEVICES`."""
    device = next((each for name, each in DEVICES.items() if name in device_name), None)
    if device is None:
        return {}
    operations = dict(measured(sizes, device))
    return {name: {"predicted_us": predict(each, device, bounds_of()).us} for name, each in operations.items()}


def print_operations(sizes: Sizes, device: Device, bounds: Bounds) -> None:
    """Print a row for each operation."""
    print("| operation | us | bound | share of limit |\n|---|---|---|---|")
    for name, operation in (*measured(sizes, device), *unmeasured(device)):
        found = predict(operation, device, bounds)
        print(f"| {name} | {found.us:.1f} | {found.bound} | {found.share:.0%} |")


def print_steps(device: Device, bounds: Bounds) -> None:
    """Print the time of whole steps and of their parts. The share counts only products and attention as ideal time."""
    print("| model | step | launches | ms | share of limit | parts in ms |\n|---|---|---|---|---|---|")
    for name, model in MODELS.items():
        for count, tokens, context in STEPS:
            times, ideal, launches = dict[str, float](), 0.0, 0
            for number, part, operation in step(model, count, tokens, context, device):
                found = predict(operation, device, bounds)
                times[part] = times.get(part, 0.0) + number * found.us / 1e3
                if operation.flops:
                    ideal += number * found.us * found.share / 1e3
                launches += number * len(operation.launches)
            label = f"prompt of {tokens}" if tokens > 1 else f"{count} decodes at {context}"
            total, parts = sum(times.values()), ", ".join(f"{part} {ms:.2f}" for part, ms in times.items())
            print(f"| {name} | {label} | {launches} | {total:.2f} | {ideal / total:.0%} | {parts} |")


def main() -> None:
    """Print the predicted times of operations and steps."""
    from gpu_device import ON_GPU  # noqa: PLC0415  loads Triton's interpreter

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=DEVICES, default="H100")
    parser.add_argument("--triton", help="minor version of the table, such as 3.6; default: the newest")
    arguments = parser.parse_args()
    device, bounds = DEVICES[arguments.device], bounds_of(arguments.triton)
    print_operations(ON_GPU, device, bounds)
    print()
    print_steps(device, bounds)


if __name__ == "__main__":
    main()
