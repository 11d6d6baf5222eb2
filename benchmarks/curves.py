"""Speed against the number of requests, the length of the prompt and that of the KV; what a long prompt does to others.

    python benchmarks/curves.py --quantization int8              # qwen2-0.5b: about five minutes
    python benchmarks/curves.py --model ./my-checkpoint --pictures docs

Every figure is of one run after a warm-up: look at the shape. Nothing is cached between requests.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from comparison.report import folder_of_pictures, save_picture
from workloads import prepare

from octavo import LLM, SamplingParams
from octavo.config import DEFAULT_MAX_NUM_BATCHED_TOKENS, QUANTIZATIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from octavo.engine.llm_engine import Engine

REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
OUTPUT_TOKENS = 32
STREAMS, LONG_PROMPT = 8, 8192


class Client:
    """Adds requests to an engine and steps it, with the time of every token."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.times: dict[str, list[float]] = {}  # seconds on the clock, of each token of each open request
        self._count = 0

    def add(self, prompt_length: int, output_length: int) -> str:
        """Start a request of tokens that no other has begun with."""
        self._count += 1
        prompt = [1000 + self._count, *(300 + (7 * i + self._count) % 30_000 for i in range(prompt_length - 1))]
        params = SamplingParams(temperature=0.0, max_tokens=output_length, ignore_eos=True, detokenize=False)
        name = str(self._count)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        self.times[name] = []
        return name

    def step(self) -> bool:
        """Run one step; return whether requests are open."""
        for output in self.engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            new = len(output.outputs[0].token_ids) - len(self.times[output.request_id])
            self.times[output.request_id] += [time.perf_counter()] * new
        return self.engine.has_unfinished_requests()

    def run(self) -> None:
        """Step until nobody is left."""
        while self.step():
            pass


