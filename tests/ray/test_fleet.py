"""Starts, restarts, replacements and drains of engines, with a fake cluster and a clock of its own."""

from __future__ import annotations

import signal

import pytest

from octavo.ray.fleet import ClusterError, Fleet, FleetLimits


class Engine:
    """A fake engine. signals: Those that it got."""

    def __init__(self, name, words):
        self.name, self.words = name, words
        self.url = None
        self.is_ready = self.is_fatal = self.is_removed = self.is_unlisted = False
        self.end = None
        self.signals, self.num_beats = [], 0

    def look(self):
        pass

    def signal(self, number):
        self.signals.append(number)

    def beat(self):
        self.num_beats += 1

    def drain(self):
        self.is_unlisted = True

    def remove(self):
        self.is_removed = True

    def place(self):
        self.url = f"http://{self.name}"

    def get_ready(self):
        self.place()
        self.is_ready = True


class Cluster:
    """A fake cluster.

    engines: All that were ever started. requested: Sizes for the autoscaler. is_down: True if calls fail.
    """

    def __init__(self):
        self.bundle = {"CPU": 2, "GPU": 1}
        self.engines, self.requested = [], []
        self.is_down = False

    def _check(self):
        if self.is_down:
            raise ClusterError("the head node does not respond")

    def start(self, words):
        self._check()
        self.engines.append(Engine(f"e{len(self.engines)}", words))
        return self.engines[-1]

    def request(self, num_engines):
        self._check()
        self.requested.append(num_engines)

    def room(self):
        return "1 CPU is free"

    def running(self):
        return [engine for engine in self.engines if not engine.is_removed]


class Drill:
    """A fleet and its clock."""

    def __init__(self, size=2, timeout_s=60.0, min_size=None):
        self.now = 1000.0
        self.cluster = Cluster()
        limits = FleetLimits(timeout_s=timeout_s, start_s=500.0, drain_s=100.0, min_size=min_size or size)
        self.fleet = Fleet(self.cluster, ("old",), size, limits, self.now)
        self.loads = {}
        self.step()

    def step(self, seconds=0.0):
        self.now += seconds
        self.fleet.step(self.now, lambda url: self.loads.get(url, 0.0))

    def get_ready(self):
        for engine in self.cluster.running():
            engine.get_ready()
        self.step()

    def names(self):
        return [engine.name for engine in self.cluster.running()]


@pytest.fixture
def ready():
    drill = Drill()
    drill.get_ready()
    return drill


def test_engines_are_placed_then_ready():
    drill = Drill()
    fleet, (first, second) = drill.fleet, drill.cluster.engines
    assert (fleet.urls, fleet.is_placed, fleet.was_ready, fleet.settled_at) == ((), False, False, None)
    assert first.words == ("old",)
    assert drill.cluster.requested == [2]
    first.place()
    drill.step()
    assert (fleet.urls, fleet.is_placed) == (("http://e0",), False)
    second.place()
    drill.step()
    assert (fleet.urls, fleet.is_placed, fleet.was_ready) == (("http://e0", "http://e1"), True, False)
    first.get_ready()
    drill.step(1)
    assert (fleet.was_ready, fleet.settled_at) == (True, None)
    second.get_ready()
    drill.step(1)
    drill.step(1)
    assert fleet.settled_at == 1002.0


def test_engine_that_ends_is_restarted_after_growing_pauses(ready, caplog):
    starts = []
    for _ in range(8):
        ready.cluster.running()[-1].end = "it exited with status -9"
        ready.step()
        assert len(ready.names()) == 1
        begun = ready.now
        while len(ready.names()) < 2:
            ready.step(0.5)
        starts.append(ready.now - begun)
    assert starts == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert ready.fleet.failure is None
    assert "e1 (http://e1) has ended: it exited with status -9" in caplog.text
    ready.get_ready()
    ready.cluster.running()[-1].end = "again"
    ready.step()
    ready.step(1.0)
    assert len(ready.names()) == 2


def test_ended_engine_is_removed_from_urls_and_cluster(ready):
    ready.cluster.engines[0].end = "killed"
    ready.step()
    assert ready.fleet.urls == ("http://e1",)
    assert ready.names() == ["e1"]
    assert ready.fleet.settled_at is None


