"""Measures a server."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import aiohttp

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo.cli.workloads import Item

_END = b"[DONE]"


@dataclass(slots=True)
class Seen:
    """Times of one request in seconds. token_times: Arrival times of events with text."""

    sent: float
    token_times: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    ended: float = 0.0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server and model. url: without `/v1`."""

    url: str
    model: str
    api_key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Request headers."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}


async def find_model(url: str, api_key: str | None) -> str:
    """Return the first model that a server lists. Raises `ConfigError`."""
    headers = Target(url=url, model="", api_key=api_key).headers
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models", headers=headers) as response:
            if response.status != 200:
                raise ConfigError(f"{url}/v1/models answers {response.status}: {(await response.text())[:200]}")
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"no OpenAI API answers at {url}/v1: {error}") from None


def shuffled(items: Sequence[Item]) -> list[Item]:
    """Shuffle each prompt's tokens, so that no cache has the prompt."""
    rng = random.SystemRandom()
    return [
        replace(item, prompt_token_ids=rng.sample(item.prompt_token_ids, len(item.prompt_token_ids))) for item in items
    ]


def arrival_times(count: int, rate: float | None, gaps: Sequence[float], seed: int) -> list[float]:
    """Return the send times of a Poisson process. rate: Requests per second, or None for all requests at time 0.

    gaps: Seconds between the first requests if the rate were 1.
    """
    rng = random.Random(seed)  # noqa: S311
    if rate is None:
        return [0.0] * count
    times, now = [], 0.0
    for index in range(count):
        now += (gaps[index] if index < len(gaps) else rng.expovariate(1.0)) / rate
        times.append(now)
    return times


async def load(
    target: Target,
    items: Sequence[Item],
    times: Sequence[float],
    *,
    max_concurrency: int | None = None,
    timeout_s: float = 600.0,
    on_end: Callable[[Seen], None] = lambda _seen: None,
) -> list[Seen]:
    """Send each request at its time with greedy sampling, and read the answer's stream.

    times: Seconds from the start. max_concurrency: Limit on running requests. Waits for this limit are not measured.
    """
    slots = asyncio.Semaphore(max_concurrency or len(items) or 1)
    start = time.perf_counter()
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=target.headers) as session:

        async def one(item: Item, at: float) -> Seen:
            await asyncio.sleep(start + at - time.perf_counter())
            async with slots:
                seen = await _send(session, target, item)
            on_end(seen)
            return seen

        return await asyncio.gather(*(one(item, at) for item, at in zip(items, times, strict=True)))


async def _send(session: aiohttp.ClientSession, target: Target, item: Item) -> Seen:
    body = {
        "model": target.model,
        "prompt": item.prompt_token_ids,
        "max_tokens": item.num_output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    seen = Seen(time.perf_counter())
    try:
        async with session.post(f"{target.url}/v1/completions", json=body) as response:
            if response.status != 200:
                seen.error = f"status {response.status}: {(await response.text())[:200]}"
                return seen
            await _read(response, seen)
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        seen.error = f"{type(error).__name__}: {error}"
    seen.ended = time.perf_counter()
    if seen.error is None and seen.num_output_tokens != item.num_output_tokens:
        seen.error = f"{seen.num_output_tokens} tokens were generated, but {item.num_output_tokens} were asked for"
    return seen


async def _read(response: aiohttp.ClientResponse, seen: Seen) -> None:
    rest = b""
    async for chunk in response.content.iter_any():
        now = time.perf_counter()
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == _END:
                continue
            event = json.loads(data)
            if "error" in event:
                seen.error = str(event["error"])[:200]
            if event.get("usage"):
                seen.num_prompt_tokens = event["usage"]["prompt_tokens"]
                seen.num_output_tokens = event["usage"]["completion_tokens"]
            if any(choice.get("text") or choice.get("finish_reason") is None for choice in event.get("choices", ())):
                seen.token_times.append(now)


def summarize(seen: Sequence[Seen]) -> dict[str, Any]:
    """Return the figures of a run. Latencies are medians and 99th percentiles in milliseconds.

    ttft: Time to the first event. itl: Between events. tpot: Per token after the first event. e2e: To the end.
    """
    good = [each for each in seen if each.error is None and each.token_times]
    row: dict[str, Any] = {"requests": len(seen), "failed": len(seen) - len(good)}
    if not good:
        return row
    wall = max(each.ended for each in good) - min(each.sent for each in good)
    outputs = sum(each.num_output_tokens for each in good)
    times = [each.token_times for each in good]
    figures = {
        "ttft": [each.token_times[0] - each.sent for each in good],
        "itl": [after - before for each in times for before, after in itertools.pairwise(each)],
        "tpot": [
            (each.token_times[-1] - each.token_times[0]) / (each.num_output_tokens - 1)
            for each in good
            if each.num_output_tokens > 1
        ],
        "e2e": [each.ended - each.sent for each in good],
    }
    row |= {
        "wall_s": round(wall, 3),
        "requests_per_s": round(len(good) / wall, 3),
        "output_tok_per_s": round(outputs / wall, 1),
        "total_tok_per_s": round((outputs + sum(each.num_prompt_tokens for each in good)) / wall, 1),
    }
    for name, values in figures.items():
        for share in (50, 99):
            row[f"{name}_p{share}_ms"] = round(1000 * percentile(values, share), 2) if values else None
    return row


def medians(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Each figure's median."""
    return {
        key: statistics.median(values) if (values := [row[key] for row in rows if row.get(key) is not None]) else None
        for key in max(rows, key=len)
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile with linear interpolation, like numpy. share: 0 to 100."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
