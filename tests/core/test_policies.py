"""Order, victims and admission of each policy."""

from __future__ import annotations

import random

import pytest

from octavo.config import SchedulerConfig
from octavo.core.fair_share import FairRequestQueue, ServiceCounters
from octavo.core.policy import admit_in_turn, rank_by_deadline, rank_by_priority, should_swap
from octavo.core.step_plan import StepPlan
from octavo.data import events
from octavo.data.request import Request
from octavo.errors import ConfigError, PromptTooLongError, QueueFullError
from octavo.sampling_params import SamplingParams


def make_request(name, **options):
    request = Request(name, [1, 2, 3], SamplingParams(max_tokens=4), **options)
    request.arrival_index = int(name[1:])
    return request


def order_of_admission(core):
    return [event.request_id for event in core.log.of_type(events.RequestAdmitted) if not event.resumed]


@pytest.mark.parametrize("admission", ["optimistic", "reservation"])
@pytest.mark.parametrize("enable_chunked_prefill", [True, False])
@pytest.mark.parametrize("batching", ["mixed", "prefill_first"])
def test_prompt_chunks_of_step_stay_within_max_batch_prefill_tokens(
    make_core, admission, enable_chunked_prefill, batching
):
    """Four prompts of 30 tokens; a step may compute 10 of them. In mixed batches decodes do not wait."""
    core = make_core(
        max_batch_prefill_tokens=10,
        admission=admission,
        enable_chunked_prefill=enable_chunked_prefill,
        batching=batching,
        enable_prefix_caching=False,
    )
    requests = [core.add(name, 30, max_tokens=20) for name in "abcd"]
    of_prompts, num_waiting = [], []
    while core.scheduler.has_work():
        decoding = {each.request_id for each in requests if each.sequence.num_output_tokens} - core.finished.keys()
        given = core.step().num_scheduled_tokens
        of_prompts.append(sum(count for name, count in given.items() if name not in decoding))
        num_waiting.append(len(decoding - given.keys()))
    assert of_prompts == [10] * 12 + [0] * (len(of_prompts) - 12)
    assert core.finished == dict.fromkeys("abcd", "length")
    assert any(num_waiting) == (batching == "prefill_first")


def test_last_prompt_token_counts_against_prefill_limit(make_core):
    """The last token fits into a block that the request holds, as a decoded token would."""
    core = make_core(max_batch_prefill_tokens=3, enable_prefix_caching=False, max_num_seqs=2)
    core.add("a", 4, max_tokens=1)
    core.add("b", 4, max_tokens=1)
    given = [core.step().num_scheduled_tokens for _ in range(4)]
    assert given == [{"a": 3}, {"a": 1, "b": 2}, {"b": 2}, {}]


def test_no_token_is_reserved_for_prompt_after_prefill_limit_is_used(make_core):
    """The most important prompt uses up the limit, so drafts of later requests may use the rest of the budget."""
    options = {"max_batch_prefill_tokens": 4, "max_num_batched_tokens": 8, "enable_prefix_caching": False}
    core = make_core(policy="priority", max_num_seqs=3, **options)
    b = core.add("b", 1, max_tokens=9, priority=1)
    core.add("c", 20, max_tokens=1, priority=2)
    core.step()
    core.add("a", 20, max_tokens=1, priority=0)
    core.step()
    assert [each.request_id for each in core.scheduler.running] == ["a", "b", "c"]
    b.spec_token_ids = [1, 2, 3]
    assert core.scheduler.schedule().num_scheduled_tokens == {"a": 4, "b": 4}


def test_one_token_is_reserved_for_each_later_decode(make_core):
    """Of the budget of 8 the prompt takes 4, one token is kept for the later decode, and drafts use the other three."""
    options = {"max_batch_prefill_tokens": 4, "max_num_batched_tokens": 8, "enable_prefix_caching": False}
    core = make_core(policy="priority", max_num_seqs=4, **options)
    b = core.add("b", 1, max_tokens=9, priority=1)
    core.add("d", 1, max_tokens=9, priority=1)
    core.add("c", 20, max_tokens=1, priority=2)
    core.step()
    core.add("a", 20, max_tokens=1, priority=0)
    core.step()
    assert [each.request_id for each in core.scheduler.running] == ["a", "b", "d", "c"]
    b.spec_token_ids = [1, 2, 3]
    assert core.scheduler.schedule().num_scheduled_tokens == {"a": 4, "b": 3, "d": 1}


