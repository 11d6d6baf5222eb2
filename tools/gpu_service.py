"""A long load on an engine and a kill of a busy server: check for leaks, and for equal tokens after the restart."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_engine import fault, free, make_engine, random_model

from octavo import SamplingParams
from octavo.config import CacheConfig
from octavo.core import invariants
from octavo.data.events import RequestFinished, RequestPreempted, RequestQueued

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpu_device import Check, Entries

    from octavo import LLMEngine

MOST_GROWTH = 32 << 20  # bytes of memory, on the device and on the host, after the warm-up
_WARM_UP = 0.3  # of the time
_START_S = 240.0  # until a server is ready
_GONE_S = 20.0  # until its engine has ended after it


def soak(check: Check, entries: Entries) -> None:
    """Send requests for `soak_s`.

    Each must end once, no block may be lost, memory must not grow after a warm-up, and no step may compile a kernel.
    """
    entries.add("soak", partial(_soak, check))


def restart(check: Check, entries: Entries) -> None:
    """Kill a busy server, start it again, and compare its answers, including log probabilities."""
    missing = [name for name in ("uvicorn", "starlette", "zmq") if importlib.util.find_spec(name) is None]
    if missing:
        entries.add("killed", lambda: {"left_out": f"octavo[server] is not installed: no {', '.join(missing)}"})
        return
    entries.add("killed", partial(_killed, check))


class _Watch:
    """Counts how often each request began and ended."""

    def __init__(self) -> None:
        self.queued: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.num_preempted = 0

    def emit(self, event: Any) -> None:
        """Count the event."""
        match event:
            case RequestQueued():
                self.queued[event.request_id] += 1
            case RequestFinished():
                self.ended[event.request_id] += 1
            case RequestPreempted():
                self.num_preempted += 1


def _soak(check: Check) -> dict[str, Any]:
    free()
    watch, is_dry = _Watch(), check.is_dry
    num_blocks, block_size, swap_bytes = (4, 4, 1 << 20) if is_dry else (600, 16, 1 << 30)
    cache = CacheConfig(block_size=block_size, num_gpu_blocks=num_blocks, swap_space_bytes=swap_bytes)
    engine = make_engine(check, random_model(check), cache=cache, dry_kernels="auto", sink=watch)
    core: Any = engine.core
    start, levels = time.monotonic(), []
    sent, told, faults = Counter[str](), Counter[str](), list[str]()
    for share in (_WARM_UP, 1.0):
        faults += _load(check, engine, start + share * check.soak_s, sent, told)
        breaches = invariants.check(core.scheduler)
        free()
        levels.append(memory_levels(check))
    growth = [after - before for before, after in zip(*levels, strict=True)]
    num_compilations = core.metrics.stats.num_compilations
    found = {
        "is_right": True,
        "seconds": time.monotonic() - start,
        "num_requests": len(sent),
        "num_preempted": watch.num_preempted,
        "num_compilations": num_compilations,
        "device_growth_bytes": growth[0],
        "host_growth_bytes": growth[1],
    }
    engine.shutdown()
    wrong = wrong_ends(watch.queued, watch.ended) + wrong_ends(sent, told)
    wrong += faults + [str(breach) for breach in breaches]
    wrong += [f"memory grew by {each:,} bytes" for each in growth if each > MOST_GROWTH]
    wrong += [f"{num_compilations} kernels were compiled while serving"] if num_compilations else []
    return found | ({"is_right": False, "wrong": wrong[:10]} if wrong else {})


def wrong_ends(begun: Counter[str], ended: Counter[str]) -> list[str]:
    """Return the requests that did not begin and end exactly once."""
    return [
        f"{each} began {begun[each]} times and ended {ended[each]} times"
        for each in sorted({*begun, *ended})
        if (begun[each], ended[each]) != (1, 1)
    ]


def _load(check: Check, engine: LLMEngine, end: float, sent: Counter[str], told: Counter[str]) -> list[str]:
    """Send requests of all kinds until `end`, and abort some of them. Count the sent and the ended ones.

    Returns what is wrong with the answers to requests that were not aborted.
    The first requests are short, with the maximum concurrency: memory that grows with rows then has its full size.
    """
    rng, sizes = random.Random(len(sent)), check.sizes
    most = 2 * sizes.requests
    running, wanted, faults = set[str](), dict[str, int](), list[str]()
    while running or engine.has_unfinished_requests() or time.monotonic() < end:
        while len(running) < most and (len(sent) < most or time.monotonic() < end):
            number, is_first = len(sent), len(sent) < most
            request_id = str(number)
            sent[request_id] += 1
            prompt = [rng.randrange(5, 200) for _ in range(1 if is_first else rng.randint(1, sizes.longest_prompt))]
            wanted[request_id] = rng.randint(1, 2 * sizes.new_tokens)
            params = SamplingParams(
                temperature=rng.choice([0.0, 0.8]), top_p=rng.choice([1.0, 0.9]), top_k=rng.choice([0, 20]),
                seed=number, max_tokens=wanted[request_id], ignore_eos=True, detokenize=False,
                n=2 if is_first else rng.choice([1, 1, 2]),
            )  # fmt: skip
            engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
            running.add(request_id)
            if not is_first and rng.random() < 0.3:
                break
        if running and rng.random() < 0.05:
            aborted = rng.choice(sorted(running))
            engine.abort_request(aborted)
            wanted.pop(aborted, None)
        for output in engine.step():
            if output.finished:
                running.discard(output.request_id)
                told[output.request_id] += 1
                if (num_tokens := wanted.get(output.request_id)) and (found := fault(output, num_tokens)):
                    faults.append(found)
    return faults


def memory_levels(check: Check) -> tuple[int, int]:
    """Return the bytes that this process holds on the device and in host memory."""
    on_device = torch.cuda.memory_reserved(check.device) if check.device.type == "cuda" else 0
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return on_device, pages * os.sysconf("SC_PAGE_SIZE")


class _Server:
    """`octavo serve` in a process of its own."""

    def __init__(self, check: Check) -> None:
        options = ["--kernels", "auto", "--kv-cache-memory-bytes", "16M"] if check.is_dry else ["--kernels", "triton"]
        command = [sys.executable, "-m", "octavo", "serve", "--port", "0", "--host", "127.0.0.1"]
        command += ["--device", check.device.type, "--seed", "1", *options]
        environment = os.environ | {"OCTAVO_API_KEY": ""}
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
        )
        self._log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._address, self.engines = "", list[int]()
        start = time.monotonic()
        try:
            wait_until(self._is_ready, _START_S, "the server is ready")
        except BaseException:
            self.kill()
            raise
        self.start_s = time.monotonic() - start
        self.engines = children_of(self.process.pid)

    def _read(self) -> None:
        assert self.process.stderr is not None
        self._log.extend(self.process.stderr)

    def _is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError("the server ended: " + "".join(self._log)[-1500:])
        found = next(filter(None, (re.search(r" at (http\S+)/v1", line) for line in list(self._log))), None)
        if found is None:
            return False
        self._address = found[1]
        try:
            with _open(f"{self._address}/ready") as answer:
                return int(answer.status) == 200
        except OSError:
            return False

    def complete(self, prompt: list[int], max_tokens: int) -> Any:
        """Return the choices of a greedy completion, with log probabilities.

        Raises `RuntimeError` if one of them has another number of tokens than `max_tokens`.
        """
        with self._ask(prompt, max_tokens, logprobs=1) as answer:
            choices = json.load(answer)["choices"]
        for choice in choices:
            if choice["finish_reason"] != "length" or len(choice["logprobs"]["tokens"]) != max_tokens:
                raise RuntimeError(f"a completion of {max_tokens} tokens ended otherwise: {choice}")
        return choices

    def stream(self, prompt: list[int], max_tokens: int, num_choices: int) -> Iterator[str]:
        """Yield the events of a streamed completion, the last of which is "[DONE]"."""
        with self._ask(prompt, max_tokens, n=num_choices, stream=True) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    yield line.removeprefix(b"data: ").decode().strip()

    def _ask(self, prompt: list[int], max_tokens: int, **options: Any) -> Any:
        asked = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True} | options
        return _open(
            urllib.request.Request(
                f"{self._address}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
            )
        )

    def kill(self) -> None:
        """Kill the server, and wait until its engine has ended, too."""
        assert self.process.stderr is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        wait_until(lambda: not any(map(_is_alive, self.engines)), _GONE_S, "the engine of a killed server ends")
        self._reader.join(_GONE_S)  # it ends when the processes at the other end have ended
        self.process.stderr.close()


def _killed(check: Check) -> dict[str, Any]:
    """Compare the answers of a server, which is then killed while it streams, with those of the restarted server."""
    free()
    rng, sizes = random.Random(2), check.sizes
    prompts = [[rng.randrange(5, 900) for _ in range(rng.randint(1, sizes.longest_prompt))] for _ in range(4)]
    prompts = prompts[:1] if check.is_dry else prompts
    first = _Server(check)
    answers = []
    try:
        answers.append([first.complete(prompt, sizes.new_tokens) for prompt in prompts])
        clients = [_Client(first, prompt[:8]) for prompt in prompts]
        wait_until(lambda: all(each.has_begun or not each.is_alive() for each in clients), _START_S, "clients read")
    finally:
        first.kill()
    second = _Server(check)
    try:
        answers.append([second.complete(prompt, sizes.new_tokens) for prompt in prompts])
    finally:
        second.kill()
    for client in clients:
        client.join(_GONE_S)
    hang = sum(client.is_alive() for client in clients)
    lost = sum(client.is_lost for client in clients)
    found = {"is_equal": answers[0] == answers[1], "is_right": lost == len(prompts) and hang == 0}
    return found | {"num_lost": lost, "num_clients_that_hang": hang, "start_s": second.start_s}


class _Client(threading.Thread):
    """Reads a streamed completion from a server that is killed before the stream ends.

    has_begun: an event has arrived. is_lost: the stream broke off after that.
    """

    def __init__(self, server: _Server, prompt: list[int]) -> None:
        super().__init__(daemon=True)
        # Many long choices, so that they cannot end first. The built-in model has room for 2,048 tokens.
        self._events = server.stream(prompt, max_tokens=2000, num_choices=16)
        self.has_begun = self.is_lost = False
        self.start()

    def run(self) -> None:
        """Read the events until the stream ends or breaks off."""
        last = ""
        try:
            for last in self._events:  # noqa: B007 - the last one is used
                self.has_begun = True
        except (OSError, http.client.HTTPException):
            pass
        self.is_lost = self.has_begun and last != "[DONE]"


def wait_until(is_so: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until `is_so()` is true. Raises `TimeoutError` with `what` if it takes longer."""
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)


def children_of(pid: int) -> list[int]:
    """Return the ids of the child processes of a process."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in found for child in path.read_text(encoding="ascii").split()]


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _open(request: str | urllib.request.Request) -> Any:
    """Open a request without a proxy: the server runs on this machine."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=_START_S)
