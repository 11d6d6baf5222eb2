"""The scheduler's half of KV transfer: what a store outside of this engine has, and what it wants.

Names and division follow vLLM's KVConnector: this half decides, in the worker's half bytes move. Neither half is
trusted: what a store says it has may be gone, late or wrong, which costs time and never a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.core.kv.block_hash import BlockHash
    from octavo.data.request import Request
    from octavo.data.scheduler_output import KVTransfer


class KVConnector(Protocol):
    """A store of KV blocks by key, outside of this engine; `request.block_hashes` are the keys of a request's blocks.

    Every method returns at once: what has to ask somebody else does so beside the steps. name: what the store is called
    where a person reads it.
    """

    name: str

    def request_added(self, request: Request) -> None:
        """Take note of a newcomer, long before it is asked for perhaps."""
        ...

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return how many tokens beyond `num_computed_tokens`, a whole number of blocks, it has; None: not known yet.

        It has the blocks of all KV groups that the row after these tokens reads. Asked again until it is known, or has
        taken too long.
        """
        ...

    def lookup_given_up(self, request: Request) -> None:
        """Take note that nobody waits any more for an answer about a request."""
        ...

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """Take note that blocks were found for them: the transfer is ordered with this step."""
        ...

    def keys_to_save(self, keys: Sequence[BlockHash], *, only_first_group: bool = False) -> set[BlockHash]:
        """Return the keys among these whose blocks it lacks and wants.

        only_first_group: the blocks have lost parts in other groups; it wants those of which it lacks even the first
        group's.
        """
        ...

    def transfer_ordered(self, transfer: KVTransfer) -> None:
        """Take note that a transfer begins with this step, or is given up before; `transfer_ended` tells its end."""
        ...

    def transfer_ended(self, transfer: KVTransfer, num_blocks: int | None) -> None:
        """Take note that so many of a transfer's blocks, from the first on, were moved, and the others could not be.

        None: it was given up, and nobody knows.
        """
        ...

    def request_finished(self, request: Request, block_ids: list[int]) -> None:
        """Take note that a request ended, with the blocks it held until now."""
        ...


class NullConnector:
    """Nothing is stored anywhere else."""

    name = ""

    def request_added(self, request: Request) -> None:
        """Do nothing."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Find nothing."""
        del request, num_computed_tokens
        return 0

    def lookup_given_up(self, request: Request) -> None:
        """Do nothing."""

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """Do nothing."""

    def keys_to_save(self, keys: Sequence[BlockHash], *, only_first_group: bool = False) -> set[BlockHash]:
        """Want nothing."""
        del keys, only_first_group
        return set()

    def transfer_ordered(self, transfer: KVTransfer) -> None:
        """Do nothing."""

    def transfer_ended(self, transfer: KVTransfer, num_blocks: int | None) -> None:
        """Do nothing."""

    def request_finished(self, request: Request, block_ids: list[int]) -> None:
        """Do nothing."""