def test_three_failed_starts_without_ready_engine_are_a_failure():
    drill = Drill(1)
    for number in range(3):
        assert drill.fleet.failure is None
        drill.cluster.engines[-1].end = f"status {number}"
        drill.step()
        drill.step(4.0)
    assert drill.fleet.failure == "e2 could not be started: status 2"
    assert drill.cluster.running() == []


def test_fleet_is_not_placed_while_an_engine_waits_for_its_restart(caplog):
    caplog.set_level("INFO")
    drill = Drill(2)
    first, second = drill.cluster.engines
    first.end = "status 1"
    second.place()
    drill.step()
    assert not drill.fleet.is_placed
    assert "another replica starts in 1 s" in caplog.text
    drill.step(1.0)
    drill.cluster.engines[2].place()
    drill.step()
    assert drill.fleet.is_placed


def test_fatal_end_is_a_failure_at_once_if_no_engine_is_ready(ready):
    drill = Drill()
    drill.cluster.engines[0].end, drill.cluster.engines[0].is_fatal = "other version", True
    drill.step()
    assert drill.fleet.failure == "e0 could not be started: other version"
    ready.cluster.engines[0].end, ready.cluster.engines[0].is_fatal = "other version", True
    ready.step()
    assert ready.fleet.failure is None
    ready.step(1.0)
    assert len(ready.names()) == 2


def test_missing_room_at_the_start_is_a_failure():
    drill = Drill(2, timeout_s=10.0)
    drill.cluster.engines[0].get_ready()
    drill.step(9.9)
    assert drill.fleet.failure is None
    drill.step(0.1)
    why = "no node has room for e1: it needs 2 CPUs and 1 GPUs; 1 CPU is free (after 10 s)"
    assert drill.fleet.failure == why


def test_missing_room_after_a_restart_of_the_driver_is_no_failure(caplog):
    drill = Drill(2, timeout_s=10.0)
    drill.fleet.is_placed = True
    drill.cluster.engines[0].get_ready()
    drill.step(10.0)
    assert drill.fleet.failure is None
    assert "no node has room for e1" in caplog.text


def test_missing_room_later_is_logged_once_per_timeout(ready, caplog):
    ready.cluster.engines[0].end = "node lost"
    ready.step()
    for _ in range(130):
        ready.step(1.0)
    assert caplog.text.count("no node has room for e2") == 2
    assert ready.fleet.failure is None
    assert ready.fleet.urls == ("http://e1",)


@pytest.mark.parametrize(("min_size", "expected"), [(1, ["e0", "e1"]), (3, ["e0", "e1", "e3"])])
def test_added_engines_without_room_are_given_up_after_the_timeout(min_size, expected, caplog):
    drill = Drill(2, min_size=min_size)
    drill.get_ready()
    drill.fleet.resize(4)
    drill.step()
    drill.step(59.0)
    assert drill.names() == ["e0", "e1", "e2", "e3"]
    for _ in range(3):
        drill.step(1.0)
    assert drill.names() == expected
    assert drill.fleet.size == len(expected)
    assert "no node has room for e2" in caplog.text
    assert drill.fleet.failure is None
    assert (drill.fleet.settled_at is not None) == (min_size == 1)


def test_engine_that_does_not_get_ready_in_time_is_killed_and_counts_as_failed(ready, caplog):
    ready.cluster.engines[1].end = "node lost"
    ready.step()
    ready.step(1.0)
    slow = ready.cluster.engines[2]
    slow.place()
    ready.step(50.0)
    assert ready.fleet.urls == ("http://e0", "http://e2")
    assert ready.fleet.ready_urls == ("http://e0",)
    ready.step(499.9)
    assert slow.signals == []
    ready.step(0.1)
    ready.step(1.0)
    assert slow.signals == [signal.SIGKILL]
    assert "e2 (http://e2) is not ready after 500 s: killing it" in caplog.text
    slow.end = "it exited with status -9"
    ready.step()
    ready.step(2.0)
    assert ready.names() == ["e0", "e3"]
    ready.get_ready()
    ready.step(1000.0)
    assert [engine.signals for engine in ready.cluster.running()] == [[], []]


