"""Threads for calls that may hang."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time

import pytest

from octavo.runtime.daemon_threads import DaemonThreads


def test_failed_task_is_logged_and_next_task_runs(caplog):
    threads, done = DaemonThreads(1, "test"), threading.Event()

    def fail():
        raise SystemExit

    with caplog.at_level(logging.ERROR):
        threads.submit(fail)
        threads.submit(done.set)
        assert done.wait(10)
    assert "a task of test-0 failed" in caplog.text


def test_close_drops_queued_tasks_and_waits_until_timeout():
    threads, entered, release, seen = DaemonThreads(1, "test"), threading.Event(), threading.Event(), []
    threads.submit(lambda: (entered.set(), release.wait()))
    threads.submit(lambda: seen.append(1))
    assert entered.wait(10)
    assert not threads.close(0.01)
    release.set()
    assert threads.close(10)
    threads.submit(lambda: seen.append(2))
    assert seen == []


@pytest.mark.turn(8)
def test_threads_end_when_pool_is_garbage_collected():
    threads = DaemonThreads(2, "test-of-its-end")
    own = list(threads._threads)
    del threads
    gc.collect()
    for thread in own:
        thread.join(10)
        assert not thread.is_alive()


def test_process_exits_despite_hanging_task():
    code = (
        "import threading, time\nfrom octavo.runtime.daemon_threads import DaemonThreads\n"
        "entered = threading.Event()\nthreads = DaemonThreads(1, 'x')\n"
        "threads.submit(lambda: (entered.set(), time.sleep(1000)))\nentered.wait()\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_hanging_tasks_get_replacement_thread():
    hanging, ran = threading.Event(), threading.Event()
    threads = DaemonThreads(2, "hanging", hangs_after_s=0.05)
    for _ in range(2):
        threads.submit(lambda: hanging.wait(20))
    time.sleep(0.1)
    threads.submit(ran.set)
    assert ran.wait(10)
    assert threads.close(0.0) is False
    hanging.set()
    assert threads.close(10)


def test_queued_tasks_start_no_extra_thread():
    release = threading.Event()
    threads = DaemonThreads(1, "waiting", hangs_after_s=60)
    for _ in range(5):
        threads.submit(lambda: release.wait(20))
    assert sum(each.name.startswith("waiting-") for each in threading.enumerate()) == 1
    release.set()
    assert threads.close(10)
