"""`octavo serve --replicas` and `octavo route` as processes: killed, frozen and restarted under load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import httpx
import psutil
import pytest
from router.streams import ask_many, event, stream_engine
from serving_process import DEADLINE_S, STORY

from octavo.http.listening import allow_open_files
from octavo.http.tenants import Tenant, add_key, remove_key

TERMINAL_S = 10.0
pytestmark = pytest.mark.xdist_group("replicas")  # the tests share the replicas of one fixture
SMALL = ("--max-num-seqs", "8", "--num-gpu-blocks-override", "400")


@contextlib.contextmanager
def started(*words: str):
    """Run an octavo command on a free port. Yield its process and a client."""
    command = [sys.executable, "-m", "octavo", *words, "--port", "0", "--shutdown-timeout", "0"]
    environment = {**os.environ, "OCTAVO_API_KEY": ""}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        log: list[str] = []
        reader = threading.Thread(target=log.extend, args=[process.stderr], daemon=True)
        reader.start()
        try:
            url = wait(lambda: next(filter(None, (re.search(r"at (http\S+)/v1", line) for line in log)), None), log)[1]
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None)
            with httpx.Client(base_url=url, timeout=DEADLINE_S, trust_env=False, limits=limits) as http:
                yield process, http
        finally:
            for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.resume()
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def wait(condition, what: object, seconds: float = DEADLINE_S):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    raise TimeoutError(str(what))


def num_ready(http: httpx.Client) -> int:
    return sum(engine["ready"] for engine in http.get("/router/engines").json()["engines"])


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


class Load:
    """Parallel streams, and how each of them ended."""

    def __init__(self, http: httpx.Client, count: int) -> None:
        self.ends: list[str] = []
        self.texts: list[str] = []
        self._http = http
        self._num_begun = 0
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()
        wait(lambda: self._num_begun == count, "all have begun")

    def _ask(self) -> None:
        with self._http.stream("POST", "/v1/completions", json={**STORY, "max_tokens": 600}) as answer:
            lines = []
            for line in answer.iter_lines():
                if line:
                    self._num_begun += not lines
                    lines.append(line)
        self.ends.append("error" if '"error"' in lines[-2] else "whole" if lines[-1] == "data: [DONE]" else "cut")

    def ended_within(self, seconds: float) -> list[str]:
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0))
        assert not any(thread.is_alive() for thread in self._threads), "a request has not ended"
        return self.ends


@pytest.fixture(scope="module")
def replicas():
    with started("serve", "--replicas", "2", *SMALL) as (process, http):
        wait(lambda: num_ready(http) == 2, "both are ready")
        yield process, http


def num_restarts(http: httpx.Client) -> int:
    return sum(engine["restarts"] for engine in http.get("/router/engines").json()["engines"])


def has_lost_one(http: httpx.Client, num_before: int) -> bool:
    return num_ready(http) < 2 or num_restarts(http) > num_before


def servers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children()


def test_replicas_sample_different_tokens_without_seed(replicas):
    _, http = replicas
    texts = set()
    for engine in http.get("/router/engines").json()["engines"]:
        body = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 1.0}
        texts.add(
            httpx.post(engine["url"] + "/v1/completions", json=body, trust_env=False).json()["choices"][0]["text"]
        )
    assert len(texts) == 2


@pytest.mark.sweep(8)
@pytest.mark.parametrize("trouble", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("num", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_killed_or_frozen_replica_under_load_ends_every_stream(replicas, trouble, num):
    process, http = replicas
    for _ in range(num):
        wait(lambda: num_ready(http) == 2, "both are ready")
        num_before = num_restarts(http)
        load = Load(http, 6)
        victim = servers(process)[0]
        family = [victim, *victim.children(recursive=True)]
        for each in family if trouble == signal.SIGSTOP else [victim]:
            each.send_signal(trouble)
        ends = load.ended_within(TERMINAL_S)
        assert set(ends) <= {"whole", "error"}
        assert http.post("/v1/completions", json={**STORY, "max_tokens": 4, "stream": False}).status_code == 200
        if trouble == signal.SIGKILL:  # the router may still count the killed one as ready
            wait(partial(has_lost_one, http, num_before), "the router has noticed")
        for each in family if trouble == signal.SIGSTOP else ():
            each.resume()


@pytest.mark.slow
def test_replica_processes_exit_after_parent_is_killed():
    with started("serve", "--replicas", "2", *SMALL) as (process, http):
        wait(lambda: num_ready(http) >= 1, "one is ready")
        family = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert len(family) >= 3
        process.kill()
        wait(lambda: all(map(is_gone, family)), "no orphan is left", TERMINAL_S + 10)


@pytest.mark.turn(12)
def test_separate_router_can_be_stopped_and_restarted(replicas):
    _, http = replicas
    named = [word for engine in http.get("/router/engines").json()["engines"] for word in ("--engine", engine["url"])]
    for _ in range(2):
        with started("route", *named) as (router, routed):
            wait(lambda: num_ready(routed) == 2, "it has found both")
            load = Load(routed, 4)
            router.terminate()
            assert set(load.ended_within(TERMINAL_S)) <= {"whole", "error"}
            assert router.wait(TERMINAL_S) == 0


@pytest.mark.slow
def test_sighup_reloads_key_file_in_router_and_replicas(tmp_path):
    """The router may read the replicas' metrics, clients' keys may not. SIGHUP makes all processes reload the file."""
    path = tmp_path / "keys.toml"
    plain, operator = (add_key(path, Tenant(name=f"k{may}", read_metrics=bool(may))) for may in (0, 1))

    def status(key: str) -> int:
        body = {"prompt": "Once", "max_tokens": 1}
        return http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}).status_code

    with started("serve", "--replicas", "2", *SMALL, "--api-keys", str(path)) as (process, http):
        http.headers["Authorization"] = f"Bearer {operator}"
        wait(lambda: num_ready(http) == 2, "both are ready")
        assert [engine["models"] for engine in http.get("/router/engines").json()["engines"]] == [["octavo-demo"]] * 2
        pids = [child.pid for child in servers(process)]
        assert status(plain) == 200
        remove_key(path, "k0")
        new = add_key(path, Tenant(name="new"))
        process.send_signal(signal.SIGHUP)
        wait(lambda: status(plain) == 401, "the router has read it")
        wait(lambda: [status(new) for _ in range(4)] == [200] * 4, "so have the replicas")
        assert [child.pid for child in servers(process)] == pids, "none was started anew"


@pytest.mark.slow
def test_thousand_concurrent_streams_pass_router_completely():
    with stream_engine() as (url, _), started("route", "--engine", url, "--health-timeout", "60") as (_, http):
        wait(lambda: num_ready(http) == 1, "it has found the engine")
        allow_open_files(1000, files_each=2)
        answers = asyncio.run(ask_many(str(http.base_url).rstrip("/"), 1000, 20))
        assert answers == [[event(f"s{index}", number, 20) for number in range(20)] for index in range(1000)]
