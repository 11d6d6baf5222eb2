"""The policy "cache_aware"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.router.policies.interface import RoutingPolicy
from octavo.router.policies.least_loaded import least_loaded
from octavo.router.policies.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.router.engines import EngineHandle
    from octavo.router.policies.prefix_tree import Expected
    from octavo.router.request_summary import RequestSummary

_LEAST_SHARE = 0.1  # of a prompt: a smaller prefix does not decide
_COMMON_SHARE = 0.5  # of a prompt: a smaller shared beginning is soon in every cache
_MISSED_SHARE = 0.5  # of the expected prefix: if fewer hit, the engine has evicted it
_MISSED_TOKENS = 64  # fewer may be missing due to rounding and the chat template
_REMEMBERED = 64  # times balance_tokens: above it, the work of all engines is halved


class CacheAware(RoutingPolicy):
    """Predicts caches from the prompts that each engine got, corrected by the hits that it reports.

    A prompt goes to the engine with the longest prefix. Without such a prefix, or if other prompts share it, the prompt
    is new work, which is spread so that caches differ.

    balance_tokens, balance_ratio: an engine is overloaded if its load exceeds the smallest load by more than
    balance_tokens, and is more than balance_ratio times as large. For a shared prefix, this also applies to new work.

    """

    def __init__(self, balance_tokens: int, balance_ratio: float, max_entries: int) -> None:
        self._balance_tokens, self._balance_ratio = balance_tokens, balance_ratio
        self._tree = PrefixTree(max_entries)
        self._open: dict[tuple[int, EngineHandle], Expected] = {}
        self._work: dict[EngineHandle, float] = {}  # new tokens; old ones count less

    def choose(self, summary: RequestSummary, engines: Sequence[EngineHandle]) -> EngineHandle:
        """Return the engine with the longest prefix that is not overloaded, otherwise that with least load and work."""
        least = min(engine.load for engine in engines)
        able = [engine for engine in engines if not self._is_more(engine.load, least)]
        found = self._tree.find(summary, able)
        longest = max(found.num_bytes.values())
        share = longest / summary.num_prompt_bytes if longest else 0.0
        best = least_loaded([engine for engine in able if found.num_bytes[engine] == longest])
        if share >= _LEAST_SHARE and not found.is_branch:
            return best
        work = {engine: self._work_of(engine) for engine in able}
        if share >= _COMMON_SHARE and not self._is_more(work[best], min(work.values())):
            return best
        return min(able, key=lambda engine: (engine.load + work[engine], engine.number))

    def _is_more(self, amount: float, least: float) -> bool:
        return amount - least > self._balance_tokens and amount > self._balance_ratio * least

    def _work_of(self, engine: EngineHandle) -> float:
        """A new engine starts with the smallest amount, so as not to get all prompts."""
        return self._work.setdefault(engine, min(self._work.values(), default=0.0))

    def sent(self, summary: RequestSummary, engine: EngineHandle) -> float:
        """See `RoutingPolicy.sent`."""
        expected = self._open[id(summary), engine] = self._tree.add(summary, engine)
        known = expected.num_bytes / summary.num_prompt_bytes if summary.num_prompt_bytes else 0.0
        self._work[engine] = self._work_of(engine) + (1 - known) * summary.num_tokens
        if self._work[engine] > _REMEMBERED * self._balance_tokens:
            self._work = {each: amount / 2 for each, amount in self._work.items()}
        return known

    def ended(self, summary: RequestSummary, engine: EngineHandle, cached_share: float | None) -> None:
        """Assume that an engine which evicted this prompt evicted all older ones, too."""
        expected = self._open.pop((id(summary), engine))
        self._tree.close(engine, expected)
        if cached_share is None or not expected.num_bytes:
            return
        share = expected.num_bytes / summary.num_prompt_bytes
        if cached_share < _MISSED_SHARE * share and (share - cached_share) * summary.num_tokens > _MISSED_TOKENS:
            self._tree.lost(engine, expected.since)

    def forget(self, engine: EngineHandle) -> None:
        """Forget an engine."""
        self._tree.forget(engine)
        self._work.pop(engine, None)
