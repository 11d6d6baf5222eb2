"""The one interface behind which blocks of KV are kept outside of an engine's own memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo.errors import OctavoError

if TYPE_CHECKING:
    from collections.abc import Sequence


class StoreError(OctavoError):
    """A store could not do what it was asked: it is gone, full, or not allowed to. What was asked counts as a miss."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds, and what became of it. All but the first three are totals since the start.

    max_bytes: None where somebody else bounds it. num_corrupt: blocks that were not what was saved under their key.
    num_errors: calls that failed. error: the last one while the store is not usable, "" while it is.
    """

    num_blocks: int
    num_bytes: int
    max_bytes: int | None
    num_evicted: int = 0
    num_corrupt: int = 0
    num_errors: int = 0
    error: str = ""


class KVStore(Protocol):
    """Keeps blocks under keys that name all that their content depends on (`octavo.core.kv.block_hash`).

    A key has one content for ever, so nothing is ever overwritten. What a store gives back is what was saved under the
    key, whole, or it counts as not there: it looks for itself, by a checksum over key and content. Several threads may
    call at once. `lacks` and `stats` return at once; the others may wait for disks and networks, and raise
    `StoreError`. A store that fails costs time, never a token: it is asked again later.

    name: what its figures are called. block_bytes: the size of a block. Those with the first KV group only
    (`octavo.kv_transfer.group_parts`) are shorter, under keys of their own: what is asked for has the size of what was
    saved under its key, and all blocks of a save have one size.
    """

    name: str
    block_bytes: int

    def num_matched(self, keys: Sequence[bytes]) -> int:
        """Return how many of these, from the first one on, it has; they count as used now."""
        ...

    def lacks(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return those that it does not have as far as it knows without asking anybody."""
        ...

    def load(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """Fill blocks (writable, as large as what was saved) in order; return how many, from the first one on, are it.

        What stands in the others is undefined. What it finds to be wrong it has no longer afterwards.
        """
        ...

    def save(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """Keep blocks; return how many, from the first one on, it has now. Their memory is the caller's afterwards."""
        ...

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop blocks; unknown keys are passed over."""
        ...

    def stats(self) -> StoreStats:
        """Return its figures."""
        ...

    def close(self) -> None:
        """Give everything back; what is kept over restarts stays. A second call changes nothing."""
        ...
