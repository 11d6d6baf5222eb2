"""Random schedules of sequences whose steps have rows that may be rejected, for tests of kept rows."""

from dataclasses import dataclass, field
from itertools import accumulate

from state_cases import int32

from octavo.kernels.state_batch import StateBatch

SLOTS, KEPT = 3, 24  # of each sequence: two slots for its state, and one for a saved state; places of kept rows


@dataclass(frozen=True)
class Piece:
    """A sequence's part of a step. Rows are numbers of inputs; those from `wrong` on are rejected later."""

    sources: list[int]  # rows, or -1 - k for kept row k
    num_right: int  # state rows that are not rejected
    first: int  # number of the sequence's rows before the state rows
    read: int
    write: int
    write_rows: int
    saved: list[tuple[int, int]]  # pairs of a number of state rows and a slot
    keep: list[tuple[int, int]]  # pairs of a state row and a kept row


@dataclass
class Schedule:
    """The steps of sequence `index`, whose rows are first .. first + num_rows - 1. Rejected rows are `wrong`."""

    index: int
    first: int
    num_rows: int
    wrong: range
    draw: object  # random.Random
    begins_at_zero: bool = False
    done: int = 0  # rows that are in the written state
    pending: list[int] = field(default_factory=list)  # kept rows after these: right, in order
    slot: int = 0

    @property
    def is_done(self):
        return self.done + len(self.pending) == self.num_rows

    def next_piece(self, most_rows):
        """Return the next part of a step with at most `most_rows` right rows, and some that are rejected."""
        draw, known = self.draw, self.done + len(self.pending)
        right = draw.randint(0, min(most_rows, self.num_rows - known))
        wrong = [draw.choice(self.wrong) for _ in range(draw.choice([0, 0, 1, 3]))]
        replayed = [-1 - kept for kept in self.pending]
        sources = [*replayed, *range(self.first + known, self.first + known + right), *wrong]
        num_right = len(replayed) + right
        least = max(0, num_right - (KEPT - len(wrong) - len(replayed)))
        written = draw.choice([num_right, draw.randint(least, num_right), max(least, num_right - 1)])
        free = [
            kept for kept in range(self.index * KEPT, (self.index + 1) * KEPT) if kept not in self.pending[written:]
        ]
        draw.shuffle(free)
        keep = [(row, free.pop()) for row in range(max(written, len(replayed)), len(sources))]
        base, read = self.index * SLOTS, self.slot
        self.slot = draw.choice([read, 1 - read])
        is_zero = self.begins_at_zero and self.done == 0
        saved = [(draw.randint(1, num_right), base + 2)] if num_right and draw.random() < 0.5 else []
        piece = Piece(
            sources, num_right, self.done, -1 if is_zero else base + read, base + self.slot, written, saved, keep
        )  # fmt: skip
        new = dict(keep)
        self.pending = [self.pending[row] if row < len(replayed) else new[row] for row in range(written, num_right)]
        self.done += written
        return piece


def step_of_pieces(pieces, draw):
    """Return the rows of a step in random order, its batch, and each piece's rows of the step (None: replayed)."""
    starts = [0, *accumulate(len(piece.sources) for piece in pieces)]
    flat = [source for piece in pieces for source in piece.sources]
    places = [row for row, source in enumerate(flat) if source >= 0]
    draw.shuffle(places)
    of_step = {row: place for place, row in enumerate(places)}
    sources = [of_step.get(row, source) for row, source in enumerate(flat)]
    shifted = [(start, piece) for start, piece in zip(starts, pieces, strict=False)]
    saved = [(start + count - 1, slot) for start, piece in shifted for count, slot in piece.saved]
    keep = [(of_step[start + row], kept) for start, piece in shifted for row, kept in piece.keep]
    columns = [[pair[side] for pair in pairs] for pairs in (saved, keep) for side in (0, 1)]
    slots = ([getattr(piece, name) for piece in pieces] for name in ("read", "write", "write_rows"))
    batch = StateBatch(int32(starts), int32(sources), *map(int32, slots), *map(int32, columns))
    rows = [[of_step.get(start + row) for row in range(len(piece.sources))] for start, piece in shifted]
    return [flat[row] for row in places], batch, rows
