"""What guessing costs, and what it gives to one stream that copies or writes freely.

    python benchmarks/drafting.py --draft octavo-demo-draft       # the built-in model
    python benchmarks/drafting.py --model DIR --repeat 5          # a checkpoint with a chat template

The index of `suffix`: bytes for so many tokens, CPU microseconds to take in a token, and for a proposal (median and
99th percentile), on texts whose words are as frequent as in a language. Then the same requests without speculation,
with ngram, suffix, the model itself in int4 (quantized) and a draft model where one is named, in turns, one at a time:
each asks for a text with a name replaced (copy), or for a story (story). The texts differ by names, so suffix is helped
by the answers before; "asked again" repeats the requests. Tokens must be the same everywhere. Ratios are medians of the
turns' own, to none of the same kind. How many drafts a step has is the engine's policy, at most --drafts.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from array import array
from typing import Any

from octavo import LLM, SamplingParams
from octavo.config import SpeculativeConfig
from octavo.speculative.suffix import SuffixProposer
from octavo.speculative.suffix_index import MAX_MATCH, SuffixIndex

TASKS = ("copy", "story")
NAMES = ("Anna", "Bernard", "Clara", "David", "Emma")
TEXT = (
    "Mr. Smith walked to the harbour before breakfast. The harbour was quiet, and Mr. Smith counted the boats: nine "
    "were blue, four were white, and one had no colour left. He wrote the numbers into his book, closed it, and walked "
    "home. There Mr. Smith made tea, opened the book again, and read the numbers aloud until the tea was cold."
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint (default: the built-in model)")
    parser.add_argument("--quantization", help="int8 or int4 (default: as it is stored)")
    parser.add_argument("--draft", help="a draft model: alone, and beside suffix (default: none)")
    parser.add_argument("--task", choices=TASKS, default="copy", help="what is asked for (default: copy)")
    parser.add_argument("--only", nargs="+", help="of the methods, beside none (default: all)")
    parser.add_argument("--tokens", type=int, default=1 << 20, help="in the index (default: 1048576; 0: not measured)")
    parser.add_argument("--drafts", type=int, default=8, help="num_speculative_tokens (default: 8)")
    parser.add_argument("--max-tokens", type=int, default=120, help="of an answer (default: 120)")
    parser.add_argument("--repeat", type=int, default=3, help="turns (default: 3)")
    arguments = parser.parse_args()
    if arguments.tokens:
        measure_index(arguments.tokens, arguments.drafts)
    measure_streams(arguments)


def measure_index(num_tokens: int, num_drafts: int) -> None:
    """Print bytes and times of the index alone."""
    rng = random.Random(1)
    words = [[rng.randrange(49_000) for _ in range(rng.randint(1, 12))] for _ in range(4000)]
    text: list[int] = []
    while len(text) < num_tokens:
        text += words[min(int(rng.paretovariate(0.7)), len(words) - 1)]
    text = text[:num_tokens]
    index = SuffixIndex(num_tokens)
    start = time.thread_time()
    index.extend(text)
    extend_us = (time.thread_time() - start) / num_tokens * 1e6
    index.close()
    times = []
    for _ in range(5000):
        end = rng.randrange(MAX_MATCH, num_tokens)
        suffix = array("i", text[end - MAX_MATCH : end])
        start = time.thread_time()
        index.propose(suffix, num_drafts, min_probability=0.1)
        times.append((time.thread_time() - start) * 1e6)
    times.sort()
    print(f"index of {num_tokens:,} tokens: {index.nbytes:,} bytes; a token {extend_us:.2f} us; a proposal", end=" ")
    print(f"{times[len(times) // 2]:.1f} us, 99th percentile {times[len(times) * 99 // 100]:.1f} us")
    planned = SuffixProposer(SpeculativeConfig(method="suffix"), max_num_seqs=64, max_model_len=8192).num_bytes
    print(f"planned for suffix by default: {planned:,} bytes\n")


def measure_streams(arguments: argparse.Namespace) -> None:
    """Print tokens a second of each method, turn by turn, and their ratios to none."""
    found = methods(arguments)
    llms = {method: load(arguments, config) for method, config in found.items()}
    params = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens, ignore_eos=True)
    rates: dict[str, list[float]] = {f"{method}{again}": [] for method in found for again in ("", ", asked again")}
    num_steps = dict.fromkeys(rates, 0)
    for turn in range(arguments.repeat):
        answers = []
        for method, llm in llms.items():
            for again in ("", ", asked again"):
                llm.reset_prefix_cache()
                before = llm.llm_engine.core.scheduler.get_stats().num_steps
                rate, tokens = run(llm, arguments.task, turn, params)
                num_steps[f"{method}{again}"] += llm.llm_engine.core.scheduler.get_stats().num_steps - before
                rates[f"{method}{again}"].append(rate)
                answers.append(tokens)
        if any(tokens != answers[0] for tokens in answers):
            raise SystemExit("tokens differ")
    num_tokens = arguments.repeat * len(NAMES) * arguments.max_tokens
    print("| method | tok/s | ratio to none | tokens a step |\n|---|---|---|---|")
    for name, found in rates.items():
        base = rates["none" + name.removeprefix(name.partition(",")[0])]
        ratio = statistics.median(rate / none for rate, none in zip(found, base, strict=True))
        print(f"| {name} | {statistics.median(found):.1f} | {ratio:.2f} | {num_tokens / num_steps[name]:.2f} |")


def methods(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the configuration of each method that is measured."""
    found: dict[str, dict[str, Any]] = {
        "none": {"method": "none"},
        "ngram": {"method": "ngram"},
        "suffix": {"method": "suffix"},
    }
    if arguments.quantization is None:
        found["quantized"] = {"method": "quantized"}
    if arguments.draft is not None:
        found["draft_model"] = {"method": "draft_model", "model": arguments.draft}
        found["suffix and model"] = {"method": "suffix", "model": arguments.draft}
    return {name: config for name, config in found.items() if name == "none" or name in (arguments.only or found)}


def load(arguments: argparse.Namespace, config: dict[str, Any]) -> LLM:
    """Return an engine of that method, warm."""
    options: dict[str, Any] = {"kv_cache_memory_bytes": 256 << 20, "max_num_seqs": 8}
    options["speculative_config"] = {**config, "num_speculative_tokens": arguments.drafts}
    llm = LLM(arguments.model, quantization=arguments.quantization, **options)
    llm.generate("Once", SamplingParams(max_tokens=8), use_tqdm=False)
    return llm


def run(llm: LLM, task: str, turn: int, params: SamplingParams) -> tuple[float, list[list[int]]]:
    """Ask one request after another; return tokens a second, prompts included, and the answers."""
    tokens = []
    start = time.perf_counter()
    for name in NAMES:
        who = f"{name} the {turn + 2}th"
        content = f"Tell me a story about {who} and a lighthouse."
        if task == "copy":
            text = TEXT.replace("Mr. Smith", who)
            content = f"Repeat this text, but write {name} Miller in place of {who}:\n\n{text}"
        (output,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
        tokens.append(output.outputs[0].token_ids)
    return sum(map(len, tokens)) / (time.perf_counter() - start), tokens


if __name__ == "__main__":
    main()
