"""The content of a disk store, its lifetime, and directories that were changed from outside."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_transfer.disk_blocks import BLOCK_BYTES, content_of, key_of, keys_from, load, save

from octavo.errors import ConfigError
from octavo.kv_transfer import disk, disk_directory
from octavo.kv_transfer.disk import DiskStore, _Writing, default_bound
from octavo.kv_transfer.disk_file import (
    CorruptFileError,
    OtherFormatError,
    file_bytes,
    read_blocks,
    read_header,
    write_blocks,
)

ONE = file_bytes(1, BLOCK_BYTES)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "kv"


def store_in(directory, max_bytes=1 << 20, **options):
    return DiskStore(directory, BLOCK_BYTES, max_bytes, **options)


def files(directory, suffix=".kv"):
    return sorted(path for path in directory.iterdir() if path.name.endswith(suffix))


def listed(store):
    """Make the store read its directory on the next call, without its usual interval."""
    store._directory._next_look_at = 0.0
    return store


# --- content ----------------------------------------------------------------------------------------------------------


def test_saved_blocks_are_found_and_loaded(directory):
    store, keys = store_in(directory), keys_from(0, 5)
    assert (store.num_matched(keys), store.lacks(keys)) == (0, set(keys))
    assert save(store, keys[:4]) == 4
    assert (store.num_matched(keys), store.lacks(keys), load(store, keys)) == (4, {keys[4]}, 4)
    assert load(store, keys[1:3]) == 2
    assert store.num_matched(keys[4:]) == 0
    [file] = files(directory)
    assert file.stat().st_size == file_bytes(4, BLOCK_BYTES) == store.stats().num_bytes
    assert (directory.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    assert (directory / "lock").stat().st_mode & 0o777 == 0o600


def test_save_writes_only_missing_blocks(directory):
    store, keys = store_in(directory), keys_from(0, 6)
    assert save(store, keys[1:3]) == 2
    assert save(store, [*keys, keys[5]]) == 7
    sizes = sorted(path.stat().st_size for path in files(directory))
    assert sizes == [file_bytes(count, BLOCK_BYTES) for count in (2, 4)]
    assert (load(store, keys), store.stats().num_blocks) == (6, 6)


def test_one_call_saves_and_loads_700_blocks(directory):
    keys = keys_from(0, 700)  # too many for one system call, and for a header of one page
    assert save(store_in(directory, 1 << 24), keys) == 700
    again = store_in(directory, 1 << 24)
    assert (again.num_matched(keys), load(again, keys), load(again, keys[650:])) == (700, 700, 50)


def test_saved_blocks_survive_restart(directory):
    keys = keys_from(0, 3)
    first = store_in(directory)
    save(first, keys)
    first.close()
    first.close()
    assert (first.num_matched(keys), first.lacks(keys), save(first, keys), load(first, keys)) == (0, set(), 0, 0)
    assert load(store_in(directory), keys) == 3


def test_startup_reads_only_headers(directory, monkeypatch):
    store = store_in(directory, 1 << 22)
    for first in range(0, 320, 32):
        save(store, keys_from(first, 32))
    asked, pread = [], os.pread

    def counted(descriptor, count, offset):
        asked.append(count)
        return pread(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", counted)
    monkeypatch.delattr(os, "preadv")
    assert store_in(directory, 1 << 22).stats().num_blocks == 320
    assert sum(asked) <= 10 * 4096 + 64


def test_least_recently_used_file_is_evicted_across_restarts(directory):
    max_bytes = 3 * ONE
    store = store_in(directory, max_bytes)
    for number in range(3):
        save(store, [key_of(number)])
    assert store.num_matched([key_of(0)]) == 1  # counts as a use
    store = store_in(directory, max_bytes)
    save(store, [key_of(3)])
    assert store.lacks(keys_from(0, 4)) == {key_of(1)}
    assert listed(store_in(directory, max_bytes)).num_matched([key_of(2)]) == 1
    save(store, [key_of(4)])  # the lookup of the other store counts as a use
    assert store.lacks(keys_from(0, 5)) == {key_of(0), key_of(1)}
    assert (store.stats().num_evicted, store.stats().num_bytes) == (2, max_bytes)


def test_end_of_chain_is_evicted_before_its_beginning(directory):
    store = store_in(directory, 3 * ONE)
    for number in range(3):
        save(store, [key_of(number)])
    assert store.num_matched(keys_from(0, 3)) == 3
    save(store, [key_of(3)])
    assert store.lacks(keys_from(0, 4)) == {key_of(2)}


def test_lower_size_limit_is_applied_at_startup(directory):
    store = store_in(directory)
    for number in range(8):
        save(store, [key_of(number)])
    assert store_in(directory, 2 * ONE).stats().num_bytes == 2 * ONE
    assert len(files(directory)) == 2


def test_save_above_size_limit_keeps_first_blocks(directory):
    store = store_in(directory, file_bytes(3, BLOCK_BYTES))
    assert (save(store, keys_from(0, 5)), load(store, keys_from(0, 5))) == (3, 3)


def test_size_limit_below_one_block_is_refused(directory):
    with pytest.raises(ConfigError, match=f"kv_disk_bytes is {ONE - 1}.*must be at least {ONE}"):
        store_in(directory, ONE - 1)


def test_key_of_wrong_length_raises_value_error(directory):
    with pytest.raises(ValueError, match="key of 32 bytes was expected, got 3"):
        store_in(directory).save([b"key"], [memoryview(bytes(BLOCK_BYTES))])


def test_forgotten_blocks_stay_forgotten_after_restart(directory):
    store = store_in(directory)
    save(store, keys_from(0, 1))
    save(store, keys_from(1, 2))
    store.forget([key_of(2), key_of(9)])
    for each in (store, store_in(directory)):
        assert each.lacks(keys_from(0, 3)) == {key_of(1), key_of(2)}  # both blocks were in one file


def test_two_stores_share_directory_without_restart(directory):
    first, second = store_in(directory), store_in(directory)
    save(first, keys_from(0, 3))
    assert listed(second).num_matched(keys_from(0, 3)) == load(second, keys_from(0, 3)) == 3
    first.forget([key_of(0)])
    assert load(second, keys_from(0, 3)) == 0  # deleted while it is read: a miss
    assert second.stats().num_corrupt == second.stats().num_errors == 0
    assert listed(second).lacks(keys_from(0, 1)) == {key_of(0)}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.sampled_from(["save", "load", "forget", "restart"]), st.integers(0, 12), st.integers(1, 5)))
)
def test_store_behaves_like_dict(steps):
    with tempfile.TemporaryDirectory() as place:
        store, files_of = store_in(Path(place)), {}  # per key, all keys that were saved in the same call
        for what, first, count in steps:
            keys = keys_from(first, count)
            if what == "save":
                new = [key for key in keys if key not in files_of]
                files_of |= dict.fromkeys(new, new)
                assert save(store, keys) == count
            elif what == "forget":
                store.forget(keys)
                for key in [each for forgotten in keys for each in files_of.get(forgotten, ())]:
                    files_of.pop(key, None)
            elif what == "restart":
                store.close()
                store = store_in(Path(place))
            known = next((i for i, key in enumerate(keys) if key not in files_of), count)
            assert store.num_matched(keys) == load(store, keys) == known
            assert store.lacks(keys) == {key for key in keys if key not in files_of}


@pytest.mark.parametrize("free_bytes", [1 << 34, 1 << 40, 1])
def test_default_size_limit_is_half_of_free_and_used_space(directory, monkeypatch, free_bytes):
    monkeypatch.setattr(
        disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=free_bytes if path.is_dir() else 0)
    )
    directory.mkdir()
    for name, size in [("a.kv", 10), ("b.kv", 20), ("b.tmp", 500)]:
        (directory / name).write_bytes(bytes(size))
    (directory / "link.kv").symlink_to("b.tmp")  # counts with its own five bytes
    assert default_bound(directory) == min((free_bytes + 35) // 2, 1 << 34)
    assert default_bound(directory.parent / "new" / "kv") == min(free_bytes // 2, 1 << 34)
    assert (directory.parent / "new" / "kv").stat().st_mode & 0o777 == 0o700


def test_store_without_size_limit_uses_default(directory, monkeypatch):
    monkeypatch.setattr(disk, "default_bound", lambda path: {directory: 5 * ONE}[path])
    assert store_in(directory, None).stats().max_bytes == 5 * ONE


def test_smallest_size_limit_keeps_one_block(directory):
    store = store_in(directory, ONE)
    assert (save(store, keys_from(0, 2)), save(store, [key_of(7)]), store.stats().num_evicted) == (1, 1, 1)
    assert load(store, [key_of(7)]) == 1


def test_duplicate_key_in_one_save_is_written_once(directory):
    store = store_in(directory)
    assert save(store, [key_of(0), key_of(1), key_of(0)]) == 3
    assert files(directory)[0].stat().st_size == file_bytes(2, BLOCK_BYTES)
    assert load(store, [key_of(0), key_of(1), key_of(0)]) == 3


def test_one_load_returns_blocks_of_several_saves(directory):
    store = store_in(directory)
    for first, count in ((0, 2), (2, 3), (5, 1)):
        save(store, keys_from(first, count))
    assert load(store, keys_from(0, 8)) == 6
    assert load(store, keys_from(3, 3)) == 3


def test_block_of_wrong_size_is_not_loaded(directory, caplog):
    store = store_in(directory, part_bytes=512)
    save(store, [key_of(0)])
    assert store.load([key_of(0)], [memoryview(bytearray(512))]) == 0
    assert (store.stats().num_corrupt, store.lacks([key_of(0)])) == (1, {key_of(0)})
    assert "is set aside: it contains other blocks than before" in caplog.text


def test_position_of_corrupt_block_is_logged(directory, caplog):
    store, keys = store_in(directory), keys_from(0, 5)
    save(store, keys)
    tamper(files(directory)[0], file_bytes(3, BLOCK_BYTES) + 7)
    assert load(store, keys[1:]) == 2
    assert "is set aside: block 3 does not match its checksum" in caplog.text


def test_size_limit_is_exact_after_restart(directory):
    for number in range(2):
        save(store_in(directory), [key_of(number)])
    assert store_in(directory, 2 * ONE).stats().num_bytes == 2 * ONE
    assert store_in(directory, 2 * ONE - 1).stats().num_bytes == ONE


def test_forgetting_unknown_keys_changes_nothing(directory):
    store = store_in(directory)
    save(store, [key_of(0)])
    generation = (directory / "lock").read_bytes()
    store.forget(keys_from(1, 3))
    store.forget([])
    assert (directory / "lock").read_bytes() == generation


def test_save_skips_blocks_written_by_another_process(directory):
    store, other = store_in(directory), store_in(directory)
    save(other, keys_from(0, 2))
    save(listed(store), keys_from(0, 3))
    assert sorted(path.stat().st_size for path in files(directory)) == [ONE, file_bytes(2, BLOCK_BYTES)]


def test_closed_store_deletes_nothing(directory):
    store = store_in(directory)
    save(store, [key_of(0)])
    store.close()
    store.forget([key_of(0)])
    assert store.lacks([key_of(5)]) == set()
    assert store_in(directory).num_matched([key_of(0)]) == 1


def test_write_pause_doubles_after_failures_and_resets_on_success(directory):
    now = [100.0]
    writing, pauses = _Writing(directory, lambda: now[0]), []
    assert (writing.may_try(), writing.error, writing.num_errors) == (True, "", 0)
    for _ in range(8):
        writing.failed(OSError("full"))
        pauses.append(writing._resumes_at - now[0])
        now[0] = writing._resumes_at - 0.01
        assert not writing.may_try()
        now[0] = writing._resumes_at
        assert writing.may_try()
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert (writing.error, writing.num_errors) == ("nothing can be written: full", 8)
    writing.failed(OSError("full"))
    writing.succeeded()
    assert (writing.may_try(), writing.error) == (True, "")
    writing.failed(OSError("full"))
    assert writing._resumes_at == now[0] + 1.0


# --- damaged files ----------------------------------------------------------------------------------------------------


def whole_file(path, num_blocks=2, block_bytes=64):
    keys = keys_from(0, num_blocks)
    with path.open("w+b") as file:
        write_blocks(file.fileno(), keys, [memoryview(content_of(key, block_bytes)) for key in keys])
    return path.read_bytes()


def num_read(path, num_blocks=2, block_bytes=64):
    """Return the number of blocks read from a file that may be damaged. All of them are right."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        header = read_header(descriptor, os.fstat(descriptor).st_size)
        buffers = [bytearray(header.block_bytes) for _ in header.keys]
        count = read_blocks(descriptor, header, 0, [memoryview(buffer) for buffer in buffers])
    except (CorruptFileError, OtherFormatError):
        return 0
    finally:
        os.close(descriptor)
    assert [bytes(each) for each in buffers[:count]] == [content_of(key, block_bytes) for key in header.keys[:count]]
    return count


