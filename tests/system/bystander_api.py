"""What the worst requests that limits allow cost a bystander: `python tests/system/bystander_api.py`, or some kinds.

`octavo serve` as it stands, with its default limits. Of each kind eight requests are in flight, sent again as they end,
while one client asks for one token, again and again. Its median time beside them may be at most `--ratio` times its own
median just before, and `SLACK_S` more. One line is printed for each kind; the run fails where one breaks the promise.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from serving_process import serve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Event

AT_ONCE = 8
NUM_ASKED = 40
LONGEST_S = 20.0
PATIENCE_S = 60.0
# Two threads of the server take turns every half millisecond, and a bystander's request changes hands some eight times;
# on a machine of two cores each of these may wait for a core besides.
SLACK_S = 0.010
BODY_BYTES = 8 << 20
ONE_TOKEN = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "temperature": 0.0}
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
Case = tuple[str, Callable[[], bytes]]


def spell(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def filled(begin: bytes, entry: bytes, end: bytes, num_bytes: int = BODY_BYTES) -> bytes:
    """As many of an entry as a body has room for."""
    count = (num_bytes - len(begin) - len(end)) // (len(entry) + 1)
    return begin + b",".join([entry] * count) + end


def words(num_chars: int) -> str:
    sentence = "The quick brown fox jumps over the lazy dog, 12 times; they said: it's enough!\n"
    return (sentence * (num_chars // len(sentence) + 1))[:num_chars]


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def tools(count: int, description: str) -> list[dict[str, Any]]:
    fields = {"type": "object", "properties": {"city": {"type": "string", "description": description}}}
    return [
        {"type": "function", "function": {"name": f"tool_{index}", "description": description, "parameters": fields}}
        for index in range(count)
    ]


def keys(count: int) -> bytes:
    return b",".join(b'"key_%d":1' % index for index in range(count))


LARGE = 8_000_000  # characters, of which line breaks are spelled as two
CASES: dict[str, Case] = {
    "truncated": ("/generate", lambda: spell(inputs=words(LARGE), parameters={"truncate": 100, "max_new_tokens": 1})),
    "truncated, no blanks": (
        "/generate",
        lambda: spell(inputs="a" * LARGE, parameters={"truncate": 100, "max_new_tokens": 1}),
    ),
    "longest prompt": (COMPLETIONS, lambda: spell(prompt=words(LARGE), max_tokens=1)),
    "long prompt that fits": (COMPLETIONS, lambda: spell(prompt=words(450_000), max_tokens=1)),
    "longest message": (CHAT, lambda: spell(messages=user(words(LARGE)), max_tokens=1)),
    "most messages": (
        CHAT,
        lambda: filled(b'{"max_tokens":1,"messages":[', b'{"role":"user","content":"a"}', b"]}"),
    ),
    "most turns of Anthropic's": (
        MESSAGES,
        lambda: filled(
            b'{"model":"qwen3","max_tokens":1,"messages":[',
            b'{"role":"user","content":[]},{"role":"assistant","content":[]}',
            b"]}",
        ),
    ),
    "counted": (
        "/v1/messages/count_tokens",
        lambda: spell(model="qwen3", messages=user(words(400_000))),
    ),
    "counted responses": ("/v1/responses/input_tokens", lambda: spell(input=words(400_000))),
    "tokenized": ("/tokenize", lambda: spell(prompt=words(500_000), return_token_strs=True)),
    # Just below the bounds of the lanes of `octavo.runtime.text_work`; "tokenized" is so, too.
    "tokenized, 1.9 KB": ("/tokenize", lambda: spell(prompt=words(1_900))),
    "tokenized, 30 KB": ("/tokenize", lambda: spell(prompt=words(30_000))),
    "counted, 1.9 KB": ("/v1/messages/count_tokens", lambda: spell(model="qwen3", messages=user(words(1_900)))),
    "counted, 30 KB": ("/v1/messages/count_tokens", lambda: spell(model="qwen3", messages=user(words(30_000)))),
    "detokenized": ("/detokenize", lambda: filled(b'{"tokens":[', b"17", b"]}")),
    "most token ids": (COMPLETIONS, lambda: filled(b'{"max_tokens":1,"prompt":[', b"17", b"]}")),
    "most lists": (CHAT, lambda: filled(b'{"messages":[', b"[]", b"]}")),
    "most objects": (CHAT, lambda: filled(b'{"messages":[', b"{}", b"]}")),
    "most fields": (
        CHAT,
        lambda: b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1,' + keys(500_000) + b"}",
    ),
    "most metadata": (CHAT, lambda: b'{"messages":[],"max_tokens":1,"metadata":{' + keys(500_000) + b"}}"),
    "largest logit_bias": (
        COMPLETIONS,
        lambda: spell(prompt="a", max_tokens=1, logit_bias={str(index): 1 for index in range(150_000)}),
    ),
    "most allowed ids": (COMPLETIONS, lambda: spell(prompt="a", max_tokens=1, allowed_token_ids=[17] * 1_500_000)),
    "most tools": (CHAT, lambda: spell(messages=user("a"), max_tokens=1, tools=tools(1024, words(3500)))),
    "biggest schema": (
        CHAT,
        lambda: spell(
            messages=user("a"),
            max_tokens=1,
            response_format={
                "type": "json_schema",
                "json_schema": {
                    "name": "s",
                    "schema": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}},
                },
            },
        ),
    ),
    "too large a schema": (
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
    "deepest JSON": (CHAT, lambda: b'{"messages":' + b"[" * 4_000_000 + b"]" * 4_000_000 + b"}"),
    "escapes": (COMPLETIONS, lambda: b'{"max_tokens":1,"prompt":"' + b"\\u72d0" * 1_390_000 + b'"}'),
    "no JSON at its end": (COMPLETIONS, lambda: filled(b'{"prompt":[', b"1.5", b"]")),
    "most embeddings": ("/v1/embeddings", lambda: spell(input=[words(4000)] * 2000)),
    "most stop strings": (
        COMPLETIONS,
        lambda: spell(prompt="a", max_tokens=200, ignore_eos=True, stop=["a" * 1023 + chr(33 + i) for i in range(64)]),
    ),
    "most logprobs": (
        COMPLETIONS,
        lambda: spell(prompt="a", max_tokens=1000, ignore_eos=True, n=16, logprobs=20),
    ),
    "most prompt logprobs": (
        COMPLETIONS,
        lambda: spell(prompt=[17] * 4000, max_tokens=1, prompt_logprobs=20, echo=True, logprobs=20),
    ),
}


class Client:
    """One connection that is kept."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url).netloc
        self._connection = http.client.HTTPConnection(self._address, timeout=PATIENCE_S)

    def post(self, path: str, body: bytes) -> int:
        """Return the answer's status, 0 where the connection was ended before it."""
        try:
            self._connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = self._connection.getresponse()
            response.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            return 0
        return response.status


