"""Report measurements as Markdown tables and as a picture."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comparison.engines import ENGINES, PRECISIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

WORKLOADS = {"A": "tok/s", "B": "s", "C": "tok/s", "D off": "s", "D on": "s"}
_TITLES = {
    "A": "A: one stream, decode",
    "B": "B: 64 requests at once",
    "C": "C: prompt of 1,024 tokens",
    "D off": "D: shared prefix, cache off",
    "D on": "D: shared prefix, cache on",
}
_IS_RATE = {"A", "C"}
_TIE = 1.1  # ratios up to this may be the machine's noise


@dataclass(frozen=True, slots=True)
class Figure:
    """Median, minimum and maximum of the runs."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Figure | None:
        """Summarize values; None if there are none."""
        found = list(values)
        return cls(statistics.median(found), min(found), max(found), len(found)) if found else None


def by_round(records: list[dict[str, Any]], engine: str, precision: str, workload: str) -> dict[int, tuple[float, str]]:
    """Return {round: (median of an engine's requests in a workload, run of the measurement)}."""
    key, _, cache = workload.partition(" ")
    return {
        record["round"]: (statistics.median(record["result"][key]), record["run"])
        for record in records
        if (record["engine"], record["precision"]) == (engine, precision)
        and key in record["result"]
        and (key != "D" or record["caching"] == (cache == "on"))
    }


def figure(records: list[dict[str, Any]], engine: str, precision: str, workload: str) -> Figure | None:
    """Return an engine's figure of a workload; each round counts once, with the median of its requests."""
    return Figure.of(value for value, _ in by_round(records, engine, precision, workload).values())


@dataclass(frozen=True, slots=True)
class Ratio:
    """The speed of octavo divided by that of another engine, round by round.

    found          the ratios of rounds with both figures of one run; of all rounds if there is no such round
    mixed          number of rounds with figures of different runs
    is_of_one_run  True if a round has both figures of one run
    """

    found: Figure
    mixed: int
    is_of_one_run: bool

    @classmethod
    def of(cls, ours: dict[int, tuple[float, str]], theirs: dict[int, tuple[float, str]], name: str) -> Ratio | None:
        """Compare two results of `by_round` for workload `name`; None if no round has both."""
        both = [(ours[number], theirs[number]) for number in sorted(ours.keys() & theirs.keys())]
        together = [(a, b) for a, b in both if a[1] == b[1]]
        found = Figure.of(_times_as_fast(a[0], b[0], name) for a, b in together or both)
        return None if found is None else cls(found, len(both) - len(together), bool(together))

    @property
    def is_tie(self) -> bool:
        """Whether the speeds are within 10 % of each other, the machine's noise."""
        return 1 / _TIE < self.found.median < _TIE

    def __str__(self) -> str:
        """Return the text for the tables."""
        spread = f" ({self.found.low:.2f} to {self.found.high:.2f})" if self.found.runs > 1 else ""
        text = f"{'tie, ' if self.is_tie else ''}{self.found.median:.2f}{spread}"
        if self.mixed == 0:
            return text
        return f"{text} less {self.mixed} mixed" if self.is_of_one_run else f"mixed: {text}"


def _times_as_fast(ours: float, theirs: float, name: str) -> float:
    return ours / theirs if name in _IS_RATE else theirs / ours


