"""`octavo serve --role prefill` and `--role decode` as processes with a router: killed, frozen and restarted."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest
from mooncake_master import needs_mooncake
from router.routing import Routing, run_router
from sdks import anthropic, openai
from serving_process import Served, serve

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow
SMALL = ("--max-num-seqs", "8", "--num-gpu-blocks-override", "1200", "--log-level", "warning")
DRAWN = {"max_tokens": 24, "temperature": 0.8, "seed": 5}
TERMINAL_S = 10.0  # additional to the usual time
_PATIENCE_S = 90.0
NUM_CLIENTS = 48  # more than the receive areas of a decode engine


def prompt_of(name: str, num_times: int = 40) -> str:
    return f"{name}. " + "To be, or not to be, that is the question. " * num_times


@dataclass
class Pair:
    """A router with a prefill and a decode process, and a single process."""

    routing: Routing
    alone: Served
    prefill: Served
    decode: Served

    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of paired requests, prompts sent to the prefill engine, and failed ones of these."""
        engines = self.routing.service.pool.engines.values()
        prefill = next(engine for engine in engines if engine.url == url_of(self.prefill))
        return sum(engine.num_paired for engine in engines), prefill.num_prefills, prefill.num_failed_prefills


def url_of(server: Served) -> str:
    return str(server.http.base_url).rstrip("/")


