"""Measure the promises of octavo's server: `python tools/figures_api.py 5 7 8`, or `all` of them.

Each figure starts `octavo serve` on the built-in model, runs the load of its docstring, prints a line, and fails the
run if the promise does not hold. Counts are those of the promise; `--scale 0.1` runs a tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
import contextlib
import json
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import psutil
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from real_tokenizers import ended

from octavo.config import ServerConfig
from octavo.data.core_output import EngineCoreOutput
from octavo.engine.output_processor import OutputProcessor
from octavo.http.tenants import Tenant, add_key
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.server.app import create_app

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "system"))
from raw_http import Answer, Connection, NarrowConnection, events, text_of
from serving_process import DEADLINE_S, Served, Stream, serve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
    from concurrent.futures import Executor

    from octavo.server.service import Service

COMPLETIONS = "/v1/completions"
TOKENS = 512  # of an answer: the built-in model is so fast that shorter answers would measure the clients
GENERATED = "octavo:generation_tokens_total"
IN_FLIGHT_S = 0.1  # the longest time that figures take to arrive from the engine
SHORT = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0.0}
TURNS, TURN_S = 3, 8.0  # of readers, during the measurement of other clients
LONG = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "temperature": 0.0, "stream": True}


class BrokenPromiseError(Exception):
    """A promise that does not hold."""


def check(holds: object, what: str) -> None:
    """Raise `BrokenPromiseError` with `what` unless `holds` is true."""
    if not holds:
        raise BrokenPromiseError(what)


def address(served: Served) -> tuple[str, int]:
    """Return the host and the port of a server."""
    return str(served.http.base_url.host), int(served.http.base_url.port or 80)


def figures(served: Served) -> dict[str, float]:
    """Return each metric of the server, summed over its labels; 0 for one that it does not have."""
    totals: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(served.http.get("/metrics").text):
        for sample in family.samples:
            totals[sample.name] += sample.value
    return totals


def requests_in(told: dict[str, float]) -> float:
    """Return the number of requests that the engine has, from its figures."""
    return told["octavo:num_requests_running"] + told["octavo:num_requests_waiting"]


def percentile(values: Iterable[float], share: float) -> float:
    """Return the value below which a share of the values lies."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def rss_mb(served: Served) -> float:
    """Return the resident memory of the server process in MB."""
    return float(psutil.Process(served.process.pid).memory_info().rss / 2**20)


async def timed(work: Awaitable[Any]) -> tuple[float, Any]:
    """Await work; return the seconds it took, and its result."""
    start = time.perf_counter()
    result = await work
    return time.perf_counter() - start, result


HEROES = ("a clever cat", "a brave fox", "a little dog", "an old king", "a young queen")
STORIES = tuple(f"Once upon a time there was {hero} who" for hero in HEROES)  # of 2,000 tokens each
FREEZE_S = 10  # longer than an engine may be silent


def figure_4(scale: float) -> str:
    """Kill and freeze each process 20 times under 30 streams: all streams end within 10 s, and no token is wrong."""
    rounds = max(round(20 * scale), 1)
    with serve() as served:
        whole = {prompt: _whole(served, prompt) for prompt in STORIES}
    lost = [_lose_engine(kind, rounds, whole) for kind in (signal.SIGKILL, signal.SIGSTOP)]
    unready, ended, back = (max(times) for times in zip(*lost, strict=True))
    woken = _freeze_server(rounds, whole)
    for is_engine_frozen in (False, True):
        _kill_server(rounds, whole, is_engine_frozen=is_engine_frozen)
    return (
        f"30 streams; {rounds} kills and {rounds} freezes of the engine: not ready within {unready:.1f} s, streams "
        f"ended within {ended:.1f} s, back within {back:.1f} s; {rounds} freezes of the server for {FREEZE_S} s: the "
        f"same engine, ready again within {woken:.1f} s, all streams whole; {rounds} kills of the server, and {rounds} "
        "with its engine frozen: 0 orphans; 0 wrong tokens"
    )


def _whole(served: Served, prompt: str) -> str:
    """Return a story, computed while no other request runs."""
    stream = Stream(served, prompt)
    stream.ended_within(DEADLINE_S)
    check(stream.events[-1] == "[DONE]", "a stream without an end")
    return stream.text


def _crowd(served: Served) -> list[Stream]:
    return [Stream(served, prompt) for prompt in STORIES * 6]


def _check_beginnings(streams: list[Stream], whole: dict[str, str]) -> None:
    """Check that the text of each ended stream is the beginning of the whole story."""
    for stream in streams:
        check(stream.text and whole[stream.prompt].startswith(stream.text), f"wrong tokens: {stream.text!r}")


def _lose_engine(kind: signal.Signals, rounds: int, whole: dict[str, str]) -> tuple[float, float, float]:
    """Return the longest times until the server was not ready, all streams had ended, and it was ready again."""
    unready, ended, back = [], [], []
    with serve() as served:
        expected = served.answer()
        for _ in range(rounds):
            streams, engine = _crowd(served), served.engine
            start = time.monotonic()
            engine.send_signal(kind)
            served.wait_until(lambda: not served.is_ready(), 5)
            unready.append(time.monotonic() - start)
            for stream in streams:
                stream.ended_within(10 - (time.monotonic() - start))
                check(stream.events[-1] == "[DONE]", "a stream without an end")
                check(
                    json.loads(stream.events[-2])["error"]["code"] == "engine_restarting", "a stream without an error"
                )
            ended.append(time.monotonic() - start)
            _check_beginnings(streams, whole)
            served.wait_for(served.is_ready)
            back.append(time.monotonic() - start)
            check(served.answer() == expected, "another answer after a restart")
            check(not psutil.pid_exists(engine.pid), "an engine was left over")
    return max(unready), max(ended), max(back)


