"""The decisions of the scheduling policy, each tested alone."""

from __future__ import annotations

import math

import pytest

from octavo.config import SchedulerConfig
from octavo.core.fair_share import FairRequestQueue
from octavo.core.policy import (
    PLAIN_COST,
    MixedBatching,
    PrefillFirstBatching,
    PromptCost,
    choose_victim,
    create_batching,
    create_policy,
    is_decode,
    is_prefill,
    num_tokens_to_schedule,
    rank_by_deadline,
    rank_by_priority,
    should_swap,
)
from octavo.core.request_queue import FCFSRequestQueue, PriorityRequestQueue
from octavo.core.step_plan import StepPlan
from octavo.data.request import Request
from octavo.sampling_params import SamplingParams


def make_request(name, num_prompt=4, *, computed=0, output=0, **options):
    request = Request(name, [1] * num_prompt, SamplingParams(max_tokens=9), **options)
    request.sequence.token_ids += [2] * output
    request.num_computed_tokens = computed
    return request


def decoding(name):
    return make_request(name, 4, computed=4, output=1)


@pytest.mark.parametrize(
    ("num_remaining", "budget", "threshold", "may_be_cut", "expected"),
    [
        (5, 5, 0, True, 5),
        (6, 5, 0, True, 5),
        (6, 5, 3, True, 3),
        (6, 2, 3, True, 2),
        (6, -1, 0, True, 0),
        (6, 5, 0, False, 0),
        (20, 5, 0, False, 0),  # an empty step takes the whole chunk
        (21, 5, 0, False, 5),  # no token fits
        (21, -5, 0, False, 0),
        (6, 6, 0, False, 6),
    ],
)
def test_num_tokens_to_schedule_respects_budget_and_threshold(num_remaining, budget, threshold, may_be_cut, expected):
    count = num_tokens_to_schedule(num_remaining, budget, threshold=threshold, may_be_cut=may_be_cut, initial_budget=20)
    assert count == expected


def test_prompt_token_at_high_position_costs_more_budget():
    cost = PromptCost(500.0)  # a half per position
    assert [cost.num_tokens_within(10, position) for position in (0, 2, 8, 100)] == [10, 5, 2, 1]
    assert [cost.num_tokens_within(budget, 2) for budget in (0, -3, 1)] == [0, -3, 1]
    assert cost.surcharge(2, 3, 10) == 3
    assert cost.surcharge(3, 3, 10) == 5  # rounded up
    assert cost.surcharge(3, 3, 7) == 4  # at most what remains
    assert cost.surcharge(2000, 10, 10**6) == 10_000
    assert PLAIN_COST.num_tokens_within(10, 1000) == 10
    assert PLAIN_COST.surcharge(1000, 3, 10) == 0


@pytest.mark.parametrize(
    ("name", "queue", "is_fixed"),
    [
        ("fcfs", FCFSRequestQueue, True),
        ("priority", PriorityRequestQueue, True),
        ("deadline", PriorityRequestQueue, True),
        ("fair", FairRequestQueue, False),
    ],
)
def test_each_policy_creates_its_queue_and_rank(name, queue, is_fixed):
    policy = create_policy(SchedulerConfig(policy=name, ageing_s=10.0, fair_input_weight=3.0, fair_output_weight=5.0))
    assert type(policy.waiting) is queue
    assert policy.ranks_are_fixed is is_fixed
    request = make_request("a", priority=2, arrival_time=5.0, deadline=9.0, tenant="x")
    request.arrival_index = 7
    policy.counters.charge_input("x", 1)
    policy.counters.charge_output("x", 1)
    expected = {"fcfs": (7,), "priority": (2.5, 7), "deadline": (9.0, 7), "fair": (8.0, 2.5, 7)}
    assert policy.rank(request) == expected[name]
    late = make_request("b", priority=1, arrival_time=20.0, deadline=12.0, tenant="x")
    late.arrival_index = 8
    for each in (late, request):
        policy.waiting.add_request(each)
    first = late if name == "fcfs" else request
    assert policy.waiting.peek_request() is first
    if name == "fair":  # the fair policy orders tenants by its own counters
        policy.waiting.add_request(make_request("c", tenant="y"))
        assert policy.counters.served("y") == 8.0