def test_change_of_any_byte_is_detected(tmp_path):
    path = tmp_path / "file"
    data = bytearray(whole_file(path))
    assert num_read(path) == 2
    with path.open("r+b", buffering=0) as file:
        for at, byte in enumerate(data):
            os.pwrite(file.fileno(), bytes([byte ^ 1 << at % 8]), at)
            assert num_read(path) == (1 if at >= len(data) - 64 else 0), at
            os.pwrite(file.fileno(), bytes([byte]), at)
    assert num_read(path) == 2


def test_wrong_file_length_is_detected(tmp_path):
    path = tmp_path / "file"
    data = whole_file(path)
    for length in [*range(0, len(data), 61), len(data) - 1, len(data) + 1]:
        path.write_bytes((data + b"\0")[:length])
        assert num_read(path) == 0, length


def tamper(path, at, byte=b"\xff"):
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        file.write(byte)


@pytest.mark.parametrize("at", [0, 30, 60, 100, 4000])
def test_file_with_changed_header_is_set_aside_at_startup(directory, caplog, at):
    save(store_in(directory), keys_from(0, 2))
    tamper(files(directory)[0], at)
    store = store_in(directory)
    assert store.lacks(keys_from(0, 2)) == set(keys_from(0, 2))
    assert (store.stats().num_corrupt, len(files(directory)), len(files(directory, ".bad"))) == (1, 0, 1)
    assert "is set aside" in caplog.text
    assert store.stats().num_bytes == file_bytes(2, BLOCK_BYTES)  # a file that is set aside counts


