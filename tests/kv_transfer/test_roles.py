"""The roles of engines in a pair of prefill and decode, and the ways by which an engine can receive KV."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import make_engine

from octavo.config import CacheConfig, EngineConfig, KVTransferConfig, SchedulerConfig
from octavo.data.capacity import EngineCapacity
from octavo.data.kv_transfer_params import KVTransferParams
from octavo.errors import ConfigError
from octavo.kv_transfer import host_bytes
from octavo.kv_transfer.direct import num_load_threads
from octavo.kv_transfer.mooncake_client import PROCESS_BYTES


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_prefill_or_decode_role_needs_store_or_direct_transfer(role):
    with pytest.raises(ConfigError, match=f"role {role} needs .*kv_disk_dir, kv_mooncake.*kv_direct"):
        KVTransferConfig(role=role)
    for way in ({"disk_dir": Path("kv")}, {"mooncake": "127.0.0.1:50051"}, {"direct": True}):
        config = KVTransferConfig(role=role, **way)
        assert config.names_store


def test_direct_transfer_needs_prefill_or_decode_role():
    with pytest.raises(ConfigError, match="kv_direct needs role prefill or decode"):
        KVTransferConfig(direct=True)
    with pytest.raises(ConfigError, match="kv_direct_bytes"):
        KVTransferConfig(role="prefill", disk_dir=Path("kv"), direct_bytes=1 << 20)
    with pytest.raises(ConfigError, match="kv_direct_bytes"):
        KVTransferConfig(role="decode", direct=True, direct_bytes=1 << 20)
    with pytest.raises(ConfigError, match="kv_direct_bytes"):
        KVTransferConfig(role="prefill", direct=True, direct_bytes=0)
    with pytest.raises(ConfigError, match="role must be one of both, prefill, decode"):
        KVTransferConfig(role="neither", direct=True)
    assert KVTransferConfig(role="prefill", direct=True, direct_bytes=1 << 20).direct
    assert KVTransferConfig(role="decode", direct=True, mooncake_protocol="rdma").direct


def test_kv_stores_need_prefix_caching():
    for stores in (KVTransferConfig(disk_dir=Path("kv")), KVTransferConfig(role="prefill", direct=True)):
        with pytest.raises(ConfigError, match="need enable_prefix_caching: turn it on"):
            EngineConfig(cache=CacheConfig(enable_prefix_caching=False), kv_transfer=stores)
    assert not EngineConfig(cache=CacheConfig(enable_prefix_caching=False)).kv_transfer.names_store


def test_capacity_reports_role_and_transfer_port():
    plain = EngineCapacity.of(SchedulerConfig().resolved(), CacheConfig(), num_blocks=8)
    assert (plain.role, plain.kv_transfer_port) == ("both", None)
    donor = EngineCapacity.of(
        SchedulerConfig().resolved(), CacheConfig(), num_blocks=8, role="prefill", kv_transfer_port=4000
    )
    assert (donor.role, donor.kv_transfer_port) == ("prefill", 4000)


def test_kv_transfer_params_reach_core_request():
    engine = make_engine()
    params = KVTransferParams("t", is_prefill=True)
    engine.add_request("r", "hello", kv_transfer_params=params)
    assert engine.core.scheduler.requests["r"].kv_transfer_params is params


def test_host_bytes_count_direct_transfer_memory():
    block_bytes, plain = 1 << 20, KVTransferConfig(disk_dir=Path("kv"))
    assert host_bytes(plain, block_bytes) == 0
    prefill = KVTransferConfig(role="prefill", direct=True, direct_bytes=1 << 30)
    decode = KVTransferConfig(role="decode", direct=True)
    areas = {"prefill": 8, "decode": 16}  # of at most 8 MiB each, with whole objects
    for config, kept in ((prefill, 1 << 30), (decode, 0)):
        taken = host_bytes(config, block_bytes) - kept - PROCESS_BYTES
        assert 0.8 < taken / (areas[config.role] << 23) <= 1
    assert (num_load_threads(plain), num_load_threads(prefill), num_load_threads(decode)) == (2, 2, 18)
