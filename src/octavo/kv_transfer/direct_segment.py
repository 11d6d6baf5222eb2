"""A prefill engine's memory for direct transfers."""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HEADER_BYTES = 128  # aligns the block to a cache line
DONOR_AREAS = 8
RECEIVER_AREAS = 16  # loads, which mostly wait for prompts


@dataclass(slots=True)
class _Slot:
    content: memoryview
    checksum: bytes
    num_leases: int = 0


class Segment:
    """Blocks by key. Evicts the least recently used block without readers. Thread-safe.

    The operating system allocates memory on first use. Raises `ConfigError` if max_bytes is below one block.
    """

    def __init__(self, block_bytes: int, max_bytes: int) -> None:
        self.num_slots = max_bytes // block_bytes
        if not self.num_slots:
            raise ConfigError(f"kv_direct_bytes is {max_bytes}, but one block takes {block_bytes} bytes: increase it")
        memory = memoryview(mmap.mmap(-1, self.num_slots * block_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._contents = (memory[start : start + block_bytes] for start in range(0, len(memory), block_bytes))
        self._free: list[memoryview] = []
        self._slots: OrderedDict[bytes, _Slot] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._slots)

    def num_matched(self, keys: Sequence[bytes]) -> int:
        """See `KVStore`."""
        with self._lock:
            return next((index for index, key in enumerate(keys) if key not in self._slots), len(keys))

    def lacks(self, keys: Sequence[bytes]) -> set[bytes]:
        """See `KVStore`."""
        with self._lock:
            return {key for key in keys if key not in self._slots}

    def put(self, key: bytes, block: memoryview) -> bool:
        """Store a copy of a block. Return False if all slots are being read or written."""
        with self._lock:
            if key in self._slots:
                self._slots.move_to_end(key)
                return True
            content = self._take()
        if content is None:
            return False
        content[:] = block
        slot = _Slot(content, checksum(key, content))
        with self._lock:
            if key in self._slots:
                self._free.append(content)
            else:
                self._slots[key] = slot
        return True

    def _take(self) -> memoryview | None:
        """Needs the lock."""
        if self._free:
            return self._free.pop()
        content = next(self._contents, None)
        if content is not None:
            return content
        oldest = next((key for key, slot in self._slots.items() if not slot.num_leases), None)
        if oldest is None:
            return None
        self.num_evicted += 1
        return self._slots.pop(oldest).content

    def read(self, key: bytes, use: Callable[[memoryview, bytes], None]) -> bool:
        """Call use(block, checksum) while the block is pinned. Return False if the block is missing."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                return False
            self._slots.move_to_end(key)
            slot.num_leases += 1
        try:
            use(slot.content, slot.checksum)
        finally:
            with self._lock:
                slot.num_leases -= 1
                if self._slots.get(key) is not slot and not slot.num_leases:
                    self._free.append(slot.content)
        return True

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop blocks. Their memory becomes free when the last reader ends."""
        with self._lock:
            for key in keys:
                slot = self._slots.pop(key, None)
                if slot is not None and not slot.num_leases:
                    self._free.append(slot.content)


def checksum(key: bytes, block: memoryview) -> bytes:
    """Return the SHA-256 of key and block."""
    digest = hashlib.sha256(key)
    digest.update(block)
    return digest.digest()
