"""Time of an engine step without its kernels: real steps in which the compiled kernels do nothing.

    python benchmarks/step_overhead.py                           # qwen3-0.6b: 28 layers; 1, 8, 64 and 256 requests
    python benchmarks/step_overhead.py --shape qwen2-0.5b --requests 1 64 --steps 500

The engine is that of `LLM`, with its recorded forward pass. After the warm-up, each call into the compiled module
returns immediately (the sampling kernel writes token 0), so KV and logits are never touched. Every request decodes. The
columns are medians of single steps in ms, CPU time and waiting together:

schedule       Scheduler.schedule
prepare        rows of the batch updated, and the ragged inputs gathered
dispatch       the forward pass and the logits: Python, torch and the bindings around the kernels
sample+commit  parameters of the sampled rows, tokens read back, and Scheduler.update_from_output
rest           converting tokens to the outputs that `step` returns, and the code between these parts
step           the whole step
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from workloads import prepare

from octavo import LLM, SamplingParams, _kernels

if TYPE_CHECKING:
    from collections.abc import Callable

COLUMNS = ("schedule", "prepare", "dispatch", "sample+commit", "rest", "step")
PROMPT_TOKENS = 16
_TOKEN_BYTES = 8


class IdleKernels:
    """Wraps the compiled module's `KernelSet`. With `is_idle` set, its calls do nothing."""

    def __init__(self, kernel_set: Any) -> None:
        self._set = kernel_set
        self.is_idle = False

    def __getattr__(self, name: str) -> Any:
        """Return the kernel with a name, or an idle function instead of it."""
        return _nothing if self.is_idle else getattr(self._set, name)

    def sample(self, *arguments: int) -> None:
        """Sample; if idle, write token 0 for every row."""
        if not self.is_idle:
            self._set.sample(*arguments)
            return
        num_rows, out = arguments[1], arguments[-1]
        ctypes.memset(out, 0, num_rows * _TOKEN_BYTES)


def _nothing(*arguments: object) -> None:
    del arguments


class Stopwatch:
    """Seconds of wrapped calls by name since the last `lap`. A nested call does not count for the outer one."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner = 0.0  # seconds of ended wrapped calls nested in the current one

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Replace a method of an object by one that measures its time under a name."""
        call: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - start
                self.seconds[name] += seconds - self._inner
                self._inner = outer + seconds

        setattr(owner, method, timed)

    def lap(self) -> dict[str, float]:
        """Return the seconds so far, and reset them."""
        found = dict(self.seconds)
        self.seconds.clear()
        return found


def open_engine(model: str, num_requests: int, num_steps: int) -> tuple[LLM, IdleKernels]:
    """Load a model with room for the requests, and warm it up."""
    made: list[IdleKernels] = []
    real = _kernels.KernelSet

    def make(*arguments: Any) -> IdleKernels:
        made.append(IdleKernels(real(*arguments)))
        return made[-1]

    _kernels.KernelSet = make
    try:
        length = PROMPT_TOKENS + num_steps + num_requests
        llm = LLM(
            model,
            dtype="bfloat16",
            max_model_len=length,
            max_num_seqs=num_requests,
            num_gpu_blocks_override=num_requests * -(-length // 16),
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            speculative_config={"method": "none"},  # a step gives each request one token
        )
    finally:
        _kernels.KernelSet = real
    llm.generate([[1] * PROMPT_TOKENS], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    return llm, made[0]


def measure(llm: LLM, kernels: IdleKernels, watch: Stopwatch, num_requests: int, num_steps: int) -> dict[str, float]:
    """Return the median milliseconds of every column over steps in which all requests decode."""
    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=num_steps + num_requests, ignore_eos=True, detokenize=False)
    names = [f"{num_requests}-{i}" for i in range(num_requests)]
    kernels.is_idle = True
    for name in names:
        engine.add_request(name, {"prompt_token_ids": [1] * PROMPT_TOKENS}, params)
    steps = []
    while len(steps) < num_steps:
        watch.lap()
        start = time.perf_counter()
        outputs = engine.step()
        whole = time.perf_counter() - start
        if any(output.error is not None for output in outputs):
            raise RuntimeError(outputs[0].error)
        if len(outputs) == num_requests and all(len(each.outputs[0].token_ids) > 1 for each in outputs):
            parts = watch.lap()
            steps.append({**parts, "rest": whole - sum(parts.values()), "step": whole})
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    kernels.is_idle = False
    return {name: 1000 * statistics.median(step[name] for step in steps) for name in COLUMNS}


def watched(llm: LLM) -> Stopwatch:
    """Return a stopwatch on the parts of a step."""
    core, watch = llm.llm_engine.core, Stopwatch()
    runner = core.executor.worker.runner
    watch.wrap(core.scheduler, "schedule", "schedule")
    watch.wrap(runner.batch, "update", "prepare")
    watch.wrap(runner.batch, "prepare_inputs", "prepare")
    watch.wrap(runner, "forward", "dispatch")
    watch.wrap(runner.kernels, "linear", "dispatch")  # the logits; products of layers are recorded
    watch.wrap(runner, "sample", "sample+commit")
    watch.wrap(runner, "collect", "sample+commit")
    watch.wrap(core.scheduler, "update_from_output", "sample+commit")
    return watch


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b", help="of tools/make_checkpoint.py (default: %(default)s)")
    parser.add_argument("--model", help="a checkpoint directory (default: that of the shape, made if missing)")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64, 256], help="default: 1 8 64 256")
    parser.add_argument("--steps", type=int, default=200, help="of each number of requests (default: %(default)s)")
    arguments = parser.parse_args()
    model = arguments.model or str(prepare(arguments.shape)[0])
    llm, kernels = open_engine(model, max(arguments.requests), arguments.steps)
    watch = watched(llm)
    print("| requests | " + " | ".join(f"{name}, ms" for name in COLUMNS) + " |\n" + "|---" * (len(COLUMNS) + 1) + "|")
    for num_requests in arguments.requests:
        found = measure(llm, kernels, watch, num_requests, arguments.steps)
        cells = [str(num_requests), *(f"{found[name]:.3f}" for name in COLUMNS)]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
