"""Start and end an engine process."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import zmq

from octavo.config import SECRET_VARIABLES
from octavo.engine import ipc
from octavo.engine.health import Health
from octavo.runtime import logs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from octavo.config import EngineConfig
    from octavo.engine.health import Patience
    from octavo.errors import OctavoError

_STANDARD_ERROR = 2
_MOST_AT_ONCE = 1000


@dataclass(slots=True)
class CoreLife:
    """An engine process with its sockets. failure: Error that the process reported."""

    process: subprocess.Popen[bytes]
    folder: Path
    news: zmq.Socket[bytes]
    requests: zmq.Socket[bytes]
    health: Health
    born: float = field(default_factory=time.monotonic)
    ready_at: float | None = None
    failure: OctavoError | None = None

    @classmethod
    def begin(
        cls, context: zmq.Context[zmq.Socket[bytes]], command: Sequence[str], config: EngineConfig, patience: Patience
    ) -> CoreLife:
        """Start a process. Raises `ConfigError` and `OSError`."""
        with contextlib.ExitStack() as stack:
            folder = ipc.make_folder()
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            endpoints = [f"ipc://{folder / name}" for name in ("requests", "news")]
            requests = stack.enter_context(context.socket(zmq.PUSH))
            news = stack.enter_context(context.socket(zmq.PULL))
            requests.sndhwm = 0
            for socket, endpoint in zip((requests, news), endpoints, strict=True):
                socket.linger = 0
                socket.bind(endpoint)
            order = ipc.encode_launch(ipc.Launch(config, endpoints[0], endpoints[1], *logs.in_use()))
            environment = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
            process = subprocess.Popen(  # noqa: S603 - not from users
                command, stdin=subprocess.PIPE, stdout=_STANDARD_ERROR, env=environment, close_fds=True
            )
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(order)
                process.stdin.flush()
            stack.pop_all()
        return cls(process, folder, news, requests, Health(patience, time.monotonic()))

    @property
    def why_over(self) -> str | None:
        """How the process ended, or why it must be killed, or None."""
        if self.process.poll() is not None:
            return f"ended with status {self.process.returncode}"
        return self.health.why_given_up

    def send(self, message: bytes) -> bool:
        """Send a message. Return False if the process is not ready or not connected."""
        if self.ready_at is None:
            return False
        try:
            self.requests.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def received(self, wait_ms: int = 0) -> Iterator[bytes]:
        """Yield messages. Wait up to `wait_ms` for each."""
        for _ in range(_MOST_AT_ONCE):
            if not (self.news.poll(wait_ms) if wait_ms else int(self.news.get(zmq.EVENTS)) & zmq.POLLIN):
                return
            yield self.news.recv()

    def end(self) -> None:
        """Kill the process without waiting for its end, and remove its sockets."""
        self.process.kill()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        self.news.close(linger=0)
        self.requests.close(linger=0)
        shutil.rmtree(self.folder, ignore_errors=True)
