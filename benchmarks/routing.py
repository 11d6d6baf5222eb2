"""The overhead of the router, and the cache hits of its policies.

    python benchmarks/routing.py cost        the time that the router adds to a request and to an event; many streams
    python benchmarks/routing.py prefixes    hit tokens and times to first tokens for each policy with 4 engines

`cost` sends requests to a simulated engine that sends events at a fixed interval (benchmarks/routing_peers.py),
directly and through the router in turns, and compares medians. It also measures a relay that only passes bytes on by
system calls, and plain uvicorn that sends the same events. `prefixes` starts 4 `octavo serve` with the built-in model
and a KV cache of 800 blocks, 2/7 of the blocks of all conversations together. For each policy it runs 64 new
conversations of 8 turns, 8 at a time, in a new random order for each turn. `--beside smg` runs the same with that
router (PyPI; the command or its path), with its policy cache_aware. `--dynamo PYTHON` runs `prefixes` with 4
`octavo.dynamo` and Dynamo's KV router, which learns from KV events. PYTHON is an interpreter with octavo and
ai-dynamo, such as that of `make peers`: build/peers/dynamo/bin/python.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import unittest.mock
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_ENGINES, NUM_CONVERSATIONS, NUM_TURNS, NUM_AT_ONCE = 4, 64, 8, 8
BODY = {"model": "m", "prompt": "Once upon a time", "max_tokens": 64, "stream": True}
_WORDS = ["the", "a", "cat", "dog", "house", "tree", "runs", "sleeps", "big", "small", "red", "river", "stone", "bird"]
SIZES = ("--num-threads", "1", "--num-gpu-blocks-override", "800", "--max-num-seqs", "16")
SERVE = ("-m", "octavo", "serve", "--log-level", "warning", *SIZES)
# By default Dynamo's router counts the blocks of running requests as load, which often outweighs a cached prefix here.
DYNAMO_OPTIONS = {"dynamo": (), "dynamo without active blocks": ("--no-router-track-active-blocks",)}
PEERS = str(Path(__file__).with_name("routing_peers.py"))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cost", "prefixes"])
    parser.add_argument("--events", type=int, default=2000, help="of a stream")
    parser.add_argument("--pause-us", type=int, default=1000, help="between two events")
    parser.add_argument("--streams", type=int, default=1000, help="at once, where many are asked for")
    parser.add_argument("--policies", nargs="*", default=["round_robin", "cache_aware"])
    parser.add_argument("--beside", metavar="SMG", help="its command")
    parser.add_argument("--dynamo", metavar="PYTHON", help="an interpreter with ai-dynamo")
    options = parser.parse_args()
    if options.what == "prefixes":
        prefixes(options)
    else:
        asyncio.run(cost(options))


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.contextmanager
def process(*command: str, ready: str | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process during the context, which begins when the address `ready` answers 200, by default at once."""
    environment = {**os.environ, "OCTAVO_API_KEY": ""}
    with subprocess.Popen(command, env=environment, stdout=sys.stderr) as started:
        try:
            if ready is not None:
                wait_for(ready)
            yield started
        finally:
            started.terminate()


def wait_for(url: str) -> None:
    """Wait until an address answers 200."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.1)
    raise TimeoutError(url)


@contextlib.contextmanager
def peer(what: str, *more: str) -> Iterator[tuple[str, int]]:
    """Run a peer of routing_peers.py during the context; yield its address and process id."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with process(sys.executable, PEERS, what, "--port", str(port), *more, ready=url + "/ready") as started:
        yield url, started.pid


@contextlib.contextmanager
def router(*urls: str, policy: str = "cache_aware") -> Iterator[tuple[str, int]]:
    """Run a router during the context; yield its address and process id."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    named = [word for each in urls for word in ("--engine", each)]
    quiet = ["--log-level", "warning"]
    command = [sys.executable, "-m", "octavo", "route", *named, "--policy", policy, "--port", str(port), *quiet]
    with process(*command, ready=url + "/ready") as started:
        yield url, started.pid


@contextlib.contextmanager
def smg(command: str, *urls: str) -> Iterator[tuple[str, int]]:
    """Run the router smg during the context; yield its address and process id."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = [command, "launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    words += ["--policy", "cache_aware", "--log-level", "error", "--worker-urls", *urls]
    with process(*words, ready=url + "/readiness") as started:
        yield url, started.pid


