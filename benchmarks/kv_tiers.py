"""What KV beyond the device gives: the time to the first token behind a long beginning that a tier has.

    python benchmarks/kv_tiers.py                                # every line, qwen2-0.5b's shape
    python benchmarks/kv_tiers.py --line host --precision int8 --repeat 3

Lines:

    host    the beginning was evicted to host memory and comes back, in one engine whose cache holds one such beginning
    disk    another engine saved the beginning on disk, and ended; it is read by one that starts on the directory

A turn asks for a new beginning, and for one that the tier has by then; their own tokens behind it differ. A ratio is
the second time by the first, the median of the turns' own. The first tokens must be those of an engine without tiers.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workloads import prepare

from octavo import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from octavo.outputs import RequestOutput

BLOCK_SIZE = 16
NUM_OWN_TOKENS = 24
PRECISIONS = ("bf16", "int8")


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a prompt. seconds: until its first token."""

    prompt: list[int]
    token_ids: list[int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Setting:
    """What a line is measured on. load(options): an engine on the model, with these options of `LLM`."""

    load: Callable[..., LLM]
    num_tokens: int
    repeat: int
    rng: random.Random

    def beginning(self) -> list[int]:
        """Return one that nobody asked for before."""
        return [self.rng.randrange(1000, 100_000) for _ in range(self.num_tokens)]

    def ask(self, llm: LLM, beginning: list[int], *, is_found: bool) -> Answer:
        """Ask for a beginning and some tokens behind it; it has to be found, or not to be."""
        prompt = beginning + [self.rng.randrange(1000, 100_000) for _ in range(NUM_OWN_TOKENS)]
        start = time.perf_counter()
        output = first_token(llm, prompt)
        seconds = time.perf_counter() - start
        num_found = output.num_cached_tokens
        if num_found != (self.num_tokens if is_found else 0):
            raise SystemExit(f"{num_found} tokens of a beginning of {self.num_tokens} were found")
        return Answer(prompt, output.outputs[0].token_ids, seconds)


@dataclass(frozen=True, slots=True)
class Line:
    """A tier, how long the beginnings are, and the largest ratio that was asked for.

    run: yields (computed, found) of each turn.
    """

    name: str
    num_tokens: int
    asked_for: float
    run: Callable[[Setting], Iterator[tuple[Answer, Answer]]]


def host(setting: Setting) -> Iterator[tuple[Answer, Answer]]:
    """Ask for a new beginning, which evicts the one before, and for that one again."""
    num_blocks = (setting.num_tokens + NUM_OWN_TOKENS) // BLOCK_SIZE + 4
    llm = setting.load(num_gpu_blocks_override=num_blocks, swap_space_bytes=1 << 30)
    beginning = setting.beginning()
    setting.ask(llm, beginning, is_found=False)
    for _ in range(setting.repeat):
        before, beginning = beginning, setting.beginning()
        computed = setting.ask(llm, beginning, is_found=False)
        yield computed, setting.ask(llm, before, is_found=True)


def disk(setting: Setting) -> Iterator[tuple[Answer, Answer]]:
    """Ask a new engine for a new beginning, and for the one that the engine before was asked for."""
    with tempfile.TemporaryDirectory() as place:
        llm = setting.load(kv_disk_dir=place, kv_cache_memory_bytes=1 << 28)
        beginning = setting.beginning()
        setting.ask(llm, beginning, is_found=False)
        for _ in range(setting.repeat):
            end_saves(llm)
            llm = setting.load(kv_disk_dir=place, kv_cache_memory_bytes=1 << 28)
            before, beginning = beginning, setting.beginning()
            computed = setting.ask(llm, beginning, is_found=False)
            yield computed, setting.ask(llm, before, is_found=True)
        end_saves(llm)


def end_saves(llm: LLM) -> None:
    """Let an engine save what it is saving, and shut it down."""
    core = llm.llm_engine.core
    while core.has_work():
        llm.llm_engine.step()
    core.executor.shutdown()


LINES = [
    Line("host", 4096, 0.15, host),
    Line("disk", 4096, 0.25, disk),
]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint directory (default: qwen2-0.5b, made if missing)")
    parser.add_argument("--line", action="append", choices=[line.name for line in LINES], help="(default: all)")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16", help="(default: %(default)s)")
    parser.add_argument("--kv", choices=("auto", "int8"), default="auto", help="kv_cache_dtype (default: %(default)s)")
    parser.add_argument("--tokens", type=int, help="of a beginning (default: those of the line)")
    parser.add_argument("--repeat", type=int, default=5, help="turns (default: %(default)s)")
    arguments = parser.parse_args()
    model = arguments.model or prepare("qwen2-0.5b")[0]

    def load(**options: object) -> LLM:
        quantization = None if arguments.precision == "bf16" else arguments.precision
        llm = LLM(
            str(model),
            quantization=quantization,
            kv_cache_dtype=arguments.kv,
            block_size=BLOCK_SIZE,
            skip_tokenizer_init=True,
            max_num_seqs=4,
            **options,
        )
        first_token(llm, [1000])
        return llm

    reference = load(enable_prefix_caching=False, kv_cache_memory_bytes=1 << 28)
    print("| line | tokens | ratio to computing | asked for | found, ms | computed, ms |\n|---|---|---|---|---|---|")
    for line in LINES:
        if arguments.line is None or line.name in arguments.line:
            num_tokens = (arguments.tokens or line.num_tokens) // BLOCK_SIZE * BLOCK_SIZE
            measure(line, Setting(load, num_tokens, arguments.repeat, random.Random(line.name)), reference)


def measure(line: Line, setting: Setting, reference: LLM) -> None:
    """Measure a line and print its row; the last turn's tokens are compared."""
    turns = list(line.run(setting))
    for answer in turns[-1]:
        if first_token(reference, answer.prompt).outputs[0].token_ids != answer.token_ids:
            raise SystemExit(f"{line.name}: tokens differ from those of an engine without tiers")
    ratio = statistics.median(found.seconds / computed.seconds for computed, found in turns)
    computed_s, found_s = (statistics.median(turn[index].seconds for turn in turns) for index in (0, 1))
    cells = [line.name, f"{setting.num_tokens}", f"{ratio:.3f}", f"{line.asked_for:.2f}"]
    print("| " + " | ".join([*cells, f"{1000 * found_s:.0f}", f"{1000 * computed_s:.0f}"]) + " |", flush=True)


def first_token(llm: LLM, prompt: list[int]) -> RequestOutput:
    """Answer a prompt with one token, greedily."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return output


if __name__ == "__main__":
    main()