def test_preempted_prompt_returns_its_tokens_to_prefill_limit(make_core):
    """The new request is preempted in the step that scheduled its last chunk; its tokens are given to other
    requests.
    """
    core = make_core(
        num_blocks=6, max_batch_prefill_tokens=8, enable_prefix_caching=False, preemption="recompute", max_num_seqs=3
    )
    for name in "abc":
        core.add(name, 9, max_tokens=8)
    while core.scheduler.has_work():
        given = core.step().num_scheduled_tokens
        assert sum(count for count in given.values() if count > 1) <= 8
    assert core.finished == dict.fromkeys("abc", "length")


def test_resumed_request_with_cached_kv_uses_no_prefill_limit(make_core):
    """Its KV is found again, so it decodes, and the prompt of another request may use the whole limit."""
    core = make_core(max_batch_prefill_tokens=4)
    first = core.add("a", 8, max_tokens=9)
    while first.sequence.num_output_tokens < 5:  # 12 tokens of KV: 3 whole blocks
        core.step()
    core.scheduler.faults.preempt(["a"])
    core.step()
    core.add("b", 9, max_tokens=1)
    assert core.step().num_scheduled_tokens == {"a": 1, "b": 4}


@pytest.mark.parametrize(
    ("name", "value"), [("max_batch_total_tokens", 4096), ("waiting_served_ratio", 1.2), ("max_waiting_tokens", 3)]
)
def test_reservation_options_are_refused_without_reservation(name, value):
    with pytest.raises(ConfigError, match=rf"{name} = {value} has no effect .*--admission reservation"):
        SchedulerConfig(**{name: value})
    assert getattr(SchedulerConfig(admission="reservation", **{name: value}), name) == value
    assert SchedulerConfig(max_batch_prefill_tokens=7).max_batch_prefill_tokens == 7, "which every rule keeps to"


def test_ageing_raises_rank_of_waiting_request(make_core):
    important_later = make_request("r1", priority=0, arrival_time=100.0)
    waiting_long = make_request("r0", priority=3, arrival_time=0.0)
    assert rank_by_priority(waiting_long, 30.0) < rank_by_priority(important_later, 30.0)
    assert rank_by_priority(important_later, 60.0) < rank_by_priority(waiting_long, 60.0)
    assert rank_by_priority(important_later, None) < rank_by_priority(waiting_long, None)
    assert rank_by_priority(waiting_long, 0) < rank_by_priority(important_later, 0)


def test_F11_lowest_priority_finishes_under_stream_of_higher_priorities(make_core):
    core = make_core(max_num_seqs=1, policy="priority", ageing_s=5.0)
    core.add("low", 3, max_tokens=2, priority=5, arrival_time=0.0)
    for index in range(200):
        core.add(f"high{index}", 3, max_tokens=2, priority=0, arrival_time=float(index))
        core.step()
        if "low" in core.finished:
            break
    assert "low" in core.finished


def test_admission_follows_effective_priority(make_core):
    rng = random.Random(3)
    core = make_core(max_num_seqs=2, policy="priority", ageing_s=7.0, num_blocks=30)
    rank = core.scheduler.policy.rank
    for index in range(60):
        core.add(f"r{index}", rng.randint(1, 9), max_tokens=3, priority=rng.randrange(4), arrival_time=float(index))
        waiting = {request.request_id: rank(request) for request in core.scheduler.waiting}
        admitted = len(order_of_admission(core))
        core.step()
        for name in order_of_admission(core)[admitted:]:
            own = waiting.pop(name)
            assert all(own < other for other in waiting.values())
    core.run()


