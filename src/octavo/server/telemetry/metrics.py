"""Metrics for Prometheus. A metric that vLLM also has uses vLLM's name, with the prefix of octavo."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client.core import HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector

from octavo.http.metrics import counter, gauge
from octavo.server.telemetry.vllm_names import VllmNames

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client import Metric

    from octavo.data.capacity import EngineCapacity
    from octavo.data.draft_stats import DraftStats
    from octavo.data.expert_stats import ExpertStats
    from octavo.data.metrics import EngineStats, Histogram
    from octavo.data.state_slots import StateSlots
    from octavo.server.service import Service

_MODEL = ["model_name"]
# (attribute of EngineStats, name, description)
_GAUGES = (
    ("num_requests_running", "num_requests_running", "Requests that are running."),
    ("num_requests_waiting", "num_requests_waiting", "Requests that are waiting in the queue."),
    ("num_waiting_tokens", "num_waiting_tokens", "Prompt tokens of the waiting requests, cached ones included."),
    ("kv_cache_usage", "kv_cache_usage_perc", "Used share of the KV cache's blocks, from 0 to 1."),
    (
        "bounded_usage",
        "window_blocks_usage_perc",
        "Used share of the blocks of layers that keep only some positions, from 0 to 1; 0 without such layers.",
    ),
    (
        "prefill_limit",
        "prefill_limit_tokens",
        "Maximum number of prompt tokens in a step that also decodes; 0: no limit.",
    ),
)
_CAPACITY = (
    ("kv_cache_tokens", "kv_cache_capacity_tokens", "Capacity of the KV cache in tokens."),
    ("max_num_seqs", "max_num_seqs", "Maximum number of running requests."),
    ("max_batch_prefill_tokens", "max_batch_prefill_tokens", "Maximum number of prompt tokens in a step."),
    (
        "max_batch_total_tokens",
        "max_batch_total_tokens",
        "Maximum number of prompt and output tokens of all running requests.",
    ),
)
_CACHE_CONFIG = (
    "block_size",
    "enable_prefix_caching",
    "kv_cache_dtype",
    "num_cpu_blocks",
    "num_gpu_blocks",
    "num_window_blocks",
)
_COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of requests that have their first token, cached ones included."),
    ("generation_tokens", "generation_tokens", "Generated tokens."),
    ("scheduled_tokens", "scheduled_tokens", "Computed tokens, including recomputed and discarded ones."),
    ("prefix_cache_queries", "prefix_cache_queries", "Tokens that were looked up in the prefix cache."),
    ("prefix_cache_hits", "prefix_cache_hits", "Tokens that were found in the prefix cache."),
    ("host_cache_hits", "host_cache_hits", "Tokens whose KV was found in host memory."),
    ("host_cache_hit_blocks", "host_cache_hit_blocks", "Blocks that were copied back from host memory."),
    ("num_offloaded_blocks", "offloaded_blocks", "Evicted blocks that were copied to host memory."),
    ("num_preemptions", "num_preemptions", "Requests that were preempted."),
    ("recomputed_tokens", "recomputed_tokens", "Tokens that are computed again after a preemption."),
    ("num_steps", "engine_steps", "Steps that computed tokens."),
    ("num_failed_steps", "engine_failed_steps", "Steps that failed in the worker."),
    ("num_compilations", "kernel_compilations", "GPU kernels that were compiled after the warm-up, during steps."),
    ("kv_load_tokens", "kv_load_tokens", "Tokens whose KV was loaded from external stores."),
    (
        "kv_load_seconds",
        "kv_load_seconds",
        "Seconds that requests waited for these loads, if the computing time is known.",
    ),
    ("kv_computing_seconds", "kv_load_computing_seconds", "Estimated seconds to compute the tokens of these loads."),
    (
        "kv_dropped_save_blocks",
        "kv_dropped_save_blocks",
        "Blocks that were not saved because too many saves were pending.",
    ),
    (
        "num_quarantined_blocks",
        "quarantined_blocks",
        "KV blocks that are not used any more because their records were inconsistent.",
    ),
)
# (attribute of DraftStats, description)
_DRAFT_COUNTERS = (
    ("num_drafts", "Verified drafts; a draft is of one request in one step."),
    ("num_draft_tokens", "Draft tokens."),
    ("num_accepted_tokens", "Draft tokens that were accepted."),
    ("seconds", "Seconds of steps with drafts, drafting included, if the time without drafts is known."),
    ("seconds_without", "Estimated seconds of the same tokens in steps without drafts."),
)
_DRAFT_POSITIONS = (
    ("num_draft_tokens_per_pos", "Draft tokens by position in the draft."),
    ("num_accepted_tokens_per_pos", "Accepted draft tokens by position in the draft."),
)
_CHECKPOINT_COUNTERS = (
    ("num_saved_checkpoints", "saved_checkpoints", "Recurrent states that were saved for later requests."),
    ("num_evicted_checkpoints", "evicted_checkpoints", "Saved recurrent states that were evicted from the device."),
)
_EXPERT_COUNTERS = (
    ("num_tokens", "expert_tokens", "Tokens, counted once per layer and chosen expert."),
    ("num_reads", "expert_reads", "Experts with tokens, counted once per layer and step."),
    ("read_bytes", "expert_read_bytes", "Bytes of expert weights that were read."),
)
_STORE_GAUGES = (
    ("num_blocks", "blocks", "Blocks in a KV store."),
    ("num_bytes", "bytes", "Bytes in a KV store."),
    ("is_usable", "usable", "0 while a KV store is not used because it failed or hangs, else 1."),
)
_STORE_COUNTERS = (
    ("num_corrupt", "corrupt_blocks", "Blocks that differed from the saved ones and were not used."),
    ("num_errors", "errors", "Calls of a KV store that failed."),
)
_TIER_COUNTERS = (
    ("num_hit_tokens", "kv_tier_hit_tokens", "Prompt tokens with KV in this tier, of prefix_cache_queries."),
    ("num_loaded_blocks", "kv_tier_loaded_blocks", "Blocks loaded from this tier."),
    ("loaded_bytes", "kv_tier_loaded_bytes", "Bytes loaded from this tier."),
    ("load_seconds", "kv_tier_load_seconds", "Seconds of these loads; several may run at the same time."),
    ("num_saved_blocks", "kv_tier_saved_blocks", "Blocks saved to this tier."),
    ("saved_bytes", "kv_tier_saved_bytes", "Bytes saved to this tier."),
    ("save_seconds", "kv_tier_save_seconds", "Seconds of these saves."),
    ("num_evicted", "evicted_blocks", "Cached blocks that were evicted from this tier."),
    (
        "wait_seconds",
        "kv_tier_wait_seconds",
        "Seconds that requests waited for this tier, if the computing time is known.",
    ),
    ("computing_seconds", "kv_tier_computing_seconds", "Estimated seconds to compute the tokens of these loads."),
)
_KV_EVENT_COUNTERS = (
    ("num_events", "kv_events", "Published events of the prefix cache."),
    ("num_batches", "kv_event_batches", "Published batches of these events, one for each step with events."),
    ("num_dropped_batches", "kv_event_batches_dropped", "Batches that were dropped because too many waited."),
)
_HISTOGRAMS = (
    ("iteration_tokens", "iteration_tokens_total", "Tokens in a step."),
    ("time_to_first_token", "time_to_first_token_seconds", "Seconds from arrival to the first token."),
    ("inter_token_latency", "inter_token_latency_seconds", "Seconds from one token of a request to the next."),
    ("e2e_latency", "e2e_request_latency_seconds", "Seconds from arrival to the end."),
    ("queue_time", "request_queue_time_seconds", "Seconds from arrival to the first step."),
    ("prefill_time", "request_prefill_time_seconds", "Seconds from the first step to the first token."),
    ("decode_time", "request_decode_time_seconds", "Seconds from the first token to the last."),
    ("request_prompt_tokens", "request_prompt_tokens", "Prompt tokens of a request."),
    ("request_generation_tokens", "request_generation_tokens", "Generated tokens of a request."),
)


class EngineCollector(Collector):
    """Reads the engine's metrics when Prometheus requests them."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        engine, model = self._service.engine, [self._service.model_names[0]]
        stats = engine.client.stats
        for family, figures in ((gauge, _GAUGES), (counter, _COUNTERS)):
            for attribute, name, text in figures:
                yield family(name, text, _MODEL, [(model, getattr(stats, attribute))])
        yield from _capacity(engine.client.capacity, model)
        yield from _tiers(stats, engine.client.capacity, model)
        unusable = [([*model, limit], count) for limit, count in stats.prefix_cache_unusable.items()]
        text = "Cached tokens that are computed again, by what ended the prefix hit."
        yield counter("prefix_cache_unusable_tokens", text, [*_MODEL, "limit"], unusable)
        slots = stats.state_slots or engine.client.capacity.empty_states
        if slots is not None:
            yield from _states(stats, slots, model)
        yield from _drafts(stats.drafts, model)
        if stats.expert_tokens is not None:
            yield from _experts(stats.experts, model)
        yield from _stores(stats, model)
        for attribute, name, text in () if stats.kv_events is None else _KV_EVENT_COUNTERS:
            yield counter(name, text, _MODEL, [(model, getattr(stats.kv_events, attribute))])
        for attribute, name, text in _HISTOGRAMS:
            yield _histogram(name, text, model, getattr(stats, attribute))
        endings = [([*model, reason], count) for reason, count in list(stats.request_success.items())]
        yield counter("request_success", "Ended requests by reason.", [*_MODEL, "finished_reason"], endings)
        tokens = [
            ([*model, tenant, kind], count)
            for tenant, counts in list(stats.tenant_tokens.items())
            for kind, count in zip(("prompt", "generation"), counts, strict=True)
        ]
        yield counter("tenant_tokens", "Tokens of ended requests by API key.", [*_MODEL, "tenant", "kind"], tokens)
        yield gauge("engine_ready", "1 while the engine accepts requests.", _MODEL, [(model, float(engine.is_alive))])
        restarts = [(model, engine.client.num_restarts)]
        yield counter("engine_restarts", "Restarts of the engine process.", _MODEL, restarts)
        failures = [([*model, str(rank)], count) for rank, count in list(engine.client.rank_failures.items())]
        yield counter(
            "rank_failures", "Failures of ranks, after which the engine restarts.", [*_MODEL, "rank"], failures
        )


