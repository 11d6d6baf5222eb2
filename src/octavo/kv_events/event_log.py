"""Collects the events of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.kv.cache_listener import CacheListener
from octavo.kv_events.wire import CPU, GPU, AllBlocksCleared, BlockRemoved, BlockStored

if TYPE_CHECKING:
    from octavo.core.kv.block_hash import BlockHash
    from octavo.kv_events.publisher import KVEventPublisher
    from octavo.kv_events.wire import Event

_HASH_BYTES = 8


def short_hash(block_hash: BlockHash) -> int:
    """Return the last 64 bits, as vLLM shortens SHA-256."""
    return int.from_bytes(block_hash[-_HASH_BYTES:], "big")


class KVEventLog(CacheListener):
    """Turns changes of the prefix cache into events, and publishes the events of a step in one batch.

    The first event says that the cache is empty, because an earlier engine process may have used the same endpoint.
    """

    def __init__(self, publisher: KVEventPublisher) -> None:
        self.figures = publisher.figures
        self._publisher = publisher
        self._events: list[Event]
        self._origins: dict[BlockHash, tuple[int | None, str | None]] = {}  # parent and salt of blocks on the device
        self.cleared()

    def end_step(self) -> None:
        """Publish the events since the last call, if there are any."""
        if self._events:
            events, self._events = self._events, []
            self._publisher.publish(events)

    def close(self) -> None:
        """Publish the last events, and end the publisher."""
        self.end_step()
        self._publisher.close()

    def block_stored(
        self, block_hash: BlockHash, parent: BlockHash | None, token_ids: tuple[int, ...], cache_salt: str | None
    ) -> None:
        """See `CacheListener`."""
        short_parent = None if parent is None else short_hash(parent)
        self._origins[block_hash] = short_parent, cache_salt
        self._store(BlockStored.of(short_hash(block_hash), short_parent, token_ids, GPU, cache_salt))

    def host_block_stored(self, block_hash: BlockHash, token_ids: tuple[int, ...]) -> None:
        """See `CacheListener`."""
        parent, salt = self._origins[block_hash]
        self._store(BlockStored.of(short_hash(block_hash), parent, token_ids, CPU, salt))

    def _store(self, event: BlockStored) -> None:
        last = self._events[-1] if self._events else None
        if not isinstance(last, BlockStored) or not last.extend(event):
            self._events.append(event)

    def block_removed(self, block_hash: BlockHash) -> None:
        """See `CacheListener`."""
        del self._origins[block_hash]
        self._remove(block_hash, GPU)

    def host_block_removed(self, block_hash: BlockHash) -> None:
        """See `CacheListener`."""
        self._remove(block_hash, CPU)

    def _remove(self, block_hash: BlockHash, medium: str) -> None:
        last, name = self._events[-1] if self._events else None, short_hash(block_hash)
        if isinstance(last, BlockRemoved) and last.medium == medium:
            last.block_hashes.append(name)
        else:
            self._events.append(BlockRemoved([name], medium, 0))

    def cleared(self) -> None:
        """See `CacheListener`. Publishes immediately, because no step may follow."""
        self._events = [AllBlocksCleared()]
        self.end_step()
