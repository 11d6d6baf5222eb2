"""The prefix cache's contents, as a listener learns them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.kv.cache_listener import CacheListener

if TYPE_CHECKING:
    from octavo.core.kv.manager import KVCacheManager


class CacheMirror(CacheListener):
    """Hashes of cached blocks. Raises `ValueError` if a call contradicts the earlier calls."""

    def __init__(self) -> None:
        self.device: dict[bytes, bytes | None] = {}  # parent's hash by hash
        self.host: set[bytes] = set()
        self.num_stored = self.num_removed = self.num_cleared = 0

    def block_stored(
        self, block_hash: bytes, parent: bytes | None, token_ids: tuple[int, ...], cache_salt: str | None
    ) -> None:
        if block_hash in self.device or not token_ids or (cache_salt and parent):
            raise ValueError(f"stored twice, without tokens, or with a late salt: {block_hash.hex()}")
        self.device[block_hash] = parent
        self.num_stored += 1

    def block_removed(self, block_hash: bytes) -> None:
        if block_hash not in self.device:
            raise ValueError(f"removed, but not stored: {block_hash.hex()}")
        del self.device[block_hash]
        self.num_removed += 1

    def host_block_stored(self, block_hash: bytes, token_ids: tuple[int, ...]) -> None:
        if block_hash in self.host or block_hash not in self.device or not token_ids:
            raise ValueError(f"stored in host memory twice, or without a device block: {block_hash.hex()}")
        self.host.add(block_hash)

    def host_block_removed(self, block_hash: bytes) -> None:
        if block_hash not in self.host:
            raise ValueError(f"removed from host memory, but not stored: {block_hash.hex()}")
        self.host.remove(block_hash)

    def cleared(self) -> None:
        self.device.clear()
        self.host.clear()
        self.num_cleared += 1

    def mistakes(self, manager: KVCacheManager) -> list[str]:
        """Compare with what lookups of a manager can find."""
        pool, host = manager.pool, manager.host
        wrong = []
        if self.device.keys() != pool._index.keys():
            wrong.append(f"{len(self.device)} blocks on the device, not {len(pool._index)}")
        if self.host != host._index.keys():
            wrong.append(f"{len(self.host)} blocks in host memory, not {len(host._index)}")
        hash_of = {block.name: block.hash for block in pool.blocks if block.hash is not None}
        for block in pool.blocks:
            if block.hash is None or block.hash not in self.device:
                continue
            parent = self.device[block.hash]
            if (block.parent is None) != (parent is None) or hash_of.get(block.parent, parent) != parent:
                wrong.append(f"{block} has another parent")
        return wrong
