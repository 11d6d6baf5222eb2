"""An engine in a child process gives the same answers, and any death of the process is noticed and repaired."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import queue
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import psutil
import pytest
import zmq
from fakes import answer_text, make_engine
from remote import QUICK, SCRIPT, make_remote, start_engine
from streams import collect, run

from octavo.config import CacheConfig, EngineConfig
from octavo.engine import core_life, ipc, remote_core
from octavo.engine.async_llm import AsyncEngine
from octavo.engine.health import Health, Patience
from octavo.errors import (
    ConfigError,
    EngineDeadError,
    EngineRestartingError,
    ModelError,
    QueueFullError,
    RequestError,
)
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.startup.launch import launch_engine

ENDLESS = {"max_tokens": None, "ignore_eos": True}


@contextlib.contextmanager
def running(patience=QUICK, once_ready=None, **options):
    """once_ready: the patience after the first process is ready; on a busy machine the start may take long."""
    core = make_remote(patience, **options)
    llm = AsyncEngine(start_engine(core))
    try:
        if once_ready is not None:
            core._life.health._patience = once_ready
        yield llm
    finally:
        llm.shutdown()


@pytest.fixture(scope="module")
def shared():
    """An engine for tests that do not change it; its server has a secret."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_API_KEY", "very-secret")
        with running() as llm:
            yield llm


@pytest.fixture(scope="module")
def first_one():
    with running(step_s=0.002) as llm:
        yield llm


@pytest.fixture
def lasting(first_one):
    """An engine for tests that do not change it, or that restart its process."""
    run(until(lambda: first_one.is_alive))
    return first_one


@pytest.fixture(scope="module")
def narrow():
    """An engine for tests that do not change it, with one running and three waiting requests at most."""
    with running(step_s=0.002, max_num_seqs=1, max_num_waiting=3) as llm:
        yield llm


def lose_patience(llm, **seconds):
    """Give the current process, which is in trouble, little time. A healthy one may be silent on a busy machine."""
    llm.engine.client._life.health._patience = replace(QUICK, **seconds)


def still_s(llm):
    """Return the seconds without progress of the process at the watcher's last look."""
    health = llm.engine.client._life.health
    return health._looked_at - health._moved_at


async def until(condition) -> None:
    """Poll a condition. The time limit of the test ends a wait in vain."""
    while not condition():  # noqa: ASYNC110 - another process has no event for it
        await asyncio.sleep(0.01)


async def begin(llm, count=3):
    """Start endless streams; return their tasks after each has received tokens."""
    tokens = dict.fromkeys(range(count), 0)

    async def read(index):
        async for _ in llm.generate("hello", SamplingParams(**ENDLESS), f"endless{index}"):
            tokens[index] += 1

    tasks = [asyncio.create_task(read(index)) for index in range(count)]
    await until(lambda: all(tokens.values()))
    return tasks


def test_remote_outputs_equal_local_outputs(shared):
    ways = [
        {"max_tokens": 40},
        {"n": 3, "max_tokens": 9},
        {"logprobs": 2, "prompt_logprobs": 1, "max_tokens": 5},
        {"stop": ["fox", "über"], "max_tokens": 400},
        {"stop": ["quick"], "n": 2, "include_stop_str_in_output": True, "max_tokens": 200},
        {"max_tokens": 3, "seed": 2**64 - 1, "temperature": 0.7, "top_k": 3, "logit_bias": {5: 1.5}},
        {"output_kind": RequestOutputKind.FINAL_ONLY, "max_tokens": 11},
    ]
    requests = [("x" * (index + 1), SamplingParams(**way)) for index, way in enumerate(ways * 3)]

    async def last(llm, index, prompt, params):
        outputs = [output async for output in llm.generate(prompt, params, f"r{index}")]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        return [(o.outputs, o.prompt_logprobs, o.prompt_token_ids, o.error) for o in outputs[-1:]]

    async def all_of(llm):
        return await asyncio.gather(*(last(llm, index, *request) for index, request in enumerate(requests)))

    local = AsyncEngine(make_engine())
    expected = run(all_of(local))
    local.shutdown()
    assert run(all_of(shared)) == expected
    assert run(all_of(shared)) == expected  # ids of ended requests are free again


