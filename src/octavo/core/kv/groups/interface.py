"""A KV group's interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from octavo.core.kv.block_pool import Block
    from octavo.data.kv_groups import KVGroupKind
    from octavo.data.request import Sequence as TokenSequence


class Claim(NamedTuple):
    """A group's blocks that a request needs to continue. Lookups do not find private blocks."""

    first: int  # table index of the first needed block
    found: list[int]  # ids of found blocks from `first` on
    num_new: int  # blocks to allocate after the found blocks
    num_unheld: int  # new blocks, plus found blocks that no request holds
    is_private: bool = False  # new blocks are private until their release
    is_found_private: bool = False  # found blocks that no request holds also become private


class KVGroup(Protocol):
    """The blocks of one KV group."""

    @property
    def index(self) -> int:
        """Index in `Sequence.block_tables`."""
        ...

    @property
    def kind(self) -> KVGroupKind:
        """The rule for the positions that tokens attend to."""
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

    def first_read(self, num_tokens: int) -> int:
        """Return the index of the first block that the token at position `num_tokens` reads."""
        ...

    def id_of(self, block: Block) -> int | None:
        """Return the id of this group's block with the positions of `block`, or None if that was evicted.

        block: A block of the first group.
        """
        ...

    def claim(
        self, sequence: TokenSequence, found: Sequence[Block], num_read: int, num_step_blocks: int, num_all_blocks: int
    ) -> Claim:
        """Return the blocks that a request needs. Changes nothing.

        found: The prefix hit's blocks in the first group.
        num_read: Position of the next token to compute.
        num_step_blocks: Length of the block table for the next step.
        num_all_blocks: Length of the block table for all reserved tokens.
        """
        ...

    def can_hold(self, found: Sequence[Block], num_read: int, num_all_blocks: int, num_spare_blocks: int) -> bool:
        """Return True if a new request with `num_all_blocks` fits and `num_spare_blocks` stay free.

        found, num_read: See `claim`.
        """
        ...

    def num_reserved(self, num_all_blocks: int) -> int:
        """Return how many blocks to reserve for a block table of `num_all_blocks` blocks."""
        ...

    def can_reserve(self, num_blocks: int, num_saved: int, *, is_only: bool) -> bool:
        """Return True if `num_blocks` can be reserved in total.

        num_saved: Number of unreserved blocks that saves may pin.
        is_only: True if no other request has a reservation.
        """
        ...

    def hold(self, claim: Claim) -> None:
        """Add a reference to each found block of a claim."""
        ...

    def renew(self, block: Block) -> None:
        """Make a cached block the last to be evicted."""
        ...

    def extend(self, sequence: TokenSequence, claim: Claim) -> None:
        """Append a claim's blocks to the sequence's table. Call `hold` before."""
        ...

    def release_unread(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Release the blocks that no token at position >= `num_tokens` reads."""
        ...

    def clear(self, sequence: TokenSequence) -> None:
        """Release all blocks of a sequence, the last block first."""
        ...

    def pin(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block."""
        ...

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Unpin blocks, the last block first."""
        ...

    def quarantine(self, block_id: int) -> None:
        """Take a block out of use."""
        ...

    def num_holders(self, block_id: int) -> int:
        """Return a block's reference count."""
        ...

    def free_ids(self) -> list[int]:
        """Return the ids of free blocks."""
        ...

    def cached_ids(self) -> list[int]:
        """Return the ids of cached blocks in eviction order."""
        ...
