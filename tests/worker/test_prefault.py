"""Memory is taken from the system in the background, and keeps its content."""

from __future__ import annotations

import gc
import mmap
import sys
import threading

import psutil
import pytest
import torch

from octavo import LLM
from octavo.assets import BUILT_IN_DRAFT
from octavo.kernels.machine import touch_pages
from octavo.kernels.recording import _ViewsOnly as views_only
from octavo.worker.prefault import Prefault

NUM_BYTES = 96 << 20


def touched_bytes(data: torch.Tensor) -> int:
    """Return the resident bytes of a mapping."""
    for each in psutil.Process().memory_maps(grouped=False):
        first, last = (int(bound, 16) for bound in each.addr.split("-"))
        if first <= data.data_ptr() < last:
            return each.anonymous
    raise LookupError("no such memory")


@pytest.fixture
def memory():
    """Memory in a mapping of its own."""
    with mmap.mmap(-1, NUM_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapped:
        data = torch.frombuffer(mapped, dtype=torch.uint8)
        yield data
        del data
        gc.collect()


def held_up(monkeypatch):
    """Hold up touching after its start. Returns two events: it has begun, it may continue."""
    begun, goes_on = threading.Event(), threading.Event()

    def touch(address, num_bytes, stop):
        begun.set()
        assert goes_on.wait(20)

    monkeypatch.setattr("octavo.worker.prefault.touch_pages", touch)
    return begun, goes_on


needs_proc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
needs_kernels = pytest.mark.usefixtures("compiled_extension")


@pytest.fixture
def compiled_extension():
    pytest.importorskip("octavo._kernels")


@pytest.mark.turn(12)
@needs_proc
@needs_kernels
def test_prefault_touches_all_pages_and_keeps_content(memory):
    memory[: 8 << 20] = 7
    before = touched_bytes(memory)
    Prefault(memory)._thread.join()
    assert before < NUM_BYTES // 2
    assert touched_bytes(memory) >= NUM_BYTES
    assert bool((memory[: 8 << 20] == 7).all())
    assert not memory[8 << 20 :].any()


@needs_kernels
def test_prefault_keeps_concurrent_writes(memory):
    pages = memory.view(-1, 4096)[:, 0]
    touching = Prefault(memory)
    for round_ in range(1, 40):
        pages.fill_(round_)
        assert bool((pages == round_).all())
    touching._thread.join()


def test_prefault_stop_waits_for_thread(memory, monkeypatch):
    begun, goes_on = held_up(monkeypatch)
    touching = Prefault(memory)
    assert begun.wait(10)
    stopper = threading.Thread(target=touching.stop)
    stopper.start()
    stopper.join(0.2)
    assert stopper.is_alive()  # because the memory must not be freed before
    goes_on.set()
    stopper.join(10)
    assert not stopper.is_alive()
    assert not touching._thread.is_alive()


def test_prefault_can_be_stopped_during_recording(memory, monkeypatch):
    """A finalizer does this, and may run while another model is recorded."""
    begun, goes_on = held_up(monkeypatch)
    touching = Prefault(memory)
    assert begun.wait(10)
    goes_on.set()
    with views_only():
        touching.stop()
    assert not touching._thread.is_alive()


@needs_kernels
def test_touch_pages_returns_if_stop_is_set():
    data, stop = torch.zeros(4096, dtype=torch.uint8), torch.ones(1, dtype=torch.uint8)
    touch_pages(data.data_ptr(), 1 << 60, stop.data_ptr())  # no address beyond it could be touched


@pytest.mark.turn(8)
@needs_kernels
def test_only_explicit_kv_cache_size_is_prefaulted(monkeypatch):
    taken = []
    monkeypatch.setattr("octavo.worker.worker.Prefault", lambda data: taken.append(data.nbytes) or Prefault(data))
    LLM(device="cpu", kv_cache_memory_bytes=8 << 20)
    assert len(taken) == 1
    assert 7 << 20 < taken[0] <= 8 << 20
    LLM(device="cpu", num_gpu_blocks_override=16)
    assert len(taken) == 2
    LLM(device="cpu", max_num_seqs=2)
    assert len(taken) == 2
    config = {"method": "draft_model", "model": BUILT_IN_DRAFT}
    LLM(device="cpu", kv_cache_memory_bytes=8 << 20, max_num_seqs=2, speculative_config=config)
    assert len(taken) == 4, "that of a draft model, too"
    assert 7 << 20 < sum(taken[2:]) <= (8 << 20) + (1 << 19)  # includes scratch blocks


@pytest.mark.turn(8)
def test_prefault_thread_ends_with_engine(monkeypatch):
    begun, goes_on = held_up(monkeypatch)
    llm = [LLM(device="cpu", kv_cache_memory_bytes=8 << 20)]
    assert begun.wait(10)

    def release():
        llm.clear()
        gc.collect()

    owner = threading.Thread(target=release)
    owner.start()
    owner.join(0.5)
    assert owner.is_alive()
    goes_on.set()
    owner.join(10)
    assert not [thread for thread in threading.enumerate() if thread.name == "octavo-kv-memory"]
