"""The format of a disk store's files, byte by byte, and the system calls that move them."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import struct
from types import SimpleNamespace

import pytest
from kv_transfer.disk_blocks import content_of, keys_from

from octavo.kv_transfer import disk_file
from octavo.kv_transfer.disk_file import (
    CorruptFileError,
    OtherFormatError,
    _move_all,
    block_checksum,
    file_bytes,
    is_ours,
    read_blocks,
    read_header,
    sync_directory,
    write_blocks,
)

BLOCK_BYTES = 16


def written(path, count):
    """Write a file of `count` blocks. Return its keys and its bytes."""
    keys = keys_from(0, count)
    with path.open("w+b") as file:
        write_blocks(file.fileno(), keys, [memoryview(content_of(key, BLOCK_BYTES)) for key in keys])
    return keys, path.read_bytes()


def header_of(path, num_bytes=None):
    with path.open("rb") as file:
        return read_header(file.fileno(), path.stat().st_size if num_bytes is None else num_bytes)


@pytest.mark.parametrize(("count", "header_bytes"), [(1, 4096), (63, 4096), (64, 8192), (127, 8192), (128, 12288)])
def test_file_has_page_aligned_header_then_blocks(tmp_path, count, header_bytes):
    keys, data = written(tmp_path / "file", count)
    assert file_bytes(count, BLOCK_BYTES) == len(data) == header_bytes + count * BLOCK_BYTES
    blocks = [content_of(key, BLOCK_BYTES) for key in keys]
    assert data[header_bytes:] == b"".join(blocks)
    start = b"octavoKV" + struct.pack("<IIQ", 1, count, BLOCK_BYTES)
    sums = [hashlib.sha256(key + block).digest() for key, block in zip(keys, blocks, strict=True)]
    table = b"".join(key + each for key, each in zip(keys, sums, strict=True))
    table = table.ljust(header_bytes - 56, b"\0")
    assert data[:header_bytes] == start + hashlib.sha256(start + table).digest() + table
    header = header_of(tmp_path / "file")
    assert (header.block_bytes, header.keys, header.checksums) == (BLOCK_BYTES, tuple(keys), tuple(sums))


def test_checksum_covers_key_and_content():
    assert block_checksum(b"key", memoryview(b"block")) == hashlib.sha256(b"keyblock").digest()


def test_write_blocks_syncs_file_before_returning(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with (tmp_path / "file").open("w+b") as file:
        write_blocks(file.fileno(), keys_from(0, 1), [memoryview(bytes(BLOCK_BYTES))])
        assert synced == [file.fileno()]
        monkeypatch.setattr(os, "pwritev", lambda *_: 0)
        with pytest.raises(OSError, match="the system wrote no bytes") as error:
            write_blocks(file.fileno(), keys_from(0, 1), [memoryview(bytes(BLOCK_BYTES))])
    assert error.value.errno == errno.EIO


def test_read_header_reads_only_header_pages(tmp_path, monkeypatch):
    asked, pread = [], os.pread

    def counted(descriptor, count, offset):
        asked.append((count, offset))
        return pread(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", counted)
    for count in (63, 64):
        written(tmp_path / "file", count)
        header_of(tmp_path / "file")
    assert asked == [(4096, 0), (4096, 0), (4096, 4096)]


def test_invalid_header_error_names_reason(tmp_path):
    path = tmp_path / "file"
    _, data = written(path, 1)

    def fault(changed, num_bytes=None):
        path.write_bytes(changed)
        with pytest.raises((CorruptFileError, OtherFormatError)) as error:
            header_of(path, num_bytes)
        return type(error.value), str(error.value)

    assert fault(data[:55]) == (CorruptFileError, "it ends within its header")
    assert fault(data[:56]) == (
        CorruptFileError,
        "its header announces 1 blocks of 16 bytes, but the file has 56 bytes",
    )
    assert fault(b"x" + data[1:]) == (CorruptFileError, "it does not begin with the magic bytes of this format")
    other = data[:8] + struct.pack("<I", 2) + data[12:]
    assert fault(other) == (OtherFormatError, "its format has version 2, this is version 1")
    assert fault(data + b"x") == (
        CorruptFileError,
        "its header announces 1 blocks of 16 bytes, but the file has 4113 bytes",
    )
    assert fault(data[:-17], len(data)) == (CorruptFileError, "its header does not match its checksum")
    start = b"octavoKV" + struct.pack("<IIQ", 1, 0, BLOCK_BYTES)
    empty = start + hashlib.sha256(start + bytes(4040)).digest() + bytes(4040)
    assert fault(empty[:56], 0) == (
        CorruptFileError,
        "its header announces 0 blocks of 16 bytes, but the file has 0 bytes",
    )


@pytest.mark.parametrize("bad", [None, 2, 3])
def test_read_stops_at_first_corrupt_block(tmp_path, bad):
    path = tmp_path / "file"
    keys, data = written(path, 5)
    header = header_of(path)
    if bad is not None:
        at = 4096 + bad * BLOCK_BYTES
        path.write_bytes(data[:at] + b"x" + data[at + 1 :])
    blocks = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(3)]
    with path.open("rb") as file:
        count = read_blocks(file.fileno(), header, 1, blocks)
    assert count == (3 if bad is None else bad - 1)
    assert [bytes(block) for block in blocks[:count]] == [content_of(key, BLOCK_BYTES) for key in keys[1 : 1 + count]]


def test_is_ours_accepts_only_regular_files_of_this_user(tmp_path):
    (tmp_path / "file").touch()
    found = (tmp_path / "file").stat()
    assert is_ours(found)
    assert not is_ours(tmp_path.stat())
    assert not is_ours(SimpleNamespace(st_mode=found.st_mode, st_uid=found.st_uid + 1))


def test_sync_directory_syncs_and_closes_descriptor(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino) or synced.append(descriptor)
    )
    sync_directory(str(tmp_path))
    inode, descriptor = synced
    assert inode == tmp_path.stat().st_ino
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        sync_directory(str(tmp_path / "file"))


# --- moving bytes -----------------------------------------------------------------------------------------------------


def moved(sizes, most_at_once=1 << 62, num_bytes=1 << 62):
    """Move views of these sizes. Return whether the file ended early, and each call's offset and sizes."""
    calls, left = [], [num_bytes]

    def move(descriptor, views, offset):
        assert descriptor == 5
        calls.append((offset, [len(view) for view in views]))
        count = min(sum(map(len, views)), most_at_once, left[0])
        left[0] -= count
        return count

    is_short = _move_all(move, 5, [memoryview(bytes(size)) for size in sizes], 100)
    return is_short, calls


