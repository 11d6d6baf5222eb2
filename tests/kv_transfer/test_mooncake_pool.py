"""Two stores over a real pool: one loads the other's blocks, even if master or donor dies or freezes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Event, Thread

import pytest
from mooncake_master import Master, needs_mooncake

from octavo.kv_transfer import mooncake_client
from octavo.kv_transfer.guard import GuardedStore
from octavo.kv_transfer.interface import StoreError
from octavo.kv_transfer.mooncake import MooncakeStore, _name

pytestmark = needs_mooncake
BLOCK_BYTES = 192 << 10
LENT_BYTES = 64 << 20
KEYS = [os.urandom(32) for _ in range(24)]
BLOCKS = [memoryview(os.urandom(BLOCK_BYTES)) for _ in KEYS]
THIRD_PARTY = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 16 << 20, 16 << 20, "tcp", "", sys.argv[1]) == 0
for key in sys.argv[3:]:
    assert store.remove(key, True) == 0
    assert store.put(key, b"x" * int(sys.argv[2])) == 0
print("done", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def master():
    master = Master()
    yield master
    master.kill()


@pytest.fixture
def open_store():
    """Return a function that makes a store. Its client ends with the test."""
    opened = []

    def make(master, lent_bytes=0):
        store = MooncakeStore(BLOCK_BYTES, master=master.address, segment_bytes=lent_bytes)
        opened.append(store)
        return store

    yield make
    for store in opened:
        store._client.kill()


def load(store, keys=KEYS):
    into = [memoryview(bytearray(BLOCK_BYTES)) for _ in keys]
    count = store.load(keys, into)
    return into[:count]


def loads_right(store, keys=KEYS):
    """Return True if all blocks were loaded. Wrong bytes fail the test; an error counts as a miss."""
    try:
        loaded = load(store, keys)
    except StoreError:
        return False
    assert loaded == BLOCKS[: len(loaded)]
    return len(loaded) == len(keys)


def saves(store):
    try:
        return store.save(KEYS, BLOCKS) == len(KEYS)
    except StoreError:
        return False


def in_the_end(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def client_of(store):
    return store._client._process


def count_calls(monkeypatch):
    """Return a list that gets the name of each later call of a client."""
    names, call = [], mooncake_client.Area.call
    monkeypatch.setattr(mooncake_client.Area, "call", lambda area, *args: (names.append(args[0]), call(area, *args))[1])
    return names


def test_store_loads_blocks_saved_by_another_store(master, open_store):
    donor, reader = open_store(master, LENT_BYTES), open_store(master)
    assert reader.num_matched(KEYS) == 0
    assert donor.save(KEYS, BLOCKS) == len(KEYS)
    assert reader.num_matched([*KEYS, os.urandom(32)]) == len(KEYS)
    assert not reader.lacks(KEYS)
    assert load(reader) == BLOCKS
    assert load(donor) == BLOCKS
    donor.forget(KEYS[3:4])
    assert reader.num_matched(KEYS) == 3
    assert load(reader) == BLOCKS[:3]


def test_client_memory_stays_within_plan(master, open_store):
    lent_bytes = 32 << 20
    store = open_store(master, lent_bytes)
    keys = [os.urandom(32) for _ in range(lent_bytes // BLOCK_BYTES + 20)]
    for first in range(0, len(keys), len(KEYS)):
        store.save(keys[first : first + len(KEYS)], BLOCKS)
    assert sum(store.num_matched([key]) for key in keys) > 0.7 * lent_bytes / BLOCK_BYTES
    status = Path(f"/proc/{store._client._process.pid}/status").read_text().splitlines()
    found = dict(line.split(":") for line in status)
    taken = sum(int(found[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
    assert lent_bytes < taken < MooncakeStore.host_bytes(BLOCK_BYTES, lent_bytes)


def test_store_without_segment_saves_in_segment_of_another_store(master, open_store):
    donor, writer = open_store(master, LENT_BYTES), open_store(master)
    keys = [os.urandom(32) for _ in range(3)]
    assert writer.save(keys, BLOCKS[:3]) == 3
    assert load(donor, keys) == BLOCKS[:3]


@pytest.mark.sweep(8)
@pytest.mark.parametrize(("num_engines", "end"), [(2, "killed"), (3, "closed")])
def test_exiting_engine_loses_only_its_blocks(master, open_store, num_engines, end):
    stores, reader = [open_store(master, LENT_BYTES) for _ in range(num_engines)], open_store(master)
    keys_of = [[os.urandom(32) for _ in KEYS] for _ in stores]
    for store, keys in zip(stores, keys_of, strict=True):
        assert store.save(keys, BLOCKS) == len(keys)
    assert [reader.num_matched(keys) for keys in keys_of] == [len(KEYS)] * num_engines
    if end == "closed":
        stores[0].close()
    else:
        stores[0]._client.kill()
    in_the_end(lambda: reader.num_matched(keys_of[0][:1]) == 0)
    assert reader.num_matched(keys_of[0]) == 0
    for keys in keys_of[1:]:
        assert reader.num_matched(keys) == len(keys)
        assert load(reader, keys) == BLOCKS


@pytest.mark.turn(12)
def test_blocks_spill_to_other_segments_when_local_one_is_full(master, open_store):
    small, large, reader = open_store(master, 16 << 20), open_store(master, LENT_BYTES), open_store(master)
    keys = [os.urandom(32) for _ in range(120)]  # there is room for 85 of them
    assert small.save(keys, [BLOCKS[index % len(BLOCKS)] for index in range(120)]) == 120
    assert reader.num_matched(keys) == 120
    large.close()
    in_the_end(lambda: sum(reader._has(keys)) < 120)
    assert 60 < sum(reader._has(keys)) < 90


@pytest.mark.turn(8)
def test_save_above_pool_capacity_is_partial(open_store, master):
    donor = open_store(master, 16 << 20)
    keys = [os.urandom(32) for _ in range(120)]
    count = donor.save(keys, [BLOCKS[index % len(BLOCKS)] for index in range(120)])
    assert 0 < count < 120
    lacking = donor.lacks(keys)
    assert keys[count] in lacking
    assert not lacking & set(keys[:count])
    reader = open_store(master)
    for index in range(0, 120, 24):
        loaded = load(reader, keys[index : index + 24])
        assert loaded == BLOCKS[: len(loaded)]


@pytest.mark.turn(8)
def test_foreign_bytes_under_key_are_not_loaded(master, open_store):
    donor, reader = open_store(master, LENT_BYTES), open_store(master)
    assert donor.save(KEYS, BLOCKS) == len(KEYS)
    size = len(donor._client._areas[0].objects[0])
    names = [_name(KEYS[5]), _name(KEYS[7])]
    command = [sys.executable, "-c", THIRD_PARTY, master.address, str(size), *names]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as third_party:
        try:
            assert third_party.stdout.read(4) == b"done"
            assert load(reader) == BLOCKS[:5]
            assert reader.stats().num_corrupt == 2
            reader.forget(KEYS[5:6])
            assert reader.save(KEYS[5:6], BLOCKS[5:6]) == 1
            assert load(reader) == BLOCKS[:7]
        finally:
            third_party.kill()


@pytest.mark.turn(8)
@pytest.mark.sweep(8)
@pytest.mark.parametrize("is_asked_again", [True, False])
def test_lookup_renews_lease_until_load(open_store, is_asked_again):
    """Each lookup renews the blocks' leases. Otherwise they expire before a writer needs the memory."""
    leases_s = 3.0
    master = Master(leases_ms=int(1000 * leases_s))
    try:
        writer, reader = open_store(master, 16 << 20), open_store(master)
        assert writer.save(KEYS, BLOCKS) == reader.num_matched(KEYS) == len(KEYS)
        time.sleep(leases_s + 0.2)
        start = time.monotonic()
        if is_asked_again:
            assert reader.num_matched(KEYS) == len(KEYS)
        while time.monotonic() < start + 0.8:  # most of a renewed lease remains
            writer.save([os.urandom(32) for _ in KEYS], BLOCKS)
        loaded = load(reader)
        assert loaded == BLOCKS[: len(loaded)]
        assert (len(loaded) == len(KEYS)) == is_asked_again
    finally:
        master.kill()


