"""What was measured, as tables in Markdown and as a picture."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from comparison.engines import ENGINES, PRECISIONS

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

WORKLOADS = {"A": "tok/s", "B": "s", "C": "tok/s", "D off": "s", "D on": "s"}
_TITLES = {
    "A": "A: one stream, decode",
    "B": "B: 64 requests at once",
    "C": "C: prompt of 1,024 tokens",
    "D off": "D: shared prefix, cache off",
    "D on": "D: shared prefix, cache on",
}
_IS_RATE = {"A", "C"}


@dataclass(frozen=True, slots=True)
class Figure:
    """Median, least and greatest of the runs."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Figure | None:
        """Summarize; None of nothing."""
        found = list(values)
        return cls(statistics.median(found), min(found), max(found), len(found)) if found else None


def figure(records: list[dict[str, Any]], engine: str, precision: str, workload: str) -> Figure | None:
    """Return an engine's figure of a workload; each round counts once, with the median of its requests."""
    key, _, cache = workload.partition(" ")
    found = (
        statistics.median(record["result"][key])
        for record in records
        if (record["engine"], record["precision"]) == (engine, precision)
        and key in record["result"]
        and (key != "D" or record["caching"] == (cache == "on"))
    )
    return Figure.of(found)


def table(records: list[dict[str, Any]], precision: str, best: dict[str, float]) -> str:
    """Return one precision's engines as Markdown: median (least to greatest), share of the limit."""
    rows = [["engine", *(f"{_TITLES[name]}, {unit}" for name, unit in WORKLOADS.items()), "peak memory", "start"]]
    for engine in ENGINES:
        own = [r for r in records if (r["engine"], r["precision"]) == (engine.name, precision)]
        if not own:
            continue
        cells = [f"{engine.name} ({engine.precisions[precision]})"]
        cells += [_cell(figure(records, engine.name, precision, name), name, best[name]) for name in WORKLOADS]
        cells.append(f"{max(r['result']['peak_bytes'] for r in own) / 1e9:.2f} GB")
        cells.append(f"{statistics.median(r['result']['start_s'] for r in own):.1f} s")
        rows.append(cells)
    rows.append(["limit", *(_number(best[name]) for name in WORKLOADS), "", ""])
    return _markdown(rows)


def ratios(records: list[dict[str, Any]]) -> str:
    """Return how many times as fast octavo is as each other engine, of medians, as Markdown."""
    rows = [["precision", "against", *WORKLOADS]]
    for precision in PRECISIONS:
        for engine in ENGINES[1:]:
            cells = []
            for name in WORKLOADS:
                ours, theirs = (figure(records, each, precision, name) for each in (ENGINES[0].name, engine.name))
                if ours is None or theirs is None:
                    cells.append("-")
                else:
                    ratio = ours.median / theirs.median if name in _IS_RATE else theirs.median / ours.median
                    cells.append(f"{ratio:.2f}")
            if set(cells) != {"-"}:
                rows.append([precision, engine.name, *cells])
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


def save_picture(grid: Any, target: Path) -> None:
    """Write a figure of matplotlib to `target` with the endings .png and .svg; its name may have a dot of its own."""
    for ending in ("png", "svg"):
        path = target.with_name(f"{target.name}.{ending}")
        grid.savefig(path, dpi=110, metadata={"Date": None} if ending == "svg" else None)


def _cell(found: Figure | None, name: str, limit: float) -> str:
    if found is None:
        return "-"
    share = found.median / limit if name in _IS_RATE else limit / found.median
    spread = f" ({_number(found.low)} to {_number(found.high)})" if found.runs > 1 else ""
    return f"{_number(found.median)}{spread}, {share:.0%}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _markdown(rows: list[list[str]]) -> str:
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])
