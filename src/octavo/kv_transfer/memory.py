"""Blocks in the memory of one process, shared by the engines in it: for tests, and for engines side by side."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.kv_transfer.interface import StoreError, StoreStats
from octavo.runtime.daemon_threads import DaemonThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DEFAULT_BLOCKS_PER_NODE = 100
_CHECKSUM_BYTES = hashlib.sha256().digest_size


@dataclass(slots=True)
class KVBlock:
    """A block as a node published it. access_time: seconds of a monotonic clock."""

    block_hash: bytes
    node_id: str
    token_ids: tuple[int, ...]
    kv_data: bytes
    access_time: float


class GlobalKVPool:
    """Blocks of several nodes under their hashes; each hash has one content, and stands in one node's memory.

    A node keeps at most `max_blocks_per_node`: the longest unused make way. Any thread may call.
    """

    def __init__(self, max_blocks_per_node: int = DEFAULT_BLOCKS_PER_NODE) -> None:
        if max_blocks_per_node < 1:
            raise ConfigError(f"max_blocks_per_node must be 1 or more, got {max_blocks_per_node}")
        self.max_blocks_per_node = max_blocks_per_node
        self._num_evicted: Counter[str] = Counter()  # by node
        self._lock = threading.Lock()
        self._nodes: dict[str, OrderedDict[bytes, KVBlock]] = {}  # of each node the longest unused first
        self._node_of: dict[bytes, str] = {}
        self._open: set[str] = set()  # transfers under way
        self._complete: set[str] = set()  # those that nobody has asked about since they ended
        self._ended = threading.Condition(self._lock)
        self._movers: DaemonThreads | None = None

    @property
    def total_cached_blocks(self) -> int:
        """Blocks of all nodes."""
        return len(self._node_of)

    @property
    def num_evicted(self) -> int:
        """Blocks of all nodes that made way."""
        return self._num_evicted.total()

    def num_evicted_of(self, node_id: str) -> int:
        """Blocks of one node that made way."""
        return self._num_evicted[node_id]

    def num_cached_blocks(self, node_id: str) -> int:
        """Blocks of one node."""
        return len(self._nodes.get(node_id, ()))

    def num_bytes(self, node_id: str) -> int:
        """Bytes of one node's blocks."""
        with self._lock:
            return sum(len(block.kv_data) for block in self._nodes.get(node_id, {}).values())

    def publish(
        self, block_hash: bytes, node_id: str, token_ids: Sequence[int], kv_data: bytes | bytearray | memoryview
    ) -> bool:
        """Keep a copy of a node's block; True if it is there already, which counts as a use of it."""
        with self._lock:
            if self._touch(block_hash) is not None:
                return True
            node = self._nodes.setdefault(node_id, OrderedDict())
            node[block_hash] = KVBlock(block_hash, node_id, tuple(token_ids), bytes(kv_data), time.monotonic())
            self._node_of[block_hash] = node_id
            while len(node) > self.max_blocks_per_node:
                oldest, _ = node.popitem(last=False)
                del self._node_of[oldest]
                self._num_evicted[node_id] += 1
        return False

    def query(self, block_hashes: Sequence[bytes]) -> tuple[int, list[str]]:
        """Return how many tokens the blocks up to the first that is missing hold, and the node of each of them.

        They count as used now.
        """
        num_tokens, node_ids = 0, []
        with self._lock:
            for block_hash in block_hashes:
                block = self._touch(block_hash)
                if block is None:
                    break
                num_tokens += len(block.token_ids)
                node_ids.append(block.node_id)
        return num_tokens, node_ids

    def lacks(self, block_hashes: Sequence[bytes]) -> set[bytes]:
        """Return the hashes that no node has, without counting a use of the others."""
        with self._lock:
            return {block_hash for block_hash in block_hashes if block_hash not in self._node_of}

    def async_transfer(
        self,
        request_id: str,
        block_hashes: Sequence[bytes],
        target_node_id: str,
        callback: Callable[[str, list[KVBlock]], None],
    ) -> None:
        """Copy blocks for another node on a thread, and hand the copies to callback(request_id, blocks).

        They come in order, up to the first one that is missing, as blocks of that node; here they stay where they are.
        """
        with self._lock:
            if self._movers is None:
                self._movers = DaemonThreads(1, "octavo-kv-pool")
            movers = self._movers
            self._open.add(request_id)
        hashes = list(block_hashes)
        movers.submit(lambda: self._transfer(request_id, hashes, target_node_id, callback))

    def _transfer(
        self,
        request_id: str,
        block_hashes: list[bytes],
        target_node_id: str,
        callback: Callable[[str, list[KVBlock]], None],
    ) -> None:
        copies: list[KVBlock] = []
        for block_hash in block_hashes:
            with self._lock:
                block = self._touch(block_hash)
                if block is None:
                    break
                token_ids, kv_data = block.token_ids, block.kv_data
            copied = memoryview(kv_data).tobytes()  # bytes() of bytes would be the same object
            copies.append(KVBlock(block_hash, target_node_id, token_ids, copied, time.monotonic()))
        try:
            callback(request_id, copies)
        finally:
            with self._ended:
                if request_id in self._open:
                    self._open.remove(request_id)
                    self._complete.add(request_id)
                    self._ended.notify_all()

    def is_transfer_complete(self, request_id: str) -> bool:
        """Whether a transfer has ended; that it has is forgotten once it was told."""
        with self._lock:
            return self._take_complete(request_id)

    def wait_for_transfer(self, request_id: str, timeout_s: float) -> bool:
        """Return whether a transfer ended in time; nothing is known of it afterwards."""
        with self._ended:
            if self._ended.wait_for(lambda: request_id in self._complete, timeout_s):
                return self._take_complete(request_id)
            self._open.discard(request_id)
            return False

    def _take_complete(self, request_id: str) -> bool:
        is_complete = request_id in self._complete
        self._complete.discard(request_id)
        return is_complete

    def remove(self, block_hashes: Sequence[bytes]) -> None:
        """Drop blocks; unknown ones are passed over."""
        with self._lock:
            for block_hash in block_hashes:
                node_id = self._node_of.pop(block_hash, None)
                if node_id is not None:
                    del self._nodes[node_id][block_hash]

    def _touch(self, block_hash: bytes) -> KVBlock | None:
        """Return a block, which is used now, or None."""
        node_id = self._node_of.get(block_hash)
        if node_id is None:
            return None
        node = self._nodes[node_id]
        node.move_to_end(block_hash)
        block = node[block_hash]
        block.access_time = time.monotonic()
        return block


