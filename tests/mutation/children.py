"""Forked processes that each do one thing and say what came of it, under limits of time and memory."""

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

MEMORY_BYTES = 2 << 30  # beside what the process has mapped when it is forked
_TICK_S = 0.25
_BUSY_TICK_S = 0.002  # processor time of a tick in which something was done


def in_children(items: Iterable[Any], jobs: int, act: Callable[[Any], object]) -> Iterator[tuple[Any, str]]:
    """Act on each item in a process of its own, `jobs` at a time; yield what each says, as JSON, as they end.

    A process that is ended by a signal answers with the signal's name and 0. Each has a temporary folder and a process
    group of its own: the folder is removed and the group killed when it ends.
    Raises RuntimeError for a process that fails otherwise.
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
                folder.chmod(0o755)  # some tests let another user in
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
    gc.disable()  # it would touch, and so copy, what is shared with the parent
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
    """Ends this process when it only waits, which no limit of processor time does.

    Ticks are counted in which the process was given the processor and used it for nothing but the tick: a busy machine
    delays ticks, it does not make them idle. A process that waits for ever may have threads that work now and then, so
    that it is never idle: all ticks have a limit, too.
    """

    def __init__(self) -> None:
        self.allow(10.0, math.inf)
        self._used_s = 0.0

    def allow(self, idle_s: float, all_s: float) -> None:
        """Begin anew: the process may be idle for `idle_s` without a pause, and live for `all_s`."""
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
