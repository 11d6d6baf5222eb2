"""The scheduler's side of an external KV store, as in vLLM's KVConnector.

Missing, late or corrupt blocks cost time but never change a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.core.kv.block_hash import BlockHash
    from octavo.data.request import Request
    from octavo.data.scheduler_output import KVTransfer


class KVConnector(Protocol):
    """An external store, which identifies KV blocks by their hashes. No method may wait for I/O."""

    name: str

    def request_added(self, request: Request) -> None:
        """Report a new request, perhaps long before its lookup."""
        ...

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return how many tokens after `num_computed_tokens` the store has, or None if the caller must ask again.

        The number is a multiple of the block size. The request can continue after a load of that many tokens.
        """
        ...

    def lookup_given_up(self, request: Request) -> None:
        """Report that a lookup has timed out."""
        ...

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """Report that blocks for a load of `num_external_tokens` tokens were allocated.

        block_ids: Block table of the first KV group.
        """
        ...

    def keys_to_save(self, keys: Sequence[BlockHash], *, only_first_group: bool = False) -> set[BlockHash]:
        """Return the keys of blocks that the store lacks and wants.

        only_first_group: True if only the first KV group can be saved.
        """
        ...

    def states_to_save(self, keys: Sequence[BlockHash]) -> set[BlockHash]:
        """Return the keys of blocks after which the store lacks the recurrent state."""
        ...

    def transfer_ordered(self, transfer: KVTransfer) -> None:
        """Report a new transfer, which the worker receives with the next step."""
        ...

    def transfer_ended(self, transfer: KVTransfer, num_blocks: int | None) -> None:
        """Report a transfer's end. num_blocks: Number of leading blocks that were moved, or None if cancelled."""
        ...

    def request_finished(self, request: Request, block_ids: list[int]) -> None:
        """Report a request's end. block_ids: Block table of the first KV group."""
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

    def states_to_save(self, keys: Sequence[BlockHash]) -> set[BlockHash]:
        """Return no key."""
        del keys
        return set()

    def transfer_ordered(self, transfer: KVTransfer) -> None:
        """Do nothing."""

    def transfer_ended(self, transfer: KVTransfer, num_blocks: int | None) -> None:
        """Do nothing."""

    def request_finished(self, request: Request, block_ids: list[int]) -> None:
        """Do nothing."""
