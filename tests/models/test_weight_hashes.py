"""Hashes of weight files cover every byte, are computed once, and again if the file may have changed."""

import hashlib
import json
import os
import threading

import pytest

from octavo.models import weight_hashes
from octavo.models.weight_hashes import FileHashes, FileState, hash_file


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(1000))
    return path


@pytest.fixture
def hashed(monkeypatch):
    """Record the files that are read; times of new files are trusted immediately."""
    monkeypatch.setattr(weight_hashes, "_SETTLED_NS", -(10**9))
    paths = []
    original = hash_file
    monkeypatch.setattr(weight_hashes, "hash_file", lambda path, *rest: (paths.append(path), original(path, *rest))[1])
    return paths


def of(hashes, path):
    """Return the hash of a file as it is now."""
    return hashes.sha256(path, FileState.of(path), lambda: None)


def start(tmp_path, path):
    """Ask for the hash and keep it, as one start of octavo does."""
    hashes = FileHashes(tmp_path / "kept" / "hashes.json")
    digest = of(hashes, path)
    hashes.keep()
    return digest


def set_back(path, stat):
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def overwrite(path):
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(500)
        file.write(b"\1")
    set_back(path, stat)


def replace(path):
    stat = path.stat()
    other = path.with_name("other")
    other.write_bytes(bytes(999) + b"\1")
    set_back(other, stat)
    other.replace(path)


def link_elsewhere(path):
    stat = path.stat()
    other = path.with_name("other")
    other.write_bytes(bytes(999) + b"\1")
    set_back(other, stat)
    path.unlink()
    path.symlink_to(other)


@pytest.mark.parametrize("change", [overwrite, replace, link_elsewhere])
def test_changed_bytes_with_equal_size_and_mtime_change_hash(change, file, tmp_path, hashed):
    before = start(tmp_path, file)
    mtime = file.stat().st_mtime_ns
    wait_for_the_clock(file)
    change(file)
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (1000, mtime)
    assert start(tmp_path, file) != before
    assert len(hashed) == 2


def wait_for_the_clock(path):
    """Wait until the file system's clock has advanced since the file was changed, because `hashed` trusts its times
    immediately.
    """
    probe = path.with_name("clock")
    while True:
        probe.write_bytes(b"")
        if probe.stat().st_ctime_ns > path.stat().st_ctime_ns:
            break


def test_unchanged_file_is_hashed_once(file, tmp_path, hashed):
    assert start(tmp_path, file) == start(tmp_path, file)
    assert hashed == [file]


@pytest.mark.parametrize("changed", ["size", "mtime_ns", "ctime_ns", "inode"])
def test_any_changed_stat_field_causes_rehash(changed, file, tmp_path, hashed):
    digest = start(tmp_path, file)
    record = tmp_path / "kept" / "hashes.json"
    entries = json.loads(record.read_text())
    entries[str(file)][changed] += 1
    record.write_text(json.dumps(entries))
    assert start(tmp_path, file) == digest
    assert len(hashed) == 2
    start(tmp_path, file)
    assert len(hashed) == 2, "what was found out is kept"


def test_hard_links_and_symlinks_share_file_hash(file, tmp_path, hashed):
    link, hard = tmp_path / "link", tmp_path / "hard"
    link.symlink_to(file)
    digest = start(tmp_path, file)
    assert start(tmp_path, link) == digest
    assert len(hashed) == 1, "a link is the file that it leads to"
    wait_for_the_clock(file)
    hard.hardlink_to(file)  # changes the file's ctime
    assert start(tmp_path, hard) == start(tmp_path, file) == digest
    wait_for_the_clock(file)
    overwrite(hard)
    assert start(tmp_path, file) == start(tmp_path, hard) != digest


def test_recently_changed_file_is_not_recorded(file, tmp_path):
    """A second change within the same tick of the clock would have the same time."""
    start(tmp_path, file)
    assert not (tmp_path / "kept" / "hashes.json").exists()


