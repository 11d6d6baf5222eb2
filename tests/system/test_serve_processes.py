"""`octavo serve` as a user starts it, on the built-in model: both of its processes are killed, frozen and told to end.

Figure 4 of the house's promises: every request terminal within 10 s, not ready within 5 s, no orphans, right tokens.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest

DEADLINE_S = 90  # of a start on a busy machine
STORY = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "temperature": 0.0, "stream": True}
SUM = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "max_tokens": 32, "temperature": 0.0}


class Served:
    """A server process and the engine process that it started."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.log: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        address = self._wait(
            lambda: next(filter(None, (re.search(r"at (http\S+)/v1", line) for line in self.log)), None)
        )
        self.http = httpx.Client(base_url=address[1], timeout=DEADLINE_S, trust_env=False)
        self._wait(self.is_ready)

    def _read(self) -> None:
        with contextlib.suppress(ValueError):
            self.log.extend(self.process.stderr)

    def _wait(self, condition):
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

    def wait_until(self, condition, seconds: float) -> None:
        start = time.monotonic()
        self._wait(condition)
        assert time.monotonic() - start < seconds

    @property
    def engine(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def answer(self) -> str:
        return self.http.post("/v1/chat/completions", json=SUM).json()["choices"][0]["message"]["content"]


@pytest.fixture
def served():
    command = [sys.executable, "-m", "octavo", "serve", "--port", "0", "--shutdown-timeout", "0"]
    environment = {**os.environ, "OCTAVO_API_KEY": ""}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        server = None
        try:
            server = Served(process)
            yield server
        finally:
            if server is not None:
                server.http.close()
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


class Stream:
    """Reads a story in a thread; `events` are the data lines."""

    def __init__(self, served: Served) -> None:
        self.events: list[str] = []
        self.failure: Exception | None = None
        self._served = served
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        served._wait(lambda: len(self.events) > 3)

    def _read(self) -> None:
        try:
            with self._served.http.stream("POST", "/v1/completions", json=STORY) as response:
                self.events += (line.removeprefix("data: ") for line in response.iter_lines() if line)
        except httpx.TransportError as error:
            self.failure = error

    def ended_within(self, seconds: float) -> None:
        self._thread.join(seconds)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP], ids=str)
def test_figure_4_an_engine_that_dies_or_freezes(served, kind):
    assert served.answer() == "12 + 30 = 42"
    streams, engine = [Stream(served) for _ in range(3)], served.engine
    engine.send_signal(kind)
    served.wait_until(lambda: not served.is_ready(), 5)
    for stream in streams:
        stream.ended_within(10)
        assert stream.events[-1] == "[DONE]"
        error = json.loads(stream.events[-2])["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_restarting")
    assert served.http.get("/health").status_code == 200
    served._wait(served.is_ready)
    assert served.engine.pid != engine.pid
    assert served.answer() == "12 + 30 = 42"
    assert not psutil.pid_exists(engine.pid)


def test_f25_a_killed_server_leaves_no_engine_behind(served):
    stream, engine = Stream(served), served.engine
    served.process.kill()
    stream.ended_within(10)
    engine.wait(5)


def test_f26_a_server_that_is_told_to_end_ends_its_streams_and_its_engine(served):
    stream, engine = Stream(served), served.engine
    served.process.send_signal(signal.SIGTERM)
    stream.ended_within(15)
    assert stream.events[-1] == "[DONE]"
    assert json.loads(stream.events[-2])["choices"][0]["finish_reason"] == "abort"
    assert served.process.wait(10) == 0
    assert not engine.is_running()
