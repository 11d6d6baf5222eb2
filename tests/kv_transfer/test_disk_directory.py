"""The directory of a disk store: changes by other processes, files set aside, and adding and removing files."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from kv_transfer.disk_blocks import content_of, keys_from

from octavo.kv_transfer import disk_directory
from octavo.kv_transfer.disk_directory import DiskDirectory
from octavo.kv_transfer.disk_file import CorruptFileError, file_bytes, write_blocks
from octavo.kv_transfer.disk_index import BlockFile

BLOCK_BYTES = 64
ONE = file_bytes(1, BLOCK_BYTES)
LETTERS = "abcdef0123"  # names are hexadecimal


class Clock:
    """A clock that the test sets. The system's time begins later than the time of any file."""

    def __init__(self):
        self.now, self.now_ns = 1000.0, 1 << 62
        self.sleeps = []

    def monotonic(self):
        return self.now

    def time_ns(self):
        return self.now_ns

    def sleep(self, seconds):
        self.sleeps.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(disk_directory, "time", clock)
    return clock


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kv"


@pytest.fixture
def directory(path, clock):
    return DiskDirectory(path, {BLOCK_BYTES}, 1 << 20)


def name_of(letter, suffix="kv"):
    return f"{letter * 32}.{suffix}"


def put_file(path, letter, first=0, count=1, used_ns=None, block_bytes=BLOCK_BYTES):
    """Write a file of blocks as another process would. Return its path."""
    file = path / name_of(letter)
    keys = keys_from(first, count)
    with file.open("w+b") as opened:
        write_blocks(opened.fileno(), keys, [memoryview(content_of(key, block_bytes)) for key in keys])
    if used_ns is not None:
        os.utime(file, ns=(used_ns, used_ns))
    return file


def write(directory, first=0, count=1, *, fill=None):
    """Add a file. Return its name."""
    keys = keys_from(first, count)
    blocks = [memoryview(content_of(key, BLOCK_BYTES)) for key in keys]
    directory.write(
        file_bytes(count, BLOCK_BYTES), tuple(keys), fill or (lambda file: write_blocks(file, keys, blocks))
    )
    return directory.index.files_of(keys)[1][-1]


def fail(number, only=lambda *_: True, then=None):
    """Return a call that raises an `OSError` if `only` returns True for its arguments, and else calls `then`."""

    def call(*args, **options):
        if only(*args):
            raise OSError(number, os.strerror(number))
        return then(*args, **options)

    return call


def is_temporary(descriptor, _):
    return Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".tmp"


def open_descriptors(path):
    """Return the number of files in a directory that this process has open."""
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # this loop or another thread closed it
            count += str(descriptor.readlink()).startswith(f"{path}/")
    return count


# --- changes by other processes ---------------------------------------------------------------------------------------