def test_truncated_file_is_a_miss_after_startup(directory):
    save(store_in(directory), keys_from(0, 2))
    os.truncate(files(directory)[0], 5000)
    assert store_in(directory).num_matched(keys_from(0, 2)) == 0


@pytest.mark.parametrize("at", [0, 30, 60, -1])
def test_file_changed_at_runtime_is_a_miss_and_set_aside(directory, at):
    store, keys = store_in(directory), keys_from(0, 3)
    save(store, keys)
    tamper(files(directory)[0], at)
    assert store.num_matched(keys) == 3
    assert load(store, keys) == (2 if at == -1 else 0)
    assert store.num_matched(keys) == 0
    assert (store.stats().num_corrupt, len(files(directory, ".bad"))) == (1, 1)
    assert (save(store, keys), load(store, keys)) == (3, 3)


def test_file_replaced_by_another_valid_file_is_a_miss(directory):
    store = store_in(directory)
    save(store, keys_from(0, 2))
    save(store, keys_from(2, 2))
    one, other = files(directory)
    one.write_bytes(other.read_bytes())
    assert sorted([load(store, keys_from(0, 2)), load(store, keys_from(2, 2))]) == [0, 2]


@pytest.fixture
def duplicates(directory):
    """Return a store with two files of the same three blocks, their keys, and the file that it reads first."""
    keys = keys_from(0, 3)
    first, second = store_in(directory), store_in(directory)
    save(first, keys)
    [old] = files(directory)
    listed(second)._directory.index.drop(old.name)  # as if both stores had saved at the same time
    second._directory.look = lambda: None
    save(second, keys)
    assert len(files(directory)) == 2
    store = store_in(directory)
    [first_read] = store._directory.index.files_of(keys)[1]
    return store, keys, directory / first_read


