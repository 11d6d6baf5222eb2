"""Recipes of docs/production.md, run by a shell as they are, on the built-in model. Only the ports are replaced."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import httpx
import psutil
import pytest
from mooncake_master import needs_mooncake

from octavo.router.launcher import free_ports

PAGE = Path(__file__).parents[2] / "docs" / "production.md"
DEADLINE_S = 90
PROMPT = {"prompt": "Once upon a time there was a tree. " * 40, "max_tokens": 8, "temperature": 0.0}
PORT = re.compile(r"(?<=--port )\d+|(?<=127\.0\.0\.1:)\d+")


def recipe(title: str) -> str:
    """Return the commands below a heading."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    [block] = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    return block


class Pasted:
    """A running recipe. http: a client of its port 8000."""

    def __init__(self, title: str, directory: Path) -> None:
        ports = iter(free_ports(8))
        self.ports: dict[str, int] = defaultdict(lambda: next(ports))
        script = directory / "recipe"
        # The script waits for its background processes, as an interactive shell would.
        script.write_text(PORT.sub(lambda found: str(self.ports[found[0]]), recipe(title)) + "\nwait\n")
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OCTAVO_API_KEY": "",
            "OCTAVO_SERVE_PORT": str(self.ports["8000"]),  # used if no port is given
        }
        self._log = directory / "log"
        with self._log.open("w") as log:
            self._shell = subprocess.Popen(["bash", script], cwd=directory, env=environment, stdout=log, stderr=log)
        self.http = self.client("8000")

    def client(self, port: str) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.ports[port]}", timeout=DEADLINE_S, trust_env=False)

    def wait_until(self, condition, what: str):
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            with contextlib.suppress(httpx.TransportError):
                if found := condition():
                    return found
            if self._shell.poll() is not None:
                break
            time.sleep(0.05)
        raise TimeoutError(f"{what}: {self._log.read_text()[-4000:]}")

    def wait_ready(self) -> None:
        self.wait_until(lambda: self.http.get("/ready").status_code == 200, "it is ready")

    def ask(self) -> str:
        answer = self.http.post("/v1/completions", json=PROMPT).raise_for_status().json()
        return answer["choices"][0]["text"]

    def end(self) -> None:
        self.http.close()
        family = psutil.Process(self._shell.pid).children(recursive=True) if self._shell.poll() is None else []
        started = psutil.Process(self._shell.pid).children() if family else []
        for each in started:
            each.terminate()
        _, alive = psutil.wait_procs(family, timeout=30)
        for each in alive:
            each.kill()
        self._shell.kill()
        self._shell.wait()
        assert not alive, f"these do not end: {alive}"


@contextlib.contextmanager
def pasted(title: str, directory: Path):
    running = Pasted(title, directory)
    try:
        running.wait_ready()
        yield running
    finally:
        running.end()


def figure(http: httpx.Client, name: str) -> float:
    """Return the sum of a figure over its labels."""
    text = http.get("/metrics").text
    return sum(float(value) for value in re.findall(rf"^octavo:{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))


def engines(running: Pasted) -> list[dict]:
    return running.http.get("/router/engines").json()["engines"]


def num_ready(running: Pasted) -> int:
    return sum(engine["ready"] for engine in engines(running))


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return the answer of one engine with an empty disk store, and the directory of that store."""
    directory = tmp_path_factory.mktemp("alone")
    with pasted("A warm disk", directory) as running:
        text = running.ask()
        running.wait_until(lambda: list((directory / "kv").glob("*.kv")), "something is saved")
        assert figure(running.http, "kv_load_tokens_total") == 0
    return text, directory


@pytest.mark.turn(16)
def test_restarted_engine_of_warm_disk_recipe_loads_kv_from_disk(expected):
    text, directory = expected
    with pasted("A warm disk", directory) as running:
        assert running.ask() == text
        running.wait_until(lambda: figure(running.http, "kv_load_tokens_total") > 300, "figures come behind the answer")


@pytest.mark.slow
def test_router_of_replica_recipe_keeps_prompt_on_one_engine(expected, tmp_path):
    with pasted("Two replicas with a router", tmp_path) as running:
        running.wait_until(lambda: num_ready(running) == 2, "both are ready")
        assert [running.ask(), running.ask()] == [expected[0]] * 2
        assert "octavo router" in running.http.get("/router").text
        running.wait_until(lambda: figure(running.http, "router_cached_tokens_total") > 300, "it stayed where it was")


@needs_mooncake
@pytest.mark.slow
def test_decode_engine_of_paired_recipe_loads_kv_of_prefill_engine(expected, tmp_path):
    with pasted("Prompts on one engine, answers on another", tmp_path) as running:
        running.wait_until(lambda: num_ready(running) == 2, "both are ready")
        assert {engine["role"] for engine in engines(running)} == {"prefill", "decode"}
        assert running.ask() == expected[0]
        with running.client("8002") as decode:
            running.wait_until(lambda: figure(decode, "kv_load_tokens_total") > 300, "KV has come")
        assert figure(running.http, "router_paired_requests_total") == 1
        assert figure(running.http, "router_failed_prefills_total") == 0
