"""Measures what ranks get on this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from octavo.config.engine import MOST_RANKS
from octavo.config.fields import within
from octavo.errors import ConfigError, EngineDeadError
from octavo.kernels import create_kernels
from octavo.kernels.machine import (
    cores_of_rank,
    huge_pages_of_shared_memory,
    node_bytes,
    numa_node,
    processor_name,
    threads_of_rank,
    usable_cores,
)
from octavo.kernels.ranked import AREA_BYTES, create_shared_memory
from octavo.models.share import Share
from octavo.ranks import channel, messages
from octavo.ranks.leader import start_process
from octavo.worker.memory import free_bytes

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from octavo.models.architecture import Architecture

DEFAULT_WIDTH = 4096
_READ_BYTES = 512 << 20  # of all ranks together, as in `CpuKernels.measure_limits`
_READ_ROUNDS = 7  # in one of them all ranks should be undisturbed
_EXCHANGES = [(1, 200), (512, 4)]  # (rows, repetitions)
_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class RankCores:
    """What one rank gets. nodes: NUMA nodes of its cores. read_bytes_per_s: while all ranks read."""

    rank: int
    cores: list[int]
    nodes: list[int]
    num_threads: int
    read_bytes_per_s: float

    @property
    def spans_nodes(self) -> bool:
        """True if the cores are on several NUMA nodes."""
        return len(self.nodes) > 1


@dataclass(frozen=True, slots=True)
class Node:
    """The memory of a NUMA node. None: unknown. unused_bytes: without file caches."""

    node: int
    total_bytes: int | None
    unused_bytes: int | None


@dataclass(frozen=True, slots=True)
class Exchange:
    """One exchange. num_bytes: of the result, which each rank gets. seconds, best_s: median and minimum."""

    rows: int
    num_bytes: int
    seconds: float
    best_s: float

    @property
    def bytes_per_s(self) -> float:
        """Bytes of the result per second, in the median."""
        return self.num_bytes / self.seconds


@dataclass(frozen=True, slots=True)
class RanksReport:
    """What ranks get.

    one_process_threads, one_process_bytes_per_s: of a single process with all cores, for comparison. read_bytes_per_s:
    of all ranks together. shared_bytes: shared memory for exchanges. huge_pages: see `huge_pages_of_shared_memory`.
    """

    processor: str
    num_cores: int
    free_bytes: int
    isa: str
    one_process_threads: int
    one_process_bytes_per_s: float
    read_bytes_per_s: float
    ranks: list[RankCores]
    nodes: list[Node]
    exchanges: list[Exchange]
    shared_bytes: int
    huge_pages: str

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        ranks = [{**asdict(each), "spans_nodes": each.spans_nodes} for each in self.ranks]
        exchanges = [{**asdict(each), "bytes_per_s": each.bytes_per_s} for each in self.exchanges]
        return {**asdict(self), "ranks": ranks, "exchanges": exchanges}


def examine_ranks(
    count: int,
    *,
    architecture: Architecture | None = None,
    isa: str = "auto",
    num_threads: int | None = None,
    progress: Callable[[str], None] = lambda _text: None,
) -> RanksReport:
    """Measure `count` ranks in processes that are pinned like the ranks of an engine.

    architecture: its hidden size is the width of exchanges. num_threads: of all ranks together. Raises
    `ConfigError` if the count or the instruction set is impossible, and `EngineDeadError` if a process ends.
    """
    check_count(count)
    if architecture is not None:
        architecture.split(Share(0, count))  # raises if it cannot be divided
    isa = create_kernels(torch.device("cpu"), "cpu", 1, isa).identity.partition(":")[2]
    width = DEFAULT_WIDTH if architecture is None else architecture.hidden_size
    progress("memory read by one process")
    (alone,) = _measure(1, isa, num_threads, width)
    progress(f"memory read by {count} ranks, and exchanges")
    found = _measure(count, isa, num_threads, width)
    best = min(range(len(alone.read_s)), key=lambda number: max(each.read_s[number] for each in found))
    ranks = [_cores_of(rank, count, num_threads, each, best) for rank, each in enumerate(found)]
    nodes = {node: node_bytes(node) or (None, None) for rank in ranks for node in rank.nodes}
    return RanksReport(
        processor=processor_name(),
        num_cores=len(usable_cores()),
        free_bytes=free_bytes(torch.device("cpu")),
        isa=isa,
        one_process_threads=threads_of_rank(1, num_threads),
        one_process_bytes_per_s=alone.read_bytes / min(alone.read_s),
        read_bytes_per_s=sum(each.read_bytes for each in found) / max(each.read_s[best] for each in found),
        ranks=ranks,
        nodes=[Node(node, *sizes) for node, sizes in sorted(nodes.items())],
        exchanges=[
            Exchange(rows, rows * width * torch.bfloat16.itemsize, statistics.median(seconds), min(seconds))
            for (rows, _), seconds in zip(_EXCHANGES, found[0].exchange_s, strict=True)
        ],
        shared_bytes=2 * AREA_BYTES,
        huge_pages=huge_pages_of_shared_memory(),
    )


def check_count(count: int) -> None:
    """Raise `ConfigError` if ranks cannot have a core each."""
    within("tensor_parallel_size", count, 1, MOST_RANKS)
    if count > (num_cores := len(usable_cores())):
        raise ConfigError(
            f"tensor_parallel_size {count} is more than the {num_cores} usable cores: an engine starts, but its ranks "
            f"share cores and wait for each other. Choose at most {num_cores}"
        )


def _cores_of(rank: int, count: int, num_threads: int | None, measured: messages.Measured, number: int) -> RankCores:
    cores = cores_of_rank(rank, count)
    nodes, rate = sorted({numa_node(cpu) for cpu in cores}), measured.read_bytes / measured.read_s[number]
    return RankCores(rank, cores, nodes, threads_of_rank(count, num_threads), rate)


def _measure(count: int, isa: str, num_threads: int | None, width: int) -> list[messages.Measured]:
    """Return the results of each rank."""
    with contextlib.ExitStack() as stack:
        try:
            memory = create_shared_memory()
        except OSError as error:
            raise ConfigError(f"the system gives ranks no shared memory: {error.strerror}") from None
        stack.callback(os.close, memory)
        ends: dict[int, socket.socket] = {}
        for rank in range(count):
            own, other = socket.socketpair()
            stack.callback(own.close)
            with other:
                try:
                    process = start_process(other, [memory])
                except OSError as error:
                    raise ConfigError(f"rank {rank} cannot be started: {error.strerror}", rank=rank) from None
            stack.callback(_kill, process)
            order = messages.Measure(
                rank,
                count,
                memory,
                cores_of_rank(rank, count),
                threads_of_rank(count, num_threads),
                isa,
                _READ_BYTES // count,
                _READ_ROUNDS,
                _EXCHANGES,
                width,
            )
            with contextlib.suppress(channel.ClosedError):  # `_receive` notices it, too
                channel.send(own, messages.encode(order))
            ends[rank] = own
        return _receive(ends)


def _receive(ends: dict[int, socket.socket]) -> list[messages.Measured]:
    found: dict[int, messages.Measured] = {}
    for rank, data in channel.receive_each(ends, _POLL_S, lambda _awaited: None):
        if data is None:
            raise EngineDeadError(f"the process of rank {rank} ended while it measured; see its log lines", rank=rank)
        message = messages.decode_from_rank(data)
        if isinstance(message, messages.Failed):
            raise EngineDeadError(f"rank {rank} cannot measure: {message.message}", rank=rank)
        assert isinstance(message, messages.Measured)
        found[rank] = message
    return [found[rank] for rank in ends]


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
