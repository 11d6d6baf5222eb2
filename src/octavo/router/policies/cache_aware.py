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
_COMMON_SHARE = 0.5  # of a prompt that only begins as others do: less of it is soon in every cache
_MISSED_SHARE = 0.5  # of what should have been in a cache: who finds less has lost it
_MISSED_TOKENS = 64  # fewer are lost in rounding to blocks and in what a chat template adds
_REMEMBERED = 64  # times balance_tokens: of work that was given to an engine


class CacheAware:
    """Goes by what was sent where, corrected by what engines say of it.

    A prompt goes to the engine that has most of it. One whose past nobody has, which at most begins as others do, gives
    its engine new work: such prompts are spread, so that caches hold different things. balance_tokens, balance_ratio:
    an engine that has so many more tokens to do than the least loaded one, and so many times as many, is not chosen for
    its cache; nor is one for what many prompts have in common that was given so much more new work.
    """

    def __init__(self, balance_tokens: int, balance_ratio: float, max_entries: int) -> None:
        self._balance_tokens, self._balance_ratio = balance_tokens, balance_ratio
        self._tree = PrefixTree(max_entries)
        self._open: dict[tuple[int, Engine], Expected] = {}  # by the request's id
        self._work: dict[Engine, float] = {}  # new tokens that an engine was given, in the last time

    def choose(self, asked: Asked, engines: Sequence[Engine]) -> Engine:
        """Return the engine with the longest prefix that is not overloaded, or the one with the least work."""
        least = min(engine.load for engine in engines)
        able = [engine for engine in engines if not self._is_more(engine.load, least)]
        found = self._tree.find(asked, able)
        longest = max(found.num_bytes.values())
        share = longest / asked.num_prompt_bytes if longest else 0.0
        best = least_loaded([engine for engine in able if found.num_bytes[engine] == longest])
        if share >= _LEAST_SHARE and not found.is_branch:
            return best
        work = {engine: self._work_of(engine) for engine in able}
        if share >= _COMMON_SHARE and not self._is_more(work[best], min(work.values())):
            return best
        return min(able, key=lambda engine: (engine.load + work[engine], engine.number))

    def _is_more(self, amount: float, least: float) -> bool:
        return amount - least > self._balance_tokens and amount > self._balance_ratio * least

    def _work_of(self, engine: Engine) -> float:
        """Return an engine's new work; one that has just come begins where the least is, not behind all."""
        if engine not in self._work:
            self._work[engine] = min(self._work.values(), default=0.0)
        return self._work[engine]

    def sent(self, asked: Asked, engine: Engine) -> float:
        """Remember where a prompt goes; return how much of it should be there."""
        expected = self._open[id(asked), engine] = self._tree.add(asked, engine)
        known = expected.num_bytes / asked.num_prompt_bytes if asked.num_prompt_bytes else 0.0
        self._work[engine] = self._work_of(engine) + (1 - known) * asked.num_tokens
        if self._work[engine] > _REMEMBERED * self._balance_tokens:
            self._work = {each: amount / 2 for each, amount in self._work.items()}
        return known

    def ended(self, asked: Asked, engine: Engine, cached_share: float | None) -> None:
        """Learn from what an engine found: who lost this prompt has lost what it used before that as well."""
        expected = self._open.pop((id(asked), engine))
        self._tree.close(engine, expected)
        if cached_share is None or not expected.num_bytes:
            return
        share = expected.num_bytes / asked.num_prompt_bytes
        if cached_share < _MISSED_SHARE * share and (share - cached_share) * asked.num_tokens > _MISSED_TOKENS:
            self._tree.lost(engine, expected.since)

    def forget(self, engine: Engine) -> None:
        """Remember nothing of it."""
        self._tree.forget(engine)
        self._work.pop(engine, None)