def test_ranks_by_priority_and_deadline_include_ageing():
    request = make_request("a", priority=3, arrival_time=30.0)
    request.arrival_index = 5
    assert rank_by_priority(request, None) == (3, 5)
    assert rank_by_priority(request, 0) == (5,)
    assert rank_by_priority(request, 10.0) == (6.0, 5)
    assert rank_by_deadline(request, None) == (math.inf, 5)
    assert rank_by_deadline(request, 10.0) == (40.0, 5)
    request.deadline = 35.0
    assert rank_by_deadline(request, 10.0) == (35.0, 5)
    assert rank_by_deadline(request, 1.0) == (31.0, 5)


def test_victim_is_least_important_request_that_is_not_protected():
    def rank(request):
        return (request.priority,)

    running = [make_request(str(priority), priority=priority) for priority in (3, 1, 2)]
    assert choose_victim(running, rank, 2) is running[0]
    running[0].num_preemptions = 2
    assert choose_victim(running, rank, 2) is running[2]
    running[2].num_preemptions = 1
    assert choose_victim(running, rank, 2) is running[2]
    running[2].num_preemptions = 2
    assert choose_victim(running, rank, 2) is None
    assert choose_victim(running[:1], rank, 9) is None


@pytest.mark.parametrize(
    ("preemption", "num_tokens", "num_blocks", "expected"),
    [
        ("auto", 7, 3, True),
        ("auto", 6, 3, False),  # equal cost
        ("auto", 5, 3, False),
        ("swap", 1, 9, True),
        ("swap", 0, 1, True),
        ("swap", 0, 0, False),
        ("recompute", 99, 1, False),
    ],
)
def test_swap_is_chosen_if_cheaper_than_recompute(preemption, num_tokens, num_blocks, expected):
    config = SchedulerConfig(preemption=preemption, swap_block_cost_tokens=2.0)
    assert should_swap(config, num_tokens, num_blocks) is expected


@pytest.mark.parametrize(
    ("computed", "output", "expected"),
    [(0, 0, True), (3, 0, True), (4, 1, False), (3, 1, True), (0, 1, True), (4, 2, True), (5, 2, False)],
)
def test_request_with_more_than_newest_token_to_compute_is_prefill(computed, output, expected):
    request = make_request("a", 4, computed=computed, output=output)
    assert is_prefill(request) is expected
    assert is_decode(request) is not expected
    request.spec_token_ids = [1, 2]
    assert is_prefill(request) is expected


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, 0),
        ({"max_num_mixed_prefill_tokens": 9}, 9),
        ({"mixed_step_ms": 50.0}, 12),
        ({"mixed_step_ms": 50.0, "max_num_mixed_prefill_tokens": 9}, 9),
        ({"mixed_step_ms": 50.0, "max_num_batched_tokens": 7, "max_num_seqs": 2}, 1),
        ({"batching": "prefill_first", "mixed_step_ms": 50.0}, 0),
    ],
)
def test_initial_prefill_limit_follows_mixed_options(options, limit):
    batching = create_batching(SchedulerConfig(**{"max_num_batched_tokens": 100, "max_num_seqs": 8, **options}))
    assert batching.prefill_limit == limit
    assert isinstance(batching, PrefillFirstBatching if "batching" in options else MixedBatching)


class Filler:
    """Callbacks `grow` and `admit` that give each request `count` tokens and record the order of the calls."""

    def __init__(self, count=1, *, short=False, idle=()):
        self.asked = []
        self.count = count
        self.short = short
        self.idle = idle

    def grow(self, plan, requests):
        self.asked.append([request.request_id for request in requests])
        plan.is_short |= self.short
        for request in requests:
            if request.request_id not in self.idle:
                plan.give(request, min(self.count, plan.budget), [])

    def admit(self, plan, before):
        self.asked.append(before and before.request_id)


def fill(batching, running, filler, outranked=(), budget=100):
    plan = StepPlan(budget, budget)
    batching.fill(plan, running, list(outranked), filler.grow, filler.admit)
    return plan


