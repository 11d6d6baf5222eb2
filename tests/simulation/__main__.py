"""Run worlds up to a number of steps; print one line of JSON for each seed. Exit 1 at the first world that fails.

A failing world is shrunk, and printed as a line for corpus.jsonl.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from simulation.campaign import RunFile, run_one, run_seed
from simulation.world import (
    FEATURES,
    Totals,
    WorldConfig,
    draw_async,
    draw_config,
    draw_recurrent,
    draw_stored,
    draw_stored_states,
    draw_two_windows,
    draw_windowed,
)

if TYPE_CHECKING:
    from simulation.campaign import Draw

DRAWS: dict[str, Draw] = {
    "all": draw_config,
    "windows": draw_windowed,
    "window stores": draw_stored,
    "two windows": draw_two_windows,
    "async": draw_async,
    "recurrent": draw_recurrent,
    "stored states": draw_stored_states,
}


def main() -> int:
    """Read the command line and run; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="steps that schedule tokens, over a seed's worlds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, one after the other, from --seed on")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the worlds")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep what is done in FILE, and go on from there")
    parser.add_argument(
        "--kind",
        choices=sorted(DRAWS),
        default="all",
        help="which worlds (default all); --resume wants a file for each",
    )
    parser.add_argument("--world", help="run one world again, by its seed as a failure names it")
    parser.add_argument("--coverage", action="store_true", help="print how often features met in one request's life")
    parser.add_argument(
        "--min-coverage", type=int, default=0, help="exit 1 when three features met less often than this"
    )
    parser.add_argument("--exhaustive", action="store_true", help="run every small world, and print how many there are")
    parser.add_argument("--no-shrink", action="store_true", help="do not make a failing world smaller")
    args = parser.parse_args()
    if args.exhaustive:
        from simulation.exhaustive import run_all

        print(json.dumps({"small_worlds": run_all(jobs=args.jobs)}))
        return 0
    if args.world:
        error, totals, _ = run_one(args.world, DRAWS[args.kind])
        return report_failure(args.world, error, totals, draw=DRAWS[args.kind], shrinks=not args.no_shrink)
    file, all_totals = RunFile(args.resume), Totals()
    for seed in range(args.seed, args.seed + args.seeds):
        run = run_seed(seed, args.steps, args.jobs, file, DRAWS[args.kind])
        if run.failed is not None:
            return report_failure(*run.failed, run.totals, draw=DRAWS[args.kind], shrinks=not args.no_shrink)
        print(json.dumps(run.report()), flush=True)
        all_totals.add(run.totals)
    if args.coverage:
        print_coverage(all_totals)
    return 0 if rarest(all_totals) >= args.min_coverage else 1


def report_failure(name: str, error: str | None, totals: Totals, *, draw: Draw, shrinks: bool) -> int:
    """Print the failure of a world, and the smallest world found that still fails; return the exit code."""
    if error is None:
        print(totals)
        return 0
    print(json.dumps({"failed_world": name, "error": error, "steps": totals.steps}), flush=True)
    if shrinks:
        config, error = shrunk(name, draw)
        print(json.dumps({"name": error, "seed": name, "config": dataclasses.asdict(config)}))
    return 1


def shrunk(name: str, draw: Draw) -> tuple[WorldConfig, str]:
    """Shrink a failing world; return its name and configuration."""
    from simulation.shrink import shrink

    return shrink(name, draw(random.Random(name)))


def print_coverage(totals: Totals) -> None:
    """Print every combination of three features, the rarest first."""
    counts = {triple: totals.combinations[triple] for triple in itertools.combinations(FEATURES, 3)}
    for triple, count in sorted(counts.items(), key=lambda each: each[1]):
        print(f"{count:8d}  {' + '.join(triple)}")


def rarest(totals: Totals) -> int:
    """Return the number of occurrences of the rarest combination of three features."""
    return min(totals.combinations[triple] for triple in itertools.combinations(FEATURES, 3))


if __name__ == "__main__":
    sys.exit(main())
