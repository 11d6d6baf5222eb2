"""Worked case (d): static and continuous batching for outputs of 5, 50, 3 and 100 tokens.

A static batch occupies its four slots until the longest request ends: 158 of 400 slot-steps are busy, 39.5 %. With
continuous batching the next request gets a slot as soon as a request ends. Both are real runs of the scheduler; `--svg
FILE` draws them.

Smaller cases: outputs of 5, 20 and 3 tokens keep 28 of the 60 slot-steps of a static batch busy. Five requests of 3,
10, 5, 8 and 2 tokens take 28 steps one after the other, 18 in static batches of three, and 11 with continuous batching
in three slots.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from driver import Driver

if TYPE_CHECKING:
    from collections.abc import Sequence

OUTPUT_LENGTHS = (5, 50, 3, 100)
NUM_SLOTS = 4
NUM_ROUNDS = 4
ONE_BATCH = (5, 20, 3)
FIVE_REQUESTS = (3, 10, 5, 8, 2)
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")


@dataclass(frozen=True)
class Run:
    """The steps in which each request was in the batch, and the occupancy of the slots."""

    steps: dict[str, list[int]]
    num_steps: int
    num_slots: int

    @property
    def num_busy(self) -> int:
        """Number of slot-steps in which a request was computed."""
        return sum(map(len, self.steps.values()))

    @property
    def occupancy(self) -> float:
        """Busy slot-steps / all slot-steps."""
        return self.num_busy / (self.num_slots * self.num_steps)


def simulate(lengths: Sequence[int], num_slots: int, *, static: bool) -> Run:
    """Run requests with output lengths `lengths`. static: a batch enters only after all earlier requests have ended."""
    driver = Driver(max_num_seqs=num_slots)
    waiting = [(f"{index}.{length}", length) for index, length in enumerate(lengths)]
    steps: dict[str, list[int]] = {name: [] for name, _ in waiting}
    num_steps = 0
    while waiting or driver.scheduler.requests:
        if not static or not driver.scheduler.requests:
            batch, waiting = (waiting[:num_slots], waiting[num_slots:]) if static else (waiting, [])
            for name, length in batch:
                driver.add(name, 1, max_tokens=length)
        for name in driver.step().num_scheduled_tokens:
            steps[name].append(num_steps)
        num_steps += 1
    return Run(steps, num_steps, num_slots)


def draw(runs: dict[str, Run]) -> str:
    """Return the timelines of all runs as SVG: one row with a bar per request, two pixels per step."""
    scale, height, top, parts = 2, 8, 24, []
    for title, run in runs.items():
        parts.append(f'<text x="4" y="{top - 8}">{title}: {run.num_steps} steps, {run.occupancy:.1%} busy</text>')
        for row, (name, busy) in enumerate(run.steps.items()):
            colour = COLOURS[row % len(COLOURS)]
            x, width, y = 4 + scale * busy[0], scale * (busy[-1] - busy[0] + 1), top + row * (height + 2)
            parts.append(
                f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{colour}"><title>{name}</title></rect>'
            )
        top += len(run.steps) * (height + 2) + 32
    widest = max(run.num_steps for run in runs.values()) * scale + 8
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{widest}" height="{top}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def run() -> dict[str, object]:
    """Run both ways; return occupancies and steps."""
    one_batch = simulate(OUTPUT_LENGTHS, NUM_SLOTS, static=True)
    static = simulate(OUTPUT_LENGTHS * NUM_ROUNDS, NUM_SLOTS, static=True)
    continuous = simulate(OUTPUT_LENGTHS * NUM_ROUNDS, NUM_SLOTS, static=False)
    small = simulate(ONE_BATCH, len(ONE_BATCH), static=True)
    return {
        "busy_of_one_batch": (small.num_busy, small.num_slots * small.num_steps),
        "steps_of_five": {
            "sequential": simulate(FIVE_REQUESTS, 1, static=True).num_steps,
            "static": simulate(FIVE_REQUESTS, 3, static=True).num_steps,
            "continuous": simulate(FIVE_REQUESTS, 3, static=False).num_steps,
        },
        "static_occupancy": one_batch.occupancy,
        "static_steps": static.num_steps,
        "continuous_steps": continuous.num_steps,
        "continuous_occupancy": round(continuous.occupancy, 3),
        "svg": draw({"static": static, "continuous": continuous}),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--svg", type=Path, help="write the timelines of both runs here")
    arguments = parser.parse_args()
    results = run()
    drawing = str(results.pop("svg"))
    for key, value in results.items():
        print(f"{key}: {value}")
    if arguments.svg:
        arguments.svg.write_text(drawing)
