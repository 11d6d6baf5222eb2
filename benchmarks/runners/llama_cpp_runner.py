"""llama.cpp through its server, its only way of continuous batching. Standard library only."""

from __future__ import annotations

import atexit
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from protocol import Job, Request, run

if TYPE_CHECKING:
    from collections.abc import Sequence

# Number of slots, and KV tokens of all slots together. A single stream uses a server with one slot: with 64 slots in
# one unified cache, each prompt of C took longer than the one before.
_ONE, _MANY = (1, 2048), (32, 32 * 768)  # the longest request of B has 704 tokens
_START_S = 120


class LlamaCpp:
    """`llama-server` on a free port of this machine."""

    def __init__(self, job: Job) -> None:
        if job.binary is None:
            raise ValueError("the job names no llama-server")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.prefix_caching = job.prefix_caching
        threads = str(job.threads)
        slots, kv_tokens = _ONE if set(job.only) <= set("AC") else _MANY
        command = [
            job.binary, "-m", job.checkpoint, "--host", "127.0.0.1", "--port", str(port), "-t", threads, "-tb", threads,
            "-np", str(slots), "-c", str(kv_tokens), "--no-kv-unified", "-b", "2048", "-ub", "512", "-fa", "on",
            "--cache-ram", "0", "--no-webui",  # no copies of idle requests' KV in host memory
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        atexit.register(self.process.kill)
        self.wait()

    def wait(self) -> None:
        """Wait until the server is ready."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"llama-server ended with {self.process.returncode}")
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
            else:
                return
        raise TimeoutError(f"llama-server is not ready after {_START_S} s")

    def complete(self, request: Request) -> int:
        """Answer one request; return its number of tokens."""
        body: dict[str, Any] = {
            "prompt": request.prompt,
            "n_predict": request.out,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": self.prefix_caching,
        }
        message = urllib.request.Request(
            f"{self.url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(message) as answer:
                return int(json.load(answer)["tokens_predicted"])
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"llama-server answered {error.code}: {error.read().decode()}") from None

    def generate(self, requests: Sequence[Request]) -> list[int]:
        """Answer the requests; return the numbers of tokens."""
        with ThreadPoolExecutor(len(requests)) as threads:
            return list(threads.map(self.complete, requests))


if __name__ == "__main__":
    run(LlamaCpp)
