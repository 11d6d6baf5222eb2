"""Copies between host memory and the device for the steps in flight: memory is not overwritten before it is copied.

On a GPU a copy is enqueued after the work of earlier steps, and is made when that work is done. Until then its source
on the host must not change. So the arrays of a step are copied from pinned memory of that step, and two steps use two
sets in turn. On a CPU nothing needs to be copied.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

NUM_SETS = 2  # sets of pinned memory: a step may be launched while the one before it is computed
_FIRST_BYTES = 1 << 16  # initial size of a set; it grows with its steps
_ALIGNMENT = 64  # bytes; of each array there and on the device, where kernels read 16 bytes at a time


class Mark(Protocol):
    """A position in the order of a device's work."""

    def synchronize(self) -> None:
        """Wait until all earlier work is done. Raises the error of that work, if any."""
        ...


class DeviceQueue(Protocol):
    """A device's work, done in the order in which it is enqueued."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """Return uint8 [num_bytes] of host memory that the device itself can copy from and to."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy. One of the two tensors is in such host memory, the other one on the device."""
        ...

    def mark(self) -> Mark:
        """Return the position after all enqueued work."""
        ...


class CudaQueue:
    """The current stream of a GPU."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """Return pinned memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy without waiting."""
        target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        """Return an event."""
        event: Mark = torch.cuda.current_stream().record_event()
        return event


class HostCopies(Protocol):
    """Copies arrays of the steps in flight. Call `begin` in each step before its first array."""

    device: torch.device

    def begin(self) -> None:
        """Begin a step."""
        ...

    def to_device(self, array: NDArray[np.generic]) -> Tensor:
        """Return an array as a tensor on the device, for work that is enqueued later.

        The array may be changed afterwards, unless the device is a CPU: then array and tensor may share memory.
        """
        ...

    def to_device_together(self, arrays: Sequence[NDArray[np.generic]]) -> list[Tensor]:
        """Return arrays as tensors on the device, as `to_device` does, with a single copy if any is needed.

        The tensors share one piece of device memory, which is freed when none of them is used any more.
        """
        ...

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor in host memory that has this one's content when a later `mark` is passed.

        On a CPU it is the tensor itself: a caller that changes it later must copy it first.
        """
        ...

    def mark(self) -> Mark:
        """Return the position after all enqueued work."""
        ...


class _Passed:
    """The mark of a device without pending work."""

    def synchronize(self) -> None:
        """Return immediately."""


class SharedMemory:
    """`HostCopies` of a CPU: host memory is device memory."""

    device = torch.device("cpu")
    _passed = _Passed()

    def begin(self) -> None:
        """Do nothing."""

    def to_device(self, array: NDArray[np.generic]) -> Tensor:
        """Return a tensor that shares the array's memory if that is contiguous."""
        return torch.from_numpy(np.ascontiguousarray(array))

    def to_device_together(self, arrays: Sequence[NDArray[np.generic]]) -> list[Tensor]:
        """Return tensors that share the memory of contiguous arrays."""
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself."""
        return tensor

    def mark(self) -> Mark:
        """Return a mark that is already passed."""
        return self._passed


class _PinnedSet:
    """Memory that the arrays of one step are copied from, one array after another."""

    def __init__(self, queue: DeviceQueue) -> None:
        self._queue = queue
        self._memory = queue.host_memory(_FIRST_BYTES)
        self._full: list[Tensor] = []  # full pieces that this step's copies still read; freed by `rewind`
        self._num_used = 0
        self.last_copy: Mark | None = None  # mark after the copies of the set's last step

    def rewind(self) -> None:
        """Free all memory for another step, after waiting until nothing is copied from it."""
        if self.last_copy is not None:
            self.last_copy.synchronize()
        self._full.clear()
        self._num_used = 0

    def write(self, arrays: Sequence[NDArray[np.generic]], sizes: Sequence[int]) -> Tensor:
        """Return a copy of arrays in this memory, valid until `rewind`. sizes: bytes that each array takes there."""
        num_bytes = sum(sizes)
        if self._num_used + num_bytes > len(self._memory):
            self._full.append(self._memory)
            self._memory = self._queue.host_memory(2 * len(self._memory) + num_bytes)
            self._num_used = 0
        source = self._memory[self._num_used : self._num_used + num_bytes]
        self._num_used += num_bytes
        begin, written = 0, source.numpy()
        for array, size in zip(arrays, sizes, strict=True):
            np.copyto(written[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape), array)
            begin += size
        return source


class PinnedMemory:
    """`HostCopies` of a device with memory of its own, in `NUM_SETS` sets of pinned memory that are used in turn.

    A set is reused only when the device has made all copies from it. There is no wait if the step before the last was
    collected.
    """

    def __init__(self, device: torch.device, queue: DeviceQueue, num_sets: int = NUM_SETS) -> None:
        self.device = device
        self._queue = queue
        self._sets = [_PinnedSet(queue) for _ in range(num_sets)]
        self._number = 0

    def begin(self) -> None:
        """Switch to the set of the step before the last."""
        self._sets[self._number].last_copy = self._queue.mark()
        self._number = (self._number + 1) % len(self._sets)
        self._sets[self._number].rewind()

    def to_device(self, array: NDArray[np.generic]) -> Tensor:
        """Return a new tensor on the device; the copy into it, from this step's set, is enqueued."""
        (tensor,) = self.to_device_together([array])
        return tensor

    def to_device_together(self, arrays: Sequence[NDArray[np.generic]]) -> list[Tensor]:
        """Return parts of one new tensor on the device; the copy into it, from this step's set, is enqueued."""
        sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
        source = self._sets[self._number].write(arrays, sizes)
        target = torch.empty(len(source), dtype=torch.uint8, device=self.device)
        self._queue.copy(target, source)
        tensors: list[Tensor] = []
        whole: dict[np.dtype[np.generic], Tensor] = {}
        begin = 0
        for array, size in zip(arrays, sizes, strict=True):
            dtype = array.dtype
            if dtype not in whole:
                whole[dtype] = target.view(_torch_dtype(dtype))
            part = whole[dtype].narrow(0, begin // dtype.itemsize, array.size)
            tensors.append(part if array.ndim == 1 else part.view(array.shape))
            begin += size
        return tensors

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return new pinned memory, owned by the caller; the copy of the tensor into it is enqueued."""
        target = self._queue.host_memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        self._queue.copy(target, tensor)
        return target

    def mark(self) -> Mark:
        """Return the position after all enqueued work."""
        return self._queue.mark()


@cache
def _torch_dtype(dtype: np.dtype[np.generic]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def create_host_copies(device: torch.device) -> HostCopies:
    """Return the copies of a device."""
    return SharedMemory() if device.type == "cpu" else PinnedMemory(device, CudaQueue())
