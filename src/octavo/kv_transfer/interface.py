"""External stores' interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo.errors import OctavoError

if TYPE_CHECKING:
    from collections.abc import Sequence


class StoreError(OctavoError):
    """A failed operation, which counts as a miss."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Contents of a store, and counters since its start.

    max_bytes: Limit of num_bytes, or None if the store does not set it. num_corrupt: Blocks or files with a wrong
    checksum. num_errors: Failed operations. error: Reason why the store cannot be used or written, or "".
    """

    num_blocks: int
    num_bytes: int
    max_bytes: int | None
    num_evicted: int = 0
    num_corrupt: int = 0
    num_errors: int = 0
    error: str = ""


class KVStore(Protocol):
    """A store of blocks by key. A key covers everything that a block's content depends on, so no block is overwritten.

    Loads verify a checksum over key and content. A corrupt or incomplete block is a miss. Thread-safe. `lacks` and
    `stats` never block. Other methods may wait for I/O, and raise `StoreError`.

    block_bytes: Size of a full block. Blocks with only the first KV group (`octavo.kv_transfer.group_parts`) are
    smaller. All blocks of one save have one size, which their loads must use.
    """

    name: str
    block_bytes: int

    def num_matched(self, keys: Sequence[bytes]) -> int:
        """Count the leading stored keys, and mark them as recently used."""
        ...

    def lacks(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return the keys known to be missing."""
        ...

    def load(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """Fill blocks in order. Return the number of leading valid blocks. The content of later blocks is undefined.

        Corrupt blocks are dropped from the store.
        """
        ...

    def save(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """Copy blocks into the store. Return the number of leading blocks stored."""
        ...

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop stored blocks."""
        ...

    def stats(self) -> StoreStats:
        """Return the figures."""
        ...

    def close(self) -> None:
        """Release resources, but keep persistent blocks. A second call does nothing."""
        ...
