"""Measure how much the worst allowed requests slow down a bystander: `python tools/bystander_api.py`, or some kinds.

Runs `octavo serve` with its default limits. For each kind, eight requests are in flight and are repeated when they end,
while another client, the bystander, repeatedly asks for one token. In each round the bystander is measured

- alone,
- with the load on the machine alone: the same eight clients send the same bytes to another server, which reads them and
  answers immediately; or, if the tokens of a request are the main cost, with equally long plain requests to octavo,
- together with the worst requests.

Its median time with the worst requests may be at most `--ratio` times the larger one of the first two medians. Prints
one line for each kind. The run fails if a kind breaks the promise.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import queue
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvicorn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "system"))
from serving_process import serve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Event

AT_ONCE = 8
NUM_ASKED = 20  # in each round
LONGEST_S = 2.0  # of one measurement, unless a single answer takes longer
PATIENCE_S = 60.0
BODY_BYTES = 8 << 20
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"


def spell(**fields: Any) -> bytes:
    """Return a JSON object of these fields."""
    return json.dumps(fields).encode()


def filled(begin: bytes, entry: bytes, end: bytes, num_bytes: int = BODY_BYTES) -> bytes:
    """Return a body with as many copies of an entry as it has room for."""
    count = (num_bytes - len(begin) - len(end)) // (len(entry) + 1)
    return begin + b",".join([entry] * count) + end


def words(num_chars: int) -> str:
    """Return prose of `num_chars` characters."""
    sentence = "The quick brown fox jumps over the lazy dog, 12 times; they said: it's enough!\n"
    return (sentence * (num_chars // len(sentence) + 1))[:num_chars]


def user(content: str) -> list[dict[str, str]]:
    """Return the messages of one user turn."""
    return [{"role": "user", "content": content}]


def tools(count: int, description: str) -> list[dict[str, Any]]:
    """Return `count` tools with one described parameter each."""
    fields = {"type": "object", "properties": {"city": {"type": "string", "description": description}}}
    return [
        {"type": "function", "function": {"name": f"tool_{index}", "description": description, "parameters": fields}}
        for index in range(count)
    ]


def keys(count: int) -> bytes:
    """Return the members of a JSON object with `count` keys."""
    return b",".join(b'"key_%d":1' % index for index in range(count))


ONE_TOKEN = spell(messages=user("Hello"), max_tokens=1, temperature=0.0)
MEDIUM_CHAT = spell(messages=user(words(3_000)), max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of request.

    plain: an ordinary request with as many tokens, for comparison. asked: the bystander's request. options: of octavo
    serve.
    """

    path: str
    make: Callable[[], bytes]
    plain: Callable[[], bytes] | None = None
    asked: bytes = ONE_TOKEN
    options: tuple[str, ...] = ()


