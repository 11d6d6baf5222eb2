"""Copies between host memory and the device for steps in flight.

A GPU copies after the call returns. The source must not change before the copy, so steps alternate between two sets of
pinned memory.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from octavo.worker.pinned_memory import pinned_memory, rounded_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

NUM_SETS = 2  # steps in flight
_FIRST_BYTES = 1 << 16  # initial size of a set
_ALIGNMENT = 64  # bytes; kernels read 16 at a time


class Mark(Protocol):
    """A position in a device's queue."""

    def synchronize(self) -> None:
        """Wait for the work before the mark. Raises its error."""
        ...


class DeviceQueue(Protocol):
    """A device's queue."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """Return device-accessible host memory, uint8."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy."""
        ...

    def mark(self) -> Mark:
        """Mark all enqueued work."""
        ...


class CudaQueue:
    """A GPU's current stream."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """See `DeviceQueue`."""
        return pinned_memory(num_bytes, is_brief=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `DeviceQueue`."""
        target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        """See `DeviceQueue`."""
        event: Mark = torch.cuda.current_stream().record_event()
        return event


class HostCopies(Protocol):
    """Copies arrays. Each step calls `begin` first."""

    device: torch.device

    def begin(self) -> None:
        """Begin a step."""
        ...

    def to_device(self, array: NDArray[np.generic]) -> Tensor:
        """Return the array on the device, for work enqueued later.

        On a CPU, the tensor may share the array's memory. Otherwise the array may be changed after the call.
        """
        ...

    def to_device_together(self, arrays: Sequence[NDArray[np.generic]]) -> list[Tensor]:
        """Like `to_device`, with one copy into memory that the tensors share."""
        ...

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return a host copy that is complete at a later `mark`; on a CPU, `tensor` itself."""
        ...

    def mark(self) -> Mark:
        """Mark all enqueued work."""
        ...


class Passed:
    """A mark of finished work."""

    def synchronize(self) -> None:
        """Return immediately."""


class SharedMemory:
    """The `HostCopies` of a CPU."""

    device = torch.device("cpu")
    _passed = Passed()

    def begin(self) -> None:
        """Do nothing."""

    def to_device(self, array: NDArray[np.generic]) -> Tensor:
        """Share the memory."""
        return torch.from_numpy(np.ascontiguousarray(array))

    def to_device_together(self, arrays: Sequence[NDArray[np.generic]]) -> list[Tensor]:
        """Share the memory."""
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor

    def mark(self) -> Mark:
        """See `HostCopies`."""
        return self._passed


class _PinnedSet:
    def __init__(self, queue: DeviceQueue) -> None:
        self._queue = queue
        self._memory = queue.host_memory(_FIRST_BYTES)
        self._full: list[Tensor] = []  # copies may still read it
        self._num_used = 0
        self.last_copy: Mark | None = None

    def rewind(self) -> None:
        """Wait until no copy reads the memory, and reuse it."""
        if self.last_copy is not None:
            self.last_copy.synchronize()
        self._full.clear()
        self._num_used = 0

    def write(self, arrays: Sequence[NDArray[np.generic]], sizes: Sequence[int]) -> Tensor:
        """Return a copy of the arrays, valid until `rewind`. sizes: bytes with padding."""
        num_bytes = sum(sizes)
        if self._num_used + num_bytes > len(self._memory):
            self._full.append(self._memory)
            self._memory = self._queue.host_memory(rounded_bytes(2 * len(self._memory) + num_bytes))
            self._num_used = 0
        source = self._memory[self._num_used : self._num_used + num_bytes]
        self._num_used += num_bytes
        begin, written = 0, source.numpy()
        for array, size in zip(arrays, sizes, strict=True):
            np.copyto(written[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape), array)
            begin += size
        return source


class PinnedMemory:
    """The `HostCopies` of a device with separate memory."""

    def __init__(self, device: torch.device, queue: DeviceQueue, num_sets: int = NUM_SETS) -> None:
        self.device = device
        self._queue = queue
        self._sets = [_PinnedSet(queue) for _ in range(num_sets)]
        self._number = 0

    def begin(self) -> None:
        """See `HostCopies`."""
        self._sets[self._number].last_copy = self._queue.mark()
        self._number = (self._number + 1) % len(self._sets)
        self._sets[self._number].rewind()

    def to_device(self, array: NDArray[np.generic]) -> Tensor:
        """See `HostCopies`."""
        (tensor,) = self.to_device_together([array])
        return tensor

    def to_device_together(self, arrays: Sequence[NDArray[np.generic]]) -> list[Tensor]:
        """See `HostCopies`."""
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
        """See `HostCopies`."""
        target = self._queue.host_memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        self._queue.copy(target, tensor)
        return target

    def mark(self) -> Mark:
        """See `HostCopies`."""
        return self._queue.mark()


@cache
def _torch_dtype(dtype: np.dtype[np.generic]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def create_host_copies(device: torch.device) -> HostCopies:
    """Return a device's copies."""
    return SharedMemory() if device.type == "cpu" else PinnedMemory(device, CudaQueue())
