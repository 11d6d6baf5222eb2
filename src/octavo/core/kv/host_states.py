"""Recurrent states in host memory.

A slot is free or has one of these states:
- SAVED: It has the state of a preempted request.
- CACHED: It has a checkpoint that was evicted from the device.
- LENT: The next step copies from it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.core.kv.block_pool import BlockLink


class HostStates:
    """The slots. States of preempted requests can replace checkpoints, but are never replaced."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.lent: dict[int, BlockLink | None] = {}  # block of the checkpoint, or None if the copy frees the slot
        self._free = list(range(num_slots - 1, -1, -1))
        self._cached: OrderedDict[int, BlockLink] = OrderedDict()  # least recently used first
        self._slot_of: dict[BlockLink | None, int] = {}

    def take(self) -> int | None:
        """Allocate a slot for a request's state. Return None if all slots have such states, or are lent."""
        if self._free:
            return self._free.pop()
        if not self._cached:
            return None
        slot, name = self._cached.popitem(last=False)
        del self._slot_of[name]
        return slot

    def release(self, slot: int) -> None:
        """Free a slot with a request's state."""
        self._free.append(slot)

    def keep(self, name: BlockLink) -> int | None:
        """Allocate a slot for the state after the block with this name.

        Return None if no copy is needed or possible. A state that is there already becomes the most recently used.
        """
        present = self._slot_of.get(name)
        if present is not None:
            if present in self._cached:
                self._cached.move_to_end(present)
            return None
        slot = self.take()
        if slot is not None:
            self._cached[slot], self._slot_of[name] = name, slot
        return slot

    def find(self, name: BlockLink | None) -> int | None:
        """Return the slot with the state after a block, or None."""
        return self._slot_of.get(name)

    def drop(self, slot: int) -> None:
        """Discard a checkpoint."""
        name = self._cached.pop(slot, None)
        if name is not None:
            del self._slot_of[name]
            self._free.append(slot)

    def reset(self) -> None:
        """Discard all checkpoints."""
        for slot in list(self._cached):
            self.drop(slot)

    def lend(self, slot: int) -> None:
        """Protect a slot until the next step has copied it."""
        if slot not in self.lent:
            self.lent[slot] = self._cached.pop(slot, None)

    def end_lending(self) -> None:
        """End the protection of all slots. Call this after the step with the copies was scheduled."""
        for slot, name in self.lent.items():
            if name is None:
                self._free.append(slot)
            else:
                self._cached[slot] = name
        self.lent.clear()

    def free_slots(self) -> list[int]:
        """Return free slots."""
        return list(self._free)

    def cached_slots(self) -> dict[int, BlockLink]:
        """Map the slots of checkpoints, also lent ones, to their blocks."""
        return dict(self._cached) | {slot: name for slot, name in self.lent.items() if name is not None}
