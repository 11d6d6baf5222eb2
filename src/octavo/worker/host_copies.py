"""Copies between host memory and the device of the steps that are in flight: nothing is overwritten on its way.

On a GPU a copy is enqueued behind the work of the steps before, and is made when these are done. What it reads on the
host must stay as it is until then: so the arrays of a step go through pinned memory of that step, and two steps take
turns. On a CPU there is nothing to copy.
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

NUM_SETS = 2  # of pinned memory: a step may be launched while the one before is computed
_FIRST_BYTES = 1 << 16  # of a set; it grows with what its steps take
_ALIGNMENT = 64  # bytes, of each array there and on the device, where kernels read 16 at once


class Mark(Protocol):
    """A place in the order of a device's work."""

    def synchronize(self) -> None:
        """Wait until all work before it is done. Raises what that work failed with."""
        ...


class DeviceQueue(Protocol):
    """A device's work, which it does in order, later than it is enqueued."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """Return uint8 [num_bytes] of host memory that the device copies from and to by itself."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy; one of the two is such host memory, the other one the device's."""
        ...

    def mark(self) -> Mark:
        """Return the place behind all that is enqueued."""
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
    """Moves arrays of the steps in flight. `begin` a step before its first array."""

    device: torch.device

    def begin(self) -> None:
        """Begin a step."""
        ...

    def to_device(self, array: NDArray[np.generic]) -> Tensor:
        """Return an array as a tensor on the device, for work that is enqueued behind this.

        The array may be changed afterwards where the device is no CPU; there they may share memory.
        """
        ...

    def to_device_together(self, arrays: Sequence[NDArray[np.generic]]) -> list[Tensor]:
        """Return arrays as tensors on the device, as `to_device` does; by one copy where there is something to copy.

        Their memory there is one piece, which stays as long as one of them is held.
        """
        ...

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor in host memory that is as this one once a later `mark` is passed.

        On a CPU it is this one: who goes on changing it copies it first.
        """
        ...

    def mark(self) -> Mark:
        """Return the place behind all that is enqueued."""
        ...


class _Passed:
    """The mark of a device whose work is done as soon as it is asked for."""

    def synchronize(self) -> None:
        """Wait for nothing."""


class SharedMemory:
    """`HostCopies` of a CPU: host memory is the device's."""

    device = torch.device("cpu")
    _passed = _Passed()

    def begin(self) -> None:
        """Do nothing."""

    def to_device(self, array: NDArray[np.generic]) -> Tensor:
        """Return a tensor of the array's memory where that is contiguous."""
        return torch.from_numpy(np.ascontiguousarray(array))

    def to_device_together(self, arrays: Sequence[NDArray[np.generic]]) -> list[Tensor]:
        """Return tensors of the arrays' memory."""
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself."""
        return tensor

    def mark(self) -> Mark:
        """Return a place that is passed."""
        return self._passed


class _PinnedSet:
    """Memory that the arrays of one step are copied from, one behind the other."""

    def __init__(self, queue: DeviceQueue) -> None:
        self._queue = queue
        self._memory = queue.host_memory(_FIRST_BYTES)
        self._full: list[Tensor] = []  # in use by copies of this step, and left with the next one
        self._num_used = 0
        self.last_copy: Mark | None = None  # behind the copies of the step that had it

    def rewind(self) -> None:
        """Take all memory for another step, in one piece; wait until nothing is copied from it."""
        if self.last_copy is not None:
            self.last_copy.synchronize()
        self._full.clear()
        self._num_used = 0

    def write(self, arrays: Sequence[NDArray[np.generic]], sizes: Sequence[int]) -> Tensor:
        """Return a copy of arrays in this memory, which stays until `rewind`; sizes: bytes that each has there."""
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
    """`HostCopies` of a device with memory of its own, in `NUM_SETS` sets of pinned memory that take turns.

    A set is written to again only when the device has made all copies from it. That is never waited for where the step
    before the last was collected.
    """

    def __init__(self, device: torch.device, queue: DeviceQueue, num_sets: int = NUM_SETS) -> None:
        self.device = device
        self._queue = queue
        self._sets = [_PinnedSet(queue) for _ in range(num_sets)]
        self._number = 0

    def begin(self) -> None:
        """Take the set of the step before the last."""
        self._sets[self._number].last_copy = self._queue.mark()
        self._number = (self._number + 1) % len(self._sets)
        self._sets[self._number].rewind()

    def to_device(self, array: NDArray[np.generic]) -> Tensor:
        """Return a new tensor on the device, to which the array's copy in this step's set is being copied."""
        (tensor,) = self.to_device_together([array])
        return tensor

    def to_device_together(self, arrays: Sequence[NDArray[np.generic]]) -> list[Tensor]:
        """Return parts of one new tensor on the device, to which copies in this step's set are being copied."""
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
        """Return new pinned memory, which is the caller's, to which the tensor is being copied."""
        target = self._queue.host_memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        self._queue.copy(target, tensor)
        return target

    def mark(self) -> Mark:
        """Return the place behind all that is enqueued."""
        return self._queue.mark()


@cache
def _torch_dtype(dtype: np.dtype[np.generic]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def create_host_copies(device: torch.device) -> HostCopies:
    """Return those of a device."""
    return SharedMemory() if device.type == "cpu" else PinnedMemory(device, CudaQueue())