def table(
    records: list[dict[str, Any]], precision: str, best: dict[str, float], own: Iterable[dict[str, Any]] = ()
) -> str:
    """Return a Markdown table of all engines at one precision: median (minimum to maximum), share of the limit.

    own: results of engines' own benchmarks, shown in a row below the engine's.
    """
    rows = [["engine", *(f"{_TITLES[name]}, {unit}" for name, unit in WORKLOADS.items()), "peak memory", "start"]]
    for engine in ENGINES:
        measured = [r for r in records if (r["engine"], r["precision"]) == (engine.name, precision)]
        if measured:
            cells = [f"{engine.name} ({engine.precisions[precision]})"]
            cells += [_cell(figure(records, engine.name, precision, name), name, best[name]) for name in WORKLOADS]
            cells.append(f"{max(r['result']['peak_bytes'] for r in measured) / 1e9:.2f} GB")
            starts = [r["result"]["start_s"] for r in measured if not r["caching"]]  # jobs of one kind
            cells.append(f"{statistics.median(starts):.1f} s" if starts else "")
            rows.append(cells)
        said = [r["result"] for r in own if (r["of"], r["precision"]) == (engine.name, precision)]
        if said:
            cells = [f"{engine.name}, its own benchmark"]
            for name in WORKLOADS:
                rounds = Figure.of(statistics.median(result[name]) for result in said if name in result)
                cells.append(_cell(rounds, name, best[name]))
            rows.append([*cells, "", ""])
    rows.append(["limit", *(_number(best[name]) for name in WORKLOADS), "", ""])
    return _markdown(rows)


def ratios(records: list[dict[str, Any]]) -> str:
    """Return octavo's speed relative to each other engine (see `Ratio`), as Markdown."""
    rows = [["precision", "against", *WORKLOADS]]
    for precision in PRECISIONS:
        for engine in ENGINES[1:]:
            found = [
                Ratio.of(*(by_round(records, each, precision, name) for each in (ENGINES[0].name, engine.name)), name)
                for name in WORKLOADS
            ]
            if any(found):
                rows.append([precision, engine.name, *(str(each or "-") for each in found)])
    return _markdown(rows)


def best_peers(records: list[dict[str, Any]]) -> str:
    """Return octavo's speed relative to the best other engine of each round, and the names of these engines.

    Rounds without the engine that has the best median are skipped: there octavo would look better than it is.
    """
    rows = [["precision", *WORKLOADS]]
    for precision in PRECISIONS:
        cells = [_beside_best(records, precision, name) for name in WORKLOADS]
        if set(cells) != {"-"}:
            rows.append([precision, *cells])
    return _markdown(rows)


def _beside_best(records: list[dict[str, Any]], precision: str, name: str) -> str:
    ours, *others = (by_round(records, engine.name, precision, name) for engine in ENGINES)
    others = [other for other in others if ours.keys() & other.keys()]
    if not others:
        return "-"

    def speed(figure: tuple[float, str]) -> float:
        return _times_as_fast(figure[0], 1.0, name)

    def rank(other: dict[int, tuple[float, str]]) -> tuple[bool, float]:
        is_of_ours = any(other[number][1] == ours[number][1] for number in ours.keys() & other.keys())
        return is_of_ours, statistics.median(speed(figure) for figure in other.values())

    leader = max(others, key=rank)
    best = {}
    for number in ours.keys() & leader.keys():
        there = [other[number] for other in others if number in other]
        beside = [figure for figure in there if figure[1] == ours[number][1]]
        best[number] = max(beside or there, key=speed)  # a figure of another run only if there is no other
    named = [
        engine.name
        for engine in ENGINES[1:]
        if any(by_round(records, engine.name, precision, name).get(number) == figure for number, figure in best.items())
    ]
    return f"{Ratio.of(ours, best, name)} ({', '.join(named)})"


