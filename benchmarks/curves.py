"""Speed by number of requests, prompt length and KV length; the effect of a long prompt on other requests.

    python benchmarks/curves.py --quantization int8              # qwen2-0.5b: about twelve minutes
    python benchmarks/curves.py --model ./my-checkpoint --pictures docs

Every figure is the median of --rounds rounds after a warm-up. Each round measures all figures, so a slow moment of the
machine affects only one round of a figure. Only the times between tokens during a long prompt are pooled over all
rounds. Nothing is cached between requests.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comparison.report import folder_of_pictures, save_picture
from workloads import prepare

from octavo import LLM, SamplingParams
from octavo.config import QUANTIZATIONS

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
        self._vocab_size = engine.input_processor.model_info.vocab_size

    def add(self, prompt_length: int, output_length: int) -> str:
        """Add a request with a beginning that no other request has."""
        self._count += 1
        ids = (1000 + self._count, *(300 + (7 * i + self._count) % 30_000 for i in range(prompt_length - 1)))
        prompt = [token_id % self._vocab_size for token_id in ids]
        params = SamplingParams(temperature=0.0, max_tokens=output_length, ignore_eos=True, detokenize=False)
        name = str(self._count)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        self.times[name] = []
        return name

    def step(self) -> bool:
        """Run one step; return True if requests are unfinished."""
        for output in self.engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            new = len(output.outputs[0].token_ids) - len(self.times[output.request_id])
            self.times[output.request_id] += [time.perf_counter()] * new
        return self.engine.has_unfinished_requests()

    def run(self) -> None:
        """Step until all requests have ended."""
        while self.step():
            pass


@dataclass(frozen=True, slots=True)
class Curve:
    """One figure at several values of x, with the results of all rounds."""

    title: str
    across: str  # the name of x
    places: Sequence[int]
    rounds: Sequence[Sequence[float]]  # one figure for each x

    def row(self, digits: int) -> str:
        """Return the medians and, if there are several rounds, the least and the greatest as rows of a table."""
        columns = list(zip(*self.rounds, strict=True))
        rows = [[self.title, *(f"{statistics.median(column):.{digits}f}" for column in columns)]]
        if len(self.rounds) > 1:
            spread = (f"{min(column):.{digits}f} to {max(column):.{digits}f}" for column in columns)
            rows.append(["least to greatest", *spread])
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)

    def head(self) -> str:
        """Return the head of a table that has `row`."""
        cells = (self.across, *map(str, self.places))
        return "| " + " | ".join(cells) + " |\n|" + "---|" * len(cells)

    def draw(self, axis: Any) -> None:
        """Draw the medians as a line, in a band from the minimum to the maximum."""
        columns = list(zip(*self.rounds, strict=True))
        axis.fill_between(self.places, [min(c) for c in columns], [max(c) for c in columns], alpha=0.2, linewidth=0)
        axis.plot(self.places, [statistics.median(column) for column in columns], marker="o")
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_title(self.title)
        axis.set_xlabel(self.across)
        axis.grid(alpha=0.3)


def by_requests(client: Client) -> list[float]:
    """Return tokens/s while all requests decode after prompts of 32 tokens, for each number in `REQUESTS`."""
    rates = []
    for count in REQUESTS:
        # two prompts of 32 fill the least share of prompts in a step: the last one starts up to `count / 2` steps later
        names = [client.add(32, OUTPUT_TOKENS + count // 2) for _ in range(count)]
        client.run()
        start, end = (edge(client.times[name][i] for name in names) for edge, i in ((max, 0), (min, -1)))
        tokens = sum(start < moment <= end for name in names for moment in client.times[name])
        rates.append(tokens / (end - start))
    return rates


def by_length(client: Client) -> tuple[list[float], list[float]]:
    """Return tokens/s of prompts of `LENGTHS`, and milliseconds of a decode step after each, without other requests."""
    rates, steps = [], []
    for length in LENGTHS:
        start = time.perf_counter()
        name = client.add(length, 17)
        client.run()
        times = client.times[name]
        rates.append(length / (times[0] - start))
        steps.append(1000 * (times[-1] - times[0]) / (len(times) - 1))
    return rates, steps


@dataclass(frozen=True, slots=True)
class Stall:
    """Milliseconds between tokens of streams: before a long prompt arrived (median), and while it was computed."""

    before: float
    median: float
    p99: float
    most: float

    @classmethod
    def of(cls, before: Sequence[float], meanwhile: Sequence[float]) -> Stall:
        """Summarize the times between consecutive tokens."""
        quantiles = statistics.quantiles(meanwhile, n=100)
        return cls(statistics.median(before), quantiles[49], quantiles[98], max(meanwhile))

    def table(self) -> str:
        """Return a Markdown table, with the medians during the prompt and before it."""
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


def stall(client: Client) -> tuple[list[float], list[float]]:
    """Run 8 streams, and add a prompt of 8,192 tokens.

    Returns milliseconds between the streams' tokens before the prompt arrived, and while it was computed.
    """
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
    return before, meanwhile


def gaps(times: Iterable[list[float]]) -> list[float]:
    """Return milliseconds between consecutive times of each list."""
    return [1000 * (b - a) for each in times for a, b in itertools.pairwise(each)]


def draw(target: Path, curves: Sequence[Curve]) -> None:
    """Write the curves to `target` with the endings .png and .svg."""
    import matplotlib as mpl  # noqa: PLC0415 - heavy, and the tables need none of it

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    mpl.rcParams["svg.hashsalt"] = "octavo"
    grid, axes = plt.subplots(1, len(curves), figsize=(12, 3.4), constrained_layout=True)
    for axis, curve in zip(axes, curves, strict=True):
        curve.draw(axis)
    save_picture(grid, target)


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint directory (default: qwen2-0.5b, made if missing)")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="of the weights (default: as stored)")
    parser.add_argument("--rounds", type=int, default=3, help="of every figure (default: %(default)s)")
    parser.add_argument(
        "--pictures", type=folder_of_pictures, help="folder for plots, PNG and SVG; needs matplotlib (default: none)"
    )
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds: at least 1")
    model = arguments.model or prepare("qwen2-0.5b")[0]
    llm = LLM(
        str(model),
        dtype="bfloat16",
        quantization=arguments.quantization,
        max_model_len=LONG_PROMPT + 1024,
        max_num_seqs=max(REQUESTS),
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        is_offline=False,  # the tokens of a step, and the share of prompts in it: as a server
        mixed_step_ms=None,
    )
    client = Client(llm.llm_engine)
    client.add(512, 8)
    client.run()  # the first steps are slow
    requests, lengths, stalls = [], [], []
    for number in range(1, arguments.rounds + 1):
        requests.append(by_requests(client))
        lengths.append(by_length(client))
        stalls.append(stall(client))
        print(f"round {number} of {arguments.rounds} is done", file=sys.stderr, flush=True)
    prefill, steps = zip(*lengths, strict=True)
    curves = (
        Curve("decode tokens/s", "requests", REQUESTS, requests),
        Curve("prefill tokens/s", "tokens of the prompt", LENGTHS, prefill),
        Curve("decode step, ms", "tokens of KV", LENGTHS, steps),
    )
    for curve, digits in zip(curves, (0, 0, 1), strict=True):
        print(curve.head(), curve.row(digits), "", sep="\n", flush=True)
    before, meanwhile = (list(itertools.chain(*parts)) for parts in zip(*stalls, strict=True))
    print(Stall.of(before, meanwhile).table())
    if arguments.pictures is not None:
        arguments.pictures.mkdir(parents=True, exist_ok=True)
        draw(arguments.pictures / f"curves-{model.name}-{arguments.quantization or 'bf16'}", curves)


if __name__ == "__main__":
    main()
