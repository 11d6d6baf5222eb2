"""Arrays of steps in flight, copied to and from a device that copies late."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from late_queue import LateQueue, OverwrittenError

from octavo.worker import host_copies
from octavo.worker.host_copies import PinnedMemory, SharedMemory, create_host_copies

CPU = torch.device("cpu")
ARRAYS = [
    np.arange(7),
    np.arange(6, dtype=np.int32).reshape(3, 2)[:, ::-1],  # not contiguous
    np.array([True, False]),
    np.zeros((0, 3), dtype=np.float32),
    np.arange(40_000, dtype=np.float32),  # more bytes than a set has at first
    np.arange(9, dtype=np.float64),
]


def pinned(queue, num_sets=host_copies.NUM_SETS):
    return PinnedMemory(CPU, queue, num_sets)


@pytest.mark.parametrize("copies", [SharedMemory(), pinned(LateQueue())], ids=["shared", "pinned"])
def test_arrays_are_copied_to_device_and_back_unchanged(copies):
    for _ in range(3):
        copies.begin()
        on_device = [copies.to_device(array) for array in ARRAYS]
        on_host = [copies.to_host(tensor) for tensor in on_device]
        copies.mark().synchronize()
        for array, there, back in zip(ARRAYS, on_device, on_host, strict=True):
            assert there.numpy().dtype == back.numpy().dtype == array.dtype
            np.testing.assert_array_equal(there.numpy(), array)
            np.testing.assert_array_equal(back.numpy(), array)


def test_arrays_are_copied_to_device_together_in_one_copy():
    queue = LateQueue()
    copies = pinned(queue)
    for number in range(1, 4):
        copies.begin()
        on_device = copies.to_device_together(ARRAYS)
        assert queue.num_to_device == number
        for array, there in zip(ARRAYS, on_device, strict=True):
            assert there.numpy().dtype == array.dtype
            assert there.is_contiguous()
            assert there.data_ptr() % 16 == on_device[0].data_ptr() % 16, "kernels read 16 bytes at once"
            np.testing.assert_array_equal(there.numpy(), array)
    copies.mark().synchronize()
    assert copies.to_device_together([]) == []


def test_sets_use_all_of_their_pinned_memory():
    """torch's allocator takes powers of two."""
    queue = LateQueue()
    copies = pinned(queue)
    for count in (1, 50_001, 300_001):
        copies.begin()
        copies.to_device(np.arange(count))
    assert {len(memory) & (len(memory) - 1) for memory in queue.memory.values()} == {0}
    assert max(map(len, queue.memory.values())) > 8 * 300_001


def test_array_may_change_after_to_device_returns():
    queue, array = LateQueue(), np.arange(5)
    copies = pinned(queue)
    copies.begin()
    copies.to_device(array)
    array[:] = 0
    copies.mark().synchronize()


def launch(copies, number):
    copies.begin()
    copies.to_device(np.full(3, number))
    return copies.to_host(torch.tensor([number])), copies.mark()


def test_second_step_is_launched_without_wait():
    queue = LateQueue()
    copies = pinned(queue)
    before, end = launch(copies, 0)
    for number in range(1, 6):
        num_waits = queue.num_waits
        read, next_end = launch(copies, number)
        assert queue.num_waits == num_waits, "the launch waited for the step before"
        assert before.item() != number - 1, "what is read is there only when somebody waits for it"
        end.synchronize()
        assert before.item() == number - 1
        before, end = read, next_end


def test_launch_with_one_pinned_set_waits_for_previous_step(monkeypatch):
    queue = LateQueue()
    copies = pinned(queue, num_sets=1)
    _, end = launch(copies, 0)
    _, end = launch(copies, 1)
    assert queue.num_waits == 1
    end.synchronize()
    monkeypatch.setattr(host_copies._PinnedSet, "rewind", lambda self: setattr(self, "_num_used", 0))
    _, end = launch(copies, 2)
    launch(copies, 3)
    with pytest.raises(OverwrittenError, match=r"\[2, .* became \[3, "):
        end.synchronize()


def test_third_step_waits_for_first():
    queue = LateQueue()
    copies = pinned(queue)
    for number in range(2):
        launch(copies, number)
    assert queue.num_waits == 0
    launch(copies, 2)
    assert (queue.num_waits, queue.num_made) == (1, 2)


def test_gpu_uses_pinned_memory_for_host_copies(monkeypatch):
    assert isinstance(create_host_copies(CPU), SharedMemory)
    asked, empty = [], torch.empty

    def watch(*shape, **options):
        asked.append(options.pop("pin_memory", False))
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", watch)
    copies = create_host_copies(torch.device("cuda"))
    assert isinstance(copies, PinnedMemory)
    assert asked == [True] * host_copies.NUM_SETS