@pytest.mark.turn(8)
def test_engine_thread_reads_socket_itself():
    before = set(threading.enumerate())
    with running() as llm:
        assert run(collect(llm, "hello", "a", max_tokens=3)) == answer_text(5, 0, 3)
        started = [thread.name for thread in threading.enumerate() if thread not in before]
        assert [name for name in started if not name.startswith("octavo-text")] == ["octavo-engine"]


@pytest.mark.turn(8)
def test_refusals_reach_only_their_caller(narrow):
    async def main(llm):
        good = asyncio.create_task(collect(llm, "hello", "good", **ENDLESS))
        with pytest.raises(RequestError, match="empty"):
            await collect(llm, "", "empty")
        with pytest.raises(RequestError, match="max_model_len"):
            await collect(llm, "x" * 5000, "long")
        with pytest.raises(RequestError, match="in use"):
            await collect(llm, "hello", "good")
        crowd = [asyncio.create_task(collect(llm, "hello", f"q{index}", max_tokens=50)) for index in range(9)]
        refused, _ = await asyncio.wait(crowd, return_when=asyncio.FIRST_EXCEPTION)
        with pytest.raises(QueueFullError):
            refused.pop().result()
        await llm.call(lambda engine: engine.abort_request("good"))
        text = (await good).rstrip("\N{REPLACEMENT CHARACTER}")  # of a character with missing bytes
        assert answer_text(5, 0, 2000).startswith(text)
        await asyncio.gather(*crowd, return_exceptions=True)  # waiting requests would fill the queue for the next test
        assert await collect(llm, "hello", "good", max_tokens=40) == answer_text(5, 0, 40)

    run(main(narrow))


def test_unsendable_request_is_refused_without_affecting_running_one(lasting):
    async def main(llm):
        whole = await collect(llm, "hello", "alone", max_tokens=200)
        good = asyncio.create_task(collect(llm, "hello", "good", max_tokens=200))
        await asyncio.sleep(0.02)
        for priority in (2**63, -(2**64), 0.5, None):
            with pytest.raises(RequestError, match="priority must be"):
                [_ async for _ in llm.generate("hello", SamplingParams(), "p", priority=priority)]
        for request_id in (5, uuid.uuid4()):
            with pytest.raises(RequestError, match="request_id must be a text"):
                await collect(llm, "hello", request_id)
        with pytest.raises(RequestError, match="tenant must be a text"):
            [_ async for _ in llm.generate("hello", SamplingParams(), "t", tenant=5)]
        with pytest.raises(RequestError, match="cannot be sent"):
            await collect(llm, "hello", "s", stop=["\ud800"])
        with pytest.raises(RequestError, match="cannot be sent"):
            await collect(llm, "hello", "\ud800")
        assert await collect(llm, "hello", "numpy", max_tokens=np.int64(200), temperature=np.float32(0)) == whole
        stream = llm.generate("hello", SamplingParams(max_tokens=1), "w", priority=np.int8(3), timeout_s=np.float32(9))
        assert [output.finished async for output in stream][-1]
        assert await good == whole

    run(main(lasting))


@pytest.mark.parametrize("accepted", [True, False])
def test_f22_cancelled_request_frees_max_num_seqs_for_next_one(narrow, accepted):
    """This includes a client that disconnects before the engine has answered."""

    async def main(llm):
        if accepted:
            (task,) = await begin(llm, 1)
        else:
            os.kill(llm.engine.client.pid, signal.SIGSTOP)
            task = asyncio.create_task(collect(llm, "hello", "a", **ENDLESS))
            await until(lambda: llm.engine.client._pending)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        os.kill(llm.engine.client.pid, signal.SIGCONT)
        assert await collect(llm, "hello", "b", max_tokens=20) == answer_text(5, 0, 20)

    run(main(narrow))


