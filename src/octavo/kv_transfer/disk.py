"""Disk KV store."""

from __future__ import annotations

import errno
import logging
import shutil
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.kv_transfer.disk_directory import DiskDirectory
from octavo.kv_transfer.disk_file import KEY_BYTES, CorruptFileError, file_bytes, read_blocks, write_blocks
from octavo.kv_transfer.interface import StoreError, StoreStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)
DEFAULT_BYTES = 16 << 30
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


class DiskStore:
    """A `KVStore` in a directory, which processes with other models and versions of octavo may share.

    Each save writes one file. The least recently used file is evicted first, even after a restart. If writing fails,
    blocks are still served, and saving is retried after growing pauses.

    max_bytes: This process's limit for all files in the directory, by default `default_bound`. part_bytes: Size of
    blocks with only the first KV group, or None. These blocks have separate files.
    """

    name = "disk"

    def __init__(
        self,
        directory: Path,
        block_bytes: int,
        max_bytes: int | None,
        *,
        part_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the headers of all files. Raises `ConfigError` and `StoreError`."""
        self.check_bound(block_bytes, max_bytes)
        self.block_bytes = block_bytes
        self._lock = threading.Lock()
        self._num_corrupt = self._num_read_errors = 0
        self._writing = _Writing(directory, clock)
        self._is_closed = False
        with self._reading(directory):
            self._max_bytes = default_bound(directory) if max_bytes is None else max_bytes
            sizes = {block_bytes} if part_bytes is None else {block_bytes, part_bytes}
            self._directory = DiskDirectory(directory, sizes, self._max_bytes)
        self._write(lambda: self._directory.make_room(0))  # max_bytes may be lower than before

    @staticmethod
    def check_bound(block_bytes: int, max_bytes: int | None) -> None:
        """Raise `ConfigError` if max_bytes is too small for one block."""
        smallest = file_bytes(1, block_bytes)
        if max_bytes is not None and max_bytes < smallest:
            raise ConfigError(
                f"kv_disk_bytes is {max_bytes}; it must be at least {smallest} bytes, the size of a file with one block"
            )

    def num_matched(self, keys: Sequence[bytes]) -> int:
        """See `KVStore`."""
        if self._is_closed:
            return 0
        with self._reading(self._directory.path):
            self._directory.look()
            count, names = self._directory.index.files_of(keys)
            self._directory.touch(names)
        return count

    def lacks(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return the missing keys, or none while writing is paused."""
        if self._is_closed or not self._writing.may_try():
            return set()
        return self._directory.index.lacking(keys)

    def load(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """Fill blocks in order. If a file is unreadable or corrupt, read the block from another file."""
        done = 0
        while done < len(keys) and not self._is_closed:
            found = self._directory.index.run(keys[done:])
            if found is None:
                break
            file, first, count = found
            with self._reading(self._directory.path):
                done += self._load(file.name, first, keys[done : done + count], blocks[done : done + count])
        return done

    def _load(self, name: str, first: int, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        loaded, fault = 0, ""
        try:
            with self._directory.open(name) as (descriptor, found):
                header = self._directory.header(descriptor, found.st_size)
                if header.block_bytes != len(blocks[0]) or header.keys[first : first + len(keys)] != tuple(keys):
                    fault = "it contains other blocks than before"
                else:
                    loaded = read_blocks(descriptor, header, first, blocks)
                    fault = "" if loaded == len(keys) else f"block {first + loaded} does not match its checksum"
        except FileNotFoundError:
            self._directory.index.drop(name)
        except CorruptFileError as error:
            fault = str(error)
        except OSError as error:
            if error.errno == errno.ELOOP:  # replaced by a link
                self._directory.index.drop(name)
                return 0
            if error.errno != errno.EIO:
                raise
            with self._lock:
                self._num_read_errors += 1
            self._directory.set_aside(name, str(error))
        if fault:
            with self._lock:
                self._num_corrupt += 1
            self._directory.set_aside(name, fault)
        return loaded

    def save(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """Save missing blocks in one file. Raises `ValueError` for a wrong key length.

        Returns the number of leading stored blocks. The last blocks are omitted if the file would exceed max_bytes.
        """
        if self._is_closed:
            return 0
        wrong = next((key for key in keys if len(key) != KEY_BYTES), None)
        if wrong is not None:
            raise ValueError(f"a key of {KEY_BYTES} bytes was expected, got {len(wrong)}")
        if self._writing.may_try():
            self._write(lambda: self._save(keys, blocks))
        return self._directory.index.files_of(keys)[0]

    def _save(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        self._directory.look()
        lacking = self._directory.index.lacking(keys)
        chosen = {key: index for index, key in reversed(list(enumerate(keys))) if key in lacking}
        new, block_bytes = sorted(chosen.values()), len(blocks[0])
        while file_bytes(len(new), block_bytes) > self._max_bytes:
            new.pop()
        if not new:
            return
        new_keys, new_blocks = tuple(keys[index] for index in new), [blocks[index] for index in new]
        size = file_bytes(len(new), block_bytes)
        self._directory.write(size, new_keys, lambda descriptor: write_blocks(descriptor, new_keys, new_blocks))

    def _write(self, change: Callable[[], None]) -> None:
        try:
            change()
        except OSError as error:
            self._writing.failed(error)
        else:
            self._writing.succeeded()

    def forget(self, keys: Sequence[bytes]) -> None:
        """Delete all files with any of these keys, including other blocks in these files."""
        names = self._directory.index.holders(keys)
        if names and not self._is_closed:
            with self._reading(self._directory.path):
                self._directory.remove(sorted(names))

    def stats(self) -> StoreStats:
        """See `KVStore`. num_bytes includes all files."""
        directory = self._directory
        return StoreStats(
            directory.index.num_blocks,
            directory.num_bytes,
            self._max_bytes,
            directory.num_evicted,
            self._num_corrupt + directory.num_corrupt,
            self._num_read_errors + self._writing.num_errors,
            self._writing.error,
        )

    def close(self) -> None:
        """Ignore later lookups, loads and saves. The files remain."""
        self._is_closed = True

    @contextmanager
    def _reading(self, directory: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with self._lock:
                self._num_read_errors += 1
            raise StoreError(f"{directory} cannot be read: {error}") from error


def default_bound(directory: Path) -> int:
    """Return 16 GiB, but at most half of (free space + existing files).

    Creates the directory. Raises `OSError`.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = [path.lstat() for path in directory.glob("*.kv")]
    return min(DEFAULT_BYTES, (shutil.disk_usage(directory).free + sum(file.st_size for file in files)) // 2)


class _Writing:
    def __init__(self, directory: Path, clock: Callable[[], float]) -> None:
        self.error = ""
        self.num_errors = 0
        self._directory, self._clock = directory, clock
        self._lock = threading.Lock()
        self._pause_s = self._resumes_at = 0.0

    def may_try(self) -> bool:
        """False while paused."""
        return not self.error or self._clock() >= self._resumes_at

    def failed(self, error: OSError) -> None:
        """Begin or double the pause."""
        with self._lock:
            is_first = not self.error
            self.error = f"nothing can be written: {error}"
            self.num_errors += 1
            self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            self._resumes_at = self._clock() + self._pause_s
        if is_first:
            logger.warning(
                "%s: no KV can be written (%s); stored KV is still read, and writing is retried periodically",
                self._directory,
                error,
            )

    def succeeded(self) -> None:
        """End the pauses."""
        with self._lock:
            was_failing = bool(self.error)
            self.error, self._pause_s = "", 0.0
        if was_failing:
            logger.info("%s: KV can be written again", self._directory)