@pytest.mark.parametrize("at", [0, 30, -1])
def test_load_uses_duplicate_of_corrupt_file(duplicates, at):
    store, keys, first_read = duplicates
    tamper(first_read, at)
    assert load(store, keys) == 3
    assert (store.num_matched(keys), store.lacks(keys)) == (3, set())
    assert (store.stats().num_corrupt, store.stats().num_blocks) == (1, 3)


def test_load_uses_duplicate_of_file_corrupt_at_startup(duplicates, directory):
    _, keys, first_read = duplicates
    tamper(first_read, 30)
    assert load(store_in(directory), keys) == 3


def test_duplicate_remains_after_other_file_is_deleted(duplicates):
    store, keys, first_read = duplicates
    first_read.unlink()
    assert load(store, keys) == 3
    assert store.lacks(keys) == set()


def test_forget_deletes_duplicates(duplicates, directory):
    store, keys, _ = duplicates
    store.forget(keys[1:2])
    assert (store.lacks(keys), files(directory)) == (set(keys), [])


def test_files_set_aside_are_evicted_first(directory):
    store = store_in(directory, 2 * ONE)
    save(store, [key_of(0)])
    save(store, [key_of(1)])
    tamper(next(path for path in files(directory) if key_of(1) in path.read_bytes()), -1)
    load(store, [key_of(1)])
    save(store, [key_of(2)])
    assert store.lacks(keys_from(0, 3)) == {key_of(1)}
    assert files(directory, ".bad") == []


