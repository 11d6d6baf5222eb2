"""Figures of an engine, counted from its events. Names from vLLM have vLLM's meanings."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from octavo.data import events
from octavo.data.draft_stats import DraftStats
from octavo.data.expert_stats import ExpertStats, ExpertTokens
from octavo.data.kv_event_figures import KVEventFigures  # noqa: TC001 - msgspec reads this type
from octavo.data.kv_store_figures import KVStoreFigures  # noqa: TC001 - msgspec reads this type
from octavo.data.kv_tier_figures import KVTierCounter, KVTierFigures
from octavo.data.kv_tiers import DEVICE, HOST
from octavo.data.request import RequestStatus
from octavo.data.state_slots import StateSlots

if TYPE_CHECKING:
    from octavo.data.events import Event

# Every label value has a counter from the start, so that Prometheus rates include the first event.
_REASONS = tuple(status.value for status in RequestStatus if status.is_finished)
_LOAD_OUTCOMES = ("done", "failed", "expired", "cancelled")
_SAVE_OUTCOMES = ("done", "failed", "expired")
_SHORTENING_LIMITS = (events.HitLimit.WINDOW.value, events.HitLimit.CHECKPOINT.value)
_TTFT_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_ITL_BOUNDS = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_REQUEST_BOUNDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_TOKEN_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(slots=True)
class Histogram:
    """Observations in buckets. counts[i]: Number of values above bounds[i - 1] and at most bounds[i]."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Add a value to its bucket."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class EngineStats:
    """Figures of one engine. Times are in seconds. A request is one output stream.

    The first seven figures and the contents of `kv_stores` are current values. All other figures are totals since the
    start.
    """

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_waiting_tokens: int = 0  # prompt tokens of waiting requests, including cached tokens
    kv_cache_usage: float = 0.0
    bounded_usage: float = 0.0
    prefill_limit: int = 0
    state_slots: StateSlots | None = None  # None without recurrent layers and before the first step
    num_steps: int = 0
    prompt_tokens: int = 0  # of requests with a first token, including cached tokens
    generation_tokens: int = 0
    scheduled_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prefix_cache_unusable: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SHORTENING_LIMITS, 0))
    host_cache_hits: int = 0
    host_cache_hit_blocks: int = 0  # of the first KV group
    num_offloaded_blocks: int = 0  # of the first KV group
    host_cache_hit_parts: dict[int, int] = field(default_factory=dict)  # by index of bounded group
    num_offloaded_parts: dict[int, int] = field(default_factory=dict)  # by index of bounded group
    num_saved_checkpoints: int = 0
    num_evicted_checkpoints: int = 0
    num_preemptions: int = 0
    recomputed_tokens: int = 0
    num_failed_steps: int = 0
    num_compilations: int = 0
    num_quarantined_blocks: int = 0
    request_success: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_REASONS, 0))
    tenant_tokens: dict[str, list[int]] = field(default_factory=dict)  # [prompt, generated] of ended requests
    drafts: DraftStats = field(default_factory=DraftStats)
    experts: ExpertStats = field(default_factory=ExpertStats)
    expert_tokens: ExpertTokens | None = None  # None without experts
    kv_load_tokens: int = 0
    kv_load_seconds: float = 0.0  # waiting time of loads with an estimate in `kv_computing_seconds`
    kv_computing_seconds: float = 0.0  # estimated time to compute the same tokens instead
    kv_loads: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_LOAD_OUTCOMES, 0))
    kv_saves: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SAVE_OUTCOMES, 0))
    kv_dropped_save_blocks: int = 0  # blocks that a store wanted, but that were not saved
    tiers: dict[str, KVTierFigures] = field(default_factory=lambda: {DEVICE: KVTierFigures(), HOST: KVTierFigures()})
    kv_stores: dict[str, KVStoreFigures] = field(default_factory=dict)
    kv_events: KVEventFigures | None = None  # None if no events are published
    iteration_tokens: Histogram = field(default_factory=partial(Histogram, _STEP_TOKEN_BOUNDS))
    time_to_first_token: Histogram = field(default_factory=partial(Histogram, _TTFT_BOUNDS))
    inter_token_latency: Histogram = field(default_factory=partial(Histogram, _ITL_BOUNDS))
    e2e_latency: Histogram = field(default_factory=partial(Histogram, _REQUEST_BOUNDS))
    queue_time: Histogram = field(default_factory=partial(Histogram, _REQUEST_BOUNDS))
    prefill_time: Histogram = field(default_factory=partial(Histogram, _REQUEST_BOUNDS))
    decode_time: Histogram = field(default_factory=partial(Histogram, _REQUEST_BOUNDS))
    request_prompt_tokens: Histogram = field(default_factory=partial(Histogram, _TOKEN_BOUNDS))
    request_generation_tokens: Histogram = field(default_factory=partial(Histogram, _TOKEN_BOUNDS))


