"""Check a GPU in one command: kernels, speed, engine and server, compared with vLLM and nano-vllm.

    python tools/gpu_check.py [--state gpu_check.json] [--seconds 480] [--soak-seconds 60]
    TRITON_INTERPRET=1 python tools/gpu_check.py --dry-run

Prints one JSON object. Each stage runs in a process of its own, so a stage that breaks the device's state fails alone.
A stage reports each operation before and after it is measured. If an operation ends the process, the stage continues
with the next operation in a new process. The state file keeps all results: the same command again measures what is
missing or has failed. It starts from the beginning if the device, torch, Triton, the kernels or these checks have
changed. Stages that do not fit into --seconds remain for the next call. --dry-run runs everything at tiny sizes in
Triton's interpreter.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from contextlib import AbstractContextManager

STAGES = (
    "compiled", "peaks", "exactness", "correctness", "shares", "tokens", "workloads", "peers", "graphs", "transformers",
    "memory", "swap", "restart", "carried", "soak",
)  # fmt: skip
RESULT = "gpu_check: "  # begins a line with an entry in JSON
LEAST_S = 20.0  # a stage does not start with less time
SOAK_S = 60.0


def run_stage(
    name: str, folder: Path, seconds: float, *, is_dry: bool, soak_s: float = SOAK_S, skip: Collection[str] = ()
) -> dict[str, Any]:
    """Run a stage in a process; return its entries by name, and as `error` the reason if it ended early.

    skip: names of entries that are not measured. At the time-out the processes that the stage started end, too.
    """
    if is_dry:
        return measured(name, folder, is_dry=True, soak_s=soak_s, skip=skip)
    command = [sys.executable, __file__, "--stage", name, "--folder", str(folder), "--soak-seconds", str(soak_s)]
    with tempfile.TemporaryFile("w+") as skipped:  # the names may be too long for a command line
        json.dump(sorted(skip), skipped)
        skipped.seek(0)
        process = subprocess.Popen(
            command, stdin=skipped, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return read_entries(process.communicate()[0]) | {"error": f"not done after {seconds:.0f} s"}
    found = read_entries(output)
    return found | {"error": errors.decode(errors="replace")[-2000:]} if process.returncode else found


def run_past_crashes(
    name: str, folder: Path, end: float, known: dict[str, Any], *, is_dry: bool, soak_s: float
) -> dict[str, Any]:
    """Run a stage, and again without the operations already tried each time that one ends the process or the device.

    known: entries of an earlier call; those without failures are not measured again. end: on the clock of
    `time.monotonic`. Returns all entries, with the `error` of the last process that ended early.
    """
    from gpu_stages import failures  # noqa: PLC0415  loads torch

    failed = {"error", "device", *failures(known)}
    found = {key: entry for key, entry in known.items() if key not in failed}
    while True:
        new = run_stage(name, folder, end - time.monotonic(), is_dry=is_dry, soak_s=soak_s, skip=found.keys())
        is_broken = "error" in new or "device" in new
        has_progress = bool(new.keys() - {"error", "device"})
        found |= new
        if not (is_broken and has_progress) or end - time.monotonic() < LEAST_S:
            return found


def read_entries(output: bytes) -> dict[str, Any]:
    """Return the entries in a stage's output. Other lines are ignored: libraries print lines of their own."""
    found: dict[str, Any] = {}
    for line in output.decode(errors="replace").splitlines(keepends=True):
        if line.startswith(RESULT) and line.endswith("\n"):  # the last line may be cut off
            found |= json.loads(line.removeprefix(RESULT))
    return found


def print_entry(entry: dict[str, Any]) -> None:
    """Print an entry in the form that `read_entries` reads."""
    print(RESULT + json.dumps(entry), flush=True)


def measured(
    name: str,
    folder: Path,
    *,
    is_dry: bool,
    soak_s: float = SOAK_S,
    skip: Collection[str] = (),
    part: tuple[int, int] = (0, 1),
    report: Callable[[dict[str, Any]], None] = lambda _entry: None,
) -> dict[str, Any]:
    """Run a stage in this process; see `gpu_device.Entries` for skip, part and report."""
    import gpu_stages  # noqa: PLC0415  loads torch, and triton
    from gpu_device import Entries, open_check  # noqa: PLC0415

    check = replace(open_check(folder, is_dry=is_dry), soak_s=soak_s)
    entries = Entries(check.device, report, frozenset(skip), part)
    (gpu_stages.STAGES | {"identity": gpu_stages.identity})[name](check, entries)
    return entries.found


