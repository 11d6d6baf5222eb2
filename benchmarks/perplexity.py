"""What each precision costs in quality, takes in memory and brings in speed, on a checkpoint with trained weights.

    python benchmarks/perplexity.py ./SmolLM2-135M-Instruct
    python benchmarks/perplexity.py OWNER/NAME --precision bf16 --precision int8 --text ./novel.txt --rounds 3
    python benchmarks/perplexity.py ./SmolLM2-135M-Instruct --llama-cpp PYTHON --gguf ./SmolLM2-135M-Instruct.gguf
    python benchmarks/perplexity.py ./SmolLM2-135M-Instruct --precision bf16 --llama-cpp PYTHON --gguf ... --ftype Q4_0

Perplexity over 40 pieces of 512 tokens of Python's language reference, or of a text, each piece by itself; the weights
as they stand in memory; a prompt of 1,024 tokens and one stream of 64, all precisions in turns, medians. Prints a table
for docs/benchmarks.md. --llama-cpp: the Python of an environment with llama-cpp-python; its formats of the GGUF file
take their turns behind octavo's precisions, on the same token ids and as many threads, and each file is then served by
octavo as it is: that row is compared with llama.cpp's.
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

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.models.layers import CausalLM

PRECISIONS = {"bf16": None, "int8": "int8", "int4": "int4", "int4_all": "int4_all"}
LLAMA_CPP = ("BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_1", "Q5_0", "Q4_K_M", "Q4_1", "Q4_0")
PROMPT_TOKENS, STREAM_TOKENS = 1024, 64


def weight_bytes(model: CausalLM) -> int:
    """Bytes of all packed weights; what two of them share counts once."""
    linears = {id(linear.storage): linear.num_bytes for linear in (model.embed_tokens, model.lm_head) if linear}
    for layer in model.layers:
        for linear in (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down):
            linears[id(linear.storage)] = linear.num_bytes
    return sum(linears.values())


def speeds(llm: LLM, ids: list[int]) -> tuple[float, float]:
    """Tokens a second of a prompt and of one stream; the tokens are ignored."""

    def seconds(prompt: list[int], count: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return time.perf_counter() - begin

    first = seconds(ids[:32], 1)
    stream = (STREAM_TOKENS - 1) / (seconds(ids[:32], STREAM_TOKENS) - first)
    return PROMPT_TOKENS / seconds(ids[:PROMPT_TOKENS], 1), stream


class Scored(NamedTuple):
    """A row of the table."""

    num_bytes: int
    perplexity: float
    rates: list[tuple[float, float]]


def score(scored: dict[str, Scored], name: str, llm: LLM, pieces: list[list[int]], ids: list[int]) -> None:
    """Measure a model; without pieces its speeds alone."""
    if pieces:
        num_bytes = weight_bytes(llm.llm_engine.core.executor.worker.model)
        scored[name] = Scored(num_bytes, perplexity(mean_losses(llm, pieces)), [])
    scored[name].rates.append(speeds(llm, ids))
    tell(name, scored[name])


def tell(name: str, row: Scored) -> None:
    """Tell what was measured just now: all of it takes minutes."""
    prompt, stream = row.rates[-1]
    print(f"{name}: {row.perplexity:.3f}, {prompt:.0f} and {stream:.0f} tok/s", file=sys.stderr, flush=True)


def ask_llama_cpp(options: argparse.Namespace, ftype: str, pieces: list[list[int]], ids: list[int]) -> dict[str, Any]:
    """Have llama.cpp do the same in a process of its own: see `runners/llama_cpp_quality.py`."""
    options.home.mkdir(parents=True, exist_ok=True)
    job = {
        "gguf": str(options.gguf),
        "ftype": ftype,
        "home": str(options.home),
        "threads": int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))),
        "pieces": pieces,
        "prompt": ids[:PROMPT_TOKENS],
        "stream_tokens": STREAM_TOKENS,
    }
    script = Path(__file__).parent / "runners" / "llama_cpp_quality.py"
    done = subprocess.run(
        [options.llama_cpp, str(script)], input=json.dumps(job) + "\n", stdout=subprocess.PIPE, text=True, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a directory in Hugging Face layout or a hub id")
    parser.add_argument(
        "--precision", action="append", choices=PRECISIONS, help="the first is compared with; default: all"
    )
    parser.add_argument("--text", type=Path, help="instead of Python's language reference")
    parser.add_argument("--pieces", type=int, default=MAX_PIECES, help="of the text (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=2, help="of the speeds, over all precisions (default: %(default)s)"
    )
    parser.add_argument("--llama-cpp", help="Python with llama-cpp-python", metavar="PYTHON")
    parser.add_argument("--gguf", type=Path, help="the same weights for it, in any format")
    parser.add_argument("--ftype", action="append", choices=LLAMA_CPP, help="of llama.cpp's formats (default: all)")
    parser.add_argument("--home", type=Path, default=Path("/tmp/octavo-gguf"), help="for its files (%(default)s)")
    options = parser.parse_args()
    path = resolve_model_path(options.checkpoint)
    text = python_reference() if options.text is None else options.text.read_text(encoding="utf-8")
    precisions = options.precision or list(PRECISIONS)
    peers = (options.ftype or LLAMA_CPP) if options.llama_cpp else ()
    scored: dict[str, Scored] = {}
    for number in range(options.rounds):
        for name in precisions:
            with opened(path, quantization=PRECISIONS[name], dtype="bfloat16") as llm:
                ids, pieces = llm.get_tokenizer().encode(text), text_pieces(llm, text, max_pieces=options.pieces)
                score(scored, name, llm, pieces if number == 0 else [], ids)
        for name in peers:
            answer = ask_llama_cpp(options, name, pieces if number == 0 else [], ids)
            if number == 0:
                scored[f"llama.cpp {name}"] = Scored(answer["bytes"], perplexity(answer["losses"]), [])
            rate = answer["prompt_tokens_per_s"], answer["stream_tokens_per_s"]
            scored[f"llama.cpp {name}"].rates.append(rate)
            tell(f"llama.cpp {name}", scored[f"llama.cpp {name}"])
            with opened(options.home / f"{options.gguf.stem}.{name}.gguf", quantization=None, dtype="bfloat16") as llm:
                score(scored, f"its {name} file", llm, pieces if number == 0 else [], ids)
    print("| precision | weights, MB | perplexity | | prompt, tok/s | one stream, tok/s |\n|---|---|---|---|---|---|")
    for name, row in scored.items():
        origin = name.replace("its ", "llama.cpp ").removesuffix(" file") if name.startswith("its ") else precisions[0]
        against = row.perplexity / scored[origin].perplexity - 1
        prompt, stream = (statistics.median(rate) for rate in zip(*row.rates, strict=True))
        quality = f"{row.num_bytes / 1e6:.0f} | {row.perplexity:.3f} | {against:+.2%}"
        print(f"| {name} | {quality} | {prompt:.0f} | {stream:.0f} |")


if __name__ == "__main__":
    main()