@pytest.mark.turn(12)
def test_f7_killed_engine_fails_open_requests_and_restarts_each_time(lasting):
    async def main(llm):
        for _ in range(3):
            tasks, pid = await begin(llm), llm.engine.client.pid
            os.kill(pid, signal.SIGKILL)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(result) for result in results] == [EngineRestartingError] * 3
            assert not llm.is_dead
            await until(lambda: llm.is_alive)
            assert llm.engine.client.pid != pid
            assert await collect(llm, "hello", "again", max_tokens=20) == answer_text(5, 0, 20)

    run(main(lasting))


@pytest.mark.turn(12)
def test_requests_are_refused_immediately_during_restart(tmp_path):
    flag = tmp_path / "crash"

    async def main(llm):
        flag.touch()  # the restart may succeed from now on
        os.kill(llm.engine.client.pid, signal.SIGKILL)
        await until(lambda: not llm.is_alive)
        with pytest.raises(EngineRestartingError):
            await collect(llm, "hello", "a")
        flag.unlink()
        await until(lambda: llm.is_alive)
        assert await collect(llm, "hello", "a", max_tokens=5) == answer_text(5, 0, 5)

    with running(Patience(restarts=(0.05,)), crash_if=str(flag)) as llm:
        run(main(llm))


@pytest.mark.turn(8)
def test_f24_frozen_engine_is_unready_and_then_killed(lasting):
    async def main(llm):
        tasks, pid = await begin(llm), llm.engine.client.pid
        os.kill(pid, signal.SIGSTOP)
        lose_patience(llm, frozen=0.3, dead=60.0)
        await until(lambda: not llm.is_alive)
        assert llm.engine.client.pid == pid, "it is not killed yet"
        assert not any(task.done() for task in tasks)
        lose_patience(llm, frozen=0.3, dead=1.0)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [EngineRestartingError] * 3
        await until(lambda: llm.is_alive)
        assert not psutil.pid_exists(pid)

    run(main(lasting))


@pytest.mark.turn(12)
def test_engine_in_long_step_is_ready_until_stuck_limit(tmp_path):
    goes_on = tmp_path / "goes on"

    async def main(llm):
        task = asyncio.create_task(collect(llm, "hello", "a", max_tokens=1))
        await until(lambda: still_s(llm) > 1.0 and llm.is_alive)  # longer than `frozen`: the pulse continues
        lose_patience(llm, stuck=1.0, dead=60.0)
        await until(lambda: not llm.is_alive)
        assert not task.done()
        goes_on.touch()
        assert await task == answer_text(5, 0, 1)
        await until(lambda: llm.is_alive)
        assert llm.engine.client.num_restarts == 0

    once_ready = Patience(frozen=0.5, dead=60.0)
    with running(once_ready=once_ready, goes_on=str(goes_on), is_lively=True) as llm:
        run(main(llm))


@pytest.mark.turn(8)
def test_f7_endless_step_and_frozen_load_trigger_restart(tmp_path):
    hang = tmp_path / "hang"

    async def main(llm):
        (task,) = await begin(llm, 1)
        hang.touch()
        goes_on.unlink()
        lose_patience(llm, stuck=0.5, endless=1.0, dead=60.0)
        with pytest.raises(EngineRestartingError, match="made no progress"):
            await task
        await until(lambda: llm.engine.client.pid is not None)
        frozen = llm.engine.client.pid
        os.kill(frozen, signal.SIGSTOP)  # during a restart
        hang.unlink()
        goes_on.touch()
        lose_patience(llm, loading=1.0)
        await until(lambda: llm.is_alive)
        assert llm.engine.client.pid != frozen

    goes_on = tmp_path / "goes on"
    goes_on.touch()
    with running(goes_on=str(goes_on), is_lively=True, step_s=0.002) as llm:
        run(main(llm))


