"""Builders for core tests: a scheduler with a counting clock, and requests with plain integers as tokens."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.kv.cache_listener import NO_LISTENER, CacheListener
from octavo.core.scheduler import Scheduler
from octavo.data.events import EventLog
from octavo.data.kv_groups import KVGroupSpec, RecurrentStates, SlidingWindow
from octavo.data.model_output import ModelOutput
from octavo.data.request import Request
from octavo.data.scheduler_output import SchedulerOutput
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

REQUEST_OPTIONS = (
    "priority",
    "cache_salt",
    "tenant",
    "tenant_weight",
    "adapter",
    "deadline",
    "arrival_time",
    "kv_transfer_params",
    "cache_points",
    "spans",
)


class Core:
    """A scheduler and a minimal worker that samples `answers` in turn for every request."""

    def __init__(
        self,
        *,
        num_blocks: int = 1000,
        block_size: int = 4,
        max_model_len: int = 10_000,
        enable_prefix_caching: bool = True,
        cache_decoded_blocks: bool = True,
        num_host_blocks: int = 0,
        num_window_blocks: int = 0,
        window: int = 0,
        num_state_slots: int = 0,
        num_host_states: int = 0,
        state_checkpoint_interval: int | None = None,
        connector: Any = None,
        cache_listener: CacheListener = NO_LISTENER,
        clock: Callable[[], float] | None = None,
        **scheduler_options: Any,
    ) -> None:
        ticks = itertools.count()
        windows = [KVGroupSpec(SlidingWindow(window), num_window_blocks)] if window else []
        states = [KVGroupSpec(RecurrentStates(), num_state_slots, num_host_states)] if num_state_slots else []
        self.log = EventLog()
        self.scheduler = Scheduler(
            SchedulerConfig(
                **{"max_num_seqs": 8, "max_num_batched_tokens": 100, "min_tokens_to_cache": 1, **scheduler_options}
            ),
            CacheConfig(
                block_size=block_size,
                enable_prefix_caching=enable_prefix_caching,
                cache_decoded_blocks=cache_decoded_blocks,
                state_checkpoint_interval=state_checkpoint_interval,
            ),
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            clock=clock or (lambda: float(next(ticks))),
            sink=self.log,
            num_host_blocks=num_host_blocks,
            bounded_groups=[*windows, *states],
            connector=connector,
            cache_listener=cache_listener,
        )
        self.answers: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}

    def add(self, request_id: str, prompt: int | list[int], max_tokens: int = 16, **options: Any) -> Request:
        """Add a request. prompt: its token ids, or their number; the ids are then used by no other request."""
        stop_ids = frozenset(options.pop("stop_token_ids", ()))
        request_options = {key: options.pop(key) for key in REQUEST_OPTIONS if key in options}
        base = 1000 * (1 + len(self.finished) + len(self.scheduler.requests))
        ids = list(range(base, base + prompt)) if isinstance(prompt, int) else prompt
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)
        request = Request(request_id, ids, params, stop_token_ids=stop_ids, **request_options)
        self.scheduler.add_request(request)
        return request

    def compute(self, scheduled: SchedulerOutput) -> ModelOutput:
        """Return a result with one token for each request whose known tokens are all computed after this step."""
        sampled = {}
        for request_id, count in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests.get(request_id)
            if request is None or request.num_computed_tokens + count < len(request.sequence.token_ids):
                continue
            script = self.answers.get(request_id)
            sampled[request_id] = [script.pop(0) if script else 7]
        return ModelOutput(scheduled.step, sampled)

    def guess(self, drafts: dict[str, list[int]]) -> None:
        """Propose drafts as if they had come with the last result."""
        self.scheduler._results._take_drafts(drafts)

    def step(self) -> SchedulerOutput:
        """Schedule, compute and process one step."""
        scheduled = self.scheduler.schedule()
        if scheduled.is_empty:
            return scheduled
        for output in self.scheduler.update_from_output(scheduled, self.compute(scheduled)):
            if output.finish_reason is not None:
                if output.request_id in self.finished:
                    raise AssertionError(f"{output.request_id} ended twice")
                self.finished[output.request_id] = output.finish_reason
        return scheduled

    def run(self, max_steps: int = 10_000) -> int:
        """Step until no work remains; return the number of steps."""
        for count in range(max_steps):
            if not self.scheduler.has_work():
                return count
            self.step()
        raise AssertionError("the scheduler makes no progress")


@pytest.fixture
def make_core():
    return Core