def _freeze_server(rounds: int, whole: dict[str, str]) -> float:
    """Return the longest time until a frozen server is ready again; it keeps its engine and its streams."""
    woken = []
    with serve() as served:
        engine = served.engine
        for _ in range(rounds):
            streams = _crowd(served)
            served.process.send_signal(signal.SIGSTOP)
            time.sleep(FREEZE_S)
            start = time.monotonic()
            served.process.send_signal(signal.SIGCONT)
            served.wait_until(served.is_ready, 5)
            woken.append(time.monotonic() - start)
            for stream in streams:
                stream.ended_within(DEADLINE_S)
                check(stream.events[-1] == "[DONE]" and stream.text == whole[stream.prompt], "a stream is not whole")
            check(served.engine == engine, "the engine is another one")
    return max(woken)


def _kill_server(rounds: int, whole: dict[str, str], *, is_engine_frozen: bool) -> None:
    """Kill the server; check that its engine ends, also a frozen engine."""
    for _ in range(rounds):
        with serve() as served:
            streams, engine = _crowd(served), served.engine
            if is_engine_frozen:
                engine.suspend()
            served.process.kill()
            for stream in streams:
                stream.ended_within(10)
            _check_beginnings(streams, whole)
            try:
                engine.wait(10)
            except psutil.TimeoutExpired:
                engine.kill()
                raise BrokenPromiseError("an orphan") from None


VALUES = (
    b"null", b"true", b"NaN", b"Infinity", b"-Infinity", b"-1", b"0", b"1e400", b"2147483648", b"9223372036854775808",
    b"1" + b"0" * 400, b'""', b'"\\u0000"', b'"\\ud800"', b'"\xff"', b"[]", b"[[]]", b"{}", b"[" * 3000,
    b'{"a":' * 3000,
    b'"' + b"x" * 5000 + b'"', b"[null]", b"[-1]", b"[1.5]", b'[{"role": "user"}]', b'{"type": "json_schema"}', b"",
)  # fmt: skip
SOUND: dict[str, tuple[bytes, ...]] = {
    "string": (b'"a"', b'"user"', b'"octavo-demo"', b'"\xc3\xbc b"'),
    "integer": (b"1", b"2"),
    "number": (b"1", b"0.5"),
    "boolean": (b"true", b"false"),
}


