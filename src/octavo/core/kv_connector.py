"""The scheduler's half of KV transfer: which blocks an external store has, and which it wants.

Names and division follow vLLM's KVConnector: this half decides, the worker's half moves bytes. Neither half is trusted:
blocks that a store reports may be missing, late or wrong. That costs time but never changes a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.core.kv.block_hash import BlockHash
    from octavo.data.request import Request
    from octavo.data.scheduler_output import KVTransfer


class KVConnector(Protocol):
    """An external store of KV blocks by key. `request.block_hashes` are the keys of a request's blocks.

    No method blocks: slow queries run in the background. name: the store's name for people.
    """

    name: str

    def request_added(self, request: Request) -> None:
        """Notify the store of a new request, possibly long before its first lookup."""
        ...

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return how many tokens after `num_computed_tokens` the store has; None if it is not known yet.

        The result is a multiple of the block size. The store then has, in all KV groups, the blocks that the row after
        these tokens reads. After None the caller asks again, until the result is known or a timeout has passed.
        """
        ...

    def lookup_given_up(self, request: Request) -> None:
        """Notify the store that no request waits for this lookup any longer."""
        ...

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """Notify the store that the external tokens have blocks, and that the transfer is ordered with this step.

        block_ids: the request's block table in the first group.
        """
        ...

    def keys_to_save(self, keys: Sequence[BlockHash], *, only_first_group: bool = False) -> set[BlockHash]:
        """Return the keys of the blocks that the store lacks and wants.

        only_first_group: the blocks have lost parts in other groups. The store then wants only blocks of which it lacks
        even the first group's content.
        """
        ...

    def transfer_ordered(self, transfer: KVTransfer) -> None:
        """Notify the store of a transfer, which begins with this step unless it is cancelled before.

        `transfer_ended` reports the end in either case.
        """
        ...

    def transfer_ended(self, transfer: KVTransfer, num_blocks: int | None) -> None:
        """Notify the store of a transfer's end.

        num_blocks: number of leading blocks that were moved; the rest failed. None if the transfer was cancelled, which
        makes the number unknown.
        """
        ...

    def request_finished(self, request: Request, block_ids: list[int]) -> None:
        """Notify the store that a request ended. block_ids: its block table in the first group until now."""
        ...


class NullConnector:
    """A connector without a store: it has nothing and wants nothing."""

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
