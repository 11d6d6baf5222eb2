"""Which prompts went where: a tree of their pieces, bounded, that forgets what was used longest ago."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.router.asked import Asked
    from octavo.router.engines import Engine


@dataclass(frozen=True, slots=True)
class Expected:
    """What an engine should find of a prompt. since: when all of it was sent there; now: the time of the request.

    num_bytes: 0 as well where requests that are still open sent it: it need not be computed yet.
    """

    num_bytes: int
    since: int
    now: int


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of a prompt: how many bytes of it each engine has.

    is_branch: others have gone on from there, in other ways: what was found is what they have in common, as a system
    prompt, and not the prompt's own past.
    """

    num_bytes: dict[Engine, int]
    is_branch: bool


@dataclass(slots=True)
class _Node:
    """A piece. times: when it went to which engine, by the engine's number. has_more: prompts have gone on from it."""

    times: dict[int, int] = field(default_factory=dict)
    has_more: bool = False


class PrefixTree:
    """A node for each piece of a prompt, found by a hash of it and all before it; when it went to which engine.

    Times are numbers of requests. An engine's cache is taken to lose what was used longest ago, as octavo's does: so
    where it lost one thing, it lost all that is older, and that is one number for each engine.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._nodes: OrderedDict[bytes, _Node] = OrderedDict()  # the last used at the end, parents behind
        self._lost: dict[int, int] = {}  # by the engine's number: the time up to which it remembers nothing
        self._open: dict[int, set[int]] = {}  # the times of its open requests
        self._now = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, asked: Asked, engines: Sequence[Engine]) -> Found:
        """Return how much of a prompt each engine has."""
        num_bytes, left, is_branch = dict.fromkeys(engines, 0), list(engines), False
        hashes, ends = asked.pieces
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

    def add(self, asked: Asked, engine: Engine) -> Expected:
        """Send a prompt to an engine, to be closed; return what should be there already."""
        self._now += 1
        number, now = engine.number, self._now
        hashes, _ = asked.pieces
        num_bytes = self.find(asked, [engine]).num_bytes[engine]
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

    def close(self, engine: Engine, expected: Expected) -> None:
        """End a request that was added."""
        opened = self._open[engine.number]
        opened.remove(expected.now)
        if not opened:
            del self._open[engine.number]

    def lost(self, engine: Engine, time: int) -> None:
        """Take what an engine got up to a time for lost."""
        self._lost[engine.number] = max(time, self._lost.get(engine.number, 0))

    def forget(self, engine: Engine) -> None:
        """Take all that an engine has for lost."""
        self.lost(engine, self._now)