def test_long_prompt_yields_budget_to_more_important_request(make_core):
    core = make_core(policy="priority", ageing_s=None, max_num_batched_tokens=8)
    core.add("batch", 40, priority=5)
    assert core.step().num_scheduled_tokens == {"batch": 8}
    core.add("user", 10, priority=0)
    core.add("later", 30, priority=7)
    assert core.step().num_scheduled_tokens == {"user": 8}
    assert core.step().num_scheduled_tokens == {"user": 2, "batch": 6}  # batch comes before later
    assert core.step().num_scheduled_tokens == {"user": 1, "batch": 7}
    core.run()
    assert len(core.finished) == 3


def test_less_important_request_does_not_overtake_running_prompt(make_core):
    core = make_core(policy="priority", ageing_s=None, max_num_batched_tokens=8)
    core.add("batch", 40, priority=5)
    core.step()
    core.add("user", 3, priority=0)
    core.add("later", 30, priority=7)
    assert core.step().num_scheduled_tokens == {"user": 3, "batch": 5}
    assert core.step().num_scheduled_tokens == {"user": 1, "batch": 7}
    assert not core.log.of_type(events.RequestOutranked)
    core.run()
    assert order_of_admission(core) == ["batch", "user", "later"]


def test_request_is_not_deferred_for_block_of_less_important_request(make_core):
    core = make_core(policy="priority", ageing_s=None, long_prefill_token_threshold=8, block_size=4)
    prefix = list(range(24))
    core.add("owner", [*prefix, 77], priority=5)
    core.step()
    core.add("more", [*prefix, 78], priority=0)
    core.add("less", [*prefix, 79], priority=7)
    core.run()
    assert {event.request_id for event in core.log.of_type(events.RequestParked)} == {"less"}
    assert order_of_admission(core) == ["owner", "more", "less"]


def test_fair_policy_does_not_stop_running_prompt_for_other_tenants(make_core):
    core = make_core(policy="fair", max_num_batched_tokens=8)
    core.add("long", 60, tenant="a")
    core.step()
    for index in range(20):
        if "long" in core.finished:
            break
        core.add(f"new{index}", 8, max_tokens=1, tenant=f"t{index}")
        assert core.step().num_scheduled_tokens["long"] >= 1
    core.run()
    assert len(core.finished) >= 2


def test_fcfs_does_not_yield_budget_to_higher_priority(make_core):
    core = make_core(max_num_batched_tokens=8)
    core.add("a", 12, priority=5)
    core.step()
    core.add("b", 10, priority=0)
    assert core.step().num_scheduled_tokens == {"a": 4, "b": 4}


def test_stalled_request_blocks_admission_but_not_running_requests(make_core):
    """The running requests may hold the blocks that the stalled one needs. Without progress none of them would end."""
    core = make_core()
    stalled, holder, last = (core.add(name, 9) for name in ("stalled", "holder", "last"))
    plan, admitted = StepPlan(16, 16), []

    def grow(plan, requests):
        for request in requests:
            if request is not stalled:
                plan.give(request, 1, [])

    admit_in_turn(plan, [stalled, holder, last], grow, lambda plan, before: admitted.append(before))
    assert list(plan.num_tokens) == ["holder", "last"]
    assert admitted == [stalled]


def test_outranked_request_waits_for_blocks_without_preempting(make_core):
    core = make_core(policy="priority", ageing_s=None, max_num_batched_tokens=12, num_blocks=5, block_size=4)
    core.add("batch", 18, priority=5, max_tokens=2)
    core.step()
    core.add("user", 3, priority=0, max_tokens=1)  # takes one of two free blocks; the rest of batch's prompt needs both
    assert core.step().num_scheduled_tokens == {"user": 3}
    assert [event.request_id for event in core.log.of_type(events.RequestOutranked)] == ["batch"]
    assert not core.log.of_type(events.RequestPreempted)
    core.run()
    assert core.finished == {"user": "length", "batch": "length"}


