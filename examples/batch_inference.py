"""Measure sequential, static and continuous batching of the same requests.

    python examples/batch_inference.py --prompts "Once upon a time" "The sun" --max-tokens 24
    python examples/batch_inference.py --num-prompts 16 --max-tokens 64 --compare-sequential
    python examples/batch_inference.py --model PATH --dtype bfloat16 --num-prompts 16 --compare-sequential --rounds 3

Sequential batching computes one request after another. Static batching fills its slots and waits until the longest
request of the batch has ended. Continuous batching gives a slot to the next request as soon as a request ends. "one
pass each" schedules like continuous batching, but computes each request of a step in a forward pass of its own, as if a
model were called in a loop over the requests. All of them run on the same engine and kernels and give the same tokens.
All printed figures are measured in this run. A warm-up run comes first, because an engine's first steps are slower.
With --rounds the ways take turns, and the run with the median time of each is printed. Speculation is off: it would
learn the answers from one way and guess them in the next one. Output lengths of random prompts vary between a quarter
of --max-tokens and --max-tokens; with --prompts the model ends its answers.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo import CacheConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig, SpeculativeConfig
from octavo.data.events import Event, RequestFinished, RequestPreempted, StepScheduled
from octavo.data.model_output import ModelOutput
from octavo.data.scheduler_output import BlockCopies, CachedRequestData

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from octavo import RequestOutput
    from octavo.data.scheduler_output import SchedulerOutput
    from octavo.engine.executor import Executor

    Job = tuple[str | dict[str, list[int]], SamplingParams]


@dataclass
class Measured:
    """The measurements of one way of batching."""

    name: str
    num_slots: int
    seconds: float = 0.0
    num_steps: int = 0
    num_passes: int = 0
    num_output_tokens: int = 0
    busy_slot_steps: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    def row(self, baseline: Measured) -> str:
        """Return one line of the table; the speed-up is relative to the baseline."""
        occupancy = self.busy_slot_steps / max(self.num_slots * self.num_steps, 1)
        prefill = self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0
        decode = self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0
        return (
            f"{self.name:<14}{self.seconds:>8.2f}{self.num_output_tokens:>8}"
            f"{self.num_output_tokens / self.seconds:>10.1f}{self.num_steps:>8}{self.num_passes:>8}{occupancy:>10.1%}"
            f"{prefill:>12.1f}{decode:>12.1f}{baseline.seconds / self.seconds:>9.2f}x"
        )


class StepWatch:
    """Reads the engine's events. Keeps the last step, and the step in which most KV slots were used."""

    def __init__(self) -> None:
        self.last: StepScheduled | None = None
        self.num_used_slots = 0
        self.fullest: StepScheduled | None = None
        self._slots: dict[str, int] = {}  # by running request: slots written, including this step's

    def reset(self) -> None:
        """Forget all steps so far."""
        self.last = self.fullest = None
        self.num_used_slots = 0
        self._slots.clear()

    def emit(self, event: Event) -> None:
        """Update the last step and the fullest step."""
        if isinstance(event, (RequestFinished, RequestPreempted)):
            self._slots.pop(event.request_id, None)
        elif isinstance(event, StepScheduled):
            self.last = event
            for request_id, count in event.num_scheduled_tokens.items():
                self._slots[request_id] = self._slots.get(request_id, 0) + count
            if sum(self._slots.values()) > self.num_used_slots:
                self.num_used_slots = sum(self._slots.values())
                self.fullest = event


class CountedPasses:
    """An executor that counts forward passes: one per step."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.num_passes = 0
        self.results: list[ModelOutput] = []
        self.prepare, self.shutdown = executor.prepare, executor.shutdown

    def submit(self, scheduled: SchedulerOutput) -> None:
        """Compute a step, part by part."""
        self.results = []
        for part in self.parts(scheduled):
            self.num_passes += bool(part.num_scheduled_tokens)
            self.executor.submit(part)
            self.results.append(self.executor.collect())

    def parts(self, scheduled: SchedulerOutput) -> Iterator[SchedulerOutput]:
        """Yield the parts of a step that are computed in one forward pass each: here the whole step."""
        yield scheduled

    def abandon(self) -> None:
        """Abandon all submitted steps."""
        self.executor.abandon()

    def collect(self) -> ModelOutput:
        """Return the step's result."""
        sampled = {id_: tokens for result in self.results for id_, tokens in result.sampled_token_ids.items()}
        errors = {id_: error for result in self.results for id_, error in result.errors.items()}
        return ModelOutput(self.results[0].step, sampled, errors=errors)


