"""Start `octavo serve` as a user does, with the built-in model, and read its streams. For tests and tools."""

from __future__ import annotations

import contextlib
import json
import os
import re
import ssl
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FoundT = TypeVar("FoundT")
DEADLINE_S = 90  # for a start on a busy machine
STORY: dict[str, Any] = {
    "prompt": "Once upon a time",
    "max_tokens": 2000,
    "ignore_eos": True,
    "temperature": 0.0,
    "stream": True,
}
SUM = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "max_tokens": 32, "temperature": 0.0}


class Served:
    """A server process, and the engine process that it started."""

    def __init__(self, process: subprocess.Popen[str], key: str | None, certificate: str | None) -> None:
        self.process = process
        self.log: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        address = self.wait_for(
            lambda: next(filter(None, (re.search(r"at (http\S+)/v1", line) for line in self.log)), None)
        )
        verify: bool | ssl.SSLContext = True if certificate is None else ssl.create_default_context(cafile=certificate)
        # Several threads use it: otherwise httpcore's pool closes connections that are assigned to a request (its issue
        # 1110).
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None)
        self.http = httpx.Client(base_url=address[1], timeout=DEADLINE_S, trust_env=False, verify=verify, limits=limits)
        if key is not None:
            self.http.headers["Authorization"] = f"Bearer {key}"
        self.wait_for(self.is_ready)

    def _read(self) -> None:
        if self.process.stderr is not None:
            with contextlib.suppress(ValueError):
                self.log.extend(self.process.stderr)

    def wait_for(self, condition: Callable[[], FoundT | None]) -> FoundT:
        """Return the first true value of condition. Raises if the process ends or after `DEADLINE_S`."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError("".join(self.log))
            if found := condition():
                return found
            time.sleep(0.02)
        raise TimeoutError("".join(self.log))

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.http.get("/ready").status_code == 200
        return False

    def wait_until(self, condition: Callable[[], object], seconds: float) -> None:
        start = time.monotonic()
        self.wait_for(condition)
        if (took := time.monotonic() - start) >= seconds:
            raise AssertionError(f"it took {took:.1f} s, which may be {seconds:g}")

    @property
    def engine(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def wait_for_engine(self, other_than: psutil.Process) -> psutil.Process:
        """Return the engine that replaces a killed one."""

        def find() -> psutil.Process | None:
            children = psutil.Process(self.process.pid).children()
            return next((child for child in children if child.pid != other_than.pid), None)

        return self.wait_for(find)

    def answer(self) -> str:
        """Return the answer to `SUM`."""
        return str(self.http.post("/v1/chat/completions", json=SUM).json()["choices"][0]["message"]["content"])


@contextlib.contextmanager
def serve(
    *options: str,
    key: str | None = None,
    certificate: str | None = None,
    python: str = sys.executable,
    **variables: str,
) -> Iterator[Served]:
    """Run `octavo serve` on a free port, with additional environment variables.

    key, certificate: for the client. python: the interpreter that has octavo installed.
    """
    command = [python, "-m", "octavo", "serve", "--port", "0", "--shutdown-timeout", "0", *options]
    environment = {**os.environ, "OCTAVO_API_KEY": "", **variables}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        server = None
        try:
            server = Served(process, key, certificate)
            yield server
        finally:
            if server is not None:
                server.http.close()
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


@contextlib.contextmanager
def serve_lasting(*options: str, **more: Any) -> Iterator[Callable[[], Served]]:
    """Yield a function that returns a running server: the existing one, or a new one if a test has ended it."""
    with contextlib.ExitStack() as stack:
        servers: list[Served] = []

        def running() -> Served:
            if not servers or servers[-1].process.poll() is not None:
                servers.append(stack.enter_context(serve(*options, **more)))
            return servers[-1]

        yield running


class Stream:
    """Reads a story in a thread, or many stories in parallel, which take longer. events: the data lines."""

    def __init__(self, served: Served, prompt: str = STORY["prompt"], num_stories: int = 1) -> None:
        self.events: list[str] = []
        self.failure: Exception | None = None
        self.prompt = prompt
        self._num_stories = num_stories
        self._served = served
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        served.wait_for(lambda: len(self.events) > 3)

    def _read(self) -> None:
        try:
            body = {**STORY, "prompt": self.prompt, "n": self._num_stories}
            with self._served.http.stream("POST", "/v1/completions", json=body) as response:
                self.events += (line.removeprefix("data: ") for line in response.iter_lines() if line)
        except httpx.TransportError as error:
            self.failure = error

    @property
    def text(self) -> str:
        """Return the text received so far."""
        told = [json.loads(event) for event in self.events if event != "[DONE]"]
        return "".join(choice["text"] for each in told for choice in each.get("choices", ()))

    def ended_within(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise AssertionError(f"the stream has not ended within {seconds:g} s")
