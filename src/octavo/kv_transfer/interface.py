"""The interface of stores that keep KV blocks outside the engine's own memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo.errors import OctavoError

if TYPE_CHECKING:
    from collections.abc import Sequence


class StoreError(OctavoError):
    """A store operation failed: the store is gone, full or lacks permission. The caller treats it as a miss."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Contents of a store, and counters since its start (num_evicted, num_corrupt, num_errors).

    max_bytes: None if the limit is set elsewhere. num_corrupt: blocks that failed their checksum. num_errors: failed
    calls. error: the last error while the store is unusable, "" while it is usable.
    """

    num_blocks: int
    num_bytes: int
    max_bytes: int | None
    num_evicted: int = 0
    num_corrupt: int = 0
    num_errors: int = 0
    error: str = ""


class KVStore(Protocol):
    """Store of KV blocks. A key covers everything that the block's content depends on (`octavo.core.kv.block_hash`).

    A key's content never changes, so blocks are never overwritten. The store verifies a checksum over key and content
    when it loads; a corrupt or incomplete block counts as a miss. Thread-safe. `lacks` and `stats` never block; the
    other methods may wait for disk or network, and raise `StoreError`. A failure costs time but no tokens, and the
    store is tried again later.

    name: used in its metrics. block_bytes: size of a full block. Blocks with only the first KV group
    (`octavo.kv_transfer.group_parts`) are smaller and have separate keys. A load must use the size that was saved, and
    all blocks of one save have the same size.
    """

    name: str
    block_bytes: int

    def num_matched(self, keys: Sequence[bytes]) -> int:
        """Return the number of leading keys that are stored, and mark them as recently used."""
        ...

    def lacks(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return the keys that are missing according to local knowledge, without I/O."""
        ...

    def load(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """Fill blocks (writable, of the saved size) in order; return the number of leading blocks that are valid.

        The content of the remaining blocks is undefined. Corrupt blocks are dropped from the store.
        """
        ...

    def save(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """Copy blocks into the store; return the number of leading ones stored. The caller may then reuse them."""
        ...

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop blocks; unknown keys are ignored."""
        ...

    def stats(self) -> StoreStats:
        """Return current contents and counters."""
        ...

    def close(self) -> None:
        """Release all resources; persistent blocks are kept. A second call does nothing."""
        ...
