"""The health that a watcher derives from beats, second by second, without a process and without waiting."""

from __future__ import annotations

from octavo.config import CacheConfig, SchedulerConfig
from octavo.data.capacity import EngineCapacity
from octavo.data.metrics import EngineStats
from octavo.engine.health import Health, Patience
from octavo.engine.ipc import Alive, Loading, Ready, Report

LOOK_S = 0.25
READY = Ready(EngineCapacity.of(SchedulerConfig().resolved(), CacheConfig(), num_blocks=100))
PATIENCE = Patience(frozen=3.0, dead=8.0, loading=120.0, stuck=60.0, endless=300.0)


class Watcher:
    """Looks four times a second, and gets a beat with every second look."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.health = Health(PATIENCE, self.now)
        self.progress = 0

    def watch(self, seconds: float, *, beats: bool = True, advances: bool = False) -> Watcher:
        for index in range(round(seconds / LOOK_S)):
            self.now += LOOK_S
            self.health.look(self.now)
            if beats and index % 2 == 0:
                self.progress += advances
                self.health.note_report(Alive(self.progress))
        return self

    def note_report(self, *messages: object) -> Watcher:
        for message in messages:
            self.health.note_report(message)
        return self

    @property
    def state(self) -> tuple[bool, str | None]:
        return self.health.is_well, self.health.why_given_up


def ready() -> Watcher:
    return Watcher().note_report(READY)


def test_progressing_engine_stays_healthy() -> None:
    assert ready().watch(10_000, advances=True).state == (True, None)


def test_silent_engine_is_unhealthy_and_then_given_up() -> None:
    assert ready().watch(2.75, beats=False).state == (True, None)
    assert ready().watch(3, beats=False).state == (False, None)
    assert ready().watch(8, beats=False).state == (False, None)
    assert ready().watch(8.25, beats=False).state == (False, "sent no message for 8 s")
    assert ready().watch(8, beats=False).watch(0.5, advances=True).state == (True, None)


def test_beating_engine_without_progress_is_unhealthy_and_then_given_up() -> None:
    assert ready().watch(59).state == (True, None)
    assert ready().watch(61).state == (False, None)
    assert ready().watch(299).state == (False, None)
    assert ready().watch(301).state == (False, "made no progress for 300 s")
    assert ready().watch(200).watch(0.5, advances=True).state == (True, None)


def test_repeated_stats_reports_do_not_count_as_progress() -> None:
    watcher = ready()
    for _ in range(70):
        watcher.watch(1).note_report(Report(EngineStats()))
    assert watcher.state == (False, None)


def test_load_may_be_silent_longer_but_must_progress() -> None:
    assert Watcher().watch(120, beats=False).health.why_given_up is None
    assert Watcher().watch(121, beats=False).health.why_given_up == "sent no message for 120 s"
    assert Watcher().watch(299).health.why_given_up is None
    assert Watcher().watch(301).health.why_given_up == "made no progress for 300 s"
    watcher = Watcher()
    for done in range(10):
        watcher.watch(290).note_report(Loading(done, 10))
    assert watcher.note_report(READY).state == (True, None)


def test_pause_of_watcher_does_not_count_as_silence() -> None:
    watcher = ready().watch(5, advances=True)
    watcher.now += 1000
    assert watcher.watch(0.25, beats=False).state == (True, None)  # before it reads the message in the queue
    assert watcher.watch(2.5, beats=False).state == (True, None)
    assert watcher.watch(0.5, beats=False).state == (False, None)


def test_pause_of_watcher_does_not_reset_time_without_progress() -> None:
    watcher = ready().watch(55)
    watcher.now += 1000
    assert watcher.watch(4).state == (True, None)
    assert watcher.watch(6).state == (False, None)