@pytest.mark.turn(8)
@pytest.mark.sweep(8)
@pytest.mark.parametrize("fault", ["wedged", "hang_between_steps"])
def test_f24_beating_engine_without_progress_is_unready_and_then_killed(fault):
    """One fault is a queue from which nothing is scheduled, the other a main loop that hangs outside a step."""

    async def main(llm):
        pid = llm.engine.client.pid
        task = asyncio.create_task(collect(llm, "hello", "a", max_tokens=2))
        await until(lambda: still_s(llm) > 1.0 and not llm.is_alive)
        assert llm.engine.client.pid == pid
        assert not task.done()
        lose_patience(llm, stuck=0.5, endless=1.2, dead=60.0)
        with pytest.raises(EngineRestartingError, match=r"made no progress for 1\.2 s"):
            await task
        await until(lambda: llm.is_alive)
        assert llm.engine.client.pid != pid

    once_ready = Patience(frozen=60.0, dead=60.0, stuck=0.5)
    with running(Patience(restarts=(0.05,)), once_ready=once_ready, is_lively=True, **{fault: True}) as llm:
        run(main(llm))


@pytest.mark.turn(12)
def test_idle_engine_is_ready():
    """A look for work counts as progress, and no request arrives meanwhile."""

    async def main(llm):
        health = llm.engine.client._life.health
        for _ in range(3):
            moved_at = health._moved_at
            await until(lambda moved_at=moved_at: health._moved_at > moved_at)
        assert llm.is_alive

    with running(Patience(stuck=60.0), is_lively=True) as llm:
        run(main(llm))


@pytest.mark.turn(12)
def test_f24_beating_load_without_progress_is_given_up():
    engine = make_remote(Patience(endless=1.0), hang=True)
    with pytest.raises(EngineDeadError, match="made no progress for 1 s before it was ready"):
        start_engine(engine)
    engine.shutdown()


@pytest.mark.turn(12)
def test_failed_restarts_are_counted_and_set_retry_after_s(tmp_path):
    flag = tmp_path / "crash"

    async def main(llm):
        flag.touch()
        os.kill(llm.engine.client.pid, signal.SIGKILL)
        await until(lambda: llm.engine.client.num_failed_starts == 2)
        assert not llm.is_alive
        with pytest.raises(EngineRestartingError) as error:
            await collect(llm, "hello", "a")
        assert (
            500 < error.value.retry_after_s <= 1000 + llm.engine.client._load_s
        )  # the rest of the pause, and the load

    with running(Patience(restarts=(0.05, 0.05, 1000.0)), crash_if=str(flag)) as llm:
        assert llm.engine.client._load_s > 0
        assert llm.engine.client.num_failed_starts == 0
        run(main(llm))


@pytest.mark.turn(12)
def test_successful_start_resets_num_failed_starts(tmp_path):
    flag = tmp_path / "crash"

    async def main(llm):
        flag.touch()
        os.kill(llm.engine.client.pid, signal.SIGKILL)
        await until(lambda: llm.engine.client.num_failed_starts)
        flag.unlink()
        await until(lambda: llm.is_alive)
        assert llm.engine.client.num_failed_starts == 0
        num_restarts = llm.engine.client.num_restarts
        os.kill(llm.engine.client.pid, signal.SIGKILL)  # this process did accept requests
        await until(lambda: llm.engine.client.num_restarts > num_restarts)
        await until(lambda: llm.is_alive)
        assert llm.engine.client.num_failed_starts == 0

    with running(Patience(restarts=(0.05, 0.5, 0.05)), crash_if=str(flag)) as llm:
        run(main(llm))