def by_requests(client: Client) -> list[tuple[int, float]]:
    """Return (requests, tokens/s) while all of them decode, behind prompts of 32 tokens."""
    points = []
    for count in REQUESTS:
        # two prompts of 32 fill what prompts get at least beside answers: the last starts up to `count / 2` steps later
        names = [client.add(32, OUTPUT_TOKENS + count // 2) for _ in range(count)]
        client.run()
        start, end = (edge(client.times[name][i] for name in names) for edge, i in ((max, 0), (min, -1)))
        tokens = sum(start < moment <= end for name in names for moment in client.times[name])
        points.append((count, tokens / (end - start)))
    return points


def by_length(client: Client) -> list[tuple[int, float, float]]:
    """Return (prompt length, prompt tokens/s, milliseconds of a decode step behind it), each alone."""
    points = []
    for length in LENGTHS:
        start = time.perf_counter()
        name = client.add(length, 17)
        client.run()
        times = client.times[name]
        points.append((length, length / (times[0] - start), 1000 * (times[-1] - times[0]) / (len(times) - 1)))
    return points


@dataclass(frozen=True, slots=True)
class Stall:
    """Milliseconds between tokens of streams: before a long prompt came (median), and while it was computed."""

    before: float
    median: float
    p99: float
    most: float

    @classmethod
    def of(cls, before: Sequence[float], meanwhile: Sequence[float]) -> Stall:
        """Summarize the times between neighbours."""
        quantiles = statistics.quantiles(meanwhile, n=100)
        return cls(statistics.median(before), quantiles[49], quantiles[98], max(meanwhile))

    def table(self) -> str:
        """Return them as Markdown, each beside the median while the prompt runs and the median before it came."""
        rows = [
            ("median before the prompt", self.before),
            ("median while it runs", self.median),
            ("p99 while it runs", self.p99),
            ("most while it runs", self.most),
        ]
        head = f"| {STREAMS} streams and a prompt of {LONG_PROMPT} | ms between tokens | of the median while it runs "
        lines = [f"{head}| of the median before |", "|---|---|---|---|"]
        lines += [f"| {name} | {ms:.1f} | {ms / self.median:.2f} | {ms / self.before:.2f} |" for name, ms in rows]
        return "\n".join(lines)


def stall(client: Client) -> Stall:
    """Let 8 streams run, and a prompt of 8,192 beside them."""
    streams = [client.add(32, 400) for _ in range(STREAMS)]
    while any(len(client.times[name]) < 20 for name in streams):
        client.step()
    before = gaps(client.times[name][2:] for name in streams)
    begin = time.perf_counter()
    long = client.add(LONG_PROMPT, 1)
    while not client.times[long]:
        client.step()
    first = {name: max(i for i, moment in enumerate(client.times[name]) if moment < begin) for name in streams}
    meanwhile = gaps(client.times[name][first[name] :] for name in streams)
    client.engine.abort_request(streams)
    client.run()
    return Stall.of(before, meanwhile)


def gaps(times: Iterable[list[float]]) -> list[float]:
    """Return milliseconds between neighbours."""
    return [1000 * (b - a) for each in times for a, b in itertools.pairwise(each)]


def draw(target: Path, requests: list[tuple[int, float]], lengths: list[tuple[int, float, float]]) -> None:
    """Write the curves to `target` with the endings .png and .svg."""
    import matplotlib as mpl  # noqa: PLC0415 - heavy, and the tables need none of it

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    mpl.rcParams["svg.hashsalt"] = "octavo"
    grid, axes = plt.subplots(1, 3, figsize=(12, 3.4), constrained_layout=True)
    for axis, points, title, across in (
        (axes[0], requests, "decoding, tokens/s", "requests"),
        (axes[1], [(x, y) for x, y, _ in lengths], "prefill, tokens/s", "tokens of the prompt"),
        (axes[2], [(x, y) for x, _, y in lengths], "decode step, ms", "tokens of KV"),
    ):
        axis.plot(*zip(*points, strict=True), marker="o")
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_title(title)
        axis.set_xlabel(across)
        axis.grid(alpha=0.3)
    save_picture(grid, target)


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint directory (default: qwen2-0.5b, made if missing)")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="of the weights (default: as stored)")
    parser.add_argument(
        "--pictures", type=folder_of_pictures, help="folder for plots, PNG and SVG; needs matplotlib (default: none)"
    )
    arguments = parser.parse_args()
    model = arguments.model or prepare("qwen2-0.5b")[0]
    llm = LLM(
        str(model),
        dtype="bfloat16",
        quantization=arguments.quantization,
        max_model_len=LONG_PROMPT + 1024,
        max_num_seqs=max(REQUESTS),
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        max_num_batched_tokens=DEFAULT_MAX_NUM_BATCHED_TOKENS,  # this and what prompts take beside answers: as a server
        mixed_step_ms=None,
    )
    client = Client(llm.llm_engine)
    client.add(512, 8)
    client.run()  # the first steps are slow
    requests = by_requests(client)
    print("| requests | " + " | ".join(str(count) for count, _ in requests) + " |\n|" + "---|" * (len(requests) + 1))
    print("| decode tokens/s | " + " | ".join(f"{rate:.0f}" for _, rate in requests) + " |\n", flush=True)
    lengths = by_length(client)
    print("| tokens | " + " | ".join(str(length) for length, _, _ in lengths) + " |\n|" + "---|" * (len(lengths) + 1))
    print("| prefill tokens/s | " + " | ".join(f"{rate:.0f}" for _, rate, _ in lengths) + " |")
    print("| decode step behind them, ms | " + " | ".join(f"{step:.1f}" for _, _, step in lengths) + " |\n", flush=True)
    print(stall(client).table())
    if arguments.pictures is not None:
        arguments.pictures.mkdir(parents=True, exist_ok=True)
        precision = arguments.quantization or "bf16"
        draw(arguments.pictures / f"curves-{model.name}-{precision}", requests, lengths)


if __name__ == "__main__":
    main()
