"""A KV group's interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from octavo.core.kv.block_pool import Block
    from octavo.data.kv_groups import KVGroupKind
    from octavo.data.request import Sequence as TokenSequence


class Claim(NamedTuple):
    """A group's blocks for a request to continue.

    first: table index of the first needed block. found: ids from there on. num_new: blocks after them. num_unheld: new
    blocks and unheld found ones. is_private: new blocks are hidden from other requests until their release.
    is_found_private: so are unheld found blocks.
    """

    first: int
    found: list[int]
    num_new: int
    num_unheld: int
    is_private: bool = False
    is_found_private: bool = False


class KVGroup(Protocol):
    """One group's blocks. Only the group writes its block tables and `Sequence.first_held`."""

    @property
    def index(self) -> int:
        """Index in `Sequence.block_tables`."""
        ...

    @property
    def kind(self) -> KVGroupKind:
        """Which positions rows read."""
        ...

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        ...

    @property
    def quarantined(self) -> set[int]:
        """Blocks never allocated again."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Free and cached blocks."""
        ...

    # --- look up ------------------------------------------------------------------------------------------------------

    def first_read(self, num_tokens: int) -> int:
        """Return the first block that the row (token) at position `num_tokens` reads."""
        ...

    def id_of(self, block: Block) -> int | None:
        """Return this group's part of a block; None if evicted."""
        ...

    # --- take ---------------------------------------------------------------------------------------------------------

    def claim(
        self, sequence: TokenSequence, found: Sequence[Block], num_read: int, num_step_blocks: int, num_all_blocks: int
    ) -> Claim:
        """Return a request's claim. Changes nothing.

        found: the first group's found blocks, not yet held. num_read: tokens before the next row. num_step_blocks:
        table length for the next step. num_all_blocks: for all tokens with memory set aside; at least
        `num_step_blocks`.
        """
        ...

    def can_hold(self, found: Sequence[Block], num_read: int, num_all_blocks: int, num_spare_blocks: int) -> bool:
        """Return whether a new request of `num_all_blocks` fits and `num_spare_blocks` stay free.

        found, num_read: as in `claim`.
        """
        ...

    def num_reserved(self, num_all_blocks: int) -> int:
        """Return how many of `num_all_blocks` to set aside."""
        ...

    def can_reserve(self, num_blocks: int, num_saved: int, *, is_only: bool) -> bool:
        """Return whether the sum of all reservations can be set aside.

        num_saved: blocks that saves may pin in addition. is_only: there is one reservation.
        """
        ...

    def hold(self, claim: Claim) -> None:
        """Hold found blocks."""
        ...

    def renew(self, block: Block) -> None:
        """Evict a cached block last."""
        ...

    def extend(self, sequence: TokenSequence, claim: Claim) -> None:
        """Append a claim's blocks. Call `hold` before."""
        ...

    # --- release ------------------------------------------------------------------------------------------------------

    def release_unread(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Release blocks that no row from position `num_tokens` on reads."""
        ...

    def clear(self, sequence: TokenSequence) -> None:
        """Release all, the last first."""
        ...

    # --- transfers ----------------------------------------------------------------------------------------------------

    def pin(self, block_ids: Iterable[int]) -> None:
        """Hold blocks once more."""
        ...

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Release pins, the last first."""
        ...

    # --- invariants ---------------------------------------------------------------------------------------------------

    def quarantine(self, block_id: int) -> None:
        """Take a block out of use."""
        ...

    def num_holders(self, block_id: int) -> int:
        """Count a block's holders."""
        ...

    def free_ids(self) -> list[int]:
        """Return free blocks."""
        ...

    def cached_ids(self) -> list[int]:
        """Return cached blocks, the next to be evicted first."""
        ...
