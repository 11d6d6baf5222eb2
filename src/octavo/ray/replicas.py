"""Runs engines on a Ray cluster for a router."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Self

import msgspec

from octavo.config import environment_of_ray
from octavo.errors import ConfigError, OctavoError
from octavo.ray.settings import Order, Report, Settings
from octavo.router.launcher import Launcher

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

logger = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 10.0
_CONNECT_S = 30.0  # added to the time for finding room, because Ray starts slowly
_FROZEN_TIMES = 8
_EXIT_S = 20.0


class RayReplicas(Launcher):
    """Runs a driver, and reads its reports. If the driver ends, it starts again, with new engines.

    again: Returns the engines' command line after the configuration file has changed. SIGUSR1 calls it and replaces the
    engines. Raises `ConfigError`.
    """

    def __init__(self, settings: Settings, again: Callable[[], Sequence[str]]) -> None:
        self._settings, self._again = settings, again
        self._urls: tuple[str, ...] = ()
        self._failure: str | None = None
        self._changed = threading.Condition()
        self._is_placed = self._was_ready = False
        self._is_stopping = threading.Event()
        self._driver: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="octavo-ray", daemon=True)

    async def urls(self) -> list[str]:
        """Return the addresses of the engines."""
        return list(self._urls)

    @property
    def has_failed(self) -> bool:
        """True if no engine can run."""
        return self._failure is not None

    def reload(self) -> None:
        """Reload API keys."""
        self._write(msgspec.json.encode(Order(reload=True)))

    def silent(self, url: str, num_times: int) -> None:
        """Restart the engine if it is frozen."""
        if num_times >= _FROZEN_TIMES:
            self._write(msgspec.json.encode(Order(silent=url)))

    def replace(self) -> None:
        """Read the configuration again, and replace all engines one after another."""
        try:
            words = tuple(self._again())
        except OctavoError as error:
            logger.error("the replicas were not replaced: %s", error)  # noqa: TRY400 - the error says all
            return
        self._settings = msgspec.structs.replace(self._settings, words=words)
        self._write(msgspec.json.encode(Order(words=words)))

    def __enter__(self) -> Self:
        """Start the engines. Raises `ConfigError` if they do not find room in time."""
        self._thread.start()
        try:
            with self._changed:
                limit_s = self._settings.timeout_s + _CONNECT_S
                self._changed.wait_for(lambda: self._is_placed or self._failure is not None, limit_s)
            if not self._is_placed:
                raise ConfigError(self._failure or f"the Ray cluster has not answered within {limit_s:g} s")
        except BaseException:
            self.__exit__()
            raise
        if hasattr(signal, "SIGUSR1") and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the engines and the driver."""
        self._is_stopping.set()
        driver = self._driver
        if driver is not None and driver.stdin is not None:
            driver.stdin.close()
        self._thread.join(self._settings.stop_s + _EXIT_S)
        if self._thread.is_alive() and driver is not None:
            logger.warning("the Ray driver does not exit: killing it")
            driver.kill()
            self._thread.join()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        threading.Thread(target=self.replace, name="octavo-replace", daemon=True).start()

    def _write(self, line: bytes) -> None:
        driver = self._driver
        if driver is not None and driver.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it has ended
                driver.stdin.write(line + b"\n")
                driver.stdin.flush()

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._is_stopping.is_set():
            begun_at = time.monotonic()
            failure = self._run_once()
            self._urls = ()
            with self._changed:
                if not self._was_ready:
                    self._failure = failure
                    self._changed.notify_all()
            if self._is_stopping.is_set():
                return
            if self._failure is not None:
                if self._is_placed:  # otherwise `__enter__` raises it
                    logger.error("%s", failure)
                return
            if time.monotonic() - begun_at > _CONNECT_S:
                pause_s = _FIRST_PAUSE_S
            logger.error("%s; the next attempt is in %g s", failure, pause_s)
            self._is_stopping.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _run_once(self) -> str:
        """Run a driver to its end. Return the reason of the end."""
        command = [sys.executable, "-m", "octavo.ray.driver"]
        with subprocess.Popen(  # noqa: S603 - octavo itself
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment_of_ray(), start_new_session=True
        ) as driver:
            assert driver.stdin is not None
            assert driver.stdout is not None
            self._driver = driver
            if self._is_stopping.is_set():
                driver.stdin.close()
            self._write(msgspec.json.encode(self._settings))
            failure = None
            for line in driver.stdout:
                report = msgspec.json.decode(line, type=Report)
                failure = report.failure
                with self._changed:
                    self._urls = report.urls or ()
                    self._is_placed = self._is_placed or report.is_placed
                    self._was_ready = self._was_ready or report.was_ready
                    self._changed.notify_all()
            status = driver.wait()
        return failure or f"the Ray driver has exited with status {status}"
