"""Daemon threads for calls that may hang."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    Tasks = queue.SimpleQueue[Callable[[], None] | None]

logger = logging.getLogger(__name__)


class DaemonThreads:
    """Daemon threads, which end when this object is garbage-collected.

    hangs_after_s: if the tasks of all threads have run for longer, `submit` adds a thread.
    """

    def __init__(self, num_threads: int, name: str, hangs_after_s: float = math.inf) -> None:
        self._tasks: Tasks = queue.SimpleQueue()
        self._is_closed = False
        self._name = name
        self._hangs_after_s = hangs_after_s
        self._begun: dict[int, float] = {}  # start of each running task, by thread
        self._threads: list[threading.Thread] = []
        for _ in range(num_threads):
            self._add_thread()
        weakref.finalize(self, _end, self._tasks, self._threads)

    def _add_thread(self) -> None:
        number = len(self._threads)
        name = f"{self._name}-{number}"
        thread = threading.Thread(target=_work, args=(self._tasks, self._begun, number), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        """Queue a task. Its exceptions are logged. After `close`, do nothing."""
        if self._is_closed:
            return
        self._tasks.put(task)
        begun = list(self._begun.values())
        if len(begun) == len(self._threads) and max(begun) < time.monotonic() - self._hangs_after_s:
            self._add_thread()

    def close(self, timeout_s: float) -> bool:
        """Discard queued tasks and wait for running ones. Return True if all threads ended in time."""
        self._is_closed = True
        _end(self._tasks, self._threads)
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)


def _end(tasks: Tasks, threads: list[threading.Thread]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            tasks.get_nowait()
    for _ in threads:
        tasks.put(None)


def _work(tasks: Tasks, begun: dict[int, float], number: int) -> None:
    while (task := tasks.get()) is not None:
        begun[number] = time.monotonic()
        try:
            task()
        except BaseException:  # also a Rust library's panic
            logger.exception("a task of %s failed", threading.current_thread().name)
        del begun[number]
        del task  # release objects before the next task