def test_deadline_policy_serves_earliest_deadline_first_with_ageing(make_core):
    urgent = make_request("r1", arrival_time=10.0, deadline=12.0)
    relaxed = make_request("r0", arrival_time=0.0, deadline=500.0)
    none = make_request("r2", arrival_time=1.0)
    assert rank_by_deadline(urgent, 60.0) < rank_by_deadline(relaxed, 60.0) < rank_by_deadline(none, 60.0)
    assert rank_by_deadline(none, None) > rank_by_deadline(relaxed, None)
    core = make_core(max_num_seqs=1, policy="deadline", ageing_s=None)
    core.add("first", 3, max_tokens=3)
    core.step()
    core.add("late", 3, deadline=5e6)
    core.add("soon", 3, deadline=4e6, max_tokens=1)
    core.run()
    assert order_of_admission(core) == ["first", "soon", "late"]


def test_request_past_its_deadline_ends_with_error(make_core):
    core = make_core(max_num_seqs=1)
    core.add("long", 3, max_tokens=50)
    core.add("waits", 3, deadline=8.0)
    core.add("patient", 3, max_tokens=1)
    core.run()
    assert core.finished == {"waits": "error", "long": "length", "patient": "length"}


def test_fair_share_admits_least_served_tenant(make_core):
    core = make_core(max_num_seqs=1, policy="fair")
    for index in range(20):
        core.add(f"flood{index}", 4, max_tokens=4, tenant="flood")
    for index in range(3):
        core.add(f"small{index}", 4, max_tokens=4, tenant="small")
    core.run()
    assert [name[:5] for name in order_of_admission(core)[:6]] == ["flood", "small", "flood", "small", "flood", "small"]


def test_fair_share_serves_requests_of_one_tenant_by_priority(make_core):
    core = make_core(max_num_seqs=1, policy="fair")
    core.add("first", 3, max_tokens=20, tenant="a")
    core.step()
    core.add("later", 3, max_tokens=2, tenant="a", priority=5)
    core.step()  # the tenant receives service between the two arrivals
    core.add("urgent", 3, max_tokens=2, tenant="a", priority=0)
    core.run()
    assert order_of_admission(core) == ["first", "urgent", "later"]


def test_fair_share_gives_no_credit_for_idle_time():
    counters = ServiceCounters()
    queue = FairRequestQueue(counters)
    queue.add_request(make_request("r0", tenant="busy"))
    counters.charge_output("busy", 1000)
    queue.add_request(make_request("r1", tenant="idle"))
    assert counters.served("idle") == counters.served("busy")


@pytest.mark.turn(12)
def test_fair_share_keeps_service_bound_while_one_tenant_floods(make_core):
    """A simulated hour, checked by events: one tenant sends 50 times as much, and the other gets 90 % of its half."""
    rng = random.Random(5)
    core = make_core(max_num_seqs=4, policy="fair", num_blocks=200)
    longest_prompt, longest_output = 20, 10
    counters = core.scheduler.policy.counters
    bound = counters.bound(longest_prompt, longest_output, 4)
    served = {"flood": 0.0, "small": 0.0}
    tenants: dict[str, str] = {}
    num_waiting = {"flood": 0, "small": 0}
    number = read = 0
    for step in range(3600):
        wanted = {"flood": 50 if step % 6 == 0 and num_waiting["flood"] < 400 else 0, "small": 8 - num_waiting["small"]}
        for tenant, count in wanted.items():
            for _ in range(max(count, 0)):
                number += 1
                ids = [rng.randrange(1 << 40) for _ in range(rng.randint(1, longest_prompt))]
                tenants[f"r{number}"] = tenant
                core.add(f"r{number}", ids, max_tokens=rng.randint(1, longest_output), tenant=tenant)
        core.step()
        for event in core.log.events[read:]:
            if isinstance(event, events.RequestQueued):
                num_waiting[event.tenant] += 1
            elif isinstance(event, events.RequestAdmitted):
                num_waiting[tenants[event.request_id]] -= 1
                served[tenants[event.request_id]] += event.num_tokens - event.num_cached_tokens
            elif isinstance(event, events.StepCompleted):
                for name, count in event.num_new_tokens.items():
                    served[tenants[name]] += 2 * count
        read = len(core.log.events)
        assert num_waiting["small"] > 0  # always backlogged
        assert abs(served["flood"] - served["small"]) <= bound
    assert served["small"] >= 0.9 * sum(served.values()) / 2
    assert served["flood"] > 10_000


