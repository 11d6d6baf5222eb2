"""Explains prefix cache misses."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.core.kv.block_hash import BlockHash


class MissReason(StrEnum):
    """Reasons for misses."""

    NEVER_SEEN = "never seen"
    EVICTED = "evicted"
    OTHER_SALT = "other salt"
    DIFFERENT_TOKEN = "different token"  # noqa: S105  not a secret
    TOO_SHORT = "shorter than a block"
    NO_STATE = "no state was saved there"  # the block is cached


@dataclass(frozen=True, slots=True)
class Miss:
    """A cache miss."""

    reason: MissReason
    position: int | None = None  # position of the first differing token, if known


MOST_REMEMBERED = 1 << 16  # blocks; each takes about 1.2 kB


class CacheHistory:
    """Remembers the last `capacity` cached blocks."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._hashes: OrderedDict[BlockHash, None] = OrderedDict()
        self._keys: OrderedDict[tuple[int, tuple[int, ...]], tuple[str, ...]] = OrderedDict()
        self._child: OrderedDict[BlockHash | None, tuple[int, ...]] = OrderedDict()

    def add(
        self,
        index: int,
        token_ids: tuple[int, ...],
        block_hash: BlockHash,
        parent: BlockHash | None,
        extra_keys: tuple[str, ...],
    ) -> None:
        """Remember a block."""
        _remember(self._hashes, block_hash, None, self._capacity)
        _remember(self._keys, (index, token_ids), extra_keys, self._capacity)
        _remember(self._child, parent, token_ids, self._capacity)

    def why_missed(
        self,
        index: int,
        token_ids: Sequence[int],
        block_hash: BlockHash,
        parent: BlockHash | None,
        extra_keys: tuple[str, ...],
    ) -> Miss:
        """Explain a miss."""
        if block_hash in self._hashes:
            return Miss(MissReason.EVICTED)
        if self._keys.get((index, tuple(token_ids)), extra_keys) != extra_keys:
            return Miss(MissReason.OTHER_SALT)
        child = self._child.get(parent)
        if child is None or child[0] != token_ids[0]:
            return Miss(MissReason.NEVER_SEEN)
        differing = next((i for i, pair in enumerate(zip(child, token_ids, strict=True)) if pair[0] != pair[1]), None)
        if differing is None:
            return Miss(MissReason.EVICTED)
        return Miss(MissReason.DIFFERENT_TOKEN, index * len(child) + differing)


def _remember(memory: OrderedDict[Any, Any], key: object, value: object, capacity: int) -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > capacity:
        memory.popitem(last=False)