def test_drained_engine_is_unlisted_first_and_stopped_later(ready, caplog):
    caplog.set_level("INFO")
    ready.loads = {"http://e0": 3.0, "http://e1": 2.0}
    ready.fleet.resize(1)
    ready.step()
    assert ready.cluster.requested == [2, 1]
    assert ready.fleet.urls == ("http://e0",)
    second = ready.cluster.engines[1]
    assert second.is_unlisted
    assert "the number of replicas changes from 2 to 1" in caplog.text
    assert "e1 (http://e1) is drained" in caplog.text
    ready.step(1.9)
    assert second.signals == []
    ready.step(0.1)
    ready.step(5.0)
    assert second.signals == [signal.SIGTERM]
    second.end = "it exited with status 0"
    ready.step()
    assert ready.names() == ["e0"]
    assert "e1 (http://e1) has stopped" in caplog.text
    ready.step(100.0)
    assert ready.names() == ["e0"]
    assert ready.fleet.settled_at is not None


def test_growth_starts_engines_and_shrinking_removes_placeless_ones_first(ready):
    ready.fleet.resize(4)
    ready.step()
    assert ready.names() == ["e0", "e1", "e2", "e3"]
    ready.cluster.engines[2].place()
    ready.fleet.resize(3)
    ready.step()
    assert ready.names() == ["e0", "e1", "e2"]
    assert ready.fleet.urls == ("http://e0", "http://e1", "http://e2")
    ready.fleet.resize(2)
    ready.step()
    assert ready.fleet.urls == ("http://e0", "http://e1")
    assert ready.cluster.engines[2].is_unlisted


def test_replacement_is_ready_before_an_old_engine_is_drained(ready):
    ready.fleet.replace(("new",))
    ready.step()
    assert [engine.words for engine in ready.cluster.running()] == [("old",), ("old",), ("new",)]
    ready.step(5.0)
    assert len(ready.names()) == 3
    assert len(ready.fleet.urls) == 2
    num_listed = []
    while any(engine.words == ("old",) for engine in ready.cluster.running()):
        ready.get_ready()
        num_listed.append(len(ready.fleet.urls))
        for engine in ready.cluster.running():
            if signal.SIGTERM in engine.signals:
                engine.end = "it exited with status 0"
        ready.step(1.0)
    assert min(num_listed) == 2
    ready.get_ready()
    assert [engine.words for engine in ready.cluster.running()] == [("new",), ("new",)]
    assert max(len([e for e in ready.cluster.engines if e.words == ("new",)]), 0) == 2
    ready.step(10.0)
    assert len(ready.names()) == 2


def test_failing_replacement_keeps_old_engines(ready, caplog):
    ready.fleet.replace(("bad",))
    for _ in range(3):
        ready.step(5.0)
        ready.cluster.running()[-1].end = "status 1"
        ready.step()
    ready.step(5.0)
    assert "the new replicas could not be started; the previous options stay" in caplog.text
    ready.step(100.0)
    assert [(engine.name, engine.words) for engine in ready.cluster.running()] == [("e0", ("old",)), ("e1", ("old",))]
    ready.cluster.engines[0].end = "killed"
    ready.step()
    ready.step(100.0)
    assert ready.cluster.running()[-1].words == ("old",)


def test_replacement_without_room_keeps_old_engines(ready, caplog):
    ready.fleet.replace(("new",))
    ready.step()
    ready.step(60.0)
    assert "no node has room for e2" in caplog.text
    assert ready.names() == ["e0", "e1"]
    ready.step(60.0)
    assert ready.names() == ["e0", "e1"]


def test_replacement_waits_for_the_place_of_a_drained_engine(ready, caplog):
    ready.fleet.replace(("new",))
    ready.step()
    ready.get_ready()
    drained = next(engine for engine in ready.cluster.engines if engine.is_unlisted)
    for _ in range(100):  # a long request
        ready.step(1.0)
    assert [engine.words for engine in ready.cluster.running()] == [("old",), ("old",), ("new",), ("new",)]
    assert "no node has room" not in caplog.text
    drained.end = "it exited with status 0"
    ready.step()
    ready.step(59.0)
    ready.get_ready()
    ready.step(3.0)
    for engine in ready.cluster.running():
        if signal.SIGTERM in engine.signals:
            engine.end = "it exited with status 0"
    ready.step()
    assert [engine.words for engine in ready.cluster.running()] == [("new",), ("new",)]