def test_mixed_batching_serves_running_then_outranked_then_waiting():
    running = [decoding("a"), make_request("b"), make_request("c")]
    filler = Filler()
    fill(MixedBatching(0), running, filler, running[1:])
    assert filler.asked == [["a"], "b", ["b"], "c", ["c"], None]
    filler = Filler(idle="b")
    fill(MixedBatching(0), running, filler, running[1:])
    assert filler.asked == [["a"], "b", ["b"], ["c"]]  # after a request that finds no block, none is admitted
    filler = Filler()
    fill(MixedBatching(0), running, filler)
    assert filler.asked == [["a", "b", "c"], None]


@pytest.mark.parametrize(
    ("limit", "names", "expected"),
    [(5, "ab", 6), (5, "b", 100), (5, "a", 6), (0, "ab", 100), (1, "abcd", 4), (200, "ab", 100)],
)
def test_mixed_step_budget_is_decodes_plus_prefill_limit(limit, names, expected):
    running = [decoding(name) if name == "a" else make_request(name) for name in names]
    assert fill(MixedBatching(limit), running, Filler()).initial_budget == expected


def test_prefill_limit_starts_at_zero_without_minimum():
    assert MixedBatching(9, step_s=1.0).prefill_limit == 0


def test_drafts_count_as_decode_tokens_in_mixed_budget():
    request = decoding("a")
    request.spec_token_ids = [1, 2, 3]
    assert fill(MixedBatching(5), [request], Filler()).initial_budget == 9


def learned(seconds, *, limit=40, running="ab", short=True, count=10):
    """Return the prompt limit after a step of `seconds`, in which prompts got `count` - 1 tokens next to decodes."""
    batching = MixedBatching(100, 8, 1.0)
    batching._limit = float(limit)
    running = [decoding(name) if name == "a" else make_request(name) for name in running]
    plan = fill(batching, running, Filler(count, short=short), budget=200)
    batching.learn(plan, seconds)
    return batching.prefill_limit


@pytest.mark.parametrize(
    ("seconds", "expected"), [(1.0, 40), (2.0, 20), (1.6, 25), (9.0, 20), (0.9, 44), (0.8, 50), (0.1, 50), (0.0, 50)]
)
def test_prefill_limit_follows_step_time(seconds, expected):
    assert learned(seconds) == expected


def test_prefill_limit_has_bounds_and_learns_only_from_mixed_steps():
    assert learned(2.0, limit=10) == 8  # the lower bound
    assert learned(0.1, limit=90) == 100  # the upper bound
    assert learned(0.1, short=False) == 40  # prompts used all that they needed
    assert learned(2.0, short=False) == 20
    assert learned(2.0, running="b") == 40  # no request decoded
    assert learned(2.0, running="a", count=1) == 40  # no prompt got a token
    assert learned(2.0, running="a", count=2) == 20
    batching = MixedBatching(100, 8, 1.0)
    batching._limit = 40.0
    batching.learn(StepPlan(10, 10), 2.0)
    assert batching.prefill_limit == 40  # no token was computed
    batching = MixedBatching(100)
    plan = fill(batching, [decoding("a"), make_request("b")], Filler())
    batching.learn(plan, 9.0)
    assert batching.prefill_limit == 100  # no step time is requested


def test_prefill_first_serves_decodes_only_without_prompts():
    running = [decoding("a"), make_request("b"), make_request("c")]
    filler = Filler()
    fill(PrefillFirstBatching(), running, filler)
    assert filler.asked == [["b", "c"], None]
    filler = Filler()
    fill(PrefillFirstBatching(), running, filler, running[2:])
    assert filler.asked == [["b"], "c", ["c"], None]
    filler = Filler()
    fill(PrefillFirstBatching(), running[:1], filler)
    assert filler.asked == [[], None, ["a"]]


def test_prefill_first_counts_admitted_load_as_prompt():
    filler = Filler()
    plan = StepPlan(10, 10)
    plan.has_admitted = True
    PrefillFirstBatching().fill(plan, [decoding("a")], [], filler.grow, filler.admit)
    assert filler.asked == [[], None]