class Bodies:
    """Generates request bodies from an OpenAPI document, as deep as it is nested, with a fault in each of them."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._named = document["components"]["schemas"]
        posts = {path: route["post"] for path, route in document["paths"].items() if "post" in route}
        self.schemas = {
            path: post["requestBody"]["content"]["application/json"]["schema"]
            for path, post in posts.items()
            if "requestBody" in post
        }

    def draw(self, rng: random.Random) -> tuple[str, bytes]:
        """Draw a path, and a body with a fault."""
        path, schema = rng.choice(list(self.schemas.items()))
        body = self._spell(schema, rng, spoilt=rng.choice([0.02, 0.1, 0.3]))
        match rng.randrange(12):
            case 0:
                body = body[: rng.randrange(len(body) + 1)]
            case 1:
                position = rng.randrange(len(body) + 1)
                body = body[:position] + bytes([rng.randrange(256)]) + body[position + 1 :]
            case 2:
                body = rng.randbytes(rng.randrange(200))
        return path, body

    def _spell(self, schema: Any, rng: random.Random, spoilt: float, depth: int = 0) -> bytes:
        """Encode a value of a schema. Each part of it is replaced by a wrong one with the probability `spoilt`."""
        if (depth and rng.random() < spoilt) or not isinstance(schema, dict) or depth > 12:
            return rng.choice(VALUES)
        if "$ref" in schema:
            schema = self._named[schema["$ref"].rpartition("/")[2]]
        if ways := schema.get("anyOf") or schema.get("oneOf"):
            return self._spell(rng.choice(ways), rng, spoilt, depth + 1)
        if values := schema.get("enum") or [schema[name] for name in ("const",) if name in schema]:
            return json.dumps(rng.choice(values)).encode()
        kind = schema.get("type", "")
        kind = rng.choice(kind) if isinstance(kind, list) else kind
        if kind == "object":
            fields = schema.get("properties", {})
            named = set(schema.get("required", ())) | set(rng.sample(sorted(fields), min(len(fields), 3)))
            parts = ((name, self._spell(fields.get(name), rng, spoilt, depth + 1)) for name in sorted(named))
            return b"{%s}" % b", ".join(b"%s: %s" % (json.dumps(name).encode(), part) for name, part in parts)
        if kind == "array":
            items = (self._spell(schema.get("items"), rng, spoilt, depth + 1) for _ in range(rng.randrange(1, 3)))
            return b"[%s]" % b", ".join(items)
        return rng.choice(SOUND.get(kind, VALUES))


HEADS = (
    b"GET\r\n\r\n", b"POST /v1/completions HTTP/9.9\r\n\r\n", b"\x00\x01\x02\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /%00%ff HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n",
    b"GET /v1/models/" + b"a/../" * 500 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
)  # fmt: skip


def figure_5(scale: float) -> str:
    """Send 100,000 malformed requests, generated from the OpenAPI document: no answer of 5xx, the same engine.

    Each worker uses few connections. Some connections begin with bytes that are not a request.
    """
    count, workers = max(round(100_000 * scale), 100), 16

    async def work(served: Served, seed: int, statuses: Counter[int]) -> None:
        rng = random.Random(seed)
        for part in range(0, count // workers, 50):
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                async with Connection(address(served)) as connection:
                    connection.writer.write(rng.choice(HEADS))
                    with contextlib.suppress(TimeoutError, ValueError, IndexError):
                        statuses[(await asyncio.wait_for(connection.head(), 0.2)).status] += 1
            async with Connection(address(served)) as connection:
                for _ in range(min(50, count // workers - part)):
                    path, body = bodies.draw(rng)
                    statuses[(await connection.ask(path, body)).status] += 1

    with serve("--max-model-len", "128", "--log-level", "warning") as served:
        expected, engine, statuses = served.answer(), served.engine.pid, Counter[int]()
        bodies = Bodies(served.http.get("/openapi.json").json())
        memory = rss_mb(served)

        async def run() -> None:
            await asyncio.gather(*(work(served, seed, statuses) for seed in range(workers)))

        seconds, _ = asyncio.run(timed(run()))
        check(not any(status >= 500 for status in statuses), f"answers of 5xx: {statuses}")
        check(served.engine.pid == engine and served.answer() == expected, "the engine is another one")
        grown = rss_mb(served) - memory
    shown = ", ".join(f"{status}: {number}" for status, number in sorted(statuses.items()))
    count = sum(statuses.values())
    return (
        f"{count} malformed requests to {len(bodies.schemas)} routes in {seconds:.0f} s: {shown}; 0 restarts, the "
        f"server grew by {grown:.0f} MB"
    )


def figure_6(_scale: float) -> str:
    """Try every route in every way without its key: always 401, except for the health checks."""
    with tempfile.TemporaryDirectory() as folder:
        key = add_key(Path(folder) / "keys.toml", Tenant(name="alice"))
        with serve("--api-keys", str(Path(folder) / "keys.toml"), key=key) as served:
            paths = set(served.http.get("/openapi.json").json()["paths"]) | routes()
            paths -= {"/health", "/live", "/ready"}  # these need no key
            statuses = asyncio.run(_without_key(address(served), sorted(paths), key))
    check(set(statuses) <= {401, 421}, f"answers other than 401 and 421 (an odd Host): {statuses}")
    return f"{sum(statuses.values())} requests without a valid key, to {len(paths)} routes: 0 bypasses"


def routes() -> set[str]:
    """Return all paths of the application, with values for their parameters."""
    nothing = dict.fromkeys(("metrics", "tracing", "admission", "timeouts"))
    service = cast("Service", SimpleNamespace(config=ServerConfig(), **nothing))
    return {re.sub(r"{[^}]*}", "any", route.path) for route in create_app(service).routes if hasattr(route, "path")}


async def _without_key(where: tuple[str, int], paths: list[str], key: str) -> Counter[int]:
    ways: list[dict[str, str]] = [
        {}, {"Authorization": ""}, {"Authorization": "Bearer"}, {"Authorization": "Bearer "}, {"Authorization": key},
        {"Authorization": f"Basic {key}"}, {"Authorization": f"Bearer {key[:-1]}"}, {"Authorization": f"Bearer {key}x"},
        {"Authorization": f"Bearer {key.swapcase()}"}, {"Authorization": f"Bearer,{key}"}, {"X_Api_Key": key[:-1]},
        {"X_Api_Key": f"Bearer {key}"}, {"X_Api_Key": key, "Authorization": "Bearer no"}, {"Cookie": f"key={key}"},
        {"X_Forwarded_For": "127.0.0.1"}, {"Host": "localhost"}, {"X_Original_URL": "/health"},
        {"X_Rewrite_URL": "/health"}, {"X_HTTP_Method_Override": "GET"}, {"Proxy_Authorization": f"Bearer {key}"},
    ]  # fmt: skip
    spellings: list[Callable[[str], str]] = [
        lambda path: path, lambda path: "/" + path, lambda path: path + "/", lambda path: path.upper(),
        lambda path: "/health/.." + path, lambda path: "/./" + path.lstrip("/"), lambda path: path + "?key=" + key,
        lambda path: path + "#/health", lambda path: "/%2e" + path, lambda path: path.replace("v1", "v%31"),
        lambda path: path + "%00/health", lambda path: path + ";/health", lambda path: "//health" + path,
    ]  # fmt: skip
    statuses: Counter[int] = Counter()
    for path in paths:
        for spelling in spellings:
            async with Connection(where) as connection:
                for headers in ways:
                    for method in ("GET", "POST", "OPTIONS", "PUT", "DELETE"):
                        statuses[(await connection.ask(spelling(path), b"{}", method, **headers)).status] += 1
    return statuses


def figure_7(scale: float, spread_s: float = 4.0) -> str:
    """500 slow senders, 100 slow readers: others' p99 grows by at most 20 %, memory by 50 MB; slow clients are cut off.

    Half of the senders send their headers slowly. The other half send headers immediately and a body slowly. A reader
    reads 1 KB of a stream per second, and is replaced by another one every `TURN_S`. The comparison has as many fast
    readers, with the number of tokens that are computed for slow ones. Limits are so short that all of them are
    reached. spread_s: the senders begin within this time.
    """
    senders, readers = max(round(500 * scale), 6), max(round(100 * scale), 2)
    ends: Counter[str] = Counter()

    async def run(served: Served) -> tuple[list[float], list[float], float, int]:
        where, calm, under = address(served), list[float](), list[float]()
        tokens, grown = await _tokens_of_slow_readers(served, readers), 0.0
        for _ in range(3):  # alternate, because the speed of a machine varies
            calm += await _during(observer, where, lambda _over: [_read(where, tokens) for _ in range(readers)])
            memory = rss_mb(served)
            under += await _during(
                observer,
                where,
                lambda over: [
                    *(_read_slowly(where, ends) for _ in range(readers)),
                    *(
                        _send_slowly(where, over, ends, number, spread_s * number / senders)
                        for number in range(senders)
                    ),
                ],
            )
            grown = max(grown, rss_mb(served) - memory)
        return calm, under, grown, tokens

    limits = ("--body-timeout", "4", "--max-unread-outputs", "32")
    pool = ProcessPoolExecutor(1, get_context("spawn"))
    with pool as observer, serve("--max-num-seqs", "256", "--log-level", "warning", *limits) as served:
        observer.submit(others, address(served), 2).result()
        calm, under, grown, tokens = asyncio.run(run(served))
    before, after = percentile(calm, 0.99), percentile(under, 0.99)
    line = (
        f"{senders} slow senders, {readers} slow readers, {TURNS} times anew, three times, cut off: {dict(ends)}; p99 "
        f"of {len(under)} others {1000 * after:.0f} ms, {1000 * before:.0f} ms ({len(calm)}) beside as many readers "
        f"who read {tokens} tokens, as many as each slow one was given; memory +{grown:.0f} MB"
    )
    check(set(ends) == {"headers", "body", "read_too_slowly"}, line)
    check(min(ends["headers"], ends["body"]) >= 3 * (senders // 2), line)
    check(ends["read_too_slowly"] == 3 * TURNS * readers, line)
    check(after <= 1.2 * before and grown <= 50, line)
    return line


async def _tokens_of_slow_readers(served: Served, readers: int) -> int:
    """Return the average number of tokens computed for a slow reader before it is cut off."""
    await asyncio.sleep(1.0)  # figures arrive twice a second
    before = figures(served)[GENERATED]
    async with asyncio.TaskGroup() as group:
        for _ in range(readers):
            group.create_task(_read_slowly_once(address(served)))
    await asyncio.sleep(IN_FLIGHT_S)
    return round((figures(served)[GENERATED] - before) / readers)


async def _send_slowly(
    where: tuple[str, int], over: asyncio.Event, ends: Counter[str], number: int, wait_s: float
) -> None:
    """Send a byte of headers or of a body every half second; connect again when the server closes the connection.

    wait_s: delay before the first connection.
    """
    is_body = bool(number % 2)
    await asyncio.sleep(wait_s)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 999999\r\n"
    while not over.is_set():
        async with Connection(where) as connection, asyncio.TaskGroup() as group:
            answer = group.create_task(_status(connection))
            connection.writer.write(head + b"\r\n" * is_body)
            while not answer.done():
                connection.writer.write(b" " if is_body else b"x")
                await asyncio.wait([answer], timeout=0.5)
        ends[{(False, None): "headers", (True, 408): "body"}.get((is_body, answer.result()), "unexpected")] += 1


async def _status(connection: Connection) -> int | None:
    """Wait for an answer's status; None if the connection is closed instead."""
    try:
        return (await connection.head()).status
    except ConnectionError:
        return None


