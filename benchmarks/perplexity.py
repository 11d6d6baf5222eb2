"""Quality, memory and speed of each precision, for a checkpoint with trained weights.

    python benchmarks/perplexity.py ./SmolLM2-135M-Instruct
    python benchmarks/perplexity.py OWNER/NAME --precision bf16 --precision int8 --text ./novel.txt --rounds 3
    python benchmarks/perplexity.py ./SmolLM2-135M-Instruct --llama-cpp PYTHON --gguf ./SmolLM2-135M-Instruct.gguf
    python benchmarks/perplexity.py ./SmolLM2-135M-Instruct.gguf --llama-cpp PYTHON --as-it-is --ftype Q4_0 --skip-speed

Measures perplexity over 40 separate pieces of 512 tokens of Python's language reference or of a text; the bytes of the
weights in memory; and the speeds of a prompt of 1,024 tokens and of one stream of 64, with all precisions in turns,
medians. Prints a table for docs/benchmarks.md. --llama-cpp: the interpreter of an environment with llama-cpp-python. It
measures the formats of the GGUF file after octavo's precisions, with the same token ids and number of threads. Then
octavo serves each of these files directly, and that row is compared with llama.cpp's. If the checkpoint is itself a
GGUF file, llama.cpp reads the same file, and octavo's precisions have to be named.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.cli.perplexity import MAX_PIECES, mean_losses, opened, perplexity, python_reference, text_pieces
from octavo.models.model_path import resolve_model_path
from octavo.sampling_params import SamplingParams
from octavo.startup.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.models.layers import CausalLM

PRECISIONS = {"bf16": None, "int8": "int8", "int4": "int4", "int4_all": "int4_all"}
LLAMA_CPP = ("BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_1", "Q5_0", "Q4_K_M", "Q4_1", "Q4_0")
OTHERS = ("F32", "F16", "Q5_K_S", "Q4_K_S", "MXFP4")  # only if named
PROMPT_TOKENS, STREAM_TOKENS = 1024, 64


def weight_bytes(model: CausalLM) -> int:
    """Return the bytes of all packed weights; shared memory counts once."""
    linears = {id(linear.storage): linear.num_bytes for linear in model.linears}
    return sum(linears.values())


def speeds(llm: LLM, ids: list[int]) -> tuple[float, float]:
    """Return tokens per second of a prompt and of one stream; the tokens are ignored."""

    def seconds(prompt: list[int], count: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return time.perf_counter() - begin

    first = seconds(ids[:32], 1)
    stream = (STREAM_TOKENS - 1) / (seconds(ids[:32], STREAM_TOKENS) - first)
    return PROMPT_TOKENS / seconds(ids[:PROMPT_TOKENS], 1), stream


class Scored(NamedTuple):
    """A row of the table. against: the name of the row with which its perplexity is compared."""

    num_bytes: int
    types: str
    perplexity: float
    against: str
    rates: list[tuple[float, float]]


class Measured:
    """The measurements of each model, by the name of its row."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.text = python_reference() if options.text is None else options.text.read_text(encoding="utf-8")
        self.rows: dict[str, Scored] = {}
        with opened(options.path, quantization=None) as llm:
            self.pieces = text_pieces(llm, self.text, max_pieces=options.pieces)
            self.ids = llm.get_tokenizer().encode(self.text)

    def octavo(self, name: str, path: Path, against: str, **engine: Any) -> None:
        """Measure octavo; if the row exists, only its speeds."""
        with opened(path, **engine) as llm:
            if name not in self.rows:
                num_bytes = weight_bytes(llm.llm_engine.core.executor.worker.model)
                types = ", ".join(open_checkpoint(path).weights.types)
                self.rows[name] = Scored(num_bytes, types, perplexity(mean_losses(llm, self.pieces)), against, [])
            self.add(name, None if self.options.skip_speed else speeds(llm, self.ids))

    def llama_cpp(self, name: str, ftype: str | None) -> Path:
        """Measure llama.cpp with a format of the GGUF file, or with the original file; return the file that it read."""
        answer = ask_llama_cpp(self.options, ftype, [] if name in self.rows else self.pieces, self.ids)
        if name not in self.rows:
            self.rows[name] = Scored(answer["bytes"], "", perplexity(answer["losses"]), name, [])
        self.add(name, tuple(answer["rates"]) or None)
        return Path(answer["path"])

    def add(self, name: str, rates: tuple[float, float] | None) -> None:
        """Add speeds to a row, if there are any, and print the row so far, because the whole run takes minutes."""
        row = self.rows[name]
        told = f"{name}: {row.perplexity:.3f} ({row.perplexity / self.rows[row.against].perplexity - 1:+.2%})"
        if rates is not None:
            row.rates.append(rates)
            told += f", {rates[0]:.0f} and {rates[1]:.0f} tok/s"
        print(told, file=sys.stderr, flush=True)

    def table(self) -> str:
        """Return all rows in Markdown."""
        heads = [
            "precision",
            "weights, MB",
            "types of its matrices",
            "perplexity",
            "",
            "prompt, tok/s",
            "one stream, tok/s",
        ]
        lines = [heads, ["---"] * len(heads)]
        for name, row in self.rows.items():
            against = row.perplexity / self.rows[row.against].perplexity - 1
            rates = [f"{statistics.median(rate):.0f}" for rate in zip(*row.rates, strict=True)]
            lines.append(
                [name, f"{row.num_bytes / 1e6:.0f}", row.types, f"{row.perplexity:.3f}", f"{against:+.2%}", *rates]
            )
        width = len(heads) - (2 if self.options.skip_speed else 0)
        return "\n".join("| " + " | ".join(cells[:width]) + " |" for cells in lines)


