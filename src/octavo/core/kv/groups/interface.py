"""The interface of a KV group to the KV cache manager. A bounded group has more methods: see `BoundedGroup`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from octavo.core.kv.block_pool import Block
    from octavo.data.kv_groups import KVGroupKind
    from octavo.data.request import Sequence as TokenSequence


class Claim(NamedTuple):
    """The blocks of a group that a request needs to continue.

    first: index of the first block that the request will hold.
    found: ids of the found blocks from that index on.
    num_new: number of further blocks to take.
    num_unheld: number of found and further blocks that nothing holds yet. At least this many must be free.
    is_own: the blocks that it takes are hidden from other requests until it releases them.
    is_found_own: the found blocks that nothing holds are hidden, too.
    """

    first: int
    found: list[int]
    num_new: int
    num_unheld: int
    is_own: bool = False
    is_found_own: bool = False


class KVGroup(Protocol):
    """The blocks of one KV group. It writes its own block table and `first_held` entry of each sequence."""

    @property
    def index(self) -> int:
        """The place of the group, and of its table in `Sequence.block_tables`."""
        ...

    @property
    def kind(self) -> KVGroupKind:
        """Which positions its rows read."""
        ...

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        ...

    @property
    def quarantined(self) -> set[int]:
        """Ids of blocks that are never given out again, because their bookkeeping was wrong."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that could be taken now, cached ones included."""
        ...

    # --- look up ------------------------------------------------------------------------------------------------------

    def first_read(self, num_tokens: int) -> int:
        """Return the index of the first block that the row after `num_tokens` computed tokens reads."""
        ...

    def id_of(self, block: Block) -> int | None:
        """Return the id of this group's block for the positions of a first group's block; None if it was evicted."""
        ...

    # --- take ---------------------------------------------------------------------------------------------------------

    def claim(
        self, sequence: TokenSequence, found: Sequence[Block], num_read: int, num_step_blocks: int, num_all_blocks: int
    ) -> Claim:
        """Return the blocks that a request needs to continue. Changes nothing.

        found: blocks of the first group that were found and that the request does not hold yet.
        num_read: number of tokens before its next row.
        num_step_blocks: length of its table for the next step, in blocks. num_all_blocks: the same for all that memory
        is set aside for; equal to num_step_blocks if none is.
        """
        ...

    def can_hold(self, found: Sequence[Block], num_read: int, num_all_blocks: int, num_spare_blocks: int) -> bool:
        """Return whether a new request of `num_all_blocks` blocks fits, and `num_spare_blocks` others stay free.

        found, num_read: as of `claim`.
        """
        ...

    def num_reserved(self, num_all_blocks: int) -> int:
        """Return the number of blocks to set aside for a request of `num_all_blocks` blocks."""
        ...

    def can_reserve(self, num_blocks: int, num_saved: int, *, is_only: bool) -> bool:
        """Return whether `num_blocks` blocks can be set aside in total.

        num_saved: number of further blocks that saves may pin. is_only: whether they are for the only request.
        """
        ...

    def hold(self, claim: Claim) -> None:
        """Hold the found blocks of a claim, so that they are not evicted."""
        ...

    def renew(self, block: Block) -> None:
        """Mark the content of a block as the most recently used."""
        ...

    def extend(self, sequence: TokenSequence, claim: Claim) -> None:
        """Append the blocks of a claim to a sequence's table. They must be free, and the found ones held."""
        ...

    # --- release ------------------------------------------------------------------------------------------------------

    def release_unread(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Release the blocks that no row after `num_tokens` computed tokens reads."""
        ...

    def clear(self, sequence: TokenSequence) -> None:
        """Release all blocks of a sequence, the last one first, and empty its table."""
        ...

    # --- transfers ----------------------------------------------------------------------------------------------------

    def pin(self, block_ids: Iterable[int]) -> None:
        """Hold each block once more, independently of the requests that have it in their tables."""
        ...

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Release blocks that were pinned, the last one first."""
        ...

    # --- invariants ---------------------------------------------------------------------------------------------------

    def quarantine(self, block_id: int) -> None:
        """Take a block out of use for good."""
        ...

    def num_holders(self, block_id: int) -> int:
        """Return how often a block is held."""
        ...

    def free_ids(self) -> list[int]:
        """Return the ids of the blocks without content that nothing holds."""
        ...

    def cached_ids(self) -> list[int]:
        """Return the ids of the unheld blocks that can be found, the next to be evicted first."""
        ...
