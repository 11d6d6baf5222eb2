"""Compare two builds of octavo's kernels in turns: products and attention at the shapes of Qwen2-0.5B.

    python benchmarks/ab.py old/_kernels.so new/_kernels.so --only attention
    python benchmarks/ab.py ../before/env/bin/python ../after/env/bin/python --only "int8 down"

A build is a compiled module, used with this checkout's Python code, or the interpreter of an environment, used with
that environment's code. Each build runs in a process of its own, which waits while the other one is measured. The cases
are those of kernels.py (products, gated products, attention). In each round both builds run every case once, in
alternating order. Prints medians, and the ratio A / B of the rounds: above 1, B is faster.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Build:
    """A process that runs one build: it reads the number of a case and writes the seconds of one call."""

    def __init__(self, build: str, only: str, threads: int) -> None:
        is_module = build.endswith(".so")
        command = [sys.executable if is_module else build, __file__, "--only", only, "--threads", str(threads)]
        command += ["--serve", build if is_module else ""]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.module: str = json.loads(self._line())  # the file of octavo's kernels in that process
        self.names: list[str] = json.loads(self._line())

    def time(self, case: int) -> float:
        """Run a case once; return its seconds."""
        assert self._process.stdin is not None
        print(case, file=self._process.stdin, flush=True)
        return float(self._line())

    def end(self) -> None:
        """End the process by closing its input."""
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.end()
            raise RuntimeError(f"{self._process.args} ended with {self._process.returncode}")
        return line


def serve(module: str, only: str, threads: int) -> None:
    """Run a build's process: print the names of the cases, then time requested ones. module: "" for octavo's own."""
    if module:
        load_module(module)
    from kernels import attention_cases, block_cases, gated_cases, linear_cases  # noqa: PLC0415 - of the module that is loaded now

    from octavo import _kernels  # noqa: PLC0415
    from octavo.kernels.cpu import CpuKernels  # noqa: PLC0415

    print(json.dumps(_kernels.__file__), flush=True)
    kernels = CpuKernels(num_threads=threads)
    cases = [case for group in (linear_cases, block_cases, gated_cases) for case in group(kernels, only)]
    cases += [case for case in attention_cases(kernels) if only in case.name]
    print(json.dumps([case.name for case in cases]), flush=True)
    for line in sys.stdin:
        case = cases[int(line)]
        case.run()
        print(case.times[-1], flush=True)


def load_module(path: str) -> None:
    """Replace octavo's compiled module by another one."""
    spec = importlib.util.spec_from_file_location("octavo._kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["octavo._kernels"] = module


def compare(first: Build, second: Build, rounds: int) -> Iterator[tuple[str, list[float], list[float]]]:
    """Yield (case, seconds of the first build by round, of the second build), after an uncounted warm-up round."""
    if first.names != second.names:
        raise RuntimeError(f"the builds have other cases: {set(first.names) ^ set(second.names)}")
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in first.names]
    for number in range(rounds + 1):
        for case in range(len(first.names)):
            sides = [(first, times[case][0]), (second, times[case][1])]
            for build, found in sides if number % 2 == 0 else sides[::-1]:
                found.append(build.time(case))
    for name, (ours, theirs) in zip(first.names, times, strict=True):
        yield name, ours[1:], theirs[1:]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs="*", metavar="BUILD", help="two: A and B, each a _kernels*.so or a python")
    parser.add_argument("--only", default="", help="part of the names of the cases to run (default: all)")
    parser.add_argument("--rounds", type=int, default=9, help="of every case (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of each build (default: %(default)s)")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve, options.only, options.threads)
        return
    if len(options.builds) != 2:
        parser.error("name two builds")
    builds = [Build(path, options.only, options.threads) for path in options.builds]
    print(f"A: {builds[0].module}\nB: {builds[1].module}\n")
    print("| case | A, us | B, us | A / B | of the rounds |\n|---|---|---|---|---|")
    for name, *sides in compare(builds[0], builds[1], options.rounds):
        ratios = [a / b for a, b in zip(*sides, strict=True)]
        medians = " | ".join(f"{statistics.median(side) * 1e6:.1f}" for side in sides)
        print(f"| {name} | {medians} | {statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} |")
    for build in builds:
        build.end()


if __name__ == "__main__":
    main()
