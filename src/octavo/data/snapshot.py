"""What somebody who watches an engine is told, a few times a second: what happened since, and who holds which block."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.data.events import Event


class BlockState(IntEnum):
    """Where a block of the KV cache is; SHARED: held by more than one request."""

    FREE = 0
    CACHED = 1
    OWNED = 2
    SHARED = 3
    QUARANTINED = 4


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The KV cache at one moment: a byte for each block, its `BlockState`, and the blocks of each request in order."""

    block_size: int
    states: bytes
    holders: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Events in their order, without a gap since the snapshot before; the cache as it is after them.

    is_first: nothing that was told before holds any more: it is the first one, or some in between are lost. A long past
    comes in several snapshots, the last of which has the cache.
    """

    events: list[Event]
    is_first: bool = False
    blocks: BlockMap | None = None
