"""Drive the engine by hand and print the seven stages of every step, to show how it works.

python examples/step_by_step.py
python examples/step_by_step.py --prompt "What is 12 + 30?" --prompt "Sort these words: pear, apple" --steps 6
"""

from __future__ import annotations

import argparse

import torch

from octavo import CacheConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig
from octavo.data.model_output import ModelOutput
from octavo.worker.launched_step import LaunchedStep
from octavo.worker.local_executor import LocalExecutor

PROMPTS = ["What is 12 + 30?", "Sort these words: pear, apple, fig"]


@torch.inference_mode()
def show_step(engine: LLMEngine, runner) -> None:  # noqa: ANN001 - worker.model_runner.ModelRunner
    """Do the work of `EngineCore.step` and `Engine.step`, one stage at a time."""
    scheduler = engine.core.scheduler

    scheduled = scheduler.schedule()
    print(f"step {scheduled.step}")
    print(f"  1 schedule    {scheduled.num_scheduled_tokens} = {scheduled.total_num_scheduled_tokens} tokens")
    for data in scheduled.scheduled_new_reqs:
        print(f"                new {data.request_id}: {len(data.token_ids)} tokens, blocks {data.block_ids}")

    runner.batch.update(scheduled)
    if not scheduled.num_scheduled_tokens:
        print("                nothing to compute: the worker only hears who has ended")
        scheduler.update_from_output(scheduled, ModelOutput(scheduled.step, {}))
        return
    inputs = runner.batch.prepare_inputs(scheduled)
    print(f"  2 inputs      token ids {inputs.token_ids.tolist()}")
    print(f"                positions {inputs.attention.positions.tolist()}")
    print(f"                slots     {inputs.attention.slot_mapping.tolist()}")
    print(f"                sequence lengths {inputs.attention.seq_lens.tolist()}")

    hidden = runner.forward(inputs)
    print(f"  3 execute     one forward for all: hidden states {list(hidden.shape)}, KV written to the slots")

    step = LaunchedStep(scheduled, tuple, inputs=inputs, num_changes=runner.batch.num_changes)
    runner.sample(step, inputs, hidden)
    step.end = runner.copies.mark()
    result = runner.collect(step)
    print(f"  4 sample      {result.sampled_token_ids}")

    core_outputs = scheduler.update_from_output(scheduled, result)
    for request in scheduler.running:
        print(f"  5 update      {request}")

    for output in engine.output_processor.process(core_outputs).request_outputs:
        ended = f" ({output.outputs[0].finish_reason})" if output.finished else ""
        print(f"  6 detokenize  {output.request_id}: {output.outputs[0].text!r}{ended}")

    pool = scheduler.kv_cache_manager.pool
    print(f"  7 free        {pool.num_free_blocks} of {pool.num_blocks} blocks free, {pool.num_cached_blocks} cached")


def main() -> None:
    """Answer the prompts in one batch and print every stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or hub id (default: the built-in model)")
    parser.add_argument("--prompt", action="append", help="may be repeated")
    parser.add_argument("--steps", type=int, default=100, help="stop after so many steps")
    arguments = parser.parse_args()
    engine = LLMEngine(
        ModelConfig(model=arguments.model),
        cache_config=CacheConfig(num_gpu_blocks=64),
        scheduler_config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
    )
    assert isinstance(engine.core.executor, LocalExecutor)
    for number, prompt in enumerate(arguments.prompt or PROMPTS):
        chat = engine.input_processor.chat_prompt([{"role": "user", "content": prompt}])
        engine.add_request(f"request-{number}", chat, SamplingParams(temperature=0.0, max_tokens=24))
    for _ in range(arguments.steps):
        if not engine.has_unfinished_requests():
            break
        show_step(engine, engine.core.executor.worker.runner)


if __name__ == "__main__":
    main()
