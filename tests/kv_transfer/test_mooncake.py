"""How the store handles Mooncake's answers and hanging calls, with a folder as the pool (`fake_mooncake`)."""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from octavo.config import KVTransferConfig
from octavo.errors import ConfigError
from octavo.kv_transfer import create_store, mooncake, mooncake_client
from octavo.kv_transfer.interface import StoreError, StoreStats
from octavo.kv_transfer.mooncake import MooncakeStore, _is_wrong, _name

BLOCK_BYTES = 1000
MASTER = "127.0.0.1:1"
KEYS = [bytes([number]) * 32 for number in range(5)]
BLOCKS = [memoryview(os.urandom(BLOCK_BYTES)) for _ in KEYS]


@pytest.fixture
def pool(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "fake_mooncake"))
    monkeypatch.setenv("OCTAVO_FAKE_POOL", str(tmp_path))
    return tmp_path


@pytest.fixture
def store(pool):
    store = MooncakeStore(BLOCK_BYTES, master=MASTER)
    yield store
    for name in pool.glob("*.hangs"):
        name.unlink()
    store.close()


def load(store, keys=KEYS):
    into = [memoryview(bytearray(BLOCK_BYTES)) for _ in keys]
    count = store.load(keys, into)
    return [bytes(block) for block in into[:count]]


def test_saved_blocks_are_loaded(store):
    assert store.lacks(KEYS) == set(KEYS)
    assert store.num_matched(KEYS) == 0
    assert store.save(KEYS, BLOCKS) == len(KEYS)
    assert store.lacks(KEYS) == set()
    assert store.num_matched([*KEYS, b"another"]) == len(KEYS)
    assert load(store) == BLOCKS
    stats = store.stats()
    assert (stats.num_blocks, stats.num_bytes, stats.num_corrupt, stats.num_errors) == (5, 5000, 0, 0)


def test_shorter_block_is_padded_with_zeros(store, pool):
    store.save(KEYS[:1], BLOCKS[:1])
    assert store.save(KEYS[1:2], [BLOCKS[1][:300]]) == 1
    assert (pool / _name(KEYS[1])).read_bytes()[-700:] == bytes(700)
    into = memoryview(bytearray(300))
    assert store.load(KEYS[1:2], [into]) == 1
    assert into == BLOCKS[1][:300]
    assert store.load(KEYS[1:2], [memoryview(bytearray(BLOCK_BYTES))]) == 0, "it is not taken for a whole one"


def test_blocks_above_area_size_are_moved_in_parts(pool, monkeypatch):
    monkeypatch.setattr(mooncake_client, "AREA_BYTES", 2500)  # two objects
    store = MooncakeStore(BLOCK_BYTES, master=MASTER)
    assert store.save(KEYS, BLOCKS) == len(KEYS)
    assert load(store) == BLOCKS
    (pool / _name(KEYS[2])).unlink()
    assert load(store) == BLOCKS[:2]
    store.close()


def test_lookup_above_key_limit_is_split(store, monkeypatch):
    monkeypatch.setattr("octavo.kv_transfer.mooncake._MAX_QUERIED", 2)
    store.save(KEYS, BLOCKS)
    assert store.num_matched(KEYS) == len(KEYS)
    store.forget(KEYS[3:])
    assert store.num_matched(KEYS) == 3


@pytest.mark.parametrize("code", [-704, -707, -800])
def test_missing_block_ends_load(store, pool, code):
    store.save(KEYS, BLOCKS)
    size = (pool / _name(KEYS[0])).stat().st_size
    (pool / "get.codes").write_text(json.dumps([size, size, code, size, size]))
    assert load(store) == BLOCKS[:2]
    assert store.lacks(KEYS) == {KEYS[2]}
    assert store.stats().num_corrupt == 0
    assert store.stats().num_errors == (code == -800)


