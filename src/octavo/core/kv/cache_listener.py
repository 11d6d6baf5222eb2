"""The interface through which other packages follow the contents of the prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.core.kv.block_hash import BlockHash


class CacheListener:
    """Is called when the prefix cache's contents change. This class ignores all calls.

    The calls describe blocks of the first KV group, on the device and in host memory. A block is stored only if no
    block in the same memory has its hash.
    """

    def block_stored(
        self, block_hash: BlockHash, parent: BlockHash | None, token_ids: tuple[int, ...], cache_salt: str | None
    ) -> None:
        """Note a block that lookups find on the device from now on. cache_salt: Of a request's first block only."""

    def block_removed(self, block_hash: BlockHash) -> None:
        """Note a block that lookups no longer find on the device."""

    def host_block_stored(self, block_hash: BlockHash, token_ids: tuple[int, ...]) -> None:
        """Note a block of the device that lookups also find in host memory from now on."""

    def host_block_removed(self, block_hash: BlockHash) -> None:
        """Note a block that lookups no longer find in host memory."""

    def cleared(self) -> None:
        """Note that device and host memory have no cached blocks."""


NO_LISTENER = CacheListener()
