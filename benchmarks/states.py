"""Median times of the kernels with recurrent states, as fractions of peaks measured in the same run.

    python benchmarks/states.py [--threads 2] [--rounds 9] [--isa avx512] [--only delta]

The shapes are those of a layer of Qwen3.5-9B (short_conv, gated_delta, gated_norm) and of Granite 4 H Small (mamba2).
A prompt has 1,024 rows. A decode is a sequence of one row. A replay is a decode with a kept row: the kept row advances
the state, and the new row is kept. GB/s counts each state as read once and written once. The peaks
are fused multiply-adds in registers, and reading 512 MB; the best of their rounds counts.
"""

from __future__ import annotations

import argparse
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from kernels import Case, case, report

from octavo.kernels.cpu import CpuKernels
from octavo.kernels.operations.gated_delta import gated_delta
from octavo.kernels.operations.gated_norm import gated_norm
from octavo.kernels.operations.keep_rows import keep_rows
from octavo.kernels.operations.mamba2 import mamba2
from octavo.kernels.operations.short_conv import short_conv
from octavo.kernels.state_batch import StateBatch, matrix_states

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo.kernels import Kernels

KEY_HEADS, HEADS, DIM, WIDTH = 16, 32, 128, 4
CHANNELS = 2 * KEY_HEADS * DIM + HEADS * DIM
MAMBA_HEADS, MAMBA_DIM, MAMBA_STATE = 128, 64, 128
BATCHES = {
    "prompt of 1024": [1024],
    **{f"{n} {kind}": [1] * n for n in (1, 32, 64) for kind in ("decodes", "replays")},
}
DELTA_FLOPS, MAMBA_FLOPS = 7, 5  # for each element of a state and row


def state_batch(lengths: list[int]) -> StateBatch:
    """Return a batch of sequences that read and write the slot of their number."""
    slots = torch.arange(len(lengths), dtype=torch.int32)
    return StateBatch.plain(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), slots, slots)


def replay_batch(num_seqs: int) -> StateBatch:
    """Return a batch of sequences with a kept row and a new row that is kept."""
    slots = torch.arange(num_seqs, dtype=torch.int32)
    start = torch.arange(0, 2 * num_seqs + 1, 2, dtype=torch.int32)
    sources = torch.stack([-1 - slots, slots], dim=1).flatten()
    ones, none = torch.ones_like(slots), slots[:0]
    return StateBatch(start, sources, slots, slots, ones, none, none, slots, slots)


def peak_cases(kernels: CpuKernels) -> Iterator[Case]:
    """Yield the cases for the peaks of the instruction set, under the names that `report` expects."""
    spins, data = 1 << 16, kernels.allocate(512 << 20).fill_(1)
    flops, read = kernels.kernel_set.spin_fma(spins), kernels.kernel_set.read_memory
    yield case("peak: float32 product", kernels, lambda _: kernels.kernel_set.spin_fma(spins), flops, 0)
    yield case("peak: read", kernels, lambda _: read(data.data_ptr(), data.nbytes), 0, data.nbytes)


def cases(kernels: Kernels) -> Iterator[Case]:
    """Yield every kernel with every batch."""
    weight, none = torch.randn(WIDTH, CHANNELS), torch.zeros(0)
    decay, dt_bias, norm = -torch.rand(MAMBA_HEADS), torch.randn(MAMBA_HEADS), torch.ones(DIM)
    for name, lengths in BATCHES.items():
        rows = sum(lengths)
        batch = replay_batch(rows) if "replays" in name else state_batch(lengths)
        inputs = torch.randn(rows, CHANNELS).to(torch.bfloat16)
        convolved, gate, out = (torch.empty_like(each) for each in (inputs, *[inputs[:, : HEADS * DIM]] * 2))
        a, b = torch.randn(2, rows, HEADS).to(torch.bfloat16)
        rates = torch.cat([a, b], dim=1)
        gate.copy_(inputs[:, : HEADS * DIM])
        kept = torch.zeros(rows, 2 * CHANNELS + 2 * HEADS, dtype=torch.bfloat16)
        kept_inputs = kept.split([CHANNELS, CHANNELS, HEADS, HEADS], dim=1)
        old = torch.zeros(len(lengths), WIDTH - 1, CHANNELS, dtype=torch.bfloat16)
        state = matrix_states(len(lengths), HEADS, DIM, DIM)
        xbc = torch.randn(rows, MAMBA_HEADS * MAMBA_DIM + 2 * MAMBA_STATE).to(torch.bfloat16)
        dt, result = torch.randn(rows, MAMBA_HEADS), torch.empty(rows, MAMBA_HEADS * MAMBA_DIM, dtype=torch.bfloat16)
        ssm = matrix_states(len(lengths), MAMBA_HEADS, MAMBA_STATE, MAMBA_DIM)

        def conv(_: int, x=inputs, kept=kept_inputs, old=old, batch=batch, out=convolved) -> object:  # noqa: ANN001
            return short_conv(kernels, x, kept[0], weight, none, old, batch, True, out)

        def delta(_: int, x=inputs, a=a, b=b, kept=kept_inputs, state=state, batch=batch, out=out) -> object:  # noqa: ANN001
            numbers = decay[:HEADS], dt_bias[:HEADS]
            return gated_delta(kernels, x, a, b, *kept[1:], *numbers, state, batch, KEY_HEADS, False, out)

        def mamba(_: int, x=xbc, dt=dt, state=ssm, batch=batch, out=result) -> object:  # noqa: ANN001
            return mamba2(kernels, x, dt, x, dt, dt_bias, decay, dt_bias, 0.0, 9.0, state, batch, 1, out)

        def keep(_: int, x=inputs, rates=rates, kept=kept, batch=batch) -> object:  # noqa: ANN001
            return keep_rows(kernels, x, x, rates, kept, batch)

        def normed(_: int, x=out, gate=gate) -> object:  # noqa: ANN001
            return gated_norm(kernels, x, gate, norm, 1e-6, DIM, False, x)

        moved = 2 * inputs.nbytes + 2 * old.nbytes
        yield case(f"short_conv, {name}", kernels, conv, 2 * WIDTH * inputs.numel(), moved)
        flops = DELTA_FLOPS * rows * HEADS * DIM * DIM
        yield case(f"gated_delta, {name}", kernels, delta, flops, 2 * state.nbytes)
        yield case(f"gated_norm, {name}", kernels, normed, 0, 3 * gate.nbytes)
        if "replays" in name:
            yield case(f"keep_rows, {name}", kernels, keep, 0, 2 * kept.nbytes)
        flops = MAMBA_FLOPS * rows * MAMBA_HEADS * MAMBA_DIM * MAMBA_STATE
        yield case(f"mamba2, {name}", kernels, mamba, flops, 2 * ssm.nbytes)


def main() -> None:
    """Run every case in interleaved rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--isa", default="auto", choices=["auto", "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable"]
    )
    parser.add_argument("--only", default="", help="part of the names of the cases to run")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernels = CpuKernels(options.isa, options.threads)
    measured = [*peak_cases(kernels), *(each for each in cases(kernels) if options.only in each.name)]
    for each in measured:
        each.run()
        each.times.clear()  # the first call allocates
    for _ in range(options.rounds):
        for each in measured:
            each.run()
    report(measured)


if __name__ == "__main__":
    main()
