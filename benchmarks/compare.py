"""Compare octavo with vLLM, OpenVINO GenAI, llama.cpp and transformers: same checkpoint, requests, threads, memory.

    python benchmarks/compare.py                                  # all: hours, 20 GB of disk
    python benchmarks/compare.py --precision int8 --engine octavo --engine openvino
    python benchmarks/compare.py --turns 24 --only A              # engines side by side, a request each in turn
    python benchmarks/compare.py --ranks 2 --precision bf16 --only B   # tensor parallelism of octavo and vLLM
    python benchmarks/compare.py --report --pictures docs         # tables and plots of what was measured so far

Every other engine is installed in an environment of its own, by package name. Engines run one after the other, each job
in its own process. A round runs all engines, starts with another engine than the round before, and measures the
machine's limits first. Results are kept in --home, one line per job, so a stopped run can be continued until there are
--rounds rounds. Each line names its run by start time and machine. octavo is compared with another engine within rounds
that were measured in one run. If a round was continued in another run, or octavo was measured again in another version,
the report says "mixed". --again measures whole rounds again.

The speed of a shared machine changes within a minute, so the engines of a round may have had different conditions.
--turns N keeps all engines loaded (bf16: 17 GB). In each of N turns every engine measures one figure, one after the
other. Engines are compared within a turn, and with the limits measured just before it. Each precision and workload
loads them again.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comparison.engines import ENGINES, PRECISIONS, Engine
from comparison.limits import Work, best_possible
from comparison.measuring import RunError, Setting, measure, measure_limits
from comparison.report import best_peers, draw, folder_of_pictures, ratios, table, turns_table
from comparison.turns import Contest, seated, take_turns
from workloads import FOLDER, prepare

from octavo.kernels.machine import processor_name
from octavo.models.registry import read_architecture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GIB = 2**30


class Results:
    """A file with lines of JSON: {"engine", "precision", "caching", "round", "run", "machine", "result"} for a job.

    A turn: {"kind": "turn", "precision", "workload", "setting"} and the fields of `Turn`.

    A round also has {"kind": "limits", "limits"}, and {"kind": "own", "of", "precision", "result"} with the results of
    an engine's own benchmark.
    run: start time and machine of the measuring run. Lines of older versions do not have it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []
        if path.exists():
            self.records = [json.loads(line) for line in path.read_text().splitlines()]

    def add(self, record: dict[str, Any]) -> None:
        """Append a record and write it to disk immediately."""
        self.records.append(record)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def has(self, **fields: Any) -> bool:
        """Return True if a record with these fields exists."""
        return any(fields.items() <= record.items() for record in self.records)

    def letters(self, **fields: Any) -> str:
        """Return the letters of the workloads in records with these fields."""
        return "".join(r["workloads"] for r in self.records if "workloads" in r and fields.items() <= r.items())

    def jobs(self) -> list[dict[str, Any]]:
        """Return the records of engines; the last one if a workload was measured again, as for another version."""
        seen: set[tuple[Any, ...]] = set()
        kept = []
        for record in reversed(self._with_runs()):
            if "engine" not in record:
                continue
            job = tuple(record[name] for name in ("engine", "precision", "caching", "round"))
            outdated = [letter for letter in record["workloads"] if (*job, letter) in seen]
            seen.update((*job, letter) for letter in record["workloads"])
            if len(outdated) < len(record["workloads"]):
                result = {key: value for key, value in record["result"].items() if key not in outdated}
                kept.append(record | {"result": result})
        return kept[::-1]

    def _with_runs(self) -> list[dict[str, Any]]:
        """Return all records with a "run". Unnamed runs are distinguished by repeated measurements of a job."""
        times: Counter[tuple[Any, ...]] = Counter()
        found = []
        for record in self.records:
            if "engine" in record and "run" not in record:
                job = tuple(record[name] for name in ("engine", "precision", "caching", "round"))
                earlier = max((times[*job, letter] for letter in record["workloads"]), default=0)
                times.update((*job, letter) for letter in record["workloads"])
                found.append(record | {"run": f"not named, {earlier} before it"})
            else:
                found.append(record)
        return found

    def limits(self) -> dict[str, float]:
        """Return the medians of the limits over all rounds, using the last measurement of each round."""
        rounds = {record["round"]: record["limits"] for record in self.records if record.get("kind") == "limits"}
        names = next(iter(rounds.values()))
        return {name: statistics.median(each[name] for each in rounds.values()) for name in names}

    def own(self) -> list[dict[str, Any]]:
        """Return the results of engines' own benchmarks, the last ones of each round."""
        found = {(r["of"], r["precision"], r["round"]): r for r in self.records if r.get("kind") == "own"}
        return list(found.values())

    def turns(self) -> list[dict[str, Any]]:
        """Return the turns of each contest's last series, which has one setting and fixed engines and versions."""
        found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for record in self.records:
            if record.get("kind") == "turn":
                group = found.setdefault((record["precision"], record["workload"]), [])
                if record["number"] == 0:  # a new series begins, also with another setting
                    group.clear()
                group.append(record)
        return [record for group in found.values() for record in group]


