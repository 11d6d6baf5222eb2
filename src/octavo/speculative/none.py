"""No speculation."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from octavo.speculative.interface import DraftTask, EndedRequest


class NoProposer:
    """A proposer without drafts."""

    num_speculative_tokens = 0
    num_bytes = 0
    num_passes, computed, computes = 0, frozenset[str](), False

    def propose(self, tasks: Sequence[DraftTask]) -> list[list[int]]:
        """Return no drafts."""
        return [[] for _ in tasks]

    def forget(self, request_ids: Iterable[str]) -> None:
        """Do nothing."""

    def finish(self, ended: Sequence[EndedRequest]) -> None:
        """Do nothing."""