@pytest.mark.turn(12)
def test_pending_request_is_answered_after_abort_kill_or_shutdown(lasting, monkeypatch):
    """The request is aborted, shut down, or lost with the engine, while the engine does not answer."""
    monkeypatch.setattr(remote_core, "_STOP_S", 0.5)  # the full time that a stopped process takes

    async def main(llm, end):
        os.kill(llm.engine.client.pid, signal.SIGSTOP)
        task = asyncio.create_task(collect(llm, "hello", "a", **ENDLESS))
        await until(lambda: llm.engine.client._pending)
        return await end(llm, task)

    async def abort(llm, task):
        await llm.call(lambda engine: engine.abort_request("a"))
        os.kill(llm.engine.client.pid, signal.SIGCONT)
        assert len(await task) < 100
        assert await collect(llm, "hello", "a", max_tokens=20) == answer_text(5, 0, 20)

    async def kill(llm, task):
        await llm.call(lambda engine: engine.abort_request("a"))
        os.kill(llm.engine.client.pid, signal.SIGKILL)
        with pytest.raises(EngineRestartingError):
            await task

    async def shut_down(llm, task):
        shutting = asyncio.create_task(asyncio.to_thread(llm.shutdown))
        with pytest.raises(EngineDeadError):
            await task
        await shutting

    run(main(lasting, abort))
    run(main(lasting, kill))
    with running(step_s=0.001) as llm:
        run(main(llm, shut_down))


@pytest.mark.turn(8)
def test_f28_excess_pending_requests_are_refused_and_no_abort_is_lost(monkeypatch):
    monkeypatch.setattr(remote_core, "_MAX_PENDING", 3000)

    async def main(llm):
        os.kill(llm.engine.client.pid, signal.SIGSTOP)  # as during a long step: it reads no messages
        tasks = [asyncio.create_task(collect(llm, "hello", f"r{index}", **ENDLESS)) for index in range(3100)]
        await until(lambda: sum(task.done() for task in tasks) == 100 and len(llm.engine.client._pending) == 3000)
        await llm.call(lambda engine: engine.abort_request([f"r{index}" for index in range(3100)]))
        os.kill(llm.engine.client.pid, signal.SIGCONT)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [result for result in results if not isinstance(result, str)]
        assert [type(result) for result in refused] == [QueueFullError] * 100
        assert await collect(llm, "hello", "b", max_tokens=3) == answer_text(5, 0, 3)

    with running(Patience(dead=60.0)) as llm:
        run(main(llm))


def test_too_long_ipc_path_fails_start_and_removes_folder(monkeypatch, tmp_path):
    """An ipc path has at most 107 characters."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    engine = make_remote()
    with pytest.raises(EngineDeadError, match="cannot be started"):
        start_engine(engine)
    engine.shutdown()
    assert not list(folder.iterdir())


def without_temporary_directory(monkeypatch, tmp_path, shared_memory):
    """For root all directories are writable: make Python find none, and move the shared memory."""

    def none_usable():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp']")

    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", none_usable)
    monkeypatch.setattr(ipc, "_SHARED_MEMORY", str(tmp_path / shared_memory))


def test_start_without_writable_directory_fails_with_one_line(monkeypatch, tmp_path, caplog):
    without_temporary_directory(monkeypatch, tmp_path, "missing")
    engine = make_remote()
    with pytest.raises(
        EngineDeadError, match=r"no directory for temporary files .* environment variable TMPDIR"
    ) as dead:
        start_engine(engine)
    engine.shutdown()
    assert "\n" not in str(dead.value)
    assert not any(record.exc_info for record in caplog.records)


def test_sockets_use_shared_memory_without_temporary_directory(monkeypatch, tmp_path):
    without_temporary_directory(monkeypatch, tmp_path, ".")
    folder = ipc.make_folder()
    assert folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700, "only this user can enter it"


def test_s4_module_in_current_directory_is_not_imported(monkeypatch, tmp_path):
    (tmp_path / "msgspec.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    engine = launch_engine(EngineConfig(cache=CacheConfig(num_gpu_blocks=16)))
    assert engine.client.is_ready
    engine.shutdown()


def test_failure_of_parent_during_load_ends_process(monkeypatch):
    start_process, started = subprocess.Popen, queue.SimpleQueue()
    processes = []

    def popen(*arguments, **options):
        process = start_process(*arguments, **options)
        started.put(process)
        return process

    def fail():
        processes.append(started.get(timeout=20))
        raise RuntimeError("nothing to serve it with")

    monkeypatch.setattr(core_life.subprocess, "Popen", popen)
    with pytest.raises(RuntimeError, match="nothing to serve it with"):
        launch_engine(EngineConfig(cache=CacheConfig(num_gpu_blocks=16)), meanwhile=fail)
    assert processes[0].poll() is not None


def test_f26_engine_ignores_signals_and_keeps_serving(lasting):
    async def main(llm):
        (task,), pid = await begin(llm, 1), llm.engine.client.pid
        for kind in (signal.SIGTERM, signal.SIGINT):
            os.kill(pid, kind)
        assert await collect(llm, "hello", "b", max_tokens=20) == answer_text(5, 0, 20)  # it continued both
        assert llm.engine.client.pid == pid
        assert not task.done()
        task.cancel()

    run(main(lasting))


@contextlib.contextmanager
def parent():
    """Another process with an engine, the process id of its engine, and its temporary directory.

    For each line with a number of seconds, it believes that it was stopped for this time, and prints the engine's
    state.
    """
    program = f"""
