"""Print the tables of the measurements in benchmarks/results.

    python benchmarks/tables.py                          # all of them
    python benchmarks/tables.py intel-amx amd-zen5-turns # of these folders and machines
    python benchmarks/tables.py --list                   # the available names

`results/FOLDER/SHAPE.jsonl` has lines of compare.py; their tables are those of `compare.py --report`. They are printed
without the checkpoint: its shape is enough to compute the limits.

`results/tables/MACHINE.json` has the output of other scripts on a machine, {"machine", "tables"}. The keys of a table:

    title, date   the subject and the date of the measurement (YYYY-MM-DD)
    commit        of the measured build; null if it was not recorded, "-dirty" with uncommitted changes
    commands      that produced the figures; absent if they were measured by hand
    results       the folder with lines of compare.py to which the notes refer
    columns, rows or output, a script's output as text
    notes         observations, and attempts without success
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compare import Results, report
from make_workloads import make_workloads

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
sys.path.insert(0, str(ROOT / "tools"))

from make_checkpoint import SHAPES  # noqa: E402 - needs the path above

if TYPE_CHECKING:
    from collections.abc import Sequence


def named() -> dict[str, list[Path]]:
    """Return {name: files}: folders with lines of compare.py, and machines with tables of other scripts."""
    found: dict[str, list[Path]] = {}
    for path in sorted(RESULTS.rglob("*.json*")):
        found.setdefault(path.stem if path.parent.name == "tables" else path.parent.name, []).append(path)
    return found


def print_comparison(path: Path) -> None:
    """Print the tables of `compare.py --report` for a file; its name is a shape of tools/make_checkpoint.py."""
    print(f"### {path.parent.name}: {path.stem}\n")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, workloads = Path(folder), Path(folder) / "workloads.json"
        (checkpoint / "config.json").write_text(json.dumps(SHAPES[path.stem]))
        workloads.write_text(json.dumps(make_workloads(1234)))
        report(Results(path), checkpoint, workloads, None)


def print_tables(path: Path) -> None:
    """Print a machine's tables; figures keep the digits with which they were written."""
    found = json.loads(path.read_bytes(), parse_float=str)
    print(f"## {path.stem}\n\n{found['machine']}\n")
    for table in found["tables"]:
        print("\n".join(_lines(table)))


def _lines(table: dict[str, Any]) -> list[str]:
    lines = [f"### {table['title']}\n", f"{table['date']}, commit {table['commit'] or 'not recorded'}\n"]
    if "commands" in table:
        lines += [*(f"    {command}" for command in table["commands"]), ""]
    if "results" in table:
        lines.append(f"Tables: `python benchmarks/tables.py {table['results']}`\n")
    if "columns" in table:
        columns = table["columns"]
        lines += [_row(columns), "|" + "---|" * len(columns), *map(_row, table["rows"]), ""]
    if "output" in table:
        lines += ["```", *table["output"], "```", ""]
    return [*lines, *(f"{note}\n" for note in table.get("notes", ()))]


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Print the requested tables."""
    found = named()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a folder of results or a machine (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - found.keys():
        parser.error(f"there are no results named {', '.join(sorted(unknown))}; --list prints those there are")
    if arguments.list:
        print("\n".join(found))
        return
    for name in arguments.names or found:
        for path in found[name]:
            (print_tables if path.suffix == ".json" else print_comparison)(path)


if __name__ == "__main__":
    main()
