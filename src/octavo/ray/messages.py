"""Messages between a router's process and its child process that uses Ray. Each message is a line of JSON."""

from __future__ import annotations

import os
import queue
import threading
from typing import TypeVar

import msgspec

FirstT = TypeVar("FirstT", bound=msgspec.Struct)


class Search(msgspec.Struct, frozen=True):
    """The first message to `octavo.ray.finder`. address: Of the cluster."""

    address: str
    log_level: str
    log_format: str


class Settings(msgspec.Struct, frozen=True):
    """The first message to `octavo.ray.driver`.

    address: Of the cluster. None starts a cluster on this machine.
    words: Command line of an engine after `serve`, without host, port and number of threads.
    environment: Variables of an engine.
    num_threads: Of an engine. None divides the CPUs of the nodes.
    uses_gpu: None means True if the cluster has GPUs.
    timeout_s: Limit on finding room for the first engines, and for added engines.
    start_s: Time in which a placed engine must be ready.
    stop_s: Time in which the requests of all engines end when the command stops.
    drain_s: Time in which the requests of a drained engine end.
    is_again: True if an earlier driver had found room for all engines. Then missing room is no failure.
    """

    address: str | None
    words: tuple[str, ...]
    environment: dict[str, str]
    num_replicas: int
    min_replicas: int
    max_replicas: int
    target_queue_time_s: float
    num_threads: int | None
    num_ranks: int
    uses_gpu: bool | None
    operator_key: str | None
    timeout_s: float
    start_s: float
    stop_s: float
    drain_s: float
    log_level: str
    log_format: str
    is_again: bool = False


class Order(msgspec.Struct, frozen=True, omit_defaults=True):
    """A later message to the driver.

    reload: True lets engines read the API keys again.
    silent: Address of an engine to kill, because it does not respond.
    words: Replaces `Settings.words`. All engines are replaced one after another.
    """

    reload: bool = False
    silent: str | None = None
    words: tuple[str, ...] | None = None


class Restart(msgspec.Struct, frozen=True):
    """The settings with which another driver continues the work of this one. See `Settings`."""

    words: tuple[str, ...]
    num_replicas: int
    num_threads: int | None
    uses_gpu: bool | None


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message from the child process.

    urls: Addresses of the engines that accept requests.
    is_connected: True if the cluster is connected.
    is_placed: True if all first engines have their place in the cluster.
    was_ready: True if an engine was ready.
    is_replacing: True until a replacement of all engines is complete or undone.
    failure: Why no engine can run.
    restart: For the next driver.
    """

    urls: tuple[str, ...] = ()
    is_connected: bool = False
    is_placed: bool = False
    was_ready: bool = False
    is_replacing: bool = False
    failure: str | None = None
    restart: Restart | None = None


Message = Search | Settings | Order


class Channel:
    """The child process's ends of its pipes. What Ray prints goes to the log instead of the standard output."""

    def __init__(self) -> None:
        self._write = os.dup(1)
        os.dup2(2, 1)
        self._read = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 - open until the process ends
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._told = Report()
        self.is_closed = False

    def first(self, kind: type[FirstT]) -> FirstT:
        """Read the first message."""
        message = msgspec.json.decode(self._read.readline(), type=kind)
        threading.Thread(target=self._listen, name="octavo-orders", daemon=True).start()
        return message

    def next(self, timeout_s: float) -> Order | None:
        """Wait for a message. Return None after the timeout, or after `is_closed` has become True."""
        try:
            order = self._orders.get(timeout=timeout_s)
        except queue.Empty:
            return None
        self.is_closed = order is None
        return order

    def report(self, report: Report) -> None:
        """Send a report if it differs from the previous one."""
        if report != self._told:
            os.write(self._write, msgspec.json.encode(report) + b"\n")
            self._told = report

    def _listen(self) -> None:
        for line in self._read:
            self._orders.put(msgspec.json.decode(line, type=Order))
        self._orders.put(None)