import sys, time; sys.path.insert(0, {str(SCRIPT.parent)!r}); sys.path.insert(0, {str(SCRIPT.parents[1])!r})
from remote import Patience, make_remote, start_engine; from octavo.engine.async_llm import AsyncEngine
engine = make_remote(Patience(frozen=1.5, dead=60.0), is_lively=True); llm = AsyncEngine(start_engine(engine))
clock, stopped_s = time.monotonic, 0.0
time.monotonic = lambda: clock() + stopped_s
print(engine.pid, engine._life.folder, flush=True)
for line in sys.stdin:
    stopped_s += float(line)
    life = engine._life
    print(engine.pid, engine.is_ready, engine.num_restarts, life and life.health._looked_at, flush=True)
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], text=True, **pipes) as process:
        pid, folder = process.stdout.readline().split()
        try:
            yield process, psutil.Process(int(pid)), Path(folder)
        finally:
            process.kill()


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    "is_frozen", [False, pytest.param(True, marks=pytest.mark.skipif(sys.platform != "linux", reason="Linux's"))]
)
def test_f25_engine_ends_with_its_parent(is_frozen):
    with parent() as (process, engine, folder):
        if is_frozen:
            engine.suspend()
        process.kill()
        engine.wait(20)
    assert not folder.exists()


@pytest.mark.turn(8)
def test_f24_frozen_parent_keeps_its_engine():
    """As when a container is paused: it got no beat for a long time, which is not the engine's fault."""

    def ask(stopped_s=0):
        print(stopped_s, file=process.stdin, flush=True)
        pid, is_ready, num_restarts, looked_at = process.stdout.readline().split()
        assert (pid, num_restarts) == (str(engine.pid), "0"), "it is not given up"
        return is_ready == "True", float(looked_at)

    def until_looked(times):
        for _ in range(times):
            before = ask()[1]
            while ask()[1] == before:
                time.sleep(0.01)

    with parent() as (process, engine, _):
        engine.suspend()
        until_looked(3)  # earlier messages have been read
        ask(stopped_s=1000)
        until_looked(3)
        engine.resume()
        while not ask()[0]:
            time.sleep(0.01)


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"fail": True}, ConfigError, "nothing of this fits"),
        ({"crash": True}, EngineDeadError, "status 3 before it was"),
    ],
)
def test_startup_error_of_process_is_raised(options, error, text):
    progress = []
    engine = make_remote(**options)
    with pytest.raises(error, match=text):
        start_engine(engine, lambda done, total: progress.append((done, total)))
    if error is ConfigError:
        assert progress == [(1, 2)]
    assert engine.pid is None
    engine.shutdown()


