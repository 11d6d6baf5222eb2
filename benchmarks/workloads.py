"""Workloads A to D on a checkpoint of real shape, with the limits of this machine measured in the same run.

    python benchmarks/workloads.py                       # qwen2-0.5b, bf16; creates missing checkpoint and workloads
    python benchmarks/workloads.py --shape qwen3-0.6b --repeat 5

Runs `octavo bench`; prints a table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from make_workloads import make_workloads

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "checkpoints"


def prepare(shape: str) -> tuple[Path, Path]:
    """Create the checkpoint and the workload file if they are missing; return their paths."""
    checkpoint, workloads = FOLDER / shape, FOLDER / "workloads.json"
    if not (checkpoint / "model.safetensors").exists():
        print(f"making {checkpoint}", file=sys.stderr)
        subprocess.run([sys.executable, str(ROOT / "tools" / "make_checkpoint.py"), shape, str(checkpoint)], check=True)
    if not workloads.exists():
        workloads.write_text(json.dumps(make_workloads(1234)))
    return checkpoint, workloads


def bench(checkpoint: Path, workloads: Path, repeat: int, options: list[str]) -> list[dict[str, object]]:
    """Run all four workloads in one process; return their rows."""
    command = [
        sys.executable, "-m", "octavo", "bench", "throughput", str(checkpoint), "--workload", str(workloads),
        "--repeat", str(repeat), "--json", *[part for name in "ABCD" for part in ("--only", name)], *options,
    ]  # fmt: skip
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows: list[dict[str, object]] = json.loads(result.stdout)["results"]
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2-0.5b", help="of tools/make_checkpoint.py")
    parser.add_argument("--repeat", type=int, default=3, help="medians of so many runs")
    arguments, options = parser.parse_known_args()
    checkpoint, workloads = prepare(arguments.shape)
    rows = bench(checkpoint, workloads, arguments.repeat, options)
    columns = ["workload", "wall_s", "output_tok_per_s", "prefill_tok_per_s", "decode_tok_per_s", "steps"]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join("-" if row[column] is None else str(row[column]) for column in columns) + " |")


if __name__ == "__main__":
    main()
