"""A disk that is full, failing, read-only or gone: existing blocks are served, and the rest are misses.

These faults are real: a limit on file sizes, a full file system (if one can be mounted), and directories without rights
(as another user, if tests run as root). The other errors are raised in place of system calls.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import tracemalloc
from pathlib import Path

import pytest
from kv_transfer.disk_blocks import BLOCK_BYTES, key_of, keys_from, load, save
from kv_transfer.test_disk import files, listed, store_in

from octavo.kv_transfer import disk_directory
from octavo.kv_transfer.disk import DiskStore
from octavo.kv_transfer.disk_file import file_bytes
from octavo.kv_transfer.interface import StoreError

TESTS = Path(__file__).parents[1]


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "kv"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def fail(number):
    def call(*_, **__):
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("call", ["pwritev", "fsync", "ftruncate"])
def test_failed_writes_are_retried_after_growing_pause(directory, monkeypatch, caplog, call, number):
    caplog.set_level(logging.INFO)
    clock = Clock()
    store, keys = store_in(directory, clock=clock), keys_from(0, 4)
    save(store, keys[:2])
    with monkeypatch.context() as broken:
        broken.setattr(os, call, fail(number))
        for pause in [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]:
            assert save(store, keys) == 2
            assert files(directory, ".tmp") == []
            assert (store.lacks(keys), load(store, keys)) == (set(), 2)  # it wants no more, and serves all
            clock.now += pause - 0.1
            assert (save(store, keys), store.lacks(keys)) == (2, set())
            clock.now += 0.1
            assert store.lacks(keys) == set(keys[2:])
    assert (store.stats().num_errors, len(caplog.records)) == (8, 1)
    assert os.strerror(number) in store.stats().error
    assert (save(store, keys), load(store, keys), store.stats().error) == (4, 4, "")
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert store_in(directory).stats().num_blocks == 4


def test_partial_writes_and_reads_are_completed(directory, monkeypatch):
    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: pwritev(fd, [views[0][:700]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:300]], at))
    store = store_in(directory)
    assert save(store, keys_from(0, 3)) == load(store, keys_from(0, 3)) == 3


def test_zero_byte_write_fails_save(directory, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    store = store_in(directory)
    assert (save(store, [key_of(0)]), files(directory)) == (0, [])
    assert store.stats().num_errors == 1


def test_failed_directory_sync_counts_as_error(directory, monkeypatch):
    store = store_in(directory)
    monkeypatch.setattr(disk_directory, "sync_directory", fail(errno.EIO))
    save(store, [key_of(0)])
    assert (store.stats().num_errors, load(store, [key_of(0)])) == (1, 1)


def test_file_with_read_error_is_set_aside(directory, monkeypatch):
    store = store_in(directory)
    save(store, [key_of(0)])
    save(store, [key_of(1)])
    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", fail(errno.EIO))
        assert load(store, keys_from(0, 2)) == 0
    assert (store.stats().num_errors, store.stats().num_corrupt) == (1, 0)
    assert (store.num_matched(keys_from(0, 2)), load(store, [key_of(1)])) == (0, 1)
    assert len(files(directory, ".bad")) == 1


def test_file_unreadable_at_startup_is_retried(directory, monkeypatch):
    save(store_in(directory), [key_of(0)])
    with monkeypatch.context() as broken:
        broken.setattr(os, "pread", fail(errno.ENOMEM))
        broken.setattr(disk_directory, "_UNREADABLE_S", 0.0)
        store = store_in(directory)
        assert (store.stats().num_blocks, store.stats().num_bytes) == (0, file_bytes(1, BLOCK_BYTES))
    assert listed(store).num_matched([key_of(0)]) == load(store, [key_of(0)]) == 1


def test_descriptor_limit_raises_store_error_and_keeps_files(directory, monkeypatch):
    store = store_in(directory)
    save(store, [key_of(0)])
    with monkeypatch.context() as broken:
        broken.setattr(os, "open", fail(errno.EMFILE))
        with pytest.raises(StoreError, match=r"cannot be read.*Too many open files"):
            load(store, [key_of(0)])
    assert load(store, [key_of(0)]) == 1
    assert store.stats().num_errors == 1


def test_deleted_directory_is_a_miss_and_recreated(directory):
    store = store_in(directory)
    save(store, [key_of(0)])
    shutil.rmtree(directory)
    assert (store.num_matched([key_of(0)]), load(store, [key_of(0)])) == (0, 0)
    assert save(store, [key_of(1)]) == load(store, [key_of(1)]) == 1
    assert (store.stats().num_bytes, store.stats().num_errors) == (file_bytes(1, BLOCK_BYTES), 0)


def test_held_lock_blocks_only_saves(directory, monkeypatch):
    store = store_in(directory)
    save(store, [key_of(0)])
    monkeypatch.setattr(disk_directory, "_LOCK_WAIT_S", 0.01)
    with (directory / "lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert (save(store, [key_of(1)]), load(store, [key_of(0)])) == (0, 1)
        assert "another process holds" in store.stats().error


def test_deleted_lock_file_is_recreated(directory):
    store = store_in(directory)
    save(store, [key_of(0)])
    (directory / "lock").unlink()
    assert save(store, [key_of(1)]) == 1


def test_file_instead_of_directory_raises_store_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be read"):
        store_in(tmp_path / "file")


# --- real -------------------------------------------------------------------------------------------------------------


def run_script(directory, script):
    script = textwrap.dedent(script)
    head = (
        "import os, resource, sys\nfrom pathlib import Path\nfrom kv_transfer.disk_blocks import *\n"
        "from octavo.kv_transfer.disk import DiskStore\ndirectory = Path(sys.argv[1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", head + script, str(directory)],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_file_size_rlimit_stops_saves_and_keeps_loads(directory):
    told = run_script(
        directory,
        """
        store = DiskStore(directory, BLOCK_BYTES, 1 << 20)
        assert save(store, keys_from(0, 1)) == 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
        assert save(store, keys_from(0, 9)) == 1 == load(store, keys_from(0, 9))
        assert "File too large" in store.stats().error, store.stats()
        assert sorted(path.suffix for path in directory.iterdir()) == ["", ".kv"]
        """,
    )
    assert "no KV can be written" in told


def test_full_file_system_stops_saves_and_keeps_loads(tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file system may be mounted here")
    try:
        clock = Clock()
        store = DiskStore(tmp_path / "kv", BLOCK_BYTES, 1 << 20, clock=clock)
        keys = keys_from(0, 16)
        kept = [save(store, [key]) for key in keys]
        assert kept == sorted(kept, reverse=True)
        assert 0 < sum(kept) < 16
        assert "No space left" in store.stats().error
        assert [load(store, [key]) for key in keys] == kept
        store.forget(keys[:4])
        clock.now += 1
        assert save(store, keys[:2]) == load(store, keys[:2]) == 2
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


WITHOUT_RIGHTS = """
store = DiskStore(directory, BLOCK_BYTES, 1 << 20)
assert save(store, keys_from(0, 1)) == 1
directory.chmod(0o500)
store = DiskStore(directory, BLOCK_BYTES, 1 << 20)
assert store.num_matched(keys_from(0, 1)) == load(store, keys_from(0, 1)) == 1
assert save(store, keys_from(1, 1)) == 0 and "Permission denied" in store.stats().error
directory.chmod(0)
try:
    DiskStore(directory, BLOCK_BYTES, 1 << 20)
