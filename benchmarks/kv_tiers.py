"""The benefit of KV tiers beyond the device, and their cost for requests that cannot use them.

    python benchmarks/kv_tiers.py                                # every line, qwen2-0.5b's shape
    python benchmarks/kv_tiers.py --line host --precision int8 --repeat 3

Lines for the benefit: time to the first token with a long prefix that a tier has, divided by that with a new prefix:

    host      the prefix was evicted to host memory and is copied back, in an engine with room for one such prefix
    disk      another engine saved the prefix on disk and ended; a new engine on the same directory reads it
    mooncake  another engine saved the prefix in the pool of a `mooncake_master` on this machine

A turn sends a request with a new prefix, and one with a prefix that the tier has; the tokens after the prefixes differ.
A ratio is the second time divided by the first, the median over all turns. The first tokens must be those of an engine
without tiers.

Lines for the cost: throughput of workload B with a store, divided by that without, in turns with new prompts:

    saving    all KV is saved on disk
    never     a store is asked for each prompt and offered each block, but has nothing and saves nothing

Exits with status 1 if a ratio misses its target.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from make_workloads import HIGH_ID, LOW_ID, make_workloads
from workloads import prepare

from octavo import SamplingParams
from octavo.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from octavo.kv_transfer.memory import GlobalKVPool, MemoryStore
from octavo.llm import LLMEngine

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from octavo.outputs import RequestOutput

BLOCK_SIZE = 16
NUM_OWN_TOKENS = 24
CACHE_BYTES = 1 << 28
PRECISIONS = ("bf16", "int8")


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a prompt. seconds: time to its first token."""

    prompt: list[int]
    token_ids: list[int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting of a line. load(...): creates an engine on the model, see `loader`. num_tokens: of a prefix."""

    load: Callable[..., LLMEngine]
    num_tokens: int
    repeat: int
    rng: random.Random

    def beginning(self) -> list[int]:
        """Return a new prefix."""
        return [self.rng.randrange(1000, 100_000) for _ in range(self.num_tokens)]

    def ask(self, engine: LLMEngine, beginning: list[int], *, is_found: bool) -> Answer:
        """Answer a prefix followed by some tokens. is_found: the prefix must be a hit, or must not be one."""
        prompt = beginning + [self.rng.randrange(1000, 100_000) for _ in range(NUM_OWN_TOKENS)]
        start = time.perf_counter()
        output = first_token(engine, prompt)
        seconds = time.perf_counter() - start
        num_found = output.num_cached_tokens
        if num_found != (self.num_tokens if is_found else 0):
            raise SystemExit(f"{num_found} tokens of a beginning of {self.num_tokens} were found")
        return Answer(prompt, output.outputs[0].token_ids, seconds)


@dataclass(frozen=True, slots=True)
class Tier:
    """A tier, the length of its prefixes, and the maximum ratio.

    run: yields (computed, found) for each turn.
    """

    name: str
    num_tokens: int
    asked_for: float
    run: Callable[[Setting], Iterator[tuple[Answer, Answer]]]


@dataclass(frozen=True, slots=True)
class Cost:
    """A store with a cost, and the minimum ratio. load: creates an engine with the store."""

    name: str
    asked_for: float
    load: Callable[[Callable[..., LLMEngine], Path], LLMEngine]


# --- benefit ----------------------------------------------------------------------------------------------------------


def host(setting: Setting) -> Iterator[tuple[Answer, Answer]]:
    """Answer a new prefix, which evicts the one before, and then that one again."""
    num_blocks = (setting.num_tokens + NUM_OWN_TOKENS) // BLOCK_SIZE + 4
    engine = setting.load(num_gpu_blocks=num_blocks, kv_cache_memory_bytes=None, swap_space_bytes=1 << 30)
    beginning = setting.beginning()
    setting.ask(engine, beginning, is_found=False)
    for _ in range(setting.repeat):
        before, beginning = beginning, setting.beginning()
        computed = setting.ask(engine, beginning, is_found=False)
        yield computed, setting.ask(engine, before, is_found=True)


def disk(setting: Setting) -> Iterator[tuple[Answer, Answer]]:
    """With a new engine in each turn, answer a new prefix, and the one that the engine before saved."""
    with tempfile.TemporaryDirectory() as place:
        stores = KVTransferConfig(disk_dir=Path(place))
        engine = setting.load(stores)
        beginning = setting.beginning()
        setting.ask(engine, beginning, is_found=False)
        for _ in range(setting.repeat):
            end_saves(engine)
            engine.shutdown()
            engine = setting.load(stores)
            before, beginning = beginning, setting.beginning()
            computed = setting.ask(engine, beginning, is_found=False)
            yield computed, setting.ask(engine, before, is_found=True)
        end_saves(engine)
        engine.shutdown()


def mooncake(setting: Setting) -> Iterator[tuple[Answer, Answer]]:
    """Answer a prefix with one engine; with another one answer a new prefix and the same prefix."""
    from mooncake_master import Master  # noqa: PLC0415 - of the tests; it needs octavo[mooncake]

    master = Master()
    engines: list[LLMEngine] = []
    try:
        for lent_bytes in (1 << 30, 0):
            stores = KVTransferConfig(mooncake=master.address, mooncake_segment_bytes=lent_bytes)
            engines.append(setting.load(stores))
            wait_until_usable(engines[-1])
        first, second = engines
        for _ in range(setting.repeat):
            beginning = setting.beginning()
            setting.ask(first, beginning, is_found=False)
            end_saves(first)
            computed = setting.ask(second, setting.beginning(), is_found=False)
            yield computed, setting.ask(second, beginning, is_found=True)
            end_saves(second)
    finally:
        for engine in engines:
            engine.shutdown()
        master.kill()


def wait_until_usable(engine: LLMEngine, seconds: float = 30.0) -> None:
    """Wait until the engine's only store is available."""
    [tier] = engine.core.metrics.stats.kv_stores.values()
    deadline = time.monotonic() + seconds
    while not tier.is_usable:
        if time.monotonic() > deadline:
            raise SystemExit("the store does not open")
        time.sleep(0.02)


def end_saves(engine: LLMEngine) -> None:
    """Step the engine until its saves have ended."""
    while engine.core.has_work():
        engine.step()


# --- cost -------------------------------------------------------------------------------------------------------------


class Nothing(MemoryStore):
    """A store that accepts no blocks, so it never has any."""

    def __init__(self, block_bytes: int) -> None:
        super().__init__(GlobalKVPool(1), "nothing", block_bytes)

    def lacks(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return no keys: no block is wanted."""
        del keys
        return set()


def saving(load: Callable[..., LLMEngine], place: Path) -> LLMEngine:
    """Return an engine that saves KV on disk."""
    return load(KVTransferConfig(disk_dir=place), max_num_seqs=64, kv_cache_memory_bytes=2 * CACHE_BYTES)


def never(load: Callable[..., LLMEngine], place: Path) -> LLMEngine:
    """Return an engine with a store that has nothing and accepts nothing."""
    del place
    return load(kv_store=Nothing, max_num_seqs=64, kv_cache_memory_bytes=2 * CACHE_BYTES)


def workload_b(rng: random.Random) -> tuple[list[list[int]], list[int]]:
    """Return prompts with the lengths of workload B and new random tokens, and the lengths of answers."""
    items = make_workloads(1234)["B"]
    prompts = [[rng.randrange(LOW_ID, HIGH_ID) for _ in item["prompt"]] for item in items]
    return prompts, [item["out"] for item in items]


def answer_all(engine: LLMEngine, prompts: list[list[int]], lengths: list[int]) -> tuple[float, list[list[int]]]:
    """Answer all prompts; return the seconds until all are answered and all saves have ended, and the tokens."""
    params = [SamplingParams(temperature=0.0, max_tokens=each, ignore_eos=True, detokenize=False) for each in lengths]
    start = time.perf_counter()
    outputs = engine.generate_batch([{"prompt_token_ids": prompt} for prompt in prompts], params)
    end_saves(engine)
    seconds = time.perf_counter() - start
    return seconds, [list(output.outputs[0].token_ids) for output in outputs.values()]


# --- lines ------------------------------------------------------------------------------------------------------------

TIERS = [Tier("host", 4096, 0.15, host), Tier("disk", 4096, 0.25, disk), Tier("mooncake", 2048, 0.50, mooncake)]
COSTS = [Cost("saving", 0.98, saving), Cost("never", 0.99, never)]
NAMES = [line.name for line in (*TIERS, *COSTS)]


def loader(model: Path, precision: str, kv_dtype: str) -> Callable[..., LLMEngine]:
    """Return a function that creates engines on a model, warmed up."""

    def load(
        kv_transfer: KVTransferConfig | None = None,
        *,
        kv_store: Callable[[int], Nothing] | None = None,
        max_num_seqs: int = 4,
        **cache: Any,
    ) -> LLMEngine:
        quantization = None if precision == "bf16" else precision
        engine = LLMEngine(
            ModelConfig(model=str(model), quantization=quantization, skip_tokenizer_init=True),
            SchedulerConfig(max_num_seqs=max_num_seqs, mixed_step_ms=0.0),
            cache_config=CacheConfig(
                **{"block_size": BLOCK_SIZE, "kv_cache_dtype": kv_dtype, "kv_cache_memory_bytes": CACHE_BYTES} | cache
            ),
            kv_transfer_config=kv_transfer,
            kv_store=kv_store,
            speculative_config=SpeculativeConfig(method="none"),  # it would guess repeated answers
        )
        first_token(engine, [1000])
        return engine

    return load


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint directory (default: qwen2-0.5b, made if missing)")
    parser.add_argument("--line", action="append", choices=NAMES, help="(default: all)")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16", help="(default: %(default)s)")
    parser.add_argument("--kv", choices=("auto", "int8"), default="auto", help="kv_cache_dtype (default: %(default)s)")
    parser.add_argument("--tokens", type=int, help="of a beginning (default: those of the line)")
    parser.add_argument("--repeat", type=int, default=5, help="turns (default: %(default)s)")
    arguments = parser.parse_args()
    load = loader(arguments.model or prepare("qwen2-0.5b")[0], arguments.precision, arguments.kv)
    names, missed = arguments.line or NAMES, []
    tiers, costs = ([line for line in lines if line.name in names] for lines in (TIERS, COSTS))
    if tiers:
        reference = load(enable_prefix_caching=False)
        print_row("line", "tokens", "ratio to computing", "asked for", "found, ms", "computed, ms")
        print("|---" * 6 + "|")
        for tier in tiers:
            num_tokens = (arguments.tokens or tier.num_tokens) // BLOCK_SIZE * BLOCK_SIZE
            setting = Setting(load, num_tokens, arguments.repeat, random.Random(tier.name))
            missed += [] if measure_tier(tier, setting, reference) else [tier.name]
    if costs:
        print()
        print_row("line", "ratio of throughput", "asked for", "of the turns", "with, tok/s", "without, tok/s")
        print("|---" * 6 + "|")
        missed += [cost.name for cost in costs if not measure_cost(cost, load, arguments.repeat)]
    if missed:
        raise SystemExit(f"not what was asked for: {', '.join(missed)}")


def measure_tier(tier: Tier, setting: Setting, reference: LLMEngine) -> bool:
    """Measure a tier and print its row; return True if the ratio meets its target.

    The tokens of the last turn are compared.
    """
    turns = list(tier.run(setting))
    for answer in turns[-1]:
        if first_token(reference, answer.prompt).outputs[0].token_ids != answer.token_ids:
            raise SystemExit(f"{tier.name}: tokens differ from those of an engine without tiers")
    ratio = statistics.median(found.seconds / computed.seconds for computed, found in turns)
    computed_s, found_s = (statistics.median(turn[index].seconds for turn in turns) for index in (0, 1))
    cells = [f"{setting.num_tokens}", f"{ratio:.3f}", f"<= {tier.asked_for:.2f}"]
    print_row(tier.name, *cells, f"{1000 * found_s:.0f}", f"{1000 * computed_s:.0f}")
    return ratio <= tier.asked_for


def measure_cost(cost: Cost, load: Callable[..., LLMEngine], repeat: int) -> bool:
    """Measure a cost and print its row; compare the tokens. Return True if the ratio meets its target.

    One engine answers with and without its store in turns: two engines on one model would differ by 3 % and more
    because of their memory placement. The first turn is a warm-up.
    """
    rng, seconds = random.Random(cost.name), ([], [])
    with engine_of(cost, load) as engine:
        transfers = engine.core.scheduler.transfers
        for turn in range(repeat + 1):
            prompts, lengths = workload_b(rng)
            told: dict[int, list[list[int]]] = {}
            for index in (0, 1) if turn % 2 else (1, 0):
                transfers.has_store = index == 0
                taken, told[index] = answer_all(engine, prompts, lengths)
                seconds[index].append(taken)
                if not engine.core.scheduler.reset_prefix_cache():
                    raise SystemExit(f"{cost.name}: somebody still uses the prefix cache")
            if told[0] != told[1]:
                raise SystemExit(f"{cost.name}: tokens differ from those of an engine without a store")
    given, plain = (each[1:] for each in seconds)
    ratios = [without / taken for taken, without in zip(given, plain, strict=True)]
    ratio, num_tokens = statistics.median(ratios), sum(lengths)
    cells = [f"{ratio:.3f}", f">= {cost.asked_for:.2f}", f"{min(ratios):.3f} to {max(ratios):.3f}"]
    print_row(cost.name, *cells, *(f"{num_tokens / statistics.median(each):.1f}" for each in (given, plain)))
    return ratio >= cost.asked_for


@contextmanager
def engine_of(cost: Cost, load: Callable[..., LLMEngine]) -> Iterator[LLMEngine]:
    """Create the engine for the context; shut it down at the end."""
    with tempfile.TemporaryDirectory() as place:
        engine = cost.load(load, Path(place))
        wait_until_usable(engine)
        try:
            yield engine
        finally:
            engine.shutdown()


def print_row(*cells: str) -> None:
    """Print a row of a table and flush the output."""
    print("| " + " | ".join(cells) + " |", flush=True)


def first_token(engine: LLMEngine, prompt: list[int]) -> RequestOutput:
    """Answer a prompt with one token, greedily."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    [output] = engine.generate_batch([{"prompt_token_ids": prompt}], params).values()
    return output


if __name__ == "__main__":
    main()
