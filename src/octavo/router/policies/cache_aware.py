"""The engine whose prefix cache holds most of the prompt, unless it has too much to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.router.policies.least_loaded import least_loaded
from octavo.router.policies.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.router.asked import Asked
    from octavo.router.engines import Engine
    from octavo.router.policies.prefix_tree import Expected

_LEAST_SHARE = 0.1  # of a prompt: less is not worth going anywhere for
_MISSED_SHARE = 0.5  # of what should have been in a cache: who finds less has lost it
_MISSED_TOKENS = 64  # fewer are lost in rounding to blocks and in what a chat template adds


class CacheAware:
    """Goes by what was sent where, corrected by what engines say of it.

    balance_tokens, balance_ratio: an engine with so many more tokens to do than the least loaded one, and so many times
    as many, is not chosen for its cache.
    """

    def __init__(self, balance_tokens: int, balance_ratio: float, max_entries: int) -> None:
        self._balance_tokens, self._balance_ratio = balance_tokens, balance_ratio
        self._tree = PrefixTree(max_entries)
        self._open: dict[tuple[int, Engine], Expected] = {}  # by the request's id

    def choose(self, asked: Asked, engines: Sequence[Engine]) -> Engine:
        """Return the engine with the longest prefix that is not overloaded, or the least loaded one."""
        idlest = least_loaded(engines)
        found = self._tree.find(asked, engines)
        longest = max(found.values())
        if longest < _LEAST_SHARE * len(asked.prompt) or not longest:
            return idlest
        best = least_loaded([engine for engine in engines if found[engine] == longest])
        is_overloaded = best.load - idlest.load > self._balance_tokens and best.load > self._balance_ratio * idlest.load
        return idlest if is_overloaded else best

    def sent(self, asked: Asked, engine: Engine) -> None:
        """Remember where a prompt goes, and how much of it should be there."""
        self._open[id(asked), engine] = self._tree.add(asked, engine)

    def ended(self, asked: Asked, engine: Engine, cached_share: float | None) -> None:
        """Learn from what an engine found: who lost this prompt has lost what it used before that as well."""
        expected = self._open.pop((id(asked), engine))
        self._tree.close(engine, expected)
        if cached_share is None or not expected.num_bytes:
            return
        share = expected.num_bytes / len(asked.prompt)
        if cached_share < _MISSED_SHARE * share and (share - cached_share) * asked.num_tokens > _MISSED_TOKENS:
            self._tree.lost(engine, expected.since)

    def forget(self, engine: Engine) -> None:
        """Remember nothing of it."""
        self._tree.forget(engine)
