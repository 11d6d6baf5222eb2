"""The driver: orders, reports and sizes, with a fake fleet and channel; and the cluster's own arithmetic."""

from __future__ import annotations

import signal
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
from ray_nodes import needs_ray

from octavo.errors import ConfigError
from octavo.ray.messages import Kept, Order, Report

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
        self.kept_words, self.resized_at = ("m",), 0.0

    def __getattr__(self, name):
        def note(*values):
            self.calls.append(
                (name, *(value for value in values if not callable(value) and not isinstance(value, float)))
            )
            return True

        return note


class Cluster:
    """A fake cluster. requested: Sizes for the autoscaler."""

    num_threads, uses_gpu = 2, False

    def __init__(self):
        self.requested = []

    def request(self, num_engines):
        self.requested.append(num_engines)


KEPT = Kept(("m",), 1, 2, uses_gpu=False)


def settings(**changes):
    from test_process import SETTINGS

    return msgspec.structs.replace(SETTINGS, **changes)


def test_driver_carries_out_orders_reports_and_stops():
    from octavo.ray.driver import Driver

    channel = Channel(Order(reload=True), Order(silent="http://a"), Order(words=("n",)))
    fleet, cluster = Fleet(), Cluster()
    Driver(settings(), fleet, cluster, channel).run()
    names = [call for call in fleet.calls if call[0] != "step"]
    assert cluster.requested == [0]
    assert names == [
        ("reload",),
        ("kill", "http://a"),
        ("replace", ("n",)),
        ("stop",),
        ("remove_ended",),
        ("remove_all",),
    ]
    assert channel.reports == [Report(("http://a",), is_placed=True, was_ready=True, kept=KEPT)] * 4


def test_driver_ends_after_failure():
    from octavo.ray.driver import Driver

    channel, fleet = Channel(None, None), Fleet()
    fleet.step = lambda *_: setattr(fleet, "failure", "no room")
    Driver(settings(), fleet, Cluster(), channel).run()
    assert [report.failure for report in channel.reports] == ["no room"]


@pytest.mark.parametrize(("most", "expected"), [(1, []), (4, [("resize", 2)])])
def test_driver_resizes_only_between_different_bounds(most, expected, monkeypatch):
    from octavo.ray import driver

    monkeypatch.setattr(driver, "choose_size", lambda loads, size, since, limits: limits.max_replicas // 2)
    channel, fleet = Channel(None), Fleet()
    made = driver.Driver(settings(max_replicas=most), fleet, Cluster(), channel)
    made._reader = SimpleNamespace(read=lambda urls, now: None, num_open=None)
    made.run()
    assert [call for call in fleet.calls if call[0] == "resize"] == expected


@pytest.mark.parametrize(("wanted", "expected"), [(2, [("resize", 2)]), (4, [])])
def test_driver_shrinks_but_does_not_grow_while_an_engine_has_no_room(wanted, expected, monkeypatch):
    from octavo.ray import driver

    monkeypatch.setattr(driver, "choose_size", lambda loads, size, since, limits: wanted)
    channel, fleet = Channel(None), Fleet()
    fleet.size, fleet.settled_at = 3, None
    made = driver.Driver(settings(max_replicas=4), fleet, Cluster(), channel)
    made._reader = SimpleNamespace(read=lambda urls, now: None, num_open=None)
    made.run()
    assert [call for call in fleet.calls if call[0] == "resize"] == expected


def test_driver_continues_if_the_cluster_does_not_answer(monkeypatch, caplog):
    from octavo.ray import driver

    def fail(*_):
        raise RuntimeError("no head")

    monkeypatch.setattr(driver, "_RETRY_S", 0.0)
    channel, fleet, cluster = Channel(None, Order(reload=True)), Fleet(), Cluster()
    fleet.step = cluster.request = fail
    driver.Driver(settings(), fleet, cluster, channel).run()
    assert ("reload",) in fleet.calls
    assert ("stop",) in fleet.calls
    assert "the Ray cluster does not answer" in caplog.text
    fleet.is_placed = False
    with pytest.raises(RuntimeError, match="no head"):
        driver.Driver(settings(), fleet, cluster, Channel(None)).run()


@pytest.mark.parametrize("blocks", [False, True])
def test_beats_continue_while_the_cluster_does_not_answer(monkeypatch, blocks):
    from octavo.ray import driver

    monkeypatch.setattr(driver, "_BEAT_S", 0.01)
    fleet, beats = Fleet(), threading.Event()
    fleet.beat = beats.set
    fleet.step = (lambda *_: beats.wait(60.0)) if blocks else (lambda *_: time.sleep(0.1))
    driver.Driver(settings(), fleet, Cluster(), Channel(None)).run()
    assert beats.is_set()


@pytest.mark.parametrize(
    ("cpus", "num_engines", "expected"),
    [([8], 1, 8), ([8], 3, 2), ([8, 8], 3, 4), ([8, 4], 3, 4), ([2], 5, 1), ([0, 6], 2, 3), ([], 1, 1), ([0], 2, 1)],
)
def test_engines_get_the_most_threads_with_room_for_all(cpus, num_engines, expected):
    from octavo.ray.cluster import threads_each

    assert threads_each(cpus, num_engines) == expected


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