def test_new_directory_is_private_and_empty(directory, path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert (directory.num_bytes, directory.num_evicted, directory.num_corrupt) == (0, 0, 0)
    assert (directory.path, directory.index.names()) == (path, set())


def test_directory_is_created_with_parents(tmp_path, clock):
    assert DiskDirectory(tmp_path / "a" / "kv", {BLOCK_BYTES}, 1).path.is_dir()
    assert DiskDirectory(tmp_path / "a" / "kv", {BLOCK_BYTES}, 1).path.is_dir()


def test_listing_reads_headers_of_files_from_other_processes(directory, path):
    put_file(path, "a", 0, 2, used_ns=500)
    put_file(path, "b", 2, 1, block_bytes=32)
    directory._list()
    assert directory.index.names() == {name_of("a"), name_of("b")}
    assert directory.index.files_of(keys_from(0, 3)) == (2, [name_of("a")])
    assert directory.num_bytes == file_bytes(2, BLOCK_BYTES) + file_bytes(1, 32)
    assert directory.index.oldest() == (500, name_of("a"))


def test_files_deleted_by_other_processes_are_forgotten(directory, path):
    put_file(path, "a")
    directory._list()
    (path / name_of("a")).unlink()
    directory._list()
    assert (directory.index.names(), directory.num_bytes) == (set(), 0)


def test_changed_directory_is_listed_again(directory, clock, monkeypatch):
    lists = []
    monkeypatch.setattr(directory, "_list", lambda: lists.append(None))
    seen_ns = directory._changed_ns()

    def is_listed(seen, next_look_at=0.0, unreadable=()):
        del lists[:]
        directory._seen_ns, directory._next_look_at = seen, next_look_at
        directory._unreadable = dict.fromkeys(unreadable, 0.0)
        directory.look()
        return bool(lists)

    assert not is_listed(seen_ns)
    assert is_listed(seen_ns - 1)
    assert is_listed(None)
    assert is_listed(seen_ns, unreadable=["a"])
    assert is_listed(None, clock.now)
    assert not is_listed(None, clock.now + 0.1)


def test_deleted_directory_is_listed_once(directory, path, clock):
    put_file(path, "a")
    directory._list()
    for each in path.iterdir():
        each.unlink()
    path.rmdir()
    directory._next_look_at = clock.now + 100.0
    directory.look()
    assert (directory.index.names(), directory._seen_ns) == (set(), 0)
    directory._next_look_at = clock.now + 100.0
    directory._list = lambda: pytest.fail("the directory is listed again")
    directory.look()


def test_directory_mtime_is_trusted_only_after_it_settles(directory, clock):
    changed_ns = directory._changed_ns()
    for passed_ns, seen_ns in [(50_000_000, None), (50_000_001, changed_ns)]:
        clock.now_ns = changed_ns + passed_ns
        directory._list()
        assert directory._seen_ns == seen_ns


def test_listing_interval_follows_listing_duration(directory, clock, monkeypatch):
    def entries():
        clock.now += 0.1
        return set(), []

    monkeypatch.setattr(directory, "_entries", entries)
    directory._list()
    assert directory._next_look_at == pytest.approx(clock.now + 2.0)


@pytest.mark.parametrize("change", ["a new file", "a file that is gone", "a temporary file", "nothing"])
@pytest.mark.parametrize("locked", [False, True])
def test_change_by_another_process_forces_recount(directory, path, change, locked):
    put_file(path, "a")
    directory._list()
    directory._generation = b"known"
    if change == "a new file":
        put_file(path, "b", 1)
    elif change == "a file that is gone":
        (path / name_of("a")).unlink()
    elif change == "a temporary file":
        (path / name_of("c", "tmp")).touch()
    directory._list(locked=locked)
    assert directory._generation == (b"known" if locked or change == "nothing" else b"")


def test_temporary_files_count_with_final_size(directory, path):
    for letter in "ab":
        (path / name_of(letter, "tmp")).write_bytes(bytes(100))
    directory._writing = {name_of("a", "tmp"): 500, name_of("0", "tmp"): 7}
    directory._list()
    assert directory._writing == {name_of("a", "tmp"): 500, name_of("b", "tmp"): 100}
    assert directory.num_bytes == 600


def test_size_of_missing_or_symlinked_file_is_zero(directory, path, monkeypatch):
    (path / "file").write_bytes(bytes(100))
    (path / "link").symlink_to("file")
    assert [directory._size(name) for name in ("file", "link", "none")] == [100, 0, 0]


def test_entries_list_store_files_and_skip_foreign_ones(directory, path):
    put_file(path, "a")
    directory._list()
    put_file(path, "b")
    (path / name_of("c", "bad")).touch()
    (path / name_of("d", "tmp")).touch()
    (path / name_of("e")).mkdir()
    (path / name_of("f")).symlink_to(name_of("a"))
    (path / "notes").touch()
    names, new = directory._entries()
    assert names == {name_of("a"), name_of("b"), name_of("c", "bad"), name_of("d", "tmp")}
    assert sorted(new) == [name_of("b"), name_of("c", "bad")]


def test_unreadable_file_is_retried_after_60_s(directory, path, clock):
    put_file(path, "a")
    directory._skip_undeletable(name_of("a"))
    assert directory._unreadable == {name_of("a"): clock.now + 60.0}
    assert (directory.num_bytes, directory.index.num_blocks) == (ONE, 0)
    assert directory.index.oldest() == (0, name_of("a"))
    clock.now += 59.9
    assert directory._entries() == ({name_of("a")}, [])
    clock.now += 0.1
    assert directory._entries() == ({name_of("a")}, [name_of("a")])
    assert directory._unreadable == {}


def test_files_of_another_user_are_not_indexed(directory, path, monkeypatch):
    put_file(path, "a")
    monkeypatch.setattr(disk_directory, "is_ours", lambda _: False)
    directory._list()
    assert (directory.index.names(), directory.num_corrupt) == (set(), 0)


def test_file_deleted_before_read_is_no_fault(directory, caplog):
    directory._take_in(name_of("a"), locked=False)
    assert (directory.index.names(), directory.num_corrupt, caplog.records) == (set(), 0, [])


def test_file_set_aside_is_counted_and_evicted_first(directory, path):
    (path / name_of("a", "bad")).write_bytes(b"spoilt")
    directory._list()
    assert (directory.num_bytes, directory.num_corrupt) == (6, 0)
    assert directory.index.oldest() == (0, name_of("a", "bad"))


def test_corrupt_file_is_set_aside(directory, path, caplog):
    (path / name_of("a")).write_bytes(b"spoilt")
    directory._list()
    assert sorted(each.name for each in path.iterdir()) == [name_of("a", "bad"), "lock"]
    assert (directory.num_corrupt, directory.num_bytes, directory.index.oldest()) == (
        1, 6, (0, name_of("a", "bad")),
    )  # fmt: skip
    [record] = caplog.records
    assert record.getMessage() == f"KV file {path / name_of('a')} is set aside: it ends within its header"


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
def test_unopenable_file_is_set_aside_only_on_disk_fault(directory, path, monkeypatch, number):
    file = put_file(path, "a")
    monkeypatch.setattr(os, "open", fail(number, lambda name, *_: name == str(file), os.open))
    directory._list()
    is_bad = number == errno.EIO
    assert directory.index.names() == {name_of("a", "bad" if is_bad else "kv")}
    assert (directory._unreadable == {}) is is_bad
    assert (directory.num_corrupt, directory.num_bytes) == (0, ONE)


# --- reading ----------------------------------------------------------------------------------------------------------


def test_opened_file_is_closed_after_use(directory, path):
    put_file(path, "a")
    with directory.open(name_of("a")) as (descriptor, found):
        assert found.st_size == ONE
        assert directory.header(descriptor, ONE).keys == tuple(keys_from(0, 1))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_known_file_replaced_by_other_version_is_corrupt(directory, path):
    file = put_file(path, "a")
    data = file.read_bytes()
    file.write_bytes(data[:8] + struct.pack("<I", 2) + data[12:])
    with directory.open(name_of("a")) as (descriptor, _):
        with pytest.raises(CorruptFileError, match="version 2, this is version 1"):
            directory.header(descriptor, ONE)
        assert directory._keys_of(descriptor, ONE) == ()


def test_touch_makes_first_file_of_chain_most_recent(directory, path, clock):
    files = [put_file(path, letter) for letter in "abc"]
    clock.now_ns = 10**18
    directory.touch([file.name for file in files])
    found = [file.stat() for file in files]
    assert [each.st_mtime_ns for each in found] == [10**18, 10**18 - 1, 10**18 - 2]
    assert [each.st_atime_ns for each in found] == [10**18, 10**18 - 1, 10**18 - 2]


def test_touch_does_not_follow_symlink(directory, path):
    target = put_file(path, "a", used_ns=5)
    (path / name_of("b")).symlink_to(target)
    directory.touch([name_of("b")])
    assert target.stat().st_mtime_ns == 5


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO])
def test_touch_fails_only_on_disk_fault(directory, path, monkeypatch, number):
    first, last = put_file(path, "a"), put_file(path, "b")
    os.utime(last, ns=(5, 5))
    monkeypatch.setattr(os, "utime", fail(number, lambda name: name == str(first), os.utime))
    if number == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            directory.touch([first.name, last.name])
    else:
        directory.touch([first.name, last.name])
        assert last.stat().st_mtime_ns > 5