def engine_collector(service: Service, prefix: str) -> Collector:
    """Make the collector of an engine's metrics. prefix: of `ServerConfig.metrics_prefix`."""
    collector = EngineCollector(service)
    return collector if prefix == "octavo" else VllmNames(collector, keeps_all=prefix == "both")


def _capacity(capacity: EngineCapacity, model: list[str]) -> Iterator[Metric]:
    for attribute, name, text in _CAPACITY:
        yield gauge(name, text, _MODEL, [(model, getattr(capacity, attribute))])
    config = [*model, *(str(getattr(capacity, name)) for name in _CACHE_CONFIG)]
    text = "Configuration of the KV cache in labels; always 1."
    yield gauge("cache_config_info", text, [*_MODEL, *_CACHE_CONFIG], [(config, 1)])


def _tiers(stats: EngineStats, capacity: EngineCapacity, model: list[str]) -> Iterator[Metric]:
    for attribute, name, text in _TIER_COUNTERS:
        yield counter(name, text, [*_MODEL, "tier"], _each(stats.tiers, attribute, model))
    counts = {
        "out": (stats.num_offloaded_blocks, stats.num_offloaded_parts),
        "in": (stats.host_cache_hit_blocks, stats.host_cache_hit_parts),
    }
    moved = []
    for direction, (num_blocks, num_parts) in counts.items():
        num_bytes = num_blocks * capacity.kv_block_bytes
        num_bytes += sum(count * capacity.bounded_groups[group - 1].block_bytes for group, count in num_parts.items())
        moved.append(([*model, direction], num_bytes))
    text = "Bytes of evicted blocks of all KV groups that were copied to host memory and back."
    yield counter("host_cache_bytes", text, [*_MODEL, "direction"], moved)


