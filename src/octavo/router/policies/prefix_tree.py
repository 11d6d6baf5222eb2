"""Which prompts went where: a tree of their pieces, bounded, that forgets what was used longest ago."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
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


class PrefixTree:
    """A node for each piece of a prompt, found by a hash of it and all before it; when it went to which engine.

    Times are numbers of requests. An engine's cache is taken to lose what was used longest ago, as octavo's does: so
    where it lost one thing, it lost all that is older, and that is one number for each engine.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._nodes: OrderedDict[bytes, dict[int, int]] = OrderedDict()  # the last used at the end, parents behind
        self._lost: dict[int, int] = {}  # by the engine's number: the time up to which it remembers nothing
        self._open: dict[int, set[int]] = {}  # the times of its open requests
        self._now = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, asked: Asked, engines: Sequence[Engine]) -> dict[Engine, int]:
        """Return how many bytes of a prompt each engine has."""
        found, left = dict.fromkeys(engines, 0), list(engines)
        hashes, ends = asked.pieces
        for digest, end in zip(hashes, ends, strict=True):
            node = self._nodes.get(digest)
            if node is None:
                break
            left = [engine for engine in left if node.get(engine.number, 0) > self._lost.get(engine.number, 0)]
            if not left:
                break
            for engine in left:
                found[engine] = end
        return found

    def add(self, asked: Asked, engine: Engine) -> Expected:
        """Send a prompt to an engine, to be closed; return what should be there already."""
        self._now += 1
        number, now = engine.number, self._now
        hashes, _ = asked.pieces
        num_bytes = self.find(asked, [engine])[engine]
        since = now
        for digest in hashes:
            node = self._nodes.setdefault(digest, {})
            before = node.get(number, 0)
            if before > self._lost.get(number, 0):
                since = min(since, before)
            node[number] = now
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