# --- removing ---------------------------------------------------------------------------------------------------------


def generation(path):
    return (path / "lock").read_bytes()


def test_set_aside_renames_file(directory, path):
    name = write(directory)
    before = generation(path)
    directory.set_aside(name, "spoilt")
    bad = name.replace(".kv", ".bad")
    assert (directory.index.names(), directory.num_bytes, directory.index.num_blocks) == ({bad}, ONE, 0)
    assert (path / bad).exists()
    assert generation(path) != before


def test_missing_file_is_not_set_aside(directory, path):
    name = write(directory)
    (path / name).unlink()
    directory.set_aside(name, "spoilt")
    assert (directory.index.names(), directory._unreadable) == (set(), {})


def test_set_aside_counts_indexed_or_actual_size(directory, path):
    put_file(path, "a")
    directory.set_aside(name_of("a"), "spoilt")
    assert directory.num_bytes == ONE
    put_file(path, "b")
    directory.index.add(BlockFile(name_of("b"), 10), 0)
    directory.set_aside(name_of("b"), "spoilt")
    assert directory.num_bytes == ONE + 10


def test_file_that_cannot_be_set_aside_is_marked_unreadable(directory, monkeypatch):
    name = write(directory)
    monkeypatch.setattr(Path, "rename", fail(errno.EROFS))
    directory.set_aside(name, "spoilt")
    assert (directory.index.names(), directory.index.num_blocks, list(directory._unreadable)) == ({name}, 0, [name])


