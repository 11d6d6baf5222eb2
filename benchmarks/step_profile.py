"""Time of a step by kernel, compared with the machine's memory bandwidth and arithmetic.

    python benchmarks/step_profile.py                                   # workload A: one request, bf16, int8 and int4
    python benchmarks/step_profile.py --precision int8 --requests 8 --shape qwen3-0.6b
    python benchmarks/step_profile.py --prompt 1024                     # workload C: a prompt, computed in one step

The engine's recorded forward pass reports the time of each kernel call. The table has medians over the steps of the sum
of all calls of a kind, in ms. For decodes it shows the MB of weights, and their GB/s relative to reading a large array
with the same threads just before. For prompts it shows the GFLOP of products, and their rate relative to arithmetic
alone. "all else" is Python, torch and the time between two steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from typing import TYPE_CHECKING

from step_overhead import Stopwatch
from workloads import prepare

from octavo import LLM, SamplingParams
from octavo.kernels.recording import RecordedForward

if TYPE_CHECKING:
    from octavo.kernels.interface import PackedLinear
    from octavo.models.layers import CausalLM
    from octavo.worker.model_runner import ModelRunner

PRECISIONS = {"bf16": None, "int8": "int8", "int4": "int4", "int4_all": "int4_all"}
DEFAULT_PRECISIONS = ("bf16", "int8", "int4")
PROMPT_TOKENS = 32
PRODUCTS = ("qkv", "o", "gate_up", "down")  # in the order of a layer
LOGITS = "logits"
_NAMES = {
    "rms_norm": "norms",
    "take_rows": "output rows",
    "rope_and_write_kv": "rope and KV writes",
    "paged_attention": "attention",
    "gate": "activation and product",
}


def open_engine(model: str, precision: str, num_requests: int, num_tokens: int, num_threads: int) -> LLM:
    """Load a model with room for `num_requests` requests of `num_tokens` tokens."""
    return LLM(
        model,
        dtype="bfloat16",
        quantization=PRECISIONS[precision],
        num_threads=num_threads,
        max_model_len=num_tokens,
        max_num_seqs=num_requests,
        max_num_batched_tokens=max(num_tokens, num_requests * PROMPT_TOKENS, 512),
        num_gpu_blocks_override=num_requests * -(-num_tokens // 16),
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )


def products_of(model: CausalLM) -> dict[str, list[PackedLinear]]:
    """Return the weights by product."""
    layers = [(each.attention.qkv, each.attention.o, each.mlp.gate_up, each.mlp.down) for each in model.layers]
    return {**dict(zip(PRODUCTS, map(list, zip(*layers, strict=True)), strict=True)), LOGITS: [model.lm_head]}


def parts_of(forward: RecordedForward, num_layers: int) -> list[str]:
    """Return the name of the part to which each call belongs; a layer computes its products in a fixed order."""
    products = iter(PRODUCTS * num_layers)
    parts = [next(products) if name == "linear" else _NAMES.get(name, name) for name in forward.calls]
    if next(products, None) is not None:
        raise SystemExit("products that this script does not know")
    return parts


class StepProfile:
    """An engine with steps that are measured part by part."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.llm_engine
        self.runner: ModelRunner = self._engine.core.executor.worker.runner  # type: ignore[attr-defined]
        llm.generate([[1] * 4], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)  # warm
        forward = self.runner.forward_pass.recorded
        if not isinstance(forward, RecordedForward):
            raise SystemExit("these kernels do not record their forward pass")
        self._parts = parts_of(forward, len(self.runner.model.layers))
        self._nanoseconds, self._watch = forward.measure_calls(), Stopwatch()
        self._watch.wrap(self.runner.kernels, "linear", LOGITS)
        self._watch.wrap(self.runner.sampler, "choose", "sampling")

    def decode(self, num_requests: int, num_steps: int) -> list[dict[str, float]]:
        """Measure steps in which all of `num_requests` requests decode; return seconds by part for each."""
        self._add(num_requests, PROMPT_TOKENS, num_steps + 1)
        steps = [self._step() for _ in range(num_steps + 1)]
        self._forget()
        return steps[1:]

    def prefill(self, num_tokens: int, num_steps: int) -> list[dict[str, float]]:
        """Measure steps that compute one prompt and its first token each; return seconds by part for each."""
        steps = []
        for _ in range(num_steps):
            self._add(1, num_tokens, 1)
            steps.append(self._step())
            self._forget()
        return steps

    def _forget(self) -> None:
        """Run a step that notifies the worker of the ended requests."""
        while self._engine.has_unfinished_requests():
            if self._engine.step():
                raise SystemExit("a prompt or an answer took more steps than it should")

    def _add(self, num_requests: int, num_tokens: int, max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        for i in range(num_requests):
            prompt = [(7 * i + j) % 1000 + 5 for j in range(num_tokens)]
            self._engine.add_request(str(i), {"prompt_token_ids": prompt}, params)

    def _step(self) -> dict[str, float]:
        """Run a step; return its seconds by part. "step" is the whole step."""
        self._nanoseconds.zero_()
        self._watch.lap()
        start = time.perf_counter()
        self._engine.step()
        whole = time.perf_counter() - start
        spent: dict[str, float] = defaultdict(float, self._watch.lap())
        for part, each in zip(self._parts, self._nanoseconds.tolist(), strict=True):
            spent[part] += each / 1e9
        return {**spent, "all else": whole - sum(spent.values()), "step": whole}


def report(steps: list[dict[str, float]], amounts: dict[str, float], limit: float, what: tuple[str, str]) -> str:
    """Return the table. amounts: bytes or operations of a part; limit: the maximum per second; what: both units."""
    times = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    lines = [f"| part | ms | of the step | {what[0]} | {what[1]} | of the limit |", "|---|---|---|---|---|---|"]
    for name, seconds in sorted(times.items(), key=lambda item: -item[1]):
        cells = [name, f"{1000 * seconds:.3f}", f"{seconds / times['step']:.1%}"]
        if amount := amounts.get(name, 0):
            rate = amount / seconds
            scale = 1e6 if what[0] == "MB" else 1e9
            cells += [f"{amount / scale:.0f}", f"{rate / 1e9:.1f}", f"{rate / limit:.0%}"]
        lines.append("| " + " | ".join(cells + [""] * (6 - len(cells))) + " |")
    return "\n".join(lines)


def bytes_read(products: dict[str, list[PackedLinear]]) -> dict[str, float]:
    """Return the bytes of weights that each product reads, and all of them."""
    amounts = {name: float(sum(each.num_bytes for each in weights)) for name, weights in products.items()}
    return {**amounts, "step": sum(amounts.values())}


def operations(products: dict[str, list[PackedLinear]], num_rows: int) -> dict[str, float]:
    """Return the operations of each product for a prompt of `num_rows` rows, and their sum.

    Only one row is sampled. It alone needs logits, and the last layer's computations after keys and values.
    """
    amounts = {}
    for name, weights in products.items():
        rows = [num_rows] * len(weights)
        if name != PRODUCTS[0]:
            rows[-1] = 1
        sizes = (each.in_features * each.out_features for each in weights)
        amounts[name] = 2.0 * sum(size * count for size, count in zip(sizes, rows, strict=True))
    return {**amounts, "step": sum(amounts.values())}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2-0.5b", help="of tools/make_checkpoint.py (default: %(default)s)")
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="default: bf16, int8 and int4")
    parser.add_argument("--requests", type=int, default=1, help="that decode together (default: %(default)s)")
    parser.add_argument("--prompt", type=int, help="compute prompts of so many tokens (default: decode)")
    parser.add_argument("--steps", type=int, help="default: 128, or 10 prompts")
    parser.add_argument("--num-threads", type=int, default=2, help="default: %(default)s")
    arguments = parser.parse_args()
    if arguments.prompt and arguments.requests != 1:
        parser.error("--prompt computes one prompt at a time; it takes no --requests")
    model = str(prepare(arguments.shape)[0])
    for precision in arguments.precision or DEFAULT_PRECISIONS:
        num_steps = arguments.steps or (10 if arguments.prompt else 128)
        num_tokens = (arguments.prompt or PROMPT_TOKENS + num_steps) + 8
        llm = open_engine(model, precision, arguments.requests, num_tokens, arguments.num_threads)
        profile = StepProfile(llm)
        limits, products = profile.runner.kernels.measure_limits(), products_of(profile.runner.model)
        if arguments.prompt:
            steps = profile.prefill(arguments.prompt, num_steps)
            limit = limits.bfloat16_flops if precision == "bf16" else limits.byte_ops
            title = f"a prompt of {arguments.prompt} tokens; {limit / 1e9:.0f} GFLOP/s of arithmetic alone"
            table = report(steps, operations(products, arguments.prompt), limit, ("GFLOP", "GFLOP/s"))
        else:
            steps = profile.decode(arguments.requests, num_steps)
            title = f"{arguments.requests} requests; memory gives {limits.bytes_read / 1e9:.1f} GB/s"
            table = report(steps, bytes_read(products), limits.bytes_read, ("MB", "GB/s"))
        print(f"\n{precision}, {title}\n\n{table}", flush=True)
        llm.llm_engine.shutdown()


if __name__ == "__main__":
    main()
