"""Speed beside llama.cpp on the same GGUF files: both loaded side by side, in turns, medians.

    python benchmarks/gguf_speed.py PYTHON ./SmolLM2-135M-Instruct.Q4_1.gguf ./qwen2-0.5b.gguf
    python benchmarks/gguf_speed.py PYTHON ./SmolLM2-135M-Instruct.Q4_1.gguf --ftype Q4_0 --turns 1 --figure 64

PYTHON is that of an environment with llama-cpp-python, built for this machine (pip install --no-binary :all:). Each
model is written by llama.cpp in each format (Q4_0, Q8_0 and Q4_K_M by way of float32, into --home, once). Figures:

    stream   tokens/s of one stream of 64 behind a prompt of 32; octavo with and without speculation
    prompt   tokens/s of a prompt of 1,024
    64       generated tokens/s of 64 requests at once, 16 tokens each behind a prompt of 16

Requests are cut out of Python's language reference. llama.cpp computes batches of its own C API, without a server: its
best way (`runners/llama_cpp_batches.py`). A ratio is the median of the turns' own. With random weights speculation says
nothing: a model of the shape alone is made of tools/make_checkpoint.py's folder with llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from comparison.engines import RUNNERS, Engine, Octavo
from comparison.measuring import Setting
from comparison.turns import Contest, seated, take_turns

from octavo.cli.perplexity import python_reference
from octavo.startup.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

FTYPES = ("Q4_0", "Q8_0", "Q4_K_M")
LONG_PROMPT, REQUESTS, OUT_OF_MANY = 1024, 64, 16


class Figure(NamedTuple):
    """What is measured: the letter of the workload, as a table names it, and what the ratio should reach."""

    letter: str
    name: str
    goal: float


FIGURES = {
    "stream": Figure("A", "one stream, tok/s", 1.0),
    "prompt": Figure("C", "prompt of 1,024, tok/s", 1.5),
    "64": Figure("B", "64 at once, tok/s", 3.0),
}


class PlainOctavo(Octavo):
    """octavo without speculation."""

    name: ClassVar = "octavo, no speculation"
    speculation: ClassVar = "none"


class LlamaCpp(Engine):
    """llama.cpp in an environment that is there."""

    name = "llama.cpp"
    precisions: ClassVar = {}
    runner = "llama_cpp_batches.py"
    distributions = ("llama_cpp_python",)

    @property
    def python(self) -> str:
        """Return the interpreter of its environment, which `home` is here."""
        return str(self.home)

    def install(self) -> None:
        """Nothing: it is installed."""

    def checkpoint(self, source: Path, precision: str) -> Path:
        """Return the GGUF file."""
        del precision
        return source


def written(options: argparse.Namespace, gguf: Path, ftype: str) -> Path:
    """Have llama.cpp write a file in a format, unless it is there: see `runners/llama_cpp_quality.py`."""
    options.home.mkdir(parents=True, exist_ok=True)
    job = {"gguf": str(gguf), "ftype": ftype, "home": str(options.home), "threads": 2, "pieces": [], "prompt": []}
    script = str(RUNNERS / "llama_cpp_quality.py")
    done = subprocess.run(
        [options.python, script], input=json.dumps(job) + "\n", stdout=subprocess.PIPE, text=True, check=True
    )
    return Path(json.loads(done.stdout.splitlines()[-1])["path"])


def requests_of(gguf: Path, turns: int, folder: Path) -> Path:
    """Write workloads A, B and C, and D to warm up, of a text in the model's tokens: other ones in each turn."""
    ids = iter(open_checkpoint(gguf).read_tokenizer().encode(python_reference(), most=4096 * turns + 8192))

    def request(prompt: int, out: int) -> dict[str, object]:
        return {"prompt": [next(ids) for _ in range(prompt)], "out": out}

    workloads = {
        "A": [request(32, 64) for _ in range(turns)],
        "B": [request(16, OUT_OF_MANY) for _ in range(REQUESTS)],
        "C": [request(LONG_PROMPT, 1) for _ in range(turns)],
        "D": [[request(16, 4) for _ in range(REQUESTS)]],
    }
    path = folder / f"{gguf.stem}.json"
    path.write_text(json.dumps(workloads))
    return path


def measured(
    options: argparse.Namespace, gguf: Path, figure: Figure, folder: Path
) -> Iterator[tuple[str, str, str, float]]:
    """Yield what each way of octavo gave: its name, and the medians of its figure, of llama.cpp's and of the ratio."""
    octavo = [Octavo(folder), *([PlainOctavo(folder)] if figure.letter == "A" else [])]
    engines: list[Engine] = [*octavo, LlamaCpp(Path(options.python))]
    setting = Setting(
        workloads=requests_of(gguf, options.turns, folder), threads=options.threads, kv_bytes=256 << 20, timeout_s=600
    )
    contest = Contest(precision="bf16", letter=figure.letter)
    with seated(contest, engines, gguf, setting) as seats:
        turns = [turn.figures for turn in take_turns(contest, seats, range(options.turns), dict)]
    if figure.letter == "B":  # seconds until now
        rate = REQUESTS * OUT_OF_MANY
        turns = [{name: rate / seconds for name, seconds in turn.items()} for turn in turns]
    for engine in octavo:
        pairs = [(turn[engine.name], turn["llama.cpp"]) for turn in turns]
        ratio = statistics.median(own / theirs for own, theirs in pairs)
        own, theirs = (statistics.median(each) for each in zip(*pairs, strict=True))
        yield engine.name, f"{own:.0f}", f"{theirs:.0f}", ratio


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="of an environment with llama-cpp-python")
    parser.add_argument("model", nargs="+", type=Path, help="GGUF files, in any format that loses little")
    parser.add_argument("--ftype", action="append", choices=FTYPES, help="again for more (default: all)")
    parser.add_argument("--figure", action="append", choices=FIGURES, help="again for more (default: all)")
    parser.add_argument("--turns", type=int, default=5, help="medians of so many (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each (%(default)s)")
    parser.add_argument("--home", type=Path, default=Path("/tmp/octavo-gguf"), help="for files (%(default)s)")
    options = parser.parse_args()
    files = [written(options, model, ftype) for model in options.model for ftype in options.ftype or FTYPES]
    print("| file | figure | engine | octavo | llama.cpp | ratio | asked for |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            for key in options.figure or FIGURES:
                figure = FIGURES[key]
                for name, own, theirs, ratio in measured(options, file, figure, Path(folder)):
                    cells = [file.name, figure.name, name, own, theirs, f"{ratio:.2f}", f">= {figure.goal}"]
                    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