def test_replacement_without_room_ends_after_the_place_of_a_drained_engine_is_free(ready, caplog):
    ready.fleet.replace(("new",))
    ready.step()
    ready.get_ready()
    ready.step()
    ready.step(50.0)
    next(engine for engine in ready.cluster.engines if engine.is_unlisted).end = "it exited with status 0"
    ready.step(59.0)
    assert "no node has room" not in caplog.text
    ready.step(60.0)
    assert "no node has room for e3" in caplog.text
    assert "the previous options stay" in caplog.text


def test_new_options_stay_only_after_a_complete_replacement(ready):
    fleet = ready.fleet
    assert (fleet.words, fleet.is_replacing) == (("old",), False)
    fleet.replace(("new",))
    for num_old in (2, 1):
        ready.step()
        assert len([engine for engine in ready.cluster.running() if engine.words == ("old",)]) == num_old
        assert (fleet.words, fleet.is_replacing) == (("old",), True)
        ready.get_ready()
        for engine in ready.cluster.running():
            if engine.is_unlisted:
                engine.end = "it exited with status 0"
    assert (fleet.words, fleet.is_replacing) == (("new",), False)
    fleet.replace(("bad",))
    ready.step()
    ready.step(60.0)
    assert (fleet.words, fleet.is_replacing) == (("new",), False)


def test_new_options_do_not_stay_if_the_last_old_engine_ends_first(ready):
    ready.fleet.replace(("bad",))
    ready.step()
    for engine in ready.cluster.engines[:2]:
        engine.end = "node lost"
    ready.step()
    assert ready.fleet.is_replacing
    ready.cluster.engines[2].end, ready.cluster.engines[2].is_fatal = "status 1", True
    ready.step()
    assert ready.fleet.failure == "e2 could not be started: status 1"
    assert (ready.fleet.words, ready.fleet.is_replacing) == (("old",), True)


def test_second_replacement_that_fails_restores_the_options_before_the_first(ready):
    ready.fleet.replace(("new",))
    ready.step()
    ready.get_ready()
    assert ready.fleet.is_replacing
    ready.fleet.replace(("bad",))
    next(engine for engine in ready.cluster.engines if engine.is_unlisted).end = "it exited with status 0"
    ready.step()
    ready.step(60.0)
    for _ in range(4):
        ready.get_ready()
        for engine in ready.cluster.running():
            if engine.is_unlisted:
                engine.end = "it exited with status 0"
        ready.step()
    assert [engine.words for engine in ready.cluster.running()] == [("old",), ("old",)]
    assert (ready.fleet.words, ready.fleet.is_replacing) == (("old",), False)


def test_return_to_the_previous_options_waits_for_room(ready, caplog):
    ready.fleet.replace(("new",))
    ready.step()
    ready.get_ready()
    ready.cluster.engines[0].end = "it exited with status 0"
    ready.step()
    ready.step(60.0)  # another engine takes the free place
    ready.step()
    assert [(each.name, each.words) for each in ready.cluster.running()] == [
        ("e1", ("old",)),
        ("e2", ("new",)),
        ("e4", ("old",)),
    ]
    for _ in range(121):
        ready.step(1.0)
    assert ready.names() == ["e1", "e2", "e4"]
    assert caplog.text.count("the previous options stay") == 3
    ready.get_ready()
    assert ready.cluster.engines[2].is_unlisted
    ready.cluster.engines[2].end = "it exited with status 0"
    ready.step()
    assert ready.names() == ["e1", "e4"]
    assert not ready.fleet.is_replacing


def test_restart_of_all_engines_without_room_ends(ready):
    ready.fleet.replace(("old",))
    ready.step()
    ready.step(60.0)
    ready.step()
    assert ready.names() == ["e0", "e1"]
    assert not ready.fleet.is_replacing
    ready.step(60.0)
    assert ready.names() == ["e0", "e1"]


