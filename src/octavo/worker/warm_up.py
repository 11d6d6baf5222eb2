"""Warms up a worker."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from octavo.data.kv_groups import RecurrentStates
from octavo.data.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from octavo.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)
_ID = "octavo-warm-up"
_PRIME = 7919  # distance between the fixed prompt's tokens
_PLAIN = SamplingParams()
_SCORED = SamplingParams(prompt_logprobs=1)
_FILTERED = SamplingParams(top_k=4, top_p=0.9, min_p=0.01, logprobs=2)
_PENALIZED = SamplingParams(repetition_penalty=1.1, presence_penalty=0.1)


def warm_up(runner: ModelRunner, num_tokens: int) -> None:
    """Run a prompt of `num_tokens` tokens, which the cache must hold, and all kernels that compile at first use."""
    start = time.monotonic()
    runner.execute(_first_step(runner, num_tokens))
    if runner.draft_runner is not None:
        with torch.inference_mode():
            runner.draft_runner.warm_up(_ID)
    _end(runner, [_ID])
    limits = runner.max_num_batched_tokens, runner.max_model_len
    for in_step, longest in sorted({(*(min(rows, most) for most in limits),) for rows in runner.kernels.warm_up_rows}):
        _launch_all(runner, in_step, longest)
    compiled = runner.kernels.take_compilations()
    if compiled:
        logger.info("warm-up: %d kernels were compiled; %.1f s", len(compiled), time.monotonic() - start)


def fixed_prompt_logits(runner: ModelRunner, num_tokens: int) -> Tensor:
    """Return the logits after a fixed prompt, float32 [1, vocab_size]."""
    logits = runner.compute_logits(_first_step(runner, num_tokens, _FILTERED)).clone()
    _end(runner, [_ID])
    return logits


def _first_step(runner: ModelRunner, num_tokens: int, params: SamplingParams = _PLAIN) -> SchedulerOutput:
    prompt = _request(runner, _ID, num_tokens, params)
    return SchedulerOutput(0, [prompt], CachedRequestData.make_empty(), {_ID: num_tokens}, num_tokens)


def _launch_all(runner: ModelRunner, in_step: int, longest: int) -> None:
    """Run steps of up to `in_step` rows. longest: positions of a request, at most."""
    for params in (_PLAIN, _SCORED):
        _compute(runner, _parts(in_step, longest), params)
    for num_computed in range(in_step, longest, in_step):  # attention over more positions than a step has rows
        _compute(runner, [min(num_computed + in_step, longest)], _PLAIN, num_computed=num_computed)
    for params in (_PLAIN, _FILTERED):
        _compute(runner, [1] * in_step, params)
    _compute(runner, [1], _PENALIZED)
    if num_drafts := runner.drafting.proposer.num_speculative_tokens:
        _compute(runner, _parts(in_step, min(1 + num_drafts, longest)), _PLAIN, has_drafts=True)


def _parts(total: int, most: int) -> list[int]:
    return [min(most, total - first) for first in range(0, total, most)]


def _compute(
    runner: ModelRunner,
    lengths: Sequence[int],
    params: SamplingParams,
    *,
    num_computed: int = 0,
    has_drafts: bool = False,
) -> None:
    lengths = lengths[: runner.max_num_seqs]
    names = [f"{_ID}-{index}" for index in range(len(lengths))]
    requests = [
        _request(runner, name, length, params, num_known=1 if has_drafts else length, num_computed=num_computed)
        for name, length in zip(names, lengths, strict=True)
    ]
    counts = {name: length - num_computed for name, length in zip(names, lengths, strict=True)}
    drafts = {name: [0] * (count - 1) for name, count in counts.items() if has_drafts and count > 1}
    runner.execute(
        SchedulerOutput(
            0,
            requests,
            CachedRequestData.make_empty(),
            counts,
            sum(counts.values()),
            scheduled_spec_decode_tokens=drafts,
        )
    )
    _end(runner, names)


def _request(
    runner: ModelRunner,
    name: str,
    length: int,
    params: SamplingParams,
    *,
    num_known: int | None = None,
    num_computed: int = 0,
) -> NewRequestData:
    cache, vocab_size = runner.kv_cache, runner.model.architecture.vocab_size
    count = length if num_known is None else num_known
    num_blocks = -(-length // cache.block_size)
    return NewRequestData(
        name,
        [_PRIME * (index + 1) % vocab_size for index in range(count)],
        count,
        params,
        0,
        0,
        frozenset(),
        block_ids=[
            [len(runner.batch.requests) % group.num_blocks]
            if isinstance(group.kind, RecurrentStates)
            else [index % group.num_blocks for index in range(num_blocks)]
            for group in cache.groups
        ],
        num_computed_tokens=num_computed,
    )


def _end(runner: ModelRunner, names: Iterable[str]) -> None:
    empty = CachedRequestData.make_empty()
    # Preempt: a proposer could keep finished requests' tokens.
    runner.execute(SchedulerOutput(0, [], empty, {}, 0, preempted_req_ids=set(names)))