async def _read_slowly(where: tuple[str, int], ends: Counter[str]) -> None:
    """Read streams slowly, one after the other, and count how they ended."""
    async for _ in _turns():
        ends[await _read_slowly_once(where)] += 1


async def _read_slowly_once(where: tuple[str, int]) -> str:
    """Read a stream slowly for most of a turn, then to its end; return how it ended."""
    end = time.monotonic() + TURN_S - 1
    async with NarrowConnection(where) as connection:
        await connection.send(COMPLETIONS, {**LONG, "max_tokens": 2000, "logprobs": 5})
        last = await connection.read(1)
        while time.monotonic() < end:
            await connection.read(250)
            await asyncio.sleep(0.25)
        while b"data: [DONE]" not in last and (piece := await connection.read(1 << 16)):
            last = last[-1000:] + piece
    reason = re.search(rb'"(?:code|finish_reason)":"(\w+)"', last)
    return reason[1].decode() if reason else "unexpected"


async def _read(where: tuple[str, int], tokens: int) -> None:
    """Read a stream of `tokens` tokens in each turn."""
    async for _ in _turns():
        async with NarrowConnection(where) as connection:
            await connection.send(COMPLETIONS, {**LONG, "max_tokens": tokens, "logprobs": 5})
            while b"data: [DONE]" not in await connection.read(1 << 16):
                pass


async def _turns() -> AsyncIterator[int]:
    """Yield every `TURN_S` seconds, `TURNS` times; later if the caller's work took longer."""
    begin = time.monotonic()
    for number in range(TURNS):
        await asyncio.sleep(begin + number * TURN_S - time.monotonic())
        yield number


def others(where: tuple[str, int], seconds: float) -> list[float]:
    """Return the latencies of a client that sends small requests repeatedly. Runs in a process of its own."""

    async def ask() -> list[float]:
        latencies = []
        async with Connection(where) as connection:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                latency, answer = await timed(connection.ask(COMPLETIONS, SHORT))
                check(answer.status == 200, f"others got {answer.status}")
                latencies.append(latency)
                await asyncio.sleep(0.02)
        return latencies

    return asyncio.run(ask())


async def _during(
    observer: Executor, where: tuple[str, int], work: Callable[[asyncio.Event], list[Coroutine[Any, Any, None]]]
) -> list[float]:
    """Return the latencies of other clients during some work, which receives an event that ends it."""
    over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for each in work(over):
            group.create_task(each)
        latencies = await asyncio.get_running_loop().run_in_executor(observer, others, where, 25)
        over.set()
    return latencies


def figure_7_together(scale: float) -> str:
    """Figure 7 with all senders beginning at the same moment, so that their limits end at the same moment, too."""
    return figure_7(scale, spread_s=0.0)


