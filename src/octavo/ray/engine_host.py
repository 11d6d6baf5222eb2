"""An actor that runs an engine on its node."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import ray

from octavo import __version__
from octavo.config import environment_of_engine
from octavo.ray.fetch import fetch
from octavo.router.launcher import free_ports

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LOOK_S = 0.25
_SILENT_S = 20.0  # without a beat of the driver
_EXIT_S = 5.0
_ANSWER_S = 5.0
_NUM_LINES = 5  # of an engine's log, in the reason of its end


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all nodes."""
    return {
        "octavo": __version__,
        "Python": "{}.{}".format(*sys.version_info),
        "Ray": ray.__version__,
    }


class EngineHost:
    """Runs one engine as a child process.

    The engine ends if the actor ends, if Ray ends on the node, or if the driver has sent no beat for 20 s.
    """

    def __init__(self) -> None:
        self._raylet = os.getppid()
        self._heard_at = time.monotonic()
        self._process: subprocess.Popen[str] | None = None
        self._lines: collections.deque[str] = collections.deque(maxlen=_NUM_LINES)
        self._url = ""
        self._is_listed = False
        threading.Thread(target=self._watch, name="octavo-node-watch", daemon=True).start()

    def start(self, words: Sequence[str], environment: Mapping[str, str], wanted: Mapping[str, str]) -> tuple[str, str]:
        """Start the engine. Return its address, or "" and the reason.

        wanted: Versions of the driver.
        """
        host = ray.util.get_node_ip_address()
        for name, version in versions().items():
            if version != wanted[name]:
                return "", f"the node {host} has {name} {version}, and this command has {wanted[name]}"
        (port,) = free_ports(1, host)
        self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        command = [sys.executable, "-m", "octavo.cli.replica", "serve", *words, "--host", host, "--port", str(port)]
        self._process = subprocess.Popen(  # noqa: S603 - octavo itself
            command,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment_of_engine(environment),
            start_new_session=True,
        )
        self._is_listed = True
        threading.Thread(target=self._copy_log, args=[self._process], name="octavo-log", daemon=True).start()
        return self._url, ""

    def ready(self) -> bool:
        """Wait until the engine is ready, or has ended. Return True if it is ready."""
        while self._process is not None and self._process.poll() is None:
            if fetch(f"{self._url}/ready", None, _ANSWER_S) is not None:
                return True
            time.sleep(_LOOK_S)
        return False

    def ended(self) -> str:
        """Wait until the engine has ended. Return the reason."""
        if self._process is None:
            return "it has not started"
        status = self._process.wait()
        return f"it exited with status {status}" + "".join(f"\n    {line}" for line in self._lines)

    def url(self) -> str | None:
        """Return the engine's address while it accepts requests, or else None."""
        return self._url if self._is_listed else None

    def unlist(self) -> None:
        """Hide the address from routers."""
        self._is_listed = False

    def signal(self, number: int) -> None:
        """Send a signal to the engine."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def beat(self) -> None:
        """Note that the driver runs."""
        self._heard_at = time.monotonic()

    def _watch(self) -> None:
        while os.getppid() == self._raylet and time.monotonic() - self._heard_at < _SILENT_S:
            time.sleep(_LOOK_S)
        self._is_listed = False
        if self._process is not None:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_S)
            self._process.kill()
        os._exit(1)

    def _copy_log(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self._lines.append(line.rstrip())
            sys.stderr.write(line)
            sys.stderr.flush()
