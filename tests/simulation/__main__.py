"""Run worlds until so many steps are done; print one line of JSON. Exit 1 at the first world that fails.

A failing world is made as small as it can be, and printed as a line for corpus.jsonl.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from simulation.world import FEATURES, SimulationError, Totals, WorldConfig, draw_config, run_world


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="steps that schedule tokens, over all worlds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the worlds")
    parser.add_argument("--world", help="run one world again, by its seed as a failure names it")
    parser.add_argument("--coverage", action="store_true", help="print how often features met in one request's life")
    parser.add_argument("--exhaustive", action="store_true", help="run every small world, and print how many there are")
    parser.add_argument("--no-shrink", action="store_true", help="do not make a failing world smaller")
    args = parser.parse_args()
    if args.exhaustive:
        from simulation.exhaustive import run_all

        print(json.dumps({"small_worlds": run_all()}))
        return 0
    if args.world:
        return report_failure(args.world, *run_one(args.world), shrinks=not args.no_shrink)
    totals, failed, num_worlds, seconds = run_worlds(args.seed, args.steps, args.jobs)
    if failed is not None:
        return report_failure(*failed, totals, shrinks=not args.no_shrink)
    report = {name: getattr(totals, name) for name in totals.__slots__ if name != "combinations"}
    if hasattr(sys, "mutant_reached"):
        report["reached"] = sys.mutant_reached
    report |= {"seed": args.seed, "worlds": num_worlds, "steps_per_second": round(totals.steps / seconds)}
    print(json.dumps(report))
    if args.coverage:
        print_coverage(totals)
    return 0


def run_one(name: str) -> tuple[str | None, Totals]:
    """Run the world of that name; return what is wrong with it, and its figures."""
    try:
        return None, run_world(name, draw_config(random.Random(name)))
    except SimulationError as error:
        return str(error), Totals()


def run_worlds(seed: int, steps: int, jobs: int) -> tuple[Totals, tuple[str, str] | None, int, float]:
    """Run worlds until so many steps are done; return figures, (name, error) of a failed one, and worlds and seconds."""
    totals, count = Totals(), 0
    names = (f"{seed}:{index}" for index in itertools.count())
    start = time.perf_counter() if jobs > 1 else time.process_time()
    pool = ProcessPoolExecutor(jobs) if jobs > 1 else None
    failed = None
    while totals.steps < steps and failed is None:
        batch = list(itertools.islice(names, 8 * jobs if pool else 1))
        for name, (error, figures) in zip(batch, (pool or Serial).map(run_one, batch), strict=True):
            totals.add(figures)
            count += 1
            if error is not None:
                failed = failed or (name, error)
    if pool is not None:
        pool.shutdown()
    return totals, failed, count, (time.perf_counter() if jobs > 1 else time.process_time()) - start


class Serial:
    """`map` without processes."""

    map = map


def report_failure(name: str, error: str | None, totals: Totals, *, shrinks: bool) -> int:
    """Print what is wrong with a world, and the smallest one that shows it."""
    if error is None:
        print(totals)
        return 0
    report = {"failed_world": name, "error": error, "steps": totals.steps}
    print(json.dumps({**report, "reached": getattr(sys, "mutant_reached", False)}), flush=True)
    if shrinks:
        config, error = shrunk(name)
        print(json.dumps({"name": error, "seed": name, "config": dataclasses.asdict(config)}))
    return 1


def shrunk(name: str) -> tuple[WorldConfig, str]:
    """Make a failing world smaller."""
    from simulation.shrink import shrink

    return shrink(name, draw_config(random.Random(name)))


def print_coverage(totals: Totals) -> None:
    """Print every combination of three features, the rarest first."""
    counts = {triple: totals.combinations[triple] for triple in itertools.combinations(FEATURES, 3)}
    for triple, count in sorted(counts.items(), key=lambda each: each[1]):
        print(f"{count:8d}  {' + '.join(triple)}")


if __name__ == "__main__":
    sys.exit(main())