@pytest.mark.parametrize("what", ["an older version", "another layout"])
def test_files_of_other_formats_remain_until_space_is_needed(directory, what):
    other = DiskStore(directory, BLOCK_BYTES if what == "an older version" else 512, 1 << 20)
    save(other, [key_of(0)])
    [file] = files(directory)
    if what == "an older version":
        tamper(file, 8, struct.pack("<I", 0))
    store = store_in(directory, file.stat().st_size + ONE)
    assert (store.num_matched([key_of(0)]), store.stats().num_corrupt) == (0, 0)
    assert store.stats().num_bytes == file.stat().st_size
    save(store, [key_of(1)])
    assert file.exists()
    save(store, [key_of(2)])
    assert not file.exists()


# --- foreign files ----------------------------------------------------------------------------------------------------


def test_foreign_files_are_neither_followed_nor_deleted(directory, tmp_path):
    save(store_in(directory), [key_of(0)])
    victim = tmp_path / "victim"
    files(directory)[0].rename(victim)
    odd = [directory / f"{letter * 32}.kv" for letter in "abc"]
    odd[0].symlink_to(victim)
    odd[1].mkdir()
    os.mkfifo(odd[2])
    temporary = directory / f"{'d' * 32}.tmp"
    temporary.symlink_to(victim)
    others = [directory / "notes.txt", directory / "ab.kv", directory / f"{'E' * 32}.kv"]
    for path in others:
        path.write_bytes(bytes(5 * ONE))
    store = store_in(directory, 2 * ONE)
    assert (store.num_matched([key_of(0)]), store.stats().num_bytes) == (0, 0)
    for number in range(4):
        save(store, [key_of(number)])
    assert store.stats().num_bytes == 2 * ONE
    assert victim.stat().st_size == ONE
    assert all(path.is_symlink() or path.exists() for path in [*odd, temporary, *others])


