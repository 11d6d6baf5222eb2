"""What a disk store knows of its directory without asking it: files with their sizes and ages, and keys in them."""

from __future__ import annotations

import heapq
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MIN_SPARE = 1024  # ages of files that are gone, before they are removed


@dataclass(frozen=True, slots=True)
class BlockFile:
    """A file of a disk store. keys: of its blocks in order, () where they are not read: another format, not whole."""

    name: str
    num_bytes: int
    keys: tuple[bytes, ...] = ()


class DiskIndex:
    """The files of a directory by name, by key and by age. Any thread may call.

    Ages are those that files had when they were seen: who wants the oldest looks whether it has been used since.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[str, BlockFile] = {}
        self._file_of: dict[bytes, BlockFile] = {}
        self._used_ns: dict[str, int] = {}  # when each was used last, as far as it was seen
        self._by_age: list[tuple[int, str]] = []  # a heap of these, with files that are gone and what has changed
        self._num_bytes = 0

    @property
    def num_blocks(self) -> int:
        """Different keys."""
        return len(self._file_of)

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return self._num_bytes

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> set[str]:
        """Return those of all files."""
        with self._lock:
            return set(self._files)

    def add(self, file: BlockFile, used_ns: int) -> None:
        """Take in a file that was used last at this time."""
        with self._lock:
            self._drop(file.name)
            self._files[file.name] = file
            self._num_bytes += file.num_bytes
            for key in file.keys:
                self._file_of[key] = file  # the newest: an older one with the same makes way before it
            self._used_ns[file.name] = used_ns
            heapq.heappush(self._by_age, (used_ns, file.name))
            if len(self._by_age) > 2 * len(self._files) + _MIN_SPARE:
                self._by_age = [(used_ns, name) for name, used_ns in self._used_ns.items()]
                heapq.heapify(self._by_age)

    def drop(self, name: str) -> BlockFile | None:
        """Forget a file; return what it was."""
        with self._lock:
            return self._drop(name)

    def _drop(self, name: str) -> BlockFile | None:
        file = self._files.pop(name, None)
        if file is not None:
            del self._used_ns[name]
            self._num_bytes -= file.num_bytes
            for key in file.keys:
                if self._file_of.get(key) is file:
                    del self._file_of[key]
        return file

    def oldest(self) -> tuple[int, str] | None:
        """Return when the file that seems to be unused for longest was used, and its name."""
        with self._lock:
            while self._by_age and self._used_ns.get(self._by_age[0][1]) != self._by_age[0][0]:
                heapq.heappop(self._by_age)
            return self._by_age[0] if self._by_age else None

    def used(self, name: str, used_ns: int) -> None:
        """Take note that the oldest file was used at this time."""
        with self._lock:
            if self._by_age and self._by_age[0][1] == name:
                self._used_ns[name] = used_ns
                heapq.heapreplace(self._by_age, (used_ns, name))

    def lacking(self, keys: Iterable[bytes]) -> set[bytes]:
        """Return the keys that no file holds."""
        with self._lock:
            return {key for key in keys if key not in self._file_of}

    def files_of(self, keys: Sequence[bytes]) -> tuple[int, list[str]]:
        """Return how many of these, from the first one on, files hold, and the names of these files in that order."""
        names: dict[str, None] = {}
        with self._lock:
            for count, key in enumerate(keys):
                file = self._file_of.get(key)
                if file is None:
                    return count, list(names)
                names[file.name] = None
        return len(keys), list(names)

    def run(self, keys: Sequence[bytes]) -> tuple[BlockFile, int, int] | None:
        """Return the file that holds the first of these, its position there, and how many follow it as they do here."""
        with self._lock:
            file = self._file_of.get(keys[0])
        if file is None:
            return None
        first = file.keys.index(keys[0])
        count = 1
        while count < len(keys) and file.keys[first + count : first + count + 1] == (keys[count],):
            count += 1
        return file, first, count
