"""Run worlds until so many steps are done; print one line of JSON. Exit 1 at the first world that fails."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time

from simulation.world import FEATURES, SimulationError, Totals, draw_config, run_world


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="steps that schedule tokens, over all worlds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--world", help="run one world again, by its seed as a failure names it")
    parser.add_argument("--coverage", action="store_true", help="print how often features met in one request's life")
    args = parser.parse_args()
    if args.world:
        print(run_world(args.world, draw_config(random.Random(args.world))))
        return 0
    totals = Totals()
    start = time.process_time()
    for index in itertools.count():
        name = f"{args.seed}:{index}"
        try:
            totals.add(run_world(name, draw_config(random.Random(name))))
        except SimulationError as error:
            print(json.dumps({"failed_world": name, "error": str(error), "steps": totals.steps}))
            return 1
        if totals.steps >= args.steps:
            break
    seconds = time.process_time() - start
    report = {name: value for name, value in vars_of(totals).items() if name != "combinations"}
    report |= {"seed": args.seed, "worlds": index + 1, "steps_per_second": round(totals.steps / seconds)}
    print(json.dumps(report))
    if args.coverage:
        print_coverage(totals)
    return 0


def vars_of(totals: Totals) -> dict[str, object]:
    """The fields of a dataclass with slots."""
    return {name: getattr(totals, name) for name in totals.__slots__}


def print_coverage(totals: Totals) -> None:
    """Every combination of three features, the rarest first."""
    counts = {triple: totals.combinations[triple] for triple in itertools.combinations(FEATURES, 3)}
    for triple, count in sorted(counts.items(), key=lambda each: each[1]):
        print(f"{count:8d}  {' + '.join(triple)}")


if __name__ == "__main__":
    sys.exit(main())