@pytest.mark.sweep(8)
@pytest.mark.parametrize(("leases_ms", "most_loads"), [(1, 60), (300, 400)])
def test_blocks_evicted_during_read_are_misses(open_store, leases_ms, most_loads):
    """A writer needs the memory, and a lease of 1 ms expires during a load: blocks are right, or misses."""
    master = Master(leases_ms=leases_ms)
    writer, reader = open_store(master, 16 << 20), open_store(master)
    is_over = Event()

    def write():
        while not is_over.is_set():
            keys = [os.urandom(32) for _ in range(12)]
            writer.save(keys, BLOCKS[:12])
            writer.save(KEYS, BLOCKS)

    writing = Thread(target=write)
    writing.start()
    counts = []
    try:
        while len(counts) < 20 or (not max(counts) and len(counts) < most_loads):
            loaded = load(reader)
            assert loaded == BLOCKS[: len(loaded)]
            counts.append(len(loaded))
    finally:
        is_over.set()
        writing.join()
        master.kill()
    assert min(counts) < len(KEYS) if leases_ms == 1 else max(counts) > 0


@pytest.mark.turn(8)
@pytest.mark.sweep(8)
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_dead_or_frozen_donor_is_a_miss(open_store, master, monkeypatch, end):
    donor, reader = open_store(master, LENT_BYTES), open_store(master)
    assert donor.save(KEYS, BLOCKS) == len(KEYS)
    assert load(reader) == BLOCKS
    client_of(donor).send_signal(end)
    with monkeypatch.context() as patched:
        calls = count_calls(patched)
        assert not loads_right(reader)
    assert len(calls) == 1  # one call takes at most `CALL_S`
    in_the_end(lambda: reader.num_matched(KEYS) == 0)
    client_of(donor).send_signal(signal.SIGCONT)
    another = open_store(master, LENT_BYTES)
    in_the_end(lambda: saves(another))
    in_the_end(lambda: loads_right(reader), 60)
    if end == signal.SIGKILL:
        in_the_end(lambda: saves(donor) and loads_right(donor))


