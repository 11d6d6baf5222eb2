"""Restarts of a replica, its failed state, and the loss of an engine, without a process."""

from __future__ import annotations

import signal
import socket
from functools import partial
from types import SimpleNamespace

import pytest

from octavo.router import launcher
from octavo.router.engines import EngineHandle
from octavo.router.launcher import LocalReplicas, _Replica, free_ports
from octavo.router.watching import EngineWatch


class Process:
    """A fake child process. status: its exit status; None: it runs."""

    def __init__(self, status=None):
        self.status, self.note_usage = status, []

    def poll(self):
        return self.status

    def send_signal(self, number):
        self.note_usage.append(number)

    def kill(self):
        self.note_usage.append("kill")


def replica(process=None):
    made = _Replica(0, ["command"], {})
    if process is not None:
        made._process = process
    return made


def test_replica_failed_only_if_marked_and_exited():
    for has_failed, process, expected in (
        (True, Process(1), True),
        (True, Process(), False),
        (True, None, False),
        (False, Process(1), False),
    ):
        made = replica(process)
        made._has_failed = has_failed
        assert made.has_failed is expected


def test_signals_reach_only_running_replica():
    for act, told in (
        (_Replica.kill_frozen, "kill"),
        (_Replica.reload, signal.SIGHUP),
        (_Replica.request_stop, signal.SIGTERM),
    ):
        running, ended = Process(), Process(0)
        act(replica(running))
        act(replica(ended))
        act(replica(None))
        assert (running.note_usage, ended.note_usage) == ([told], [])


@pytest.mark.parametrize(("is_alive", "killed"), [(True, ["kill"]), (False, [])])
def test_replica_that_ignores_stop_is_killed(is_alive, killed):
    made, waits = replica(Process()), []
    made._thread = SimpleNamespace(join=lambda timeout=None: waits.append(timeout), is_alive=lambda: is_alive)
    made.join()
    assert made._process.note_usage == killed
    assert waits == ([15.0, None] if is_alive else [15.0])


def run(monkeypatch, *runs):
    """Run a replica. runs: (exit status, seconds) of each run. Return its pauses, and at each whether it had failed."""
    made, now, pauses, failed = replica(), [0.0], [], []
    left = list(runs)

    def run_once():
        if not left:
            return None
        status, seconds = left.pop(0)
        now[0] += seconds
        return status

    def wait(pause):
        pauses.append(pause)
        failed.append(made._has_failed)

    monkeypatch.setattr(made, "_run_once", run_once)
    monkeypatch.setattr(made, "_is_stopping", SimpleNamespace(is_set=lambda: False, wait=wait))
    monkeypatch.setattr(launcher.time, "monotonic", lambda: now[0])
    made._run()
    return pauses, failed


def test_restart_backoff_doubles_up_to_one_minute(monkeypatch):
    pauses, failed = run(monkeypatch, *[(-9, 1.0)] * 8)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert failed == [False, False, *[True] * 6]


def test_one_minute_run_resets_restart_backoff(monkeypatch):
    pauses, failed = run(monkeypatch, (-9, 1.0), (-9, 1.0), (-9, 60.0), (-9, 59.0), (-9, 1.0), (-9, 1.0))
    assert pauses == [1.0, 2.0, 1.0, 2.0, 4.0, 8.0]
    assert failed == [False, False, False, False, False, True]


@pytest.mark.parametrize(
    ("status", "seconds", "expected"), [(1, 1.0, True), (2, 1.0, True), (3, 1.0, False), (1, 99.0, False)]
)
def test_early_usage_error_marks_replica_failed(monkeypatch, status, seconds, expected):
    assert run(monkeypatch, (status, seconds))[1] == [expected]


def test_replicas_have_failed_only_if_all_failed():
    replicas = LocalReplicas({"http://a": ["a"], "http://b": ["b"]}, {})
    for made in replicas._replicas.values():
        assert not replicas.has_failed
        made._has_failed, made._process = True, Process(1)
    assert replicas.has_failed