def test_symlink_instead_of_file_is_a_miss(directory, tmp_path):
    store = store_in(directory)
    save(store, [key_of(0)])
    [file] = files(directory)
    file.rename(tmp_path / "victim")
    file.symlink_to(tmp_path / "victim")
    assert (load(store, [key_of(0)]), store.lacks([key_of(0)])) == (0, {key_of(0)})
    assert file.is_symlink()


def test_symlinked_lock_is_not_followed(directory, tmp_path):
    directory.mkdir()
    victim = tmp_path / "victim"
    victim.write_bytes(b"important")
    (directory / "lock").symlink_to(victim)
    store = store_in(directory)
    assert (save(store, [key_of(0)]), victim.read_bytes()) == (0, b"important")
    assert "nothing can be written" in store.stats().error


def test_files_of_another_user_are_not_read(directory, monkeypatch):
    save(store_in(directory), [key_of(0)])
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert store_in(directory).num_matched([key_of(0)]) == 0


def test_only_temporary_files_of_dead_writers_are_deleted(directory):
    directory.mkdir()
    dead, living = directory / f"{'a' * 32}.tmp", directory / f"{'b' * 32}.tmp"
    dead.write_bytes(bytes(100))
    living.write_bytes(bytes(ONE))
    with living.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        store = store_in(directory, 2 * ONE)
        assert not dead.exists()
        assert store.stats().num_bytes == ONE  # the room that the living writer has reserved
        save(store, [key_of(0)])
        save(store, [key_of(1)])
        assert store.stats().num_bytes == 2 * ONE
        assert living.exists()
    assert store_in(directory, 2 * ONE).stats().num_bytes == ONE
    assert not living.exists()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE, errno.ELOOP, errno.ENXIO])
def test_unopenable_temporary_file_does_not_block_saves(directory, monkeypatch, number):
    directory.mkdir()
    shut = directory / f"{'a' * 32}.tmp"
    shut.write_bytes(bytes(100))
    system_open = os.open

    def refuse(path, *args, **kwargs):
        if str(path) == str(shut):
            raise OSError(number, os.strerror(number))
        return system_open(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    store = store_in(directory)
    assert save(store, keys_from(0, 2)) == load(store, keys_from(0, 2)) == 2
    assert store.stats().error == ""
    assert shut.exists() == (number not in {errno.EACCES, errno.EPERM, errno.EIO})


def test_unopenable_temporary_file_of_another_user_remains(directory, monkeypatch):
    directory.mkdir()
    shut = directory / f"{'a' * 32}.tmp"
    shut.write_bytes(bytes(100))
    monkeypatch.setattr(disk_directory, "is_ours", lambda found: found.st_size != 100)
    system_open = os.open

    def refuse(path, *args, **kwargs):
        if str(path) == str(shut):
            raise PermissionError(errno.EACCES, "Permission denied")
        return system_open(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    store = store_in(directory, ONE)
    assert save(store, [key_of(0)]) == 1, "it takes none of our room"
    assert shut.exists()


@pytest.mark.parametrize("num_stuck", [1, 3])
def test_save_fails_only_above_limit_of_undeletable_files(directory, monkeypatch, num_stuck):
    monkeypatch.setattr(disk_directory, "_MAX_STUCK", 2)
    store = store_in(directory, 4 * ONE)
    stuck = []
    for number in range(4):
        save(store, [key_of(number)])
        stuck += [path for path in files(directory) if path not in stuck and number < num_stuck]
    unlink = Path.unlink

    def refuse(path, **options):
        if path in stuck:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", refuse)
    assert save(store, [key_of(4)]) == (1 if num_stuck == 1 else 0)
    assert store.lacks(keys_from(0, num_stuck)) == set()
    assert bool(store.stats().error) == (num_stuck == 3)
