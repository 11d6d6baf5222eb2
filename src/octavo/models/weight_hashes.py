"""Stores SHA-256 hashes of files.

A file with the same size, times and inode is unchanged, because users cannot reset a ctime.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)

MAX_ENTRIES = 1024
_PART_BYTES, _READ_BYTES = 8 << 20, 1 << 20
_READERS = 4
# Hashes of younger files are not stored, because two changes in one clock tick give equal times.
_SETTLED_NS = 2 * 10**9


@dataclass(frozen=True, slots=True)
class FileState:
    """Size, times, inode."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """Stat a file. Follows links."""
        stat = path.stat()
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


class FileHashes:
    """Hashes by resolved path, in a JSON file, which keeps the newest `MAX_ENTRIES`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known = _read(path)
        self._new: dict[str, tuple[FileState, str]] = {}

    def sha256(self, file: Path, state: FileState, on_progress: Callable[[], None]) -> str:
        """Return the hash of a file in this state; see `hash_file`."""
        known = self.known(file, state)
        if known is not None:
            return known
        settled_ns = time.time_ns() - _SETTLED_NS
        digest = hash_file(file, on_progress)
        if state.ctime_ns < settled_ns and FileState.of(file) == state:
            self._new[str(file.resolve())] = state, digest
        return digest

    def known(self, file: Path, state: FileState) -> str | None:
        """Return a stored hash."""
        name = str(file.resolve())
        entry = self._new.get(name) or self._known.get(name)
        return entry[1] if entry is not None and entry[0] == state else None

    def keep(self) -> None:
        """Write new hashes. Failures are only logged."""
        if not self._new:
            return
        entries = _read(self.path)
        for name, entry in self._new.items():
            entries.pop(name, None)
            entries[name] = entry
        newest = list(entries.items())[-MAX_ENTRIES:]
        text = json.dumps({name: asdict(state) | {"sha256": digest} for name, (state, digest) in newest}, indent=0)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(self.path) as file:
                file.write(text.encode())
        except OSError as error:
            logger.warning("%s cannot be written (%s): the next start reads the weights' files again", self.path, error)
        else:
            self._new.clear()


def hash_file(path: Path, on_progress: Callable[[], None] = lambda: None) -> str:
    """Return the SHA-256 over the SHA-256 of each 8 MiB. on_progress: called after each part. Raises `OSError`."""
    whole = hashlib.sha256()
    with path.open("rb") as file, ThreadPoolExecutor(_READERS, thread_name_prefix="octavo-hash") as pool:
        number = file.fileno()
        size = os.fstat(number).st_size

        def hash_part(start: int) -> bytes:
            digest, end = hashlib.sha256(), min(start + _PART_BYTES, size)
            while start < end:
                data = os.pread(number, min(end - start, _READ_BYTES), start)
                if not data:
                    raise OSError(f"{path} was truncated while it was read")
                digest.update(data)
                start += len(data)
            return digest.digest()

        for part in pool.map(hash_part, range(0, size, _PART_BYTES)):
            whole.update(part)
            on_progress()
    return whole.hexdigest()


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Write a temporary file that then replaces `path`."""
    number, unfinished = tempfile.mkstemp(suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            yield file
        Path(unfinished).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(unfinished).unlink()
        raise


def _read(path: Path) -> dict[str, tuple[FileState, str]]:
    try:
        entries = json.loads(path.read_bytes())
        digests = {name: entry.pop("sha256") for name, entry in entries.items()}
        return {name: (FileState(**entry), str(digests[name])) for name, entry in entries.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        logger.warning("%s cannot be read (%s): the weights' files are read again", path, error)
        return {}