def turns_table(turns: Iterable[dict[str, Any]], best: Callable[[str, dict[str, float]], dict[str, float]]) -> str:
    """Return the results of turns as Markdown: median (minimum to maximum), and octavo relative to each other engine.

    best: best(precision, limits) returns the best possible figures by workload. Shares of the limit and relative speeds
    are medians over the turns.
    """
    head = ["precision", "workload", "engine", "figure", "share of the limit then", "octavo is times as fast", "ahead"]
    rows = [head]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for turn in turns:
        groups.setdefault((turn["precision"], turn["workload"]), []).append(turn)
    for (precision, name), group in groups.items():
        limits = [best(precision, turn["limits"])[name] for turn in group]
        for engine in ENGINES:
            both = [(turn["figures"], limit) for turn, limit in zip(group, limits, strict=True)]
            mine = [(figures, figures[engine.name], limit) for figures, limit in both if engine.name in figures]
            if not mine:
                continue
            found = Figure.of(value for _, value, _ in mine)
            shares = Figure.of(_times_as_fast(value, limit, name) for _, value, limit in mine)
            ahead = [
                _times_as_fast(figures["octavo"], value, name) for figures, value, _ in mine if "octavo" in figures
            ]
            ratio = Figure.of(ahead) if engine.name != "octavo" else None
            rows.append(
                [
                    precision, f"{name}, {WORKLOADS[name]}", f"{engine.name} ({engine.precisions[precision]})",
                    _spread(found, _number), _spread(shares, "{:.0%}".format), _spread(ratio, "{:.2f}".format),
                    f"{sum(times > 1 for times in ahead)} of {len(ahead)}" if ratio else "",
                ]
            )  # fmt: skip
    return _markdown(rows)


def draw(records: list[dict[str, Any]], best: dict[str, dict[str, float]], target: Path) -> None:
    """Write bars of all workloads to `target` with the endings .png and .svg."""
    import matplotlib as mpl  # noqa: PLC0415 - heavy, and tables need none of it

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    mpl.rcParams["svg.hashsalt"] = "octavo"
    precisions = [p for p in PRECISIONS if any(record["precision"] == p for record in records)]
    grid, axes = plt.subplots(1, len(WORKLOADS), figsize=(4 * len(WORKLOADS), 4.2), constrained_layout=True)
    width = 0.8 / len(ENGINES)
    for axis, (name, unit) in zip(axes, WORKLOADS.items(), strict=True):
        for number, engine in enumerate(ENGINES):
            found = [(i, figure(records, engine.name, p, name)) for i, p in enumerate(precisions)]
            bars = [(i - 0.4 + width * (number + 0.5), f) for i, f in found if f is not None]
            axis.bar(
                [x for x, _ in bars],
                [f.median for _, f in bars],
                width,
                yerr=[[f.median - f.low for _, f in bars], [f.high - f.median for _, f in bars]] if bars else None,
                label=engine.name,
                color=f"C{number}",
                capsize=2,
            )
        for i, precision in enumerate(precisions):
            axis.hlines(best[precision][name], i - 0.4, i + 0.4, colors="black", linestyles="dashed", linewidth=1)
        better = "higher" if name in _IS_RATE else "lower"
        axis.set_title(f"{_TITLES[name]}\n{unit}, {better} is better; dashed: limit", fontsize=9)
        axis.set_xticks(range(len(precisions)), precisions)
    axes[0].legend(fontsize=8)
    save_picture(grid, target)
    plt.close(grid)


def folder_of_pictures(text: str) -> Path:
    """Parse the option for plots. Check matplotlib now, before hours of measuring."""
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("plots need matplotlib, which is not installed")
    return Path(text)


def save_picture(grid: Any, target: Path) -> None:
    """Write a figure of matplotlib to `target` with .png and .svg appended; the name may contain dots."""
    for ending in ("png", "svg"):
        path = target.with_name(f"{target.name}.{ending}")
        grid.savefig(path, dpi=110, metadata={"Date": None} if ending == "svg" else None)


def _cell(found: Figure | None, name: str, limit: float) -> str:
    if found is None:
        return "-"
    share = found.median / limit if name in _IS_RATE else limit / found.median
    spread = f" ({_number(found.low)} to {_number(found.high)})" if found.runs > 1 else ""
    return f"{_number(found.median)}{spread}, {share:.0%}"


def _spread(found: Figure | None, write: Callable[[float], str]) -> str:
    if found is None:
        return ""
    text = write(found.median)
    return text if found.runs == 1 else f"{text} ({write(found.low)} to {write(found.high)})"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _markdown(rows: list[list[str]]) -> str:
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])
