"""Returns unused memory to the system."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

RETURN_PERIOD_S = 60.0
_M_ARENA_MAX, _ARENAS = -8, 2  # an option of mallopt, with its value
_MAPS = Path("/proc/self/maps")


def forget_pages(path: Path, parts: Iterable[tuple[int, int]]) -> None:
    """Drop resident pages of a mapped file. The page cache keeps their content.

    parts: (address, number of bytes). Ignores parts outside the file's mappings. Linux only.
    """
    libc = _libc()
    if libc is None or not _MAPS.exists():
        return
    mappings = _mappings(path)
    for address, num_bytes in parts:
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last and any(begin <= first and last <= end for begin, end in mappings):
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


def return_free_memory() -> None:
    """Return freed memory from the allocator to the system (glibc only)."""
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def returning_free_memory(period_s: float = RETURN_PERIOD_S) -> Iterator[None]:
    """Call `return_free_memory` every period_s seconds during the block. Limits glibc to two heaps permanently."""
    choose = getattr(_libc(), "mallopt", None)
    if choose is not None:
        choose(_M_ARENA_MAX, _ARENAS)
    is_over = threading.Event()

    def keep_returning() -> None:
        while not is_over.wait(period_s):
            return_free_memory()

    thread = threading.Thread(target=keep_returning, name="octavo-free-memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _mappings(path: Path) -> list[tuple[int, int]]:
    name = str(path.resolve())
    found = []
    for line in _MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] == name:
            begin, end = fields[0].split("-")
            found.append((int(begin, 16), int(end, 16)))
    return found


def _libc() -> Any:
    return ctypes.CDLL(None) if sys.platform == "linux" else None
