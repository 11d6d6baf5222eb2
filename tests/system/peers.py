"""Programs of others, each in front of two octavo engines with the built-in model.

`make peers` fetches them into environments below build/peers (tools/fetch_peers.py).
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest
from programs import Stage, free_port, octavo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from programs import Program

START_S = 600.0  # Ray Serve's processes import SGLang, each for half a minute on a busy machine
SMALL = ("--num-threads", "1", "--num-gpu-blocks-override", "800", "--max-num-seqs", "16", "--seed", "3")
_PEERS_DIR = Path(__file__).parents[2] / "build/peers"


def environment_of(name: str) -> Path:
    """Return the folder of a peer's commands. Without the peer the test is skipped."""
    folder = _PEERS_DIR / name
    if not (folder / "installed.txt").exists():
        pytest.skip(f"it needs {name}, which `make peers` has not fetched")
    return folder / "bin"


class Front:
    """A peer that answers at an address, and the processes of its two engines."""

    name = ""

    def __init__(self, stage: Stage, url: str, served: Callable[[], list[psutil.Process]]) -> None:
        self.stage = stage
        self.http = httpx.Client(base_url=url, timeout=120, trust_env=False, limits=httpx.Limits(max_connections=None))
        self._served = served

    def servers(self) -> list[psutil.Process]:
        """Return the processes that own an engine's core, each with its core as a child."""
        return self._served()

    def cores(self) -> list[psutil.Process]:
        """Return the processes that compute."""
        found = []
        for process in self.stage.processes():
            with contextlib.suppress(psutil.Error):
                if "octavo.startup.engine_main" in process.cmdline():
                    found.append(process)
        return found

    def cpu_seconds(self) -> float:
        """Return the CPU time of all cores."""
        return sum(sum(process.cpu_times()[:2]) for process in self.cores())

    def has_ended(self) -> bool:
        """Return True if one of the programs has ended."""
        return any(program.process.poll() is not None for program in self.stage.programs)

    def is_answering(self) -> bool:
        with contextlib.suppress(httpx.TransportError, KeyError):
            return self.http.post("/v1/completions", json=body("Once", max_tokens=1)).status_code == 200
        return False

    def log(self) -> str:
        return "\n".join(program.log[-3000:] for program in self.stage.programs)


def body(prompt: str, **more: object) -> dict[str, object]:
    """Return a greedy request for a completion."""
    return {"model": "octavo-demo", "prompt": prompt, "temperature": 0.0, "max_tokens": 24, **more}


def wait_for(condition: Callable[[], object], front: Front, seconds: float = START_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(front.log())
        time.sleep(0.1)


@contextlib.contextmanager
def started(name: str) -> Iterator[Front]:
    """Run a peer and two engines. Yield once it answers."""
    folder = environment_of(name.removesuffix("_direct"))
    with Stage() as stage:
        front = _STARTS[name](stage, folder)
        front.name = name
        try:
            wait_for(lambda: front.has_ended() or (len(front.servers()) == 2 and front.is_answering()), front)
            if front.has_ended():
                raise RuntimeError(front.log())
            yield front
        finally:
            front.http.close()


def _of(programs: list[Program]) -> Callable[[], list[psutil.Process]]:
    return lambda: [psutil.Process(each.process.pid) for each in programs if each.process.poll() is None]


def _start_smg(stage: Stage, folder: Path) -> Front:
    ports = [free_port(), free_port()]
    engines = [stage.run(*octavo("serve", "--port", str(port), *SMALL)) for port in ports]
    for port in ports:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            wait_for(lambda http=http: _is_ready(http), Front(stage, "http://127.0.0.1", list))
    port = free_port()
    words = ["--policy", "cache_aware", "--health-check-interval-secs", "1", "--load-monitor-interval", "1"]
    words += ["--prometheus-port", str(free_port())]
    urls = [f"http://127.0.0.1:{each}" for each in ports]
    stage.run(str(folder / "smg"), "launch", "--host", "127.0.0.1", "--port", str(port), *words, "--worker-urls", *urls)
    return Front(stage, f"http://127.0.0.1:{port}", _of(engines))


def _is_ready(http: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return http.get("/ready").status_code == 200
    return False


def _start_dynamo(stage: Stage, folder: Path) -> Front:
    python, port = str(folder / "python"), free_port()
    variables = {"DYN_DISCOVERY_BACKEND": "file", "DYN_EVENT_PLANE": "zmq", "DYN_FILE_KV": stage.folder}
    variables |= {"DYN_REQUEST_PLANE": "tcp", "DYN_TCP_RPC_HOST": "127.0.0.1"}
    engines = [stage.run(python, "-m", "octavo.dynamo", *SMALL, **variables) for _ in range(2)]
    words = ["--http-host", "127.0.0.1", "--http-port", str(port), "--router-mode", "kv"]
    stage.run(python, "-m", "dynamo.frontend", *words, **variables)
    return Front(stage, f"http://127.0.0.1:{port}", _of(engines))


def _start_ray_serve(stage: Stage, folder: Path, **more: str) -> Front:
    port = free_port()
    script = str(Path(__file__).with_name("ray_serve_app.py"))
    patience = {f"RAY_SERVE_PROXY_{what}_TIMEOUT_S": "120" for what in ("READY_CHECK", "HEALTH_CHECK")}
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", **patience, **more}
    stage.run(str(folder / "python"), script, str(port), stage.folder, **variables)

    def replicas() -> list[psutil.Process]:
        return [parent for core in Front.cores(front) if (parent := core.parent()) is not None]

    front = Front(stage, f"http://127.0.0.1:{port}", replicas)
    return front


def _start_ray_direct(stage: Stage, folder: Path) -> Front:
    """Start Ray Serve LLM without its ingress: HAProxy sends HTTP requests to the replicas."""
    more = {"RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1", "RAY_SERVE_ENABLE_HA_PROXY": "1"}
    return _start_ray_serve(stage, folder, **more)


_STARTS = {
    "smg": _start_smg,
    "dynamo": _start_dynamo,
    "ray_serve": _start_ray_serve,
    "ray_serve_direct": _start_ray_direct,
}
