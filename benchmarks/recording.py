"""The cost of --record: CPU time in the recorder relative to that of the steps, in one run; bytes per request.

python benchmarks/recording.py [--requests 1000] [--model PATH]
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

from octavo import CacheConfig, ModelConfig, SamplingParams, SchedulerConfig
from octavo.build import build_engine
from octavo.config import EngineConfig
from octavo.journal.recorder import RecordingScheduler
from octavo.journal.replay import replay


def main() -> None:
    """Run the benchmark and print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--model", help="default: the built-in model, whose steps are as short as they get")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.journal"
        engine = build_engine(
            EngineConfig(
                model=ModelConfig(model=args.model, skip_tokenizer_init=True),
                cache=CacheConfig(num_gpu_blocks=44),
                scheduler=SchedulerConfig(max_num_seqs=32),
                record=path,
            )
        )
        recorder = engine.core.scheduler
        assert isinstance(recorder, RecordingScheduler)
        rng = random.Random(0)
        sent, seconds = 0, 0.0
        while sent < args.requests or engine.has_unfinished_requests():
            while sent < args.requests and recorder.get_request_counts()[1] < 4:
                prompt = [rng.randrange(10, 1000) for _ in range(rng.randint(8, 200))]
                params = SamplingParams(max_tokens=rng.randint(8, 64), ignore_eos=True, temperature=1.0)
                start = time.process_time()
                engine.add_request(str(sent), {"prompt_token_ids": prompt}, params)
                seconds += time.process_time() - start
                sent += 1
            if rng.random() < 0.02:
                engine.abort_request(str(rng.randrange(sent)))
            start = time.process_time()
            engine.step()
            seconds += time.process_time() - start
        recorder.close()
        size, spent = path.stat().st_size, recorder.seconds
        stats, done = engine.core.metrics.stats, replay(path)
    print(
        f"{sent} requests, {stats.num_steps} steps, {stats.num_preemptions} preemptions: recording took "
        f"{100 * spent / seconds:.2f} % of {seconds:.1f} s of CPU; {size / sent:.0f} bytes a request; "
        f"{len(done.mismatches)} of {done.num_steps} replayed steps decided differently"
    )


if __name__ == "__main__":
    main()
