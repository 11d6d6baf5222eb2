"""The keys in pending saves."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo.core.kv.block_hash import BlockHash


class PendingKeys:
    """Counts the pending saves of each key. `len` counts a key once for each of its saves."""

    def __init__(self) -> None:
        self._num_saves: dict[BlockHash, int] = {}
        self._num_keys = 0

    def __len__(self) -> int:
        return self._num_keys

    def lacking(self, keys: Iterable[BlockHash]) -> set[BlockHash]:
        """Return the keys that are in no pending save."""
        return {key for key in keys if key not in self._num_saves}

    def start(self, keys: Iterable[BlockHash]) -> None:
        """Record a save of these keys."""
        for key in keys:
            self._num_saves[key] = self._num_saves.get(key, 0) + 1
            self._num_keys += 1

    def end(self, keys: Iterable[BlockHash]) -> None:
        """Record the end of a save of these keys."""
        for key in keys:
            self._num_keys -= 1
            if self._num_saves[key] == 1:
                del self._num_saves[key]
            else:
                self._num_saves[key] -= 1
