"""Decides which prefill engines may serve a decode engine."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo.router.engines import EngineHandle

logger = logging.getLogger(__name__)
_VAIN_IN_A_ROW = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0
_MAX_UNKNOWN = 1024
_LEAST_SHARE = 0.1  # no KV arrived if a smaller share of the new tokens was cached
_COMPUTED_SHARE = 0.5  # no KV arrived if this share of the new tokens was computed


class PromptFigures(NamedTuple):
    """Prompt tokens of an engine since its start.

    num_loaded: Tokens with KV from a store or another engine.
    num_computed: Tokens that were in no cache, or None if unknown.
    num_sent: Estimated tokens of prompts from this router.
    """

    num_loaded: float
    num_computed: float | None
    num_sent: int


@dataclass(slots=True)
class _Pair:
    differences: str = ""
    num_vain: int = 0
    pause_s: float = 0.0
    resumes_at: float = 0.0


@dataclass(slots=True)
class _Unknown:
    """A finished request without `usage`.

    before: The decode engine's figures at the request's start.
    num_new: Prompt tokens that were not expected in the decode engine's cache.
    """

    prefill: EngineHandle
    before: PromptFigures
    num_tokens: int
    num_new: float


@dataclass(slots=True)
class Partners:
    """Compares engines' KV formats, and counts requests for which no KV arrived.

    Engines with different formats are never paired. After `_VAIN_IN_A_ROW` consecutive requests without KV, a pair
    pauses. Each further request without KV doubles the pause.
    """

    _pairs: defaultdict[tuple[EngineHandle, EngineHandle], _Pair] = field(default_factory=lambda: defaultdict(_Pair))
    _unknown: dict[EngineHandle, list[_Unknown]] = field(default_factory=dict)

    def may_pair(self, prefill: EngineHandle, decode: EngineHandle, now: float) -> bool:
        """Return True if `prefill` may compute a prompt for `decode`."""
        pair = self._pairs[prefill, decode]
        differences = _differences(prefill.kv_format, decode.kv_format)
        if differences and differences != pair.differences:
            logger.warning(
                "%s does not compute prompts for %s, because they cannot exchange KV: %s; start both with the same "
                "model, "
                "version and options",
                *(prefill.url, decode.url, differences),
            )
        if pair.differences and not differences:
            logger.info("%s computes prompts for %s again: their KV now has the same format", prefill.url, decode.url)
        pair.differences = differences
        return not differences and pair.resumes_at <= now

    def ended(
        self, prefill: EngineHandle, decode: EngineHandle, found_share: float, known_share: float, now: float
    ) -> None:
        """Record a request's end. Does nothing if an engine was removed.

        found_share: Share of the prompt that `decode` did not compute.
        known_share: Share that was expected in the cache of `decode`.
        """
        if prefill.is_member and decode.is_member:
            has_arrived = found_share - known_share >= _LEAST_SHARE * (1 - known_share)
            self._note(prefill, decode, now, has_arrived=has_arrived)

    def ended_without_usage(
        self, prefill: EngineHandle, decode: EngineHandle, before: PromptFigures | None, num_tokens: int, num_new: float
    ) -> None:
        """Store an ended request until the next `figures_read`. Does nothing if an engine was removed.

        Arguments: See `_Unknown`.
        """
        if before is None or not (prefill.is_member and decode.is_member):
            return
        unknown = self._unknown.setdefault(decode, [])
        if len(unknown) < _MAX_UNKNOWN:
            unknown.append(_Unknown(prefill, before, num_tokens, num_new))

    def figures_read(self, decode: EngineHandle, now: float) -> None:
        """Decide from the token counts of `decode` whether KV arrived for ended requests.

        If `decode` neither loaded nor computed the new tokens, they were cached, and nothing is recorded.
        """
        figures, unknown = decode.prompt_figures, self._unknown.pop(decode, ())
        if figures is None:
            return
        for each in unknown:
            has_arrived = figures.num_loaded > each.before.num_loaded
            if has_arrived or _is_computed(each, figures):
                self._note(each.prefill, decode, now, has_arrived=has_arrived)

    def forget(self, engine: EngineHandle) -> None:
        """Forget an engine."""
        for pair in [pair for pair in self._pairs if engine in pair]:
            del self._pairs[pair]
        self._unknown.pop(engine, None)
        for decode, unknown in self._unknown.items():
            self._unknown[decode] = [each for each in unknown if each.prefill is not engine]

    def _note(self, prefill: EngineHandle, decode: EngineHandle, now: float, *, has_arrived: bool) -> None:
        pair = self._pairs[prefill, decode]
        if has_arrived:
            if pair.pause_s:
                logger.info("%s computes prompts for %s again: KV arrives", prefill.url, decode.url)
            pair.num_vain, pair.pause_s = 0, 0.0
            return
        decode.num_paired_in_vain += 1
        pair.num_vain += 1
        if pair.num_vain < _VAIN_IN_A_ROW or pair.resumes_at > now:
            return
        if not pair.pause_s:
            logger.warning(
                "%s computed %d prompts for %s but no KV arrived there; see its log. The next attempt is in %g s",
                *(prefill.url, pair.num_vain, decode.url, _FIRST_PAUSE_S),
            )
        pair.pause_s = min(2 * pair.pause_s or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        pair.resumes_at = now + pair.pause_s


def _is_computed(request: _Unknown, after: PromptFigures) -> bool:
    # The engine counts all prompts together, so the other prompts' tokens are subtracted.
    before = request.before
    if before.num_computed is None or after.num_computed is None:
        return False
    num_others = after.num_sent - before.num_sent - request.num_tokens
    num_self_computed = after.num_computed - before.num_computed - max(num_others, 0)
    return num_self_computed >= _COMPUTED_SHARE * request.num_new


def _differences(first: Mapping[str, str] | None, second: Mapping[str, str] | None) -> str:
    if first is None or second is None:
        return ""
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    return "; ".join(f"{name}: {first.get(name)!r:.100} and {second.get(name)!r:.100}" for name in names)
