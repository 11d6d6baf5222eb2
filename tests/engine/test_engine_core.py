"""The order in which the engine core schedules, submits and collects steps, and how it gives steps up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from core.conftest import Core

from octavo.config import CacheConfig
from octavo.data.capacity import EngineCapacity
from octavo.data.metrics import EngineMetrics
from octavo.data.recent_events import RecentEvents
from octavo.engine.engine_core import EngineCore
from octavo.errors import ExecutionError


class Executor:
    """Computes a step when its result is collected, and records every call. fails: raised by `collect`, once."""

    def __init__(self, core):
        self.core = core
        self.calls = []
        self.steps = []
        self.fails = None

    def submit(self, scheduled):
        self.calls.append(("submit", scheduled.step))
        self.steps.append(scheduled)

    def collect(self):
        error, self.fails = self.fails, None
        if error is not None:
            raise error
        scheduled = self.steps.pop(0)
        self.calls.append(("collect", scheduled.step))
        return self.core.compute(scheduled)

    def abandon(self):
        self.calls.append(("abandon", len(self.steps)))
        self.steps.clear()


def make_engine(*, ahead):
    core = Core(async_scheduling=ahead)
    executor = Executor(core)
    capacity = EngineCapacity.of(core.scheduler.config, CacheConfig(block_size=4), num_blocks=1000)
    return EngineCore(core.scheduler, executor, EngineMetrics(), RecentEvents(10), capacity), core, executor


def run(engine):
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return [(each.request_id, tuple(each.new_token_ids), each.finish_reason) for each in outputs]


def test_steps_run_one_after_another_without_async_scheduling():
    engine, core, executor = make_engine(ahead=False)
    core.add("a", 3, max_tokens=2)
    assert run(engine) == [("a", (7,), None), ("a", (7,), "length")]
    assert executor.calls == [(what, step) for step in (1, 2, 3) for what in ("submit", "collect")]


def test_next_step_is_submitted_before_previous_result_is_collected():
    engine, core, executor = make_engine(ahead=True)
    core.add("a", 3, max_tokens=3)
    assert run(engine) == [("a", (7,), None), ("a", (7,), None), ("a", (7,), "length")]
    assert executor.calls == [
        ("submit", 1),
        ("submit", 2),
        ("collect", 1),
        ("submit", 3),
        ("collect", 2),
        ("collect", 3),  # no request continues after it
        ("submit", 4),  # reports the request that ended
        ("collect", 4),
    ]


@pytest.mark.parametrize("ahead", [False, True])
def test_failed_step_ends_its_requests_and_engine_continues(ahead):
    engine, core, executor = make_engine(ahead=ahead)
    core.add("a", 3)
    executor.fails = ExecutionError("broken")
    [output] = engine.step()
    assert (output.request_id, output.finish_reason, output.error) == ("a", "error", "broken")
    assert executor.calls[-1] == ("abandon", 1 + ahead)
    core.add("b", 3, max_tokens=2)
    assert run(engine) == [("b", (7,), None), ("b", (7,), "length")]


@pytest.mark.parametrize("ahead", [False, True])
def test_engine_becomes_idle_if_every_step_fails(ahead):
    """Otherwise a caller that steps while there is work, such as a server, would never stop."""
    engine, core, executor = make_engine(ahead=ahead)
    core.add("a", 3)
    collect, executor.collect = executor.collect, lambda: (_ for _ in ()).throw(ExecutionError("broken"))
    num_steps = 0
    while engine.has_work():
        engine.step()
        num_steps += 1
        assert num_steps < 5
    executor.collect = collect
    core.add("b", 3, max_tokens=1)
    assert run(engine) == [("b", (7,), "length")]
    assert executor.steps == []
    assert core.scheduler.num_kept_records == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_requests_ended_by_interrupt_are_reported_with_next_step(ahead):
    engine, core, executor = make_engine(ahead=ahead)
    core.add("a", 3)
    executor.fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert executor.calls[-1] == ("abandon", 1 + ahead)
    assert engine.has_work()
    core.add("b", 3, max_tokens=1)
    assert run(engine) == [("a", (), "error"), ("b", (7,), "length")]


def test_interrupt_while_scheduling_ahead_abandons_step_in_flight(monkeypatch):
    engine, core, executor = make_engine(ahead=True)
    request = core.add("a", 3)
    schedule, bound = core.scheduler.schedule, core.scheduler._state.draft_policy.bound

    def interrupted(*args):
        if core.scheduler.in_flight is not None:
            raise KeyboardInterrupt
        return bound(*args)

    monkeypatch.setattr(core.scheduler._state.draft_policy, "bound", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert request.sequence.output_token_ids == []
    assert executor.calls == [("submit", 1), ("abandon", 1)]
    assert run(engine) == [("a", (), "error")]
    assert schedule().is_empty


class Saving:
    """A scheduler with open requests for some steps; its last transfer ends with its third step."""

    def __init__(self, num_open_steps=0):
        self.num_steps, self.num_open_steps = 0, num_open_steps
        self.in_flight = None

    def get_num_transfers(self):
        return max(3 - self.num_steps, 0)

    def get_num_unfinished_requests(self):
        return int(self.num_steps < self.num_open_steps)

    def may_look_ahead(self):
        return False

    def schedule(self):
        self.num_steps += 1
        return SimpleNamespace(is_empty=True)


def saving_engine(scheduler):
    engine, _, executor = make_engine(ahead=False)
    return EngineCore(scheduler, executor, EngineMetrics(), RecentEvents(10), engine.capacity)


@pytest.mark.parametrize(("num_open_steps", "num_steps"), [(0, 3), (1, 0)])
def test_finish_transfers_steps_only_without_open_requests(num_open_steps, num_steps):
    scheduler = Saving(num_open_steps)
    saving_engine(scheduler).finish_transfers()
    assert scheduler.num_steps == num_steps


def test_finish_transfers_stops_when_callback_returns_false():
    scheduler, answers = Saving(), iter([True, False])
    saving_engine(scheduler).finish_transfers(lambda: next(answers))
    assert scheduler.num_steps == 1


def test_finish_transfers_stops_after_failed_step():
    scheduler = Saving()
    engine = saving_engine(scheduler)

    def fail():
        scheduler.num_steps += 1
        engine.metrics.stats.num_failed_steps += 1
        return SimpleNamespace(is_empty=True)

    scheduler.schedule = fail
    engine.finish_transfers()
    assert scheduler.num_steps == 1


def test_undelivered_outputs_survive_finish_transfers():
    engine, core, _ = make_engine(ahead=False)
    core.add("a", 3, max_tokens=1)
    engine._undelivered = engine.step()
    engine.finish_transfers()
    assert [each.request_id for each in engine.step()] == ["a"]
