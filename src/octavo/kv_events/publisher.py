"""Sends batches of events over ZMQ, and repeats them on request.

A message has the frames topic, sequence number (8 bytes, big-endian) and batch. A request for a replay has the first
sequence number as its only content. The answer is a message with an empty frame, topic, sequence number and batch for
each batch that is still there, then a message with the sequence number -1 and an empty batch.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import zmq

from octavo.errors import ConfigError
from octavo.kv_events.wire import EventBatch, encode

if TYPE_CHECKING:
    from octavo.config import KVEventsConfig
    from octavo.data.kv_event_figures import KVEventFigures
    from octavo.kv_events.wire import Event

logger = logging.getLogger(__name__)
_INBOX = "inproc://batches"
_SEQUENCE_BYTES = 8
_END = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)
_REPLAY_FRAMES = 3  # client, empty, sequence number
_LINGER_MS = 500
_CLOSE_MS = 2000


class KVEventPublisher:
    """Publishes batches on a thread, so `publish` never waits for a subscriber.

    Raises `ConfigError` if an endpoint cannot be used.
    """

    def __init__(self, config: KVEventsConfig, figures: KVEventFigures) -> None:
        self.figures = figures
        self._config, self._topic = config, config.topic.encode()
        self._numbers = itertools.count()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._open(config)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="octavo-kv-events", daemon=True)
        self._thread.start()

    def _open(self, config: KVEventsConfig) -> None:
        self._events = self._context.socket(zmq.PUB)
        self._events.sndhwm, self._events.linger = config.hwm, _LINGER_MS
        is_bound = "*" in config.endpoint or "::" in config.endpoint or config.endpoint.startswith("ipc:")
        _attach(self._events, "endpoint", config.endpoint, binds=is_bound)
        self._replays = self._context.socket(zmq.ROUTER)
        # A client's reads are acknowledged in groups, so a complete answer needs twice its size.
        self._replays.sndhwm, self._replays.linger = 2 * (config.buffer_steps + 1), _LINGER_MS
        if config.replay_endpoint is not None:
            _attach(self._replays, "replay_endpoint", config.replay_endpoint, binds=True)
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = self._context.socket(zmq.PUSH)
        self._inbox.rcvhwm, self._outbox.sndhwm, self._outbox.linger = 1, config.max_queue_size, 0
        self._inbox.bind(_INBOX)
        self._outbox.connect(_INBOX)

    def publish(self, events: list[Event]) -> None:
        """Send a batch. If too many batches wait, drop it: subscribers see that a sequence number is missing."""
        number = next(self._numbers)
        batch = encode(EventBatch(time.time(), events, self._config.data_parallel_rank))
        if self._outbox.poll(0, zmq.POLLOUT):  # a send alone may not notice that the thread has read batches
            self._outbox.send_multipart([number.to_bytes(_SEQUENCE_BYTES, "big"), batch], zmq.NOBLOCK)
            self.figures.num_batches += 1
            self.figures.num_events += len(events)
            return
        if not self.figures.num_dropped_batches:
            logger.warning(
                "batch %d of KV events was dropped, because %d batches wait to be sent; the metric "
                "octavo:kv_event_batches_dropped_total counts further ones",
                number,
                self._config.max_queue_size,
            )
        self.figures.num_dropped_batches += 1

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._inbox, self._replays):
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._replays in ready:
                self._replay(self._replays.recv_multipart())
            if self._inbox in ready:
                number, *batch = self._inbox.recv_multipart()
                if not batch:
                    break
                self._events.send_multipart([self._topic, number, *batch])
                self._sent.append((int.from_bytes(number, "big"), batch[0]))
        for socket in (self._inbox, self._replays, self._events):
            socket.close()

    def _replay(self, request: list[bytes]) -> None:
        if len(request) != _REPLAY_FRAMES or len(request[2]) != _SEQUENCE_BYTES:
            logger.debug("ignored a request for KV events that has no sequence number")
            return
        client, first = request[:2], int.from_bytes(request[2], "big")
        for number, batch in self._sent:
            if number >= first:
                self._replays.send_multipart([*client, self._topic, number.to_bytes(_SEQUENCE_BYTES, "big"), batch])
        self._replays.send_multipart([*client, b"", _END, b""])

    def close(self) -> None:
        """Send the waiting batches, and close all sockets. Later calls do nothing."""
        if self._outbox.closed:
            return
        self._outbox.sndtimeo = _CLOSE_MS
        with contextlib.suppress(zmq.Again):
            self._outbox.send(b"")
        self._outbox.close()
        self._thread.join(_CLOSE_MS / 1000)
        if self._thread.is_alive():
            logger.warning("the thread that publishes KV events did not end")
        else:
            self._context.term()


def _attach(socket: zmq.Socket[bytes], name: str, endpoint: str, *, binds: bool) -> None:
    socket.ipv6 = "[" in endpoint
    try:
        (socket.bind if binds else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        reason = zmq.strerror(error.errno or 0)
        raise ConfigError(
            f"{name} of kv_events_config cannot be used: {endpoint}: {reason}; choose another port or path"
        ) from None
    if binds and endpoint.startswith("tcp:"):
        logger.warning(
            "KV events: any client that can reach %s can read the token ids of all prompts; use it in private networks "
            "only",
            endpoint,
        )