@pytest.mark.turn(8)
def test_pulse_ends_quietly_if_start_fails(tmp_path):
    """Nothing receives the error, so the process needs a second to close its context. Its pulse beats in this time."""
    launch = ipc.Launch(EngineConfig(), f"ipc://{tmp_path}/in", f"ipc://{tmp_path}/out")
    command = [sys.executable, str(SCRIPT), msgspec.json.encode({"fail": True}).decode()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdin.write(ipc.encode_launch(launch))
        process.stdin.flush()  # it stays open, as a parent's does
        assert process.stderr.read() == b""
        assert process.wait() == 1


@pytest.mark.turn(12)
def test_final_error_is_received_even_if_watcher_looks_late(monkeypatch):
    engine = make_remote(fail=True)
    look = Health.look

    def look_late(health, now):
        if engine._life is not None and health is engine._life.health:  # the other engines of this file continue
            engine._life.process.wait(30)  # it reports its failure and exits, since the listener asked for news
        look(health, now)

    monkeypatch.setattr(Health, "look", look_late)
    monkeypatch.setattr(remote_core, "_POLL_MS", 1)  # it has sent nothing yet when it is asked
    with pytest.raises(ConfigError, match="nothing of this fits"):
        start_engine(engine)
    engine.shutdown()


def test_error_in_parent_during_start_ends_process():
    engine = make_remote(hang=True)

    def fail():
        raise ConfigError("no tokenizer")

    with pytest.raises(ConfigError, match="no tokenizer"):
        engine.start(fail)
    assert engine.pid is None


@pytest.mark.turn(12)
def test_watcher_fault_fails_all_open_requests(monkeypatch):
    """Without this the engine was never ready again, nor dead, and requests waited forever."""

    def fail(_core, _reason):
        raise AssertionError("a mistake")

    async def main(llm):
        tasks = await begin(llm)
        monkeypatch.setattr(remote_core.RemoteCore, "_die", fail)
        psutil.Process(llm.engine.client.pid).kill()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [EngineDeadError] * 3  # no error announces a restart
        assert llm.is_dead

    with running(step_s=0.002) as llm:
        run(main(llm))


@pytest.mark.turn(8)
def test_f24_unkillable_process_is_abandoned_and_replaced(monkeypatch, caplog):
    """A process that hangs in a system call, for example on a disk, ignores signals; a new one is started anyway."""
    monkeypatch.setattr(remote_core, "_GIVE_BACK_S", 0.5)
    wait, poll, is_stuck = subprocess.Popen.wait, subprocess.Popen.poll, 0

    def hang(process, timeout=None):
        if process.pid != is_stuck:
            return wait(process, timeout)
        time.sleep(60 if timeout is None else timeout)
        raise subprocess.TimeoutExpired(process.args, timeout)

    async def main(llm):
        nonlocal is_stuck
        tasks, process = await begin(llm), llm.engine.client._life.process
        is_stuck = process.pid
        monkeypatch.setattr(subprocess.Popen, "wait", hang)
        monkeypatch.setattr(subprocess.Popen, "poll", lambda each: None if each.pid == is_stuck else poll(each))
        monkeypatch.setattr(Health, "why_given_up", property(lambda _: "hangs" if killed else None))
        killed.append(is_stuck)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineRestartingError) for result in results)
        killed.clear()
        assert not llm.is_alive, "its memory is waited for, but not by who asked"
        await until(lambda: llm.is_alive)
        assert llm.engine.client.pid != process.pid
        is_stuck = 0
        process.wait()
        return await collect(llm, "hello", "after", max_tokens=3)

    killed = []
    with running(step_s=0.002) as llm:
        assert run(main(llm))
    assert "the next one starts anyway" in caplog.text


