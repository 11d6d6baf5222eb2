"""The process of a router that uses Ray: `python -m octavo.ray.driver`.

It reads `Settings` and then an `Order` from each line of its input, and writes reports. It stops all engines when its
input ends. Only this process and the actors read Ray's pickles.
"""

from __future__ import annotations

import collections
import logging
import os
import queue
import sys
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from octavo.errors import OctavoError
from octavo.ray.settings import Order, Report, Settings
from octavo.runtime import logs

if TYPE_CHECKING:
    from octavo.ray.fleet import Fleet

logger = logging.getLogger(__name__)
_LOOK_S = 0.2
_LOAD_S = 1.0
_MARGIN_S = 5.0


class Driver:
    """Carries out orders, and reports changes."""

    def __init__(self, settings: Settings, fleet: Fleet, orders: queue.SimpleQueue[Order | None], write: int) -> None:
        from octavo.ray.figures import LoadReader
        from octavo.ray.scaling import DOWN_AFTER_S, Load, ScalingLimits

        self._settings, self._fleet, self._orders, self._write = settings, fleet, orders, write
        self._limits = ScalingLimits(settings.min_replicas, settings.max_replicas, settings.target_queue_time_s)
        self._reader = LoadReader(settings.operator_key)
        self._loads: collections.deque[Load] = collections.deque(maxlen=int(2 * DOWN_AFTER_S / _LOAD_S))
        self._loads_at = 0.0
        self._told = Report()

    def run(self) -> None:
        """Run until the input ends or no engine can run."""
        while self._obey():
            self._fleet.step(time.monotonic(), self._reader.num_open)
            self._scale(time.monotonic())
            report = Report(self._fleet.urls, self._fleet.is_placed, self._fleet.was_ready, self._fleet.failure)
            if report != self._told:
                send(self._write, report)
                self._told = report
            if report.failure is not None:
                break
        self._stop()

    def _obey(self) -> bool:
        """Wait a moment for orders, and carry them out. Return False to stop."""
        try:
            order = self._orders.get(timeout=_LOOK_S)
        except queue.Empty:
            return True
        if order is None:
            return False
        if order.reload:
            self._fleet.reload()
        if order.silent is not None:
            self._fleet.kill(order.silent)
        if order.words is not None:
            self._fleet.replace(order.words)
        return True

    def _scale(self, now: float) -> None:
        from octavo.ray.scaling import choose_size

        is_fixed = self._limits.min_replicas == self._limits.max_replicas
        if is_fixed or not self._fleet.urls or now - self._loads_at < _LOAD_S:
            return
        self._loads_at = now
        if (load := self._reader.read(self._fleet.urls, now)) is not None:
            self._loads.append(load)
        if (since := self._fleet.settled_at) is not None:
            self._fleet.resize(choose_size(self._loads, self._fleet.size, since, self._limits))

    def _stop(self) -> None:
        self._fleet.stop()
        end = time.monotonic() + self._settings.stop_s + _MARGIN_S
        while not self._fleet.remove_ended() and time.monotonic() < end:
            time.sleep(_LOOK_S / 2)
        self._fleet.remove_all()


def send(write: int, report: Report) -> None:
    """Write a report."""
    os.write(write, msgspec.json.encode(report) + b"\n")


def read_orders(orders: queue.SimpleQueue[Order | None]) -> None:
    """Pass on orders from the standard input."""
    for line in sys.stdin.buffer:
        orders.put(msgspec.json.decode(line, type=Order))
    orders.put(None)


def own_output() -> int:
    """Return a copy of the standard output, and redirect the standard output to the log. Ray writes to it."""
    write = os.dup(1)
    os.dup2(2, 1)
    return write


def main() -> None:
    """Run the process."""
    write = own_output()
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)
    logs.configure(settings.log_level.upper(), settings.log_format)
    orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
    threading.Thread(target=read_orders, args=[orders], name="octavo-orders", daemon=True).start()
    from octavo.ray.cluster import RayCluster, connect, disconnect
    from octavo.ray.fleet import Fleet

    try:
        connect(settings.address)
    except OctavoError as error:
        send(write, Report(failure=str(error)))
        return
    cluster = RayCluster(settings)
    fleet = Fleet(cluster, settings.words, settings.num_replicas, settings.timeout_s, time.monotonic())
    try:
        Driver(settings, fleet, orders, write).run()
    finally:
        cluster.request(0)
        disconnect()


if __name__ == "__main__":
    main()