@pytest.fixture(params=["disk", pytest.param("direct", marks=needs_mooncake)], scope="module")
def options(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    if request.param == "disk":
        return (*SMALL, "--kv-disk-dir", str(tmp_path_factory.mktemp("kv")))
    return (*SMALL, "--kv-direct")


@pytest.fixture(scope="module")
def alone() -> Iterator[Served]:
    with serve(*SMALL) as server:
        yield server


@pytest.fixture(scope="module")
def pair(alone: Served, options: tuple[str, ...]) -> Iterator[Pair]:
    """A pair for tests that do not change it."""
    with started(alone, options) as pair:
        yield pair


@contextlib.contextmanager
def started(alone: Served, options: tuple[str, ...]) -> Iterator[Pair]:
    with (
        serve("--role", "prefill", *options) as prefill,
        serve("--role", "decode", *options) as decode,
        run_router(url_of(prefill), url_of(decode), policy="least_loaded") as routing,
    ):
        yield Pair(routing, alone, prefill, decode)


def family_of(server: Served) -> list[psutil.Process]:
    """Return the server, its engine, and the engine's children."""
    parent = psutil.Process(server.process.pid)
    return [parent, *parent.children(recursive=True)]


def ask(http, prompt: str, **more):
    answer = http.post("/v1/completions", json={"prompt": prompt, "logprobs": 1, **DRAWN, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def figure(server: Served, name: str) -> float:
    lines = [
        line.split() for line in server.http.get("/metrics").text.splitlines() if line.startswith(f"octavo:{name}")
    ]
    return sum(float(value) for _, value in lines)


def num_open(server: Served) -> float:
    return figure(server, "num_requests_running") + figure(server, "num_requests_waiting")


def test_prefill_decode_pair_answers_equal_single_engine(pair: Pair) -> None:
    before, computed = pair.counts(), figure(pair.decode, "scheduled_tokens_total")
    with pair.routing.http() as http:
        for number in range(6):
            prompt = prompt_of(f"Number {number}", 10 * number + 24)
            assert ask(http, prompt, n=1 + number % 2) == ask(pair.alone.http, prompt, n=1 + number % 2)
    assert [after - since for after, since in zip(pair.counts(), before, strict=True)] == [6, 6, 0]
    assert figure(pair.decode, "scheduled_tokens_total") - computed < 1000, "it computed no prompt"


def test_openai_and_anthropic_sdks_get_equal_answers_from_pair(pair: Pair) -> None:
    told, before = [], pair.counts()[0]
    for url in (url_of(pair.alone), pair.routing.url):
        turns = [{"role": "user", "content": prompt_of("What is said here?")}]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(model="octavo-demo", messages=turns, stream=True, **DRAWN)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            response = client.responses.create(model="octavo-demo", input=prompt_of("And here?"), temperature=0.0)
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
            greedy = {"temperature": 0.0}
            message = client.messages.create(model="octavo-demo", messages=turns, max_tokens=16, extra_body=greedy)
        told.append((text, response.output_text, message.content[0].text))
    assert told[0] == told[1]
    assert pair.counts()[0] - before == 3


class Asking:
    """Many parallel streams, each with its own prompt. told: their texts and ends. seconds: how long they took."""

    def __init__(self, http, count: int, name: str) -> None:
        self.prompts = [prompt_of(f"{name} {number}") for number in range(count)]
        self.told: dict[int, tuple[str, str]] = {}
        self.seconds: list[float] = []
        self.usual_s = _PATIENCE_S
        self._http = http
        self._threads = [threading.Thread(target=self._ask, args=[number]) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        start, text, end = time.monotonic(), "", "nothing"
        body = {"prompt": self.prompts[number], "stream": True, **DRAWN}
        with self._http.stream("POST", "/v1/completions", json=body, timeout=_PATIENCE_S) as answer:
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if "choices" in data:
                    text += json.loads(data)["choices"][0]["text"]
                    end = "whole"
                elif "error" in data:
                    end = json.loads(data)["error"]["code"]
        self.told[number] = text, end
        self.seconds.append(time.monotonic() - start)

    def ended(self, usual_s: float = _PATIENCE_S) -> None:
        """Wait for all answers. usual_s: time of the slowest one on this machine without a fault."""
        for thread in self._threads:
            thread.join(_PATIENCE_S)
        assert len(self.told) == len(self.prompts), "a request has not ended"
        assert max(self.seconds) < usual_s + TERMINAL_S

    def were_answered(self, pair: Pair, *, may_be_lost: bool = False) -> None:
        """Compare the answers with those of one engine. may_be_lost: a stream may have ended with an error."""
        for number, prompt in enumerate(self.prompts):
            text, end = self.told[number]
            expected = ask(pair.alone.http, prompt)[0]["text"]
            assert (text, end) == (expected, "whole") or (
                may_be_lost and end == "engine_lost" and expected.startswith(text)
            )


def test_client_disconnect_ends_requests_on_both_engines(pair: Pair) -> None:
    with pair.routing.http() as http:
        for number in range(3):
            with contextlib.suppress(httpx.ReadTimeout):
                http.post("/v1/completions", json={"prompt": prompt_of(f"left {number}", 80), **DRAWN}, timeout=0.15)
        for server in (pair.prefill, pair.decode):
            server.wait_until(lambda server=server: not num_open(server), 10)
        assert_answered(pair, http, "Who stays")


def under_load(pair: Pair, http, name: str, num_begun: int) -> Asking:
    """Send many requests, and return when `num_begun` prompts were sent. Measures `usual_s` with as many before."""
    usual = Asking(http, NUM_CLIENTS, f"before {name}")
    usual.ended()
    asking, before = Asking(http, NUM_CLIENTS, name), pair.counts()[1]
    asking.usual_s = max(usual.seconds)
    deadline = time.monotonic() + 20
    while pair.counts()[1] - before < num_begun and time.monotonic() < deadline:
        time.sleep(0.002)
    return asking


def assert_answered(pair: Pair, http, name: str) -> None:
    prompt = prompt_of(name)
    assert ask(http, prompt) == ask(pair.alone.http, prompt)


def test_frozen_prefill_engine_does_not_change_answers(pair: Pair) -> None:
    with pair.routing.http() as http:
        family = family_of(pair.prefill)
        asking = under_load(pair, http, "frozen", 3)
        for each in family:
            each.suspend()
        try:
            asking.ended(asking.usual_s)
        finally:
            for each in family:
                each.resume()
        asking.were_answered(pair)
        pair.routing.wait_ready(2)
        before = pair.counts()[0]
        assert_answered(pair, http, "Thawed")
        assert pair.counts()[0] == before + 1, "it has its part again"


def helper_of(server: Served) -> psutil.Process:
    """Return the process of a server that runs Mooncake."""
    [helper] = [each for each in family_of(server) if any("mooncake_process" in word for word in each.cmdline())]
    return helper


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_stopped_mooncake_process_does_not_change_answers(pair: Pair, options: tuple[str, ...], side: str) -> None:
    """The engine still answers the other engine. Only the bytes of blocks do not move."""
    if "--kv-direct" not in options:
        pytest.skip("a store has no such process")
    with pair.routing.http() as http:
        helper = helper_of(pair.prefill if side == "prefill" else pair.decode)
        asking = under_load(pair, http, f"stopped {side}", 3)
        helper.suspend()
        try:
            asking.ended(asking.usual_s)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                helper.resume()
        asking.were_answered(pair)


def test_killed_prefill_engine_does_not_change_answers(alone: Served, options: tuple[str, ...]) -> None:
    with started(alone, options) as pair, pair.routing.http() as http:
        asking = under_load(pair, http, "killed", 3)
        pair.prefill.process.kill()
        asking.ended(asking.usual_s)
        asking.were_answered(pair)
        pair.routing.wait_ready(1)
        before = pair.counts()[0]
        with serve("--role", "prefill", *options, "--port", url_of(pair.prefill).rpartition(":")[2]):
            pair.routing.wait_ready(2)
            assert_answered(pair, http, "Born again")
            assert pair.counts()[0] == before + 1, "the new one has its part"


def test_prefill_engine_answers_after_decode_engine_is_killed(alone: Served, options: tuple[str, ...]) -> None:
    with started(alone, options) as pair, pair.routing.http() as http:
        asking = under_load(pair, http, "decode", 2)
        family = family_of(pair.decode)
        pair.decode.process.kill()
        asking.ended(asking.usual_s)
        asking.were_answered(pair, may_be_lost=True)
        assert_answered(pair, http, "Without it")
        assert psutil.wait_procs(family, timeout=10)[1] == [], "no orphan is left"
