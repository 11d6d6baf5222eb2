"""A steady load of requests with known right answers; each answer is checked to its last byte."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raw_http import Answer, Connection

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PATH = "/v1/completions"
HUNG_S = 40.0  # then a client gives up: the request counts as hung
NUM_TOKENS = 32
_PAUSE_S, _PAUSE_AFTER_FAILURE_S = 0.05, 0.25
_ENDS_EARLY = (ConnectionError, asyncio.IncompleteReadError, ValueError, IndexError)  # of `Connection`
_HEROES = [f"a {kind} {who}" for kind in ("big", "small", "red", "happy") for who in ("cat", "dog", "boy", "bird")]


def questions() -> list[dict[str, Any]]:
    """Return bodies: long beginnings, each with several ends, greedy and sampled, streamed and whole.

    A beginning is repeated only after all other ones. If they do not all fit the cache, it has been evicted by then.
    """
    bodies = []
    for index, (end, how) in enumerate((("One day", "greedy"), ("At night", "sampled"), ("Then", "greedy"))):
        for hero in _HEROES:
            story = f"Once upon a time there was {hero}. " + f"Every day {hero} went to the park to play. " * 10
            sampling: dict[str, Any] = {"temperature": 0.0} if how == "greedy" else {"temperature": 0.9, "seed": index}
            body = {"prompt": story + end, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 1, **sampling}
            bodies.append({**body, "stream": True} if (len(bodies) + index) % 2 else body)
    return bodies


@dataclass(frozen=True, slots=True)
class Told:
    """The content of an answer. tokens: with their log probabilities. num_reasons, num_dones, num_errors: end markers.

    is_more_behind: an event follows [DONE].
    """

    tokens: list[tuple[str, float]]
    num_reasons: int
    num_dones: int
    num_errors: int
    is_more_behind: bool = False


def read_told(answer: Answer, *, is_stream: bool) -> Told:
    """Read an answer, or the beginning of one."""
    if not is_stream:
        choices = json.loads(answer.body)["choices"]
        return Told(_tokens(choices), _num_reasons(choices), 1, 0)
    tokens: list[tuple[str, float]] = []
    num_reasons = num_dones = num_errors = 0
    is_more_behind = False
    *whole, _ = answer.body.decode(errors="replace").split("\n\n")
    for event in whole:
        data = event.removeprefix("data: ")
        is_more_behind |= num_dones > 0
        if data == "[DONE]":
            num_dones += 1
            continue
        read = json.loads(data)
        num_errors += "error" in read
        choices = read.get("choices", [])
        tokens += _tokens(choices)
        num_reasons += _num_reasons(choices)
    return Told(tokens, num_reasons, num_dones, num_errors, is_more_behind)


def _tokens(choices: list[dict[str, Any]]) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for choice in choices:
        if logprobs := choice.get("logprobs"):
            found += zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    return found


def _num_reasons(choices: list[dict[str, Any]]) -> int:
    return sum(choice.get("finish_reason") is not None for choice in choices)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended: whole, error (reported), refused (503 and similar), cut, unreachable or hung."""

    port: int
    begun: float
    ended: float
    kind: str
    is_wrong: bool = False
    is_double: bool = False
    words: str = ""


def judge(
    answer: Answer, body: dict[str, Any], right: list[tuple[str, float]], *, is_cut: bool
) -> tuple[str, bool, bool]:
    """Return the kind of the outcome, whether a token is wrong, and whether anything was sent twice."""
    if answer.status != 200:
        return "cut" if is_cut else "refused", False, False
    if is_cut and "stream" not in body:
        return "cut", False, False
    told = read_told(answer, is_stream="stream" in body)
    is_whole = told.num_reasons == 1 and told.num_dones == 1 and not is_cut
    is_wrong = told.tokens != right[: len(told.tokens)] or (is_whole and told.tokens != right)
    is_double = (
        told.is_more_behind
        or told.num_reasons + told.num_errors > 1
        or told.num_dones > 1
        or len(told.tokens) > len(right)
    )
    if is_whole and not told.num_errors:
        return "whole", is_wrong, is_double
    return "error" if told.num_errors and told.num_dones else "cut", is_wrong, is_double


async def ask(port: int, body: dict[str, Any], right: list[tuple[str, float]]) -> Outcome:
    """Send a request on a new connection, and read the answer to its end."""
    begun = time.monotonic()
    try:
        async with asyncio.timeout(HUNG_S):
            kind, is_wrong, is_double, words = await _ask(port, body, right)
    except TimeoutError:
        return Outcome(port, begun, time.monotonic(), "hung")
    return Outcome(port, begun, time.monotonic(), kind, is_wrong, is_double, words)


async def _ask(port: int, body: dict[str, Any], right: list[tuple[str, float]]) -> tuple[str, bool, bool, str]:
    try:
        async with Connection(("127.0.0.1", port)) as connection:
            await connection.send(PATH, body, Connection="close")
            head = await connection.head()
            got, is_cut, excess = bytearray(), False, b""
            try:
                async for piece in connection.pieces(head):
                    got += piece
                excess = await connection.reader.read()
            except _ENDS_EARLY:
                is_cut = True
    except (*_ENDS_EARLY, OSError):
        return "unreachable", False, False, ""
    answer = Answer(head.status, head.headers, bytes(got))
    kind, is_wrong, is_double = judge(answer, body, right, is_cut=is_cut)
    words = "" if kind == "whole" and not (is_wrong or is_double) else answer.body[-300:].decode(errors="replace")
    return kind, is_wrong, is_double or bool(excess), f"{head.status} {words}" if words else ""


async def right_answers(port: int) -> list[list[tuple[str, float]]]:
    """Return an engine's answer to each question."""
    answers = []
    for body in questions():
        async with Connection(("127.0.0.1", port)) as connection:
            answer = await connection.ask(PATH, body)
        answers.append(read_told(answer, is_stream="stream" in body).tokens)
        if len(answers[-1]) != NUM_TOKENS:
            raise ValueError(f"{len(answers[-1])} tokens instead of {NUM_TOKENS}: {answer.body[:300]!r}")
    return answers


@dataclass(slots=True)
class Load:
    """Clients that send requests until `stop`, `num_clients` at each port.

    is_salted: no request can hit the prefix of another one.
    """

    ports: Sequence[int]
    right: list[list[tuple[str, float]]]
    num_clients: int
    is_salted: bool = False
    outcomes: list[Outcome] = field(default_factory=list)
    open: dict[int, float] = field(default_factory=dict)  # start times of open requests
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self) -> None:
        """Start the clients."""
        self._tasks = [asyncio.create_task(self._go_on(port)) for port in self.ports for _ in range(self.num_clients)]

    async def stop(self) -> None:
        """Stop the clients."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _go_on(self, port: int) -> None:
        bodies = questions()
        while True:
            number = next(self._numbers)
            index = number % len(bodies)
            self.open[number] = time.monotonic()
            try:
                salt = {"cache_salt": str(number)} if self.is_salted else {}
                outcome = await ask(port, bodies[index] | salt, self.right[index])
            finally:
                del self.open[number]
            self.outcomes.append(outcome)
            await asyncio.sleep(_PAUSE_S if outcome.kind == "whole" else _PAUSE_AFTER_FAILURE_S)

    def since(self, start: float) -> list[Outcome]:
        """Return the outcomes of requests that ended since then."""
        return [outcome for outcome in self.outcomes if outcome.ended >= start]

    def kinds(self, start: float) -> Counter[str]:
        """Count those outcomes by kind."""
        return Counter(outcome.kind for outcome in self.since(start))