def figure_8(scale: float) -> str:
    """1,000 clients disconnect at random: their blocks are free within a second, other answers do not change.

    Fifty clients at a time, together with four bystanders that send requests repeatedly. Within a second after the last
    of the fifty has disconnected, new figures of the engine must show no more requests and blocks than the bystanders
    can have. The engine sends figures twice a second, so the measured time is up to half a second too long. A single
    lost block could not be distinguished from those of the bystanders. So these pause, and then no block may be held in
    the dashboard's map.
    """
    count, num_bystanders, num_blocks = max(round(1000 * scale), 50), 4, 4096
    bystander = {**LONG, "max_tokens": 300}
    most_blocks = num_bystanders * (1 + (len(str(LONG["prompt"])) + 300) // 16)  # a token has a character at least

    async def vanish(where: tuple[str, int], rng: random.Random) -> None:
        async with Connection(where) as connection:
            await connection.send(COMPLETIONS, {**LONG, "prompt": f"{rng.random()} times", "seed": 1})
            await asyncio.sleep(rng.random() * 0.5)
            connection.vanish()

    async def run(served: Served) -> tuple[list[float], int]:
        where, rng, over, goes_on = address(served), random.Random(1), asyncio.Event(), asyncio.Event()
        goes_on.set()
        async with Connection(where) as connection:
            alone = text_of((await connection.ask(COMPLETIONS, bystander)).body)

        async def stand_by() -> int:
            num_answers = 0
            async with Connection(where) as connection:
                while not over.is_set():
                    await goes_on.wait()
                    text = text_of((await connection.ask(COMPLETIONS, bystander)).body)
                    check(text == alone, "a bystander's text differs")
                    num_answers += 1
            return num_answers

        bystanders = [asyncio.create_task(stand_by()) for _ in range(num_bystanders)]
        times = []
        for start in range(0, count, 50):
            await asyncio.gather(*(vanish(where, rng) for _ in range(min(50, count - start))))
            times.append(await _until_gone(served, num_bystanders, most_blocks / num_blocks))
            goes_on.clear()
            held = await asyncio.to_thread(_held_when_idle, served)
            check(held == 0, f"{held:.2%} of all blocks are held when nobody is there")
            goes_on.set()
        over.set()
        return times, sum(await asyncio.gather(*bystanders))

    with serve("--log-level", "warning", "--num-gpu-blocks-override", str(num_blocks)) as served:
        times, num_answers = asyncio.run(run(served))
    line = (
        f"{count} clients vanished, 50 at once: after each time all were gone and their blocks free at most "
        f"{max(times):.2f} s after the last of them (seen by figures that come twice a second); no block is held when "
        f"the bystanders pause; {num_answers} answers of {num_bystanders} bystanders exact"
    )
    check(max(times) <= 1.0, line)
    return line


async def _until_gone(served: Served, num_bystanders: int, most_usage: float) -> float:
    """Return the seconds until new figures show at most the requests and the cache usage of the bystanders."""
    start, is_new, told = time.monotonic(), False, 0.0
    while True:
        left = await asyncio.to_thread(figures, served)
        seconds, usage = time.monotonic() - start, left["octavo:kv_cache_usage_perc"]
        if seconds < IN_FLIGHT_S:  # these figures may be older than the last disconnect
            told = left[GENERATED]
        is_new = is_new or left[GENERATED] > told  # the bystanders' tokens increase in all new figures
        if is_new and requests_in(left) <= num_bystanders and usage <= most_usage:
            return seconds
        check(
            seconds < 10, f"behind those who left {requests_in(left)} requests go on, {usage:.1%} of the cache is used"
        )
        await asyncio.sleep(0.02)


def _held_when_idle(served: Served) -> float:
    """Return the share of held blocks in the dashboard's map of all blocks, once there are no requests."""
    start, has_map = time.monotonic(), False
    with served.http.stream("GET", "/dashboard/events") as feed:
        for line in feed.iter_lines():
            frame = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
            if (moment := frame.get("moment")) is None:
                continue
            has_map = has_map or frame["blocks"] is not None
            if has_map and moment["running"] == moment["waiting"] == 0:
                return float(moment["usage"])
            check(time.monotonic() - start < 10, "requests of bystanders go on")
    raise BrokenPromiseError("the dashboard's feed ended")


WORDS = Path(__file__).read_text().split()


def any_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Draw a path and a body: all routes, chats of all kinds, tools, also invalid requests."""
    text = " ".join(rng.choices(WORDS, k=rng.randrange(3, 60)))
    messages = [{"role": "user", "content": text}]
    schema = {"type": "object", "properties": {rng.choice(WORDS): {"type": "integer"}}}
    length, temperature = rng.randrange(1, 60), rng.choice([0.0, 1.0])
    plain = {"messages": messages, "max_tokens": length, "temperature": temperature, "stream": rng.random() < 0.7}
    chats: list[dict[str, Any]] = [
        {},
        {},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"n": 3, "logprobs": True, "top_logprobs": 3},
        {"stop": [rng.choice("aeiou")], "frequency_penalty": 0.5},
        {"max_tokens": -1},
    ]
    tool = {"name": rng.choice("abc"), "parameters": schema}
    stream = rng.random() < 0.7
    others: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": [text, text[::-1]], "max_tokens": length, "stream": stream, "logprobs": 2}),
        ("/v1/responses", {"input": text, "max_output_tokens": length, "stream": stream}),
        ("/v1/chat/completions", {**plain, "tools": [{"type": "function", "function": tool}]}),
        ("/generate", {"inputs": text, "parameters": {"max_new_tokens": length}}),
        ("/generate_stream", {"inputs": text, "parameters": {"max_new_tokens": length, "details": True}}),
        ("/v1/embeddings", {"input": [text, text[::-1]]}),
        ("/v1/messages", {"messages": messages, "max_tokens": length, "stream": True}),
        ("/tokenize", {"prompt": text}),
    ]
    return rng.choice([*(("/v1/chat/completions", {**plain, **each}) for each in chats), *others])


async def soak_client(where: tuple[str, int], key: str, seed: int, end: float, counts: Counter[str]) -> None:
    """Send requests until the end; one in ten disconnects early."""
    rng = random.Random(seed)
    while time.monotonic() < end:
        async with Connection(where, key) as connection:
            path, body = any_request(rng)
            await connection.send(path, body, X_Request_Id=f"{rng.random()}")
            if rng.random() < 0.1:
                await asyncio.sleep(0.1 * rng.random())
                connection.vanish()
                counts["vanished"] += 1
                continue
            status = (await connection.answer()).status
            check(status in {200, 400, 422}, f"{path}: {status} for {body}")
            counts[str(status)] += 1


async def soak_slow_reader(where: tuple[str, int], key: str, end: float, counts: Counter[str]) -> None:
    """Read slower than tokens arrive, and disconnect when the server has cut the stream off."""
    while time.monotonic() < end:
        async with NarrowConnection(where) as connection:
            await connection.send(COMPLETIONS, {**LONG, "max_tokens": 1500}, Authorization=f"Bearer {key}")
            for _ in range(40):
                await connection.read(250)
                await asyncio.sleep(0.25)
            counts["read slowly"] += 1


async def soak_watcher(where: tuple[str, int], key: str, end: float) -> None:
    """Watch the dashboard from time to time."""
    while time.monotonic() < end:
        async with Connection(where, key) as connection:
            await connection.send("/dashboard/events", b"", "GET")
            await asyncio.sleep(5)
            connection.vanish()
        await asyncio.sleep(20)


def own_megabytes(process: psutil.Process) -> float:
    """Return the anonymous memory of a process in MB."""
    return float(sum(each.anonymous for each in process.memory_maps()) / 2**20)


def figure_9(scale: float) -> str:
    """Half an hour of all loads together, after ten minutes to fill caches: memory grows by at most 5 MB an hour.

    Reads the anonymous memory of both processes once a second, without files, because other Python processes share
    their pages. The growth is the slope of a fitted line. The ten minutes are not scaled: the dashboard keeps data for
    that time.
    """
    warm_s, soak_s = 600, max(1800 * scale, 60)
    names = ("server", "engine")

    async def run(served: Served) -> tuple[list[float], list[tuple[float, ...]], Counter[str]]:
        where, counts, times, sizes = address(served), Counter[str](), list[float](), list[tuple[float, ...]]()
        processes = [psutil.Process(served.process.pid), served.engine]
        begin = time.monotonic() + warm_s
        end = begin + soak_s
        clients = [soak_client(where, keys[seed % 2], seed, end, counts) for seed in range(12)]
        slow = [soak_slow_reader(where, key, end, counts) for key in keys]
        tasks = [asyncio.create_task(each) for each in (*clients, *slow, soak_watcher(where, keys[0], end))]
        while time.monotonic() < end:
            await asyncio.sleep(1)
            for task in tasks:
                if task.done():
                    task.result()  # raises the error of a failed task
            if time.monotonic() > begin:
                times.append(time.monotonic())
                sizes.append(tuple(map(own_megabytes, processes)))
        await asyncio.gather(*tasks)
        return times, sizes, counts

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.toml"
        keys = [add_key(path, Tenant(name=name, read_metrics=True)) for name in ("alice", "bob")]
        options = ("--log-level", "warning", "--audit-log", f"{folder}/audit.jsonl", "--max-unread-outputs", "64")
        with serve("--kv-cache-memory-bytes", "8M", "--api-keys", str(path), *options, key=keys[0]) as served:
            times, sizes, counts = asyncio.run(run(served))
            check(figures(served)["octavo:engine_restarts_total"] == 0, "the engine was started again")
        audited = len(Path(folder, "audit.jsonl").read_text().splitlines())
        check(audited >= sum(counts.values()) - counts["vanished"], "requests are missing in the audit log")

    def slope(values: Iterable[float]) -> float:
        """Return the slope of a fitted line in MB per hour."""
        return 3600 * statistics.linear_regression(times, list(values)).slope

    grown = slope(map(sum, sizes))

    def thirds(values: tuple[float, ...]) -> str:
        """Return the slope of each third: a leak grows in all of them, a cache only in the first."""
        third = len(values) // 3
        return ", ".join(f"{statistics.median(values[i * third : (i + 1) * third]):.1f}" for i in range(3))

    apart = ", ".join(
        f"{name} {min(values):.1f} to {max(values):.1f} MB ({slope(values):+.1f} an hour; medians of thirds "
        f"{thirds(values)})"
        for name, values in zip(names, zip(*sizes, strict=True), strict=True)
    )
    line = (
        f"{sum(counts.values())} requests ({dict(counts)}) in {(warm_s + soak_s) / 60:.0f} minutes; in the last "
        f"{soak_s / 60:.0f} of them {grown:+.1f} MB an hour: {apart}"
    )
    check(grown <= 5, line)
    return line


def figure_10(scale: float) -> str:
    """Ten times as many requests as capacity: all answered, refusals immediate, 90 % of the peak's tokens served."""
    seconds = max(20 * scale, 5)
    body = {"prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.0}

    async def rate(served: Served, work: Coroutine[Any, Any, None]) -> float:
        """Return the tokens per second during some work, by the server's own count."""
        task = asyncio.create_task(work)
        await asyncio.sleep(4)
        start, before = time.monotonic(), await asyncio.to_thread(figures, served)
        await asyncio.sleep(seconds)
        after = await asyncio.to_thread(figures, served)
        result = (after[GENERATED] - before[GENERATED]) / (time.monotonic() - start)
        await task
        return result

    async def closed(where: tuple[str, int]) -> None:
        """Run 32 clients, each with one request after another: no request waits, and none is refused."""
        end = time.monotonic() + seconds + 5

        async def client() -> None:
            async with Connection(where) as connection:
                while time.monotonic() < end:
                    check((await connection.ask(COMPLETIONS, body)).status == 200, "refused at the peak")

        await asyncio.gather(*(client() for _ in range(32)))

    async def flood(where: tuple[str, int], per_second: float, answers: list[tuple[float, Answer]]) -> None:
        """Send requests at a fixed rate, independent of earlier requests."""

        async def one() -> None:
            async with Connection(where) as connection:
                answers.append(await timed(connection.ask(COMPLETIONS, body)))

        tasks, start = list[asyncio.Task[None]](), time.monotonic()
        while (now := time.monotonic() - start) < seconds + 5:
            while len(tasks) < per_second * now:
                tasks.append(asyncio.create_task(one()))
            await asyncio.sleep(len(tasks) / per_second - now)  # until the next is due
        await asyncio.gather(*tasks)
        check(len(answers) == len(tasks), "a request without an answer")

    async def run(served: Served) -> tuple[float, float, list[tuple[float, Answer]]]:
        where, answers, peaks, goodputs = address(served), list[tuple[float, Answer]](), list[float](), list[float]()
        for _ in range(3):  # alternate, because the speed of a machine varies
            peaks.append(await rate(served, closed(where)))
            batch: list[tuple[float, Answer]] = []
            goodputs.append(await rate(served, flood(where, 10 * peaks[-1] / TOKENS, batch)))
            answers += batch
        shares = [goodput / peak for goodput, peak in zip(goodputs, peaks, strict=True)]
        return statistics.median(shares), statistics.median(peaks), answers

    options = ("--max-num-seqs", "32", "--max-num-waiting", "32", "--log-level", "warning")
    with serve(*options, *MODEL) as served:
        share, peak, answers = uvloop.run(run(served))  # uvloop minimizes the clients' load on the engine's cores
    statuses = Counter(answer.status for _, answer in answers)
    refusals = [latency for latency, answer in answers if answer.status == 429]
    check(set(statuses) == {200, 429}, f"{statuses}")
    check(all("retry-after" in answer.headers for _, answer in answers if answer.status == 429), "no Retry-After")
    line = (
        f"{len(answers)} requests at 10 times the peak: {statuses[200]} served, {statuses[429]} refused, p99 of a "
        f"refusal {1000 * percentile(refusals, 0.99):.0f} ms; {share:.0%} of the peak's {peak:.0f} tok/s"
    )
    check(percentile(refusals, 0.99) <= 0.05 and share >= 0.9, line)
    return line


def figure_11(scale: float) -> str:
    """One key sends 50 times as many requests: another key keeps at least 90 % of its fair share, a half."""
    seconds = max(40 * scale, 15)
    body = {"prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.0}

    async def run(where: tuple[str, int], keys: dict[str, str]) -> Counter[str]:
        tokens: Counter[str] = Counter()
        end = time.monotonic() + seconds

        async def client(name: str) -> None:
            while time.monotonic() < end:
                async with Connection(where, keys[name]) as connection:
                    answer = await connection.ask(COMPLETIONS, body)
                    if answer.status == 200 and end - seconds + 3 < time.monotonic() < end:
                        tokens[name] += TOKENS
                    elif answer.status == 429:
                        await asyncio.sleep(int(answer.headers["retry-after"]))

        clients = ["flood"] * 800 + ["modest"] * 16
        await asyncio.gather(*(client(name) for name in clients))
        return tokens

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.toml"
        keys = {name: add_key(path, Tenant(name=name)) for name in ("flood", "modest")}
        with serve(
            "--api-keys", str(path), "--max-num-seqs", "16", "--log-level", "warning", key=keys["modest"]
        ) as served:
            tokens = asyncio.run(run(address(served), keys))
    share = tokens["modest"] / sum(tokens.values())
    total = sum(tokens.values())
    line = f"800 clients of one key, 16 of another: the other gets {share:.0%} of {total} tokens (half is fair)"
    check(share >= 0.45, line)
    return line


def figure_12(_scale: float) -> str:
    """SIGTERM with 50 open streams, short and long: each is completed, or ends with a last event after the grace."""
    grace_s, lengths = 5, [200, 4000]  # tokens: short streams end within that time, long ones do not

    async def run(served: Served) -> list[bytes]:
        async def stream(num_tokens: int) -> bytes:
            async with Connection(address(served)) as connection:
                await connection.send(COMPLETIONS, {**LONG, "max_tokens": num_tokens})
                head = await connection.head()
                pieces = connection.pieces(head)
                body = await anext(pieces)
                begun.release()
                return body + b"".join([piece async for piece in pieces])

        begun = asyncio.Semaphore(0)
        tasks = [asyncio.create_task(stream(length)) for length in lengths * 25]
        for _ in tasks:
            await begun.acquire()
        check(not any(task.done() for task in tasks), "a stream had ended before")
        served.process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*tasks)

    with serve("--max-num-seqs", "64", "--log-level", "warning", "--shutdown-timeout", str(grace_s)) as served:
        start = time.monotonic()
        bodies = asyncio.run(run(served))
        check(served.process.wait(DEADLINE_S) == 0, "the server's exit status")
        seconds = time.monotonic() - start
    reasons: Counter[str] = Counter()
    for body in bodies:
        check(events(body)[-1] == "[DONE]", "a stream without an end")
        last = json.loads(events(body)[-2])
        reasons[last["error"]["code"] if "error" in last else last["choices"][0]["finish_reason"]] += 1
    shown = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
    check(set(reasons) == {"length", "server_closing"}, f"the grace period ended streams of one kind alone: {shown}")
    return f"SIGTERM with 50 open streams: {shown}, each with [DONE]; the server ended by itself ({seconds:.0f} s)"


def figure_13(scale: float) -> str:
    """A million answers, cut into tokens anywhere: streams equal whole answers, with no text after a stop string."""
    count, rng = max(round(1_000_000 * scale), 1000), random.Random(1)
    words = ["a", "b", "ab", "ü", "狐", "\U0001f984", " ", "\n", "stop", "END", "</s>", "🇩🇪", "e\u0301"]
    num_stopped = 0
    for _ in range(count):
        text = "".join(rng.choice(words) for _ in range(rng.randrange(12)))
        data = text.encode()[: rng.choice([None, -1, -2])]
        stops = ["".join(rng.choice(words) for _ in range(rng.randrange(1, 3))) for _ in range(rng.randrange(3))]
        params: dict[str, Any] = {"max_tokens": 100, "stop": stops, "include_stop_str_in_output": rng.random() < 0.3}
        tokens = _cut(data, rng)
        whole, piecewise = (
            _answer(tokens, params, kind, rng) for kind in (RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA)
        )
        check(whole == piecewise, f"{data!r} {params}: {whole!r} whole, {piecewise!r} streamed")
        decoded = data.decode(errors="replace")
        wanted, reason = ended(decoded, stops, is_included=params["include_stop_str_in_output"])
        num_stopped += reason == "stop"
        check(whole == wanted, f"{data!r} {params}: {whole!r}")
    return f"{count} answers in random tokens, {num_stopped} ended by a stop string: streamed is whole, 0 differences"


def figure_streams(scale: float) -> str:
    """1,000 concurrent streams: constant memory per stream, no lost or mixed-up event, and the HTTP cost of a token.

    Each stream has its own prompt and seed, and its text equals the whole answer to the same request.
    """
    counts = [max(round(count * scale), 10) for count in (250, 500, 1000)]
    tokens = 200
    asked = {**LONG, "max_tokens": tokens, "temperature": 1.0}

    def request_of(number: int) -> dict[str, Any]:
        return {**asked, "prompt": f"Story {number}: once upon a time there was a", "seed": number}

    async def whole(where: tuple[str, int], number: int) -> str:
        async with Connection(where) as connection:
            answer = await connection.ask(COMPLETIONS, {**request_of(number), "stream": False})
        return str(json.loads(answer.body)["choices"][0]["text"])

    async def stream(where: tuple[str, int], number: int, text: str) -> int:
        async with Connection(where) as connection:
            body = {**request_of(number), "stream_options": {"include_usage": True}}
            answer = await connection.ask(COMPLETIONS, body)
        chunks = [json.loads(event) for event in events(answer.body) if event != "[DONE]"]
        check(events(answer.body)[-1] == "[DONE]" and chunks[-1]["usage"]["completion_tokens"] == tokens, "lost tokens")
        check(text_of(answer.body) == text, f"stream {number} has another text")
        check(len({chunk["id"] for chunk in chunks}) == 1, f"stream {number} has events of another one")
        return len(chunks)

    async def all_whole(served: Served, count: int) -> list[str]:
        return await asyncio.gather(*(whole(address(served), number) for number in range(count)))

    async def crowd(served: Served, texts: list[str]) -> tuple[float, float, int]:
        """Open streams; return the MB and the CPU seconds that they cost, and the number of their events."""
        process, memory = psutil.Process(served.process.pid), rss_mb(served)
        cpu = sum(process.cpu_times()[:2])
        peak = memory
        where = address(served)
        tasks = [asyncio.create_task(stream(where, number, text)) for number, text in enumerate(texts)]
        while not all(task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=0.1)
            peak = max(peak, rss_mb(served))
        num_events = sum(task.result() for task in tasks)
        return peak - memory, sum(process.cpu_times()[:2]) - cpu, num_events

    found = []
    for count in counts:
        options = ("--max-num-seqs", str(count), "--max-model-len", "512", "--log-level", "warning")
        with serve(*options) as served:
            texts = asyncio.run(all_whole(served, count))
            check(len(set(texts)) == count, "texts that cannot be told apart")
            asyncio.run(crowd(served, texts[:20]))
            found.append(asyncio.run(crowd(served, texts)))
    per_stream = [1024 * memory / count for (memory, _, _), count in zip(found, counts, strict=True)]
    cost = [1e6 * cpu / (count * tokens) for (_, cpu, _), count in zip(found, counts, strict=True)]
    shown = ", ".join(
        f"{count}: {memory:.0f} KB and {microseconds:.0f} us a token"
        for count, memory, microseconds in zip(counts, per_stream, cost, strict=True)
    )
    check(per_stream[-1] <= 1.5 * per_stream[0] + 20, f"memory per stream grows: {shown}")
    return (
        f"streams at once, memory per stream and CPU per token of the HTTP process: {shown}; "
        f"{sum(num_events for *_, num_events in found)} events, none lost, each stream has its own text"
    )


class _Bytes:
    """A tokenizer for arbitrary pieces: a token id is the index of its bytes in a list."""

    def __init__(self, tokens: list[bytes]) -> None:
        self._tokens = tokens

    def incremental_detokenizer(self, _prompt: list[int], *, skip_special_tokens: bool) -> _Decoder:  # noqa: ARG002  a tokenizer's signature
        return _Decoder(self._tokens)

    def decode_token(self, token_id: int) -> str:
        return self._tokens[token_id].decode(errors="replace")


class _Decoder:
    """Holds the bytes of an incomplete character back, like the real detokenizer."""

    def __init__(self, tokens: list[bytes]) -> None:
        self._tokens, self._decoder = tokens, codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_ids: list[int]) -> str:
        return "".join(self._decoder.decode(self._tokens[token_id]) for token_id in token_ids)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def _cut(data: bytes, rng: random.Random) -> list[bytes]:
    tokens, start = [], 0
    while start < len(data):
        end = start + rng.randint(1, 6)
        tokens.append(data[start:end])
        start = end
    return tokens


def _answer(tokens: list[bytes], params: dict[str, Any], kind: RequestOutputKind, rng: random.Random) -> str:
    processor = OutputProcessor(cast("Any", _Bytes(tokens)), lambda: 0.0)
    processor.add_request("a", ["a"], None, [0], SamplingParams(**params, output_kind=kind), arrival_time=0.0)
    text, position, is_over = "", 0, False
    while not is_over:
        count = rng.randint(1, 3)
        ids = list(range(position, min(position + count, len(tokens))))
        position += count
        reason = "length" if position >= len(tokens) else None
        for output in processor.process([EngineCoreOutput("a", ids, finish_reason=reason)]).request_outputs:
            text += output.outputs[0].text
            is_over = output.finished
    return text


FIGURES: dict[str, Callable[[float], str]] = {
    "4": figure_4, "5": figure_5, "6": figure_6, "7": figure_7, "7-together": figure_7_together, "8": figure_8,
    "9": figure_9, "10": figure_10, "11": figure_11, "12": figure_12, "13": figure_13, "streams": figure_streams,
}  # fmt: skip


MODEL: list[str] = []  # for figure 10, and its options


def main() -> int:
    """Run figures; return the number of figures that do not hold as the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("figures", nargs="+", help=f"all, or some of {', '.join(FIGURES)}")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the counts")
    parser.epilog = "Other options are for the server of figure 10: --model ./my-checkpoint --quantization int8, say."
    arguments, MODEL[:] = parser.parse_known_args()
    wanted = list(FIGURES) if "all" in arguments.figures else arguments.figures
    num_failed = 0
    for name in wanted:
        start = time.monotonic()
        try:
            line = FIGURES[name](arguments.scale)
        except (BrokenPromiseError, AssertionError, TimeoutError) as error:
            num_failed += 1
            line = f"DOES NOT HOLD: {error}"
        print(f"| {name} | {line} | {time.monotonic() - start:.0f} s |", flush=True)
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