def test_remove_deletes_files_and_changes_generation(directory, path):
    names = [write(directory, number) for number in range(3)]
    before = generation(path)
    directory.remove([names[0], "unknown", names[2]])
    assert directory.index.names() == {names[1]}
    assert [(path / name).exists() for name in names] == [False, True, False]
    assert generation(path) != before


# --- adding -----------------------------------------------------------------------------------------------------------


def test_file_reserves_space_while_it_is_written(directory, path, clock):
    seen = []

    def fill(descriptor):
        [temporary] = [each for each in path.iterdir() if each.suffix == ".tmp"]
        with temporary.open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen.append((os.fstat(descriptor).st_size, directory.num_bytes, directory._temporaries == {temporary.name}))
        seen.append((stat.S_IMODE(temporary.stat().st_mode), directory._writing))

    clock.now_ns = 10**18
    before = open_descriptors(path)
    name = write(directory, 0, 2, fill=fill)
    size = file_bytes(2, BLOCK_BYTES)
    assert seen == [(size, size, True), (0o600, {})]
    assert (directory._temporaries, directory._writing, directory.num_bytes) == (set(), {}, size)
    assert directory.index.files_of(keys_from(0, 2)) == (2, [name])
    assert ((path / name).stat().st_mtime_ns, directory.index.oldest()) == (10**18, (10**18, name))
    assert open_descriptors(path) == before


def test_generation_changes_before_file_is_written(directory, path):
    seen = []
    directory.make_room(0)
    before = generation(path)
    write(directory, fill=lambda _: seen.append(generation(path)))
    assert len(seen[0]) == 16
    assert seen[0] != before
    assert directory._generation == seen[0] == generation(path)