def test_replica_is_killed_after_eight_silent_checks():
    replicas = LocalReplicas({"http://a": ["a"]}, {})
    replicas._replicas["http://a"]._process = process = Process()
    replicas.silent("http://a", 7)
    replicas.silent("http://b", 8)
    assert process.note_usage == []
    replicas.silent("http://a", 8)
    assert process.note_usage == ["kill"]
    replicas.reload()
    assert process.note_usage == ["kill", signal.SIGHUP]


@pytest.mark.parametrize(
    ("error", "forgets"), [(ConnectionRefusedError(), True), (ConnectionResetError(), True), (TimeoutError(), False)]
)
def test_refused_connection_clears_expected_cache_of_engine(error, forgets):
    """The next process at its address has an empty cache. A silent engine keeps its cache."""
    heard = []
    watch = object.__new__(EngineWatch)
    watch._pool = SimpleNamespace(
        forget=lambda engine: heard.append("forget"),
        lost=lambda engine: heard.append("lost"),
    )
    watch._lost(EngineHandle("http://e"), error)
    assert heard == (["forget", "lost"] if forgets else ["lost"])


def test_replica_kills_and_restarts_are_logged(caplog, monkeypatch):
    made = replica(Process())
    made._thread = SimpleNamespace(join=lambda timeout=None: None, is_alive=lambda: True)
    made.join()
    made.kill_frozen()
    assert "replica 0 does not exit: killing it" in caplog.text
    assert "replica 0 does not respond any more: killing it" in caplog.text
    run(monkeypatch, (7, 1.0))
    assert "replica 0 exited with status 7; it restarts in 1 s" in caplog.text


def test_joining_unstarted_replica_kills_nothing():
    made, waits = replica(), []
    made._thread = SimpleNamespace(join=lambda timeout=None: waits.append(timeout), is_alive=lambda: True)
    made.join()
    assert waits == [15.0]


@pytest.mark.parametrize("stops_after", [0, 1])
def test_stopping_replica_is_not_restarted(monkeypatch, stops_after):
    made, statuses, paused = replica(), [], []

    def run_once():
        statuses.append(1)
        return 1

    monkeypatch.setattr(made, "_run_once", run_once)
    is_set = lambda: len(statuses) >= stops_after  # noqa: E731
    monkeypatch.setattr(made, "_is_stopping", SimpleNamespace(is_set=is_set, wait=paused.append))
    made._run()
    assert (len(statuses), paused, made._has_failed) == (stops_after, [], False)


def test_replica_process_gets_command_stdin_pipe_and_new_session(monkeypatch):
    made, started = _Replica(0, ["command", "option"], {"A": "b"}), []

    class Child(Process):
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def wait(self):
            return 9

    def start(command, **options):
        started.append((command, options))
        return Child()

    monkeypatch.setattr(launcher.subprocess, "Popen", start)
    assert made._run_once() == 9
    ((command, options),) = started
    assert command == ["command", "option"]
    assert options == {"stdin": launcher.subprocess.PIPE, "env": {"A": "b"}, "start_new_session": True}
    made.request_stop()
    assert made._run_once() is None
    assert len(started) == 1


def test_replicas_start_stop_and_join_in_order():
    replicas, acts = LocalReplicas({"http://a": ["a"], "http://b": ["b"]}, {}), []
    assert [made._index for made in replicas._replicas.values()] == [0, 1]
    assert all(made._thread.daemon for made in replicas._replicas.values())
    for url in replicas._replicas:
        names = ("start", "request_stop", "join")
        replicas._replicas[url] = SimpleNamespace(**{name: partial(acts.append, (name, url)) for name in names})
    with replicas as entered:
        assert entered is replicas
    assert acts == [(name, f"http://{host}") for name in ("start", "request_stop", "join") for host in "ab"]


def test_free_ports_are_distinct_and_bindable():
    ports = free_ports(3)
    assert len({*ports}) == 3
    for port in ports:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
