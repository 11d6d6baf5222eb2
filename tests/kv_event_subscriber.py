"""A subscriber of KV events, with the classes of vLLM's example of a subscriber."""

from __future__ import annotations

from typing import Any, Self

import msgspec
import zmq

TIMEOUT_MS = 30_000
END = (-1).to_bytes(8, "big", signed=True)


class _Event(msgspec.Struct, tag=True):
    pass


class BlockStored(_Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(_Event):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(_Event):
    pass


class KVEventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(KVEventBatch).decode


class Contents:
    """The blocks of one medium, as events describe them. Raises `ValueError` if an event contradicts earlier ones."""

    def __init__(self, medium: str = "GPU") -> None:
        self.medium = medium
        self.blocks: dict[Any, tuple[Any, tuple[int, ...]]] = {}  # parent and tokens by hash
        self.num_stored = self.num_removed = self.num_cleared = 0

    def take(self, batch: KVEventBatch) -> None:
        """Apply a batch."""
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
                self.num_cleared += 1
            elif event.medium == self.medium:
                self._take(event)

    def _take(self, event: BlockStored | BlockRemoved) -> None:
        if isinstance(event, BlockRemoved):
            for each in event.block_hashes:
                del self.blocks[each]
            self.num_removed += len(event.block_hashes)
            return
        parent, size = event.parent_block_hash, event.block_size
        if len(event.token_ids) != size * len(event.block_hashes):
            raise ValueError(f"{len(event.token_ids)} tokens of {len(event.block_hashes)} blocks")
        for index, each in enumerate(event.block_hashes):
            if each in self.blocks:
                raise ValueError(f"stored twice: {each}")
            self.blocks[each] = parent, tuple(event.token_ids[index * size : (index + 1) * size])
            parent = each
        self.num_stored += len(event.block_hashes)


class Subscriber:
    """Receives batches, and asks for replays."""

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, topic: str = "", hwm: int = 0) -> None:
        self.context = zmq.Context()
        self.events = self.context.socket(zmq.SUB)
        self.events.rcvhwm = hwm
        self.events.subscribe(topic)
        self.events.connect(endpoint)
        self.replays = self.context.socket(zmq.DEALER)
        if replay_endpoint is not None:
            self.replays.connect(replay_endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)

    def receive(self, timeout_ms: int = TIMEOUT_MS) -> tuple[int, KVEventBatch] | None:
        """Return the next sequence number and batch, or None after the time-out."""
        if not self.events.poll(timeout_ms):
            return None
        _, number, batch = self.events.recv_multipart()
        return int.from_bytes(number, "big"), decode(batch)

    def replay(self, first: int) -> list[tuple[int, KVEventBatch]]:
        """Return the replayed batches from a sequence number on. Raises `TimeoutError`."""
        self.replays.send_multipart([b"", first.to_bytes(8, "big")])
        batches = []
        while self.replays.poll(TIMEOUT_MS):
            _, _, number, batch = self.replays.recv_multipart()
            if number == END:
                return batches
            batches.append((int.from_bytes(number, "big"), decode(batch)))
        raise TimeoutError("the replay has no end")

    def all_batches(self, count: int) -> list[KVEventBatch]:
        """Return the first `count` batches, by replays."""
        batches: list[tuple[int, KVEventBatch]] = []
        while len(batches) < count:
            batches += self.replay(len(batches))
        if [number for number, _ in batches] != list(range(len(batches))):
            raise ValueError(f"sequence numbers: {[number for number, _ in batches]}")
        return [batch for _, batch in batches]
