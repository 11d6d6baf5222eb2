"""The configuration of KV events, and its errors."""

from __future__ import annotations

import pytest

from octavo.config import CacheConfig, EngineConfig, KVEventsConfig
from octavo.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "is_active"),
    [
        (None, False),
        ({}, False),
        ({"endpoint": "tcp://*:6000"}, False),
        ({"publisher": "zmq"}, False),
        ({"enable_kv_cache_events": True}, True),
        ({"enable_kv_cache_events": True, "publisher": "zmq"}, True),
        ({"enable_kv_cache_events": True, "publisher": "null"}, False),
        (KVEventsConfig(enable_kv_cache_events=True), True),
    ],
)
def test_events_are_published_if_they_are_enabled_and_the_publisher_is_not_null(given, is_active):
    assert KVEventsConfig.parse(given).is_active is is_active


def test_defaults_are_those_of_vllm():
    config = KVEventsConfig(enable_kv_cache_events=True)
    assert (config.publisher, config.endpoint, config.replay_endpoint) == ("zmq", "tcp://*:5557", None)
    assert (config.buffer_steps, config.hwm, config.max_queue_size, config.topic) == (10_000, 100_000, 100_000, "")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("zmq", "must be an object with fields of KVEventsConfig, got 'zmq'"),
        ({"port": 5557}, "a field of kv_events_config must be one of .*endpoint.*, got 'port'"),
        ({"enable_kv_cache_events": "yes"}, "enable_kv_cache_events must be true or false, got 'yes'"),
        ({"publisher": "kafka"}, "publisher of kv_events_config must be one of zmq, null, got 'kafka'"),
        ({"endpoint": "localhost:5557"}, "must be tcp://HOST:PORT, .* got 'localhost:5557'"),
        ({"endpoint": "inproc://events"}, "endpoint of kv_events_config must be"),
        ({"endpoint": "tcp://*"}, "endpoint of kv_events_config must be"),
        ({"endpoint": "tcp://*:0"}, "endpoint of kv_events_config must be"),
        ({"endpoint": "tcp://*:65536"}, "endpoint of kv_events_config must be"),
        ({"endpoint": "ipc://"}, "endpoint of kv_events_config must be"),
        ({"endpoint": None}, "endpoint of kv_events_config must be"),
        ({"replay_endpoint": 5558}, "replay_endpoint of kv_events_config must be .* got 5558"),
        ({"replay_endpoint": "tcp://*:5557"}, "endpoint and replay_endpoint of kv_events_config are both tcp"),
        ({"buffer_steps": 0}, "buffer_steps of kv_events_config must be an integer of 1 or more, got 0"),
        ({"hwm": -1}, "hwm of kv_events_config must be an integer of 1 or more"),
        ({"max_queue_size": 1.5}, "max_queue_size of kv_events_config must be an integer"),
        ({"topic": 1}, "topic of kv_events_config must be a text, got 1"),
        ({"data_parallel_rank": -1}, "data_parallel_rank of kv_events_config must be an integer of 0 or more"),
    ],
)
def test_bad_values_are_errors(given, message):
    with pytest.raises(ConfigError, match=message):
        KVEventsConfig.parse(given)


@pytest.mark.parametrize("endpoint", ["tcp://*:1", "tcp://[::]:65535", "tcp://router.local:5557", "ipc:///run/kv"])
def test_endpoints_are_addresses_or_paths(endpoint):
    assert KVEventsConfig(endpoint=endpoint).endpoint == endpoint


def test_events_need_the_prefix_cache():
    events = KVEventsConfig(enable_kv_cache_events=True)
    with pytest.raises(ConfigError, match="kv_events_config publishes the prefix cache, so it needs enable_prefix_cac"):
        EngineConfig(kv_events=events, cache=CacheConfig(enable_prefix_caching=False))
    EngineConfig(kv_events=KVEventsConfig(), cache=CacheConfig(enable_prefix_caching=False))


def test_replicas_have_higher_ports_and_their_number():
    config = KVEventsConfig(endpoint="tcp://*:5557", replay_endpoint="tcp://*:5657", topic="kv")
    assert [(each.endpoint, each.replay_endpoint, each.data_parallel_rank) for each in config.of_replicas(3)] == [
        ("tcp://*:5557", "tcp://*:5657", 0),
        ("tcp://*:5558", "tcp://*:5658", 1),
        ("tcp://*:5559", "tcp://*:5659", 2),
    ]
    paths = KVEventsConfig(endpoint="ipc:///run/kv").of_replicas(2)
    assert [(each.endpoint, each.replay_endpoint) for each in paths] == [
        ("ipc:///run/kv", None),
        ("ipc:///run/kv_dp1", None),
    ]


def test_replicas_that_would_share_a_port_are_an_error():
    near = KVEventsConfig(endpoint="tcp://*:5557", replay_endpoint="tcp://*:5558")
    assert len(near.of_replicas(1)) == 1
    with pytest.raises(ConfigError, match="must differ by at least 2 ports, because replica number i uses both"):
        near.of_replicas(2)
    with pytest.raises(ConfigError, match=r"replica 1's endpoint of kv_events_config must be .*65536"):
        KVEventsConfig(endpoint="tcp://*:65535").of_replicas(2)
