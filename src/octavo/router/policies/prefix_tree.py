"""A bounded tree of pieces of prompts. The least recently used pieces are dropped."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.router.engines import EngineHandle
    from octavo.router.request_summary import RequestSummary


@dataclass(frozen=True, slots=True)
class Expected:
    """The prefix of a prompt expected in an engine's cache.

    num_bytes: Length of the prefix. If the engine may still compute all its pieces, because no piece was sent before
    the engine's oldest open request, num_bytes is 0.
    since: Time of the least recently sent piece.
    """

    num_bytes: int
    since: int
    now: int


@dataclass(frozen=True, slots=True)
class Found:
    """The known prefixes of a prompt.

    num_bytes: Length of each engine's prefix.
    is_branch: True if earlier prompts continue the longest prefix, but no engine has this prompt's next piece.
    """

    num_bytes: dict[EngineHandle, int]
    is_branch: bool


@dataclass(slots=True)
class _Node:
    """A piece of a prompt. times: When the piece was last sent to an engine, by engine number."""

    times: dict[int, int] = field(default_factory=dict)
    has_more: bool = False


class PrefixTree:
    """Prompts that were sent to engines. Each piece of a prompt has a node.

    A node's key is a hash of the prompt up to the piece's end. Engines are assumed to evict the least recently used
    content first. So one time per engine is stored: content last sent at this time or earlier counts as evicted.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._nodes: OrderedDict[bytes, _Node] = OrderedDict()  # least recently used first, parents after children
        self._lost: dict[int, int] = {}  # by engine number
        self._open: dict[int, set[int]] = {}
        self._now = 0

    def find(self, summary: RequestSummary, engines: Sequence[EngineHandle]) -> Found:
        """Return each engine's known prefix."""
        num_bytes, left, is_branch = dict.fromkeys(engines, 0), list(engines), False
        hashes, ends = summary.pieces
        for digest, end in zip(hashes, ends, strict=True):
            node = self._nodes.get(digest)
            left = [] if node is None else [engine for engine in left if self._has(node, engine.number)]
            if node is None or not left:
                return Found(num_bytes, is_branch)
            for engine in left:
                num_bytes[engine] = end
            is_branch = node.has_more
        return Found(num_bytes, is_branch=False)

    def _has(self, node: _Node, number: int) -> bool:
        return node.times.get(number, 0) > self._lost.get(number, 0)

    def add(self, summary: RequestSummary, engine: EngineHandle) -> Expected:
        """Record a sent prompt. Return the prefix expected in the engine's cache. Call `close` later."""
        self._now += 1
        number, now = engine.number, self._now
        hashes, _ = summary.pieces
        num_bytes = self.find(summary, [engine]).num_bytes[engine]
        since, parent = now, None
        for digest in hashes:
            node = self._nodes.get(digest)
            if node is None:
                node = self._nodes[digest] = _Node()
            if parent is not None:
                parent.has_more = True
            if self._has(node, number):
                since = min(since, node.times[number])
            node.times[number] = now
            parent = node
        for digest in reversed(hashes):
            self._nodes.move_to_end(digest)
        while len(self._nodes) > self._max_entries:
            self._nodes.popitem(last=False)
        opened = self._open.setdefault(number, set())
        is_computed = since < min(opened, default=now)
        opened.add(now)
        return Expected(num_bytes if is_computed else 0, since, now)

    def close(self, engine: EngineHandle, expected: Expected) -> None:
        """End a request."""
        opened = self._open[engine.number]
        opened.remove(expected.now)
        if not opened:
            del self._open[engine.number]

    def lost(self, engine: EngineHandle, time: int) -> None:
        """Mark content last sent at `time` or earlier as evicted."""
        self._lost[engine.number] = max(time, self._lost.get(engine.number, 0))

    def forget(self, engine: EngineHandle) -> None:
        """Forget an engine's cache."""
        self.lost(engine, self._now)