def jobs(engines: list[Engine], precisions: list[str], only: str) -> Iterator[tuple[Engine, str, str, bool]]:
    """Yield (engine, precision, workloads, prefix cache on) for the jobs of a round."""
    for precision in precisions:
        for engine in engines:
            for together in engine.processes if precision in engine.precisions else ():
                letters = "".join(letter for letter in only if letter in engine.workloads and letter in together)
                if letters:
                    yield engine, precision, letters, False
                if "D" in letters:
                    yield engine, precision, "D", True


def this_run(results: Results) -> dict[str, str]:
    """Return {"run", "machine"} for new measurements. Exits if the kept figures are of another machine."""
    machine = f"{processor_name()}, {platform.python_version()}"
    if others := {record["machine"] for record in results.records} - {machine}:
        sys.exit(f"{results.path} holds figures of another machine ({others.pop()}): name another --home")
    return {"run": f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}, {machine}", "machine": machine}


def measure_round(
    number: int,
    results: Results,
    arguments: argparse.Namespace,
    engines: list[Engine],
    checkpoint: Path,
    workloads: Path,
) -> None:
    """Measure the missing jobs of a round, or all of them again."""
    found = this_run(results)
    planned = list(jobs(engines, arguments.precision, arguments.only))
    turn = number * len(planned) // max(arguments.rounds, 1)
    if arguments.again or not results.has(round=number, kind="limits"):
        limits = measure_limits(arguments.threads)
        results.add({"round": number, "kind": "limits", **found, "limits": limits})
    for engine, precision, letters, caching in planned[turn:] + planned[:turn]:
        job = {"engine": engine.name, "precision": precision, "caching": caching, "round": number}
        setting = {
            "threads": arguments.threads,
            "kv_gib": arguments.kv_gib,
            **({"ranks": arguments.ranks} if arguments.ranks > 1 else {}),
            "version": engine.version(),
        }
        measured = "" if arguments.again else results.letters(**job, **setting)
        missing = "".join(letter for letter in letters if letter not in measured)
        if not missing:
            continue
        start = time.monotonic()
        try:
            result = measure(
                engine,
                engine.checkpoint(checkpoint, precision),
                precision,
                missing,
                caching=caching,
                setting=shared_setting(arguments, workloads),
            )
        except RunError as error:
            print(f"round {number} {engine.name} {precision}: {error}", file=sys.stderr, flush=True)
            continue
        done = "".join(letter for letter in missing if letter in result)
        results.add({**job, **setting, "workloads": done, **found, "result": result})
        shown: dict[str, float | None] = dict.fromkeys(missing)  # None: it failed in that workload
        shown |= {key: round(statistics.median(result[key]), 1) for key in done}
        cache = "on" if caching else "off"
        spent = time.monotonic() - start
        print(f"round {number} {engine.name} {precision} cache {cache}: {shown} in {spent:.0f} s", file=sys.stderr)
    for engine, precision in dict.fromkeys((engine, precision) for engine, precision, _, _ in planned):
        job = {"round": number, "kind": "own", "of": engine.name, "precision": precision, "threads": arguments.threads}
        if arguments.again or not results.has(**job):
            own = engine.own_figures(engine.checkpoint(checkpoint, precision), arguments.threads)
            if own is not None:
                results.add({**job, **found, "result": own})


def measure_turns(
    results: Results, arguments: argparse.Namespace, engines: list[Engine], checkpoint: Path, workloads: Path
) -> None:
    """Measure engines in turns until each contest has the requested number of turns."""
    found = this_run(results)
    limits = functools.partial(measure_limits, arguments.threads)
    for contest, able in contests(engines, arguments.precision, arguments.only):
        setting = {
            "threads": arguments.threads,
            "kv_gib": arguments.kv_gib,
            **({"ranks": arguments.ranks} if arguments.ranks > 1 else {}),
            "versions": {engine.name: engine.version() for engine in able},
        }
        job = {"kind": "turn", "precision": contest.precision, "workload": contest.workload, "setting": setting}
        begun = 0 if arguments.again else sum(job.items() <= record.items() for record in results.turns())
        numbers = range(begun, arguments.turns)
        if not numbers:
            continue
        with seated(contest, able, checkpoint, shared_setting(arguments, workloads)) as seats:
            for turn in take_turns(contest, seats, numbers, limits):
                results.add({**job, **found, **asdict(turn)})
                shown = {name: round(value, 1) for name, value in turn.figures.items()}
                read = turn.limits["bytes_read"] / 1e9
                print(
                    f"turn {turn.number} {contest.precision} {contest.workload}: {shown}, memory {read:.1f} GB/s",
                    file=sys.stderr,
                    flush=True,
                )


def contests(engines: list[Engine], precisions: list[str], only: str) -> Iterator[tuple[Contest, list[Engine]]]:
    """Yield the contests to measure in turns, each with its engines."""
    for precision in precisions:
        for letter in only:
            able = [engine for engine in engines if precision in engine.precisions and letter in engine.workloads]
            for caching in (False, True) if letter == "D" else (False,):
                if able:
                    yield Contest(precision=precision, letter=letter, caching=caching), able


