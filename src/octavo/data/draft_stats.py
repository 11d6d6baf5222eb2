"""How often guesses come true: of one request, or of all that an engine has served."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.data.events import DraftsTimed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.data.events import DraftsVerified

_PRIOR_WEIGHT = 2.0  # so many verified drafts count as much as what is known of others
_FADING = 0.98  # of what is known, for each step without drafts


@dataclass(slots=True)
class DraftStats:
    """Drafts that were verified. A draft is what was guessed for one request in one step, one or more tokens.

    num_draft_tokens_per_pos, num_accepted_tokens_per_pos: those at each place of a draft, the first one first.
    seconds: of steps with drafts, guessing included, as far as it is known what their tokens take in steps without:
    seconds_without.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_draft_tokens_per_pos: list[int] = field(default_factory=list)
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    seconds: float = 0.0
    seconds_without: float = 0.0

    def add(self, event: DraftsVerified | DraftsTimed) -> None:
        """Count a draft, or what a step with drafts took."""
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
        """How many times as fast tokens came as in steps without drafts, as measured; None where that is not known."""
        return self.seconds_without / self.seconds if self.seconds else None

    @property
    def acceptance_rate_per_pos(self) -> list[float]:
        """Share of correct drafted tokens by position in the draft. Tokens after a wrong one count as wrong."""
        pairs = zip(self.num_accepted_tokens_per_pos, self.num_draft_tokens_per_pos, strict=True)
        return [num_accepted / num_drafted for num_accepted, num_drafted in pairs]

    @property
    def mean_accepted_length(self) -> float:
        """Guessed tokens of a draft that were right, on average; 0 where there was no draft."""
        return self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a request got of a step with a draft, on average, the one behind the draft included."""
        return 1 + self.mean_accepted_length


class AcceptanceRates:
    """How often the draft at each place is right where those before it are; what is older counts less.

    decay: what an observation counts beside the next one at its place.
    """

    __slots__ = ("_decay", "_right", "_tried")

    def __init__(self, decay: float = 0.9) -> None:
        self._decay = decay
        self._right: list[float] = []
        self._tried: list[float] = []

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """Take in that so many drafts were verified; what is behind the first wrong one tells nothing."""
        num_told = min(num_accepted + 1, num_drafted)
        num_new = num_told - len(self._tried)
        if num_new > 0:
            self._right += [0.0] * num_new
            self._tried += [0.0] * num_new
        for place in range(num_told):
            self._right[place] = self._decay * self._right[place] + (place < num_accepted)
            self._tried[place] = self._decay * self._tried[place] + 1

    def fade(self) -> None:
        """Trust what is known a little less."""
        self._right = [_FADING * each for each in self._right]
        self._tried = [_FADING * each for each in self._tried]

    def rates(self, priors: Sequence[float]) -> list[float]:
        """Return the rate of each place. priors: those that hold as long as nothing is known."""
        known = len(self._tried)
        return [
            (_PRIOR_WEIGHT * prior + self._right[place]) / (_PRIOR_WEIGHT + self._tried[place])
            if place < known
            else prior
            for place, prior in enumerate(priors)
        ]
