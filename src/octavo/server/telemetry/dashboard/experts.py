"""The dashboard's map of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.data.expert_stats import ExpertTokens


class ExpertMap:
    """One viewer's map."""

    def __init__(self) -> None:
        self._sent = b""

    def changed(self, tokens: ExpertTokens | None) -> list[list[int]] | None:
        """Return each expert's tokens in percent of the layer's mean, by layer. None if unknown or unchanged."""
        if tokens is None or tokens.counts == self._sent:
            return None
        self._sent = bytes(tokens.counts)
        counts, width = memoryview(self._sent).cast("q").tolist(), tokens.num_experts
        return [_percent(counts[first : first + width]) for first in range(0, len(counts), width)]


def _percent(counts: list[int]) -> list[int]:
    mean = sum(counts) / len(counts)
    return [round(100 * count / mean) if mean else 0 for count in counts]
