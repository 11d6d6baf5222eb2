"""Finds the dashboard's changes for one viewer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo.data.snapshot import BlockMap
    from octavo.server.telemetry.dashboard.view import LiveView


class Cursor:
    """Remembers which part of a `LiveView` one viewer has."""

    def __init__(self, view: LiveView) -> None:
        self._view = view
        self._start()

    def _start(self) -> None:
        self._revision = self._second = self._num_steps = self._last_number = 0
        self._blocks: BlockMap | None = None
        self._states = b""
        self._tables: dict[int, list[int]] = {}
        self._epoch = self._view.epoch

    def frame(self) -> dict[str, Any]:
        """Return the changes since the previous frame.

        is_first: True if the page must drop its state. steps_left_out: Number of new steps that the view has already
        dropped.
        """
        view = self._view
        if self._epoch != view.epoch:
            self._start()
        now = view.clock()
        is_first = not self._second
        seconds = view.seconds_since(self._revision, self._second, int(now))
        self._revision, self._second = view.revision, int(now)
        num_new = view.num_steps - self._num_steps
        steps = view.steps_since(self._num_steps)
        names = view.names_since(self._last_number)
        self._num_steps, self._last_number = view.num_steps, max([self._last_number, *(each[0] for each in names)])
        return {
            "is_first": is_first,
            "now": round(now, 3),
            "moment": view.moment(),
            "seconds": seconds,
            "steps": [step.row() for step in steps],
            "steps_left_out": 0 if is_first else num_new - len(steps),
            "names": names,
            "live": view.live_numbers(),
            "requests": view.rows(),
            "blocks": self._changed_blocks(),
        }

    def _changed_blocks(self) -> dict[str, Any] | None:
        blocks = self._view.blocks
        if blocks is None or blocks is self._blocks:
            return None
        self._blocks = blocks
        if len(blocks.states) == len(self._states):
            states: Any = list(_changes(self._states, blocks.states))
        else:
            states = blocks.states.translate(_DIGITS).decode()
        self._states = blocks.states
        numbers = self._view.numbers()
        tables = {numbers[name]: table for name, table in blocks.holders.items() if name in numbers}
        grown = []
        for number, table in tables.items():
            old = self._tables.get(number, [])
            if table[: len(old)] != old:
                old = []
            if len(old) < len(table):
                grown.append([number, len(old), table[len(old) :]])
        gone = [number for number in self._tables if number not in tables]
        self._tables = tables
        return {"block_size": blocks.block_size, "states": states, "grown": grown, "gone": gone}


_PIECE = 256
_DIGITS = bytes.maketrans(bytes(range(10)), b"0123456789")


def _changes(old: bytes, new: bytes) -> Iterator[list[int]]:
    for start in range(0, len(new), _PIECE):
        piece = new[start : start + _PIECE]
        if old[start : start + _PIECE] != piece:
            for place, byte in enumerate(piece, start):
                if old[place] != byte:
                    yield [place, byte]
