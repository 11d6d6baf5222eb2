"""The scheduler's half of KV transfer: what is stored outside.

Names and division follow vLLM's KVConnector: this half decides, in the worker's half bytes move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from octavo.data.request import Request


class KVConnector(Protocol):
    """A store of KV outside of this engine."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Return how many tokens beyond `num_computed_tokens` could be fetched for a request now."""
        ...

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """Take note that blocks were found for them: the transfer is ordered with this step."""
        ...

    def request_finished(self, request: Request, block_ids: list[int]) -> None:
        """Take note that a request ended, with the blocks it held until now."""
        ...


class NullConnector:
    """Nothing is stored anywhere else."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Find nothing."""
        del request, num_computed_tokens
        return 0

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """Do nothing."""

    def request_finished(self, request: Request, block_ids: list[int]) -> None:
        """Do nothing."""
