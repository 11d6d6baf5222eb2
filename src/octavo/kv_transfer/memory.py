"""In-memory KV store, shared by several engines."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo.config import DEFAULT_BLOCK_SIZE
from octavo.errors import ConfigError
from octavo.kv_transfer.interface import StoreError, StoreStats
from octavo.runtime.daemon_threads import DaemonThreads

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_BLOCKS_PER_NODE = 100
_CHECKSUM_BYTES = hashlib.sha256().digest_size


class TransferCallback(Protocol):
    """Called after a transfer, on the pool's thread. success: True if the target has all blocks."""

    def __call__(self, request_id: str, *, success: bool) -> object:
        """Process a transfer's end."""
        ...


@dataclass(slots=True)
class KVBlock:
    """A node's copy of a block. access_time: Monotonic time of the last use.

    num_tokens: Set for blocks that engines save, which have no token_ids.
    """

    block_hash: bytes
    node_id: str
    token_ids: tuple[int, ...]
    kv_data: bytes
    access_time: float = 0.0
    num_tokens: int | None = None

    @property
    def token_count(self) -> int:
        """Number of tokens."""
        return len(self.token_ids) if self.num_tokens is None else self.num_tokens


class GlobalKVPool:
    """Blocks of several nodes by hash. Each node may have a copy. Thread-safe.

    A node with more than `max_blocks_per_node` blocks evicts the least recently used block. Raises `ConfigError` if
    this limit is below 1.
    """

    def __init__(self, max_blocks_per_node: int = DEFAULT_BLOCKS_PER_NODE) -> None:
        if max_blocks_per_node < 1:
            raise ConfigError(f"max_blocks_per_node must be 1 or more, got {max_blocks_per_node}")
        self.max_blocks_per_node = max_blocks_per_node
        self._num_evicted: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._nodes: dict[str, OrderedDict[bytes, KVBlock]] = {}  # least recently used first
        self._holders: dict[bytes, dict[str, None]] = {}  # first holder first
        self._open: set[str] = set()
        self._complete: set[str] = set()  # ended transfers whose end was not queried yet
        self._ended = threading.Condition(self._lock)
        self._movers: DaemonThreads | None = None

    @property
    def total_cached_blocks(self) -> int:
        """Number of blocks, including copies."""
        with self._lock:
            return sum(map(len, self._nodes.values()))

    @property
    def num_evicted(self) -> int:
        """Number of evicted blocks of all nodes."""
        return self._num_evicted.total()

    def num_evicted_of(self, node_id: str) -> int:
        """Return the number of blocks that a node evicted."""
        return self._num_evicted[node_id]

    def num_cached_blocks(self, node_id: str) -> int:
        """Count a node's blocks."""
        return len(self._nodes.get(node_id, ()))

    def num_bytes(self, node_id: str) -> int:
        """Return the size of a node's blocks."""
        with self._lock:
            return sum(len(block.kv_data) for block in self._nodes.get(node_id, {}).values())

    def publish(
        self,
        block_hash: bytes,
        node_id: str,
        token_ids: Sequence[int],
        kv_data: bytes | bytearray | memoryview,
        *,
        num_tokens: int | None = None,
    ) -> bool:
        """Store a copy and return True if no node has the hash. Otherwise mark the block as used and return False."""
        with self._lock:
            if self._touch(block_hash) is not None:
                return False
            block = KVBlock(block_hash, node_id, tuple(token_ids), bytes(kv_data), time.monotonic(), num_tokens)
            self._insert(block)
        return True

    def query(self, block_hashes: Sequence[bytes]) -> tuple[int, list[str]]:
        """Return the number of tokens in the leading blocks found, and each block's node. Mark blocks as used."""
        num_tokens, node_ids = 0, []
        with self._lock:
            for block_hash in block_hashes:
                block = self._touch(block_hash)
                if block is None:
                    break
                num_tokens += block.token_count
                node_ids.append(block.node_id)
        return num_tokens, node_ids

    def get(self, block_hash: bytes, node_id: str) -> KVBlock | None:
        """Return a node's block or None, and mark the block as used."""
        with self._lock:
            return self._touch_at(block_hash, node_id)

    def lacks(self, block_hashes: Sequence[bytes]) -> set[bytes]:
        """Return hashes without copies."""
        with self._lock:
            return {block_hash for block_hash in block_hashes if block_hash not in self._holders}

    def async_transfer(
        self,
        request_id: str,
        block_hashes: Sequence[bytes],
        target_node_id: str,
        callback: TransferCallback | None = None,
    ) -> None:
        """Copy blocks to another node on a thread, then call callback(request_id, success=...).

        Stops at the first missing block or at the node's limit.
        """
        with self._lock:
            if self._movers is None:
                self._movers = DaemonThreads(1, "octavo-kv-pool")
            movers = self._movers
            self._open.add(request_id)
        hashes = list(block_hashes)
        movers.submit(lambda: self._transfer(request_id, hashes, target_node_id, callback))

    def _transfer(
        self, request_id: str, block_hashes: list[bytes], target_node_id: str, callback: TransferCallback | None
    ) -> None:
        try:
            for block_hash in block_hashes[: self.max_blocks_per_node]:
                if not self._copy(block_hash, target_node_id):
                    break
            with self._lock:
                held = self._nodes.get(target_node_id, OrderedDict[bytes, KVBlock]())
                success = all(block_hash in held for block_hash in block_hashes)
            if callback is not None:
                callback(request_id, success=success)
        finally:
            with self._ended:
                if request_id in self._open:
                    self._open.remove(request_id)
                    self._complete.add(request_id)
                    self._ended.notify_all()

    def _copy(self, block_hash: bytes, target_node_id: str) -> bool:
        with self._lock:
            block = self._touch_at(block_hash, target_node_id) or self._touch(block_hash)
        if block is None or block.node_id == target_node_id:
            return block is not None
        kv_data = memoryview(block.kv_data).tobytes()  # bytes() would not copy
        copied = KVBlock(block_hash, target_node_id, block.token_ids, kv_data, time.monotonic(), block.num_tokens)
        with self._lock:
            if self._touch_at(block_hash, target_node_id) is None:
                self._insert(copied)
        return True

    def is_transfer_complete(self, request_id: str) -> bool:
        """Return True if a transfer has ended, and remove its record."""
        with self._lock:
            return self._take_complete(request_id)

    def wait_for_transfer(self, request_id: str, timeout_s: float) -> bool:
        """Return True if a transfer ends in time, and remove its record. After a timeout, the record stays."""
        with self._ended:
            self._ended.wait_for(lambda: request_id in self._complete, timeout_s)
            return self._take_complete(request_id)

    def forget_transfer(self, request_id: str) -> None:
        """Remove the record of a transfer. The transfer continues, but its end is not recorded."""
        with self._lock:
            self._open.discard(request_id)
            self._complete.discard(request_id)

    def _take_complete(self, request_id: str) -> bool:
        is_complete = request_id in self._complete
        self._complete.discard(request_id)
        return is_complete

    def remove(self, block_hashes: Sequence[bytes]) -> None:
        """Drop all nodes' copies."""
        with self._lock:
            for block_hash in block_hashes:
                for node_id in self._holders.pop(block_hash, {}):
                    del self._nodes[node_id][block_hash]

    def _insert(self, block: KVBlock) -> None:
        node = self._nodes.setdefault(block.node_id, OrderedDict())
        node[block.block_hash] = block
        self._holders.setdefault(block.block_hash, {})[block.node_id] = None
        while len(node) > self.max_blocks_per_node:
            oldest, _ = node.popitem(last=False)
            del self._holders[oldest][block.node_id]
            if not self._holders[oldest]:
                del self._holders[oldest]
            self._num_evicted[block.node_id] += 1

    def _touch(self, block_hash: bytes) -> KVBlock | None:
        holder = next(iter(self._holders.get(block_hash, ())), None)
        return None if holder is None else self._touch_at(block_hash, holder)

    def _touch_at(self, block_hash: bytes, node_id: str) -> KVBlock | None:
        """Needs the lock."""
        node = self._nodes.get(node_id)
        if node is None or block_hash not in node:
            return None
        node.move_to_end(block_hash)
        block = node[block_hash]
        block.access_time = time.monotonic()
        return block


