"""How the local executor computes steps, and waits for KV from a store; its worker is a stub."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from core.conftest import Core
from stores import Store

from octavo.config import CacheConfig
from octavo.data.capacity import EngineCapacity
from octavo.data.kv_tiers import EndedTransfer
from octavo.data.metrics import EngineMetrics
from octavo.data.model_output import ModelOutput
from octavo.data.recent_events import RecentEvents
from octavo.data.request import RequestStatus
from octavo.data.scheduler_output import CachedRequestData, SchedulerOutput
from octavo.engine.engine_core import EngineCore
from octavo.errors import ExecutionError
from octavo.worker import local_executor
from octavo.worker.local_executor import LocalExecutor
from octavo.worker.step_modes import ComputesInBackground, LaunchesAhead


class Loading:
    """An engine core with a request "loading" that waits for KV; a step without tokens waits for `wait_s`."""

    def __init__(self, monkeypatch, wait_s):
        self.core = Core(connector=Store(prefix="loading"), clock=time.monotonic, kv_transfer_timeout_s=1000.0)
        self.request = self.core.add("loading", 12, max_tokens=2)
        self.worker = SimpleNamespace(execute=self.core.compute)
        self.executor = LocalExecutor(self.worker)
        scheduler, cache_config = self.core.scheduler, CacheConfig(block_size=4)
        capacity = EngineCapacity.of(scheduler.config, cache_config, num_blocks=1000)
        self.engine = EngineCore(scheduler, self.executor, EngineMetrics(), RecentEvents(10), capacity)
        self.engine.step()  # orders the load
        assert self.request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        if wait_s is not None:
            monkeypatch.setattr(local_executor, "TRANSFER_WAIT_S", wait_s)


def test_steps_waiting_for_kv_load_do_not_spin(monkeypatch):
    loading, count = Loading(monkeypatch, None), 0
    start = time.monotonic()
    while time.monotonic() < start + 0.2:
        loading.engine.step()
        count += 1
    assert count <= 0.2 / local_executor.TRANSFER_WAIT_S + 1


def test_finished_kv_load_wakes_waiting_step(monkeypatch):
    loading = Loading(monkeypatch, 600.0)
    computed = threading.Event()

    def execute(scheduled):
        computed.set()
        return loading.core.compute(scheduled)

    def move():
        computed.wait()
        loading.executor.ended_transfers.put(EndedTransfer(0, 2))

    loading.worker.execute = execute
    mover = threading.Thread(target=move)
    mover.start()
    loading.engine.step()
    mover.join()
    assert (loading.request.status, loading.request.num_computed_tokens) == (RequestStatus.RUNNING, 8)
    loading.engine.step()
    assert loading.request.sequence.output_token_ids == [7]


def test_failed_kv_load_is_reported_in_next_step_and_recomputed(monkeypatch):
    loading = Loading(monkeypatch, 600.0)
    for ended in (EndedTransfer(0, 0), EndedTransfer(99, 2)):
        loading.executor.ended_transfers.put(ended)
    loading.engine.step()
    assert loading.executor.ended_transfers.empty()
    assert loading.request.status is RequestStatus.WAITING
    loading.engine.step()
    assert loading.request.sequence.output_token_ids == [7]


def test_computing_step_does_not_wait_for_kv_load(monkeypatch):
    loading = Loading(monkeypatch, 600.0)
    running = loading.core.add("running", 4, max_tokens=5)
    for _ in range(5):
        loading.engine.step()
    assert running.status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert loading.request.status is RequestStatus.WAITING_FOR_REMOTE_KVS


def test_transfer_finished_during_failed_step_is_reported_next(monkeypatch):
    loading = Loading(monkeypatch, 600.0)
    execute = loading.worker.execute
    monkeypatch.setattr(loading.worker, "execute", lambda _scheduled: 1 // 0)
    loading.executor.ended_transfers.put(EndedTransfer(0, 2))
    loading.engine.step()
    assert loading.request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    monkeypatch.setattr(loading.worker, "execute", execute)
    loading.engine.step()
    assert loading.request.status is RequestStatus.RUNNING


# --- steps ------------------------------------------------------------------------------------------------------------


def step(number):
    return SchedulerOutput(number, [], CachedRequestData.make_empty(), {"a": 1}, 1)


class Gate:
    """A worker that computes a step when it is allowed. computed: the begun steps, in order. fails: the step that
    raises.
    """

    def __init__(self, fails=None):
        self.gate, self.begun, self.computed, self.fails = threading.Event(), threading.Event(), [], fails

    def close(self):
        pass

    def execute(self, scheduled):
        self.computed.append(scheduled.step)
        self.begun.set()
        assert self.gate.wait(10)
        if scheduled.step == self.fails:
            raise ValueError("broken")
        return ModelOutput(scheduled.step, {})


class Device:
    """A worker that launches and collects steps. done: its calls, in order. fails: the call that raises.

    needs: steps that need the tokens of earlier steps to be launched.
    """

    def __init__(self, fails=None, needs=()):
        self.done, self.fails, self.needs = [], fails, needs

    def needs_sampled_tokens(self, scheduled):
        return scheduled.step in self.needs

    def launch(self, scheduled):
        self.do(f"launch {scheduled.step}")
        return scheduled

    def collect(self, launched):
        self.do(f"collect {launched.step}")
        return ModelOutput(launched.step, {})

    def wait_idle(self):
        self.do("idle")

    def do(self, what):
        self.done.append(what)
        if what == self.fails:
            raise ValueError("broken")


@pytest.fixture
def in_background():
    """Return a function that makes an executor with a thread of its own; executors are shut down after the test."""
    executors = []

    def make(worker):
        executors.append(LocalExecutor(worker, mode=ComputesInBackground))
        return executors[-1]

    yield make
    for executor in executors:
        executor.shutdown()


def test_background_mode_computes_submitted_steps_in_order(in_background):
    worker = Gate()
    executor = in_background(worker)
    for number in (1, 2):
        executor.submit(step(number))
    assert worker.begun.wait(10)
    assert worker.computed == [1]
    worker.gate.set()
    assert [executor.collect().step, executor.collect().step] == [1, 2]


@pytest.mark.parametrize("background", [False, True])
def test_steps_after_failed_step_are_not_computed_until_abandon(background, in_background):
    worker = Gate(fails=1)
    worker.gate.set()
    executor = in_background(worker) if background else LocalExecutor(worker)
    for number in (1, 2):
        executor.submit(step(number))
    with pytest.raises(ExecutionError, match="ValueError"):
        executor.collect()
    executor.abandon()
    executor.submit(step(3))
    assert executor.collect().step == 3
    assert worker.computed == [1, 3]


def test_abandon_waits_for_running_step_and_drops_submitted_steps(in_background):
    worker = Gate()
    executor = in_background(worker)
    for number in (1, 2):
        executor.submit(step(number))
    assert worker.begun.wait(10)
    opener = threading.Timer(0.05, worker.gate.set)
    opener.start()
    executor.abandon()
    assert worker.gate.is_set()
    executor.submit(step(3))
    assert executor.collect().step == 3
    assert worker.computed == [1, 3]


def test_system_exit_in_step_does_not_affect_next_step(in_background):
    worker = Gate()
    worker.gate.set()
    executor = in_background(worker)

    def leave(_scheduled):
        raise SystemExit

    execute, worker.execute = worker.execute, leave
    executor.submit(step(1))
    with pytest.raises(SystemExit):
        executor.collect()
    executor.abandon()
    worker.execute = execute
    executor.submit(step(2))
    assert executor.collect().step == 2


def test_step_is_launched_ahead_unless_it_needs_sampled_tokens():
    worker = Device(needs=(3,))
    executor = LocalExecutor(worker, mode=LaunchesAhead)
    executor.submit(step(1))
    for number in (1, 2, 3):
        executor.submit(step(number + 1))
        assert executor.collect().step == number
    assert executor.collect().step == 4
    assert worker.done == [
        *("launch 1", "launch 2", "collect 1", "collect 2", "launch 3", "launch 4", "collect 3", "collect 4")
    ]


def test_failed_launch_does_not_affect_previous_step():
    worker = Device("launch 2")
    executor = LocalExecutor(worker, mode=LaunchesAhead)
    for number in (1, 2, 3):
        executor.submit(step(number))
    assert executor.collect().step == 1
    with pytest.raises(ExecutionError, match="ValueError"):
        executor.collect()
    with pytest.raises(ExecutionError, match="the previous step failed"):
        executor.collect()
    executor.abandon()
    executor.submit(step(4))
    assert executor.collect().step == 4


@pytest.mark.parametrize("needs", [(), (2,)])
@pytest.mark.parametrize("fails", ["launch 1", "collect 1"])
def test_steps_after_device_failure_are_not_collected_until_abandon(fails, needs):
    """The step fails at its launch, or later: the device raises when a thread waits for it."""
    worker = Device(fails, needs)
    executor = LocalExecutor(worker, mode=LaunchesAhead)
    for number in (1, 2):
        executor.submit(step(number))
    with pytest.raises(ExecutionError, match="ValueError"):
        executor.collect()
    with pytest.raises(ExecutionError, match="the previous step failed"):
        executor.collect()
    executor.abandon()
    executor.submit(step(3))
    assert executor.collect().step == 3
    assert worker.done[-3:] == ["idle", "launch 3", "collect 3"]
    assert "collect 2" not in worker.done


def test_abandon_waits_for_idle_device_and_ignores_its_error():
    worker = Device("idle")
    executor = LocalExecutor(worker, mode=LaunchesAhead)
    for number in (1, 2):
        executor.submit(step(number))
    executor.abandon()
    executor.submit(step(3))
    assert executor.collect().step == 3
    assert worker.done == ["launch 1", "launch 2", "idle", "launch 3", "collect 3"]


def test_collect_without_submit_raises_error():
    with pytest.raises(AssertionError, match="without submit"):
        LocalExecutor(Gate()).collect()