@pytest.mark.turn(8)
def test_shutdown_ends_streams_and_process_and_removes_folder():
    async def main(llm):
        tasks = await begin(llm)
        process, folder = psutil.Process(llm.engine.client.pid), llm.engine.client._life.folder
        assert folder.stat().st_mode & 0o777 == 0o700
        await asyncio.to_thread(llm.shutdown)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [EngineDeadError] * 3
        assert not process.is_running()
        assert not folder.exists()
        assert llm.is_dead

    with running(step_s=0.002) as llm:
        run(main(llm))


def test_unreadable_add_message_is_refused(shared):
    """Otherwise the request waits forever, and counts as one that the engine has not answered."""
    message = msgspec.msgpack.encode({"type": "Add", "request_id": "odd", "prompt_token_ids": "x", "streams": []})
    assert ipc.request_id_of(message) == "odd"
    assert ipc.request_id_of(b"garbage") is None
    heard = []

    async def ask(llm):
        def send(engine):
            engine.client._pending["odd"] = heard.append
            engine.client._life.send(message)

        await llm.call(send)
        await until(lambda: heard)
        assert await llm.call(lambda engine: engine.client._pending) == {}

    run(ask(shared))
    assert isinstance(heard[0], RequestError)


@pytest.mark.parametrize(
    "garbage",
    [
        ipc.encode(ipc.Accepted("nobody")),
        b"",
        b"garbage",
        b"cos\nsystem\n(S'touch /tmp/x'\ntR.",
        b"\x81\xa4type\xa7Unknown",
    ],
)
def test_s1_invalid_messages_are_dropped_on_both_sides(shared, garbage):
    async def main(llm):
        await llm.call(lambda engine: engine.client._life.send(garbage))
        with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
            stranger.connect(f"ipc://{llm.engine.client._life.folder / 'news'}")
            stranger.send(garbage)
            pid = llm.engine.client.pid
            assert await collect(llm, "hello", "a", max_tokens=20) == answer_text(5, 0, 20)
            assert llm.engine.client.pid == pid

    run(main(shared))


def test_s2_s3_process_opens_no_port_and_gets_no_secret(shared):
    process = psutil.Process(shared.engine.client.pid)
    assert os.environ["OCTAVO_API_KEY"] == "very-secret"
    assert not process.net_connections(kind="inet")
    assert "very-secret" not in str(process.environ())
    assert "very-secret" not in str(process.cmdline())


@pytest.mark.parametrize(
    ("failure", "text", "rank_failures"),
    [
        (EngineDeadError("rank 1 failed", rank=1), "rank 1 failed; the engine is being started again", {1: 1}),
        (
            ModelError("/secret/path is missing"),
            "the engine process ended with status 1; the engine is being started again",
            {},
        ),
        (
            ModelError("rank 2: /secret/path is missing", rank=2),
            "the engine process ended with status 1; the engine is being started again",
            {2: 1},
        ),
    ],
)
def test_clients_read_which_rank_failed_in_a_step_and_nothing_of_other_failures(failure, text, rank_failures):
    core, lost = remote_core.RemoteCore(["true"], EngineConfig()), []
    core.on_lost(lost.append)
    core._poller = SimpleNamespace(unregister=lambda _socket: None)
    core._was_ready = True
    core._life = SimpleNamespace(news=None, end=lambda: None, process=None, failure=failure, ready_at=time.monotonic())
    core._die("ended with status 1")
    core.shutdown()
    assert str(lost[0]) == text
    assert core.rank_failures == rank_failures
    assert core.num_restarts == 1


@pytest.mark.parametrize(
    "error",
    [ModelError("no file", rank=1), ConfigError("no memory", rank=2), EngineDeadError("over", rank=3), ModelError("x")],
)
def test_parent_receives_kind_text_and_rank_of_a_failure(error):
    received = ipc.error_of(ipc.decode_from_engine(ipc.encode(ipc.failure(error))))
    assert (type(received), str(received), received.rank) == (type(error), str(error), error.rank)