@pytest.mark.turn(12)
def test_fair_share_follows_weights(make_core):
    """Two tenants always have waiting requests; one with weight 3 is served three times as much, within the bound.
    Checked by events.
    """
    rng = random.Random(7)
    core = make_core(max_num_seqs=4, policy="fair", num_blocks=200)
    weights = {"heavy": 3.0, "light": 1.0}
    served, tenants = dict.fromkeys(weights, 0.0), {}
    bound = core.scheduler.policy.counters.bound(20, 10, 4, least_weight=1.0)
    number = read = 0
    for _ in range(2000):
        waiting = [request.tenant for request in core.scheduler.waiting]
        for tenant, weight in weights.items():
            for _ in range(8 - waiting.count(tenant)):
                number += 1
                tenants[f"r{number}"] = tenant
                ids = [rng.randrange(1 << 40) for _ in range(rng.randint(1, 20))]
                options = {"tenant": tenant, "tenant_weight": weight}
                core.add(f"r{number}", ids, max_tokens=rng.randint(1, 10), **options)
        core.step()
        for event in core.log.events[read:]:
            if isinstance(event, events.RequestAdmitted):
                served[tenants[event.request_id]] += event.num_tokens - event.num_cached_tokens
            elif isinstance(event, events.StepCompleted):
                for name, count in event.num_new_tokens.items():
                    served[tenants[name]] += 2 * count
        read = len(core.log.events)
        assert abs(served["heavy"] / 3 - served["light"]) <= bound
    assert served["light"] > 5_000
    assert served["heavy"] / served["light"] == pytest.approx(3.0, rel=0.02)


def test_fair_share_resets_counters_after_idleness(make_core):
    core = make_core(max_num_seqs=1, policy="fair")
    core.add("a0", 3, max_tokens=300, tenant="a")
    core.add("a1", 3, max_tokens=300, tenant="a")
    for _ in range(200):
        core.step()
    for name in ("a0", "a1"):
        core.scheduler.abort_request(name)
    core.run()
    for index in range(20):
        core.add(f"b{index}", 3, max_tokens=5, tenant="b")
    core.add("a2", 3, max_tokens=5, tenant="a")
    core.run()
    assert order_of_admission(core).index("a2") <= 4
    assert [core.scheduler.policy.counters.served(tenant) for tenant in "ab"] == [0.0, 0.0]


def test_F28_queue_limits_are_checked_before_request_is_added(make_core):
    core = make_core(max_num_seqs=1, max_num_waiting=2, max_num_waiting_tokens=20)
    core.add("a", 12)
    with pytest.raises(QueueFullError, match="max_num_waiting_tokens"):
        core.add("b", 9)
    core.add("c", 8)
    with pytest.raises(QueueFullError, match="max_num_waiting"):
        core.add("d", 1)
    assert list(core.scheduler.requests) == ["a", "c"]
    assert core.scheduler.waiting_requests.num_tokens == 20
    core.run()
    assert core.scheduler.waiting_requests.num_tokens == 0


def test_F8_reservation_refuses_request_above_max_batch_total_tokens(make_core):
    core = make_core(admission="reservation", max_batch_total_tokens=30)
    with pytest.raises(PromptTooLongError, match="max_batch_total_tokens"):
        core.add("a", 20, max_tokens=11)
    core.add("b", 20, max_tokens=10)
    core.run()
    assert core.finished == {"b": "length"}


