"""Forked processes that each do one thing and report its result, under limits of time and memory."""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import shutil
import signal
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

MEMORY_BYTES = 2 << 30  # in addition to the memory that the process has mapped when it is forked
_TICK_S = 0.25
_BUSY_TICK_S = 0.002  # processor time of a tick that did some work


def in_children(items: Iterable[Any], jobs: int, act: Callable[[Any], object]) -> Iterator[tuple[Any, str]]:
    """Call `act` on each item in a process of its own, `jobs` at a time; yield the answers, as JSON, as processes end.

    The answer of a process that is killed by a signal is the signal's name and 0. Each process has a temporary folder
    and a process group of its own: when it ends, the folder is removed and the group killed. Raises RuntimeError for a
    process that fails otherwise.
    """
    running: dict[int, tuple[Any, Path]] = {}
    rest = iter(items)
    is_more = True
    try:
        while is_more or running:
            while is_more and len(running) < jobs:
                item = next(rest, rest)
                if item is rest:
                    is_more = False
                    break
                folder = Path(tempfile.mkdtemp(prefix="mutant-"))
                folder.chmod(0o755)  # some tests give another user access
                pid = os.fork()
                if not pid:
                    _say(act, item, folder)
                running[pid] = item, folder
            if not running:
                break
            pid, status = os.wait()
            item, folder = running.pop(pid)
            answer = folder / "answer"
            said = answer.read_text() if answer.exists() else ""
            _clear(pid, folder)
            if os.WIFSIGNALED(status):
                yield item, json.dumps((signal.Signals(os.WTERMSIG(status)).name, 0))
            elif os.WEXITSTATUS(status) or not said:
                raise RuntimeError(said or "a process ended without an answer")
            else:
                yield item, said
    finally:
        for pid, (_, folder) in running.items():
            _clear(pid, folder)
            os.waitpid(pid, 0)


def _clear(pid: int, folder: Path) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def _say(act: Callable[[Any], object], item: object, folder: Path) -> None:
    """Answer, and end this process."""
    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    most = psutil.Process().memory_info().vms + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    gc.disable()  # it would touch, and so copy, memory shared with the parent
    IDLENESS.watch()
    code = 1
    try:
        said = json.dumps(act(item))
        code = 0
    except BaseException:  # noqa: BLE001  the parent raises it
        said = traceback.format_exc()
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    (folder / "answer").write_text(said)
    os._exit(code)


class _Idleness:
    """Ends this process if it only waits, which no limit on processor time does.

    A tick counts as idle if the process got the processor and used it only for the tick. A busy machine delays ticks,
    but does not make them idle. A process that waits forever may have threads that work now and then, so it is never
    idle: therefore the number of all ticks has a limit too.
    """

    def __init__(self) -> None:
        self.allow(10.0, math.inf)
        self._used_s = 0.0

    def allow(self, idle_s: float, all_s: float) -> None:
        """Start again: the process may be idle for `idle_s` in a row, and live for `all_s`."""
        self._limits_s = idle_s, all_s
        self._idle_s = self._all_s = 0.0

    def watch(self) -> None:
        """Begin."""
        self._used_s = time.process_time()
        signal.signal(signal.SIGALRM, self._tick)
        signal.setitimer(signal.ITIMER_REAL, _TICK_S, _TICK_S)

    def _tick(self, _number: int, _frame: object) -> None:
        used_s = time.process_time()
        self._idle_s = self._idle_s + _TICK_S if used_s - self._used_s < _BUSY_TICK_S else 0.0
        self._used_s = used_s
        self._all_s += _TICK_S
        if self._idle_s > self._limits_s[0] or self._all_s > self._limits_s[1]:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGALRM)


IDLENESS = _Idleness()  # of this process