def test_file_changed_during_hashing_is_not_recorded(file, tmp_path, hashed):
    hashes = FileHashes(tmp_path / "hashes.json")
    hashes.sha256(file, FileState.of(file), lambda: file.write_bytes(bytes(2000)))
    hashes.keep()
    assert not (tmp_path / "hashes.json").exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"a": 1}', '{"a": {"sha256": "x"}}', '{"a": {"size": 1}}', "\udcff"]
)
def test_unreadable_hash_record_is_logged_and_rewritten(text, file, tmp_path, hashed, caplog):
    record = tmp_path / "kept" / "hashes.json"
    record.parent.mkdir()
    record.write_bytes(text.encode(errors="surrogateescape"))
    digest = start(tmp_path, file)
    assert "cannot be read" in caplog.text
    assert start(tmp_path, file) == digest
    assert len(hashed) == 1


def test_unwritable_record_directory_is_logged_and_ignored(file, tmp_path, hashed, caplog):
    blocked = tmp_path / "blocked"
    blocked.write_text("no folder")
    hashes = FileHashes(blocked / "hashes.json")
    digest = of(hashes, file)
    hashes.keep()
    assert "cannot be written" in caplog.text
    assert of(hashes, file) == digest
    assert len(hashed) == 1


def test_failed_write_keeps_old_record(file, tmp_path, hashed, monkeypatch):
    start(tmp_path, file)
    record = tmp_path / "kept" / "hashes.json"
    before = record.read_text()
    other = tmp_path / "other"
    other.write_bytes(b"other")
    monkeypatch.setattr(weight_hashes.Path, "replace", refuse)
    start(tmp_path, other)
    assert record.read_text() == before
    assert list(record.parent.iterdir()) == [record]


def refuse(*_args):
    raise OSError("disk full")


def test_two_writers_merge_their_hash_records(file, tmp_path, hashed):
    other = tmp_path / "other"
    other.write_bytes(b"other")
    record = tmp_path / "kept" / "hashes.json"
    first, second = FileHashes(record), FileHashes(record)
    of(first, file)
    of(second, other)
    first.keep()
    second.keep()
    assert json.loads(record.read_text()).keys() == {str(file), str(other)}


def test_concurrent_writers_produce_valid_record(tmp_path, hashed):
    record = tmp_path / "kept" / "hashes.json"
    files = [tmp_path / f"file{number}" for number in range(8)]
    for number, path in enumerate(files):
        path.write_bytes(bytes([number]))
    threads = [threading.Thread(target=start, args=(tmp_path, path)) for path in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries = json.loads(record.read_text())
    assert entries
    assert all(entries[str(path)]["sha256"] == hash_file(path) for path in files if str(path) in entries)
    assert list(record.parent.iterdir()) == [record]


def test_oldest_hash_entries_are_evicted_first(tmp_path, hashed, monkeypatch):
    monkeypatch.setattr(weight_hashes, "MAX_ENTRIES", 3)
    files = [tmp_path / f"file{number}" for number in range(5)]
    for path in files:
        path.write_bytes(b"x")
        start(tmp_path, path)
    hashed.clear()
    for path in files[2:]:
        start(tmp_path, path)
    assert hashed == []
    start(tmp_path, files[0])
    assert hashed == [files[0]]


def test_file_hash_covers_every_byte_of_every_part(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_hashes, "_PART_BYTES", 64)
    monkeypatch.setattr(weight_hashes, "_READ_BYTES", 24)
    data = bytearray(os.urandom(64 * 5 + 7))
    path = tmp_path / "file"
    path.write_bytes(data)
    parts = [hashlib.sha256(data[start : start + 64]).digest() for start in range(0, len(data), 64)]
    expected = hashlib.sha256(b"".join(parts)).hexdigest()
    told = []
    assert hash_file(path, lambda: told.append(1)) == expected
    assert len(told) == 6
    for place in range(0, len(data), 13):
        data[place] ^= 1
        path.write_bytes(data)
        assert hash_file(path) != expected
        data[place] ^= 1


def test_empty_file_has_hash_of_empty_input(tmp_path):
    (tmp_path / "empty").touch()
    assert hash_file(tmp_path / "empty") == hashlib.sha256().hexdigest()
