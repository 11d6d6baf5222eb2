"""Processes that write into one directory and are killed while they write."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kv_transfer import disk_blocks
from kv_transfer.disk_blocks import BLOCK_BYTES, NUM_KEYS, key_of, load, write_and_read
from kv_transfer.test_disk import files

from octavo.kv_transfer.disk import DiskStore
from octavo.kv_transfer.disk_file import file_bytes

MAX_BYTES = 40 * file_bytes(1, BLOCK_BYTES)


def start(directory, seed, max_bytes=MAX_BYTES):
    process = subprocess.Popen(
        [sys.executable, disk_blocks.__file__, str(directory), str(max_bytes), str(seed)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"ready\n"
    return process


def used_bytes(directory):
    """Return the bytes of all files at one moment, while the lock prevents changes."""
    store = DiskStore(directory, BLOCK_BYTES, 1 << 30)
    with store._directory._mutex, store._directory._locked():
        return sum(path.stat().st_size for path in directory.iterdir() if path.name != "lock")


def check(directory):
    """Check a directory after its writer was killed: right blocks, the size limit, and no temporary files."""
    assert used_bytes(directory) <= MAX_BYTES
    store = DiskStore(directory, BLOCK_BYTES, MAX_BYTES)
    found = [key_of(number) for number in range(NUM_KEYS + 8) if store.num_matched([key_of(number)])]
    assert len(found) == store.stats().num_blocks
    assert all(load(store, [key]) for key in found)
    assert (store.stats().num_corrupt, store.stats().num_errors, store.stats().error) == (0, 0, "")
    assert (files(directory, ".tmp"), files(directory, ".bad")) == ([], [])
    assert store.stats().num_bytes == sum(path.stat().st_size for path in files(directory))
    return len(found)


def kill_often(directory, times):
    rng, found = random.Random(times), 0
    for seed in range(times):
        process = start(directory, seed)
        try:
            time.sleep(rng.uniform(0.0, 0.2))  # the time until it is killed
            assert process.poll() is None
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        found += check(directory)
    assert found


@pytest.mark.turn(8)
def test_directory_stays_valid_after_writer_is_killed(tmp_path):
    kill_often(tmp_path / "kv", 3)


@pytest.mark.slow
def test_directory_stays_valid_after_50_killed_writers(tmp_path):
    kill_often(tmp_path / "kv", 50)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("stop", ["begun", "half written", "synced", "renamed"])
def test_directory_stays_valid_after_kill_at_each_save_step(tmp_path, stop):
    """The writer is killed exactly at this point."""
    directory = tmp_path / "kv"
    calls = {
        "begun": "os.pwritev = lambda *_: os.kill(os.getpid(), 9)",
        "half written": (
            "pwritev = os.pwritev\n"
            "os.pwritev = lambda fd, views, at: (pwritev(fd, [views[0][:9000]], at), os.kill(os.getpid(), 9))"
        ),
        "synced": "os.fsync = lambda *_: os.kill(os.getpid(), 9)",
        "renamed": "disk_directory.sync_directory = lambda _: os.kill(os.getpid(), 9)",
    }
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom kv_transfer.disk_blocks import *\n"
        "from octavo.kv_transfer import disk_directory\nfrom octavo.kv_transfer.disk import DiskStore\n"
        f"store = DiskStore(Path(sys.argv[1]), BLOCK_BYTES, {MAX_BYTES})\nsave(store, keys_from(0, 2))\n"
        f"{calls[stop]}\nsave(store, keys_from(2, 30 if {stop == 'half written'} else 2))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(directory)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        check=False,
    )
    assert done.returncode == -9
    assert len(files(directory, ".tmp")) == (0 if stop == "renamed" else 1)
    assert check(directory) == (4 if stop == "renamed" else 2)


@pytest.mark.turn(12)
def test_concurrent_processes_keep_directory_within_limit(tmp_path):
    directory = tmp_path / "kv"
    processes = [start(directory, seed) for seed in (1, 2)]
    try:
        store, rng = DiskStore(directory, BLOCK_BYTES, MAX_BYTES), random.Random(3)
        until = time.monotonic() + 1.5
        while time.monotonic() < until or not store.stats().num_evicted:
            assert time.monotonic() < until + 30
            write_and_read(store, rng)
            assert used_bytes(directory) <= MAX_BYTES
        assert all(process.poll() is None for process in processes)
        assert store.stats().num_corrupt == store.stats().num_errors == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()
    assert check(directory)