def _states(stats: EngineStats, slots: StateSlots, model: list[str]) -> Iterator[Metric]:
    counts = (("running", slots.num_running), ("checkpoint", slots.num_checkpoints), ("free", slots.num_free))
    rows = [([*model, use], count) for use, count in counts]
    yield gauge("state_slots", "Slots for recurrent states by use.", [*_MODEL, "use"], rows)
    for attribute, name, text in _CHECKPOINT_COUNTERS:
        yield counter(name, text, _MODEL, [(model, getattr(stats, attribute))])


def _drafts(drafts: DraftStats, model: list[str]) -> Iterator[Metric]:
    for attribute, text in _DRAFT_COUNTERS:
        yield counter(f"spec_decode_{attribute}", text, _MODEL, [(model, getattr(drafts, attribute))])
    for attribute, text in _DRAFT_POSITIONS:
        counts = [([*model, str(place)], count) for place, count in enumerate(list(getattr(drafts, attribute)))]
        yield counter(f"spec_decode_{attribute}", text, [*_MODEL, "position"], counts)


def _experts(experts: ExpertStats, model: list[str]) -> Iterator[Metric]:
    for attribute, name, text in _EXPERT_COUNTERS:
        yield counter(name, text, _MODEL, [(model, getattr(experts, attribute))])
    text = "Tokens of the layers' busiest experts, divided by the layers' means, by step."
    family = SummaryMetricFamily("octavo:expert_imbalance", text, labels=_MODEL)
    family.add_metric(model, experts.num_steps, experts.imbalance)
    yield family


def _stores(stats: EngineStats, model: list[str]) -> Iterator[Metric]:
    transfers = (("loads", "Loads from", stats.kv_loads), ("saves", "Saves into", stats.kv_saves))
    for name, what, by_outcome in transfers:
        ended = [([*model, outcome], count) for outcome, count in by_outcome.items()]
        yield counter(f"kv_{name}", f"{what} KV stores by outcome.", [*_MODEL, "outcome"], ended)
    for family, figures in ((gauge, _STORE_GAUGES), (counter, _STORE_COUNTERS)):
        for attribute, name, text in figures:
            yield family(f"kv_store_{name}", text, [*_MODEL, "store"], _each(stats.kv_stores, attribute, model))


def _each(figures: Mapping[str, Any], attribute: str, model: list[str]) -> list[tuple[list[str], float]]:
    return [([*model, name], getattr(each, attribute)) for name, each in list(figures.items())]


def _histogram(name: str, text: str, model: list[str], histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(f"octavo:{name}", text, labels=_MODEL)
    bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
    family.add_metric(model, list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.total)
    return family
