"""The interface of a KV group."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from octavo.core.kv.block_pool import Block
    from octavo.data.kv_groups import KVGroupKind
    from octavo.data.request import Sequence as TokenSequence


class Claim(NamedTuple):
    """The blocks of a group that a request needs to continue.

    first: table index of the first block that the request needs. found: ids of the found blocks from there on.
    num_new: number of blocks after them. num_unheld: number of new blocks and of unheld found ones.
    is_private: the new blocks are hidden from other requests until they are released. is_found_private: so are the
    found blocks that were unheld.
    """

    first: int
    found: list[int]
    num_new: int
    num_unheld: int
    is_private: bool = False
    is_found_private: bool = False


class KVGroup(Protocol):
    """The blocks of one KV group. Only the group writes its block tables and `Sequence.first_held` entries."""

    @property
    def index(self) -> int:
        """The index of the group's table in `Sequence.block_tables`."""
        ...

    @property
    def kind(self) -> KVGroupKind:
        """Defines which positions the group's rows (tokens) read."""
        ...

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        ...

    @property
    def quarantined(self) -> set[int]:
        """Ids of blocks that are never allocated again."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Number of free and cached blocks."""
        ...

    # --- look up ------------------------------------------------------------------------------------------------------

    def first_read(self, num_tokens: int) -> int:
        """Return the index of the first block that the row (token) at position `num_tokens` reads."""
        ...

    def id_of(self, block: Block) -> int | None:
        """Return the id of this group's part of a first group's block; None if the part was evicted."""
        ...

    # --- take ---------------------------------------------------------------------------------------------------------

    def claim(
        self, sequence: TokenSequence, found: Sequence[Block], num_read: int, num_step_blocks: int, num_all_blocks: int
    ) -> Claim:
        """Return the blocks that a request needs to continue. Changes nothing.

        found: the first group's blocks that the lookup found; the request does not hold them yet.
        num_read: number of tokens before its next row. num_step_blocks: table length that the next step needs.
        num_all_blocks: table length for all tokens that memory is set aside for; at least `num_step_blocks`.
        """
        ...

    def can_hold(self, found: Sequence[Block], num_read: int, num_all_blocks: int, num_spare_blocks: int) -> bool:
        """Return whether a new request of `num_all_blocks` blocks fits and `num_spare_blocks` stay free.

        found, num_read: as in `claim`.
        """
        ...

    def num_reserved(self, num_all_blocks: int) -> int:
        """Return how many blocks to set aside for a request of `num_all_blocks` blocks."""
        ...

    def can_reserve(self, num_blocks: int, num_saved: int, *, is_only: bool) -> bool:
        """Return whether `num_blocks` blocks, the sum of all requests' reservations, can be set aside.

        num_saved: number of blocks that saves may pin in addition. is_only: whether only one request has a reservation.
        """
        ...

    def hold(self, claim: Claim) -> None:
        """Hold the found blocks of a claim."""
        ...

    def renew(self, block: Block) -> None:
        """Make a cached block the last one to be evicted."""
        ...

    def extend(self, sequence: TokenSequence, claim: Claim) -> None:
        """Append the blocks of a claim to a sequence's table. Call `hold` before."""
        ...

    # --- release ------------------------------------------------------------------------------------------------------

    def release_unread(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Release the blocks that no row from position `num_tokens` on reads."""
        ...

    def clear(self, sequence: TokenSequence) -> None:
        """Release all blocks of a sequence, the last one first."""
        ...

    # --- transfers ----------------------------------------------------------------------------------------------------

    def pin(self, block_ids: Iterable[int]) -> None:
        """Hold each block once more."""
        ...

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Release pinned blocks, the last one first."""
        ...

    # --- invariants ---------------------------------------------------------------------------------------------------

    def quarantine(self, block_id: int) -> None:
        """Take a block out of use for good."""
        ...

    def num_holders(self, block_id: int) -> int:
        """Return how often a block is held."""
        ...

    def free_ids(self) -> list[int]:
        """Return the ids of the free blocks."""
        ...

    def cached_ids(self) -> list[int]:
        """Return the ids of the cached blocks, the next to be evicted first."""
        ...