NAMES = {f"p{index}": {"type": "string"} for index in range(2000)}
BIGGEST_SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "s", "schema": {"type": "object", "properties": NAMES}},
}
LARGE = 8_000_000  # characters; JSON spells a line break as two
CASES: dict[str, Case] = {
    "truncated": Case(
        "/generate",
        lambda: spell(inputs=words(LARGE), parameters={"truncate": 100, "max_new_tokens": 1}),
    ),
    "truncated, no blanks": Case(
        "/generate",
        lambda: spell(inputs="a" * LARGE, parameters={"truncate": 100, "max_new_tokens": 1}),
    ),
    "longest prompt": Case(COMPLETIONS, lambda: spell(prompt=words(LARGE), max_tokens=1)),
    "long prompt that fits": Case(COMPLETIONS, lambda: spell(prompt=words(450_000), max_tokens=1)),
    "longest message": Case(CHAT, lambda: spell(messages=user(words(LARGE)), max_tokens=1)),
    "most messages": Case(
        CHAT,
        lambda: filled(b'{"max_tokens":1,"messages":[', b'{"role":"user","content":"a"}', b"]}"),
    ),
    "most turns of Anthropic's": Case(
        MESSAGES,
        lambda: filled(
            b'{"model":"qwen3","max_tokens":1,"messages":[',
            b'{"role":"user","content":[]},{"role":"assistant","content":[]}',
            b"]}",
        ),
    ),
    "counted": Case(
        "/v1/messages/count_tokens",
        lambda: spell(model="qwen3", messages=user(words(400_000))),
    ),
    "counted responses": Case("/v1/responses/input_tokens", lambda: spell(input=words(400_000))),
    "tokenized": Case("/tokenize", lambda: spell(prompt=words(500_000), return_token_strs=True)),
    # Just below the bounds of `octavo.runtime.text_work`; "tokenized" is so, too.
    "tokenized, 450 B": Case("/tokenize", lambda: spell(prompt=words(450))),
    "counted, 400 B": Case("/v1/messages/count_tokens", lambda: spell(model="qwen3", messages=user(words(400)))),
    "tokenized, 1.9 KB": Case("/tokenize", lambda: spell(prompt=words(1_900))),
    "tokenized, 30 KB": Case("/tokenize", lambda: spell(prompt=words(30_000))),
    "counted, 1.9 KB": Case("/v1/messages/count_tokens", lambda: spell(model="qwen3", messages=user(words(1_900)))),
    "counted, 30 KB": Case("/v1/messages/count_tokens", lambda: spell(model="qwen3", messages=user(words(30_000)))),
    "tokenized, a chat of 3 KB beside": Case("/tokenize", lambda: spell(prompt=words(30_000)), asked=MEDIUM_CHAT),
    "detokenized": Case("/detokenize", lambda: filled(b'{"tokens":[', b"17", b"]}")),
    "most token ids": Case(COMPLETIONS, lambda: filled(b'{"max_tokens":1,"prompt":[', b"17", b"]}")),
    "most lists": Case(CHAT, lambda: filled(b'{"messages":[', b"[]", b"]}")),
    "most objects": Case(CHAT, lambda: filled(b'{"messages":[', b"{}", b"]}")),
    "most fields": Case(
        CHAT,
        lambda: b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1,' + keys(500_000) + b"}",
    ),
    "most metadata": Case(CHAT, lambda: b'{"messages":[],"max_tokens":1,"metadata":{' + keys(500_000) + b"}}"),
    "largest logit_bias": Case(
        COMPLETIONS,
        lambda: spell(prompt="a", max_tokens=1, logit_bias={str(index): 1 for index in range(150_000)}),
    ),
    "most allowed ids": Case(COMPLETIONS, lambda: spell(prompt="a", max_tokens=1, allowed_token_ids=[17] * 1_500_000)),
    "most tools": Case(CHAT, lambda: spell(messages=user("a"), max_tokens=1, tools=tools(1024, words(3500)))),
    "biggest schema": Case(CHAT, lambda: spell(messages=user("a"), max_tokens=1, response_format=BIGGEST_SCHEMA)),
    "biggest schema, 20 tokens": Case(
        CHAT,
        lambda: spell(messages=user("a"), max_tokens=20, response_format=BIGGEST_SCHEMA),
        plain=lambda: spell(messages=user("a"), max_tokens=20, ignore_eos=True),
    ),
    "too large a schema": Case(
        CHAT,
        lambda: spell(
            messages=user("a"),
            max_tokens=1,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": {"type": "object", "enum": ["a"] * 1_500_000}},
            },
        ),
    ),
    "deepest JSON": Case(CHAT, lambda: b'{"messages":' + b"[" * 4_000_000 + b"]" * 4_000_000 + b"}"),
    "escapes": Case(COMPLETIONS, lambda: b'{"max_tokens":1,"prompt":"' + b"\\u72d0" * 1_390_000 + b'"}'),
    "no JSON at its end": Case(COMPLETIONS, lambda: filled(b'{"prompt":[', b"1.5", b"]")),
    "most embeddings": Case("/v1/embeddings", lambda: spell(input=[words(4000)] * 2000)),
    "most stop strings": Case(
        COMPLETIONS,
        lambda: spell(prompt="a", max_tokens=200, ignore_eos=True, stop=["a" * 1023 + chr(33 + i) for i in range(64)]),
        plain=lambda: spell(prompt="a", max_tokens=200, ignore_eos=True),
    ),
    # With 56 streams each one and the bystander gets a slot. With 128 the bystander waits for one.
    "most logprobs in slots": Case(
        COMPLETIONS,
        lambda: spell(prompt="a", max_tokens=1900, ignore_eos=True, n=7, logprobs=20),
        plain=lambda: spell(prompt="a", max_tokens=1900, ignore_eos=True, n=7),
    ),
    "logprobs, more than slots": Case(
        COMPLETIONS,
        lambda: spell(prompt="a", max_tokens=40, ignore_eos=True, n=16, logprobs=20),
        plain=lambda: spell(prompt="a", max_tokens=40, ignore_eos=True, n=16),
    ),
    "most prompt logprobs": Case(
        COMPLETIONS,
        lambda: spell(prompt=[17] * 1900, max_tokens=1, prompt_logprobs=20, echo=True, logprobs=20),
        plain=lambda: spell(prompt=[17] * 1900, max_tokens=1),
        options=("--no-enable-prefix-caching",),  # prompts with log probabilities are not cached
    ),
}


class Client:
    """A client with one persistent connection."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url).netloc
        self._connection = http.client.HTTPConnection(self._address, timeout=PATIENCE_S)

    def post(self, path: str, body: bytes) -> int:
        """Send a request; return the answer's status, 0 if the connection was closed before it."""
        try:
            self._connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = self._connection.getresponse()
            response.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            return 0
        return response.status


