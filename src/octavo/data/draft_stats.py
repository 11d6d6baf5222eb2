"""How often guesses come true: of one request, or of all that an engine has served."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.data.events import DraftsVerified


@dataclass(slots=True)
class DraftStats:
    """Drafts that were verified. A draft is what was guessed for one request in one step, one or more tokens.

    num_draft_tokens_per_pos, num_accepted_tokens_per_pos: those at each place of a draft, the first one first.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_draft_tokens_per_pos: list[int] = field(default_factory=list)
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    def add(self, event: DraftsVerified) -> None:
        """Count a draft."""
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
    def acceptance_rate(self) -> float:
        """Share of the guessed tokens that were right; 0 where none was guessed."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_rate_per_pos(self) -> list[float]:
        """The same for each place of a draft; one behind a wrong token counts as wrong."""
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
