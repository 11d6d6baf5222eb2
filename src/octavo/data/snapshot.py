"""Snapshots for clients that watch an engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.data.events import Event


class BlockState(IntEnum):
    """A KV block's state. OWNED: reference count 1. SHARED: reference count above 1."""

    FREE = 0
    CACHED = 1
    OWNED = 2
    SHARED = 3
    QUARANTINED = 4


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The first KV group's blocks at one moment."""

    block_size: int
    states: bytes  # a `BlockState` for each block
    holders: dict[str, list[int]]  # block tables by request


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All events since the previous snapshot, and the blocks after these events."""

    events: list[Event]
    is_first: bool = False  # if True, the client must discard its state
    blocks: BlockMap | None = None  # None if more snapshots of the same moment follow