class OnePassEach(CountedPasses):
    """Gives each request of a step a forward pass of its own."""

    def parts(self, scheduled: SchedulerOutput) -> Iterator[SchedulerOutput]:
        """Yield a part for each request. The first part has all updates for the worker."""
        part = scheduled
        for request_id, count in scheduled.num_scheduled_tokens.items():
            yield replace(part, num_scheduled_tokens={request_id: count}, total_num_scheduled_tokens=count)
            part = replace(
                scheduled,
                scheduled_new_reqs=[],
                scheduled_cached_reqs=CachedRequestData.make_empty(),
                finished_req_ids=set(),
                preempted_req_ids=set(),
                copies=BlockCopies(),
            )
        if not scheduled.num_scheduled_tokens:
            yield scheduled


def drive(engine: LLMEngine, watch: StepWatch, batches: Iterable[list[Job]], measured: Measured) -> list[RequestOutput]:
    """Send each batch after the one before it has ended; measure every step. Return the last outputs in order."""
    outputs: dict[int, RequestOutput] = {}
    count = 0
    start = time.perf_counter()
    for batch in batches:
        for prompt, params in batch:
            engine.add_request(str(count), prompt, params)
            count += 1
        while engine.has_unfinished_requests():
            step_start = time.perf_counter()
            for output in engine.step():
                outputs[int(output.request_id)] = output
            record(measured, watch, time.perf_counter() - step_start)
    measured.seconds = time.perf_counter() - start
    measured.num_output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs.values())
    return [outputs[index] for index in range(count)]


def record(measured: Measured, watch: StepWatch, seconds: float) -> None:
    """Add a step to the measurements: as decode if each of its requests computed one token, otherwise as prefill."""
    step, watch.last = watch.last, None
    if step is None:  # nothing was computed: the step only told the worker which requests have ended
        return
    measured.num_steps += 1
    measured.busy_slot_steps += len(step.num_scheduled_tokens)
    if step.num_tokens == len(step.num_scheduled_tokens):
        measured.decode_tokens += step.num_tokens
        measured.decode_seconds += seconds
    else:
        measured.prefill_tokens += step.num_tokens
        measured.prefill_seconds += seconds