def check(
    state: Path, folder: Path, seconds: float, *, is_dry: bool, stages: tuple[str, ...], soak_s: float = SOAK_S
) -> dict[str, Any]:
    """Run the stages that are missing in the state file or have failures; return the results of all stages.

    Results of another device, other versions or other code are dropped.
    """
    from gpu_stages import failures  # noqa: PLC0415  loads torch

    end = time.monotonic() + seconds
    identity = run_stage("identity", folder, seconds, is_dry=is_dry)
    if "identity" not in identity or "error" in identity["identity"]:
        return {"errors": {"identity": str(identity)}, "failures": [], "not_run": list(stages), "results": {}}
    kept: dict[str, Any] = json.loads(state.read_text(encoding="utf-8")) if state.exists() else {}
    results: dict[str, Any] = kept.get("results", {}) if kept.get("identity") == identity["identity"] else {}
    for name in stages:
        left = end - time.monotonic()
        found = results.get(name)
        is_done = found is not None and "error" not in found and not failures(found)
        if is_done or left < LEAST_S:
            continue
        results[name] = run_past_crashes(name, folder, end, found or {}, is_dry=is_dry, soak_s=soak_s)
        written = state.with_suffix(".partial")
        written.write_text(json.dumps({"identity": identity["identity"], "results": results}, indent=1), "utf-8")
        written.replace(state)
    return {
        "identity": identity["identity"],
        "results": results,
        "failures": [f"{name}: {entry}" for name in stages for entry in failures(results.get(name, {}))],
        "errors": {name: results[name]["error"] for name in stages if "error" in results.get(name, {})},
        "not_run": [name for name in stages if name not in results],
    }


def interpreted() -> AbstractContextManager[object]:
    """Return a context in which Triton's interpreter computes products as in tests: in one order, and faster.

    Its own products are computed by numpy, which on some processors sums different rows in different orders.
    """
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    made: AbstractContextManager[object] = importlib.import_module("triton_interpreter").interpreted_kernels()
    return made


def main() -> int:
    """Check and print; return 1 if there is a failure, and 2 if stages remain to be run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--state", type=Path, default=Path("gpu_check.json"), help="what is known already")
    parser.add_argument("--seconds", type=float, default=480.0, help="in all, at most")
    parser.add_argument("--soak-seconds", type=float, help="of `soak`; default: 60, or 2 in a dry run")
    parser.add_argument("--only", action="append", choices=STAGES, help="default: all stages")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, in Triton's interpreter")
    parser.add_argument("--stage", choices=("identity", *STAGES), help=argparse.SUPPRESS)
    parser.add_argument("--part", default="0/1", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="for the weights that are made; default: a temporary one")
    arguments = parser.parse_args()
    if arguments.dry_run and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("a dry run needs TRITON_INTERPRET=1")
    soak_s = arguments.soak_seconds or (2.0 if arguments.dry_run else SOAK_S)
    with tempfile.TemporaryDirectory() as temporary, interpreted() if arguments.dry_run else nullcontext():
        folder = arguments.folder or Path(temporary)
        if arguments.stage:
            skip = () if sys.stdin is None or sys.stdin.isatty() else json.loads(sys.stdin.read() or "[]")
            index, count = map(int, arguments.part.split("/"))
            measured(
                arguments.stage, folder, is_dry=arguments.dry_run, soak_s=soak_s, skip=skip, part=(index, count),
                report=print_entry,
            )  # fmt: skip
            return 0
        stages = tuple(arguments.only or STAGES)
        report = check(
            arguments.state, folder, arguments.seconds, is_dry=arguments.dry_run, stages=stages, soak_s=soak_s
        )
    print(json.dumps(report, indent=1))
    if report["failures"] or report["errors"]:
        return 1
    return 2 if report["not_run"] else 0


if __name__ == "__main__":
    sys.exit(main())
