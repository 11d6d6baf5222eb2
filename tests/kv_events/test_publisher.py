"""Batches reach subscribers over ZMQ; lost ones are replayed; a slow or missing subscriber delays nothing."""

from __future__ import annotations

import logging
import socket
import threading

import pytest
import zmq
from kv_event_subscriber import END, TIMEOUT_MS, Subscriber, decode

from octavo.config import KVEventsConfig
from octavo.data.kv_event_figures import KVEventFigures
from octavo.errors import ConfigError
from octavo.kv_events import KVEventPublisher
from octavo.kv_events.wire import BlockRemoved


def events_of(number, size=1):
    return [BlockRemoved([number] * size, "GPU")]


def number_of(batch):
    return batch.events[0].block_hashes[0]


@pytest.fixture
def open_publisher(tmp_path):
    """Start publishers at the endpoints `ipc://.../events` and `ipc://.../replays`."""
    publishers = []

    def start(**options):
        ends = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replays"}
        config = KVEventsConfig(enable_kv_cache_events=True, **{**ends, **options})
        publishers.append(KVEventPublisher(config, KVEventFigures()))
        return publishers[-1], config

    yield start
    for each in publishers:
        each.close()


def connect(publisher, config, **options):
    """Return a subscriber that receives batches; the batches until then have the number 0."""
    subscriber = Subscriber(config.endpoint, config.replay_endpoint, **options)
    while subscriber.receive(20) is None:  # a subscription takes effect after a while
        publisher.publish(events_of(0))
    while subscriber.receive(20) is not None:
        pass
    return subscriber


def test_message_has_topic_sequence_number_and_batch(open_publisher):
    publisher, config = open_publisher(topic="kv@engine", data_parallel_rank=3)
    with connect(publisher, config, topic="kv@") as subscriber:
        publisher.publish(events_of(7))
        topic, number, batch = subscriber.events.recv_multipart()
        assert (topic, len(number), int.from_bytes(number, "big")) == (
            b"kv@engine",
            8,
            publisher.figures.num_batches - 1,
        )
        assert (number_of(decode(batch)), decode(batch).data_parallel_rank) == (7, 3)


def test_other_topics_are_not_received(open_publisher):
    publisher, config = open_publisher(topic="kv")
    with connect(publisher, config) as every, Subscriber(config.endpoint, topic="other") as other:
        publisher.publish(events_of(1))
        assert every.receive() is not None
        assert other.receive(20) is None


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.DEALER])
def test_lost_batch_is_replayed(open_publisher, kind):
    publisher, config = open_publisher()
    with connect(publisher, config) as subscriber:
        for number in (1, 2, 3):
            publisher.publish(events_of(number))
        first, _, third = [subscriber.receive() for _ in range(3)]  # the second is lost
        assert third[0] == first[0] + 2
        replay = subscriber.context.socket(kind)
        replay.connect(config.replay_endpoint)
        replay.send_multipart([b""] * (kind == zmq.DEALER) + [(first[0] + 1).to_bytes(8, "big")])
        assert replay.poll(TIMEOUT_MS)
        topic, number, batch = replay.recv_multipart()[-3:]
        assert (topic, int.from_bytes(number, "big"), number_of(decode(batch))) == (b"", first[0] + 1, 2)


def test_replay_ends_with_minus_one_and_an_empty_batch(open_publisher):
    publisher, config = open_publisher()
    with connect(publisher, config) as subscriber:
        subscriber.replays.send_multipart([b"", (10**9).to_bytes(8, "big")])
        assert subscriber.replays.recv_multipart() == [b"", b"", END, b""]


def test_replay_has_the_last_buffer_steps_batches(open_publisher):
    publisher, config = open_publisher(buffer_steps=3)
    with Subscriber(config.endpoint, config.replay_endpoint) as subscriber:
        for number in range(5):
            publisher.publish(events_of(number))
        while not (batches := subscriber.replay(0)) or batches[-1][0] < 4:
            pass
        assert [(number, number_of(batch)) for number, batch in batches] == [(2, 2), (3, 3), (4, 4)]
        assert [number for number, _ in subscriber.replay(4)] == [4]


def test_large_replay_is_complete(open_publisher):
    publisher, config = open_publisher()
    with Subscriber(config.endpoint, config.replay_endpoint) as subscriber:
        for number in range(5000):  # more than ZMQ queues by default
            publisher.publish(events_of(number))
        assert [number_of(batch) for batch in subscriber.all_batches(5000)] == list(range(5000))


@pytest.mark.parametrize("frames", [[b""], [b"", b""], [b"", bytes(7)], [b"", bytes(8), b""], [bytes(8)], [b""] * 9])
def test_invalid_requests_for_replays_are_ignored(open_publisher, frames):
    publisher, config = open_publisher()
    with connect(publisher, config) as subscriber:
        subscriber.replays.send_multipart(frames)
        assert subscriber.replay(publisher.figures.num_batches - 1)