def shared_setting(arguments: argparse.Namespace, workloads: Path) -> Setting:
    """Return the setting for all engines from the command line."""
    return Setting(
        workloads=workloads,
        threads=arguments.threads,
        kv_bytes=arguments.kv_gib * GIB,
        timeout_s=arguments.timeout,
        ranks=arguments.ranks,
    )


def report(results: Results, checkpoint: Path, workloads: Path, pictures: Path | None) -> None:
    """Print the tables and draw the pictures."""
    work = Work.of(read_architecture(checkpoint))
    data = json.loads(workloads.read_bytes())
    possible = functools.partial(best_possible, work, data)
    if not results.jobs() and not results.turns():
        sys.exit(f"{results.path} holds no figures yet: run without --report")
    if results.jobs():
        report_rounds(results, possible, pictures and pictures / f"compare-{checkpoint.name}")
    if turns := results.turns():
        read = [turn["limits"]["bytes_read"] / 1e9 for turn in turns]
        waiting = max(turn["waiting"] for turn in turns)
        print(
            f"In turns, {min(read):.1f} to {max(read):.1f} GB/s read; engines that waited used at most {waiting:.1%} "
            f"of a core.\n\n{turns_table(turns, possible)}"
        )


def report_rounds(
    results: Results, possible: Callable[[str, dict[str, float]], dict[str, float]], picture: Path | None
) -> None:
    """Print the tables of rounds and draw the picture."""
    limits = results.limits()
    best = {precision: possible(precision, limits) for precision in PRECISIONS}
    print(
        f"limits: {limits['flops'] / 1e9:.0f} GFLOP/s float32, {limits['bfloat16_flops'] / 1e9:.0f} bfloat16, "
        f"{limits['byte_ops'] / 1e9:.0f} GOP/s int8, "
        f"{limits['bytes_read'] / 1e9:.1f} GB/s read\n"
    )
    for precision in PRECISIONS:
        if any(job["precision"] == precision for job in results.jobs()):
            print(f"{precision}\n\n{table(results.jobs(), precision, best[precision], results.own())}\n")
    print(
        "How many times as fast octavo is: median (least to greatest) of the rounds whose figures are of one run; a "
        "tie: within 10 %.\nmixed: there is no such round, one of the two was measured in another run each time; "
        "less 1 mixed: a round is not counted for that.\n\n"
        f"{ratios(results.jobs())}\n\nAgainst the best of the others in each round:\n\n"
        f"{best_peers(results.jobs())}\n"
    )
    if picture is not None:
        picture.parent.mkdir(parents=True, exist_ok=True)
        draw(results.jobs(), best, picture)


def main() -> None:
    """Install engines, convert checkpoints, measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [engine.name for engine in ENGINES]
    parser.add_argument("--shape", default="qwen2-0.5b", help="of tools/make_checkpoint.py (default: %(default)s)")
    parser.add_argument("--engine", action="append", choices=names, help="again for more (default: all)")
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="again for more (default: all)")
    parser.add_argument("--only", default="ABCD", help="letters of the workloads (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of every job (default: %(default)s)")
    parser.add_argument(
        "--turns", type=int, metavar="N", help="of every precision and workload, engines side by side; no rounds then"
    )
    parser.add_argument("--threads", type=int, default=2, help="of every engine (default: %(default)s)")
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        help="processes that compute the model together; only octavo and vLLM (%(default)s)",
    )
    parser.add_argument("--kv-gib", type=int, default=3, help="of every engine's KV cache (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds of one job (default: %(default)s)")
    parser.add_argument("--home", type=Path, default=FOLDER / "compare", help="environments, results (%(default)s)")
    parser.add_argument(
        "--pictures", type=folder_of_pictures, help="folder for plots, PNG and SVG; needs matplotlib (default: none)"
    )
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--again", action="store_true", help="measure all of every round, also what is there")
    arguments = parser.parse_args()
    if not 1 <= arguments.ranks <= arguments.threads:
        parser.error("--ranks must be a number from 1 to --threads")
    arguments.precision = arguments.precision or list(PRECISIONS)
    checkpoint, workloads = prepare(arguments.shape)
    arguments.home = arguments.home.absolute()
    arguments.home.mkdir(parents=True, exist_ok=True)
    suffix = f"-{arguments.ranks}-ranks" if arguments.ranks > 1 else ""
    results = Results(arguments.home / f"{arguments.shape}{suffix}.jsonl")
    if not arguments.report:
        able = [engine for engine in ENGINES if engine.has_ranks or arguments.ranks == 1]
        chosen = [engine(arguments.home) for engine in able if engine.name in (arguments.engine or names)]
        for engine in chosen:
            engine.install()
            for precision in arguments.precision:
                if precision in engine.precisions:
                    engine.checkpoint(checkpoint, precision)
        if arguments.turns is not None:
            measure_turns(results, arguments, chosen, checkpoint, workloads)
        for number in range(arguments.rounds if arguments.turns is None else 0):
            measure_round(number, results, arguments, chosen, checkpoint, workloads)
    report(results, checkpoint, workloads, arguments.pictures)


if __name__ == "__main__":
    main()
