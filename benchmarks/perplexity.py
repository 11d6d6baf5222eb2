"""What each precision costs in quality, takes in memory and brings in speed, on a checkpoint with trained weights.

    python benchmarks/perplexity.py ./SmolLM2-135M-Instruct
    python benchmarks/perplexity.py OWNER/NAME --precision bf16 --precision int8 --text ./novel.txt --rounds 3

Perplexity over 40 pieces of 512 tokens of Python's language reference, or of a text, each piece by itself; the weights
as they stand in memory; a prompt of 1,024 tokens and one stream of 64, all precisions in turns, medians. Prints a table
for docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli.perplexity import MAX_PIECES, mean_losses, opened, perplexity, python_reference, text_pieces
from octavo.models.model_path import resolve_model_path
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.models.layers import CausalLM

PRECISIONS = {"bf16": None, "int8": "int8", "int4": "int4", "int4_all": "int4_all"}
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
    options = parser.parse_args()
    path = resolve_model_path(options.checkpoint)
    text = python_reference() if options.text is None else options.text.read_text(encoding="utf-8")
    precisions = options.precision or list(PRECISIONS)
    quality: dict[str, tuple[int, float]] = {}
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in precisions}
    for number in range(options.rounds):
        for name in precisions:
            with opened(path, quantization=PRECISIONS[name], dtype="bfloat16") as llm:
                if number == 0:
                    losses = mean_losses(llm, text_pieces(llm, text, max_pieces=options.pieces))
                    quality[name] = weight_bytes(llm.llm_engine.core.executor.worker.model), perplexity(losses)
                rates[name].append(speeds(llm, llm.get_tokenizer().encode(text)))
    print("| precision | weights, MB | perplexity | | prompt, tok/s | one stream, tok/s |\n|---|---|---|---|---|---|")
    for name in precisions:
        num_bytes, value = quality[name]
        against = value / quality[precisions[0]][1] - 1
        prompt, stream = (statistics.median(rate) for rate in zip(*rates[name], strict=True))
        print(f"| {name} | {num_bytes / 1e6:.0f} | {value:.3f} | {against:+.2%} | {prompt:.0f} | {stream:.0f} |")


if __name__ == "__main__":
    main()