@pytest.mark.parametrize(("lent_bytes", "preferred"), [(0, ""), (4096, "here:1")])
def test_save_prefers_lent_segment(pool, lent_bytes, preferred):
    store = MooncakeStore(BLOCK_BYTES, master=MASTER, segment_bytes=lent_bytes)
    store.save(KEYS, BLOCKS)
    assert (pool / "preferred.segment").read_text() == preferred
    store.close()


@pytest.mark.parametrize("code", [-900, -901])
def test_empty_lookup_fails_without_master(store, pool, code):
    assert store.num_matched([]) == 0
    (pool / "has.codes").write_text(json.dumps([code]))
    with pytest.raises(StoreError, match="mooncake_master does not answer"):
        store.num_matched([])


def test_full_pool_keeps_blocks_that_fit(store, pool):
    (pool / "put.codes").write_text("[0, 0, -200, 0, -200]")
    assert store.save(KEYS, BLOCKS) == 2
    assert store.lacks(KEYS) == {KEYS[2], KEYS[4]}
    (pool / "put.codes").unlink()
    assert store.save(KEYS, BLOCKS) == 5


def damaged(value):
    return value[:-1] + bytes([value[-1] ^ 1])


def of_another_format(value):
    return value[:7] + bytes([value[7] + 1]) + value[8:]


@pytest.mark.parametrize(
    "change",
    [damaged, of_another_format, lambda value: value[:-1], lambda value: value + b"x", lambda _: b"", bytes.upper],
)
def test_corrupt_object_is_not_loaded(store, pool, change):
    store.save(KEYS, BLOCKS)
    path = pool / _name(KEYS[1])
    path.write_bytes(change(path.read_bytes()))
    assert load(store) == BLOCKS[:1]
    assert store.stats().num_corrupt == 1
    store.forget(KEYS[1:2])
    assert store.save(KEYS, BLOCKS) == len(KEYS)
    assert load(store) == BLOCKS


def test_block_of_another_key_is_not_loaded(store, pool):
    store.save(KEYS, BLOCKS)
    (pool / _name(KEYS[0])).write_bytes((pool / _name(KEYS[1])).read_bytes())
    assert load(store) == []
    assert store.stats().num_corrupt == 1


def test_emptied_pool_is_filled_again(store, pool):
    store.num_matched(KEYS)
    store.save(KEYS, BLOCKS)
    assert not store.lacks(KEYS)
    for path in pool.iterdir():
        path.unlink()
    assert store.num_matched([b"another"]) == 0
    assert store.lacks(KEYS) == set(KEYS)
    assert store.save(KEYS, BLOCKS) == len(KEYS)
    assert store.num_matched([b"another"]) == 0
    assert not store.lacks(KEYS)


@pytest.mark.parametrize("code", [-900, -901])
def test_unreachable_master_raises_store_error_until_it_recovers(store, pool, code):
    store.save(KEYS, BLOCKS)
    (pool / "get.codes").write_text(json.dumps([code] * 5))
    with pytest.raises(StoreError, match="mooncake_master does not answer"):
        load(store)
    assert "mooncake_master" in store.stats().error
    assert store.stats().num_errors == 1
    (pool / "get.codes").unlink()
    assert load(store) == BLOCKS
    assert not store.stats().error


def test_hanging_call_times_out_and_other_calls_continue(store, pool, monkeypatch):
    store.save(KEYS, BLOCKS)
    (pool / "get.hangs").touch()
    with monkeypatch.context() as patched:
        patched.setattr(mooncake_client, "CALL_S", 0.2)
        with pytest.raises(StoreError, match="has not answered"):
            load(store)
    assert store.num_matched(KEYS) == len(KEYS)
    (pool / "get.hangs").unlink()
    assert load(store) == BLOCKS


