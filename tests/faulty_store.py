"""A KV store with every fault that a store may have: it raises, hangs, misreports its content, corrupts records.

Only content with the right checksum of `MemoryStore` is right.
"""

from __future__ import annotations

import random
import threading

from octavo.kv_transfer.interface import StoreError
from octavo.kv_transfer.memory import MemoryStore

RECORD_FAULTS = ("tampered", "truncated", "stale", "another block's", "lost", "longer", "wrong checksum")


class Panic(BaseException):
    """Like the panic of a library."""


class FaultyStore(MemoryStore):
    """Does something wrong in a share of its calls, counted by kind. Wrong loads fill blocks with garbage."""

    def __init__(self, pool, node_id, block_bytes, *, seed=0, rate=0.5, raises=True):
        super().__init__(pool, node_id, block_bytes)
        self.rng = random.Random(seed)
        self.rate = rate
        self.raises = raises
        self.faults: dict[str, int] = {}
        self.num_spoilt = 0
        self._faulty_lock = threading.Lock()

    @property
    def num_faults(self):
        return sum(self.faults.values())

    def _draw(self, *kinds):
        with self._faulty_lock:
            if self.rng.random() >= self.rate:
                return None
            kind = self.rng.choice(kinds)
            self.faults[kind] = self.faults.get(kind, 0) + 1
            return kind

    def _raise(self, kind):
        if kind == "raises" and self.raises:
            raise StoreError("the store is gone")
        if kind == "fails" and self.raises:
            raise ZeroDivisionError("a fault of the store")

    def num_matched(self, keys):
        kind = self._draw("says more", "says less", "raises", "fails")
        self._raise(kind)
        count = super().num_matched(keys)
        if kind == "says more":
            return count + 1 + count // 2
        return count // 2 if kind == "says less" else count

    def load(self, keys, blocks):
        kind = self._draw("raises", "fails", "short", *RECORD_FAULTS)
        if kind in RECORD_FAULTS:
            self.spoil(keys[self.rng.randrange(len(keys))], kind)
        if kind is not None:
            for block in blocks:
                block[:] = bytes([0xA5]) * len(block)
        self._raise(kind)
        most = len(keys) // 2 if kind == "short" else len(keys)
        return super().load(keys[:most], blocks[:most])

    def save(self, keys, blocks):
        kind = self._draw("raises", "fails", "save is lost", "saves half")
        self._raise(kind)
        if kind == "save is lost":
            return len(keys)
        most = len(keys) // 2 if kind == "saves half" else len(keys)
        return super().save(keys[:most], blocks[:most])

    def spoil(self, key, kind):
        """Corrupt a record in the pool, as another process might."""
        pool = self.pool
        with pool._lock:
            records = [pool._nodes[node_id][key] for node_id in pool._holders.get(key, ())]
            if not records:
                return
            data = bytearray(records[0].kv_data)
            others = [each for node in pool._nodes.values() for each in node.values() if each.block_hash != key]
            if kind == "lost":
                for record in records:
                    del pool._nodes[record.node_id][key]
                del pool._holders[key]
                return
            if kind in {"tampered", "wrong checksum"} and len(data) <= 32:
                return  # it was truncated before
            if kind == "tampered":
                data[self.rng.randrange(32, len(data))] ^= 1 << self.rng.randrange(8)
            elif kind == "wrong checksum":
                data[self.rng.randrange(32)] ^= 1
            elif kind == "truncated":
                del data[self.rng.randrange(len(data)) :]
            elif kind == "longer":
                data += b"\0"
            elif kind == "stale":  # the block was reused, but not its key
                data[32:] = bytes(byte ^ 0xFF for byte in data[32:])
            elif others:
                data[:] = self.rng.choice(others).kv_data
            else:
                return
            for record in records:
                record.kv_data = bytes(data)
            self.num_spoilt += 1


class HangingStore(MemoryStore):
    """Hangs in calls with these names until it is released."""

    def __init__(self, pool, node_id, block_bytes, *names):
        super().__init__(pool, node_id, block_bytes)
        self.hangs = set(names)
        self.entered = threading.Event()
        self.release = threading.Event()

    def _wait(self, name):
        if name in self.hangs:
            self.entered.set()
            self.release.wait()

    def num_matched(self, keys):
        self._wait("num_matched")
        return super().num_matched(keys)

    def load(self, keys, blocks):
        self._wait("load")
        return super().load(keys, blocks)

    def save(self, keys, blocks):
        self._wait("save")
        return super().save(keys, blocks)

    def close(self):
        self._wait("close")
