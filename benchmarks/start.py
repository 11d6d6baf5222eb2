"""Time from the start of a process to its first token, or to a ready server: without and with cached packed weights.

    python benchmarks/start.py                                   # qwen2-0.5b, three precisions, three ways
    python benchmarks/start.py --model ./my-checkpoint --repeat 3 --way serve --precision int8
    python benchmarks/start.py --model ./model.gguf

Ways: `LLM(...)` and its first token; `octavo generate CHECKPOINT` to the first byte of its answer; `octavo serve` until
GET /ready answers 200. In the first column no packed weights are on disk (see octavo.models.packed_cache): the cache is
a separate folder that is removed before each such start. bf16 has no packed weights on disk, so both of its columns are
equal. The checkpoint's files are in the page cache: each case runs once before it is counted. Peak memory is VmHWM of
`LLM`'s process with cached weights.

A GGUF file is served directly. A second table compares the time to load its weights with plain reading of the file, in
turns in one process, with and without the page cache. Reading means into a buffer of 16 MiB, or into memory for the
whole file. Loading means to open the file, read its metadata, and pack the weights or read packed ones. CPU seconds do
not include the time of other processes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from serving import free_port, running
from workloads import prepare

PRECISIONS = ("bf16", "int8", "int4")
AS_IT_IS = "as it is"
PROGRAM = """
import sys
from octavo import LLM, SamplingParams
model, dtype, quantization = sys.argv[1:]
llm = LLM(model, dtype=dtype, quantization=quantization or None, skip_tokenizer_init=True)
llm.generate([[1] * 32], SamplingParams(max_tokens=1), use_tqdm=False)
print(int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024)
"""
LOAD_PROGRAM = """
import json, os, sys, time
from pathlib import Path
import torch
from octavo.kernels.cpu import CpuKernels
from octavo.models.loader import load_model
from octavo.models.packed_cache import PackedCache
from octavo.startup.checkpoint import open_checkpoint

def read():
    buffer = bytearray(16 << 20)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass

def read_whole():
    with open(path, "rb", buffering=0) as file:
        file.read()

def describe():
    checkpoint = open_checkpoint(path)
    return checkpoint.weights, checkpoint.read_architecture()

def load(weights, architecture, packed_cache=None):
    dtype = architecture.dtype
    load_model(weights, architecture, kernels, dtype=dtype, device=torch.device("cpu"), max_model_len=512,
               packed_cache=packed_cache)

def forget_pages():
    for file in (path, *cache.directory.glob("*.packed.safetensors")):
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

path, repeat, cache = sys.argv[1], int(sys.argv[2]), PackedCache(1 << 40, Path(sys.argv[3]))
kernels, described = CpuKernels(), describe()
load(*described, cache)
works = {
    "read": read, "read_whole": read_whole, "described": describe, "packed": lambda: load(*described),
    "kept": lambda: load(*described, cache),
}
for is_cached in (True, False):
    for _ in range(repeat + 1):
        for name, work in works.items():
            if not is_cached:
                forget_pages()
            begin, begin_cpu = time.perf_counter(), time.process_time()
            work()
            print(json.dumps([is_cached, name, time.perf_counter() - begin, time.process_time() - begin_cpu]))
"""


NAMES = {
    "read": "file read",
    "read_whole": "file read into memory",
    "described": "metadata read",
    "packed": "weights packed",
    "kept": "weights read as they were kept",
}


def compare_with_reading(model: str, repeat: int) -> None:
    """Print the times of the parts of loading a GGUF file, and of reading it; the first turn is a warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-c", LOAD_PROGRAM, model, str(repeat), folder]
        printed = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True).stdout
    turns = [json.loads(line) for line in printed.splitlines()]
    print("\n| files' pages | | s | of CPU time | of reading |\n|---|---|---|---|---|")
    for is_cached, where in ((True, "in memory"), (False, "on disk")):
        taken = {
            name: [seconds for cached, of, *seconds in turns if (cached, of) == (is_cached, name)][1:] for name in NAMES
        }
        for name, each in taken.items():
            wall, cpu = (statistics.median(seconds) for seconds in zip(*each, strict=True))
            ratio = statistics.median(one[0] / read[0] for one, read in zip(each, taken["read"], strict=True))
            print(f"| {where} | {NAMES[name]} | {wall:.2f} | {cpu:.2f} | {ratio:.2f} |")


def first_output(command: list[str], environment: dict[str, str]) -> tuple[float, bytes]:
    """Run a process; return the seconds to the first byte that it writes, and its whole output."""
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - begin
        rest = process.stdout.read()
    if process.returncode or not first:
        raise RuntimeError(f"{command} ended with {process.returncode} and wrote {first + rest!r}")
    return seconds, first + rest


def start(way: str, model: str, precision: str, environment: dict[str, str]) -> tuple[float, int | None]:
    """Run one process; return its seconds, and for `LLM` its peak memory in bytes."""
    quantization = precision if precision in ("int8", "int4") else ""
    dtype = "auto" if precision == AS_IT_IS else "bfloat16"
    options = ["--dtype", dtype, *(["--quantization", quantization] if quantization else [])]
    octavo = [sys.executable, "-m", "octavo"]
    if way == "LLM":
        seconds, written = first_output([sys.executable, "-c", PROGRAM, model, dtype, quantization], environment)
        return seconds, int(written)
    if way == "generate":
        asked = ["--raw", "--prompt", "What is 12 + 30?", "--max-tokens", "1", "--temperature", "0"]
        return first_output([*octavo, "generate", model, *options, *asked], environment)[0], None
    port = free_port()
    command = [*octavo, "serve", model, "--port", str(port), *options]
    with running(command, environment, f"http://127.0.0.1:{port}/ready") as (_, seconds):
        return seconds, None


WAYS = {"LLM": "`LLM`, first token", "generate": "`octavo generate`, first token", "serve": "`octavo serve`, ready"}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint (default: qwen2-0.5b, made if missing)")
    parser.add_argument("--repeat", type=int, default=5, help="medians of so many runs (default: %(default)s)")
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="again for more (default: all)")
    parser.add_argument("--way", action="append", choices=list(WAYS), help="again for more (default: all)")
    arguments = parser.parse_args()
    model = arguments.model or str(prepare("qwen2-0.5b")[0])
    is_gguf = model.endswith(".gguf")
    precisions = arguments.precision or ([AS_IT_IS] if is_gguf else PRECISIONS)
    print("| | weights | first time, s | kept, s | peak memory, MB |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
        for way in arguments.way or WAYS:
            for precision in precisions:
                cells = [WAYS[way], precision]
                for is_kept in (False, True):
                    runs = []
                    for _ in range(arguments.repeat + 1):
                        if not is_kept:
                            shutil.rmtree(cache, ignore_errors=True)
                        runs.append(start(way, model, precision, environment))
                    seconds = [each for each, _ in runs[1:]]
                    spread = f" ({min(seconds):.1f} to {max(seconds):.1f})" if len(seconds) > 1 else ""
                    cells.append(f"{statistics.median(seconds):.1f}{spread}")
                peaks = [peak for _, peak in runs[1:] if peak is not None]
                cells.append(f"{statistics.median(peaks) / 1e6:.0f}" if peaks else "")
                print("| " + " | ".join(cells) + " |", flush=True)
    if is_gguf:
        compare_with_reading(model, arguments.repeat)


if __name__ == "__main__":
    main()
