"""The stores and connectors that a configuration creates, and the memory that they take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from octavo.config import KVTransferConfig
from octavo.errors import ConfigError
from octavo.kv_transfer import create_store, direct, direct_donor, direct_receiver, host_bytes
from octavo.kv_transfer.direct import NoConnector, create_connector, num_load_threads
from octavo.kv_transfer.direct_segment import DONOR_AREAS, HEADER_BYTES, RECEIVER_AREAS
from octavo.kv_transfer.disk import DiskStore
from octavo.kv_transfer.guard import GuardedStore
from octavo.kv_transfer.memory import GlobalKVPool, MemoryStore
from octavo.kv_transfer.mooncake import MooncakeStore
from octavo.kv_transfer.mooncake_client import client_bytes

BLOCK_BYTES = 1000
MASTER = "127.0.0.1:1"
PREFILL = KVTransferConfig(role="prefill", direct=True, direct_bytes=1 << 20)
DECODE = KVTransferConfig(role="decode", direct=True)


@pytest.fixture(autouse=True)
def checks(monkeypatch):
    """Return the names of the guards that a thread would check."""
    checks = []
    monkeypatch.setattr(GuardedStore, "check_when_idle", lambda guard: checks.append(guard.name))
    return checks


def memory_store(block_bytes):
    return MemoryStore(GlobalKVPool(), "a", block_bytes)


def names_of(config, **options):
    store = create_store(config, BLOCK_BYTES, **options)
    return None if store is None else [tier.name for tier in store.tiers]


def test_tiers_are_ordered_fastest_first(tmp_path):
    direct_side = SimpleNamespace(name="direct", block_bytes=BLOCK_BYTES)
    both = {"disk_dir": tmp_path, "mooncake": MASTER}
    assert names_of(KVTransferConfig()) is None
    assert names_of(KVTransferConfig(), first=memory_store) == ["memory"]
    assert names_of(KVTransferConfig(**both), first=memory_store) == ["memory", "disk", "mooncake"]
    prefill, decode = (KVTransferConfig(role=role, direct=True, **both) for role in ("prefill", "decode"))
    assert names_of(prefill, direct=direct_side) == ["direct", "disk", "mooncake"]
    assert names_of(decode, direct=direct_side) == ["disk", "mooncake", "direct"]


def test_first_store_factory_receives_block_bytes():
    store = create_store(KVTransferConfig(), BLOCK_BYTES, memory_store)
    assert (store.block_bytes, store.tiers[0].is_usable, store.tiers[0].figures.is_usable) == (BLOCK_BYTES, True, 1)


def test_disk_store_is_opened_with_its_options(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(DiskStore, "__init__", lambda _, *args, **options: opened.append((args, options)))
    store = create_store(KVTransferConfig(disk_dir=tmp_path, disk_bytes=1 << 20), BLOCK_BYTES, part_bytes=100)
    assert opened == []
    store.open()
    assert opened == [((tmp_path, BLOCK_BYTES, 1 << 20), {"part_bytes": 100})]
    assert store.tiers[0].keeps_parts
    with pytest.raises(ConfigError, match="kv_disk_bytes is 1000"):
        create_store(KVTransferConfig(disk_dir=tmp_path, disk_bytes=1000), BLOCK_BYTES)


def test_mooncake_store_is_opened_with_its_options_and_checked(monkeypatch, checks):
    opened = []
    monkeypatch.setattr(MooncakeStore, "__init__", lambda _, *args, **options: opened.append((args, options)))
    config = KVTransferConfig(mooncake=MASTER, mooncake_protocol="rdma", mooncake_segment_bytes=77)
    store = create_store(config, BLOCK_BYTES)
    assert checks == ["mooncake"]
    store.open()
    assert opened == [((BLOCK_BYTES,), {"master": MASTER, "protocol": "rdma", "segment_bytes": 77})]


def test_direct_tier_may_wait_and_moves_whole_blocks():
    side = SimpleNamespace(name="direct", block_bytes=BLOCK_BYTES)
    [guard] = create_store(DECODE, BLOCK_BYTES, direct=side).tiers
    assert (guard._may_wait, guard.keeps_parts) == (True, False)


def test_host_bytes_cover_stores_and_direct_transfers():
    size = HEADER_BYTES + BLOCK_BYTES
    assert host_bytes(KVTransferConfig(), BLOCK_BYTES) == 0
    assert host_bytes(PREFILL, BLOCK_BYTES) == (1 << 20) + client_bytes(size, 0, DONOR_AREAS)
    assert host_bytes(DECODE, BLOCK_BYTES) == client_bytes(size, 0, RECEIVER_AREAS)
    pool = KVTransferConfig(mooncake=MASTER, mooncake_segment_bytes=77)
    assert host_bytes(pool, BLOCK_BYTES) == MooncakeStore.host_bytes(BLOCK_BYTES, 77)
    both = KVTransferConfig(mooncake=MASTER, mooncake_segment_bytes=77, role="decode", direct=True)
    assert host_bytes(both, BLOCK_BYTES) == host_bytes(pool, BLOCK_BYTES) + host_bytes(DECODE, BLOCK_BYTES)
    assert direct.host_bytes(pool, BLOCK_BYTES) == 0


def test_direct_decode_engine_gets_extra_load_threads():
    plain = KVTransferConfig()
    assert num_load_threads(plain) == plain.num_threads
    assert num_load_threads(PREFILL) == PREFILL.num_threads
    assert num_load_threads(DECODE) == DECODE.num_threads + RECEIVER_AREAS
    assert num_load_threads(KVTransferConfig(role="decode", mooncake=MASTER)) == plain.num_threads


def test_create_connector_passes_options_to_direct_side(monkeypatch):
    for module, name in ((direct_donor, "DirectDonor"), (direct_receiver, "DirectReceiver")):
        monkeypatch.setattr(module, name, lambda *args, name=name, **options: (name, args, options))
    options = {"block_bytes": BLOCK_BYTES, "block_size": 4, "secret": "s", "kv_format": {"kv": "int8"}}
    common = {"protocol": "tcp", "secret": "s", "kv_format": {"kv": "int8"}}
    assert create_connector(KVTransferConfig(), **options) is None
    assert create_connector(PREFILL, **options) == ("DirectDonor", (BLOCK_BYTES, 1 << 20), common)
    assert create_connector(DECODE, **options) == ("DirectReceiver", (BLOCK_BYTES,), common | {"block_size": 4})


def test_no_connector_expects_no_blocks():
    side = NoConnector()
    assert (side.port, side.expect(None)) == (None, False)
    for event in (side.request_added, side.request_finished, side.transfer_ordered, side.transfer_ended):
        assert event(None) is None
    assert side.forget_expected("r") is None
