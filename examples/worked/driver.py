"""Drives octavo's scheduler without a model: every sampled token is the number 7."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.scheduler import Scheduler
from octavo.data.model_output import ModelOutput
from octavo.data.request import Request
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.data.scheduler_output import SchedulerOutput


class Driver:
    """A scheduler with a clock that counts its calls. Standard library only, like the core itself."""

    def __init__(
        self, *, num_blocks: int = 1024, block_size: int = 16, max_num_batched_tokens: int = 100, **options: Any
    ) -> None:
        ticks = itertools.count()
        options = {"max_num_seqs": min(8, max_num_batched_tokens), **options}
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=max_num_batched_tokens, **options),
            CacheConfig(block_size=block_size),
            num_blocks=num_blocks,
            max_model_len=100_000,
            clock=lambda: float(next(ticks)),
        )
        self.finished: dict[str, str] = {}
        self.first_token_step: dict[str, int] = {}

    def add(self, request_id: str, prompt: int | list[int], *, max_tokens: int) -> Request:
        """Add a request. prompt: token ids, or a number of ids, which then differ from those of all other requests."""
        base = 1000 * len(request_id) + sum(map(ord, request_id)) * 100_000
        ids = list(range(base, base + prompt)) if isinstance(prompt, int) else prompt
        request = Request(request_id, ids, SamplingParams(temperature=0.0, max_tokens=max_tokens))
        self.scheduler.add_request(request)
        return request

    def positions(self) -> list[int]:
        """Return the position of the next token of each running request: its number of computed tokens."""
        return [request.num_computed_tokens for request in self.scheduler.running]

    def schedule(self) -> SchedulerOutput:
        """Schedule a step without computing it."""
        return self.scheduler.schedule()

    def compute(self, scheduled: SchedulerOutput) -> None:
        """Compute a step: sample a token for every request that has all its known tokens computed with it."""
        sampled = {}
        for request_id, count in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            if request.num_computed_tokens + count == len(request.sequence.token_ids):
                sampled[request_id] = [7]
                self.first_token_step.setdefault(request_id, scheduled.step)
        for output in self.scheduler.update_from_output(scheduled, ModelOutput(scheduled.step, sampled)):
            if output.finish_reason is not None:
                self.finished[output.request_id] = output.finish_reason

    def step(self) -> SchedulerOutput:
        """Schedule and compute a step."""
        scheduled = self.schedule()
        self.compute(scheduled)
        return scheduled
