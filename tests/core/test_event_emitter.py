from __future__ import annotations

from octavo.core.event_emitter import EventEmitter
from octavo.data import events


def test_events_carry_step_and_time_of_emitter():
    log = events.EventLog()
    emitter = EventEmitter(log)
    emitter.emit(events.StepFailed, "before the first step")
    emitter.step, emitter.now = 3, 4.5
    emitter.emit(events.RequestParked, "a", "b")
    assert log.events == [events.StepFailed(0, 0.0, "before the first step"), events.RequestParked(3, 4.5, "a", "b")]