@pytest.mark.turn(8)
def test_area_of_hanging_call_is_reused_after_rest(store, pool, monkeypatch):
    store.save(KEYS, BLOCKS)
    (pool / "get.hangs").touch()
    monkeypatch.setattr(mooncake_client, "CALL_S", 0.2)
    for _ in range(mooncake_client.NUM_AREAS):
        with pytest.raises(StoreError):
            load(store)
    monkeypatch.setattr(mooncake_client, "CALL_S", 600.0)
    with pytest.raises(StoreError, match="answers none of 4 calls"):
        store.num_matched(KEYS)
    monkeypatch.setattr(mooncake_client, "REST_S", 0.0)
    (pool / "get.hangs").unlink()
    assert all(area.channel.poll(10) for area in store._client._aside)
    assert load(store) == BLOCKS
    assert not store._client._aside


def test_area_rests_after_failed_get(store, pool):
    store.save(KEYS, BLOCKS)
    (pool / "get.codes").write_text("[-800]")
    load(store, KEYS[:1])
    assert len(store._client._aside) == 1
    (pool / "put.codes").write_text("[-800]")
    store.save(KEYS[:1], BLOCKS[:1])  # a put only reads the area
    assert len(store._client._aside) == 1


def test_unresponsive_process_is_replaced(store, pool, monkeypatch):
    store.save(KEYS, BLOCKS)
    first = store._client._process
    (pool / "get.hangs").touch()
    monkeypatch.setattr(mooncake_client, "CALL_S", 0.1)
    with pytest.raises(StoreError):
        load(store)
    (pool / "get.hangs").unlink()
    monkeypatch.setattr(mooncake_client, "CALL_S", 4.0)
    monkeypatch.setattr(mooncake_client, "GONE_S", -1.0)
    for area in store._client._areas:
        area.channel.poll(0.0)
    assert load(store) == BLOCKS
    assert first.poll() is not None


def test_dead_client_is_replaced(store):
    store.save(KEYS, BLOCKS)
    store._client.kill()
    assert load(store, KEYS[:1]) == BLOCKS[:1]
    assert store.lacks(KEYS) == set(KEYS[1:])  # the memory that it lent is gone


def test_client_death_during_call_raises_store_error(store, pool):
    (pool / "has.hangs").touch()
    killer = Thread(target=lambda: (wait_for(lambda: store._client._areas[-1].is_pending), store._client.kill()))
    killer.start()
    with pytest.raises(StoreError, match="has ended"):
        store.num_matched(KEYS)
    killer.join()
    (pool / "has.hangs").unlink()
    assert store.num_matched(KEYS) == 0


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_close_does_not_wait_for_call(store, pool, monkeypatch):
    monkeypatch.setattr(mooncake_client, "CALL_S", 600.0)
    (pool / "has.hangs").touch()
    errors = []

    def ask():
        try:
            store.num_matched(KEYS)
        except StoreError as error:
            errors.append(error)

    asking = Thread(target=ask)
    asking.start()
    wait_for(lambda: any(area.is_pending for area in store._client._areas))
    store.close()
    asking.join(20)
    assert errors
    wait_for(lambda: store._client._process.poll() is not None)
    with pytest.raises(StoreError, match="closed"):
        store.num_matched(KEYS)
    store.close()


def test_process_is_killed_if_close_hangs(store, pool, monkeypatch):
    monkeypatch.setattr(mooncake_client, "CLOSE_S", 0.2)
    (pool / "close.hangs").touch()
    store.close()
    wait_for(lambda: store._client._process.poll() is not None)


@pytest.mark.turn(12)
def test_failed_client_setup_raises_store_error(pool, monkeypatch):
    (pool / "setup.codes").write_text("-1")
    with pytest.raises(
        StoreError, match=r"the client could not connect to mooncake_master at 127.0.0.1:1 over tcp \(code -1\)"
    ):
        MooncakeStore(BLOCK_BYTES, master=MASTER)
    (pool / "setup.codes").unlink()
    (pool / "register.codes").write_text("-600")
    with pytest.raises(StoreError, match="could not be registered"):
        MooncakeStore(BLOCK_BYTES, master=MASTER)
    (pool / "setup.hangs").touch()
    monkeypatch.setattr(mooncake_client, "OPEN_S", 0.5)
    with pytest.raises(StoreError, match="no answer in"):
        MooncakeStore(BLOCK_BYTES, master=MASTER)


