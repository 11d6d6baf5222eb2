"""What the KV cache manager asks of every KV group. Of the bounded ones it asks more: see `BoundedGroup`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from octavo.core.kv.block_pool import Block
    from octavo.data.kv_groups import KVGroupKind
    from octavo.data.request import Sequence as TokenSequence


class Claim(NamedTuple):
    """The blocks of a group that a request needs to go on.

    first: index of the first block that the request will hold.
    found: ids of found blocks from there on.
    num_new: number of blocks to take besides.
    num_unheld: number of both that nothing holds yet: as many must be free.
    is_own: the blocks that it takes stay hidden from other requests until it releases them.
    is_found_own: so do the found blocks that nothing holds.
    """

    first: int
    found: list[int]
    num_new: int
    num_unheld: int
    is_own: bool = False
    is_found_own: bool = False


class KVGroup(Protocol):
    """The blocks of one KV group. Of a sequence it writes its own block table and `first_held`."""

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
        """Return the id of this group's block with the content of a block of the first group; None if it is gone."""
        ...

    # --- take ---------------------------------------------------------------------------------------------------------

    def claim(
        self, sequence: TokenSequence, found: Sequence[Block], num_read: int, num_step_blocks: int, num_all_blocks: int
    ) -> Claim:
        """Return the blocks that a request needs to go on. Changes nothing.

        found: blocks of the first group that were found and that the request does not hold yet.
        num_read: its next row comes after so many tokens.
        num_step_blocks, num_all_blocks: length of its table for the next step, and for everything that it may need, if
        memory is set aside for it.
        """
        ...

    def can_hold(self, found: Sequence[Block], num_read: int, num_all_blocks: int, num_spare_blocks: int) -> bool:
        """Return whether a new request of `num_all_blocks` blocks fits, and so many blocks stay free."""
        ...

    def num_reserved(self, num_all_blocks: int) -> int:
        """Return the number of blocks to set aside for a request of `num_all_blocks` blocks."""
        ...

    def can_reserve(self, num_blocks: int, num_saved: int, *, is_only: bool) -> bool:
        """Return whether so many blocks can be set aside in all.

        num_saved: of further blocks that may be pinned for saves. is_only: for the only request.
        """
        ...

    def hold(self, claim: Claim) -> None:
        """Hold the found blocks of a claim, so that they are not evicted."""
        ...

    def renew(self, block: Block) -> None:
        """Count the content of a block as used just now."""
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
        """Hold blocks once more each, whatever becomes of the requests in whose tables they are."""
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
        """Return the ids of the blocks that nothing holds and that can be found, the next to be evicted first."""
        ...
