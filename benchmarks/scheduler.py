"""Time of a scheduler step: `schedule` + `update_from_output`, with 256 requests running and many waiting.

    python benchmarks/scheduler.py [--running 256] [--waiting 1000 10000 100000] [--steps 200]

CPU time of one thread, in pure Python. All requests decode; a request that ends is replaced from the queue.
"""

from __future__ import annotations

import argparse
import statistics
import time

from octavo.config import CacheConfig, SchedulerConfig, SchedulingPolicy
from octavo.core.scheduler import Scheduler
from octavo.data.model_output import ModelOutput
from octavo.data.request import Request
from octavo.sampling_params import SamplingParams


def measure(policy: str, num_running: int, num_waiting: int, num_steps: int) -> list[float]:
    """Return the milliseconds of each step."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=num_running, max_num_batched_tokens=8192, policy=SchedulingPolicy(policy)),
        CacheConfig(block_size=16),
        num_blocks=num_running * 64,
        max_model_len=4096,
        clock=time.monotonic,
    )
    for index in range(num_running + num_waiting):
        prompt = [index * 64 + offset for offset in range(32)]
        params = SamplingParams(temperature=0.0, max_tokens=200 + index % 97, ignore_eos=True)
        options = {"priority": index % 5, "tenant": str(index % 50), "arrival_time": index * 1e-3}
        scheduler.add_request(Request(str(index), prompt, params, **options))  # type: ignore[arg-type]
    times = []
    for _ in range(num_steps + 50):
        start = time.thread_time()
        scheduled = scheduler.schedule()
        middle = time.thread_time()
        sampled = {
            request_id: [7]
            for request_id, count in scheduled.num_scheduled_tokens.items()
            if scheduler.requests[request_id].num_computed_tokens + count
            == len(scheduler.requests[request_id].sequence.token_ids)
        }
        result = ModelOutput(scheduled.step, sampled)
        again = time.thread_time()
        scheduler.update_from_output(scheduled, result)
        times.append(1000 * (middle - start + time.thread_time() - again))
    return times[50:]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--policy", nargs="+", default=list(SchedulingPolicy))
    args = parser.parse_args()
    print("| policy | running | waiting | ms a step, median | p99 |\n|---|---|---|---|---|")
    for policy in args.policy:
        for num_waiting in args.waiting:
            times = measure(policy, args.running, num_waiting, args.steps)
            p99 = sorted(times)[int(0.99 * len(times))]
            print(f"| {policy} | {args.running} | {num_waiting} | {statistics.median(times):.2f} | {p99:.2f} |")


if __name__ == "__main__":
    main()