def flood(url: str, path: str, body: bytes, is_over: Event, began: Event, told: Queue[Counter[int]]) -> None:
    """Keep `AT_ONCE` requests in flight; in a process of its own, for the bystander's sake."""
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
    for thread in threads:
        thread.join(1)
    told.put(statuses)


@contextlib.contextmanager
def flooded(url: str, path: str, body: bytes) -> Iterator[Counter[int]]:
    """Flood the server meanwhile; the counter has the statuses of the answers that came by then."""
    context = multiprocessing.get_context("spawn")
    is_over, began, told = context.Event(), context.Event(), context.Queue()
    process = context.Process(target=flood, args=(url, path, body, is_over, began, told), daemon=True)
    process.start()
    statuses: Counter[int] = Counter()
    try:
        began.wait()
        time.sleep(0.3)  # the bodies are on their way
        yield statuses
    finally:
        is_over.set()
        with contextlib.suppress(Exception):
            statuses.update(told.get(timeout=30))
        process.terminate()
        process.join()


def times(client: Client, body: bytes) -> list[float]:
    """Ask for one token again and again; return the seconds of each, of the last one those after which it gave up."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--model", help="a checkpoint's folder; default: the built-in model")
    parser.add_argument("--ratio", type=float, default=2.0)
    parser.add_argument("--python", default=sys.executable, help="whose octavo is run")
    parser.add_argument("--option", action="append", default=[], help="of octavo serve")
    arguments = parser.parse_args()
    model = [arguments.model] if arguments.model else []
    broken = []
    options = ("--served-model-name", "qwen3", "--log-level", "warning", *arguments.option)
    body = spell(**ONE_TOKEN)
    print(f"{'kind':28} {'alone':>8} {'beside':>8} {'ratio':>6} {'worst':>8}  answers", flush=True)
    for name in arguments.cases or CASES:
        path, make = CASES[name]
        with serve(*model, *options, python=arguments.python) as served:
            url = str(served.http.base_url)
            client = Client(url)
            times(client, body)
            alone = statistics.median(times(client, body))
            with flooded(url, path, make()) as statuses:
                beside = times(client, body)
        median = statistics.median(beside)
        if median > arguments.ratio * alone + SLACK_S:
            broken.append(name)
        figures = f"{alone * 1e3:6.1f}ms {median * 1e3:6.1f}ms {median / alone:6.1f} {max(beside) * 1e3:6.0f}ms"
        print(f"{name:28} {figures}  {dict(statuses)}{'  BROKEN' if name in broken else ''}", flush=True)
    print("broken: " + (", ".join(broken) or "none"))
    return bool(broken)


if __name__ == "__main__":
    raise SystemExit(main())