def test_slow_subscriber_loses_batches_and_others_lose_none(open_publisher):
    publisher, config = open_publisher(hwm=2)
    count, size = 100, 50_000
    with connect(publisher, config, hwm=1) as slow, Subscriber(config.endpoint, config.replay_endpoint) as other:
        start = publisher.figures.num_batches
        for number in range(count):
            publisher.publish(events_of(number, size))
        other.all_batches(start + count)  # the publisher sent everything, though `slow` read nothing
        publisher.publish(events_of(count))
        numbers = []
        while not numbers or numbers[-1] < start + count - 1:
            if (received := slow.receive(100)) is None:
                break
            numbers.append(received[0])
        assert 0 < len(numbers) < count
        lost = set(range(start, start + count)) - set(numbers)
        assert lost <= {number for number, _ in slow.replay(min(lost))}
    assert publisher.figures.num_dropped_batches == 0


def test_full_queue_drops_batches_and_their_sequence_numbers_are_missing(open_publisher, monkeypatch, caplog):
    may_run, run = threading.Event(), KVEventPublisher._run

    def delayed(publisher):
        may_run.wait()
        run(publisher)

    monkeypatch.setattr(KVEventPublisher, "_run", delayed)
    publisher, config = open_publisher(max_queue_size=10)
    with caplog.at_level(logging.WARNING, logger="octavo.kv_events.publisher"):
        for number in range(50):
            publisher.publish(events_of(number))
    figures = publisher.figures
    assert 10 <= figures.num_batches < 20
    assert figures.num_events == figures.num_batches == 50 - figures.num_dropped_batches
    (warning,) = [record.message for record in caplog.records if "dropped" in record.message]
    assert warning == (
        f"batch {figures.num_batches} of KV events was dropped, because 10 batches wait to be sent; the metric "
        "octavo:kv_event_batches_dropped_total counts further ones"
    )
    may_run.set()
    with Subscriber(config.endpoint, config.replay_endpoint) as subscriber:
        while len(batches := subscriber.replay(0)) < figures.num_batches:
            pass
        publisher.publish(events_of(50))
        while (last := subscriber.replay(0)[-1])[0] != 50:
            pass
        assert [number for number, _ in batches] == list(range(figures.num_batches - 1))
        assert number_of(last[1]) == 50


def test_close_sends_the_last_batches_and_frees_the_endpoints(open_publisher):
    publisher, config = open_publisher()
    with connect(publisher, config) as subscriber:
        for number in range(1, 50):
            publisher.publish(events_of(number))
        publisher.close()
        publisher.close()
        assert [number_of(subscriber.receive()[1]) for _ in range(49)] == list(range(1, 50))
    assert not publisher._thread.is_alive()
    assert publisher._context.closed


def test_close_does_not_wait_for_a_subscriber_that_does_not_read(open_publisher):
    publisher, config = open_publisher()
    with connect(publisher, config, hwm=1) as subscriber:
        for number in range(50):
            publisher.publish(events_of(number, 50_000))
        publisher.close()
        assert publisher._context.closed
        assert subscriber.receive() is not None


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
def test_used_port_is_an_error(open_publisher, name):
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://*")
        message = rf"{name} of kv_events_config cannot be used: tcp://\*:{port}: Address already in use; choose another"
        with pytest.raises(ConfigError, match=message):
            open_publisher(**{name: f"tcp://*:{port}"})


def test_bound_port_is_logged_as_open_to_any_client(open_publisher, caplog):
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://*")
    with caplog.at_level(logging.WARNING, logger="octavo.kv_events.publisher"):
        open_publisher(endpoint=f"tcp://*:{port}")
    (warning,) = [record.message for record in caplog.records]
    assert warning == (
        f"KV events: any client that can reach tcp://*:{port} can read the token ids of all prompts; use it in private "
        "networks only"
    )


def test_endpoint_with_a_host_is_the_address_of_a_subscriber(open_publisher, caplog):
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.subscribe("")
        port = subscriber.bind_to_random_port("tcp://127.0.0.1")
        publisher, _ = open_publisher(endpoint=f"tcp://127.0.0.1:{port}")
        while not subscriber.poll(20):
            publisher.publish(events_of(5))
        assert number_of(decode(subscriber.recv_multipart()[2])) == 5
    assert caplog.records == []  # no port is open


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no socket of both families")
def test_endpoint_of_all_ipv6_addresses_is_bound(open_publisher):
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
    publisher, _ = open_publisher(endpoint=f"tcp://[::]:{port}")
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.ipv6 = True
        subscriber.subscribe("")
        subscriber.connect(f"tcp://[::1]:{port}")
        while not subscriber.poll(20):
            publisher.publish(events_of(5))
        assert number_of(decode(subscriber.recv_multipart()[2])) == 5