def test_reservation_never_preempts(make_core):
    core = make_core(admission="reservation", num_blocks=10, max_num_seqs=8)
    for index in range(12):
        core.add(f"r{index}", 6, max_tokens=10)
    core.run()
    assert set(core.finished.values()) == {"length"}
    assert not core.log.of_type(events.RequestPreempted)
    assert core.scheduler.admission.num_reserved_total == 0


def test_gathering_under_reservation_ends_after_max_waiting_tokens(make_core):
    core = make_core(admission="reservation", waiting_served_ratio=2.0, max_waiting_tokens=3, max_num_seqs=4)
    core.add("a", 3, max_tokens=30)
    core.step()
    core.add("b", 3, max_tokens=2)
    gathered = [("b" in core.step().num_scheduled_tokens) for _ in range(5)]
    assert gathered.index(True) == 3
    assert core.log.of_type(events.RequestBlocked)[0].reason == events.WaitReason.GATHERING


def test_prefill_first_never_mixes_prompts_and_decodes(make_core):
    core = make_core(batching="prefill_first", max_num_batched_tokens=10, max_num_seqs=4)
    for index in range(6):
        core.add(f"r{index}", 7, max_tokens=4)
    for _ in range(60):
        scheduled = core.scheduler.schedule()
        kinds = {
            core.scheduler.requests[name].sequence.num_output_tokens == 0 for name in scheduled.num_scheduled_tokens
        }
        assert len(kinds) <= 1
        core.scheduler.update_from_output(scheduled, core.compute(scheduled))
    assert not core.scheduler.requests


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"preemption": "recompute"}, False),
        ({"preemption": "swap"}, True),
        ({"preemption": "auto"}, True),
        ({"preemption": "auto", "swap_block_cost_tokens": 20.0}, False),
    ],
)
def test_victim_is_swapped_if_cheaper_than_recompute(options, expected):
    assert should_swap(SchedulerConfig(**options), num_tokens=40, num_blocks=3) is expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("policy", "best"),
        ("admission", "maybe"),
        ("batching", "both"),
        ("preemption", "never"),
        ("ageing_s", -1.0),
        ("max_num_preemptions", -1),
        ("max_batch_total_tokens", 0),
        ("waiting_served_ratio", float("nan")),
        ("max_num_waiting_tokens", "many"),
    ],
)
def test_invalid_scheduler_option_is_named_in_error(name, value):
    with pytest.raises(ConfigError, match="scheduling policy|" + name):
        SchedulerConfig(**{name: value})


class WaitingFirst:
    """The order that docs/why.md rejects: admit waiting requests first, with one token kept per running request."""

    prefill_limit = 0

    def fill(self, plan, running, outranked, grow, admit):
        plan.budget -= len(running)
        admit(plan, None)
        plan.budget += len(running)
        grow(plan, running)

    def learn(self, plan, seconds):
        pass


def steps_to_the_first_token_of_a_long_prompt(core):
    core.add("long", 1000, max_tokens=1)
    for step in range(1, 1000):
        core.add(f"short{step}", 60, max_tokens=1)
        core.step()
        if "long" in core.finished:
            return step
    raise AssertionError("it starves")


def preempted_and_computed(core):
    core.add("long", 500, max_tokens=4)
    for index in range(20):
        core.add(f"short{index}", 60, max_tokens=20)
        core.step()
    core.run()
    num_tokens = sum(event.num_tokens for event in core.log.of_type(events.StepScheduled))
    return len(core.log.of_type(events.RequestPreempted)), num_tokens


@pytest.mark.parametrize(
    ("batching", "steps", "cost"),
    [(None, 16, (0, 2083)), (WaitingFirst(), 250, (6, 2422))],
    ids=["mixed", "waiting first"],
)
def test_serving_running_before_waiting_requests_costs_fewer_steps(make_core, batching, steps, cost):
    cores = [make_core(max_num_batched_tokens=64, block_size=16, num_blocks=count) for count in (200, 40)]
    for core in cores:
        core.scheduler.batching = batching or core.scheduler.batching
    assert steps_to_the_first_token_of_a_long_prompt(cores[0]) == steps
    assert preempted_and_computed(cores[1]) == cost
