"""Snapshots of an engine for a watching client."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.data.events import Event


class BlockState(IntEnum):
    """The state of a KV block. OWNED: its reference count is 1. SHARED: its reference count is above 1."""

    FREE = 0
    CACHED = 1
    OWNED = 2
    SHARED = 3
    QUARANTINED = 4


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The first KV group at one moment.

    states: a `BlockState` byte for each block. holders: block tables by request.
    """

    block_size: int
    states: bytes
    holders: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """New events without a gap since the previous snapshot, and the cache after these events.

    is_first: True if the client must discard its state, because it lacks earlier events.
    blocks: None if more snapshots of the same moment follow; the last of them has the blocks.
    """

    events: list[Event]
    is_first: bool = False
    blocks: BlockMap | None = None
