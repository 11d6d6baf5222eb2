"""The scheduler's half of KV transfer: which blocks an external store has, and which it wants.

The other half is in the worker. Names and division follow vLLM's KVConnector. Neither half is trusted: reported blocks
may be missing, late or wrong, which costs time but never changes a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.core.kv.block_hash import BlockHash
    from octavo.data.request import Request
    from octavo.data.scheduler_output import KVTransfer


class KVConnector(Protocol):
    """An external store of KV blocks by hash. No method blocks: slow queries run in the background."""

    name: str

    def request_added(self, request: Request) -> None:
        """Report a new request, possibly long before its first lookup."""
        ...

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return how many tokens after `num_computed_tokens` the store has; None: not known yet, ask again.

        The number is a multiple of the block size. The store has, in all KV groups, the blocks that the next row
        (token) reads.
        """
        ...

    def lookup_given_up(self, request: Request) -> None:
        """Report that a request does not wait for its lookup any longer."""
        ...

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """Report that a load was ordered. block_ids: the request's block table in the first KV group."""
        ...

    def keys_to_save(self, keys: Sequence[BlockHash], *, only_first_group: bool = False) -> set[BlockHash]:
        """Return those of `keys` whose blocks the store lacks and wants.

        only_first_group: parts in other groups are lost, so return only blocks whose first group's content is lacking.
        """
        ...

    def transfer_ordered(self, transfer: KVTransfer) -> None:
        """Report that the scheduler ordered a transfer.

        The worker receives the order with the next step. If the scheduler cancels the transfer before that step, the
        worker never receives the order, and `transfer_ended` is called.
        """
        ...

    def transfer_ended(self, transfer: KVTransfer, num_blocks: int | None) -> None:
        """Report the end of a transfer. num_blocks: number of leading blocks that were moved; None if cancelled."""
        ...

    def request_finished(self, request: Request, block_ids: list[int]) -> None:
        """Report an ended request. block_ids: its block table in the first KV group."""
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