def test_drained_engine_that_does_not_end_is_killed(ready, caplog):
    ready.fleet.resize(1)
    ready.step()
    drained = next(engine for engine in ready.cluster.engines if engine.is_unlisted)
    ready.step(2.0)
    ready.step(129.9)
    assert drained.signals == [signal.SIGTERM]
    ready.step(0.1)
    ready.step(10.0)
    assert drained.signals == [signal.SIGTERM, signal.SIGKILL]
    assert "has not stopped 132 s after it was drained: killing it" in caplog.text


def test_half_done_replacement_that_fails_is_undone(ready):
    ready.fleet.replace(("new",))
    ready.step()
    ready.get_ready()  # e2 is ready, one old engine is drained
    ready.step()
    drained = next(engine for engine in ready.cluster.engines if engine.is_unlisted)
    ready.step(3.0)
    drained.end = "it exited with status 0"
    for _ in range(3):
        ready.step(5.0)
        ready.cluster.running()[-1].end = "status 1"
        ready.step()
    for _ in range(20):
        ready.step(5.0)
        ready.get_ready()
        for engine in ready.cluster.running():
            if signal.SIGTERM in engine.signals:
                engine.end = "it exited with status 0"
    assert [engine.words for engine in ready.cluster.running()] == [("old",), ("old",)]


def test_engines_that_end_together_end_a_replacement_once(caplog):
    drill = Drill(3)
    drill.get_ready()
    drill.fleet.replace(("bad",))
    drill.step()
    drill.cluster.engines[1].end = drill.cluster.engines[2].end = "node lost"
    drill.step()
    drill.step(5.0)
    assert drill.names() == ["e0", "e3", "e4"]
    for engine in drill.cluster.engines[3:]:
        engine.end, engine.is_fatal = "other version", True
    drill.step()
    assert drill.names() == ["e0"]
    assert caplog.text.count("the previous options stay") == 1
    drill.step(60.0)
    assert [engine.words for engine in drill.cluster.running()] == [("old",)] * 3


def test_signals_reach_engines(ready, caplog):
    first, second = ready.cluster.engines
    ready.fleet.kill("http://e1")
    ready.fleet.kill("http://unknown")
    ready.fleet.reload()
    assert (first.signals, second.signals) == ([signal.SIGHUP], [signal.SIGKILL, signal.SIGHUP])
    assert "e1 (http://e1) does not respond any more: killing it" in caplog.text


def test_beats_reach_all_engines(ready):
    ready.fleet.resize(1)
    ready.step()
    ready.fleet.beat()
    ready.fleet.beat()
    assert [engine.num_beats for engine in ready.cluster.engines] == [2, 2]


def test_starts_are_repeated_after_growing_pauses_while_the_cluster_does_not_respond(ready, caplog):
    ready.cluster.is_down = True
    ready.cluster.engines[1].end = "node lost"
    for _ in range(16):
        ready.step(1.0)
    assert caplog.text.count("a replica could not be started: the head node does not respond") == 4
    assert ready.fleet.failure is None
    ready.cluster.is_down = False
    for _ in range(16):
        ready.step(1.0)
    assert ready.names() == ["e0", "e2"]


def test_request_for_nodes_is_repeated_every_ten_seconds(ready, caplog):
    ready.cluster.is_down = True
    ready.fleet.resize(3)
    for _ in range(10):
        ready.step(1.0)
    assert caplog.text.count("the autoscaler was not asked for 3 replicas: the head node does not respond") == 1
    ready.cluster.is_down = False
    ready.step(1.0)
    ready.step(10.0)
    assert ready.cluster.requested == [2, 3]
    ready.cluster.is_down = True
    ready.fleet.stop()
    assert ready.cluster.engines[0].signals == [signal.SIGTERM]


def test_stop_frees_all_places(ready):
    first, second = ready.cluster.engines
    ready.fleet.stop()
    assert first.is_unlisted
    assert ready.cluster.requested == [2, 0]
    assert (first.signals, second.signals) == ([signal.SIGTERM], [signal.SIGTERM])
    assert not ready.fleet.remove_ended()
    first.look = lambda: setattr(first, "end", "it exited with status 0")
    assert not ready.fleet.remove_ended()
    assert ready.names() == ["e1"]
    ready.fleet.remove_all()
    assert ready.names() == []
    assert ready.fleet.remove_ended()
