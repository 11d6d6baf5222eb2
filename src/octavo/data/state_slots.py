"""Usage of the slots with recurrent states."""

from __future__ import annotations

from typing import NamedTuple


class StateSlots(NamedTuple):
    """Numbers of slots.

    num_running: Slots of running requests, and of checkpoints that are being saved.
    num_checkpoints: Slots of saved states.
    num_free: Empty slots.
    """

    num_running: int
    num_checkpoints: int
    num_free: int
