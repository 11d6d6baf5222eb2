"""The first passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from octavo.data.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.worker.model_runner import ModelRunner

_ID = "octavo-warm-up"
_PRIME = 7919  # steps of the fixed prompt through the vocabulary


def warm_up(runner: ModelRunner, num_tokens: int) -> None:
    """Run a prompt of `num_tokens` tokens, which the cache must hold, through everything once.

    Its blocks belong to no request: their next owner writes them before it reads them.
    """
    scheduled = _first_step(runner, num_tokens)
    runner.execute(scheduled)
    if runner.draft_runner is not None:
        with torch.inference_mode():
            runner.draft_runner.warm_up(_ID)
    _end(runner)


def fixed_prompt_logits(runner: ModelRunner, num_tokens: int) -> Tensor:
    """Return float32 [1, vocab_size] after a fixed prompt of `num_tokens` tokens."""
    logits = runner.compute_logits(_first_step(runner, num_tokens)).clone()
    _end(runner)
    return logits


def _first_step(runner: ModelRunner, num_tokens: int) -> SchedulerOutput:
    """Schedule one new prompt."""
    cache, count = runner.kv_cache, num_tokens
    blocks = list(range(-(-count // cache.block_size)))
    vocab_size = runner.model.architecture.vocab_size
    prompt = NewRequestData(
        _ID,
        [_PRIME * (index + 1) % vocab_size for index in range(count)],
        count,
        SamplingParams(),
        0,
        0,
        frozenset(),
        block_ids=[blocks] * len(cache.groups),
        num_computed_tokens=0,
    )
    return SchedulerOutput(0, [prompt], CachedRequestData.make_empty(), {_ID: count}, count)


def _end(runner: ModelRunner) -> None:
    """Preempt the prompt: the blocks of a finished request could stay in the prefix cache."""
    empty = CachedRequestData.make_empty()
    runner.execute(SchedulerOutput(0, [], empty, {}, 0, preempted_req_ids={_ID}))
