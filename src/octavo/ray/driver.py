"""The process of a router that runs engines in a Ray cluster: `python -m octavo.ray.driver`.

It stops all engines when its input ends. Ray's pickles are read by this process, by `octavo.ray.finder`, by the actors,
and by replicas of Ray Serve that run `octavo.ray.serve.OctavoServer`.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time

from octavo.errors import ConfigError
from octavo.ray.cluster import RayCluster, connect, disconnect
from octavo.ray.figures import LoadReader
from octavo.ray.fleet import Fleet
from octavo.ray.messages import Channel, Kept, Order, Report, Settings
from octavo.ray.scaling import DOWN_AFTER_S, Load, ScalingLimits, choose_size
from octavo.runtime import logs

logger = logging.getLogger(__name__)
_LOOK_S = 0.2
_BEAT_S = 2.0
_RETRY_S = 2.0
_LOAD_S = 1.0
_MARGIN_S = 5.0


class Driver:
    """Carries out orders, chooses the number of engines, and reports changes."""

    def __init__(self, settings: Settings, fleet: Fleet, cluster: RayCluster, channel: Channel) -> None:
        self._settings, self._fleet, self._cluster, self._channel = settings, fleet, cluster, channel
        self._limits = ScalingLimits(settings.min_replicas, settings.max_replicas, settings.target_queue_time_s)
        self._reader = LoadReader(settings.operator_key)
        self._loads: collections.deque[Load] = collections.deque(maxlen=int(2 * DOWN_AFTER_S / _LOAD_S))
        self._loads_at = 0.0
        self._has_ended = threading.Event()

    def run(self) -> None:
        """Run until the input ends, or no engine can run."""
        fleet, cluster = self._fleet, self._cluster
        threading.Thread(target=self._beat, name="octavo-beats", daemon=True).start()
        while not self._channel.is_closed and fleet.failure is None:
            if (order := self._channel.next(_LOOK_S)) is not None:
                self._obey(order)
            self._step()
            kept = Kept(fleet.kept_words, fleet.size, cluster.num_threads, cluster.uses_gpu)
            self._channel.report(Report(fleet.urls, fleet.is_placed, fleet.was_ready, fleet.failure, kept))
        with contextlib.suppress(Exception):  # a cluster that does not answer has no request to take back
            cluster.request(0)
        fleet.stop()
        end = time.monotonic() + self._settings.stop_s + _MARGIN_S
        while not fleet.remove_ended() and time.monotonic() < end:
            time.sleep(_LOOK_S / 2)
        fleet.remove_all()
        self._has_ended.set()

    def _beat(self) -> None:
        # In a thread of its own: a call to a cluster whose head is down may block longer than engines wait for a beat.
        while not self._has_ended.wait(_BEAT_S):
            self._fleet.beat()

    def _step(self) -> None:
        try:
            self._fleet.step(time.monotonic(), self._reader.num_open)
            self._scale(time.monotonic())
        except Exception:  # Ray's errors have no common class
            if not self._fleet.is_placed:
                raise
            logger.exception(
                "the Ray cluster does not answer; the engines continue, the next attempt is in %g s", _RETRY_S
            )
            time.sleep(_RETRY_S)

    def _obey(self, order: Order) -> None:
        if order.reload:
            self._fleet.reload()
        if order.silent is not None:
            self._fleet.kill(order.silent)
        if order.words is not None:
            self._fleet.replace(order.words)

    def _scale(self, now: float) -> None:
        is_fixed = self._limits.min_replicas == self._limits.max_replicas
        urls = self._fleet.urls
        if is_fixed or not urls or now - self._loads_at < _LOAD_S:
            return
        self._loads_at = now
        if (load := self._reader.read(urls, now)) is not None:
            self._loads.append(load)
        size, since = self._fleet.size, self._fleet.settled_at
        wanted = choose_size(self._loads, size, self._fleet.resized_at if since is None else since, self._limits)
        if since is not None or wanted < size:  # an engine that finds no room may be given up again
            self._fleet.resize(wanted, now)


def main() -> None:
    """Run the process."""
    channel = Channel()
    settings = channel.first(Settings)
    logs.configure(settings.log_level.upper(), settings.log_format)
    try:
        connect(settings.address)
    except ConfigError as error:
        channel.report(Report(failure=str(error)))
        return
    cluster = RayCluster(settings)
    fleet = Fleet(
        cluster, settings.words, settings.num_replicas, settings.timeout_s, time.monotonic(), settings.drain_s
    )
    fleet.is_placed = settings.is_again
    try:
        Driver(settings, fleet, cluster, channel).run()
    finally:
        disconnect()


if __name__ == "__main__":
    main()
