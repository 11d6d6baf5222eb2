"""What bounds matrix products and attention: a table, and a plot, from `octavo doctor --json`.

    octavo doctor ./my-checkpoint --json > doctor.json
    python benchmarks/roofline.py doctor.json
    python benchmarks/roofline.py doctor.json --pictures docs/pictures

The roofline model (Williams, Waterman and Patterson 2009) says that a kernel takes at least the time of its arithmetic
at the processor's rate, and at least the time in which memory gives its bytes. The longer one is the predicted time.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comparison.report import folder_of_pictures, save_picture

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_FLOATS = {"float32", "float16"}


@dataclass(frozen=True)
class Point:
    """A measured kernel. peak: operations a second that its arithmetic allows. bandwidth: bytes a second of memory."""

    kind: str
    name: str
    rows: int
    seconds: float
    ops: float
    num_bytes: float
    peak: float
    bandwidth: float

    @property
    def predicted_s(self) -> float:
        """The least time that the model allows."""
        return max(self.ops / self.peak, self.num_bytes / self.bandwidth)

    @property
    def bound(self) -> str:
        """What the predicted time is made of."""
        return "arithmetic" if self.ops / self.peak > self.num_bytes / self.bandwidth else "memory"

    @property
    def share(self) -> float:
        """Predicted by measured time."""
        return self.predicted_s / self.seconds


def points(report: dict[str, Any]) -> Iterator[Point]:
    """Yield the products and the attention of a report."""
    limits = report["limits"]

    def point(kind: str, name: str, found: dict[str, Any], peak: str) -> Point:
        seconds = found["seconds"]
        ops = found["ops_per_s"] * seconds
        return Point(kind, name, found["rows"], seconds, ops, found["num_bytes"], limits[peak], limits["bytes_read"])

    for each in report["products"]:
        kind = each["precision"]
        peak = "bfloat16_flops" if kind == "bfloat16" else "flops" if kind in _FLOATS else "byte_ops"
        yield point(kind, f"{each['name']} {each['in_features']} x {each['out_features']}", each, peak)
    for each in report["attention"]:
        name = (
            f"{each['num_heads']} x {each['head_dim']}, {each['num_kv_heads']} KV heads, {each['positions']} positions"
        )
        peak = "flops" if each["kv"] == "float32" else "bfloat16_flops"
        yield point(f"attention, KV in {each['kv']}", name, each, peak)


def table(found: Sequence[Point]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield "| kernel | shape | rows | operations per byte | bound | predicted | measured | share |"
    yield "|---|---|---|---|---|---|---|---|"
    for each in found:
        yield (
            f"| {each.kind} | {each.name} | {each.rows} | {each.ops / each.num_bytes:.3g} | {each.bound} | "
            f"{duration(each.predicted_s)} | {duration(each.seconds)} | {each.share:.2f} |"
        )


def duration(seconds: float) -> str:
    """Format a time with three digits."""
    factor, unit = next(((f, u) for f, u in ((1.0, "s"), (1e3, "ms")) if seconds * f >= 1), (1e6, "us"))
    return f"{seconds * factor:.3g} {unit}"


def draw(target: Path, found: Sequence[Point]) -> None:
    """Write a plot for each kind of kernel to `target` with the endings .png and .svg."""
    import matplotlib as mpl  # noqa: PLC0415 - heavy, and the table needs none of it

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    mpl.rcParams["svg.hashsalt"] = "octavo"
    kinds = list(dict.fromkeys(each.kind for each in found))
    grid, axes = plt.subplots(1, len(kinds), figsize=(4 * len(kinds), 3.6), constrained_layout=True, squeeze=False)
    for axis, kind in zip(axes[0], kinds, strict=True):
        of_kind = [each for each in found if each.kind == kind]
        first = of_kind[0]
        ridge = first.peak / first.bandwidth
        ends = [
            min(each.ops / each.num_bytes for each in of_kind) / 2,
            max(each.ops / each.num_bytes for each in of_kind) * 2,
        ]
        line = sorted([*ends, ridge])
        axis.loglog(line, [min(first.peak, first.bandwidth * x) / 1e9 for x in line], color="black")
        for rows in sorted({each.rows for each in of_kind}):
            some = [each for each in of_kind if each.rows == rows]
            axis.loglog(
                [each.ops / each.num_bytes for each in some],
                [each.ops / each.seconds / 1e9 for each in some],
                "o",
                label=f"{rows} rows" if rows > 1 else "1 row",
            )
        axis.set(title=kind, xlabel="operations per byte", ylabel="G operations per second")
        axis.grid(visible=True, alpha=0.3)
        axis.legend()
    save_picture(grid, target)


def main() -> None:
    """Read a report, print the table, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="the output of `octavo doctor --json`")
    parser.add_argument(
        "--pictures", type=folder_of_pictures, help="folder for plots, PNG and SVG; needs matplotlib (default: none)"
    )
    arguments = parser.parse_args()
    try:
        report = json.loads(arguments.report.read_text())
        found = list(points(report))
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"{arguments.report} is no output of `octavo doctor --json`: {error!r}")
    limits = report["limits"]
    print(
        f"{report['processor']}, {report['isa']}, {report['num_threads']} threads: "
        f"{limits['bfloat16_flops'] / 1e12:.2f} T/s bfloat16, {limits['byte_ops'] / 1e12:.2f} T/s int8, "
        f"{limits['bytes_read'] / 1e9:.1f} GB/s read\n"
    )
    print(*table(found), sep="\n")
    if arguments.pictures is not None:
        arguments.pictures.mkdir(parents=True, exist_ok=True)
        draw(arguments.pictures / f"roofline-{arguments.report.stem}", found)


if __name__ == "__main__":
    main()
