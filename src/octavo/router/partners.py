"""Which prefill engines may compute prompts for a decode engine: those with the same KV, whose blocks arrive."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo.router.engines import Engine

logger = logging.getLogger(__name__)
_VAIN_IN_A_ROW = 3  # so many requests in vain, one after another, and a pair pauses
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0
_MAX_UNKNOWN = 1024  # requests of a decode engine: its figures come every second
_LEAST_SHARE = 0.1  # of a prompt's new tokens: if fewer came, they came in vain


@dataclass(slots=True)
class _Pair:
    """State of a prefill and a decode engine.

    differences: of their KV, as last logged. num_vain: requests in vain since the last one with KV. pause_s: length of
    the last pause, which ends at resumes_at.
    """

    differences: str = ""
    num_vain: int = 0
    pause_s: float = 0.0
    resumes_at: float = 0.0


@dataclass(slots=True)
class _Unknown:
    """A finished request whose answer had no `usage`. num_loaded: the decode engine's loaded tokens at its start."""

    prefill: Engine
    num_loaded: float


@dataclass(slots=True)
class Partners:
    """Compares engines' descriptions of their KV, and counts requests to which no KV came.

    Two engines with different descriptions are never paired, because neither finds the blocks of the other. A pair
    pauses after several requests in vain in a row, and twice as long after each further one. Both are logged once.
    """

    _pairs: dict[tuple[Engine, Engine], _Pair] = field(default_factory=dict)
    _unknown: dict[Engine, list[_Unknown]] = field(default_factory=dict)  # by decode engine

    def may_pair(self, prefill: Engine, decode: Engine, now: float) -> bool:
        """Return whether `prefill` may compute a prompt for `decode` now."""
        pair = self._pair(prefill, decode)
        differences = _differences(prefill.kv_format, decode.kv_format)
        if differences and differences != pair.differences:
            logger.warning(
                "%s computes no prompts for %s, because they cannot exchange KV: %s; start both with the same model, "
                "version and options",
                *(prefill.url, decode.url, differences),
            )
        if pair.differences and not differences:
            logger.info("%s computes prompts for %s again: their KV is the same now", prefill.url, decode.url)
        pair.differences = differences
        return not differences and pair.resumes_at <= now

    def ended(self, prefill: Engine, decode: Engine, found_share: float, known_share: float, now: float) -> None:
        """Note the end of a request that both served.

        found_share, known_share: of its prompt's tokens, those that the decode engine did not compute, and those that
        were expected in its own cache.
        """
        came = found_share - known_share >= _LEAST_SHARE * (1 - known_share)
        self._note(prefill, decode, now, came=came)

    def ended_untold(self, prefill: Engine, decode: Engine, num_loaded: float | None) -> None:
        """Note the end of a request without `usage`; the engine's next figures say whether KV came.

        num_loaded: the engine's `num_loaded_tokens` at the request's start.
        """
        unknown = self._unknown.setdefault(decode, [])
        if num_loaded is not None and len(unknown) < _MAX_UNKNOWN:
            unknown.append(_Unknown(prefill, num_loaded))

    def figures_read(self, decode: Engine, now: float) -> None:
        """Judge requests that have ended by whether their engine has loaded anything since they began."""
        for each in self._unknown.pop(decode, ()):
            self._note(each.prefill, decode, now, came=(decode.num_loaded_tokens or 0.0) > each.num_loaded)

    def forget(self, engine: Engine) -> None:
        """Drop the state of an engine that left or restarted."""
        for pair in [pair for pair in self._pairs if engine in pair]:
            del self._pairs[pair]
        self._unknown.pop(engine, None)
        for decode, unknown in self._unknown.items():
            self._unknown[decode] = [each for each in unknown if each.prefill is not engine]

    def _pair(self, prefill: Engine, decode: Engine) -> _Pair:
        return self._pairs.setdefault((prefill, decode), _Pair())

    def _note(self, prefill: Engine, decode: Engine, now: float, *, came: bool) -> None:
        pair = self._pair(prefill, decode)
        if came:
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
                "%s computed %d prompts for %s in vain: no KV arrived there; its log says why. It computes none for it "
                "for %g s, then tries again",
                *(prefill.url, pair.num_vain, decode.url, _FIRST_PAUSE_S),
            )
        pair.pause_s = min(2 * pair.pause_s or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        pair.resumes_at = now + pair.pause_s


def _differences(first: Mapping[str, str] | None, second: Mapping[str, str] | None) -> str:
    """Return how two descriptions of KV differ; "" if they do not, or one engine gave none."""
    if first is None or second is None:
        return ""
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    return "; ".join(f"{name}: {first.get(name)!r:.100} and {second.get(name)!r:.100}" for name in names)