async def delays(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[float]:
    """Return the delay of each event in us."""
    found = []
    async with session.post(url + "/v1/completions", json=body) as answer:
        while chunk := await answer.content.readany():
            now = time.perf_counter_ns()
            found += [(now - int(sent)) / 1e3 for sent in re.findall(rb'"time": (\d+)', chunk)]
    return found


async def cost(options: argparse.Namespace) -> None:
    """Compare an engine directly, through the relay, and through routers, in turns."""
    with contextlib.ExitStack() as stack:
        direct, _ = stack.enter_context(peer("engine"))
        others = {
            "bytes passed on": stack.enter_context(peer("relay", "--to-port", direct.rpartition(":")[2])),
            "octavo": stack.enter_context(router(direct)),
        }
        if options.beside:
            others["smg"] = stack.enter_context(smg(options.beside, direct))
        plain = stack.enter_context(peer("uvicorn"))
        for _ in range(3):
            await requests_in_turns(direct, others)
            await events_in_turns(options, direct, others)
            print(f"plain uvicorn: {(await events(options, *plain))[1]} an event that it sends")
        for name, (url, pid) in others.items():
            if name != "bytes passed on":  # the relay takes one connection at a time
                await many_streams(options, name, url, pid)


async def requests_in_turns(direct: str, others: dict[str, tuple[str, int]]) -> None:
    """Compare the times of requests for one event."""
    urls = {"directly": direct, **{name: url for name, (url, _) in others.items()}}
    times: dict[str, list[float]] = {name: [] for name in urls}
    async with aiohttp.ClientSession() as session:
        for _ in range(300):
            for name, url in urls.items():
                start = time.perf_counter_ns()
                await delays(session, url, {**BODY, "max_tokens": 1})
                times[name].append((time.perf_counter_ns() - start) / 1e3)
    for name in others:
        print_difference(f"{name}: a request", times["directly"], times[name])


async def events(options: argparse.Namespace, url: str, pid: int) -> tuple[list[float], str]:
    """Return the delay of each event of a stream, and the CPU time of a process for each event."""
    body = {**BODY, "max_tokens": options.events, "pause_us": options.pause_us}
    async with aiohttp.ClientSession() as session:
        before = cpu_seconds(pid)
        found = await delays(session, url, body)
        return found, spent_us(pid, before, options.events)


async def events_in_turns(options: argparse.Namespace, direct: str, others: dict[str, tuple[str, int]]) -> None:
    """Compare the delays of events."""
    expected, _ = await events(options, direct, os.getpid())
    for name, (url, pid) in others.items():
        found, spent = await events(options, url, pid)
        print_difference(f"{name}: an event", expected, found)
        print(f"  {spent} an event")


async def many_streams(options: argparse.Namespace, name: str, url: str, pid: int) -> None:
    """Measure many concurrent streams."""
    many = {**BODY, "max_tokens": 50, "pause_us": 100_000}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        before, start = cpu_seconds(pid), time.perf_counter()
        all_of = await asyncio.gather(*(delays(session, url, many) for _ in range(options.streams)))
        whole = sum(len(each) == many["max_tokens"] for each in all_of)
        spent = spent_us(pid, before, sum(map(len, all_of)))
    print(
        f"{name}: {whole} of {options.streams} streams at once, {time.perf_counter() - start:.1f} s; {spent} an event, "
        "requests included"
    )


def print_difference(what: str, direct: list[float], routed: list[float]) -> None:
    """Print the medians in us, and their difference."""
    direct_p50, routed_p50 = statistics.median(direct), statistics.median(routed)
    print(
        f"{what}: {direct_p50:.0f} us directly, {routed_p50:.0f} us routed, {routed_p50 - direct_p50:.0f} us more (p50)"
    )


def cpu_seconds(pid: int) -> tuple[float, float]:
    """Return the CPU seconds of a process so far: user time and system time."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK"), int(fields[12]) / os.sysconf("SC_CLK_TCK")


def spent_us(pid: int, before: tuple[float, float], num_events: int) -> str:
    """Return a text with the CPU time for each event in us."""
    own, system = ((after - start) / num_events * 1e6 for after, start in zip(cpu_seconds(pid), before, strict=True))
    return f"{own:.1f} us of processor time in its own code and {system:.1f} us in system calls"


def words(rng: random.Random, count: int) -> str:
    """Return a text of short words."""
    return " ".join(rng.choice(_WORDS) for _ in range(count))


def prefixes(options: argparse.Namespace) -> None:
    """Run 64 conversations of 8 turns with each policy."""
    targets = [*options.policies, *(["smg"] if options.beside else []), *(DYNAMO_OPTIONS if options.dynamo else [])]
    for target in targets:
        with contextlib.ExitStack() as stack:
            if target in DYNAMO_OPTIONS:
                url = stack.enter_context(dynamo(options.dynamo, *DYNAMO_OPTIONS[target]))
            else:
                urls = [stack.enter_context(engine()) for _ in range(NUM_ENGINES)]
                front = smg(options.beside, *urls) if target == "smg" else router(*urls, policy=target)
                url, _ = stack.enter_context(front)
            result = asyncio.run(converse(url))
            times = sorted(result.times)
            p50, p99 = times[len(times) // 2], times[int(len(times) * 0.99)]
            print(
                f"{target}: {result.num_hit} of {result.num_tokens} tokens hit, TTFT p50 {p50 * 1e3:.0f} ms, p99 "
                f"{p99 * 1e3:.0f} ms, {result.num_failed} of {NUM_CONVERSATIONS * NUM_TURNS} requests failed",
                flush=True,
            )


@contextlib.contextmanager
def engine() -> Iterator[str]:
    """Run an engine during the context; yield its address."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    with process(sys.executable, *SERVE, "--port", str(port), ready=url + "/ready"):
        yield url


@contextlib.contextmanager
def dynamo(python: str, *more: str) -> Iterator[str]:
    """Run Dynamo's frontend with its KV router, and its workers; yield the address."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    with contextlib.ExitStack() as stack:
        planes = {"DYN_DISCOVERY_BACKEND": "file", "DYN_EVENT_PLANE": "zmq", "DYN_REQUEST_PLANE": "tcp"}
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        variables = {**planes, "DYN_FILE_KV": folder, "DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_LOG": "error"}
        stack.enter_context(unittest.mock.patch.dict(os.environ, variables))
        for _ in range(NUM_ENGINES):
            stack.enter_context(process(python, "-m", "octavo.dynamo", *SIZES))
        words = ("--http-host", "127.0.0.1", "--http-port", str(port), "--router-mode", "kv")
        words += ("--router-min-initial-workers", str(NUM_ENGINES), *more)
        stack.enter_context(process(python, "-m", "dynamo.frontend", *words, ready=url + "/v1/models"))
        while not json.loads(urllib.request.urlopen(url + "/v1/models").read())["data"]:
            time.sleep(0.1)
        yield url


@dataclass
class Conversed:
    """What the requests of all conversations got. times: to the first token, in seconds."""

    times: list[float] = field(default_factory=list)
    num_failed: int = 0
    num_tokens: int = 0
    num_hit: int = 0


async def converse(url: str) -> Conversed:
    """Run all conversations."""
    rng = random.Random(7)
    system = words(rng, 30)
    said = [[{"role": "system", "content": system}] for _ in range(NUM_CONVERSATIONS)]
    result = Conversed()
    places = asyncio.Semaphore(NUM_AT_ONCE)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def turn(messages: list[dict[str, str]]) -> None:
            async with places:
                body = {
                    "model": "octavo-demo",
                    "messages": messages,
                    "max_tokens": 8,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                    "temperature": 0,
                    "ignore_eos": True,
                }
                start, text = time.perf_counter(), ""
                async with session.post(url + "/v1/chat/completions", json=body) as answer:
                    async for line in answer.content:
                        delta = re.search(rb'"content":("(?:[^"\\]|\\.)+")', line)
                        if delta:
                            if not text:
                                result.times.append(time.perf_counter() - start)
                            text += json.loads(delta[1])
                        if b'"prompt_tokens":' in line:
                            usage = json.loads(line.removeprefix(b"data: "))["usage"]
                            result.num_tokens += usage["prompt_tokens"]
                            result.num_hit += usage["prompt_tokens_details"]["cached_tokens"]
                    result.num_failed += answer.status != 200
                messages.append({"role": "assistant", "content": text})

        for _ in range(NUM_TURNS):
            for messages in said:
                messages.append({"role": "user", "content": words(rng, 40)})
            order = said[:]
            rng.shuffle(order)
            await asyncio.gather(*map(turn, order))
    return result


if __name__ == "__main__":
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    main()