@pytest.mark.parametrize("step", ["fill", "rename", "flock", "ftruncate", "utime"])
def test_failed_write_cleans_up_file_and_descriptor(directory, path, monkeypatch, step):
    directory.make_room(0)
    before = open_descriptors(path)
    fill = fail(errno.ENOSPC) if step == "fill" else lambda _: None
    if step == "rename":
        monkeypatch.setattr(Path, "rename", fail(errno.ENOSPC))
    elif step == "flock":
        monkeypatch.setattr(fcntl, "flock", fail(errno.ENOSPC, is_temporary, fcntl.flock))
    elif step != "fill":
        monkeypatch.setattr(os, step, fail(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        directory.write(ONE, (), fill)
    assert (directory._temporaries, directory._writing, directory.num_bytes) == (set(), {}, 0)
    assert [each.name for each in path.iterdir()] == ["lock"]
    assert open_descriptors(path) == before


def test_write_recreates_and_syncs_deleted_directory(directory, path, monkeypatch):
    synced = []
    monkeypatch.setattr(disk_directory, "sync_directory", synced.append)
    path.rmdir()
    path.parent.rename(path.parent.with_name("elsewhere"))
    name = write(directory)
    assert (path / name).exists()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert synced == [str(path)]


# --- room -------------------------------------------------------------------------------------------------------------


def bounded(path, num_files):
    return DiskDirectory(path, {BLOCK_BYTES}, num_files * ONE)


def test_eviction_frees_only_needed_space(path, clock):
    directory = bounded(path, 3)
    names = []
    for number in range(3):
        clock.now_ns = 10**18 + number
        names.append(write(directory, number))
    directory.make_room(0)
    assert directory.num_evicted == 0
    directory.make_room(1)
    assert (directory.num_evicted, directory.index.names()) == (1, set(names[1:]))
    directory.make_room(2 * ONE)
    assert (directory.num_evicted, directory.index.names()) == (2, set(names[2:]))


def test_num_evicted_counts_blocks_not_files(path, clock):
    directory = DiskDirectory(path, {BLOCK_BYTES}, file_bytes(5, BLOCK_BYTES))
    write(directory, 0, 5)
    write(directory, 5, 1)
    assert directory.num_evicted == 5


def test_files_being_written_are_not_evicted(path, clock):
    directory = bounded(path, 2)
    (path / name_of("a", "tmp")).write_bytes(bytes(2 * ONE))
    with (path / name_of("a", "tmp")).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        directory.make_room(0)
        with pytest.raises(OSError, match=f"all of {2 * ONE} bytes are used by files that are being written") as error:
            directory.make_room(1)
    assert error.value.errno == errno.ENOSPC


@pytest.mark.parametrize("num_stuck", [8, 9])
def test_eviction_fails_above_limit_of_undeletable_files(path, clock, monkeypatch, num_stuck):
    for number in range(10):
        path.mkdir(exist_ok=True)
        put_file(path, LETTERS[number], number, used_ns=number + 1)
    directory = bounded(path, 9)
    stuck = {path / name_of(letter) for letter in LETTERS[:num_stuck]}
    monkeypatch.setattr(Path, "unlink", fail(errno.EPERM, stuck.__contains__, Path.unlink))
    if num_stuck == 9:
        with pytest.raises(PermissionError):
            directory.make_room(0)
        assert len(directory.index.names()) == 10
    else:
        directory.make_room(0)
        assert directory.index.names() == {name_of(letter) for letter in LETTERS if letter != LETTERS[8]}


def test_file_used_since_listing_is_not_evicted(path, clock):
    path.mkdir()
    files = [put_file(path, letter, number, used_ns=number + 10) for number, letter in enumerate("abc")]
    directory = bounded(path, 2)
    os.utime(files[0], ns=(50, 50))
    directory.make_room(0)
    assert [file.exists() for file in files] == [True, False, True]
    assert (directory.index.names(), directory.num_evicted) == ({name_of("a"), name_of("c")}, 1)
    assert directory._generation == generation(path)


def test_generation_changes_before_file_is_evicted(path, clock, monkeypatch):
    path.mkdir()
    put_file(path, "a", used_ns=5)
    directory, order = bounded(path, 1), []
    monkeypatch.setattr(directory, "_new_generation", lambda: order.append("told"))
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: order.append("deleted"))
    directory._evict(5, name_of("a"))
    assert order == ["told", "deleted"]


def test_file_deleted_by_another_process_counts_as_freed(path, clock):
    path.mkdir()
    files = [put_file(path, letter, number, used_ns=number + 10) for number, letter in enumerate("abc")]
    directory = bounded(path, 2)
    directory.make_room(0)
    files[1].unlink()
    directory._evict(11, files[1].name)
    assert (directory.index.names(), directory.num_evicted) == ({name_of("c")}, 1)


def test_file_taken_over_by_another_user_is_forgotten_not_deleted(directory, path, monkeypatch):
    name = write(directory)
    monkeypatch.setattr(disk_directory, "is_ours", lambda _: False)
    directory._evict(1, name)
    assert (directory.index.names(), (path / name).exists(), directory.num_evicted) == (set(), True, 0)


def test_eviction_of_unknown_file_counts_no_block(directory, path):
    directory.make_room(0)
    put_file(path, "a", used_ns=5)
    directory._lock_descriptor = os.open(path / "lock", os.O_RDWR)
    directory._evict(5, name_of("a"))
    os.close(directory._lock_descriptor)
    assert ((path / name_of("a")).exists(), directory.num_evicted) == (False, 0)


def test_file_set_aside_is_evicted_regardless_of_age(directory, path):
    (path / name_of("a", "bad")).write_bytes(b"spoilt")
    directory._list()
    with directory._locked():
        directory._evict(0, name_of("a", "bad"))
    assert not (path / name_of("a", "bad")).exists()


def test_files_are_recounted_after_write_by_another_process(path, clock, monkeypatch):
    directory, other = bounded(path, 9), bounded(path, 9)
    lists, list_ = [], directory._list

    def listed(**options):
        lists.append(options)
        list_(**options)

    monkeypatch.setattr(directory, "_list", listed)
    write(directory)
    assert lists == [{"locked": True}]
    directory.make_room(0)
    assert len(lists) == 1, "this process has written all that is new"
    write(other, 1)
    directory.make_room(0)
    assert (len(lists), directory.num_bytes) == (2, 2 * ONE)
    clock.now += 59.5
    directory.make_room(0)
    assert len(lists) == 2
    clock.now += 0.5
    directory.make_room(0)
    assert len(lists) == 3
    directory.make_room(0)
    assert len(lists) == 3


def test_files_are_counted_at_least_once_near_clock_zero(directory, path, clock):
    clock.now = 10.0
    put_file(path, "a")
    directory.set_aside(name_of("a"), "spoilt")
    put_file(path, "b")
    directory.make_room(0)
    assert directory.index.names() == {name_of("a", "bad"), name_of("b")}


@pytest.mark.parametrize("change", ["remove", "set aside"])
def test_files_of_another_process_are_counted_after_local_change(path, clock, change):
    directory, other = bounded(path, 3), bounded(path, 3)
    first = write(directory)
    write(other, 1)
    if change == "remove":
        directory.remove([first])
    else:
        directory.set_aside(first, "spoilt")
    write(directory, 2, 2)
    assert sum(each.stat().st_size for each in path.iterdir() if each.name != "lock") <= 3 * ONE
    assert directory.num_bytes == file_bytes(2, BLOCK_BYTES) + ONE


def test_corrupt_file_found_under_lock_is_set_aside(directory, path, clock):
    write(directory)
    (path / name_of("a")).write_bytes(b"spoilt")
    clock.now += 60.0
    directory.make_room(0)
    assert name_of("a", "bad") in directory.index
    assert clock.sleeps == []
    assert directory._generation == generation(path)


def test_temporary_file_deleted_by_another_process_is_forgotten(directory, path, monkeypatch):
    temporary = path / name_of("a", "tmp")
    temporary.write_bytes(bytes(100))
    monkeypatch.setattr(directory, "_is_dead", lambda _: temporary.unlink() is None)
    directory.make_room(0)
    assert directory._writing == {}


def test_temporary_files_of_dead_processes_are_deleted(directory, path, monkeypatch):
    for letter in "abc":
        (path / name_of(letter, "tmp")).write_bytes(bytes(100))
    directory._temporaries = {name_of("a", "tmp")}
    directory._writing = {name_of("a", "tmp"): 7}
    stuck = path / name_of("b", "tmp")
    monkeypatch.setattr(Path, "unlink", fail(errno.EPERM, lambda file: file == stuck, Path.unlink))
    directory.make_room(0)
    assert sorted(each.name[0] for each in path.iterdir() if each.suffix == ".tmp") == ["a", "b"]
    assert directory._writing == {name_of("a", "tmp"): 7, name_of("b", "tmp"): 100}


def test_temporary_file_without_lock_holder_is_dead(directory, path, monkeypatch):
    file = path / name_of("a", "tmp")
    assert directory._is_dead(file.name)
    file.write_bytes(b"x")
    assert directory._is_dead(file.name)
    with file.open() as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        assert not directory._is_dead(file.name)
    with monkeypatch.context() as patched:
        patched.setattr(disk_directory, "is_ours", lambda _: False)
        assert not directory._is_dead(file.name)


@pytest.mark.parametrize(
    ("number", "is_dead"), [(errno.EACCES, True), (errno.EPERM, True), (errno.EIO, True), (errno.EMFILE, False)]
)
def test_unopenable_temporary_file_is_dead_unless_descriptors_ran_out(directory, path, monkeypatch, number, is_dead):
    file = path / name_of("a", "tmp")
    file.write_bytes(b"x")
    monkeypatch.setattr(os, "open", fail(number, lambda name, *_: name == str(file), os.open))
    assert directory._is_dead(file.name) is is_dead
    file.write_bytes(b"")
    assert not directory._is_dead(file.name)


# --- the lock ---------------------------------------------------------------------------------------------------------


def test_lock_is_exclusive_and_released(directory, path):
    before = open_descriptors(path)
    with directory._locked(), (path / "lock").open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (path / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert open_descriptors(path) == before
    assert stat.S_IMODE((path / "lock").stat().st_mode) == 0o600


def test_lock_held_by_another_process_is_awaited_until_timeout(directory, path, clock):
    before = open_descriptors(path)
    (path / "lock").touch()
    with (path / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with (
            pytest.raises(TimeoutError, match=rf"another process holds {path}/lock \(2 s\)$") as error,
            directory._locked(),
        ):
            pass
        assert error.value.errno == errno.ETIMEDOUT
        assert clock.sleeps == [0.002] * len(clock.sleeps)
        assert 2.0 < sum(clock.sleeps) < 2.01
        clock.sleep = lambda _: fcntl.flock(file, fcntl.LOCK_UN)
        with directory._locked():
            pass
    assert open_descriptors(path) == before


def test_lock_is_retried_at_deadline(directory, path, clock, monkeypatch):
    monkeypatch.setattr(disk_directory, "_LOCK_POLL_S", 1.0)
    (path / "lock").touch()
    with (path / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError), directory._locked():
            pass
    assert clock.sleeps == [1.0] * 3


def test_replaced_lock_file_is_reopened(directory, path, clock, monkeypatch):
    answers = [False, False, True]
    monkeypatch.setattr(directory, "_is_in_place", lambda _: answers.pop(0))
    before = open_descriptors(path)
    with directory._locked():
        assert open_descriptors(path) == before + 1
    assert (clock.sleeps, answers) == ([0.002] * 2, [])


def test_lock_is_in_place_while_path_is_same_file(directory, path):
    with directory._locked():
        assert directory._is_in_place(directory._lock_descriptor)
        (path / "lock").unlink()
        assert not directory._is_in_place(directory._lock_descriptor)
        (path / "lock").touch()
        assert not directory._is_in_place(directory._lock_descriptor)


def test_lock_file_deleted_during_open_is_reopened(directory, path, clock, monkeypatch):
    flock, calls = fcntl.flock, []

    def delete_once(descriptor, operation):
        flock(descriptor, operation)
        calls.append(descriptor)
        if len(calls) == 1:
            (path / "lock").unlink()

    monkeypatch.setattr(fcntl, "flock", delete_once)
    with directory._locked():
        assert len(calls) == 2


def test_failed_lock_closes_descriptor(directory, path, monkeypatch):
    before = open_descriptors(path)
    monkeypatch.setattr(fcntl, "flock", fail(errno.ENOLCK))
    with pytest.raises(OSError, match="No locks available"), directory._locked():
        pass
    assert open_descriptors(path) == before


def test_calls_from_several_threads_are_serialized(directory):
    with directory._mutex:
        calls = [
            threading.Thread(target=call)
            for call in (
                lambda: directory.make_room(0),
                lambda: directory.remove([]),
                lambda: directory.set_aside("none", "spoilt"),
            )
        ]
        for call in calls:
            call.start()
        assert all(call.is_alive() for call in calls)
    for call in calls:
        call.join(10)
        assert not call.is_alive()


def test_index_matches_directory_content(directory, path):
    name = write(directory, 0, 2)
    assert directory.index.run(keys_from(0, 2))[0] == BlockFile(
        name, file_bytes(2, BLOCK_BYTES), tuple(keys_from(0, 2))
    )
    again = DiskDirectory(path, {BLOCK_BYTES}, 1 << 20)
    assert again.index.files_of(keys_from(0, 2)) == (2, [name])
