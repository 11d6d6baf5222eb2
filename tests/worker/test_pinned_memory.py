"""Pinned memory takes as many bytes as are asked for, and is released."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from octavo.errors import ConfigError
from octavo.worker import pinned_memory as module
from octavo.worker.pinned_memory import pinned_memory, rounded_bytes


class Runtime:
    """Replaces `torch.cuda.cudart()`."""

    def __init__(self, result=0):
        self.result = result
        self.registered = {}
        self.num_waits = 0

    def cudaHostRegister(self, address, num_bytes, flags):
        assert address % 4096 == 0
        assert flags == 1
        if self.result == 0:
            self.registered[address] = num_bytes
        return self.result

    def cudaHostUnregister(self, address):
        assert self.num_waits, "the device may still copy"
        assert is_mapped(address), "it is unmapped before"
        del self.registered[address]

    def cudaGetErrorString(self, result):
        return f"error {result}"

    def synchronize(self):
        self.num_waits += 1


def is_mapped(address):
    lines = Path("/proc/self/maps").read_text().splitlines()
    areas = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(first <= address < end for first, end in areas)


@pytest.fixture
def make_runtime(monkeypatch):
    """Return a function that installs a runtime; `pinned` has the sizes that torch's allocator was asked for."""

    def make(result=0):
        runtime, empty = Runtime(result), torch.empty
        runtime.pinned, runtime.num_cleared = [], 0

        def watch(*shape, pin_memory=False, **options):
            if pin_memory:
                runtime.pinned.append(*shape)
            return empty(*shape, **options)

        def clear():
            runtime.num_cleared += 1

        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(torch.cuda, "synchronize", runtime.synchronize)
        monkeypatch.setattr(torch, "empty", watch)
        monkeypatch.setattr(module, "_clear_error", clear)
        return runtime

    return make


def test_lasting_memory_is_registered_with_its_exact_size(make_runtime):
    runtime = make_runtime()
    memory = pinned_memory((1 << 20) + 1)
    assert runtime.registered == {memory.data_ptr(): (1 << 20) + 1}
    assert runtime.pinned == []
    assert not memory.any()
    memory.fill_(3)


@pytest.mark.turn(8)
def test_last_tensor_unregisters_memory_before_it_is_unmapped(make_runtime):
    runtime = make_runtime()
    memory = pinned_memory(40_000)
    address, part = memory.data_ptr(), memory.view(torch.int16)[5:9]
    del memory
    gc.collect()
    assert runtime.registered
    assert is_mapped(address)
    part.fill_(1)
    del part
    gc.collect()
    assert not runtime.registered
    assert runtime.num_waits == 1


def test_brief_or_empty_memory_comes_from_torch(make_runtime):
    runtime = make_runtime()
    assert len(pinned_memory(5000, is_brief=True)) == 5000
    assert len(pinned_memory(0)) == 0
    assert runtime.pinned == [5000, 0]
    assert not runtime.registered


def test_refused_memory_comes_from_torch_with_warning(make_runtime, caplog):
    runtime = make_runtime(result=2)
    assert len(pinned_memory(5_000)) == 5_000
    assert (runtime.pinned, runtime.num_cleared) == ([5_000], 1)
    assert "cannot register 5,000 bytes of host memory (error 2): torch pins 8,192 bytes" in caplog.text


def test_refused_memory_is_error_if_rounded_size_is_not_free(make_runtime, monkeypatch):
    make_runtime(result=2)
    monkeypatch.setattr(module, "free_bytes", lambda _: 6_000)
    with pytest.raises(ConfigError, match=r"5,000 bytes .*\(error 2\).* pin 8,192 bytes, but only 6,000 are free"):
        pinned_memory(5_000)


def test_rounded_bytes_are_next_power_of_two():
    assert [rounded_bytes(size) for size in (0, 1, 2, 3, 4096, 4097)] == [0, 1, 2, 4, 4096, 8192]
