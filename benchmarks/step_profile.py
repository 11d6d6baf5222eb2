"""Where the time of a step goes, kernel by kernel, beside what the machine reads from memory.

    python benchmarks/step_profile.py                                   # workload A: one request, bf16, int8 and int4
    python benchmarks/step_profile.py --precision int8 --requests 8 --shape qwen3-0.6b

Requests decode for some steps; the engine's recorded forward pass tells what each kernel call takes. Medians over the
steps of the sum of all calls of a kind, in ms. MB: weights read. limit: GB/s over what two threads (or so many as are
asked for) read of a large array just before. "all else" is Python, torch and what lies between two steps.
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
    from octavo.models.layers import CausalLM
    from octavo.worker.model_runner import ModelRunner

PRECISIONS = {"bf16": None, "int8": "int8", "int4": "int4"}
PROMPT_TOKENS = 32
PRODUCTS = ("qkv", "o", "gate_up", "down")  # in the order of a layer
LOGITS = "logits"
_NAMES = {
    "rms_norm": "norms",
    "rope_and_write_kv": "rope and KV writes",
    "paged_attention": "attention",
    "silu_and_mul": "SiLU and product",
}


def open_engine(model: str, precision: str, num_requests: int, num_steps: int, num_threads: int) -> LLM:
    """Load a model with room for the requests."""
    length = PROMPT_TOKENS + num_steps + 8
    return LLM(
        model,
        dtype="bfloat16",
        quantization=PRECISIONS[precision],
        num_threads=num_threads,
        max_model_len=length,
        max_num_seqs=num_requests,
        num_gpu_blocks_override=num_requests * -(-length // 16),
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )


def weights_of(model: CausalLM) -> dict[str, int]:
    """Return bytes of weights by the product that reads them."""
    num_bytes: dict[str, int] = defaultdict(int)
    for layer in model.layers:
        attention, mlp = layer.attention, layer.mlp
        for name, weight in zip(PRODUCTS, (attention.qkv, attention.o, mlp.gate_up, mlp.down), strict=True):
            num_bytes[name] += weight.num_bytes
    return {**num_bytes, LOGITS: model.lm_head.num_bytes}


def parts_of(forward: RecordedForward, num_layers: int) -> list[str]:
    """Return what each call is told as; a layer makes its products in one order."""
    products = iter(PRODUCTS * num_layers)
    parts = [next(products) if name == "linear" else _NAMES.get(name, name) for name, _ in forward.calls]
    if next(products, None) is not None:
        raise SystemExit("products that this script does not know")
    return parts


def profile(llm: LLM, num_requests: int, num_steps: int) -> list[dict[str, float]]:
    """Return seconds of every step in which all requests decode, by part; "step" is all of it."""
    engine = llm.llm_engine
    runner: ModelRunner = engine.core.executor.worker.runner  # type: ignore[attr-defined]
    prompts = [[(7 * i + j) % 1000 + 5 for j in range(PROMPT_TOKENS)] for i in range(num_requests)]
    llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)  # warm
    forward = runner.recorded_forward
    if not isinstance(forward, RecordedForward):
        raise SystemExit("these kernels do not record their forward pass")
    parts, nanoseconds, watch = parts_of(forward, len(runner.model.layers)), forward.measure_calls(), Stopwatch()
    watch.wrap(runner.kernels, "linear", LOGITS)
    watch.wrap(runner.sampler, "sample", "sampling")
    params = SamplingParams(temperature=0.0, max_tokens=num_steps, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    steps = []
    while engine.has_unfinished_requests():
        nanoseconds.zero_()
        watch.lap()
        start = time.perf_counter()
        outputs = engine.step()
        whole = time.perf_counter() - start
        if len(outputs) == num_requests and all(len(each.outputs[0].token_ids) > 1 for each in outputs):
            spent: dict[str, float] = defaultdict(float, watch.lap())
            for part, each in zip(parts, nanoseconds.tolist(), strict=True):
                spent[part] += each / 1e9
            steps.append({**spent, "all else": whole - sum(spent.values()), "step": whole})
    return steps


def report(steps: list[dict[str, float]], weights: dict[str, int], bytes_read: float) -> str:
    """Return the table; bytes_read: a second, by the machine."""
    times = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    lines = ["| part | ms | of the step | MB | GB/s | of the limit |", "|---|---|---|---|---|---|"]
    for name, seconds in sorted(times.items(), key=lambda item: -item[1]):
        cells = [name, f"{1000 * seconds:.3f}", f"{seconds / times['step']:.1%}"]
        if num_bytes := weights.get(name, 0):
            rate = num_bytes / seconds
            cells += [f"{num_bytes / 1e6:.0f}", f"{rate / 1e9:.1f}", f"{rate / bytes_read:.0%}"]
        lines.append("| " + " | ".join(cells + [""] * (6 - len(cells))) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2-0.5b", help="of tools/make_checkpoint.py (default: %(default)s)")
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="default: all three")
    parser.add_argument("--requests", type=int, default=1, help="that decode together (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--num-threads", type=int, default=2, help="default: %(default)s")
    arguments = parser.parse_args()
    model = str(prepare(arguments.shape)[0])
    for precision in arguments.precision or PRECISIONS:
        llm = open_engine(model, precision, arguments.requests, arguments.steps, arguments.num_threads)
        runner: ModelRunner = llm.llm_engine.core.executor.worker.runner  # type: ignore[attr-defined]
        bytes_read = runner.kernels.measure_limits().bytes_read
        steps = profile(llm, arguments.requests, arguments.steps)
        weights = weights_of(runner.model)
        print(f"\n{precision}, {arguments.requests} requests; memory gives {bytes_read / 1e9:.1f} GB/s\n")
        print(report(steps, {**weights, "step": sum(weights.values())}, bytes_read), flush=True)
        llm.llm_engine.shutdown()


if __name__ == "__main__":
    main()
