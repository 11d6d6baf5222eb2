"""What the router costs, and what its policies find in the engines' caches.

    python benchmarks/routing.py clients     what reading a streamed event costs, by aiohttp and by httpx
    python benchmarks/routing.py cost        what the router adds to a request and to an event; many streams at once
    python benchmarks/routing.py prefixes    hit tokens and times to first tokens, policy by policy, of 4 engines

`clients` and `cost` ask a made-up engine that sends an event every so often, in a process of its own. `cost` asks it
directly and through the router in turns, and compares medians. `prefixes` starts 4 `octavo serve` on the built-in
model with a KV cache of 800 blocks, 2/7 of what all conversations need together, and asks them anew for each policy: 64
conversations of 8 turns, in an order drawn anew for each turn, 8 at a time. `--also URL` asks another router, which
somebody has put before engines of the same options (--keep-engines leaves them running, and says where).
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
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import httpx

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

NUM_ENGINES, NUM_CONVERSATIONS, NUM_TURNS, NUM_AT_ONCE = 4, 64, 8, 8
BODY = {"model": "m", "prompt": "Once upon a time", "max_tokens": 64, "stream": True}
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_WORDS = ["the", "a", "cat", "dog", "house", "tree", "runs", "sleeps", "big", "small", "red", "river", "stone", "bird"]
READY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["clients", "cost", "prefixes", "engine"])
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--events", type=int, default=2000, help="of a stream")
    parser.add_argument("--pause-us", type=int, default=1000, help="between two events")
    parser.add_argument("--streams", type=int, default=1000, help="at once, where many are asked for")
    parser.add_argument("--policies", nargs="*", default=["round_robin", "cache_aware"])
    parser.add_argument("--also", metavar="URL", action="append", default=[])
    parser.add_argument("--keep-engines", action="store_true")
    options = parser.parse_args()
    if options.what == "engine":
        asyncio.run(made_up_engine(options.port))
    elif options.what == "prefixes":
        prefixes(options)
    else:
        asyncio.run({"clients": clients, "cost": cost}[options.what](options))


async def made_up_engine(port: int) -> None:
    """Send as many events as max_tokens says, with the time in each."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: (\d+)", head)
                body = await reader.readexactly(int(length[1])) if length else b""
                if not body:
                    writer.write(READY)
                    continue
                asked = json.loads(body)
                writer.write(HEAD)
                for _ in range(asked["max_tokens"]):
                    await asyncio.sleep(asked.get("pause_us", 0) / 1e6)
                    event = (
                        b'data: {"time": %d, "choices": [{"index": 0, "text": " word"}]}\n\n' % time.perf_counter_ns()
                    )
                    writer.write(b"%x\r\n%s\r\n" % (len(event), event))
                    await writer.drain()
                writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    server = await asyncio.start_server(serve, "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.contextmanager
def process(*command: str, ready: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run one until the block is left, which is entered when an address answers 200."""
    environment = {**os.environ, "OCTAVO_API_KEY": ""}
    with subprocess.Popen([sys.executable, *command], env=environment) as started:
        try:
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
def engine() -> Iterator[str]:
    """Run a made-up engine; give its address."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    with process(__file__, "engine", "--port", str(port), ready=url + "/ready"):
        yield url


@contextlib.contextmanager
def router(*urls: str, policy: str = "cache_aware") -> Iterator[tuple[str, int]]:
    """Run a router; give its address and process id."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    named = [word for each in urls for word in ("--engine", each)]
    quiet = ["--log-level", "warning"]
    command = ["-m", "octavo", "route", *named, "--policy", policy, "--port", str(port), *quiet]
    with process(*command, ready=url + "/ready") as started:
        yield url, started.pid


async def aiohttp_chunks(url: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
    """Yield an answer's pieces, read by aiohttp."""
    async with aiohttp.ClientSession() as session, session.post(url + "/v1/completions", json=body) as answer:
        while chunk := await answer.content.readany():
            yield chunk


async def httpx_chunks(url: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
    """Yield them, read by httpx."""
    async with (
        httpx.AsyncClient(timeout=None, trust_env=False) as client,
        client.stream("POST", url + "/v1/completions", json=body) as answer,
    ):
        async for chunk in answer.aiter_raw():
            yield chunk


async def clients(options: argparse.Namespace) -> None:
    """CPU time of this process for each piece that is read, less what an event loop that only waits takes."""
    with engine() as url:
        for _ in range(3):
            for name, read in {"aiohttp": aiohttp_chunks, "httpx": httpx_chunks}.items():
                body = {**BODY, "max_tokens": options.events, "pause_us": options.pause_us}
                start, num_chunks = time.process_time(), 0
                async for _chunk in read(url, body):
                    num_chunks += 1
                print(f"{name}: {(time.process_time() - start) / num_chunks * 1e6:.1f} us an event ({num_chunks} read)")


async def delays(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[float]:
    """Return how long each event was on its way, in us."""
    found = []
    async with session.post(url + "/v1/completions", json=body) as answer:
        while chunk := await answer.content.readany():
            now = time.perf_counter_ns()
            found += [(now - int(sent)) / 1e3 for sent in re.findall(rb'"time": (\d+)', chunk)]
    return found


async def cost(options: argparse.Namespace) -> None:
    """Compare an engine asked directly and through the router."""
    with engine() as direct, router(direct) as (routed, pid):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            for _ in range(3):
                one = {**BODY, "max_tokens": 1}
                times: dict[str, list[float]] = {direct: [], routed: []}
                for _ in range(300):
                    for url, found in times.items():
                        start = time.perf_counter_ns()
                        await delays(session, url, one)
                        found.append((time.perf_counter_ns() - start) / 1e3)
                print_difference("a request", times[direct], times[routed])
                many = {**BODY, "max_tokens": options.events, "pause_us": options.pause_us}
                before = cpu_seconds(pid)
                through = await delays(session, routed, many)
                spent = spent_us(pid, before, options.events)
                print_difference("an event", await delays(session, direct, many), through)
                print(f"  {spent} an event")
            many = {**BODY, "max_tokens": 50, "pause_us": 100_000}
            before, start = cpu_seconds(pid), time.perf_counter()
            all_of = await asyncio.gather(*(delays(session, routed, many) for _ in range(options.streams)))
            whole = sum(len(each) == many["max_tokens"] for each in all_of)
            spent = spent_us(pid, before, sum(map(len, all_of)))
            print(
                f"{whole} of {options.streams} streams at once, {time.perf_counter() - start:.1f} s; {spent} "
                f"an event, requests included"
            )


def print_difference(what: str, direct: list[float], routed: list[float]) -> None:
    """Tell medians in us."""
    direct_p50, routed_p50 = statistics.median(direct), statistics.median(routed)
    print(
        f"{what}: {direct_p50:.0f} us directly, {routed_p50:.0f} us routed, {routed_p50 - direct_p50:.0f} us more (p50)"
    )


def cpu_seconds(pid: int) -> tuple[float, float]:
    """Return the processor time of a process so far: in its own code, and in the system's."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK"), int(fields[12]) / os.sysconf("SC_CLK_TCK")


def spent_us(pid: int, before: tuple[float, float], num_events: int) -> str:
    """Tell the processor time that was spent on each event."""
    own, system = ((after - start) / num_events * 1e6 for after, start in zip(cpu_seconds(pid), before, strict=True))
    return f"{own:.1f} us of processor time in the router's code and {system:.1f} us in system calls"


def words(rng: random.Random, count: int) -> str:
    """Return a text of short words."""
    return " ".join(rng.choice(_WORDS) for _ in range(count))


def prefixes(options: argparse.Namespace) -> None:
    """Ask 64 conversations of 8 turns of engines behind each policy."""
    ports = [free_port() for _ in range(NUM_ENGINES)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    for target in [*options.policies, *options.also]:
        with contextlib.ExitStack() as stack:
            for port, url in zip(ports, urls, strict=True):
                command = ["-m", "octavo", "serve", "--port", str(port), "--num-threads", "1", "--log-level", "warning"]
                command += ["--num-gpu-blocks-override", "800", "--max-num-seqs", "16"]
                stack.enter_context(process(*command, ready=url + "/ready"))
            if options.keep_engines:
                print("engines:", *urls)
                input("Enter goes on")
            url = target if target.startswith("http") else stack.enter_context(router(*urls, policy=target))[0]
            times, num_failed = asyncio.run(converse(url))
            hits, queries = (
                sum(figure(each, f"octavo:prefix_cache_{name}_total") for each in urls) for name in ("hits", "queries")
            )
            times.sort()
            p50, p99 = times[len(times) // 2], times[int(len(times) * 0.99)]
            print(
                f"{target}: {hits:.0f} of {queries:.0f} tokens hit, TTFT p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} "
                f"ms, {num_failed} of {NUM_CONVERSATIONS * NUM_TURNS} requests failed",
                flush=True,
            )


def figure(url: str, name: str) -> float:
    """Return a figure of an engine's metrics."""
    text = urllib.request.urlopen(url + "/metrics").read().decode()
    return sum(float(value) for value in re.findall(rf"^{name}{{[^\n]*}} (\S+)$", text, re.MULTILINE))


async def converse(url: str) -> tuple[list[float], int]:
    """Return the times to first tokens, and how many requests failed."""
    rng = random.Random(7)
    system = words(rng, 30)
    said = [[{"role": "system", "content": system}] for _ in range(NUM_CONVERSATIONS)]
    times: list[float] = []
    num_failed = 0
    places = asyncio.Semaphore(NUM_AT_ONCE)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def turn(messages: list[dict[str, str]]) -> None:
            nonlocal num_failed
            async with places:
                body = {
                    "model": "octavo-demo",
                    "messages": messages,
                    "max_tokens": 8,
                    "stream": True,
                    "temperature": 0,
                    "ignore_eos": True,
                }
                start, text = time.perf_counter(), ""
                async with session.post(url + "/v1/chat/completions", json=body) as answer:
                    async for line in answer.content:
                        delta = re.search(rb'"content":("(?:[^"\\]|\\.)+")', line)
                        if delta:
                            if not text:
                                times.append(time.perf_counter() - start)
                            text += json.loads(delta[1])
                    num_failed += answer.status != 200
                messages.append({"role": "assistant", "content": text})

        for _ in range(NUM_TURNS):
            for messages in said:
                messages.append({"role": "user", "content": words(rng, 40)})
            order = said[:]
            rng.shuffle(order)
            await asyncio.gather(*map(turn, order))
    return times, num_failed


if __name__ == "__main__":
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    main()
