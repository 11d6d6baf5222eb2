"""A few threads for calls that may hang: they end with the process, whatever they are doing."""

from __future__ import annotations

import contextlib
import logging
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
    """Runs tasks in their order on `num_threads` threads, which end when this object does.

    (The standard library's executors wait at exit for what their threads do.)
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._tasks: Tasks = queue.SimpleQueue()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=_work, args=(self._tasks,), name=f"{name}-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()
        weakref.finalize(self, _end, self._tasks, num_threads)

    def submit(self, task: Callable[[], None]) -> None:
        """Run a task as soon as a thread is free; after `close` not at all. What it raises is logged."""
        if not self._is_closed:
            self._tasks.put(task)

    def close(self, timeout_s: float) -> bool:
        """Let the threads end behind the tasks that they have begun; return whether all did in time.

        A second call waits again.
        """
        self._is_closed = True
        _end(self._tasks, len(self._threads))
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)


def _end(tasks: Tasks, num_threads: int) -> None:
    """Drop the tasks that nobody has begun, and let the threads end."""
    with contextlib.suppress(queue.Empty):
        while True:
            tasks.get_nowait()
    for _ in range(num_threads):
        tasks.put(None)


def _work(tasks: Tasks) -> None:
    while (task := tasks.get()) is not None:
        try:
            task()
        except BaseException:  # panics of libraries included: the next task has a thread
            logger.exception("a task of %s failed", threading.current_thread().name)
        del task  # or what it holds would live until the next one
