"""The driver: orders, reports and sizes, with a fake fleet and channel; and the cluster's own arithmetic."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace

import msgspec
import pytest
from ray_nodes import needs_ray

from octavo.errors import ConfigError
from octavo.ray.messages import Order, Report, Restart

pytestmark = needs_ray


class Channel:
    """A fake channel. orders: Given one by one; then the input ends."""

    def __init__(self, *orders):
        self.orders, self.reports, self.is_closed = list(orders), [], False

    def next(self, timeout_s):
        self.is_closed = not self.orders
        return self.orders.pop(0) if self.orders else None

    def report(self, report):
        self.reports.append(report)


class Fleet:
    """A fake fleet that notes calls."""

    def __init__(self, failure=None):
        self.calls, self.failure = [], failure
        self.urls, self.is_placed, self.was_ready, self.settled_at, self.size = ("http://a",), True, True, 0.0, 1
        self.words, self.is_replacing, self.ready_urls = ("n",), True, self.urls

    def __getattr__(self, name):
        def note(*values):
            self.calls.append(
                (name, *(value for value in values if not callable(value) and not isinstance(value, float)))
            )
            return True

        return note


def settings(**changes):
    from test_process import SETTINGS

    return msgspec.structs.replace(SETTINGS, **changes)


def test_driver_carries_out_orders_reports_and_stops():
    from octavo.ray.driver import Driver

    channel = Channel(Order(reload=True), Order(silent="http://a"), Order(words=("n",)))
    fleet = Fleet()
    Driver(settings(num_replicas=2, num_threads=3, uses_gpu=True), fleet, channel).run()
    names = [call for call in fleet.calls if call[0] != "step"]
    assert names == [
        ("reload",),
        ("kill", "http://a"),
        ("replace", ("n",)),
        ("stop",),
        ("remove_ended",),
        ("remove_all",),
    ]
    restart = Restart(words=("n",), num_replicas=1, num_threads=3, uses_gpu=True)
    report = Report(
        ("http://a",), is_connected=True, is_placed=True, was_ready=True, is_replacing=True, restart=restart
    )
    assert channel.reports == [report] * 4


def test_driver_ends_after_failure():
    from octavo.ray.driver import Driver

    channel, fleet = Channel(None, None), Fleet()
    fleet.step = lambda *_: setattr(fleet, "failure", "no room")
    Driver(settings(), fleet, channel).run()
    assert [report.failure for report in channel.reports] == ["no room"]


def test_engines_get_beats_while_the_fleet_is_blocked_and_while_it_stops(monkeypatch):
    from octavo.ray import driver

    monkeypatch.setattr(driver, "_BEAT_S", 0.01)
    channel, fleet, beats = Channel(), Fleet(), threading.Semaphore(0)
    are_told = []

    def block(*_):
        are_told.append([beats.acquire(timeout=20) for _ in range(3)])
        return True

    fleet.beat = beats.release
    fleet.step = fleet.remove_ended = block
    driver.Driver(settings(), fleet, channel).run()
    assert are_told == [[True] * 3] * 2


def test_error_of_the_driver_stops_the_fleet():
    from octavo.ray.driver import Driver

    fleet = Fleet()
    fleet.step = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        Driver(settings(), fleet, Channel()).run()
    assert fleet.calls == [("stop",)]


@pytest.fixture
def scaled(monkeypatch):
    """Return a function that makes a driver whose sizes are scripted, and the numbers of loads that chose them."""
    from octavo.ray import driver

    num_loads = []

    def choose(loads, size, since, limits):
        num_loads.append(len(loads))
        return limits.max_replicas // 2

    monkeypatch.setattr(driver, "choose_size", choose)

    def make(fleet, most=4):
        made = driver.Driver(settings(max_replicas=most), fleet, Channel(None))
        made._reader = SimpleNamespace(read=lambda urls, now: urls, num_open=None)
        return made, num_loads

    return make


@pytest.mark.parametrize(("most", "expected"), [(1, []), (4, [("resize", 2)])])
def test_driver_resizes_only_between_different_bounds(most, expected, scaled):
    fleet = Fleet()
    scaled(fleet, most)[0].run()
    assert [call for call in fleet.calls if call[0] == "resize"] == expected


def test_driver_resizes_while_engines_are_missing_but_not_without_a_ready_engine(scaled):
    fleet = Fleet()
    fleet.settled_at = None
    made, _ = scaled(fleet)
    made.run()
    assert ("resize", 2) in fleet.calls
    fleet.calls.clear()
    fleet.ready_urls = ()
    made._scale(1e9)
    assert fleet.calls == []


def test_driver_forgets_loads_of_another_size(scaled):
    fleet = Fleet()
    made, num_loads = scaled(fleet)
    for second in range(4):
        fleet.size = 1 + second // 2
        made._scale(1000.0 + second)
    assert num_loads == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("cpus", "num_engines", "expected"),
    [([8], 1, 8), ([8], 3, 2), ([8, 8], 3, 4), ([8, 4], 3, 4), ([2], 5, 1), ([0, 6], 2, 3), ([], 1, 1), ([0], 2, 1)],
)
def test_engines_get_the_most_threads_with_room_for_all(cpus, num_engines, expected):
    from octavo.ray.cluster import threads_each

    assert threads_each(cpus, num_engines) == expected


def test_driver_restarts_with_the_same_places_although_nodes_are_missing(monkeypatch):
    from octavo.ray import cluster

    nodes = [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0}}, {"Alive": True, "Resources": {"CPU": 0.0}}]
    monkeypatch.setattr(cluster.ray, "nodes", lambda: nodes)
    first = cluster.RayCluster(settings(max_replicas=2))
    assert first.bundle == {"CPU": 4, "GPU": 1}
    del nodes[0]
    assert cluster.RayCluster(first.settings).bundle == first.bundle
    assert cluster.RayCluster(settings()).bundle == {"CPU": 1}
    assert not cluster.RayCluster(settings()).settings.uses_gpu


@pytest.mark.parametrize("address", ["10.0.0.1", "ray://10.0.0.1:10001", "head:port"])
def test_address_of_a_cluster_has_host_and_port(address):
    from octavo.ray.cluster import connect

    with pytest.raises(ConfigError, match=f"ray-address must be auto or the address of a head node.*{address}"):
        connect(address)


def test_host_refuses_other_versions_and_ends_without_raylet(monkeypatch):
    from octavo.ray import engine_host

    monkeypatch.setattr(engine_host.threading, "Thread", lambda **_: SimpleNamespace(start=list))  # it ends the process
    wanted = engine_host.versions()
    host = engine_host.EngineHost()
    for name in wanted:
        url, problem = host.start([], {}, {**wanted, name: "0"})
        assert url == ""
        assert f"has {name} {wanted[name]}, and this command has 0" in problem
    assert (host.ready(), host.ended(), host.url()) == (False, "it has not started", None)
    host.signal(signal.SIGTERM)  # does nothing
    ends = []
    monkeypatch.setattr(engine_host.os, "_exit", ends.append)
    host._raylet = 0
    host._watch()
    assert ends == [1]
