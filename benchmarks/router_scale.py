"""The router at size: its processor time and memory with many engines and many streams.

    python benchmarks/router_scale.py                 # 64 engines; all parts
    python benchmarks/router_scale.py streams         # one part: latency, streams, requests or changes

The engines are null engines (benchmarks/null_engines.py) at 64 addresses, and the router is a process of its own.

latency    one stream, and one request after another: the time that the router adds, and its processor time
streams    4,000 streams at once: the router's processor time for each event
requests   100,000 requests with different prompts: the router's processor time for each, and its memory
changes    the engines file changes from 64 engines to 32 and back again and again under load: failed requests, memory

Processor time is the user and system time of the router's process. It is divided by the events or requests of a window.
The output has the median and the minimum of all windows, because other work on the machine increases some of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import httptools
import uvloop
from routing import free_port, process

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTS = ("latency", "streams", "requests", "changes")
ENGINES = str(Path(__file__).with_name("null_engines.py"))
SYSTEM = "You are a helpful assistant. Answer briefly, and say so if you do not know the answer. " * 6
_TIME = re.compile(rb'"time":(\d+)')
_WARM_UP_S = 3.0
_OPENING_S = 15.0  # in which all streams begin


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[], help="default: all")
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--streams", type=int, default=4000)
    parser.add_argument("--pause-ms", type=int, default=1000, help="between two events of one of many streams")
    parser.add_argument(
        "--windows", type=int, default=10, help="in which streams are measured, of one event of each stream"
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--prompt-bytes", type=int, default=1000, help="of a prompt, without the system prompt")
    parser.add_argument("--at-once", type=int, default=32, help="requests")
    parser.add_argument("--changes", type=int, default=10)
    parser.add_argument("--policy", default="cache_aware")
    parser.add_argument("--python", default=sys.executable, help="of the router")
    parser.add_argument("--profile", metavar="FILE", help="writes cProfile's data of the router; its times are longer")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as stack:
        urls = [url for _ in range(2) for url in stack.enter_context(engines(options.engines // 2))]
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        listed = Path(folder) / "engines.txt"
        listed.write_text("\n".join(urls), encoding="utf-8")
        url, pid = stack.enter_context(router(options, listed))
        print(f"{len(urls)} engines, policy {options.policy}, limit of open files {hard}", flush=True)
        uvloop.run(measure(options, Bench(url, pid, urls, listed)))


@contextlib.contextmanager
def engines(count: int) -> Iterator[list[str]]:
    """Run null engines in a process during the context; yield their addresses."""
    command = [sys.executable, ENGINES, "--engines", str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        yield [f"http://127.0.0.1:{port}" for port in json.loads(started.stdout.readline())]
        started.kill()


@contextlib.contextmanager
def router(options: argparse.Namespace, listed: Path) -> Iterator[tuple[str, int]]:
    """Run the router during the context; yield its address and process id."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    profile = ["-m", "cProfile", "-o", options.profile] if options.profile else []
    words = ["-m", "octavo", "route", "--engines-file", str(listed), "--port", str(port)]
    words += ["--policy", options.policy, "--log-level", "error"]
    with process(options.python, *profile, *words, ready=url + "/ready") as started:
        yield url, started.pid


@dataclass
class Bench:
    """What is measured."""

    url: str
    pid: int
    engines: list[str]
    listed: Path

    def cpu_us(self) -> float:
        """Return the router's processor time in us, user and system time (see clock_getcpuclockid(3))."""
        return time.clock_gettime_ns(~self.pid << 3 | 2) / 1e3

    def memory_mb(self) -> float:
        """Return the router's resident memory."""
        text = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1024


@dataclass
class Counts:
    """What the client got. delays: of a sample of the events, in us."""

    num_events: int = 0
    num_done: int = 0
    num_failed: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    delays: list[float] = field(default_factory=list)


