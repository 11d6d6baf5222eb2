"""Metrics of an engine from the events of the real scheduler, with a counting clock."""

from __future__ import annotations

import random

import pytest

from octavo.config import PreemptionMode
from octavo.data import events
from octavo.data.draft_stats import DraftStats
from octavo.data.metrics import EngineMetrics, Histogram
from octavo.data.model_output import ModelOutput
from octavo.data.request import RequestStatus


def stats_of(core):
    metrics = EngineMetrics()
    for event in core.log.events:
        metrics.emit(event)
    return metrics.stats


def nonzero(counts):
    return {name: count for name, count in counts.items() if count}


def test_histogram_counts_value_at_bound_in_lower_bucket():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert (histogram.total, sum(histogram.counts)) == (7.5, 5)


def test_metrics_of_one_request_match_its_events(make_core):
    core = make_core()
    core.add("r", 10, max_tokens=3, tenant="alice")
    queued = core.log.events[-1]
    core.run()
    stats = stats_of(core)
    assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)
    assert (stats.prompt_tokens, stats.generation_tokens, stats.num_steps) == (10, 3, 3)
    assert stats.scheduled_tokens == 12  # the last token is not fed back
    assert nonzero(stats.request_success) == {"length": 1}
    assert stats.tenant_tokens == {"alice": [10, 3]}
    for name in ("time_to_first_token", "e2e_latency", "queue_time", "prefill_time", "decode_time"):
        assert sum(getattr(stats, name).counts) == 1, name
    assert sum(stats.inter_token_latency.counts) == 2
    completed = core.log.of_type(events.StepCompleted)
    assert stats.time_to_first_token.total == completed[0].time - queued.arrival_time
    assert stats.decode_time.total == completed[2].time - completed[0].time == stats.inter_token_latency.total
    assert stats.e2e_latency.total == completed[2].time - queued.arrival_time


def test_metrics_count_offloaded_blocks_and_host_cache_hits(make_core):
    core = make_core(num_blocks=5, num_host_blocks=4)
    for name, prompt in (("first", range(13)), ("other", range(100, 119)), ("again", range(13)), ("last", range(19))):
        core.add(name, list(prompt), max_tokens=1)
        core.run()
    stats, log = stats_of(core), core.log
    assert (stats.host_cache_hits, stats.host_cache_hit_blocks) == (12, 3)
    assert stats.num_offloaded_blocks == len(log.of_type(events.BlockOffloaded)) > 3
    num_evicted = len(log.of_type(events.BlockEvicted)), len(log.of_type(events.HostBlockEvicted))
    assert min(num_evicted) > 0
    assert (stats.tiers["device"].num_evicted, stats.tiers["host"].num_evicted) == num_evicted
    assert (stats.tiers["device"].num_hit_tokens, stats.tiers["host"].num_hit_tokens) == (12, 12)
    assert stats.prefix_cache_hits == 24
    [found] = log.of_type(events.HostBlocksFound)
    assert found.computing_s == pytest.approx(12 / 19)  # a step of 19 tokens took a second


def test_latencies_start_at_arrival_time(make_core):
    core = make_core()
    core.add("r", 4, max_tokens=1, arrival_time=-100.0)
    core.run()
    stats = stats_of(core)
    assert stats.time_to_first_token.total > 100
    assert stats.queue_time.total > 100
    assert stats.prefill_time.total < 10
    assert stats.decode_time.total == 0  # its first token is its last


def test_aborted_waiting_request_counts_as_abort(make_core):
    core = make_core(max_num_seqs=1)
    core.add("runs", 4)
    core.add("waits", 4)
    core.step()
    stats = stats_of(core)
    assert (stats.num_requests_running, stats.num_requests_waiting) == (1, 1)
    core.scheduler.finish_requests(["waits"], RequestStatus.FINISHED_ABORTED)
    stats = stats_of(core)
    assert (stats.num_requests_running, stats.num_requests_waiting) == (1, 0)
    assert nonzero(stats.request_success) == {"abort": 1}
    assert sum(stats.queue_time.counts) == 1
    assert stats.tenant_tokens == {}


def test_failed_step_counts_its_requests_as_errors(make_core):
    core = make_core()
    core.add("r", 4)
    core.scheduler.fail_step(core.scheduler.schedule(), "broken")
    stats = stats_of(core)
    assert (stats.num_failed_steps, stats.request_success["error"]) == (1, 1)
    assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("seed", range(5))
