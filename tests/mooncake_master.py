"""A real `mooncake_master` of the package that octavo[mooncake] installs, on its own port."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import signal
import socket
import subprocess
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

_PACKAGE = importlib.util.find_spec("mooncake")
_IS_THERE = _PACKAGE is not None and ctypes.util.find_library("ibverbs") is not None
_IS_REQUIRED = os.environ.get("OCTAVO_REQUIRE_MOONCAKE", "0") not in {"", "0"}
needs_mooncake = pytest.mark.skipif(
    not _IS_THERE and not _IS_REQUIRED, reason="there is no Mooncake: octavo[mooncake] and the library libibverbs1"
)


class Master:
    """leases_ms: time for which a requested object is kept. clients_s: time for which a client may be silent."""

    def __init__(self, *, leases_ms: int = 2000, clients_s: int = 2) -> None:
        self.port, self.metrics_port = _free_port(), _free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._command = [
            str(Path(_PACKAGE.origin).parent / "mooncake_master"),
            f"--rpc_port={self.port}",
            "--rpc_address=127.0.0.1",
            f"--metrics_port={self.metrics_port}",
            f"--default_kv_lease_ttl={leases_ms}",
            f"--client_ttl={clients_s}",
        ]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with closing(socket.socket()) as probe, suppress(OSError):
                probe.connect(("127.0.0.1", self.port))
                return
            time.sleep(0.02)
        self.kill()
        raise TimeoutError("mooncake_master does not listen")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