def ask_llama_cpp(
    options: argparse.Namespace, ftype: str | None, pieces: list[list[int]], ids: list[int]
) -> dict[str, Any]:
    """Have llama.cpp measure the same in a process of its own: see `runners/llama_cpp_quality.py`."""
    options.home.mkdir(parents=True, exist_ok=True)
    job = {
        "gguf": str(options.gguf),
        "ftype": ftype,
        "home": str(options.home),
        "threads": int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))),
        "pieces": pieces,
        "prompt": [] if options.skip_speed else ids[:PROMPT_TOKENS],
        "stream_tokens": STREAM_TOKENS,
    }
    script = Path(__file__).parent / "runners" / "llama_cpp_quality.py"
    done = subprocess.run(
        [options.llama_cpp, str(script)], input=json.dumps(job) + "\n", stdout=subprocess.PIPE, text=True, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a directory in Hugging Face layout, a hub id or a GGUF file")
    parser.add_argument(
        "--precision",
        action="append",
        choices=PRECISIONS,
        help="the first is compared with; default: all, of a GGUF file none",
    )
    parser.add_argument("--text", type=Path, help="instead of Python's language reference")
    parser.add_argument("--pieces", type=int, default=MAX_PIECES, help="of the text (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=2, help="of the speeds, over all precisions (default: %(default)s)"
    )
    parser.add_argument("--skip-speed", action="store_true", help="perplexity and bytes alone, in one round")
    parser.add_argument("--llama-cpp", help="Python with llama-cpp-python", metavar="PYTHON")
    parser.add_argument("--gguf", type=Path, help="the same weights for it, in any format")
    parser.add_argument("--as-it-is", action="store_true", help="llama.cpp reads the GGUF file itself, too")
    parser.add_argument(
        "--ftype",
        action="append",
        choices=(*LLAMA_CPP, *OTHERS),
        help="of llama.cpp's formats; default: BF16, Q8_0 and whatever is smaller, of a GGUF file none",
    )
    parser.add_argument("--home", type=Path, default=Path("/tmp/octavo-gguf"), help="for its files (%(default)s)")
    options = parser.parse_args()
    is_gguf = options.checkpoint.endswith(".gguf")
    options.path = Path(options.checkpoint) if is_gguf else resolve_model_path(options.checkpoint)
    options.gguf = options.path if is_gguf else options.gguf
    options.precision = options.precision or ([] if is_gguf else list(PRECISIONS))
    options.ftype = options.ftype or ([] if is_gguf else list(LLAMA_CPP))
    if options.llama_cpp and options.gguf is None:
        parser.error("--llama-cpp wants --gguf FILE")
    return options


def main() -> None:
    """Measure and print."""
    options = read_options()
    measured = Measured(options)
    peers: list[str | None] = []
    if options.llama_cpp:
        peers = [*([None] if options.as_it_is else []), *options.ftype]
    for _ in range(1 if options.skip_speed else options.rounds):
        for name in options.precision:
            first = options.precision[0]
            measured.octavo(name, options.path, first, quantization=PRECISIONS[name], dtype="bfloat16")
        for ftype in peers:
            form = ftype or "as it is"
            read = measured.llama_cpp(f"llama.cpp, {form}", ftype)
            measured.octavo(f"octavo, {form}", read, f"llama.cpp, {form}", quantization=None)
    print(measured.table())


if __name__ == "__main__":
    main()