def make_jobs(arguments: argparse.Namespace, vocab_size: int) -> list[Job]:
    """Return the prompts of --prompts, or random ones of 16 to 128 tokens that depend only on --seed."""
    rng = random.Random(arguments.seed)
    jobs: list[Job] = []
    for text in arguments.prompts or []:
        params = SamplingParams(
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            seed=rng.randrange(2**32),
        )
        jobs.append((text, params))
    if jobs:
        return jobs
    for _ in range(arguments.num_prompts):
        prompt = [rng.randrange(min(300, vocab_size // 2), vocab_size) for _ in range(rng.randint(16, 128))]
        params = SamplingParams(
            max_tokens=rng.randint(max(arguments.max_tokens // 4, 1), arguments.max_tokens),
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            seed=rng.randrange(2**32),
            ignore_eos=True,
        )
        jobs.append(({"prompt_token_ids": prompt}, params))
    return jobs


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or hub id (default: the built-in model)")
    parser.add_argument("--prompts", nargs="+", metavar="TEXT", help="answer these, and print what they become")
    parser.add_argument("--num-prompts", type=int, default=16, help="random prompts, where no --prompts are given")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--device", default=None, help="cpu or cuda (default: the best there is)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--max-num-seqs", type=int, default=16, help="slots of the batch")
    parser.add_argument("--max-num-batched-tokens", type=int, default=None, help="token budget of a step")
    parser.add_argument("--compare-sequential", action="store_true", help="run the other ways as well")
    parser.add_argument(
        "--rounds", type=int, default=1, help="measure each way so often, in turns; print the median run"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def print_kv_slots(watch: StepWatch, engine: LLMEngine, outputs: list[RequestOutput], jobs: list[Job]) -> None:
    """Print the KV slots of the fullest step, and how many it would need if each request reserved the longest length.

    A slot has room for the keys and values of one token.
    """
    if watch.fullest is None:
        return
    manager = engine.core.scheduler.kv_cache_manager
    num_blocks = round(watch.fullest.kv_cache_usage * manager.pool.num_blocks)
    longest = max(
        len(output.prompt_token_ids) + params.max_tokens for output, (_, params) in zip(outputs, jobs, strict=True)
    )
    print(
        f"KV slots in the fullest step ({watch.fullest.num_running} requests): {watch.num_used_slots} used, "
        f"{num_blocks * manager.block_size} held in blocks of {manager.block_size}, "
        f"{watch.fullest.num_running * longest} if each reserved what the longest may need"
    )


def main() -> None:
    """Build one engine, run the same requests in every way, check that the tokens are equal, print the table."""
    arguments = parse_arguments()
    slots = arguments.max_num_seqs
    watch = StepWatch()
    engine = LLMEngine(
        ModelConfig(model=arguments.model, dtype=arguments.dtype, seed=arguments.seed, max_model_len=None),
        cache_config=CacheConfig(enable_prefix_caching=False),
        scheduler_config=SchedulerConfig(
            max_num_seqs=slots,
            max_num_batched_tokens=arguments.max_num_batched_tokens,
            async_scheduling=False,  # each step is timed alone, and may be divided
            mixed_step_ms=0.0,  # latency does not matter here, and steps must not depend on the machine's speed
        ),
        device=arguments.device,
        speculative_config=SpeculativeConfig(method="none"),
        sink=watch,
    )
    jobs = make_jobs(arguments, engine.input_processor.model_info.vocab_size)
    executor = engine.core.executor
    ways = {"continuous": (slots, [jobs], CountedPasses(executor))}
    if arguments.compare_sequential:
        static = [jobs[start : start + slots] for start in range(0, len(jobs), slots)]
        ways = {
            "sequential": (1, [[job] for job in jobs], CountedPasses(executor)),
            "one pass each": (slots, [jobs], OnePassEach(executor)),
            "static": (slots, static, CountedPasses(executor)),
        } | ways
    header = ("seconds", "tokens", "tok/s", "steps", "passes", "busy", "prefill/s", "decode/s", "speed-up")
    widths = (8, 8, 10, 8, 8, 10, 12, 12, 10)
    print(f"{'':<14}" + "".join(f"{name:>{width}}" for name, width in zip(header, widths, strict=True)))
    outputs = drive(engine, watch, [jobs], Measured("not counted", slots))
    expected = [output.outputs[0].token_ids for output in outputs]
    watch.reset()
    runs: dict[str, list[Measured]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, (num_slots, batches, passes) in ways.items():
            measured = Measured(name, num_slots)
            engine.core.executor, passes.num_passes = passes, 0
            outputs = drive(engine, watch, batches, measured)
            measured.num_passes = passes.num_passes
            if [output.outputs[0].token_ids for output in outputs] != expected:
                raise SystemExit(f"{name} batching gave other tokens than the run that is not counted")
            runs[name].append(measured)
    medians = [sorted(each, key=lambda run: run.seconds)[len(each) // 2] for each in runs.values()]
    for measured in medians:
        print(measured.row(medians[0]))
    print("busy: slot-steps with a request in them; prefill/s: tokens of steps that held a prompt, per second of those")
    print_kv_slots(watch, engine, outputs, jobs)
    for output in outputs if arguments.prompts else []:
        print(f"req-{output.request_id}: {output.prompt} -> {output.outputs[0].text}")


if __name__ == "__main__":
    main()
