"""Memory of this process given back to the system while and after a checkpoint is loaded. Nothing depends on it."""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any


def forget_pages(address: int, num_bytes: int) -> None:
    """Take the whole pages within a mapped file's bytes out of this process; the system's cache keeps them."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last and (libc := _libc()) is not None:
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


def return_free_memory() -> None:
    """Give back what was freed and the allocator has kept for later."""
    trim = getattr(_libc(), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)


def _libc() -> Any:
    return ctypes.CDLL(None) if sys.platform == "linux" else None
