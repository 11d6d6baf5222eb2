"""Runs a child process that uses Ray, and reads its reports."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Self

import msgspec

from octavo.config import environment_of_ray
from octavo.errors import ConfigError
from octavo.ray.messages import Report
from octavo.router.launcher import Launcher

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.ray.messages import Message

logger = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 10.0
_CONNECT_S = 60.0  # Ray starts slowly
_LONG_S = 30.0  # a longer run resets the pause before the next one
_LATE_S = 30.0  # for a report after its limit
_EXIT_S = 20.0
_LONGEST_LINE = 200  # bytes, in the log


def check_ray_installed(option: str) -> None:
    """Raise `ConfigError` if Ray is missing. Ray is not imported."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"{option} needs ray: pip install 'octavo[ray]'")


class RayProcess(Launcher):
    """Runs a child process, which ends with this process.

    If it ends after all engines had their place and one was ready, it starts again.

    module: Of the child process. first: Its first message. start_s: Time in which the child process finds places for
    engines or fails, after it has connected to the cluster. stop_s: Time that its end may take. Some seconds are added
    to both.
    """

    def __init__(self, module: str, first: Message, *, start_s: float = 0.0, stop_s: float = 0.0) -> None:
        self._command = [sys.executable, "-m", module]
        self._first, self._start_s, self._stop_s = first, start_s + _LATE_S, stop_s + _EXIT_S
        self._urls: tuple[str, ...] = ()
        self._failure: str | None = None
        self._changed = threading.Condition()
        self._is_connected = self._is_placed = self._was_ready = False
        self._is_stopping = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="octavo-ray", daemon=True)

    async def urls(self) -> list[str]:
        """Return the last reported addresses of engines."""
        return list(self._urls)

    @property
    def has_failed(self) -> bool:
        """True if no engine can run."""
        return self._failure is not None

    def __enter__(self) -> Self:
        """Start. Raises `ConfigError` if the cluster cannot be used."""
        self._thread.start()
        try:
            self._wait(lambda: self._is_connected, _CONNECT_S, "the Ray cluster has not answered")
            self._wait(lambda: self._is_placed, self._start_s, "the process that uses Ray has not found places")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self._is_stopping.set()
        child = self._child
        if child is not None:
            _close_input(child)
        self._thread.join(self._stop_s if self._is_connected else _FIRST_PAUSE_S)
        if self._thread.is_alive() and child is not None:
            logger.warning("the process that uses Ray does not exit: killing it")
            child.kill()
            self._thread.join()

    def send(self, message: Message) -> bool:
        """Send a message to the child process. Return False if it does not run."""
        child = self._child
        if child is not None and child.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it has ended
                child.stdin.write(msgspec.json.encode(message) + b"\n")
                child.stdin.flush()
                return True
        return False

    def _wait(self, condition: Callable[[], bool], timeout_s: float, problem: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._failure is not None, timeout_s)
            if not condition():
                raise ConfigError(self._failure or f"{problem} within {timeout_s:g} s")

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._is_stopping.is_set():
            begun_at = time.monotonic()
            try:
                failure = self._run_once()
            except OSError as error:
                failure = f"the process that uses Ray cannot be started: {error}"
            if self._is_stopping.is_set():
                return
            if not (self._is_placed and self._was_ready):
                self._fail(failure)
                return
            if time.monotonic() - begun_at > _LONG_S:
                pause_s = _FIRST_PAUSE_S
            logger.error("%s; the next attempt is in %g s", failure, pause_s)
            self._is_stopping.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _note(self, report: Report) -> None:
        """Use a report, in a subclass."""

    def _fail(self, failure: str) -> None:
        if self._is_placed:  # otherwise `__enter__` raises it
            logger.error("%s", failure)
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def _run_once(self) -> str:
        """Run the child process to its end. Return the reason of the end."""
        with subprocess.Popen(  # noqa: S603 - octavo itself
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment_of_ray(),
            start_new_session=True,
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            self._child = child
            if self._is_stopping.is_set():
                _close_input(child)
            self.send(self._first)
            failure = None
            for line in child.stdout:
                try:
                    report = msgspec.json.decode(line, type=Report)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    child.kill()
                    failure = f"the process that uses Ray wrote a line that is no report: {line[:_LONGEST_LINE]!r}"
                    break
                failure = report.failure
                self._take(report)
            status = child.wait()
            _close_input(child)
        return failure or f"the process that uses Ray has exited with status {status}"

    def _take(self, report: Report) -> None:
        self._note(report)
        with self._changed:
            self._urls = report.urls if report.failure is None else self._urls
            self._is_connected = self._is_connected or report.is_connected
            self._is_placed = self._is_placed or report.is_placed
            self._was_ready = self._was_ready or report.was_ready
            self._changed.notify_all()


def _close_input(child: subprocess.Popen[bytes]) -> None:
    """End the input. A message that the child has not read is lost."""
    assert child.stdin is not None
    with contextlib.suppress(OSError):  # the child has closed its end
        child.stdin.close()