def test_missing_library_raises_store_error(tmp_path, monkeypatch):
    (tmp_path / "mooncake.py").write_text("raise ImportError('libibverbs.so.1: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(StoreError, match="libibverbs"):
        MooncakeStore(BLOCK_BYTES, master=MASTER)


def test_unresolvable_master_raises_store_error():
    with pytest.raises(StoreError, match="cannot be reached"):
        MooncakeStore(BLOCK_BYTES, master="nowhere.invalid:1")


def test_process_exits_with_its_parent(store):
    process = store._client._process
    store._client._control.close()  # the system closes it if the parent process is gone
    assert process.wait(10) == 0


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:99999", "a b:1", "http://host:1"])
def test_invalid_master_address_is_refused(address):
    with pytest.raises(ConfigError, match="HOST:PORT"):
        KVTransferConfig(mooncake=address)


@pytest.mark.parametrize("more", [{"mooncake_segment_bytes": 0}, {"mooncake_protocol": "rdma"}])
def test_options_without_master_are_refused(more):
    with pytest.raises(ConfigError, match="has no effect without mooncake"):
        KVTransferConfig(**more)
    assert KVTransferConfig(mooncake="[::1]:50051", **more).names_store


def test_invalid_protocol_or_segment_size_is_refused():
    with pytest.raises(ConfigError, match="tcp, rdma"):
        KVTransferConfig(mooncake=MASTER, mooncake_protocol="udp")
    with pytest.raises(ConfigError, match="mooncake_segment_bytes"):
        KVTransferConfig(mooncake=MASTER, mooncake_segment_bytes=-1)


@pytest.mark.turn(8)
def test_create_store_returns_store_that_opens_and_saves(pool):
    assert create_store(KVTransferConfig(), BLOCK_BYTES) is None
    store = create_store(KVTransferConfig(mooncake=MASTER), BLOCK_BYTES)
    store.open()
    assert store.save(KEYS, BLOCKS) == len(KEYS)
    assert len(list(pool.glob("octavo-kv-*"))) == len(KEYS)
    store.close()


# --- without a process ------------------------------------------------------------------------------------------------


class Client:
    """A client of a pool in this process's memory, with one area for two objects."""

    values, codes = {}, {}

    def __init__(self, **options):
        self.options = options
        self.calls = []
        self.is_alive, self.num_closed, self.num_areas = True, 0, 0
        self.objects = [memoryview(bytearray(options["object_bytes"])) for _ in range(2)]

    @contextmanager
    def area(self):
        self.num_areas += 1
        yield self

    def call(self, name, names):
        self.calls.append((name, names))
        done = list(getattr(self, f"_{name}")(names))
        return self.codes.get(name, done)

    def _has(self, names):
        return [int(name in self.values) for name in names]

    def _put(self, names):
        self.values.update({name: bytes(stored) for name, stored in zip(names, self.objects, strict=False)})
        return [0] * len(names)

    def _get(self, names):
        for name, stored in zip(names, self.objects, strict=False):
            stored[:] = self.values.get(name, bytes(stored))
            yield len(stored) if name in self.values else -704

    def _remove(self, names):
        return [0 if self.values.pop(name, None) else -704 for name in names]

    def close(self):
        self.num_closed += 1


@pytest.fixture
def clients(monkeypatch):
    """Return the list of clients that stores have made."""
    clients = []
    monkeypatch.setattr(Client, "values", {})
    monkeypatch.setattr(Client, "codes", {})
    monkeypatch.setattr(
        mooncake, "MooncakeClient", lambda **options: (clients.append(Client(**options)), clients[-1])[1]
    )
    monkeypatch.setattr(mooncake, "local_address", lambda master: f"route to {master}")
    return clients


@pytest.fixture
def local(clients):
    """Return a store over such a client. The pool has its mark already."""
    store = MooncakeStore(BLOCK_BYTES, master=MASTER, protocol="rdma", segment_bytes=77)
    store.num_matched([])
    clients[0].calls.clear()
    return store


def test_client_gets_options_of_store(local, clients):
    assert [client.options for client in clients] == [
        {
            "host": f"route to {MASTER}",
            "master": MASTER,
            "protocol": "rdma",
            "segment_bytes": 77,
            "object_bytes": BLOCK_BYTES + 128,
        }
    ]
    store = MooncakeStore(BLOCK_BYTES, master=MASTER)
    assert (store._client.options["segment_bytes"], store.stats()) == (0, StoreStats(0, 0, None))
    assert MooncakeStore.host_bytes(BLOCK_BYTES, 77) == mooncake_client.client_bytes(BLOCK_BYTES + 128, 77)


def test_object_is_header_block_and_zero_padding(local, clients):
    for block in (BLOCKS[0], BLOCKS[0][:300]):
        clients[0].values.clear()
        local.save(KEYS[:1], [block])
        head = b"octavoK\x01" + KEYS[0] + hashlib.sha256(KEYS[0] + block).digest()
        stored = Client.values[f"octavo-kv-1-{KEYS[0].hex()}"]
        assert (stored[:72], stored[72:128]) == (head, bytes(56))
        assert stored[128:] == bytes(block).ljust(BLOCK_BYTES, b"\0")


def test_put_and_get_move_blocks_in_area_sized_parts(local, clients):
    assert (local.save(KEYS, BLOCKS), load(local)) == (5, BLOCKS)
    names = [*map(_name, KEYS)]
    parts = [names[:2], names[2:4], names[4:]]
    assert clients[0].calls == [("put", part) for part in parts] + [("get", part) for part in parts]


def test_lookup_checks_pool_mark(local, clients):
    local.save(KEYS[:3], BLOCKS[:3])
    clients[0].calls.clear()
    assert local.num_matched(KEYS) == 3
    assert clients[0].calls == [("has", [*map(_name, KEYS), local._mark])]
    assert local.lacks(KEYS) == set(KEYS[3:])
    clients[0].calls.clear()
    assert local.num_matched([]) == 0
    assert clients[0].calls == [("has", [local._mark])]


def test_keys_per_lookup_call_are_limited(local, clients):
    keys = [number.to_bytes(32) for number in range(600)]
    Client.values |= dict.fromkeys(map(_name, keys[:550]), b"")
    assert local.num_matched(keys) == 550
    assert [names[0] for _, names in clients[0].calls] == [_name(keys[first]) for first in (0, 256, 512)]
    assert [len(names) for _, names in clients[0].calls] == [257, 257, 89]
    del Client.values[_name(keys[255])]
    clients[0].calls.clear()
    assert (local.num_matched(keys), len(clients[0].calls)) == (255, 1)
    assert local.num_matched(keys[256:512]) == 256


def test_missing_mark_clears_known_blocks_and_puts_new_mark(local, clients):
    local.save(KEYS, BLOCKS)
    mark = local._mark
    Client.values.clear()
    clients[0].calls.clear()
    assert local.num_matched(KEYS) == 0
    assert local._mark != mark
    assert clients[0].calls == [("has", [*map(_name, KEYS), mark]), ("put", [local._mark])]
    assert local.lacks(KEYS) == set(KEYS)
    assert (len(mark), mark.startswith("octavo-kv-1-mark-")) == (len("octavo-kv-1-mark-") + 32, True)


def test_mark_replaced_by_another_thread_is_kept(local, clients):
    local.save(KEYS, BLOCKS)
    clients[0].calls.clear()
    local._begin_anew(clients[0], "an older mark")
    assert (clients[0].calls, local.lacks(KEYS)) == ([], set())


def test_known_blocks_are_limited_to_latest(local, monkeypatch):
    monkeypatch.setattr(mooncake, "_MAX_KNOWN", 3)
    local.save(KEYS[:3], BLOCKS[:3])
    local.num_matched(KEYS[:1])
    local.save(KEYS[3:4], BLOCKS[3:4])
    assert local.lacks(KEYS) == {KEYS[1], KEYS[4]}
    assert local.stats() == StoreStats(3, 3 * BLOCK_BYTES, None)


@pytest.mark.parametrize(
    ("code", "is_whole", "is_wrong"),
    [
        (9, True, False),
        (9, False, True),
        (0, False, True),
        (-1, False, False),
        (-600, False, True),
        (-704, False, False),
    ],
)
def test_object_is_wrong_if_received_bytes_differ(code, is_whole, is_wrong):
    assert _is_wrong(code, is_whole) is is_wrong


def test_wrong_objects_are_removed_and_counted(local, clients, caplog):
    local.save(KEYS, BLOCKS)
    for key in KEYS[2:4]:
        Client.values[_name(key)] = bytes(BLOCK_BYTES + 128)
    clients[0].calls.clear()
    assert load(local) == BLOCKS[:2]
    assert clients[0].calls[2:] == [("remove", [*map(_name, KEYS[2:4])])]
    assert (local.stats().num_corrupt, local.lacks(KEYS)) == (2, set(KEYS[2:4]))
    assert [record.getMessage() for record in caplog.records] == [
        "Mooncake returned other bytes for a block than were saved: they are not used"
    ] * 2


def test_missing_object_is_not_removed(local, clients):
    local.save(KEYS[:1], BLOCKS[:1])
    clients[0].calls.clear()
    assert load(local, KEYS[:2]) == BLOCKS[:1]
    assert clients[0].calls == [("get", [*map(_name, KEYS[:2])])]
    assert local.stats().num_corrupt == 0


def test_save_counts_blocks_before_first_failed_put(local, monkeypatch):
    monkeypatch.setattr(Client, "codes", {"put": [0, -200]})
    assert local.save(KEYS[:4], BLOCKS[:4]) == 1
    assert local.lacks(KEYS[:4]) == {KEYS[1], KEYS[3]}


def test_failed_transfers_are_counted_and_lost_master_raises(local, monkeypatch):
    monkeypatch.setattr(Client, "codes", {"get": [-800, -800]})
    assert load(local, KEYS[:2]) == []
    assert (local.stats().num_errors, local.stats().error) == (2, "")
    for code in (-900, -901):
        monkeypatch.setattr(Client, "codes", {"get": [5, code]})
        with pytest.raises(StoreError, match=r"^mooncake_master does not answer$"):
            load(local, KEYS[:2])
    assert (local.stats().num_errors, local.stats().error) == (4, "mooncake_master does not answer")
    local.num_matched([])
    assert (local.stats().num_errors, local.stats().error) == (4, "")


def test_forget_removes_blocks_from_pool(local, clients):
    local.save(KEYS[:3], BLOCKS[:3])
    clients[0].calls.clear()
    local.forget(KEYS[:2])
    assert clients[0].calls == [("remove", [*map(_name, KEYS[:2])])]
    assert local.lacks(KEYS[:3]) == set(KEYS[:2])
    num_areas = clients[0].num_areas
    local.forget([])
    assert clients[0].num_areas == num_areas


def test_ended_client_is_replaced_and_its_blocks_forgotten(local, clients):
    local.save(KEYS, BLOCKS)
    clients[0].is_alive = False
    assert local.num_matched(KEYS[:1]) == 1
    assert (len(clients), local.lacks(KEYS)) == (2, set(KEYS[1:]))
    local.num_matched(KEYS[:1])
    assert len(clients) == 2


def test_closed_store_starts_no_client(local, clients):
    local.close()
    local.close()
    assert clients[0].num_closed == 1
    clients[0].is_alive = False
    with pytest.raises(StoreError, match=r"^the store is closed$"):
        local.num_matched([])
    assert (len(clients), clients[0].num_closed) == (1, 2)
    assert local.stats() == StoreStats(0, 0, None, num_errors=1, error="the store is closed")
