"""A store in a pool of Mooncake, to which engines on several machines lend memory.

Bytes from the pool are not trusted. Each read compares an object's key and checksum.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import struct
import threading
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING

from octavo.kv_transfer.interface import StoreError, StoreStats
from octavo.kv_transfer.mooncake_client import MooncakeClient, client_bytes, local_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from octavo.kv_transfer.mooncake_client import Area

logger = logging.getLogger(__name__)
FORMAT = 1
_PREFIX = f"octavo-kv-{FORMAT}-"
_HEADER = struct.Struct("<8s32s32s")  # magic, key, checksum over key and bytes
_HEADER_BYTES = 128  # aligns the block to a cache line
_MAGIC = b"octavoK" + bytes([FORMAT])
_MAX_KNOWN = 1 << 17
_MAX_QUERIED = 256  # keys per query
_WRONG_SIZE, _TRANSFER_FAILED = -600, -800
_NO_MASTER = (-900, -901)
_HAS = 1


class MooncakeStore:
    """A `KVStore` over the pool of a `mooncake_master`. Raises `StoreError` if it cannot connect.

    All objects have one size. A block with only the first KV group is padded with zeros. A restarted master has an
    empty pool, so each query also asks for a mark that this store has put there. If the mark is missing, all
    known keys are forgotten. Blocks go into other engines' memory only if this engine's memory is full.
    """

    name = "mooncake"

    def __init__(
        self,
        block_bytes: int,
        *,
        master: str,
        protocol: str = "tcp",
        segment_bytes: int = 0,
    ) -> None:
        self.block_bytes = block_bytes
        self._connect: Callable[[], MooncakeClient] = lambda: MooncakeClient(
            host=local_address(master),
            master=master,
            protocol=protocol,
            segment_bytes=segment_bytes,
            object_bytes=_HEADER_BYTES + block_bytes,
        )
        self._opening = threading.Lock()
        self._lock = threading.Lock()  # guards all fields below
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._mark = _new_mark()
        self._num_corrupt = 0
        self._num_errors = 0
        self._error = ""
        self._is_closed = False
        self._client = self._connect()

    @staticmethod
    def host_bytes(block_bytes: int, segment_bytes: int) -> int:
        """Return host memory in bytes, including lent memory."""
        return client_bytes(_HEADER_BYTES + block_bytes, segment_bytes)

    def num_matched(self, keys: Sequence[bytes]) -> int:
        """Count the leading keys that the pool has, and lease them for the following load.

        If keys is empty, only check that the master answers.
        """
        if not keys:
            self._has([])
        count = 0
        while count < len(keys):
            queried = keys[count : count + _MAX_QUERIED]
            has = self._has(queried)
            found = has.index(False) if False in has else len(queried)
            count += found
            if found < len(queried):
                break
        return count

    def _has(self, keys: Sequence[bytes]) -> list[bool]:
        with self._area() as area:
            mark = self._mark
            *codes, marked = self._call(area, "has", [*map(_name, keys), mark])
            if marked != _HAS:
                self._begin_anew(area, mark)
        with self._lock:
            for key, code in zip(keys, codes, strict=True):
                self._note(key, is_there=code == _HAS)
        return [code == _HAS for code in codes]

    def lacks(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return the keys that this store neither saved nor found in the pool."""
        with self._lock:
            return {key for key in keys if key not in self._known}

    def load(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """See `KVStore`."""
        count = 0
        with self._area() as area:
            for some, into in _in_parts(keys, blocks, len(area.objects)):
                codes = self._call(area, "get", [*map(_name, some)])
                whole = [
                    self._take(area, index, code, key, block)
                    for index, (code, key, block) in enumerate(zip(codes, some, into, strict=True))
                ]
                count += whole.index(False) if False in whole else len(whole)
                wrong = [
                    key for key, code, is_whole in zip(some, codes, whole, strict=True) if _is_wrong(code, is_whole)
                ]
                if wrong:
                    self._call(area, "remove", [*map(_name, wrong)])
                if False in whole:
                    break
        return count

    def _take(self, area: Area, index: int, code: int, key: bytes, block: memoryview) -> bool:
        stored = area.objects[index]
        is_whole = code == len(stored)
        if is_whole:
            block[:] = stored[_HEADER_BYTES : _HEADER_BYTES + len(block)]
            is_whole = bytes(stored[: _HEADER.size]) == _header(key, block)
        with self._lock:
            self._note(key, is_there=is_whole)
            if _is_wrong(code, is_whole):
                self._num_corrupt += 1
                logger.warning("Mooncake returned other bytes for a block than were saved: they are not used")
        return is_whole

    def save(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """See `KVStore`."""
        count, is_whole = 0, True
        with self._area() as area:
            for some, from_blocks in _in_parts(keys, blocks, len(area.objects)):
                for stored, key, block in zip(area.objects, some, from_blocks, strict=False):
                    stored[: _HEADER.size] = _header(key, block)
                    end = _HEADER_BYTES + len(block)
                    stored[_HEADER_BYTES:end] = block
                    stored[end:] = bytes(len(stored) - end)
                codes = self._call(area, "put", [*map(_name, some)])
                with self._lock:
                    for key, code in zip(some, codes, strict=True):
                        self._note(key, is_there=code == 0)
                        is_whole = is_whole and code == 0
                        count += is_whole
        return count

    def forget(self, keys: Sequence[bytes]) -> None:
        """Remove blocks, even if leased. A concurrent reader notices the removal by the checksum."""
        if not keys:
            return
        with self._lock:
            for key in keys:
                self._note(key, is_there=False)
        with self._area() as area:
            self._call(area, "remove", [*map(_name, keys)])

    def stats(self) -> StoreStats:
        """See `KVStore`. Counts only known blocks."""
        with self._lock:
            count = len(self._known)
            return StoreStats(
                count,
                count * self.block_bytes,
                None,
                num_corrupt=self._num_corrupt,
                num_errors=self._num_errors,
                error=self._error,
            )

    def close(self) -> None:
        """Withdraw the lent memory, and end the client's process."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            self._client.close()

    @contextmanager
    def _area(self) -> Iterator[Area]:
        try:
            with self._living_client().area() as area:
                yield area
        except StoreError as error:
            with self._lock:
                self._num_errors += 1
                self._error = str(error)
            raise

    def _living_client(self) -> MooncakeClient:
        with self._opening:
            if not self._is_closed and not self._client.is_alive:
                self._client = self._connect()
                self._forget_all()
            client = self._client
        if self._is_closed:
            client.close()  # opened during `close`
            raise StoreError("the store is closed")
        return client

    def _call(self, area: Area, name: str, names: list[str]) -> list[int]:
        codes = area.call(name, names)
        if any(code in _NO_MASTER for code in codes):
            raise StoreError("mooncake_master does not answer")
        with self._lock:
            self._error = ""
            self._num_errors += codes.count(_TRANSFER_FAILED)
        return codes

    def _begin_anew(self, area: Area, mark: str) -> None:
        with self._lock:
            if self._mark != mark:
                return
            self._mark = _new_mark()
        self._forget_all()
        self._call(area, "put", [self._mark])

    def _forget_all(self) -> None:
        with self._lock:
            self._known.clear()

    def _note(self, key: bytes, *, is_there: bool) -> None:
        """Needs the lock."""
        if not is_there:
            self._known.pop(key, None)
            return
        self._known[key] = None
        self._known.move_to_end(key)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)


def _is_wrong(code: int, is_whole: bool) -> bool:
    """False if no bytes arrived: the block may still be in the pool."""
    return not is_whole and (code >= 0 or code == _WRONG_SIZE)


def _new_mark() -> str:
    return f"{_PREFIX}mark-{secrets.token_hex(16)}"


def _name(key: bytes) -> str:
    return _PREFIX + key.hex()


def _header(key: bytes, block: memoryview) -> bytes:
    checksum = hashlib.sha256(key)
    checksum.update(block)
    return _HEADER.pack(_MAGIC, key, checksum.digest())


def _in_parts(
    keys: Sequence[bytes], blocks: Sequence[memoryview], size: int
) -> Iterator[tuple[Sequence[bytes], Sequence[memoryview]]]:
    for start in range(0, len(keys), size):
        yield keys[start : start + size], blocks[start : start + size]
