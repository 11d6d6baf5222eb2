"""Pages of a mapped file are released and can be read again; other memory is never changed."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from octavo.runtime.process_memory import forget_pages, return_free_memory, returning_free_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def status_bytes(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def test_file_pages_are_released_and_read_again(tmp_path):
    path = tmp_path / "a file with spaces.safetensors"
    save_file({"a": torch.arange(8 << 20, dtype=torch.int32)}, path)
    with safe_open(path, framework="pt") as file:
        tensor = file.get_tensor("a")
        expected = int(tensor.sum())
        before = status_bytes("RssFile:")
        forget_pages(path, [(tensor.data_ptr(), tensor.nbytes)])
        assert status_bytes("RssFile:") < before - 0.9 * tensor.nbytes
        assert int(tensor.sum()) == expected


def test_anonymous_memory_keeps_content(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1 << 20)}, path)
    own = torch.ones(4 << 20)
    with safe_open(path, framework="pt") as file:
        mapped = file.get_tensor("a")
        forget_pages(path, [(own.data_ptr(), own.nbytes), (mapped.data_ptr(), own.nbytes)])
        forget_pages(tmp_path / "other.safetensors", [(own.data_ptr(), own.nbytes)])
        assert bool((own == 1).all())
        assert not mapped.any()


def test_free_heap_memory_is_returned_to_system():
    blocks = [bytearray(60_000) for _ in range(2000)]  # small enough to be allocated on the heap
    del blocks[:-1]  # the last one prevents the heap from shrinking by itself
    before = status_bytes("RssAnon:")
    return_free_memory()
    assert status_bytes("RssAnon:") < before - 60e6
    assert len(blocks) == 1


def test_returning_free_memory_limits_malloc_arenas():
    code = (
        "import ctypes, threading\nfrom contextlib import nullcontext\n"
        "from octavo.runtime.process_memory import returning_free_memory\n"
        "all_hold = threading.Barrier(6)\n"
        "def hold():\n    blocks = [bytearray(60_000) for _ in range(50)]\n    all_hold.wait()\n    del blocks\n"
        "with {}():\n"
        "    threads = [threading.Thread(target=hold) for _ in range(6)]\n"
        "    [each.start() for each in threads]\n    [each.join() for each in threads]\n"
        "ctypes.CDLL(None).malloc_stats()"
    )
    heaps = [
        subprocess.run(
            [sys.executable, "-c", code.format(name)], capture_output=True, text=True, check=True
        ).stderr.count("\nsystem bytes")
        for name in ("nullcontext", "returning_free_memory")
    ]
    assert heaps[1] < heaps[0]


def test_free_heap_memory_is_returned_periodically():
    blocks = [bytearray(60_000) for _ in range(2000)]
    num_threads = threading.active_count()
    with returning_free_memory(period_s=0.01):
        before = status_bytes("RssAnon:")
        del blocks[:-1]
        deadline = time.monotonic() + 30
        while status_bytes("RssAnon:") > before - 60e6:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert threading.active_count() == num_threads
    assert len(blocks) == 1
