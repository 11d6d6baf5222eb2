"""Who starts engines: nobody, or this process its own replicas. Others (many hosts) would stand beside these."""

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
_LONG_S = 60.0  # who has run for so long was well
_MAX_FAILED_STARTS = 3  # in a row, of one that never ran for so long
_STOP_S = 15.0
_FROZEN_TIMES = 8  # of silence, of 3 s each and with pauses by default: half a minute


class Launcher(Protocol):
    """Runs engines while it is entered."""

    @property
    def has_failed(self) -> bool:
        """Whether no engine of it will ever run."""
        ...

    def reload(self) -> None:
        """Have the engines read their API keys anew."""
        ...

    def silent(self, url: str, num_times: int) -> None:
        """Hear that an engine, which accepts connections, has said nothing so many times in a row."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class NoLauncher:
    """Engines are started by others."""

    has_failed = False

    def reload(self) -> None:
        """Do nothing."""

    def silent(self, url: str, num_times: int) -> None:
        """Do nothing: whoever runs it looks after it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


class LocalReplicas:
    """Child processes of this one: they end with it, however that ends, and one that dies or freezes is started again.

    commands: one for each, by its address; its standard input ends when this process does. environment: of all.
    """

    def __init__(self, commands: Mapping[str, Sequence[str]], environment: Mapping[str, str]) -> None:
        self._replicas = {
            url: _Replica(index, list(command), dict(environment))
            for index, (url, command) in enumerate(commands.items())
        }

    @property
    def has_failed(self) -> bool:
        """Whether all of them have failed to start too often."""
        return all(replica.has_failed for replica in self._replicas.values())

    def silent(self, url: str, num_times: int) -> None:
        """End one that will not go on by itself: then it is started again."""
        if num_times >= _FROZEN_TIMES and url in self._replicas:
            self._replicas[url].kill_frozen()

    def reload(self) -> None:
        """Have the replicas read their API keys anew, as this process has."""
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
    """One child, and the thread that waits for its end."""

    def __init__(self, index: int, command: list[str], environment: dict[str, str]) -> None:
        self._index, self._command, self._environment = index, command, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopping = threading.Event()
        self._lock = threading.Lock()  # a child is started, or told to stop
        self._thread = threading.Thread(target=self._run, name=f"octavo-replica-{index}", daemon=True)
        self._has_failed = False

    @property
    def has_failed(self) -> bool:
        """Whether it does not run, and was never well."""
        return self._has_failed and self._process is not None and self._process.poll() is not None

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def tell_to_stop(self) -> None:
        """Tell the child to end, and start it no more."""
        with self._lock:
            self._is_stopping.set()
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)

    def reload(self) -> None:
        """Have the child read its API keys anew; one that is just started reads them anyway."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGHUP)

    def kill_frozen(self) -> None:
        """Kill the child, if it runs."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                logger.error("replica %d says nothing any more: it is killed", self._index)
                self._process.kill()

    def join(self) -> None:
        """Wait for its end; one that does not end in time is killed."""
        self._thread.join(_STOP_S)
        if self._thread.is_alive() and self._process is not None:
            logger.warning("replica %d does not end: it is killed", self._index)
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
            # a wrong option is wrong the next time as well
            self._has_failed = num_failed >= _MAX_FAILED_STARTS or (num_failed > 0 and status in {1, 2})
            logger.error("replica %d has ended with %d; it is started again in %g s", self._index, status, pause)
            self._is_stopping.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _run_once(self) -> int | None:
        """Run the child to its end; return its status, None where it was not to be started any more."""
        with self._lock:
            if self._is_stopping.is_set():
                return None
            self._process = subprocess.Popen(  # noqa: S603 - octavo itself, with the options of this process
                self._command, stdin=subprocess.PIPE, env=self._environment, start_new_session=True
            )
        with self._process as process:
            return process.wait()


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback address that nobody listens on, all different."""
    socks = [socket.socket() for _ in range(count)]
    try:
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in socks]
    finally:
        for sock in socks:
            sock.close()
