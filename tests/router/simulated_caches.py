"""Routers with the policy cache_aware, simulated caches of engines, and the conversations of benchmarks/routing.py."""

from __future__ import annotations

import asyncio
import json
import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.router.engines import EnginePool
from octavo.router.policies import CacheAware
from octavo.router.request_summary import read_request_summary
from octavo.router.state_file import StateFile

if TYPE_CHECKING:
    from pathlib import Path

    from octavo.router.engines import EngineHandle
    from octavo.router.request_summary import RequestSummary

_WORDS = ["the", "a", "cat", "dog", "house", "tree", "runs", "sleeps", "big", "small", "red", "river", "stone", "bird"]
_BLOCK_BYTES = 64


def words(rng: random.Random, count: int) -> str:
    """Return a text of short words."""
    return " ".join(rng.choice(_WORDS) for _ in range(count))


class SimulatedCache:
    """An engine's cache of blocks, which evicts the least recently used block."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def serve(self, prompt: bytes) -> tuple[int, int]:
        """Compute a prompt. Return its cached blocks and all its blocks."""
        blocks = [prompt[:end] for end in range(_BLOCK_BYTES, len(prompt) + 1, _BLOCK_BYTES)]
        num_cached = next((index for index, block in enumerate(blocks) if block not in self._blocks), len(blocks))
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)
        return num_cached, len(blocks)


@dataclass
class Router:
    """A router. Its requests stay open until `at_once` later ones were sent."""

    urls: list[str]
    state_path: Path | None = None

    def __post_init__(self) -> None:
        self.policy = CacheAware(4096, 1.5, 1 << 18)
        self.pool = EnginePool(self.policy)
        if self.state_path is not None:
            self.state = StateFile(self.state_path, self.pool, self.policy.tree)
            asyncio.run(self.state.read())
        self.pool.change(self.urls)
        self.engines = list(self.pool.engines.values())

    def send(self, summary: RequestSummary) -> EngineHandle:
        """Choose an engine and send a request."""
        engine = self.policy.choose(summary, self.engines)
        self.policy.sent(summary, engine)
        engine.open_tokens += summary.num_tokens + summary.max_tokens
        return engine

    def end(self, summary: RequestSummary, engine: EngineHandle, cached_share: float) -> None:
        """End a request."""
        engine.open_tokens -= summary.num_tokens + summary.max_tokens
        self.policy.ended(summary, engine, cached_share)


@dataclass
class Conversations:
    """Conversations that share a system prompt. Each turn goes to a random router."""

    routers: list[Router]
    num_blocks: int
    count: int = 48
    seed: int = 7
    at_once: int = 8

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        system = {"role": "system", "content": words(self._rng, 30)}
        self._said = [[system] for _ in range(self.count)]
        self._caches = {url: SimulatedCache(self.num_blocks) for url in self.routers[0].urls}

    def turn(self) -> float:
        """Send a turn of each conversation. Return the share of prompt blocks that were cached."""
        rng, num_cached, num_blocks = self._rng, 0, 0
        order = rng.sample(self._said, len(self._said))
        opened: list[tuple[Router, RequestSummary, EngineHandle, float]] = []
        for said in order:
            said.append({"role": "user", "content": words(rng, 40)})
            body = json.dumps({"messages": said, "max_tokens": 8}).encode()
            summary = read_request_summary(body, tenant="", headers={}, session_header="x")
            router = rng.choice(self.routers)
            engine = router.send(summary)
            cached, all_blocks = self._caches[engine.url].serve(summary.prompt[0].tobytes())
            num_cached, num_blocks = num_cached + cached, num_blocks + all_blocks
            opened.append((router, summary, engine, cached / all_blocks))
            if len(opened) > self.at_once:
                ended, *more = opened.pop(0)
                ended.end(*more)
            said.append({"role": "assistant", "content": words(rng, 8)})
        for ended, *more in opened:
            ended.end(*more)
        return num_cached / num_blocks

    def turns(self, count: int) -> float:
        """Send several turns. Return the mean share of cached blocks."""
        return sum(self.turn() for _ in range(count)) / count
