"""Cores, caches, cgroups."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.config import threads_from_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CPU_INFO = Path("/proc/cpuinfo")
_CPUS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_LEAST_COLD_BYTES, _MOST_COLD_BYTES = 192 << 20, 512 << 20


def default_num_threads() -> int:
    """Return OMP_NUM_THREADS if set, otherwise the number of usable cores, limited by cgroups."""
    return threads_from_environment() or max(int(min(cpu_quota(), len(usable_cores()))), 1)


def usable_cores() -> list[int]:
    """Return one logical CPU per physical core that this process may use."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores: dict[str, int] = {}
    for cpu in sorted(allowed):
        siblings = "".join(read_lines(_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list")).strip()
        cores.setdefault(siblings or str(cpu), cpu)
    return list(cores.values())


def cores_of_rank(rank: int, count: int) -> list[int]:
    """Return a rank's part of the usable cores, by NUMA node; all cores if its part is empty."""
    cores = sorted(usable_cores(), key=lambda cpu: (numa_node(cpu), cpu))
    return cores[len(cores) * rank // count : len(cores) * (rank + 1) // count] or cores


def threads_of_rank(count: int, num_threads: int | None) -> int:
    """Return each rank's number of threads. num_threads: of all ranks together, by default `default_num_threads()`."""
    return max(1, (num_threads or default_num_threads()) // count)


def numa_node(cpu: int) -> int:
    """Return the NUMA node of a logical CPU; 0 if unknown."""
    nodes = (path.name.removeprefix("node") for path in (_CPUS / f"cpu{cpu}").glob("node*"))
    return next((int(node) for node in nodes if node.isdigit()), 0)


def node_bytes(node: int) -> tuple[int, int] | None:
    """Return a NUMA node's total and unused bytes of memory, or None if unknown. File caches count as used."""
    sizes = {}
    for line in read_lines(_NODES / f"node{node}" / "meminfo"):  # "Node 0 MemTotal:  16384 kB"
        _, _, name, size, *_ = line.split()
        sizes[name] = size
    total, unused = sizes.get("MemTotal:", ""), sizes.get("MemFree:", "")
    return (int(total) << 10, int(unused) << 10) if total.isdigit() and unused.isdigit() else None


def huge_pages_of_shared_memory() -> str:
    """Return the system's setting of huge pages for shared memory, such as "never"; "unknown" if unreadable."""
    choices = "".join(read_lines(_HUGE_PAGES / "shmem_enabled"))  # "always within_size advise [never] deny force"
    return choices.partition("[")[2].partition("]")[0] or "unknown"


def processor_name() -> str:
    """Return the name."""
    return _describe_processor().get("model name", "") or platform.processor() or platform.machine()


def processor_identity() -> list[str]:
    """Return the processor's properties by which libraries choose code."""
    names = ("cpu family", "model", "stepping", "microcode", "flags", "Features", "CPU part", "CPU revision")
    described = _describe_processor()
    return [processor_name(), *(described[name] for name in names if name in described)]


def _describe_processor() -> dict[str, str]:
    described: dict[str, str] = {}
    for line in read_lines(_CPU_INFO):
        name, colon, value = line.partition(":")
        if not colon:
            break
        described[name.strip()] = value.strip()
    return described


def cold_bytes() -> int:
    """Return how many bytes a benchmark reads between repetitions, so that caches are cold.

    Twice the third-level caches, at least 192 and at most 512 MiB.
    """
    return max(_LEAST_COLD_BYTES, min(2 * third_level_cache_bytes(), _MOST_COLD_BYTES))


def third_level_cache_bytes() -> int:
    """Return third-level caches' total bytes; 0 if unknown."""
    sizes: dict[str, int] = {}
    for cpu in usable_cores():
        cache = _CPUS / f"cpu{cpu}" / "cache" / "index3"
        size = "".join(read_lines(cache / "size")).strip()  # "49152K"
        shared_by = "".join(read_lines(cache / "shared_cpu_list")).strip()
        if size.endswith("K") and size[:-1].isdigit():
            sizes[shared_by or str(cpu)] = int(size[:-1]) << 10
    return sum(sizes.values())


def cpu_quota() -> float:
    """Return how many CPUs cgroups grant, or inf."""
    quota = math.inf
    for folder in cgroup_folders("cpu"):
        limit = "".join(read_lines(folder / "cpu.max")).split()  # version 2: "200000 100000", or "max 100000"
        if not limit:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")  # version 1; -1 is no limit
            limit = ["".join(read_lines(folder / name)).strip() for name in names]
        if all(part.isdigit() for part in limit) and int(limit[1]):
            quota = min(quota, int(limit[0]) / int(limit[1]))
    return quota


def cgroup_folders(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and its parents, for cgroup versions 2 and 1."""
    for line in read_lines(_OWN_CGROUPS):
        _, controllers, cgroup = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controllers
        inner = root / cgroup.strip("/")
        for folder in (inner, *inner.parents):
            yield folder
            if folder == root:
                break


def read_lines(path: Path) -> list[str]:
    """Return a file's lines; [] if unreadable."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def touch_pages(address: int, num_bytes: int, stop: int) -> None:
    """Allocate memory by touching each page in idle processor time. Does nothing without compiled kernels.

    Keeps the content, even if other threads write meanwhile. stop: address of a byte that ends the call if not zero.
    """
    try:
        from octavo import _kernels  # noqa: PLC0415
    except ImportError:
        return
    _kernels.touch_pages(address, num_bytes, stop)
