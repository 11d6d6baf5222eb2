"""Speculative-decoding statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.data.events import DraftsTimed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.data.events import DraftsVerified

_PRIOR_WEIGHT = 2.0  # weight of a prior, in drafts
_FADING = 0.98  # factor in `fade`


@dataclass(slots=True)
class DraftStats:
    """Counts of verified drafts. One draft is all draft tokens of one request in one step.

    Durations count only steps for which an estimate without drafts exists.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_draft_tokens_per_pos: list[int] = field(default_factory=list)
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    seconds: float = 0.0  # of steps with drafts
    seconds_without: float = 0.0  # estimate for the same tokens without drafts

    def add(self, event: DraftsVerified | DraftsTimed) -> None:
        """Count an event."""
        if isinstance(event, DraftsTimed):
            self.seconds += event.seconds
            self.seconds_without += event.seconds_without
            return
        self.num_drafts += 1
        self.num_draft_tokens += event.num_drafted
        self.num_accepted_tokens += event.num_accepted
        num_new = event.num_drafted - len(self.num_draft_tokens_per_pos)
        if num_new > 0:
            self.num_draft_tokens_per_pos += [0] * num_new
            self.num_accepted_tokens_per_pos += [0] * num_new
        for position in range(event.num_drafted):
            self.num_draft_tokens_per_pos[position] += 1
        for position in range(event.num_accepted):
            self.num_accepted_tokens_per_pos[position] += 1

    @property
    def speed_up(self) -> float | None:
        """Speed relative to steps without drafts, or None if unknown."""
        return self.seconds_without / self.seconds if self.seconds else None

    @property
    def acceptance_rate_per_pos(self) -> list[float]:
        """Share of accepted tokens by position. Tokens after a rejected token count as rejected."""
        pairs = zip(self.num_accepted_tokens_per_pos, self.num_draft_tokens_per_pos, strict=True)
        return [num_accepted / num_drafted for num_accepted, num_drafted in pairs]

    @property
    def mean_accepted_length(self) -> float:
        """Accepted tokens per draft, excluding the bonus token."""
        return self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Mean new tokens per step with a draft."""
        return 1 + self.mean_accepted_length


class AcceptanceRates:
    """Estimates how often each draft position is accepted if all earlier positions are accepted.

    decay: Factor, 0 to 1, on the weight of earlier observations at each new observation.
    """

    __slots__ = ("_decay", "_right", "_tried")

    def __init__(self, decay: float = 0.9) -> None:
        self._decay = decay
        self._right: list[float] = []
        self._tried: list[float] = []

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a draft's tokens, up to the first rejected token."""
        num_told = min(num_accepted + 1, num_drafted)
        num_new = num_told - len(self._tried)
        if num_new > 0:
            self._right += [0.0] * num_new
            self._tried += [0.0] * num_new
        for place in range(num_told):
            self._right[place] = self._decay * self._right[place] + (place < num_accepted)
            self._tried[place] = self._decay * self._tried[place] + 1

    def fade(self) -> None:
        """Lower all observations' weights by 2 %."""
        self._right = [_FADING * each for each in self._right]
        self._tried = [_FADING * each for each in self._tried]

    def rates(self, priors: Sequence[float]) -> list[float]:
        """Return acceptance rates by position. priors: Assumed rates, which observations gradually replace."""
        known = len(self._tried)
        return [
            (_PRIOR_WEIGHT * prior + self._right[place]) / (_PRIOR_WEIGHT + self._tried[place])
            if place < known
            else prior
            for place, prior in enumerate(priors)
        ]
