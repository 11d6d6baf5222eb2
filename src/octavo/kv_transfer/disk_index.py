"""A disk store's file index."""

from __future__ import annotations

import heapq
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MIN_SPARE = 1024  # stale heap entries before a rebuild


@dataclass(frozen=True, slots=True)
class BlockFile:
    """A file of a disk store. keys: () if this engine cannot use the blocks."""

    name: str
    num_bytes: int
    keys: tuple[bytes, ...] = ()


class DiskIndex:
    """The files of a directory by name, key and age. Thread-safe.

    Ages may be outdated. Before an eviction, the caller checks whether the file was used later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[str, BlockFile] = {}
        self._holders: dict[bytes, tuple[BlockFile, ...]] = {}  # by key; the newest file last
        self._used_ns: dict[str, int] = {}  # by name: last known use
        self._by_age: list[tuple[int, str]] = []  # a heap; some entries are stale
        self._num_bytes = 0

    @property
    def num_blocks(self) -> int:
        """Number of keys."""
        return len(self._holders)

    @property
    def num_bytes(self) -> int:
        """Files' total size."""
        return self._num_bytes

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> set[str]:
        """Return all names."""
        with self._lock:
            return set(self._files)

    def add(self, file: BlockFile, used_ns: int) -> None:
        """Add or replace a file. used_ns: Time of the last use."""
        with self._lock:
            self._drop(file.name)
            self._files[file.name] = file
            self._num_bytes += file.num_bytes
            for key in dict.fromkeys(file.keys):
                self._holders[key] = (*self._holders.get(key, ()), file)
            self._used_ns[file.name] = used_ns
            heapq.heappush(self._by_age, (used_ns, file.name))
            if len(self._by_age) > 2 * len(self._files) + _MIN_SPARE:
                self._by_age = [(used_ns, name) for name, used_ns in self._used_ns.items()]
                heapq.heapify(self._by_age)

    def drop(self, name: str) -> BlockFile | None:
        """Remove and return a file, or return None if unknown. Keys of other files remain."""
        with self._lock:
            return self._drop(name)

    def _drop(self, name: str) -> BlockFile | None:
        file = self._files.pop(name, None)
        if file is not None:
            del self._used_ns[name]
            self._num_bytes -= file.num_bytes
            for key in dict.fromkeys(file.keys):
                others = tuple(each for each in self._holders[key] if each is not file)
                if others:
                    self._holders[key] = others
                else:
                    del self._holders[key]
        return file

    def oldest(self) -> tuple[int, str] | None:
        """Return (last use, name) of the least recently used file, or None."""
        with self._lock:
            while self._by_age and self._used_ns.get(self._by_age[0][1]) != self._by_age[0][0]:
                heapq.heappop(self._by_age)
            return self._by_age[0] if self._by_age else None

    def used(self, name: str, used_ns: int) -> None:
        """Set the time of a file's last use, if the file is still the oldest."""
        with self._lock:
            if self._by_age and self._by_age[0][1] == name:
                self._used_ns[name] = used_ns
                heapq.heapreplace(self._by_age, (used_ns, name))

    def lacking(self, keys: Iterable[bytes]) -> set[bytes]:
        """Return the keys that no file has."""
        with self._lock:
            return {key for key in keys if key not in self._holders}

    def files_of(self, keys: Sequence[bytes]) -> tuple[int, list[str]]:
        """Return the number of leading keys that have files, and the names of these files in order."""
        names: dict[str, None] = {}
        with self._lock:
            for count, key in enumerate(keys):
                holders = self._holders.get(key)
                if holders is None:
                    return count, list(names)
                names[holders[-1].name] = None
        return len(keys), list(names)

    def holders(self, keys: Iterable[bytes]) -> set[str]:
        """Return the names of files with any of these keys."""
        with self._lock:
            return {file.name for key in keys for file in self._holders.get(key, ())}

    def run(self, keys: Sequence[bytes]) -> tuple[BlockFile, int, int] | None:
        """Return (newest file with the first key, its index in the file, number of leading `keys` from there on).

        Returns None if no file has the first key.
        """
        with self._lock:
            holders = self._holders.get(keys[0])
        if holders is None:
            return None
        file = holders[-1]
        first = file.keys.index(keys[0])
        count = 1
        while count < len(keys) and file.keys[first + count : first + count + 1] == (keys[count],):
            count += 1
        return file, first, count
