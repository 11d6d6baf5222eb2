"""Judge mutants of rooms; print those that survive, and a table for each room.

Exit 1 if a room's share of killed mutants is too low, or if an entry of its list of equivalent mutants is not a mutant
or fails a test.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mutation.checks import Judges
from mutation.report import Report
from mutation.rooms import BY_NAME, ROOMS, TESTS, paths_named, room_of_day
from mutation.selection import diff_since, key_of, of_changed_lines, read_equivalent
from mutation.sweep import Sweep

if TYPE_CHECKING:
    from pathlib import Path

    from mutation.mutator import Mutant
    from mutation.rooms import Room


def main() -> int:
    """Read the command line, choose mutants and judge them; return the exit code."""
    args = _parser().parse_args()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads do not survive a fork
    try:
        tasks = [_task(room, paths, args) for room, paths in paths_named(_rooms(args), args.files)]
    except ValueError as error:
        raise SystemExit(str(error)) from None
    exit_code = max((1 for task in tasks if task.report.exit_code), default=0)
    tasks = [task for task in tasks if task.chosen]
    if not tasks:
        print("no statement that is judged has changed")
    total = sum(len(task.chosen) for task in tasks)
    for task in tasks:
        limit_s = args.limit_s * len(task.chosen) / total
        exit_code = max(exit_code, _in_a_process(task, args.jobs, limit_s, args.min_killed))
    return exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mutation", description=__doc__)
    parser.add_argument("files", nargs="*", help="files of the rooms, all by default: limiter.py, http/limiter.py")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--room", choices=[*BY_NAME, "all"], help="default: core; all with files or --changed")
    chosen.add_argument("--room-of-day", metavar="YYYY-DDD", help="the room whose turn it is on this day of the year")
    parser.add_argument("--changed", metavar="REV", help="only statements changed since the branch left REV")
    parser.add_argument("--share", type=float, default=1.0, help="judge this share of them, drawn by chance")
    parser.add_argument(
        "--limit-s", type=float, default=float("inf"), help="judge none after so many seconds, divided among the rooms"
    )
    parser.add_argument("--min-killed", type=float, help="fail below this percentage (default: each room's own)")
    parser.add_argument("--seed", default="0", help="of what is drawn")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    return parser


def _rooms(args: argparse.Namespace) -> tuple[Room, ...]:
    if args.room_of_day:
        return (room_of_day(args.room_of_day),)
    if args.room == "all" or (args.room is None and (args.files or args.changed)):
        return ROOMS
    return (BY_NAME[args.room or "core"],)


@dataclass(frozen=True, slots=True)
class _Task:
    room: Room
    chosen: list[Mutant]
    report: Report


def _task(room: Room, paths: list[Path], args: argparse.Namespace) -> _Task:
    """Choose the mutants of a room that the command line asks for."""
    diff = None
    if args.changed:
        diff = diff_since(args.changed, room.folder)
        if diff is None:
            print(f"git does not know {args.changed}, or no commit before it: any statement may have changed")
    known = read_equivalent(room.equivalent.read_text() if room.equivalent.exists() else "")
    report = Report(known, room.equivalent.name)
    if diff == "":
        return _Task(room, [], report)
    modules = room.read_modules(paths)
    mutants = [mutant for module in modules for mutant in module.mutants()]
    report.tell_stale({key_of(mutant) for mutant in mutants}, {each.file for each in modules} if args.files else None)
    chosen = mutants if diff is None else of_changed_lines(mutants, diff)
    if args.share < 1 or args.limit_s < float("inf"):
        chosen = random.Random(args.seed).sample(chosen, round(len(chosen) * args.share))
    return _Task(room, chosen, report)


def _in_a_process(task: _Task, jobs: int, limit_s: float, min_killed: float | None) -> int:
    """Judge in a separate process, because only that one may import the room. Return its exit code."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        code = _judge(task, jobs, limit_s, min_killed)
    except KeyboardInterrupt:
        pass
    except BaseException:  # noqa: BLE001  the exit code says so
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(code)


def _judge(task: _Task, jobs: int, limit_s: float, min_killed: float | None) -> int:
    room, report = task.room, task.report
    judges = Judges(
        tuple(str(TESTS / each) for each in room.tests),
        TESTS / room.conftest,
        room.left_out,
        room.num_worlds,
        room.whole_sweeps,
    )
    start = time.monotonic()
    print(f"{room.name}: {len(task.chosen)} mutants", flush=True)
    Sweep(room.read_modules(), judges, jobs=jobs, tell=report.add, limit_s=limit_s).judge(task.chosen)
    report.print_table(
        len(task.chosen), time.monotonic() - start, room.min_killed if min_killed is None else min_killed
    )
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
