"""`octavo serve --launcher ray` on a real Ray cluster of several nodes, with a load of requests with known answers."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import psutil
from known_answers import Load, right_answers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

DEADLINE_S = 240.0  # Ray starts slowly on a busy machine
SMALL = ("--max-num-seqs", "8", "--num-gpu-blocks-override", "400", "--num-threads", "1", "--seed", "0")
ENGINE = "octavo.cli.replica"


class Command:
    """An octavo command that has a router, and its log."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.log: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        wait(lambda: self.url is not None or process.poll() is not None, self.log)
        if self.url is None:
            raise RuntimeError("".join(self.log))
        self.port = int(self.url.rpartition(":")[2])
        self.http = httpx.Client(base_url=self.url, timeout=30, trust_env=False)

    def _read(self) -> None:
        if self.process.stderr is not None:
            with contextlib.suppress(ValueError):
                self.log.extend(self.process.stderr)

    @property
    def url(self) -> str | None:
        found = next(filter(None, (re.search(r"at (http\S+)/v1", line) for line in self.log)), None)
        return None if found is None else found[1]

    def engines(self) -> dict[str, dict[str, Any]]:
        """Return the router's engines by address."""
        return {engine["url"]: engine for engine in self.http.get("/router/engines").json()["engines"]}

    def num_ready(self) -> int:
        return sum(engine["ready"] for engine in self.engines().values())

    def wait_ready(self, count: int) -> None:
        wait(lambda: self.num_ready() == count, self.log)


@contextlib.contextmanager
def octavo(*words: str, environment: Mapping[str, str]) -> Iterator[Command]:
    """Run an octavo command on a free port."""
    command = [sys.executable, "-m", "octavo", *words, "--port", "0", "--shutdown-timeout", "5"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**environment, "OCTAVO_API_KEY": ""}
    ) as process:
        running = None
        try:
            running = Command(process)
            yield running
        finally:
            if running is not None:
                running.http.close()
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(40)
            process.kill()


def wait(condition: Callable[[], Any], what: object, seconds: float = DEADLINE_S) -> Any:
    """Return the first true value of a condition."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    raise TimeoutError("".join(what) if isinstance(what, list) else str(what))


def engine_processes(node: int | None = None, folder: str = "") -> list[psutil.Process]:
    """Return the engines' server processes of the tests' clusters. node: Only children of this raylet's workers."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            is_engine = ENGINE in process.cmdline() and folder in process.environ().get("RAY_TMPDIR", "")
            if is_engine and (node is None or process.parent().ppid() == node):
                found.append(process)
    return found


class BackgroundLoad:
    """A `Load` in a thread of its own. Use with `with`."""

    def __init__(self, port: int, right: list[Any], num_clients: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.load = Load([port], right, num_clients)

    def __enter__(self) -> Load:
        self._thread.start()
        self._loop.call_soon_threadsafe(self.load.start)
        return self.load

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self.load.stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def known(port: int) -> list[Any]:
    """Return the right answers to all questions."""
    return asyncio.run(right_answers(port))
