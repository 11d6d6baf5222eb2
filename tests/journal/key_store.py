"""A KV store for recorded journals: it keeps keys and no bytes."""

from __future__ import annotations

import random
from typing import Any

from journal.scenarios import BLOCK_SIZE

from octavo.data.kv_tiers import EndedTransfer, TierMove
from octavo.data.request import Request
from octavo.data.scheduler_output import TransferDirection, are_whole


class Store:
    """A KV store, both halves: it keeps keys, moves no bytes, and answers some lookups late.

    keys: the stored blocks, each with whether it has its window part. Saves always end with the next step, so that
    there is room for further ones.
    """

    name = "made up"

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.keys: dict[bytes, bool] = {}
        self.moving: dict[int, tuple[Any, int]] = {}
        self.num_late = 0

    def request_added(self, request: Request) -> None:
        """Do nothing."""

    def lookup_given_up(self, request: Request) -> None:
        """Do nothing."""

    def update_state_after_alloc(self, request: Request, block_ids: Any, num_external_tokens: int) -> None:
        """Do nothing."""

    def transfer_ordered(self, transfer: Any) -> None:
        """Do nothing."""

    def transfer_ended(self, transfer: Any, num_blocks: int | None) -> None:
        """Forget the blocks that could not be loaded."""
        if transfer.direction is TransferDirection.LOAD and num_blocks is not None:
            for key in transfer.keys[num_blocks:]:
                self.keys.pop(key, None)

    def request_finished(self, request: Request, block_ids: Any) -> None:
        """Do nothing."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return the number of stored tokens, up to the last block with its window part; or None for a while."""
        if self.rng.random() < 0.2:
            self.num_late += 1
            return None
        if self.rng.random() < 0.2:  # another engine has saved the beginning of the sequence
            for key in request.block_hashes[: self.rng.randint(1, 10)]:
                self.keys.setdefault(key, self.rng.random() < 0.9)
        usable = 0
        for count, key in enumerate(request.block_hashes[num_computed_tokens // BLOCK_SIZE :], 1):
            if key not in self.keys:
                break
            if self.keys[key]:
                usable = count
        return usable * BLOCK_SIZE

    def keys_to_save(self, keys: Any, *, only_first_group: bool = False) -> set[bytes]:
        """Choose most of the blocks that are not stored, or are stored without their window parts."""
        lacking = [key for key in keys if key not in self.keys or not (only_first_group or self.keys[key])]
        return {key for key in lacking if self.rng.random() < 0.8}

    def run(self, scheduled: Any) -> list[EndedTransfer]:
        """Take a step's orders; return the transfers that end with it."""
        for transfer_id in scheduled.kv_cancels:
            self.moving.pop(transfer_id, None)
        for order in scheduled.kv_transfers:
            is_save = order.direction is TransferDirection.SAVE
            delay = 0 if is_save else self._delay_of_load()
            self.moving[order.transfer_id] = order, scheduled.step + delay
        ended = []
        for transfer_id, (order, due) in list(self.moving.items()):
            if due <= scheduled.step:
                del self.moving[transfer_id]
                ended.append(self._end(order))
        return ended

    def _delay_of_load(self) -> int:
        """Return the number of steps until a load ends; a few loads are given up before that."""
        return 400 if self.rng.random() < 0.05 else self.rng.choice([0, 0, 1, 2])

    def _end(self, order: Any) -> EndedTransfer:
        count = len(order.keys)
        if self.rng.random() < 0.3:
            count = self.rng.randrange(count)
        if order.direction is TransferDirection.SAVE:
            for key, is_whole in list(zip(order.keys, are_whole(order.block_ids), strict=True))[:count]:
                self.keys[key] = self.keys.get(key, False) or is_whole
        moves = (TierMove("disk", count, 100 * count, 0.001 * count),) if count else ()
        return EndedTransfer(order.transfer_id, count, moves, (("disk", 1),) if count > 2 else ())