def flood(url: str, path: str, body: bytes, is_over: Event, began: Event, told: Queue[Counter[int]]) -> None:
    """Keep `AT_ONCE` requests in flight. Runs in a process of its own, so that it does not slow down the bystander."""
    statuses: Counter[int] = Counter()

    def send() -> None:
        client = Client(url)
        while not is_over.is_set():
            statuses[client.post(path, body)] += 1

    threads = [threading.Thread(target=send, daemon=True) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    began.set()
    is_over.wait()
    told.put(Counter(statuses))


@contextlib.contextmanager
def flooded(url: str, path: str, body: bytes) -> Iterator[Counter[int]]:
    """Flood the server during the context; at its end the yielded counter has the statuses of the answers."""
    context = multiprocessing.get_context("fork")
    is_over, began, told = context.Event(), context.Event(), context.Queue()
    process = context.Process(target=flood, args=(url, path, body, is_over, began, told), daemon=True)
    process.start()
    statuses: Counter[int] = Counter()
    try:
        began.wait()
        time.sleep(0.3)  # until the bodies are being sent
        yield statuses
    finally:
        is_over.set()
        with contextlib.suppress(queue.Empty):
            statuses.update(told.get(timeout=30))
        process.kill()
        process.join()


async def read_and_answer(scope: Any, receive: Any, send: Any) -> None:
    """Serve ASGI: read a request and answer it without any work."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"{}"})


def serve_elsewhere(sock: socket.socket) -> None:
    """Run a server that reads bodies and answers immediately."""
    config = uvicorn.Config(read_and_answer, log_config=None, lifespan="off")
    uvicorn.Server(config).run(sockets=[sock])


@contextlib.contextmanager
def elsewhere() -> Iterator[str]:
    """Run the other server in the context; yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        process = multiprocessing.get_context("fork").Process(target=serve_elsewhere, args=(sock,), daemon=True)
        process.start()
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        process.kill()
        process.join()


def times(client: Client, body: bytes) -> list[float]:
    """Send a request repeatedly; return the seconds of each. The last one may have timed out."""
    seconds: list[float] = []
    start = time.monotonic()
    while len(seconds) < NUM_ASKED and (time.monotonic() < start + LONGEST_S or not seconds):
        began = time.monotonic()
        status = client.post(CHAT, body)
        seconds.append(time.monotonic() - began)
        if status == 0:
            break
        if status != 200:
            raise RuntimeError(f"the bystander got {status}")
    return seconds


@dataclass(slots=True)
class Times:
    """Seconds of the bystander's requests in all rounds."""

    alone: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)  # with the load on the machine alone, or with plain requests
    beside: list[float] = field(default_factory=list)
    answers: Counter[int] = field(default_factory=Counter)

    @property
    def ratio(self) -> float:
        """The median with the worst requests divided by the larger one of the other medians."""
        alone, own, beside = map(statistics.median, (self.alone, self.own, self.beside))
        return beside / max(alone, own)

    def __str__(self) -> str:
        alone, own, beside = (f"{statistics.median(each) * 1e3:7.1f}" for each in (self.alone, self.own, self.beside))
        longest_own, longest = (f"{max(each) * 1e3:7.0f}" for each in (self.own, self.beside))
        return f"{alone} {own} {beside} {self.ratio:6.1f} {longest_own} {longest}  {dict(self.answers)}"


def measure(case: Case, url: str, other: str, num_rounds: int) -> Times:
    """Measure a kind of request in several rounds."""
    client, body = Client(url), case.make()
    share = (other, body) if case.plain is None else (url, case.plain())
    told = Times()
    times(client, case.asked)
    for _ in range(num_rounds):
        told.alone += times(client, case.asked)
        with flooded(share[0], case.path, share[1]):
            told.own += times(client, case.asked)
        settle(client, case.asked, min(told.alone))
        with flooded(url, case.path, body) as statuses:
            told.beside += times(client, case.asked)
        told.answers += statuses
        settle(client, case.asked, min(told.alone))
    return told


def settle(client: Client, body: bytes, alone: float) -> None:
    """Wait until earlier requests have ended: until the bystander is as fast as alone again."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        began = time.monotonic()
        client.post(CHAT, body)
        if time.monotonic() - began < 2 * alone:
            break


def main() -> int:
    """Measure the requested kinds. Returns 1 if one breaks the promise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--model", help="a checkpoint's folder; default: the built-in model")
    parser.add_argument("--ratio", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", default=sys.executable, help="whose octavo is run")
    parser.add_argument("--option", action="append", default=[], help="of octavo serve")
    arguments = parser.parse_args()
    model = [arguments.model] if arguments.model else []
    broken = []
    options = ("--served-model-name", "qwen3", "--log-level", "warning", *arguments.option)
    print(f"{'':33} medians, ms{'':13}         longest, ms")
    print(
        f"{'kind':33} {'alone':>7} {'own':>7} {'beside':>7} {'ratio':>6} {'own':>7} {'beside':>7}  answers", flush=True
    )
    with elsewhere() as other, contextlib.ExitStack() as stack:
        running: tuple[str, ...] | None = None
        for name in arguments.cases or CASES:
            case = CASES[name]
            if case.options != running:
                stack.close()
                served = stack.enter_context(serve(*model, *options, *case.options, python=arguments.python))
                running = case.options
            told = measure(case, str(served.http.base_url), other, arguments.rounds)
            if told.ratio > arguments.ratio:
                broken.append(name)
            print(f"{name:33} {told}{'  BROKEN' if name in broken else ''}", flush=True)
    print("broken: " + (", ".join(broken) or "none"))
    return bool(broken)


if __name__ == "__main__":
    raise SystemExit(main())
