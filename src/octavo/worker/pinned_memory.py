"""Pinned host memory, which a GPU accesses directly."""

from __future__ import annotations

import logging
import mmap
import weakref
from contextlib import suppress

import numpy as np
import torch

from octavo.errors import ConfigError
from octavo.worker.memory import free_bytes

logger = logging.getLogger(__name__)
_PORTABLE = 1  # cudaHostRegisterPortable


def pinned_memory(num_bytes: int, *, is_brief: bool = False) -> torch.Tensor:
    """Return uint8 [num_bytes] of pinned memory. Raises `ConfigError` if too little is free.

    is_brief: True if only one step uses the memory. It then comes from torch's allocator, which keeps freed memory
    until copies are done, and rounds sizes up to powers of two. Otherwise the driver registers whole pages, and freeing
    them waits for the device. If the driver refuses, torch's allocator is used, with a warning.
    """
    if is_brief or not num_bytes:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    area = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_DONTFORK)  # after a fork, writes could move pages away from the device
    memory = np.frombuffer(area, np.uint8)
    cudart = torch.cuda.cudart()
    result = cudart.cudaHostRegister(memory.ctypes.data, num_bytes, _PORTABLE)
    if int(result) == 0:
        # Not on `area`, which is unmapped before its finalizers run.
        weakref.finalize(memory, _unregister, memory.ctypes.data).atexit = False
        return torch.from_numpy(memory)
    reason = cudart.cudaGetErrorString(result)
    _clear_error()
    del memory
    area.close()
    rounded, free = rounded_bytes(num_bytes), free_bytes(torch.device("cpu"))
    if rounded > free:
        raise ConfigError(
            f"the driver cannot register {num_bytes:,} bytes of host memory ({reason}), and torch would pin "
            f"{rounded:,} bytes, but only {free:,} are free; free host memory, or decrease swap_space_bytes"
        )
    logger.warning(
        "the driver cannot register %s bytes of host memory (%s): torch pins %s bytes instead",
        f"{num_bytes:,}", reason, f"{rounded:,}",
    )  # fmt: skip
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def rounded_bytes(num_bytes: int) -> int:
    """Return the bytes that torch pins for `num_bytes`."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def _unregister(address: int) -> None:
    torch.cuda.synchronize()  # an abandoned step may still copy
    torch.cuda.cudart().cudaHostUnregister(address)


def _clear_error() -> None:
    """Clear the last error, which the next launch would raise."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
