"""Check a GPU in one command: exact and correct kernels, their share of the device's limits, engine, nano-vllm.

    python tools/gpu_check.py [--state gpu_check.json] [--seconds 480]
    TRITON_INTERPRET=1 python tools/gpu_check.py --dry-run

Prints one JSON. Each stage is a process of its own, so that one that breaks the device's state ends alone. What a stage
has found stands in the state file at once: the same command again goes on with the stages that are not there. Where the
seconds are over, the rest is left to the next call. --dry-run does all of it at tiny sizes in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STAGES = ("peaks", "correctness", "exactness", "tokens", "shares", "workloads", "nano_vllm")
LEAST_S = 20.0  # a stage is not begun with less


def run_stage(name: str, folder: Path, seconds: float, *, is_dry: bool) -> dict[str, Any]:
    """Return what a stage found, or what ended it."""
    if is_dry:
        return measured(name, folder, is_dry=True)
    command = [sys.executable, __file__, "--stage", name, "--folder", str(folder)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {seconds:.0f} s"}
    if ended.returncode:
        return {"error": ended.stderr[-2000:]}
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def measured(name: str, folder: Path, *, is_dry: bool) -> dict[str, Any]:
    """Run a stage in this process."""
    from gpu_stages import STAGES as MEASURE, open_check  # noqa: I001, PLC0415  loads torch, and triton

    return MEASURE[name](open_check(folder, is_dry=is_dry))


def check(state: Path, folder: Path, seconds: float, *, is_dry: bool, stages: tuple[str, ...]) -> dict[str, Any]:
    """Run the stages that the state file lacks, or of which it has an error; return all of it."""
    from gpu_stages import failures  # noqa: PLC0415  loads torch

    end = time.monotonic() + seconds
    results: dict[str, Any] = json.loads(state.read_text(encoding="utf-8")) if state.exists() else {}
    for name in stages:
        left = end - time.monotonic()
        if "error" not in results.get(name, {"error": "not run"}) or left < LEAST_S:
            continue
        results[name] = run_stage(name, folder, left, is_dry=is_dry)
        written = state.with_suffix(".partial")
        written.write_text(json.dumps(results, indent=1), encoding="utf-8")
        written.replace(state)
    ended = {name: results[name]["error"] for name in stages if "error" in results.get(name, {})}
    return {
        "results": results,
        "failures": failures({name: found for name, found in results.items() if "error" not in found}),
        "errors": ended,
        "not_run": [name for name in stages if name not in results],
    }


def main() -> int:
    """Check, print, return 1 where something is wrong and 2 where stages are left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--state", type=Path, default=Path("gpu_check.json"), help="what is known already")
    parser.add_argument("--seconds", type=float, default=480.0, help="in all, at most")
    parser.add_argument("--only", action="append", choices=STAGES, help="default: all stages")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, in Triton's interpreter")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="for the weights that are made; default: a temporary one")
    arguments = parser.parse_args()
    if arguments.dry_run and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("a dry run needs TRITON_INTERPRET=1")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        if arguments.stage:
            print(json.dumps(measured(arguments.stage, folder, is_dry=arguments.dry_run)))
            return 0
        stages = tuple(arguments.only or STAGES)
        report = check(arguments.state, folder, arguments.seconds, is_dry=arguments.dry_run, stages=stages)
    print(json.dumps(report, indent=1))
    if report["failures"] or report["errors"]:
        return 1
    return 2 if report["not_run"] else 0


if __name__ == "__main__":
    sys.exit(main())