class MemoryStore:
    """A `KVStore` that is one node of a pool. The node's limit covers saved blocks and loaded copies.

    timeout_s: Limit of a transfer. block_size: In tokens.
    """

    name = "memory"

    def __init__(
        self,
        pool: GlobalKVPool,
        node_id: str,
        block_bytes: int,
        *,
        timeout_s: float = 10.0,
        block_size: int = DEFAULT_BLOCK_SIZE,
    ) -> None:
        self.pool, self.block_size = pool, block_size
        self.node_id = node_id
        self.block_bytes = block_bytes
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._num_transfers = 0
        self._num_evicted_before = pool.num_evicted_of(node_id)
        self._num_corrupt = 0
        self._num_errors = 0

    def num_matched(self, keys: Sequence[bytes]) -> int:
        """See `KVStore`."""
        return len(self.pool.query(keys)[1])

    def lacks(self, keys: Sequence[bytes]) -> set[bytes]:
        """See `KVStore`."""
        return self.pool.lacks(keys)

    def load(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """Copy blocks to this node, then fill `blocks`. Raises `StoreError` after timeout_s."""
        found = self._fetch(keys)
        for index, (key, block, record) in enumerate(zip(keys, blocks, found, strict=False)):
            content = memoryview(record.kv_data)[_CHECKSUM_BYTES:]
            if len(content) != len(block) or record.kv_data[:_CHECKSUM_BYTES] != _checksum(key, content):
                with self._lock:
                    self._num_corrupt += 1
                self.pool.remove([key])
                return index
            block[:] = content
        return len(found)

    def _fetch(self, keys: Sequence[bytes]) -> list[KVBlock]:
        with self._lock:
            self._num_transfers += 1
            name = f"{self.node_id}-{id(self)}-{self._num_transfers}"
        self.pool.async_transfer(name, keys, self.node_id)
        if not self.pool.wait_for_transfer(name, self._timeout_s):
            self.pool.forget_transfer(name)
            with self._lock:
                self._num_errors += 1
            raise StoreError(f"the pool did not transfer {len(keys)} blocks within {self._timeout_s:g} s")
        found: list[KVBlock] = []
        for key in keys:
            if (block := self.pool.get(key, self.node_id)) is None:
                break
            found.append(block)
        return found

    def save(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """See `KVStore`."""
        for key, block in zip(keys, blocks, strict=True):
            record = _checksum(key, block) + bytes(block)
            self.pool.publish(key, self.node_id, (), record, num_tokens=self.block_size)
        return len(keys)

    def forget(self, keys: Sequence[bytes]) -> None:
        """See `KVStore`."""
        self.pool.remove(keys)

    def stats(self) -> StoreStats:
        """Return this node's figures."""
        pool = self.pool
        return StoreStats(
            pool.num_cached_blocks(self.node_id),
            pool.num_bytes(self.node_id),
            pool.max_blocks_per_node * (self.block_bytes + _CHECKSUM_BYTES),
            pool.num_evicted_of(self.node_id) - self._num_evicted_before,
            self._num_corrupt,
            self._num_errors,
        )

    def close(self) -> None:
        """Do nothing."""


def _checksum(key: bytes, content: memoryview) -> bytes:
    digest = hashlib.sha256(key)
    digest.update(content)
    return digest.digest()
