"""File format of the disk store. The functions raise `OSError`.

    offset 0   magic, format version, number of blocks, bytes of a block (little-endian, 8 + 4 + 4 + 8)
          24   SHA-256 of the header: the bytes before this field, and the table after it
          56   the table: for each block the key, and the SHA-256 of key and content
               zeros up to a multiple of 4096
               the blocks, without gaps

SHA-256 is fast, because processors have instructions for it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KEY_BYTES = 32
FORMAT_VERSION = 1
_MAGIC = b"octavoKV"
_START = struct.Struct("<8sIIQ")
_CHECKSUM_BYTES = hashlib.sha256().digest_size
_TABLE_AT = _START.size + _CHECKSUM_BYTES
_ENTRY_BYTES = KEY_BYTES + _CHECKSUM_BYTES
_PAGE_BYTES = 4096
_MAX_VECTORS = 256  # buffers per system call; Linux allows 1024
_MAX_CALL_BYTES = 64 << 20


class CorruptFileError(Exception):
    """A file with a wrong format, size or checksum."""


class OtherFormatError(Exception):
    """Another format version."""


@dataclass(frozen=True, slots=True)
class Header:
    """A file's header. checksums: `block_checksum` of each block."""

    block_bytes: int
    keys: tuple[bytes, ...]
    checksums: tuple[bytes, ...]


def file_bytes(num_blocks: int, block_bytes: int) -> int:
    """Return a file's size in bytes."""
    return _header_bytes(num_blocks) + num_blocks * block_bytes


def _header_bytes(num_blocks: int) -> int:
    return -(-(_TABLE_AT + num_blocks * _ENTRY_BYTES) // _PAGE_BYTES) * _PAGE_BYTES


def block_checksum(key: bytes, block: memoryview) -> bytes:
    """Return the SHA-256 of key and block."""
    digest = hashlib.sha256(key)
    digest.update(block)
    return digest.digest()


def write_blocks(descriptor: int, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
    """Write a whole file, and wait until it is on disk."""
    start = _START.pack(_MAGIC, FORMAT_VERSION, len(keys), len(blocks[0]))
    entries = b"".join(key + block_checksum(key, block) for key, block in zip(keys, blocks, strict=True))
    table = entries.ljust(_header_bytes(len(keys)) - _TABLE_AT, b"\0")
    header = start + hashlib.sha256(start + table).digest() + table
    if _move_all(os.pwritev, descriptor, [memoryview(header), *blocks], 0):
        raise OSError(errno.EIO, "the system wrote no bytes")
    os.fsync(descriptor)


def read_header(descriptor: int, num_bytes: int) -> Header:
    """Read a header. num_bytes: File size. Also raises `CorruptFileError` and `OtherFormatError`."""
    first = os.pread(descriptor, _PAGE_BYTES, 0)
    if len(first) < _TABLE_AT:
        raise CorruptFileError("it ends within its header")
    magic, version, num_blocks, block_bytes = _START.unpack_from(first)
    if magic != _MAGIC:
        raise CorruptFileError("it does not begin with the magic bytes of this format")
    if version != FORMAT_VERSION:
        raise OtherFormatError(f"its format has version {version}, this is version {FORMAT_VERSION}")
    if not num_blocks or file_bytes(num_blocks, block_bytes) != num_bytes:
        raise CorruptFileError(
            f"its header announces {num_blocks} blocks of {block_bytes} bytes, but the file has {num_bytes} bytes"
        )
    size = _header_bytes(num_blocks)
    whole = first if size == _PAGE_BYTES else first + os.pread(descriptor, size - _PAGE_BYTES, _PAGE_BYTES)
    if hashlib.sha256(whole[: _START.size] + whole[_TABLE_AT:]).digest() != whole[_START.size : _TABLE_AT]:
        raise CorruptFileError("its header does not match its checksum")
    table = range(_TABLE_AT, _TABLE_AT + num_blocks * _ENTRY_BYTES, _ENTRY_BYTES)
    return Header(
        block_bytes,
        tuple(whole[at : at + KEY_BYTES] for at in table),
        tuple(whole[at + KEY_BYTES : at + _ENTRY_BYTES] for at in table),
    )


def read_blocks(descriptor: int, header: Header, first: int, blocks: Sequence[memoryview]) -> int:
    """Fill blocks, beginning with the file's block `first`. Return the number of leading valid blocks."""
    offset = _header_bytes(len(header.keys)) + first * header.block_bytes
    _move_all(os.preadv, descriptor, blocks, offset)  # if the file is too short, the checksums differ
    for index, block in enumerate(blocks):
        if block_checksum(header.keys[first + index], block) != header.checksums[first + index]:
            return index
    return len(blocks)


def is_ours(found: os.stat_result) -> bool:
    """True for this user's regular files."""
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def sync_directory(path: str) -> None:
    """Wait until the file names of a directory are on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _move_all(
    move: Callable[[int, list[memoryview], int], int], descriptor: int, views: Sequence[memoryview], offset: int
) -> bool:
    """Return True if the file is too short."""
    waiting = [view for view in reversed(views) if len(view)]  # empty if the first KV group has no layers
    while waiting:
        batch = [waiting.pop()]
        num_bytes = len(batch[0])
        while waiting and len(batch) < _MAX_VECTORS and num_bytes + len(waiting[-1]) <= _MAX_CALL_BYTES:
            batch.append(waiting.pop())
            num_bytes += len(batch[-1])
        moved = move(descriptor, batch, offset)
        if not moved:
            return True
        offset += moved
        while batch and moved >= len(batch[0]):
            moved -= len(batch.pop(0))
        if moved:
            batch[0] = batch[0][moved:]
        waiting.extend(reversed(batch))
    return False
