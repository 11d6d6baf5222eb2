"""A bounded tree of pieces of prompts. The least recently used pieces are dropped."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

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
    """The longest known prefix of a prompt.

    num_bytes: Length of the prefix.
    engines: The engines with this prefix. If it is empty, all engines.
    num_pieces: Pieces of the prefix.
    is_branch: True if earlier prompts continue the prefix, but no engine has this prompt's next piece.
    """

    num_bytes: int
    engines: Sequence[EngineHandle]
    num_pieces: int
    is_branch: bool


@dataclass(slots=True)
class Node:
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
        self._nodes: OrderedDict[bytes, Node] = OrderedDict()  # least recently used first, parents after children
        self._lost: dict[int, int] = {}  # by engine number
        self._open: dict[int, set[int]] = {}
        self.now = 0

    def find(self, summary: RequestSummary, engines: Sequence[EngineHandle]) -> Found:
        """Return the longest known prefix."""
        hashes, ends = summary.pieces
        nodes, by_number = self._known_nodes(hashes), {engine.number: engine for engine in engines}
        # Each engine with a piece has all earlier pieces.
        num_pieces = bisect_left(nodes, True, key=lambda node: not any(self._having(node, by_number)))
        if not num_pieces:
            return Found(0, engines, 0, is_branch=False)
        node = nodes[num_pieces - 1]
        having = list(self._having(node, by_number))
        return Found(ends[num_pieces - 1], having, num_pieces, num_pieces < len(hashes) and node.has_more)

    def _known_nodes(self, hashes: Sequence[bytes]) -> list[Node]:
        # A piece is never dropped before the pieces that continue it.
        nodes = map(self._nodes.get, hashes)
        return list(itertools.takewhile(bool, nodes))  # type: ignore[arg-type]

    def _having(self, node: Node, by_number: Mapping[int, EngineHandle]) -> Iterator[EngineHandle]:
        for number, time in node.times.items():
            if number in by_number and time > self._lost.get(number, 0):
                yield by_number[number]

    def add(self, summary: RequestSummary, engine: EngineHandle) -> Expected:
        """Record a sent prompt. Return the prefix expected in the engine's cache. Call `close` later."""
        self.now += 1
        number, now = engine.number, self.now
        hashes, ends = summary.pieces
        nodes = self._known_nodes(hashes)
        for digest in hashes[len(nodes) :]:
            node = self._nodes[digest] = Node()
            nodes.append(node)
        lost = self._lost.get(number, 0)
        num_pieces, since = 0, now
        for node in nodes:
            last = node.times.get(number, 0)
            if last > lost:  # a piece was sent at least as recently as the pieces that continue it
                num_pieces += 1
                since = last
            node.times[number] = now
        for node in nodes[:-1]:
            node.has_more = True
        for digest in reversed(hashes):
            self._nodes.move_to_end(digest)
        self._drop_oldest()
        opened = self._open.setdefault(number, set())
        is_computed = since < min(opened, default=now)
        opened.add(now)
        return Expected(ends[num_pieces - 1] if num_pieces and is_computed else 0, since, now)

    def _drop_oldest(self) -> None:
        while len(self._nodes) > self._max_entries:
            self._nodes.popitem(last=False)

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
        self.lost(engine, self.now)

    @property
    def hashes(self) -> list[bytes]:
        """The nodes' hashes, the least recently used first."""
        return list(self._nodes)

    def node(self, digest: bytes) -> Node | None:
        """Return the node of a hash, or None if it was dropped."""
        return self._nodes.get(digest)

    def lost_until(self, engine: EngineHandle) -> int:
        """Return the latest `time` of `lost`."""
        return self._lost.get(engine.number, 0)

    def restore(self, nodes: Iterable[tuple[bytes, bool, dict[int, int]]], now: int, numbers: Iterable[int]) -> None:
        """Set all nodes, in the order of `nodes`. Call `recall` for each engine that still has its prefixes.

        nodes: Hash, `has_more` and times.
        now: The latest time.
        numbers: The numbers of all engines in `nodes`.
        """
        self._nodes = OrderedDict((digest, Node(times, has_more)) for digest, has_more, times in nodes)
        self._drop_oldest()
        self.now = now
        self._lost = dict.fromkeys(numbers, now)

    def recall(self, engine: EngineHandle, lost_until: int) -> None:
        """Expect an engine's restored prefixes in its cache."""
        self._lost[engine.number] = lost_until
