"""Measures the machine in the process of a rank."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from octavo.errors import OctavoError
from octavo.kernels import create_kernels
from octavo.kernels.ranked import RankedKernels, RankGroup
from octavo.ranks import channel, messages

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from torch import Tensor

_TIMEOUT_S = 60.0  # covers the slowest start of a process
_EXCHANGE_ROUNDS = 7


def measure(end: socket.socket, order: messages.Measure) -> None:
    """Measure together with the other ranks, and send the results. As in an engine, rank 0 may use all cores."""
    if order.rank > 0:
        os.sched_setaffinity(0, order.cores)
    try:
        group = RankGroup(order.memory, order.rank, order.count, _TIMEOUT_S, order.cores)
        kernels = create_kernels(torch.device("cpu"), "cpu", order.num_threads, order.isa, group)
        assert isinstance(kernels, RankedKernels)
        read_bytes, read_s = _read(kernels, order)
        exchange_s = [_exchange(kernels, order.width, rows, count) for rows, count in order.exchanges]
    except (OctavoError, RuntimeError) as error:
        channel.send(end, messages.encode(messages.Failed(str(error))))
    else:
        channel.send(end, messages.encode(messages.Measured(read_bytes, read_s, exchange_s)))


def _read(kernels: RankedKernels, order: messages.Measure) -> tuple[int, list[float]]:
    """Read memory, in each round at the same time as the other ranks. Return the bytes of a round, and all times."""
    data, num_bytes, seconds = kernels.allocate(order.read_bytes), 0, []
    _write(data, order.cores)
    for _ in range(order.read_rounds):
        _meet(kernels)
        start = time.perf_counter()
        num_bytes = kernels.kernel_set.read_memory(data.data_ptr(), data.nbytes)
        seconds.append(time.perf_counter() - start)
    return num_bytes, seconds


def _write(data: Tensor, cores: Sequence[int]) -> None:
    """Write a part on each core, as packed weights are written. So the memory is on the cores' NUMA nodes."""

    def write(core: int, part: Tensor) -> None:
        os.sched_setaffinity(0, [core])  # of this thread
        part.fill_(1)

    with ThreadPoolExecutor(len(cores)) as threads:
        written = [threads.submit(write, *each) for each in zip(cores, data.chunk(len(cores)), strict=False)]
    for each in written:
        each.result()


def _exchange(kernels: RankedKernels, width: int, rows: int, count: int) -> list[float]:
    """Return the time of an exchange in each round of `count` exchanges."""
    rank, num_ranks = kernels.group.rank, kernels.group.count
    borders = tuple(width * each // num_ranks for each in range(num_ranks + 1))
    own = [end - start for start, end in pairwise(borders)][rank]
    x, out = torch.ones(rows, own, dtype=torch.bfloat16), torch.ones(rows, width, dtype=torch.bfloat16)
    seconds = []
    for _ in range(_EXCHANGE_ROUNDS):
        _meet(kernels)
        start = time.perf_counter()
        for _ in range(count):
            kernels.join(x, borders, out=out)
        seconds.append((time.perf_counter() - start) / count)
    return seconds


def _meet(kernels: RankedKernels) -> None:
    """Wait until all ranks call this."""
    kernels.join(torch.ones(1, 1), tuple(range(kernels.group.count + 1)))
