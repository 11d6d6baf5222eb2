"""Snapshots of an engine for a watching client, a few per second: new events, and the blocks of each request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.data.events import Event


class BlockState(IntEnum):
    """The state of a block of the KV cache. OWNED: its reference count is 1. SHARED: its reference count is above 1."""

    FREE = 0
    CACHED = 1
    OWNED = 2
    SHARED = 3
    QUARANTINED = 4


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The first KV group at one moment.

    block_size: in tokens. states: one byte for each block, a `BlockState`. holders: the block table of each request.
    """

    block_size: int
    states: bytes
    holders: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """New events in order, without a gap since the previous snapshot, and the cache after them.

    is_first: whether the client must discard its state: this is the first snapshot, or events before it were lost.
    blocks: None if more snapshots of the same moment follow, because many events are sent in several snapshots.
    """

    events: list[Event]
    is_first: bool = False
    blocks: BlockMap | None = None
