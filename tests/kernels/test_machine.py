"""The number of threads follows physical cores, affinity and quota; threads are pinned if they use all cores. Cache
sizes decide how much memory is cold.
"""

import math
import os
import threading
from pathlib import Path

import pytest
from kernels_available import COMPILED

from octavo.kernels import machine
from octavo.kernels.machine import cpu_quota, default_num_threads, usable_cores


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A machine of two cores with two siblings each, and no limits."""
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        topology = tmp_path / "cpus" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(siblings + "\n")
    group = tmp_path / "cgroups" / "pod" / "box"
    group.mkdir(parents=True)
    (tmp_path / "own").write_text("0::/pod/box\n")
    monkeypatch.setattr(machine, "_CPUS", tmp_path / "cpus")
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "cgroups")
    monkeypatch.setattr(machine, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path


def test_default_is_one_thread_per_physical_core(host, monkeypatch):
    assert usable_cores() == [0, 1]
    assert default_num_threads() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {2, 3})
    assert usable_cores() == [2, 3]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {1, 3})
    assert usable_cores() == [1]


def test_every_cpu_counts_as_core_without_sibling_information(host, monkeypatch):
    monkeypatch.setattr(machine, "_CPUS", host / "nowhere")
    assert usable_cores() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("count", "num_threads", "threads"), [(1, None, 2), (2, None, 1), (3, None, 1), (2, 9, 4), (4, 8, 2)]
)
def test_threads_are_divided_among_ranks(host, count, num_threads, threads):
    assert machine.threads_of_rank(count, num_threads) == threads


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "Node 1 MemTotal:       16384 kB\nNode 1 MemFree:  1024 kB\nNode 1 HugePages_Total:  0\n",
            (16 << 20, 1 << 20),
        ),
        ("Node 1 MemTotal:       16384 kB\n", None),
        (None, None),
    ],
)
def test_memory_of_node_is_read(tmp_path, monkeypatch, text, found):
    monkeypatch.setattr(machine, "_NODES", tmp_path)
    if text is not None:
        (tmp_path / "node1").mkdir()
        (tmp_path / "node1" / "meminfo").write_text(text)
    assert machine.node_bytes(1) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [("always within_size [advise] never deny force\n", "advise"), ("", "unknown"), (None, "unknown")],
)
def test_setting_of_huge_pages_for_shared_memory_is_read(tmp_path, monkeypatch, text, found):
    monkeypatch.setattr(machine, "_HUGE_PAGES", tmp_path)
    if text is not None:
        (tmp_path / "shmem_enabled").write_text(text)
    assert machine.huge_pages_of_shared_memory() == found


@pytest.mark.parametrize(
    ("files", "quota", "threads"),
    [
        ({"pod/cpu.max": "max 100000"}, math.inf, 2),
        ({"pod/cpu.max": "150000 100000"}, 1.5, 1),
        ({"pod/cpu.max": "800000 100000", "pod/box/cpu.max": "50000 100000"}, 0.5, 1),
        ({"pod/box/cpu.max": "400000 100000"}, 4.0, 2),
    ],
)
def test_cgroup_quota_reduces_default_threads(host, files, quota, threads):
    """Then threads are not pinned, because processes with the same quota would be pinned to the same cores."""
    for name, text in files.items():
        (host / "cgroups" / name).write_text(text + "\n")
    assert cpu_quota() == quota
    assert default_num_threads() == threads
    assert usable_cores() == [0, 1]


@pytest.mark.parametrize(("text", "quota"), [("200000", 2.0), ("-1", math.inf)])
def test_cgroup_v1_quota_is_read(host, text, quota):
    (host / "own").write_text("4:memory:/elsewhere\n1:cpu,cpuacct:/box\n")
    folder = host / "cgroups" / "cpu,cpuacct" / "box"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text(text + "\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota() == quota


@pytest.mark.parametrize(
    ("caches", "mebibytes", "cold"),
    [
        ({}, 0, 192),
        ({0: ("32768K", "0-3")}, 32, 192),  # cpu 1 has no entry
        ({0: ("131072K", "0-3"), 1: ("131072K", "0-3")}, 128, 256),
        ({0: ("98304K", "0,2"), 1: ("98304K", "1,3")}, 192, 384),  # one cache each
        ({0: ("491520K", "0-3"), 1: ("491520K", "0-3")}, 480, 512),
        ({0: ("98304K", ""), 1: ("much", "1,3")}, 96, 192),
    ],
)
def test_cold_bytes_exceed_total_l3_cache(host, caches, mebibytes, cold):
    for cpu, (size, shared_by) in caches.items():
        for other in (cpu, cpu + 2):  # its sibling
            folder = host / "cpus" / f"cpu{other}" / "cache" / "index3"
            folder.mkdir(parents=True)
            (folder / "size").write_text(size + "\n")
            (folder / "shared_cpu_list").write_text(shared_by + "\n")
    assert machine.third_level_cache_bytes() == mebibytes << 20
    assert machine.cold_bytes() == cold << 20


def test_omp_num_threads_sets_default_threads(host, monkeypatch):
    for text, expected in (("3", 3), ("4,2", 4), ("0", 2), ("many", 2)):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert default_num_threads() == expected


def affinities(before):
    """Return the CPUs of each thread of this process that is not in `before`."""
    tasks = {path.name for path in Path("/proc/self/task").iterdir()} - before
    return sorted(tuple(sorted(os.sched_getaffinity(int(name)))) for name in tasks)


@pytest.mark.skipif(not COMPILED or len(usable_cores()) < 2, reason="needs the compiled kernels and two cores")
def test_threads_are_pinned_only_if_one_per_core():
    from octavo import _kernels

    before = {path.name for path in Path("/proc/self/task").iterdir()}
    mine = os.sched_getaffinity(threading.get_native_id())
    cores = usable_cores()
    pinned = _kernels.KernelSet("portable", len(cores), cores)
    assert affinities(before) == sorted((cpu,) for cpu in cores[1:])
    pinned.set_num_threads(len(cores) + 1)
    assert affinities(before) == [tuple(sorted(mine))] * len(cores)
    pinned.shutdown()
    assert os.sched_getaffinity(threading.get_native_id()) == mine  # the caller's affinity never changes