@pytest.mark.slow
def test_frozen_master_raises_store_error_until_it_resumes(open_store, master, monkeypatch):
    donor, reader = open_store(master, LENT_BYTES), open_store(master)
    assert donor.save(KEYS, BLOCKS) == len(KEYS)
    master.stop()
    calls = count_calls(monkeypatch)
    for ask in (lambda: load(reader), lambda: reader.num_matched(KEYS), lambda: donor.save(KEYS, BLOCKS)):
        with pytest.raises(StoreError):
            ask()
    assert len(calls) == 3  # each call takes at most `CALL_S`
    master.go_on()
    in_the_end(lambda: saves(donor))
    in_the_end(lambda: loads_right(reader))


@pytest.mark.turn(12)
def test_restarted_master_forgets_all_blocks(open_store, master):
    donor, reader = open_store(master, LENT_BYTES), open_store(master)
    donor.num_matched(KEYS)
    assert donor.save(KEYS, BLOCKS) == len(KEYS)
    assert reader.num_matched(KEYS) == len(KEYS)
    master.kill()
    assert not loads_right(reader)
    with pytest.raises(StoreError):
        donor.num_matched(KEYS)
    assert not donor.lacks(KEYS)
    master.start()

    def matched(store):
        try:
            return store.num_matched([b"another"])
        except StoreError:
            return None

    in_the_end(lambda: matched(donor) == 0)
    assert donor.lacks(KEYS) == set(KEYS)
    assert load(reader) == []
    in_the_end(lambda: saves(donor))
    assert load(reader) == BLOCKS


@pytest.mark.slow
def test_guard_opens_store_after_master_starts(open_store):
    """The engine's guard opens the store on demand, and tries again later."""
    master = Master()
    master.kill()
    guard = GuardedStore("mooncake", BLOCK_BYTES, lambda: open_store(master, LENT_BYTES))
    guard.open()
    assert guard.num_matched(KEYS) == 0
    assert "mooncake_master" in guard.stats().error
    master.start()
    in_the_end(lambda: guard.save(KEYS, BLOCKS) == len(KEYS))
    assert guard.num_matched(KEYS) == len(KEYS)
    assert not guard.stats().error
    master.kill()


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["donor", "master", "reader"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_pool_recovers_from_20_faults_under_load(open_store, master, whom, end):
    donor, reader = open_store(master, LENT_BYTES), open_store(master)
    in_the_end(lambda: saves(donor))
    is_over = Event()

    def read():
        while not is_over.is_set():
            loads_right(reader)

    faults = []
    reading = Thread(target=lambda: faults.append(read()))
    reading.start()
    try:
        for _ in range(20):
            process = {"donor": client_of(donor), "reader": client_of(reader), "master": master.process}[whom]
            process.send_signal(end)
            time.sleep(0.5)
            process.send_signal(signal.SIGCONT)
            if whom == "master" and end == signal.SIGKILL:
                master.process.wait()
                master.start()
            in_the_end(lambda: saves(donor) and loads_right(reader), 60)
    finally:
        is_over.set()
        reading.join(60)
    assert faults == [None]
