"""`octavo doctor --tensor-parallel-size N`."""

from __future__ import annotations

import json
import sys
from itertools import groupby
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from octavo.ranks.ranks_report import RanksReport


def show_ranks(count: int, model: str | None, *, isa: str, num_threads: int | None, as_json: bool) -> None:
    """Measure ranks, and print the report. Raises errors of `examine_ranks`."""
    from octavo.ranks.ranks_report import check_count, examine_ranks
    from octavo.startup.checkpoint import open_checkpoint

    check_count(count)
    report = examine_ranks(
        count,
        architecture=None if model is None else open_checkpoint(model, weights=False).read_architecture(),
        isa=isa,
        num_threads=num_threads,
        progress=show_progress,
    )
    if as_json:
        typer.echo(json.dumps(report.to_json()))
        return
    show_progress("")
    for line in describe_ranks(report):
        typer.echo(line)


def show_progress(text: str) -> None:
    """Replace the last line of a terminal."""
    if sys.stderr.isatty():
        typer.echo(f"\r\x1b[K{text}", nl=False, err=True)


def describe_ranks(report: RanksReport) -> Iterator[str]:
    """Yield the lines of a report."""
    count = len(report.ranks)
    yield f"processor  {report.processor}, {report.num_cores} usable cores, {_size(report.free_bytes)} free"
    yield f"kernels    {report.isa}"
    yield ""
    yield f"{'rank':6}{'threads':>8}  {'NUMA node':12}{'read, all at once':20}cores"
    for each in report.ranks:
        nodes, rate = ", ".join(map(str, each.nodes)), f"{each.read_bytes_per_s / 1e9:.1f} GB/s"
        yield f"{each.rank:<6}{each.num_threads:>8}  {nodes:12}{rate:20}{_ranges(each.cores)}"
    yield ""
    for node in report.nodes:
        members = [str(each.rank) for each in report.ranks if node.node in each.nodes]
        memory = "unknown memory"
        if node.total_bytes is not None and node.unused_bytes is not None:
            memory = f"{_size(node.total_bytes)} of memory, {_size(node.unused_bytes)} unused"
        yield f"node {node.node:<6}{memory}, rank{'s' * (len(members) > 1)} {', '.join(members)}"
    share, threads = report.read_bytes_per_s / report.one_process_bytes_per_s, report.one_process_threads
    yield (
        f"read       {count} ranks together {report.read_bytes_per_s / 1e9:.1f} GB/s; one process on "
        f"{threads} thread{'s' * (threads > 1)} {report.one_process_bytes_per_s / 1e9:.1f} GB/s: {share:.2f} times"
    )
    for exchange in report.exchanges:
        rows = f"{exchange.rows} row{'s' * (exchange.rows > 1)}"
        yield (
            f"exchange   {rows}, {exchange.num_bytes / 1024:.0f} KiB: {1e6 * exchange.seconds:.1f} us "
            f"(at best {1e6 * exchange.best_s:.1f}), {exchange.bytes_per_s / 1e9:.2f} GB/s"
        )
    yield (
        f"shared     {_size(report.shared_bytes)} of memory for exchanges, huge pages: {report.huge_pages}. "
        "Free memory limits it, not the size of /dev/shm"
    )
    yield from _warnings(report)


def _warnings(report: RanksReport) -> Iterator[str]:
    for each in report.ranks:
        if each.spans_nodes:
            nodes = " and ".join(map(str, each.nodes))
            yield (
                f"SLOW       rank {each.rank} has cores of NUMA nodes {nodes}, and reads a part of its memory from the "
                "other node. Choose a number of ranks that divides the cores of each node"
            )
    if len(report.nodes) == 1:
        yield "note       all ranks share the memory of one NUMA node: one process with all cores is usually faster"


def _ranges(cores: Sequence[int]) -> str:
    """Format core numbers, such as 0-3, 8."""
    runs = []
    for _, run in groupby(enumerate(sorted(cores)), lambda each: each[1] - each[0]):
        numbers = [number for _, number in run]
        runs.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ", ".join(runs)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / 2**20:.0f} MiB"
