"""Long runs: the worlds of several seeds. Progress is kept in a file, so an interrupted run can be resumed."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulation.world import SimulationError, Totals, draw_config, run_world

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from simulation.world import WorldConfig

    Draw = Callable[[random.Random], WorldConfig]

TESTS = Path(__file__).resolve().parents[1]
SAVE_EVERY_S = 20.0


@dataclass(slots=True)
class Run:
    """The finished worlds of one seed. seconds: of one core. failed: the name of the world that failed, and the
    error.
    """

    seed: int
    num_worlds: int = 0
    seconds: float = 0.0
    totals: Totals = field(default_factory=Totals)
    failed: tuple[str, str] | None = None

    def report(self) -> dict[str, Any]:
        """Return the figures to print."""
        figures = {each.name: getattr(self.totals, each.name) for each in fields(Totals) if each.name != "combinations"}
        speed = round(self.totals.steps / self.seconds) if self.seconds else 0
        return {"seed": self.seed, **figures, "worlds": self.num_worlds, "steps_per_second": speed}

    def to_json(self) -> dict[str, Any]:
        """Return all fields for the file."""
        totals = {each.name: getattr(self.totals, each.name) for each in fields(Totals)}
        totals["combinations"] = {"+".join(names): count for names, count in self.totals.combinations.items()}
        return {"seed": self.seed, "num_worlds": self.num_worlds, "seconds": self.seconds, "totals": totals}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Run:
        """Read the result of `to_json`."""
        totals = Totals()
        counts = {tuple(names.split("+")): count for names, count in saved["totals"].pop("combinations").items()}
        faults = saved["totals"].pop("faults")
        totals.add(Totals(**saved["totals"]))
        totals.combinations.update(counts)
        totals.faults.update(faults)
        return cls(saved["seed"], saved["num_worlds"], saved["seconds"], totals)


def source_digest() -> str:
    """Return a digest of the code that decides a world's course: figures of different code must not be added up."""
    digest = hashlib.sha256()
    source = TESTS.parent / "src" / "octavo"
    for path in (
        *sorted(source.glob("core/*.py")),
        *sorted(source.glob("*.py")),
        *sorted(TESTS.glob("simulation/*.py")),
    ):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


class RunFile:
    """Runs kept at `path`, or in memory only if it is None. Raises SystemExit for a file written by other code."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.digest = source_digest()
        self.runs: dict[int, Run] = {}
        if path is not None and path.exists():
            saved = json.loads(path.read_text())
            if saved["source"] != self.digest:
                raise SystemExit(f"{path} was written by other code; name another file, or remove it to begin anew")
            self.runs = {run["seed"]: Run.from_json(run) for run in saved["runs"]}

    def save(self) -> None:
        """Replace the file atomically."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"source": self.digest, "runs": [run.to_json() for run in self.runs.values()]}))
        temporary.rename(self.path)


def run_one(name: str, draw: Draw = draw_config) -> tuple[str | None, Totals, float]:
    """Run the world with this name; return its error or None, its figures, and seconds of one core."""
    start = time.process_time()
    try:
        totals = run_world(name, draw(random.Random(name)))
    except SimulationError as error:
        return str(error), Totals(), time.process_time() - start
    return None, totals, time.process_time() - start


def run_seed(seed: int, num_steps: int, jobs: int, file: RunFile, draw: Draw = draw_config) -> Run:
    """Run worlds of a seed until `num_steps` steps are done or one fails, starting from the progress in the file."""
    run = file.runs.setdefault(seed, Run(seed))
    if run.totals.steps >= num_steps:
        return run
    names = (f"{seed}:{index}" for index in itertools.count(run.num_worlds))
    last_save = time.monotonic()
    for name, (error, figures, seconds) in _results(names, jobs, draw):
        if error is not None:
            run.failed = (name, error)
            file.save()
            break
        run.totals.add(figures)
        run.num_worlds += 1
        run.seconds += seconds
        is_done = run.totals.steps >= num_steps
        if is_done or time.monotonic() - last_save > SAVE_EVERY_S:
            file.save()
            last_save = time.monotonic()
        if is_done:
            break
    return run


def _results(names: Iterator[str], jobs: int, draw: Draw) -> Iterator[tuple[str, tuple[str | None, Totals, float]]]:
    if jobs == 1:
        yield from ((name, run_one(name, draw)) for name in names)
        return
    with ProcessPoolExecutor(jobs) as pool:
        while True:
            batch = list(itertools.islice(names, 8 * jobs))
            yield from zip(batch, pool.map(partial(run_one, draw=draw), batch), strict=True)
