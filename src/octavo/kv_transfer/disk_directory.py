"""The directory of a disk store, shared by several processes.

    TOKEN.kv      blocks, see `octavo.kv_transfer.disk_file`; never changed; its time is the last use
    TOKEN.tmp     an unfinished file, locked while its writer lives
    TOKEN.bad     a corrupt file, which is evicted first
    lock          locked while files are added or removed; each change writes new random bytes into it

Links, files with other names and other users' files are ignored. Reading takes no lock, because a removed file is only
a miss. A writer takes the lock to reserve space and to rename its complete file, but not while it writes.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import re
import secrets
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from octavo.kv_transfer.disk_file import CorruptFileError, OtherFormatError, is_ours, read_header, sync_directory
from octavo.kv_transfer.disk_index import BlockFile, DiskIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from octavo.kv_transfer.disk_file import Header

logger = logging.getLogger(__name__)
_FILE_MODE, _DIRECTORY_MODE = 0o600, 0o700
_NAME = re.compile(r"[0-9a-f]{32}\.(kv|tmp|bad)")
_LOCK_WAIT_S, _LOCK_POLL_S = 2.0, 0.002  # limited, because a suspended process may hold the lock forever
_GENERATION_BYTES = 16
_RECOUNT_S = 60.0  # until all files are listed again
_SCAN_SHARE = 0.05  # share of one thread's time for listing files
_SETTLED_NS = 50_000_000  # two changes within one tick of the file system's clock give the directory the same time
_MAX_STUCK = 8  # after so many undeletable files, eviction fails
_UNREADABLE_S = 60.0  # until an unreadable file is retried


class DiskDirectory:
    """Files of blocks in a directory, which is created if missing. Thread-safe. Methods raise `OSError`.

    sizes: Block sizes that this engine reads. Files with other sizes are only counted.
    """

    def __init__(self, path: Path, sizes: set[int], max_bytes: int) -> None:
        self.path = path
        self._root = str(path)
        self.index = DiskIndex()
        self.num_evicted = 0  # blocks
        self.num_corrupt = 0  # files
        self._sizes, self._max_bytes = sizes, max_bytes
        self._mutex = threading.Lock()
        self._writing: dict[str, int] = {}  # bytes of all processes' temporary files, by name
        self._temporaries: set[str] = set()  # of this process
        self._unreadable: dict[str, float] = {}
        self._generation = b""  # content of `lock` at the last count; b"" if a count is due
        self._counted_at = -math.inf
        self._lock_descriptor = -1
        self._seen_ns: int | None = None  # modification time of the directory at the last listing
        self._next_look_at = 0.0
        path.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
        with self._mutex:
            self._list()

    @property
    def num_bytes(self) -> int:
        """Size of all processes' files, including unfinished files."""
        return self.index.num_bytes + sum(list(self._writing.values()))

    def look(self) -> None:
        """Update the index if the directory changed, except shortly after the last listing."""
        if time.monotonic() < self._next_look_at and not self._is_gone():
            return
        with self._mutex:
            if self._unreadable or self._changed_ns() != self._seen_ns:
                self._list()

    def _is_gone(self) -> bool:
        return self._seen_ns != 0 and not self.path.exists()

    def _changed_ns(self) -> int:
        try:
            return self.path.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _list(self, *, locked: bool = False) -> None:
        began, changed_ns = time.monotonic(), self._changed_ns()
        is_settled = time.time_ns() - changed_ns > _SETTLED_NS
        names, new = self._entries()
        temporary = {name for name in names if name.endswith(".tmp")}
        is_as_known = not new and temporary == set(self._writing)
        for name in self.index.names() - names:
            self.index.drop(name)
            is_as_known = False
        for name in new:
            self._take_in(name, locked=locked)
        self._writing = {name: self._writing.get(name) or self._size(name) for name in temporary}
        if not is_as_known and not locked:
            self._generation = b""  # another process may be making a change
        self._seen_ns = changed_ns if is_settled else None
        ended = time.monotonic()
        self._next_look_at = ended + (ended - began) / _SCAN_SHARE

    def _entries(self) -> tuple[set[str], list[str]]:
        names, new = set(), []
        now = time.monotonic()
        again = {name for name, until in self._unreadable.items() if until <= now}
        for name in again:
            del self._unreadable[name]
        with suppress(FileNotFoundError), os.scandir(self.path) as entries:
            for entry in entries:
                name = entry.name
                if name in self.index and name not in again:
                    names.add(name)
                elif _NAME.fullmatch(name) and entry.is_file(follow_symlinks=False):
                    names.add(name)
                    if not name.endswith(".tmp"):
                        new.append(name)
        return names, new

    def _size(self, name: str) -> int:
        try:
            found = (self.path / name).lstat()
        except FileNotFoundError:
            return 0
        return found.st_size if is_ours(found) else 0

    def _take_in(self, name: str, *, locked: bool) -> None:
        is_bad = name.endswith(".bad")
        try:
            with self.open(name) as (descriptor, found):
                if not is_ours(found):
                    return
                keys = () if is_bad else self._keys_of(descriptor, found.st_size)
        except FileNotFoundError:
            pass
        except CorruptFileError as error:
            self.num_corrupt += 1
            self._set_aside(name, str(error), locked=locked)
        except OSError as error:
            if error.errno == errno.EIO:
                self._set_aside(name, str(error), locked=locked)
            else:
                self._skip_undeletable(name)
        else:
            self.index.add(BlockFile(name, found.st_size, keys), 0 if is_bad else found.st_mtime_ns)

    def _keys_of(self, descriptor: int, num_bytes: int) -> tuple[bytes, ...]:
        try:
            header = read_header(descriptor, num_bytes)
        except OtherFormatError:
            return ()
        return header.keys if header.block_bytes in self._sizes else ()

    @contextmanager
    def open(self, name: str) -> Iterator[tuple[int, os.stat_result]]:
        """Open a file for reading. Yield (descriptor, status). Raises `OSError` for a link."""
        descriptor = os.open(f"{self._root}/{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            yield descriptor, os.fstat(descriptor)
        finally:
            os.close(descriptor)

    def header(self, descriptor: int, num_bytes: int) -> Header:
        """Read a header. Also raises `CorruptFileError`, even for another format version."""
        try:
            return read_header(descriptor, num_bytes)
        except OtherFormatError as error:
            raise CorruptFileError(str(error)) from error

    def touch(self, names: list[str]) -> None:
        """Mark files as used now, the first as newest, because later files are useless without the first."""
        now_ns = time.time_ns()
        for place, name in enumerate(names):
            try:
                os.utime(f"{self._root}/{name}", ns=(now_ns - place, now_ns - place), follow_symlinks=False)
            except OSError as error:  # a process without write permission does not affect eviction
                if error.errno not in {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS}:
                    raise

    def set_aside(self, name: str, reason: str) -> None:
        """Rename a faulty file to `.bad`. Log the reason."""
        with self._mutex:
            self._set_aside(name, reason, locked=False)

    def _set_aside(self, name: str, reason: str, *, locked: bool) -> None:
        file = self.index.drop(name)
        logger.warning("KV file %s is set aside: %s", self.path / name, reason)
        bad = name.removesuffix(".kv") + ".bad"
        try:
            with nullcontext() if locked else self._locked():
                self._new_generation()
                (self.path / name).rename(self.path / bad)
        except FileNotFoundError:
            return
        except OSError:
            self._skip_undeletable(name)
            return
        size = file.num_bytes if file is not None else self._size(bad)
        self.index.add(BlockFile(bad, size), 0)

    def _skip_undeletable(self, name: str) -> None:
        """Count a file's bytes, and retry later."""
        self._unreadable[name] = time.monotonic() + _UNREADABLE_S
        self.index.add(BlockFile(name, self._size(name)), 0)

    def remove(self, names: list[str]) -> None:
        """Delete files, also in the index."""
        with self._mutex, self._locked():
            self._new_generation()
            for name in names:
                self.index.drop(name)
                (self.path / name).unlink(missing_ok=True)

    def make_room(self, num_bytes: int) -> None:
        """Evict files until num_bytes fit, and remove files of dead writers."""
        with self._mutex, self._locked():
            self._make_room(num_bytes)

    def write(self, num_bytes: int, keys: tuple[bytes, ...], fill: Callable[[int], None]) -> None:
        """Add a file that `fill(descriptor)` writes, unless `fill` raises. Evicts files if needed."""
        name = secrets.token_hex(16)
        temporary, final = f"{name}.tmp", f"{name}.kv"
        self.path.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
        descriptor = self._begin(temporary, num_bytes)
        try:
            fill(descriptor)
            now_ns = time.time_ns()
            os.utime(descriptor, ns=(now_ns, now_ns))
            with self._mutex, self._locked():
                (self.path / temporary).rename(self.path / final)
                self._writing.pop(temporary, None)
                self.index.add(BlockFile(final, num_bytes, keys), now_ns)
        except BaseException:
            with suppress(OSError):
                (self.path / temporary).unlink()
            with self._mutex:
                self._writing.pop(temporary, None)
            raise
        finally:
            self._temporaries.discard(temporary)
            os.close(descriptor)
        sync_directory(self._root)

    def _begin(self, temporary: str, num_bytes: int) -> int:
        with self._mutex, self._locked():
            self._make_room(num_bytes)
            self._new_generation()
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self.path / temporary, flags, _FILE_MODE)
            self._temporaries.add(temporary)
            self._writing[temporary] = num_bytes
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(descriptor, num_bytes)
            except BaseException:
                self._temporaries.discard(temporary)
                self._writing.pop(temporary, None)
                with suppress(OSError):
                    (self.path / temporary).unlink()
                os.close(descriptor)
                raise
            return descriptor

    # --- eviction, under the lock -------------------------------------------------------------------------------------

    def _make_room(self, num_bytes: int) -> None:
        self._count()
        num_stuck = 0
        while self.num_bytes + num_bytes > self._max_bytes:
            oldest = self.index.oldest()
            if oldest is None:
                raise OSError(errno.ENOSPC, f"all of {self._max_bytes} bytes are used by files that are being written")
            try:
                self._evict(*oldest)
            except PermissionError:
                num_stuck += 1
                if num_stuck > _MAX_STUCK:
                    raise
                self.index.used(oldest[1], time.time_ns())

    def _evict(self, used_ns: int, name: str) -> None:
        path = self.path / name
        try:
            found = path.lstat()
        except FileNotFoundError:
            found = None
        if found is None or not is_ours(found):
            self.index.drop(name)
            return
        if used_ns and found.st_mtime_ns > used_ns:
            self.index.used(name, found.st_mtime_ns)
            return
        self._new_generation()
        path.unlink(missing_ok=True)
        file = self.index.drop(name)
        self.num_evicted += len(file.keys) if file is not None else 0

    def _count(self) -> None:
        """List files if another process may have added files, and remove files of dead writers."""
        now = time.monotonic()
        if self._generation and self._read_generation() == self._generation and now < self._counted_at + _RECOUNT_S:
            return
        self._list(locked=True)
        for name in set(self._writing) - self._temporaries:
            if self._is_dead(name):
                with suppress(PermissionError):
                    (self.path / name).unlink(missing_ok=True)
                    del self._writing[name]
        self._generation = self._read_generation()
        self._counted_at = now

    def _is_dead(self, name: str) -> bool:
        try:
            with self.open(name) as (descriptor, found):
                if not is_ours(found):
                    return False
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except FileNotFoundError:
            pass
        except OSError as error:
            return error.errno in {errno.EACCES, errno.EPERM, errno.EIO} and self._size(name) > 0
        return True

    def _read_generation(self) -> bytes:
        return os.pread(self._lock_descriptor, _GENERATION_BYTES, 0)

    def _new_generation(self) -> None:
        is_counted = self._read_generation() == self._generation
        generation = secrets.token_bytes(_GENERATION_BYTES)
        os.pwrite(self._lock_descriptor, generation, 0)
        self._generation = generation if is_counted else b""

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Needs the mutex. Raises `TimeoutError` if another process holds the lock."""
        self._lock_descriptor = self._lock()
        try:
            yield
        finally:
            os.close(self._lock_descriptor)

    def _lock(self) -> int:
        until = time.monotonic() + _LOCK_WAIT_S
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        while True:
            descriptor = os.open(f"{self._root}/lock", flags, _FILE_MODE)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_in_place(descriptor):
                    return descriptor
            except BlockingIOError:
                pass
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            if time.monotonic() > until:
                raise TimeoutError(errno.ETIMEDOUT, f"another process holds {self._root}/lock ({_LOCK_WAIT_S:g} s)")
            time.sleep(_LOCK_POLL_S)

    def _is_in_place(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), (self.path / "lock").lstat())
        except FileNotFoundError:
            return False