class MemoryStore:
    """A `KVStore` over a pool, as one node of it: what it saves is bounded by the pool's blocks for a node.

    Each block is kept behind a checksum over its key and content. timeout_s: so long may a transfer take.
    """

    name = "memory"

    def __init__(self, pool: GlobalKVPool, node_id: str, block_bytes: int, *, timeout_s: float = 10.0) -> None:
        self.pool = pool
        self.node_id = node_id
        self.block_bytes = block_bytes
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._num_transfers = 0
        self._num_evicted_before = pool.num_evicted_of(node_id)
        self._num_corrupt = 0
        self._num_errors = 0

    def num_matched(self, keys: Sequence[bytes]) -> int:
        """Return how many of these, from the first one on, some node has."""
        return len(self.pool.query(keys)[1])

    def lacks(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return those that no node has."""
        return self.pool.lacks(keys)

    def load(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """Have blocks transferred to this node, and fill these with what their checksums vouch for."""
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
        found: list[KVBlock] = []
        with self._lock:
            self._num_transfers += 1
            name = f"{self.node_id}-{id(self)}-{self._num_transfers}"
        self.pool.async_transfer(name, keys, self.node_id, lambda _, blocks: found.extend(blocks))
        if not self.pool.wait_for_transfer(name, self._timeout_s):
            with self._lock:
                self._num_errors += 1
            raise StoreError(f"the pool did not transfer {len(keys)} blocks within {self._timeout_s:g} s")
        return found

    def save(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """Publish blocks as this node's."""
        for key, block in zip(keys, blocks, strict=True):
            self.pool.publish(key, self.node_id, (), _checksum(key, block) + bytes(block))
        return len(keys)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop blocks, whichever node has them."""
        self.pool.remove(keys)

    def stats(self) -> StoreStats:
        """Return the figures of this node."""
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
        """Leave the pool as it is: other engines may use it."""


def _checksum(key: bytes, content: memoryview) -> bytes:
    digest = hashlib.sha256(key)
    digest.update(content)
    return digest.digest()