def test_views_move_in_one_call():
    assert moved([3, 4, 5]) == (False, [(100, [3, 4, 5])])
    assert moved([]) == moved([0, 0]) == (False, [])
    assert moved([0, 3, 0, 4]) == (False, [(100, [3, 4])])


def test_views_and_bytes_per_call_are_limited(monkeypatch):
    assert [len(sizes) for _, sizes in moved([1] * 600)[1]] == [256, 256, 88]
    monkeypatch.setattr(disk_file, "_MAX_CALL_BYTES", 10)
    for sizes in ([[4, 5], [2], [9]], [[1, 1, 8], [1]]):
        assert [call for _, call in moved([*itertools.chain(*sizes)])[1]] == sizes
    assert moved([4, 3, 3, 1, 9, 11, 2]) == (
        False, [(100, [4, 3, 3]), (110, [1, 9]), (120, [11]), (131, [2])],
    )  # fmt: skip


@pytest.mark.parametrize("most", [1, 2, 3, 4, 7, 8])
def test_partial_move_is_continued(most):
    is_short, calls = moved([3, 4, 5], most)
    assert not is_short
    assert [offset for offset, _ in calls] == list(range(100, 112, most))
    assert [sum(sizes) for _, sizes in calls] == list(range(12, 0, -most))


def test_end_of_file_ends_move():
    assert moved([3, 4], num_bytes=5) == (True, [(100, [3, 4]), (105, [2])])
