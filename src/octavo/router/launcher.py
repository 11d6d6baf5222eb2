"""Launchers of engines."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

logger = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_LONG_S = 60.0  # a longer run counts as a successful start
_MAX_FAILED_STARTS = 3
_STOP_S = 15.0
_FROZEN_TIMES = 8  # unanswered checks in a row, which take half a minute by default


class Launcher:
    """Base of classes that run engines during a `with` block. Runs no engine itself."""

    @property
    def has_failed(self) -> bool:
        """True if all engines failed."""
        return False

    async def urls(self) -> list[str]:
        """Return the addresses of engines that come and go."""
        return []

    def reload(self) -> None:
        """Reload API keys."""

    def silent(self, url: str, num_times: int) -> None:
        """Handle `num_times` consecutive checks that an engine did not answer."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the engines."""


class LocalReplicas(Launcher):
    """Runs engines as child processes, which end with this process. Restarts children that die or freeze."""

    def __init__(self, commands: Mapping[str, Sequence[str]], environment: Mapping[str, str]) -> None:
        self._replicas = {
            url: _Replica(index, list(command), dict(environment))
            for index, (url, command) in enumerate(commands.items())
        }

    @property
    def has_failed(self) -> bool:
        """True if all replicas failed."""
        return all(replica.has_failed for replica in self._replicas.values())

    def silent(self, url: str, num_times: int) -> None:
        """Restart the engine if it is frozen."""
        if num_times >= _FROZEN_TIMES and url in self._replicas:
            self._replicas[url].kill_frozen()

    def reload(self) -> None:
        """Reload API keys."""
        for replica in self._replicas.values():
            replica.reload()

    def __enter__(self) -> Self:
        for replica in self._replicas.values():
            replica.start()
        return self

    def __exit__(self, *_: object) -> None:
        for replica in self._replicas.values():
            replica.request_stop()
        for replica in self._replicas.values():
            replica.join()


class _Replica:
    def __init__(self, index: int, command: list[str], environment: dict[str, str]) -> None:
        self._index, self._command, self._environment = index, command, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopping = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"octavo-replica-{index}", daemon=True)
        self._has_failed = False

    @property
    def has_failed(self) -> bool:
        return self._has_failed and self._process is not None and self._process.poll() is not None

    def start(self) -> None:
        self._thread.start()

    def request_stop(self) -> None:
        with self._lock:
            self._is_stopping.set()
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)

    def reload(self) -> None:
        """Reload API keys."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGHUP)

    def kill_frozen(self) -> None:
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                logger.error("replica %d does not respond any more: killing it", self._index)
                self._process.kill()

    def join(self) -> None:
        self._thread.join(_STOP_S)
        if self._thread.is_alive() and self._process is not None:
            logger.warning("replica %d does not exit: killing it", self._index)
            self._process.kill()
            self._thread.join()

    def _run(self) -> None:
        pause, num_failed = _FIRST_PAUSE_S, 0
        while not self._is_stopping.is_set():
            start = time.monotonic()
            status = self._run_once()
            if status is None or self._is_stopping.is_set():
                return
            was_well = time.monotonic() - start >= _LONG_S
            pause, num_failed = (_FIRST_PAUSE_S, 0) if was_well else (pause, num_failed + 1)
            # status 1 or 2 means a wrong option
            self._has_failed = num_failed >= _MAX_FAILED_STARTS or (num_failed > 0 and status in {1, 2})
            logger.error("replica %d exited with status %d; it restarts in %g s", self._index, status, pause)
            self._is_stopping.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _run_once(self) -> int | None:
        with self._lock:
            if self._is_stopping.is_set():
                return None
            self._process = subprocess.Popen(  # noqa: S603 - octavo itself
                self._command, stdin=subprocess.PIPE, env=self._environment, start_new_session=True
            )
        with self._process as process:
            return process.wait()


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Find free ports of an address of this machine."""
    with contextlib.ExitStack() as stack:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socks = [stack.enter_context(socket.socket(family)) for _ in range(count)]
        for sock in socks:
            sock.bind((host, 0))
        return [sock.getsockname()[1] for sock in socks]