@dataclass(slots=True)
class _Life:
    arrival: float
    num_prompt_tokens: int
    tenant: str
    is_running: bool = False
    admitted: float | None = None
    first_token: float | None = None
    last_token: float = 0.0
    num_tokens: int = 0


class EngineMetrics:
    """Updates an `EngineStats` from events.

    An ended request is counted when its step ends, because `StepCompleted` has its last tokens.
    """

    def __init__(self, stats: EngineStats | None = None) -> None:
        self.stats = stats or EngineStats()
        self._tiers = KVTierCounter(self.stats.tiers)
        self._lives: dict[str, _Life] = {}
        self._ended: list[tuple[str, events.RequestFinished]] = []
        self._num_open_steps = 0  # at most two

    def emit(self, event: Event) -> None:
        """Count an event."""
        stats = self.stats
        match event:
            case events.StepCompleted():
                stats.state_slots = event.state_slots
                self._take_tokens(event)
                self._end_step()
            case events.StepScheduled():
                self._num_open_steps += 1
                stats.num_steps += 1
                stats.scheduled_tokens += event.num_tokens
                stats.iteration_tokens.observe(event.num_tokens)
                stats.kv_cache_usage = event.kv_cache_usage
                stats.bounded_usage = event.bounded_usage
                stats.prefill_limit = event.prefill_limit
            case events.RequestQueued():
                self._settle()  # an ended request may have the same id
                self._lives[event.request_id] = _Life(event.arrival_time, event.num_prompt_tokens, event.tenant)
                stats.num_requests_waiting += 1
                stats.num_waiting_tokens += event.num_prompt_tokens
            case events.RequestAdmitted():
                self._admit(self._lives[event.request_id], event)
            case events.RequestPreempted():
                self._move(self._lives[event.request_id], runs=False)
                stats.num_preemptions += 1
                stats.recomputed_tokens += 0 if event.swapped else event.num_lost_tokens
            case events.RequestFinished():
                life = self._lives[event.request_id]
                self._move(life, runs=False)
                stats.num_requests_waiting -= 1
                stats.num_waiting_tokens -= life.num_prompt_tokens
                self._ended.append((event.request_id, event))
                if not self._num_open_steps:
                    self._settle()
            case events.DraftsVerified() | events.DraftsTimed():
                stats.drafts.add(event)
            case events.ExpertsComputed():
                stats.experts.add(event.load)
            case events.BlocksQuarantined():
                stats.num_quarantined_blocks += len(event.block_ids)
            case events.StepFailed():
                stats.num_failed_steps += 1
                self._end_step()
            case _:
                self._count_seldom(event)

    def _count_seldom(self, event: Event) -> None:
        stats = self.stats
        self._tiers.emit(event)
        match event:
            case events.PrefixCacheQueried():
                stats.prefix_cache_queries += event.num_query_tokens
                stats.prefix_cache_hits += event.num_hit_tokens
                if event.limit is not None and event.num_unusable_tokens:
                    stats.prefix_cache_unusable[event.limit] += event.num_unusable_tokens
            case events.CheckpointSaved():
                stats.num_saved_checkpoints += 1
            case events.CheckpointEvicted():
                stats.num_evicted_checkpoints += 1
            case events.BlockOffloaded():
                stats.num_offloaded_blocks += 1
                _count(stats.num_offloaded_parts, dict.fromkeys(event.groups[1:], 1))
            case events.HostBlocksFound():
                stats.host_cache_hits += event.num_tokens
                stats.host_cache_hit_blocks += event.num_blocks
                _count(stats.host_cache_hit_parts, dict(enumerate(event.num_copied[1:], 1)))
            case events.KVLoadEnded():
                stats.kv_loads[event.outcome] += 1
                stats.kv_load_tokens += event.num_tokens
                if event.computing_s:
                    stats.kv_load_seconds += event.seconds
                    stats.kv_computing_seconds += event.computing_s
            case events.KVSaveEnded():
                stats.kv_saves[event.outcome] += 1
            case events.KVSavesDropped():
                stats.kv_dropped_save_blocks += event.num_blocks
            case events.KernelsCompiled():
                stats.num_compilations += event.num_kernels

    def _move(self, life: _Life, *, runs: bool) -> None:
        if life.is_running != runs:
            life.is_running = runs
            step = 1 if runs else -1
            self.stats.num_requests_running += step
            self.stats.num_requests_waiting -= step
            self.stats.num_waiting_tokens -= step * life.num_prompt_tokens

    def _admit(self, life: _Life, event: events.RequestAdmitted) -> None:
        self._move(life, runs=True)
        if life.admitted is None:
            life.admitted = event.time
            self.stats.queue_time.observe(event.time - life.arrival)

    def _take_tokens(self, event: events.StepCompleted) -> None:
        stats, now = self.stats, event.time
        for request_id, num_tokens in event.num_new_tokens.items():
            if not num_tokens:
                continue
            life = self._lives[request_id]
            life.num_tokens += num_tokens
            if life.first_token is None:
                self._take_first(life, now)
            else:
                stats.inter_token_latency.observe(now - life.last_token)
            life.last_token = now
            stats.generation_tokens += num_tokens

    def _take_first(self, life: _Life, now: float) -> None:
        life.first_token = now
        self.stats.time_to_first_token.observe(now - life.arrival)
        self.stats.prompt_tokens += life.num_prompt_tokens
        if life.admitted is not None:
            self.stats.prefill_time.observe(now - life.admitted)

    def _end_step(self) -> None:
        self._num_open_steps = max(self._num_open_steps - 1, 0)
        self._settle()

    def _settle(self) -> None:
        stats = self.stats
        for request_id, event in self._ended:
            life = self._lives.pop(request_id)
            stats.request_success[event.reason] += 1
            stats.e2e_latency.observe(event.time - life.arrival)
            stats.request_prompt_tokens.observe(life.num_prompt_tokens)
            stats.request_generation_tokens.observe(life.num_tokens)
            if life.first_token is not None:
                stats.decode_time.observe(life.last_token - life.first_token)
                counts = stats.tenant_tokens.setdefault(life.tenant, [0, 0])
                counts[0] += life.num_prompt_tokens
                counts[1] += life.num_tokens
        self._ended.clear()
        if not self._lives:
            stats.kv_cache_usage = stats.bounded_usage = 0.0  # no further step reports usage
            if stats.state_slots is not None:
                num_running, num_checkpoints, num_free = stats.state_slots
                stats.state_slots = StateSlots(0, num_checkpoints, num_free + num_running)


def _count(totals: dict[int, int], counts: dict[int, int]) -> None:
    for group, count in counts.items():
        totals[group] = totals.get(group, 0) + count
