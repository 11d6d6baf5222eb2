"""The process of a router that runs engines in a Ray cluster: `python -m octavo.ray.driver`.

It stops all engines when its input ends. Only this process, `octavo.ray.finder` and the actors read Ray's pickles.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.ray.figures import LoadReader
from octavo.ray.fleet import Fleet, FleetLimits
from octavo.ray.messages import Channel, Order, Report, Restart, Settings
from octavo.ray.scaling import DOWN_AFTER_S, Load, ScalingLimits, choose_size
from octavo.runtime import logs

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOOK_S = 0.2
_LOAD_S = 1.0
_MARGIN_S = 5.0
_BEAT_S = 2.0


@contextlib.contextmanager
def beating(fleet: Fleet) -> Iterator[None]:
    """Prove to the engines that this process runs, also while a call of Ray blocks the fleet."""
    has_ended = threading.Event()

    def beat() -> None:
        while not has_ended.wait(_BEAT_S):
            fleet.beat()

    thread = threading.Thread(target=beat, name="octavo-beats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join(_BEAT_S)  # a call of Ray may block it


class Driver:
    """Carries out orders, chooses the number of engines, and reports changes."""

    def __init__(self, settings: Settings, fleet: Fleet, channel: Channel) -> None:
        self._settings, self._fleet, self._channel = settings, fleet, channel
        self._limits = ScalingLimits(settings.min_replicas, settings.max_replicas, settings.target_queue_time_s)
        self._reader = LoadReader(settings.operator_key)
        self._loads: collections.deque[Load] = collections.deque(maxlen=int(2 * DOWN_AFTER_S / _LOAD_S))
        self._loads_at, self._size = 0.0, fleet.size

    def run(self) -> None:
        """Run until the input ends, or no engine can run."""
        fleet = self._fleet
        with beating(fleet):
            try:
                self._run()
            finally:
                fleet.stop()
            end = time.monotonic() + self._settings.stop_s + _MARGIN_S
            while not fleet.remove_ended() and time.monotonic() < end:
                time.sleep(_LOOK_S / 2)
            fleet.remove_all()

    def _run(self) -> None:
        fleet = self._fleet
        while not self._channel.is_closed and fleet.failure is None:
            if (order := self._channel.next(_LOOK_S)) is not None:
                self._obey(order)
            fleet.step(time.monotonic(), self._reader.num_open)
            self._scale(time.monotonic())
            self._channel.report(self._report())

    def _report(self) -> Report:
        fleet = self._fleet
        return Report(
            urls=fleet.urls,
            is_connected=True,
            is_placed=fleet.is_placed,
            was_ready=fleet.was_ready,
            is_replacing=fleet.is_replacing,
            failure=fleet.failure,
            restart=Restart(
                words=fleet.words,
                num_replicas=fleet.size,
                num_threads=self._settings.num_threads,
                uses_gpu=self._settings.uses_gpu,
            ),
        )

    def _obey(self, order: Order) -> None:
        if order.reload:
            self._fleet.reload()
        if order.silent is not None:
            self._fleet.kill(order.silent)
        if order.words is not None:
            self._fleet.replace(order.words)

    def _scale(self, now: float) -> None:
        fleet = self._fleet
        is_fixed = self._limits.min_replicas == self._limits.max_replicas
        urls = fleet.ready_urls
        if is_fixed or not urls or now - self._loads_at < _LOAD_S:
            return
        self._loads_at = now
        if fleet.size != self._size:
            self._size = fleet.size
            self._loads.clear()
        if (load := self._reader.read(urls, now)) is not None:
            self._loads.append(load)
        fleet.resize(choose_size(self._loads, fleet.size, fleet.settled_at, self._limits))


def main() -> None:
    """Run the process."""
    channel = Channel()
    from octavo.ray.cluster import RayCluster, connect, disconnect  # noqa: PLC0415 - Ray may print

    settings = channel.first(Settings)
    logs.configure(settings.log_level.upper(), settings.log_format)
    try:
        connect(settings.address)
    except ConfigError as error:
        channel.report(Report(failure=str(error)))
        return
    channel.report(Report(is_connected=True))
    cluster = RayCluster(settings)
    limits = FleetLimits(
        timeout_s=settings.timeout_s,
        start_s=settings.start_s,
        drain_s=settings.drain_s,
        min_size=settings.min_replicas,
    )
    fleet = Fleet(cluster, settings.words, settings.num_replicas, limits, time.monotonic())
    fleet.is_placed = settings.is_again
    try:
        Driver(cluster.settings, fleet, channel).run()
    finally:
        disconnect()


if __name__ == "__main__":
    main()
