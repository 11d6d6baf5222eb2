"""Processes of a test, each with all of its children: kill, freeze and restart them, and end all of them."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil

if TYPE_CHECKING:
    from collections.abc import Sequence

_MARK = "OCTAVO_TEST_STAGE"  # a variable that all processes of a stage inherit
_END_S = 15.0


def octavo(*words: str) -> list[str]:
    """Return the command line of an octavo command."""
    return [sys.executable, "-m", "octavo", *words]


def free_port() -> int:
    """Return an unused port of the loopback address."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_gone(process: psutil.Process) -> bool:
    """Return True if the process has ended. A zombie counts as ended."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Program:
    """A command that can be restarted with the same arguments. Its log goes to a file."""

    def __init__(self, command: Sequence[str], log: Path, environment: dict[str, str]) -> None:
        self._command, self._log, self._environment = list(command), log, environment
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start the command. Its previous process must have ended; this collects the exit status."""
        if self.process is not None:
            self.process.wait(_END_S)
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
            )

    def family(self) -> list[psutil.Process]:
        """Return the process and all of its descendants that run. They may end at any time."""
        first = psutil.Process(self.process.pid)
        return [each for each in (first, *first.children(recursive=True)) if not is_gone(each)]

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")


class Stage:
    """Programs that run until the end of the block. orphans: processes that had to be killed at the end."""

    def __init__(self) -> None:
        self._mark = secrets.token_hex(8)
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-test-")
        self.programs: list[Program] = []
        self.orphans: list[str] = []

    @property
    def folder(self) -> str:
        """A folder that is deleted at the end."""
        return self._folder.name

    def run(self, *command: str, **variables: str) -> Program:
        """Start a command with additional environment variables."""
        environment = {**os.environ, "OCTAVO_API_KEY": "", _MARK: self._mark, **variables}
        log = Path(self._folder.name) / f"{len(self.programs)}.log"
        self.programs.append(Program(command, log, environment))
        return self.programs[-1]

    def processes(self) -> list[psutil.Process]:
        """Return all processes that these programs have started, even if their parent has changed."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == self._mark and not is_gone(process):
                    found.append(process)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Terminate the programs, then kill the remaining processes and record them as orphans."""
        for process in self.processes():
            process.resume()
        for program in self.programs:
            program.process.terminate()
        for program in self.programs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.process.wait(_END_S)
        deadline = time.monotonic() + _END_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.orphans.append(" ".join(process.cmdline())[:200])
                process.kill()
        for program in self.programs:
            program.process.wait()
        self._folder.cleanup()