except Exception as error:
    assert "cannot be read" in str(error), error
else:
    raise SystemExit("opened")
assert load(DiskStore(directory.with_name("other"), BLOCK_BYTES, 1 << 20), keys_from(0, 1)) == 0
"""


def test_read_only_directory_serves_loads_and_fails_saves():
    user = "os.setgid(65534), os.setuid(65534)\n" if os.geteuid() == 0 else ""
    place = Path(tempfile.mkdtemp())  # unlike `tmp_path`, the other user may enter it
    place.chmod(0o777)
    try:
        told = run_script(place / "kv", user + WITHOUT_RIGHTS)
        assert "no KV can be written" in told
    finally:
        (place / "kv").chmod(0o700)
        shutil.rmtree(place)


# --- load on other threads
# ---------------------------------------------------------------------------------------------


@pytest.mark.turn(12)
def test_large_save_and_load_yield_to_threads_and_bound_memory(directory):
    num_blocks, block_bytes = 3000, 1 << 14
    store = DiskStore(directory, block_bytes, 1 << 28)
    keys, content = keys_from(0, num_blocks), memoryview(bytearray(block_bytes))
    blocks = [content] * num_blocks
    store.save(keys[:1], blocks[:1])
    longest, stopped = [0.0], threading.Event()
    clock = time.pthread_getcpuclockid(threading.get_ident())  # not wall time: other processes may use the processor

    def beat():
        last = time.clock_gettime(clock)
        while not stopped.wait(0.001):
            now = time.clock_gettime(clock)
            longest[0] = max(longest[0], now - last)
            last = now

    beating = threading.Thread(target=beat)
    gc.collect()
    gc.disable()  # a full collection holds the interpreter's lock, which is not the subject here
    beating.start()
    tracemalloc.start()
    began = time.clock_gettime(clock)
    try:
        assert store.save(keys, blocks) == num_blocks
        assert store.num_matched(keys) == store.load(keys, blocks) == num_blocks
        taken = time.clock_gettime(clock) - began
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        stopped.set()
        beating.join()
        gc.enable()
    assert peak < num_blocks * 1000  # keys, checksums and index entries, but none of the 49 MB of content
    assert longest[0] < taken / 4