def test_metrics_agree_with_scheduler_after_every_step(make_core, seed):
    """Many requests with preemptions, aborts and cache hits; counts are compared after every step."""
    rng = random.Random(seed)
    core = make_core(num_blocks=30, max_num_batched_tokens=16, preemption=PreemptionMode.RECOMPUTE)
    metrics, read, number = EngineMetrics(), 0, 0
    for _ in range(300):
        if rng.random() < 0.4:
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 40))]
            core.add(f"r{number}", prompt, max_tokens=rng.randint(1, 20), tenant=rng.choice("xyz"))
            number += 1
        if core.scheduler.requests and rng.random() < 0.05:
            core.scheduler.finish_requests([rng.choice(list(core.scheduler.requests))], RequestStatus.FINISHED_ABORTED)
        core.step()
        for event in core.log.events[read:]:
            metrics.emit(event)
        read = len(core.log.events)
        assert metrics.stats.num_requests_running == len(core.scheduler.running)
        assert metrics.stats.num_requests_waiting == len(core.scheduler.requests) - len(core.scheduler.running)
        waiting = [each for each in core.scheduler.requests.values() if each not in core.scheduler.running]
        assert metrics.stats.num_waiting_tokens == sum(each.num_prompt_tokens for each in waiting)
    stats, of_type = metrics.stats, core.log.of_type
    queries, completed = of_type(events.PrefixCacheQueried), of_type(events.StepCompleted)
    assert stats.num_preemptions == len(of_type(events.RequestPreempted)) > 0
    assert stats.generation_tokens == sum(sum(event.num_new_tokens.values()) for event in completed)
    assert stats.prefix_cache_queries == sum(event.num_query_tokens for event in queries)
    assert stats.prefix_cache_hits == sum(event.num_hit_tokens for event in queries) > 0
    assert stats.scheduled_tokens == sum(event.num_tokens for event in of_type(events.StepScheduled))
    ended = sum(stats.request_success.values())
    assert ended == len(of_type(events.RequestFinished)) == sum(stats.e2e_latency.counts)
    assert sum(stats.request_prompt_tokens.counts) == sum(stats.request_generation_tokens.counts) == ended
    assert sum(stats.inter_token_latency.counts) + sum(stats.time_to_first_token.counts) == sum(
        sum(1 for count in event.num_new_tokens.values() if count) for event in completed
    )
    assert set(stats.tenant_tokens) == set("xyz")


def test_drafts_are_counted_by_position():
    metrics = EngineMetrics()
    for num_drafted, num_accepted in ((2, 1), (4, 4), (1, 0), (3, 1)):
        metrics.emit(events.DraftsVerified(1, 0.0, "r", num_drafted, num_accepted))
    drafts = metrics.stats.drafts
    assert (drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens) == (4, 10, 6)
    assert drafts.num_draft_tokens_per_pos == [4, 3, 2, 1]
    assert drafts.num_accepted_tokens_per_pos == [3, 1, 1, 1]
    assert drafts.acceptance_rate_per_pos == [3 / 4, 1 / 3, 1 / 2, 1]
    assert (drafts.mean_accepted_length, drafts.tokens_per_step) == (1.5, 2.5)


def test_no_drafts_give_no_acceptance_rate():
    drafts = DraftStats()
    assert drafts.acceptance_rate_per_pos == []
    assert (drafts.mean_accepted_length, drafts.tokens_per_step) == (0.0, 1.0)


def test_draft_metrics_match_verified_drafts_of_steps(make_core):
    core = make_core(clock=lambda: 0.0)
    core.add("r", 4, max_tokens=50)
    core.step()
    for drafts, sampled in (([1, 2, 3], [1, 2, 9]), ([4], [4, 5])):
        core.guess({"r": drafts})
        scheduled = core.scheduler.schedule()
        [output] = core.scheduler.update_from_output(scheduled, ModelOutput(scheduled.step, {"r": sampled}))
        assert (output.num_draft_tokens, output.num_accepted_tokens) == (len(drafts), len(sampled) - 1)
    core.step()
    stats = stats_of(core)
    assert (stats.drafts.num_drafts, stats.drafts.num_draft_tokens, stats.drafts.num_accepted_tokens) == (2, 4, 3)
    assert stats.generation_tokens == 1 + 3 + 2 + 1


def test_saves_are_counted_by_outcome_and_dropped_blocks_by_number():
    metrics = EngineMetrics()
    for outcome in ("done", "expired", "done", "failed"):
        metrics.emit(events.KVSaveEnded(1, 0.0, 3, 2, outcome, ()))
    metrics.emit(events.KVSavesDropped(1, 0.0, "r", 5))
    metrics.emit(events.KVSavesDropped(2, 0.0, "s", 2))
    assert metrics.stats.kv_saves == {"done": 2, "failed": 1, "expired": 1}
    assert metrics.stats.kv_dropped_save_blocks == 7
