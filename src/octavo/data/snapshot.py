"""Snapshots for watching clients."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.data.events import Event


class BlockState(IntEnum):
    """A KV block's state. OWNED: reference count 1. SHARED: above 1."""

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
    """New events since the previous snapshot, without a gap, and the cache after them.

    is_first: the client must discard its state. blocks: None if more snapshots of the same moment follow.
    """

    events: list[Event]
    is_first: bool = False
    blocks: BlockMap | None = None