class Connection(asyncio.Protocol):
    """A client's connection, which sends one request after another."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._parser: httptools.HttpResponseParser
        self._transport: asyncio.Transport
        self._done: asyncio.Future[bool] | None = None
        self._num_wanted = 0
        self._is_ok = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Keep the transport."""
        self._transport = transport

    async def ask(self, body: bytes, num_events: int) -> None:
        """Send a request and wait for the end of its answer; num_events: 0 for an answer that is not a stream."""
        self._parser = httptools.HttpResponseParser(self)
        self._num_wanted = num_events
        self._done = asyncio.get_running_loop().create_future()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        self._transport.write(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        is_ok = await self._done
        self._counts.num_done += 1
        self._counts.num_failed += not is_ok

    def data_received(self, data: bytes) -> None:
        """Count events."""
        sent = _TIME.findall(data)
        if sent:
            self._counts.num_events += len(sent)
            self._num_wanted -= len(sent)
            self._counts.delays.append((time.perf_counter_ns() - int(sent[-1])) / 1e3)
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        """End the request."""
        if self._done is not None and not self._done.done():
            status = self._parser.get_status_code()
            self._counts.statuses[status] += 1
            self._done.set_result(status == 200 and self._num_wanted == 0)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """End the request as failed."""
        if self._done is not None and not self._done.done():
            self._done.set_result(False)

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()


async def connect(url: str, counts: Counts) -> Connection:
    """Connect a client."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    _, connection = await asyncio.get_running_loop().create_connection(lambda: Connection(counts), host, int(port))
    return connection


def make_body(number: int, num_events: int, pause_us: int, num_bytes: int) -> bytes:
    """Return a chat request; num_events: 0 for an answer that is not a stream."""
    words = f"Question {number}: " + f"what is {number} times {number + 1}? " * (num_bytes // 25)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": words[:num_bytes]}]
    more = {"max_tokens": num_events or 16, "stream": num_events > 0, "pause_us": pause_us}
    return json.dumps({"model": "null", **more, "messages": messages}).encode()


async def measure(options: argparse.Namespace, bench: Bench) -> None:
    """Run the parts."""
    await asyncio.sleep(_WARM_UP_S)  # until all engines are ready
    before = bench.cpu_us()
    await asyncio.sleep(_WARM_UP_S)
    print(f"idle: {(bench.cpu_us() - before) / _WARM_UP_S / 1e3:.1f} ms of processor time a second", flush=True)
    for part in options.parts or PARTS:
        await {"latency": latency, "streams": streams, "requests": requests, "changes": changes}[part](options, bench)


async def latency(options: argparse.Namespace, bench: Bench) -> None:
    """Compare one stream and single requests, directly and through the router, in turns."""
    events: dict[str, list[float]] = {"directly": [], "routed": []}
    times: dict[str, list[float]] = {"directly": [], "routed": []}
    spent: list[float] = []
    spent_requests: list[float] = []
    for _ in range(5):
        for name, url in (("directly", bench.engines[0]), ("routed", bench.url)):
            counts = Counts()
            connection = await connect(url, counts)
            before = bench.cpu_us()
            await connection.ask(make_body(0, 1000, 1000, options.prompt_bytes), 1000)
            if counts.num_failed:
                raise RuntimeError(f"statuses of answers: {counts.statuses}")
            if name == "routed":
                spent.append((bench.cpu_us() - before) / counts.num_events)
            events[name] += counts.delays
            before = bench.cpu_us()
            for number in range(300):
                start = time.perf_counter_ns()
                await connection.ask(make_body(number, 0, 0, options.prompt_bytes), 0)
                times[name].append((time.perf_counter_ns() - start) / 1e3)
            if name == "routed":
                spent_requests.append((bench.cpu_us() - before) / 300)
            connection.close()
    for what, found, cpu in (("event of one stream", events, spent), ("single request", times, spent_requests)):
        directly, routed = (statistics.median(found[name]) for name in ("directly", "routed"))
        print(
            f"{what}: {directly:.0f} us directly, {routed:.0f} us routed, {routed - directly:.0f} us more (p50); "
            f"{middle(cpu)} of processor time",
            flush=True,
        )


async def streams(options: argparse.Namespace, bench: Bench) -> None:
    """Measure many streams at once."""
    counts = Counts()
    num_events = options.windows + int((_OPENING_S + 2 * options.windows) * 1e3 / options.pause_ms)
    connections = [await connect(bench.url, counts) for _ in range(options.streams)]
    tasks = []
    for number, connection in enumerate(connections):
        body = make_body(number, num_events, options.pause_ms * 1000, options.prompt_bytes)
        tasks.append(asyncio.create_task(connection.ask(body, num_events)))
        if number % 20 == 0:
            await asyncio.sleep(0.02)
    await asyncio.sleep(2 * options.pause_ms / 1e3)
    print(f"{options.streams} streams: open, {bench.memory_mb():.0f} MB", flush=True)
    found = []
    counts.delays.clear()
    for _ in range(options.windows):
        before, cpu = counts.num_events, bench.cpu_us()
        while (num_events := counts.num_events - before) < options.streams:  # noqa: ASYNC110 - a window is long
            await asyncio.sleep(0.1)
        found.append((bench.cpu_us() - cpu) / num_events)
    delays = sorted(counts.delays)
    print(
        f"{options.streams} streams: {middle(found)} of processor time for each event; {counts.num_failed} failed; "
        f"an event arrives after {statistics.median(delays):.0f} us (p50), {delays[int(len(delays) * 0.99)]:.0f} us "
        "(p99)",
        flush=True,
    )
    await asyncio.gather(*tasks)
    print(f"{options.streams} streams: {counts.num_done - counts.num_failed} complete, {counts.num_failed} failed")
    for connection in connections:
        connection.close()
    await asyncio.sleep(1.0)
    print(f"{options.streams} streams: after their end {bench.memory_mb():.0f} MB", flush=True)


async def requests(options: argparse.Namespace, bench: Bench) -> None:
    """Measure requests with different prompts, and the memory after each fifth."""
    counts = Counts()
    found, memory, fifth = [], [], options.requests // 5
    numbers = iter(range(options.requests))
    clients = [asyncio.create_task(send_all(options, bench, counts, numbers)) for _ in range(options.at_once)]
    done, cpu = 0, bench.cpu_us()
    while not all(client.done() for client in clients):
        await asyncio.sleep(0.5)
        if counts.num_done - done >= 1000:
            now = bench.cpu_us()
            found.append((now - cpu) / (counts.num_done - done))
            done, cpu = counts.num_done, now
        if counts.num_done // max(fifth, 1) > len(memory):
            memory.append(bench.memory_mb())
    await asyncio.gather(*clients)
    print(f"{options.requests} requests: {middle(found)} of processor time for each; {counts.num_failed} failed")
    print("memory after each fifth, MB: " + ", ".join(f"{each:.0f}" for each in memory), flush=True)


async def send_all(options: argparse.Namespace, bench: Bench, counts: Counts, numbers: Iterator[int]) -> None:
    """Send requests until no numbers are left. Every second answer is a stream of four events."""
    connection = await connect(bench.url, counts)
    for number in numbers:
        num_events = 4 * (number % 2)
        failed = counts.num_failed
        await connection.ask(make_body(number, num_events, 0, options.prompt_bytes), num_events)
        if counts.num_failed > failed:
            connection.close()
            connection = await connect(bench.url, counts)
    connection.close()


async def changes(options: argparse.Namespace, bench: Bench) -> None:
    """Remove and add half of the engines again and again under load."""
    counts = Counts()
    is_over = False

    def numbers() -> Iterator[int]:
        number = 10_000_000
        while not is_over:
            number += 1
            yield number

    endless = numbers()
    clients = [asyncio.create_task(send_all(options, bench, counts, endless)) for _ in range(options.at_once)]
    memory = []
    for _ in range(options.changes):
        for count in (len(bench.engines) // 2, len(bench.engines)):
            bench.listed.write_text("\n".join(bench.engines[:count]), encoding="utf-8")
            await asyncio.sleep(3.0)
        memory.append(bench.memory_mb())
    is_over = True
    await asyncio.gather(*clients)
    print(
        f"{options.changes} changes to half of the engines and back: {counts.num_failed} of {counts.num_done} requests "
        f"failed; memory after each, MB: " + ", ".join(f"{each:.0f}" for each in memory),
        flush=True,
    )


def middle(found: list[float]) -> str:
    """Return a text with the median and the minimum in us."""
    return f"{statistics.median(found):.1f} us (minimum {min(found):.1f})" if found else "nothing measured"


if __name__ == "__main__":
    main()
