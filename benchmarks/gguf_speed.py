"""Compare speed with llama.cpp on the same GGUF files: both loaded at the same time, in turns, medians.

    python benchmarks/gguf_speed.py PYTHON ./SmolLM2-135M-Instruct.Q4_1.gguf ./qwen2-0.5b.gguf
    python benchmarks/gguf_speed.py PYTHON ./SmolLM2-135M-Instruct.Q4_1.gguf --ftype Q4_0 --turns 1 --figure 64
    python benchmarks/gguf_speed.py PYTHON ./experts.gguf --ftype as-is      # of tools/make_expert_gguf.py

PYTHON is the interpreter of an environment with llama-cpp-python, built for this machine (pip install --no-binary
:all:). llama.cpp converts each model to each format once (Q4_0, Q8_0 and Q4_K_M via float32, into --home). Figures:

    stream   tokens/s of one stream of 64 tokens after a prompt of 32; octavo with and without speculation
    prompt   tokens/s of a prompt of 1,024 tokens
    64       generated tokens/s of 64 concurrent requests, 16 tokens each after a prompt of 8

The requests are excerpts of Python's language reference. llama.cpp computes batches by its C API, without a server,
which is its fastest way (`runners/llama_cpp_batches.py`). A ratio is the median of the ratios of all turns. For a model
with random weights, figures with speculation have no meaning; such a model of a real shape can be converted from
tools/make_checkpoint.py's folder with llama.cpp's convert_hf_to_gguf.py.
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
AS_IS = "as-is"
LONG_PROMPT, REQUESTS, PROMPT_OF_MANY, OUT_OF_MANY = 1024, 64, 8, 16


class Figure(NamedTuple):
    """One measured figure: the letter of its workload, its name in the table, and the target of the ratio."""

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
    """llama.cpp in an existing environment."""

    name = "llama.cpp"
    precisions: ClassVar = {}
    runner = "llama_cpp_batches.py"
    distributions = ("llama_cpp_python",)

    @property
    def python(self) -> str:
        """Return the interpreter of its environment, which is `home` in this class."""
        return str(self.home)

    def install(self) -> None:
        """Do nothing: it is installed already."""

    def checkpoint(self, source: Path, precision: str) -> Path:
        """Return the GGUF file."""
        del precision
        return source


def written(options: argparse.Namespace, gguf: Path, ftype: str) -> Path:
    """Have llama.cpp convert a file to a format, unless that exists: see `runners/llama_cpp_quality.py`."""
    if ftype == AS_IS:
        return gguf
    options.home.mkdir(parents=True, exist_ok=True)
    job = {"gguf": str(gguf), "ftype": ftype, "home": str(options.home), "threads": 2, "pieces": [], "prompt": []}
    script = str(RUNNERS / "llama_cpp_quality.py")
    done = subprocess.run(
        [options.python, script], input=json.dumps(job) + "\n", stdout=subprocess.PIPE, text=True, check=True
    )
    return Path(json.loads(done.stdout.splitlines()[-1])["path"])


def requests_of(gguf: Path, turns: int, folder: Path) -> Path:
    """Write workloads A, B and C, and D for the warm-up, from a text in the model's tokens, different in each turn."""
    ids = iter(open_checkpoint(gguf).read_tokenizer().encode(python_reference(), most=4096 * turns + 8192))

    def request(prompt: int, out: int) -> dict[str, object]:
        return {"prompt": [next(ids) for _ in range(prompt)], "out": out}

    workloads = {
        "A": [request(32, 64) for _ in range(turns)],
        "B": [request(PROMPT_OF_MANY, OUT_OF_MANY) for _ in range(REQUESTS)],
        "C": [request(LONG_PROMPT, 1) for _ in range(turns)],
        "D": [[request(PROMPT_OF_MANY, 4) for _ in range(REQUESTS)]],
    }
    path = folder / f"{gguf.stem}.json"
    path.write_text(json.dumps(workloads))
    return path


def measured(options: argparse.Namespace, gguf: Path, folder: Path) -> Iterator[list[str]]:
    """Yield a table row for each figure and octavo variant: medians for octavo, for llama.cpp and of the ratio."""
    plain = PlainOctavo(folder)
    octavo = [Octavo(folder), plain]
    engines: list[Engine] = [*octavo, LlamaCpp(Path(options.python))]
    setting = Setting(
        workloads=requests_of(gguf, options.turns, folder), threads=options.threads, kv_bytes=256 << 20, timeout_s=600
    )
    with seated(Contest(precision="bf16", letter="A"), engines, gguf, setting) as seats:
        for key in options.figure or FIGURES:
            figure = FIGURES[key]
            taking_part = {name: seat for name, seat in seats.items() if figure.letter == "A" or name != plain.name}
            contest = Contest(precision="bf16", letter=figure.letter)
            turns = [turn.figures for turn in take_turns(contest, taking_part, range(options.turns), dict)]
            for name in (each.name for each in octavo if each.name in taking_part):
                pairs = [(rate(figure, turn[name]), rate(figure, turn["llama.cpp"])) for turn in turns]
                ratio = statistics.median(own / theirs for own, theirs in pairs)
                medians = [f"{statistics.median(each):.0f}" for each in zip(*pairs, strict=True)]
                yield [gguf.name, figure.name, name, *medians, f"{ratio:.2f}", f">= {figure.goal}"]


def rate(figure: Figure, measured: float) -> float:
    """Return tokens/s of a figure. With many requests it is measured in seconds."""
    return REQUESTS * OUT_OF_MANY / measured if figure.letter == "B" else measured


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="of an environment with llama-cpp-python")
    parser.add_argument("model", nargs="+", type=Path, help="GGUF files, in any format that loses little")
    parser.add_argument(
        "--ftype", action="append", choices=(*FTYPES, AS_IS), help="again for more (default: all formats)"
    )
    parser.add_argument("--figure", action="append", choices=FIGURES, help="again for more (default: all)")
    parser.add_argument("--turns", type=int, default=5, help="medians of so many (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each (%(default)s)")
    parser.add_argument("--home", type=Path, default=Path("/tmp/octavo-gguf"), help="for files (%(default)s)")
    options = parser.parse_args()
    files = [written(options, model, ftype) for model in options.model for ftype in options.ftype or FTYPES]
    print("| file | figure | engine | octavo | llama.cpp | ratio | asked for |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            for cells in measured(options, file, Path(folder)):
                print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
