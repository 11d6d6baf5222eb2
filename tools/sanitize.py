"""Build csrc with a sanitizer of the compiler, run the thread pool and all kernels on odd shapes, and fail on a report.

    python tools/sanitize.py                                   # address, undefined and thread, every instruction set
    python tools/sanitize.py --kind thread --isa pool          # the thread pool alone: seconds
    python tools/sanitize.py --kind address --isa best --limit-s 120
    python tools/sanitize.py --isa turn --turn 5               # one instruction set: another for each number

Kinds: `address` finds reads and writes past the end of memory, and memory that is used after it was freed; `undefined`
finds undefined behaviour; `thread` finds data races; `memory` runs a plain build three times over memory that malloc
has filled with different bytes, and finds results that depend on uninitialized memory. What is run is
tests/csrc/sanitize.cpp, with --rounds rounds of different shapes. Every result must have the same bits on one thread
and on three.

Instruction sets: `all` that this processor has, `best`, `pool` for none of them, one by its name, or `turn`. Objects
are kept in build/sanitize by the hash of all sources, so that a second run compiles nothing; a kind takes 20 to 50 s of
one core to compile an instruction set, and some seconds to run. Exit status: 0 without a report, 1 with one, 2 if
something cannot be built within --limit-s.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES, HARNESS = ROOT / "csrc", ROOT / "tests" / "csrc" / "sanitize.cpp"
BUILD = ROOT / "build" / "sanitize"
KINDS = {
    "address": ["-fsanitize=address"],
    "undefined": ["-fsanitize=undefined", "-fno-sanitize-recover=undefined"],
    "thread": ["-fsanitize=thread"],
    "memory": [],
}
# As in CMakeLists.txt, but for the optimization: -O1 compiles in a third of the time.
COMMON = ["-std=c++17", "-g1", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-psabi", "-iquote", str(SOURCES)]
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq")), "-mprefer-vector-width=512"]
_AVX512 += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]  # GCC warns of its own intrinsics (bug 105593)
_BF16 = [*_AVX512, "-mavx512vnni", "-mavx512bf16"]
ISAS = {  # best first: the flags in /proc/cpuinfo that it needs, options of the compiler
    "amx": (("amx_tile", "amx_bf16", "amx_int8", "avx512_bf16"), _BF16),
    "avx512_bf16": (("avx512_bf16",), _BF16),
    "avx512_vnni": (("avx512_vnni",), [*_AVX512, "-mavx512vnni"]),
    "avx512": (("avx512f", "avx512bw", "avx512vl", "avx512dq"), _AVX512),
    "avx2": (("avx2", "fma", "f16c"), _AVX2),
    "portable": ((), []),
}
_TABLES = {
    "amx": "kAmxKernels",
    "avx512_bf16": "kAvx512Bf16Kernels",
    "avx512_vnni": "kAvx512VnniKernels",
    "avx512": "kAvx512Kernels",
    "avx2": "kAvx2Kernels",
    "portable": "kPortableKernels",
}
FILLS = ("1", "85", "254")  # of MALLOC_PERTURB_
_SECONDS_OF_A_DAY, _DAYS_OF_A_ROTATION = 86400, 8  # see `turn` in the Makefile
POOL = "none"  # what the harness calls no instruction set


class BuildError(Exception):
    """A file cannot be compiled or linked, or not in time."""


class Builder:
    """Compiles with one kind of sanitizer, each file once for each content of all sources.

    deadline: of `time.monotonic`.
    """

    def __init__(self, kind: str, compiler: str, deadline: float) -> None:
        self._options = [*KINDS[kind], *COMMON]
        self._compiler, self._deadline = compiler, deadline
        files = sorted([*SOURCES.iterdir(), HARNESS])
        version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
        content = version + b"".join(path.name.encode() + path.read_bytes() for path in files)
        self._folder = BUILD / f"{kind}-{hashlib.sha256(content).hexdigest()[:16]}"
        for old in BUILD.glob(f"{kind}-*"):
            if old != self._folder:
                shutil.rmtree(old, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)

    def program(self, isa: str) -> Path:
        """Return a program that runs the kernels of one instruction set, or the pool alone. Raises `BuildError`."""
        target = self._folder / f"sanitize-{isa}"
        if target.exists():
            return target
        objects = [self._object(SOURCES / "thread_pool.cpp", []), self._object(HARNESS, _defined(isa))]
        if isa != POOL:
            objects.append(self._object(SOURCES / f"kernels_{isa}.cpp", ISAS[isa][1]))
        objects.append(self._object(self._other_tables(isa), []))
        self._call([*self._options, *map(str, objects), "-lpthread"], target)
        return target

    def _other_tables(self, isa: str) -> Path:
        """Write a file that defines empty tables of the other instruction sets, which the harness names."""
        path = self._folder / f"tables_{isa}.cpp"
        names = [name for each, name in _TABLES.items() if each != isa]
        lines = [f"extern const KernelTable {name};\nconst KernelTable {name}{{}};" for name in names]
        path.write_text('#include "kernels.h"\nnamespace octavo {\n' + "\n".join(lines) + "\n}\n")
        return path

    def _object(self, source: Path, options: list[str]) -> Path:
        suffix = "-amx" if "-DOCTAVO_HAS_AMX" in options else ""
        target = self._folder / f"{source.stem}{suffix}.o"
        if not target.exists():
            self._call([*self._options, *options, "-c", str(source)], target)
        return target

    def _call(self, arguments: list[str], target: Path) -> None:
        """Compile or link into another file, then rename it: one that was interrupted is not taken for whole."""
        unfinished = target.with_suffix(".tmp.o")
        left_s = self._deadline - time.monotonic()
        try:
            subprocess.run([self._compiler, *arguments, "-o", str(unfinished)], check=True, timeout=max(left_s, 0.0))
        except (subprocess.SubprocessError, OSError) as error:
            raise BuildError(f"{target.name}: {error}") from None
        unfinished.replace(target)


def main() -> int:
    """Build and run; return the exit status."""
    asked = _arguments()
    deadline = time.monotonic() + asked.limit_s
    status = 0
    for kind in asked.kind or ("address", "undefined", "thread"):
        try:
            builder = Builder(kind, asked.compiler, deadline)
            programs = {isa: builder.program(isa) for isa in _chosen(asked.isa, asked.turn)}
        except BuildError as error:
            print(f"{kind}: not built: {error}", flush=True)
            status = status or 2
            continue
        for isa, program in programs.items():
            if not _run(kind, isa, program, asked.rounds, deadline):
                status = 1
    return status


def _run(kind: str, isa: str, program: Path, rounds: int, deadline: float) -> bool:
    """Run a program; return whether it had no report and, of `memory`, one result whatever memory held."""
    printed = set()
    for fill in FILLS if kind == "memory" else ("0",):
        environment = dict(
            os.environ, MALLOC_PERTURB_=fill, ASAN_OPTIONS="detect_leaks=1", TSAN_OPTIONS="halt_on_error=0"
        )
        try:
            ended = subprocess.run(
                [str(program), isa, str(rounds)],
                env=environment,
                capture_output=True,
                text=True,
                timeout=max(deadline - time.monotonic(), 1.0),
                check=False,
            )
        except subprocess.TimeoutExpired:
            print(f"{kind} {isa}: did not end in time", flush=True)
            return False
        printed.add(ended.stdout.strip())
        if ended.returncode != 0:
            print(f"{kind} {isa}: exit status {ended.returncode}\n{ended.stderr}", flush=True)
            return False
    is_same = len(printed) == 1
    print(f"{kind} {isa}: {'no report' if is_same else 'results depend on uninitialized memory'}", flush=True)
    return is_same


def _chosen(asked: str, turn: int) -> list[str]:
    flags: set[str] = set()
    if platform.machine() in {"x86_64", "AMD64"}:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    there = [isa for isa, (needed, _) in ISAS.items() if flags.issuperset(needed)]
    if asked in there:
        return [asked]
    match asked:
        case "all":
            return there
        case "best":
            return there[:1]
        case "pool":
            return [POOL]
        case "turn":
            return [there[turn % len(there)]]
    sys.exit(f"instruction set {asked!r}: this processor has {', '.join(there)}; or choose all, best, pool or turn")


def default_turn() -> int:
    """Return a number that grows by one every eight days: CI runs one of eight checks a day, this is one of them."""
    return int(time.time() // _SECONDS_OF_A_DAY // _DAYS_OF_A_ROTATION)


def _defined(isa: str) -> list[str]:
    return ["-DOCTAVO_HAS_AMX"] if isa == "amx" else []


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", choices=KINDS, help="may be given several times")
    parser.add_argument("--isa", default="all", help="all, best, pool, turn or a name")
    parser.add_argument(
        "--turn", type=int, default=default_turn(), help="which one `turn` takes; default: another every 8 days"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=3600.0)
    parser.add_argument("--compiler", default="g++")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
