"""The policy "cache_aware"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.router.policies.interface import RoutingPolicy
from octavo.router.policies.least_loaded import least_loaded
from octavo.router.policies.prefix_tree import PrefixTree
from octavo.router.policies.rendezvous import engine_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.router.engines import EngineHandle
    from octavo.router.policies.prefix_tree import Expected
    from octavo.router.request_summary import RequestSummary

_LEAST_SHARE = 0.1  # a prefix below this share of a prompt is ignored
_COMMON_SHARE = 0.5  # a common prefix below this share of a prompt is soon in every cache
_MISSED_SHARE = 0.5  # a prefix counts as evicted if a smaller share of it was cached
_MISSED_TOKENS = 64  # fewer missing tokens are ignored, because of rounding and the chat template
_EQUAL_REQUESTS = 2  # loads are equal if they differ by less than this many requests of the same size
_REMEMBERED = 64  # if an engine's work exceeds this multiple of balance_tokens, all work is halved


class CacheAware(RoutingPolicy):
    """Predicts each engine's cache from the prompts that were sent to the engine, and from reported cache hits.

    An engine's work is the number of uncached tokens that it got recently. A prompt goes to the engine with the longest
    cached prefix, except in these cases:

    - The prefix is less than a tenth of the prompt.
    - Earlier prompts continued the prefix differently, and the prefix is less than half of the prompt.
    - Earlier prompts continued the prefix differently, and the prefix's engine has too much work.

    Then a hash of the prompt's first unknown piece chooses among the engines without too much work and with almost the
    lowest load. So several routers choose the same engine for a prompt.

    balance_tokens, balance_ratio: An engine has too much work if its work exceeds both the smallest work plus
    balance_tokens and the smallest work times balance_ratio. The same limits apply to the load. An engine with too much
    load gets no prompt.
    """

    def __init__(self, balance_tokens: int, balance_ratio: float, max_entries: int) -> None:
        self._balance_tokens, self._balance_ratio = balance_tokens, balance_ratio
        self.tree = PrefixTree(max_entries)
        self._open: dict[tuple[int, EngineHandle], Expected] = {}
        self._work: dict[EngineHandle, float] = {}  # new tokens; older tokens count less

    def choose(self, summary: RequestSummary, engines: Sequence[EngineHandle]) -> EngineHandle:
        """Choose an engine."""
        loads = [engine.load for engine in engines]
        most = self._most(min(loads))
        able = [engine for engine, load in zip(engines, loads, strict=True) if load <= most]
        found = self.tree.find(summary, able)
        share = found.num_bytes / summary.num_prompt_bytes if found.num_bytes else 0.0
        best = least_loaded(found.engines)
        if share >= _LEAST_SHARE and not found.is_branch:
            return best
        work = {engine: self._work_of(engine) for engine in able}
        most_work = self._most(min(work.values()))
        if share >= _COMMON_SHARE and work[best] <= most_work:
            return best
        hashes, _ = summary.pieces
        if not hashes:
            return min(able, key=lambda engine: (engine.load + work[engine], engine.number))
        lighter = [engine for engine in able if work[engine] <= most_work]
        most_load = min(engine.load for engine in lighter) + _EQUAL_REQUESTS * (summary.num_tokens + summary.max_tokens)
        equal = [engine for engine in lighter if engine.load < most_load]
        return engine_of(hashes[min(found.num_pieces, len(hashes) - 1)], equal)

    def _most(self, least: float) -> float:
        return max(least + self._balance_tokens, self._balance_ratio * least)

    def _work_of(self, engine: EngineHandle) -> float:
        if engine not in self._work:
            self._work[engine] = min(self._work.values(), default=0.0)
        return self._work[engine]

    def sent(self, summary: RequestSummary, engine: EngineHandle) -> float:
        """See `RoutingPolicy.sent`."""
        expected = self._open[id(summary), engine] = self.tree.add(summary, engine)
        known = expected.num_bytes / summary.num_prompt_bytes if summary.num_prompt_bytes else 0.0
        self._work[engine] = self._work_of(engine) + (1 - known) * summary.num_tokens
        if self._work[engine] > _REMEMBERED * self._balance_tokens:
            self._work = {each: amount / 2 for each, amount in self._work.items()}
        return known

    def ended(self, summary: RequestSummary, engine: EngineHandle, cached_share: float | None) -> None:
        """Record a request's end. If the expected prefix was evicted, assume that older ones were, too."""
        expected = self._open.pop((id(summary), engine))
        self.tree.close(engine, expected)
        if cached_share is None or not expected.num_bytes:
            return
        share = expected.num_bytes / summary.num_prompt_bytes
        if cached_share < _MISSED_SHARE * share and (share - cached_share) * summary.num_tokens > _MISSED_TOKENS:
            self.tree.lost(engine, expected.since)

    def forget(self, engine: EngineHandle) -> None:
        """Forget an engine."""
        self.tree.forget(engine)
        self._work.pop(engine, None)

    def recall(self, engine: EngineHandle, lost_until: int) -> None:
        """See `RoutingPolicy.recall`."""
        self.tree.recall(engine, lost_until)
