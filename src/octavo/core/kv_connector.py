"""The scheduler's half of KV transfer: which blocks an external store has, and which it wants.

The other half is in the worker, as in vLLM's KVConnector. Neither half is trusted: missing, late or wrong blocks cost
time but never change a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.core.kv.block_hash import BlockHash
    from octavo.data.request import Request
    from octavo.data.scheduler_output import KVTransfer


class KVConnector(Protocol):
    """An external store of KV blocks by hash. No method blocks."""

    name: str

    def request_added(self, request: Request) -> None:
        """Report a new request, possibly long before its lookup."""
        ...

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return how many tokens after `num_computed_tokens` the store has, or None if the caller must ask again.

        The number is a multiple of the block size. The store has all blocks that the next row (token) reads.
        """
        ...

    def lookup_given_up(self, request: Request) -> None:
        """Report an abandoned lookup."""
        ...

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """Load `num_external_tokens` tokens into the allocated blocks.

        block_ids: the request's, of the first KV group.
        """
        ...

    def keys_to_save(self, keys: Sequence[BlockHash], *, only_first_group: bool = False) -> set[BlockHash]:
        """Return the keys whose blocks the store lacks and wants.

        only_first_group: ignore parts in other groups, because they are lost.
        """
        ...

    def transfer_ordered(self, transfer: KVTransfer) -> None:
        """Report an ordered transfer.

        The worker receives the order with the next step.
        """
        ...

    def transfer_ended(self, transfer: KVTransfer, num_blocks: int | None) -> None:
        """Report a transfer's end. num_blocks: leading blocks that were moved, or None if cancelled."""
        ...

    def request_finished(self, request: Request, block_ids: list[int]) -> None:
        """Report a request's end. block_ids: blocks of the first KV group."""
        ...


class NullConnector:
    """A connector without a store."""

    name = ""

    def request_added(self, request: Request) -> None:
        """Do nothing."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return 0."""
        del request, num_computed_tokens
        return 0

    def lookup_given_up(self, request: Request) -> None:
        """Do nothing."""

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """Do nothing."""

    def keys_to_save(self, keys: Sequence[BlockHash], *, only_first_group: bool = False) -> set[BlockHash]:
        """Return no key."""
        del keys, only_first_group
        return set()

    def transfer_ordered(self, transfer: KVTransfer) -> None:
        """Do nothing."""

    def transfer_ended(self, transfer: KVTransfer, num_blocks: int | None) -> None:
        """Do nothing."""

    def request_finished(self, request: Request, block_ids: list[int]) -> None:
        """Do nothing."""
