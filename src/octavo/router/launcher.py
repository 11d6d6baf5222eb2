"""Launchers of engines: none, or replicas as child processes. A launcher for many hosts would be one more class."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

logger = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_LONG_S = 60.0  # a replica that has run for so long has started successfully
_MAX_FAILED_STARTS = 3  # in a row
_STOP_S = 15.0
_FROZEN_TIMES = 8  # health checks without an answer, in a row; by default half a minute (3 s each, with pauses)


class Launcher(Protocol):
    """Runs engines during its `with` block."""

    @property
    def has_failed(self) -> bool:
        """True if none of its engines will ever run."""
        ...

    def reload(self) -> None:
        """Make the engines read their API keys again."""
        ...

    def silent(self, url: str, num_times: int) -> None:
        """Report that an engine accepts connections but did not answer so many times in a row."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class NoLauncher:
    """Engines are started elsewhere."""

    has_failed = False

    def reload(self) -> None:
        """Do nothing."""

    def silent(self, url: str, num_times: int) -> None:
        """Do nothing: the engine is supervised elsewhere."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


class LocalReplicas:
    """Child processes of this one. They end when it ends in any way; one that dies or freezes is restarted.

    commands: the command of each replica, by its address. A replica's standard input closes when this process ends.
    environment: the variables of all replicas.
    """

    def __init__(self, commands: Mapping[str, Sequence[str]], environment: Mapping[str, str]) -> None:
        self._replicas = {
            url: _Replica(index, list(command), dict(environment))
            for index, (url, command) in enumerate(commands.items())
        }

    @property
    def has_failed(self) -> bool:
        """True if all replicas have failed to start too often."""
        return all(replica.has_failed for replica in self._replicas.values())

    def silent(self, url: str, num_times: int) -> None:
        """Kill a replica that has frozen; it is then restarted."""
        if num_times >= _FROZEN_TIMES and url in self._replicas:
            self._replicas[url].kill_frozen()

    def reload(self) -> None:
        """Make the replicas read their API keys again, as this process has."""
        for replica in self._replicas.values():
            replica.reload()

    def __enter__(self) -> Self:
        for replica in self._replicas.values():
            replica.start()
        return self

    def __exit__(self, *_: object) -> None:
        for replica in self._replicas.values():
            replica.tell_to_stop()
        for replica in self._replicas.values():
            replica.join()


class _Replica:
    """One child process, and the thread that waits for its end and restarts it."""

    def __init__(self, index: int, command: list[str], environment: dict[str, str]) -> None:
        self._index, self._command, self._environment = index, command, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopping = threading.Event()
        self._lock = threading.Lock()  # held while a child is started or gets a signal
        self._thread = threading.Thread(target=self._run, name=f"octavo-replica-{index}", daemon=True)
        self._has_failed = False

    @property
    def has_failed(self) -> bool:
        """True if it does not run now, and has failed too often or because of a wrong option."""
        return self._has_failed and self._process is not None and self._process.poll() is not None

    def start(self) -> None:
        """Start the child and keep it running."""
        self._thread.start()

    def tell_to_stop(self) -> None:
        """Send SIGTERM to the child, and do not restart it."""
        with self._lock:
            self._is_stopping.set()
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)

    def reload(self) -> None:
        """Make the child read its API keys again. A child that is just starting reads them anyway."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGHUP)

    def kill_frozen(self) -> None:
        """Kill the child, if it runs."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                logger.error("replica %d does not respond any more: killing it", self._index)
                self._process.kill()

    def join(self) -> None:
        """Wait for the child's end; kill it if it does not end in time."""
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
            # statuses 1 and 2 mean a wrong option, which will be wrong at the next start, too
            self._has_failed = num_failed >= _MAX_FAILED_STARTS or (num_failed > 0 and status in {1, 2})
            logger.error("replica %d exited with status %d; it restarts in %g s", self._index, status, pause)
            self._is_stopping.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _run_once(self) -> int | None:
        """Run the child to its end; return its status, or None without starting it if the replica must stop."""
        with self._lock:
            if self._is_stopping.is_set():
                return None
            self._process = subprocess.Popen(  # noqa: S603 - octavo itself, with the options of this process
                self._command, stdin=subprocess.PIPE, env=self._environment, start_new_session=True
            )
        with self._process as process:
            return process.wait()


def free_ports(count: int) -> list[int]:
    """Return `count` different ports of the loopback address that are free now."""
    socks = [socket.socket() for _ in range(count)]
    try:
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in socks]
    finally:
        for sock in socks:
            sock.close()
